"""Curves over steps: step time, loss and its kind, memory, logged numbers; in buckets.

A bucket has the lowest and the highest value of its steps beside their mean, so that a spike of one
step is never smoothed away. Values are those of the analyses: a step's loss is the median over
ranks that the report has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.signals import read_scalars
from meshscope.analyze.study import Study
from meshscope.analyze.training.convergence import LEARNING_RATE, JobSeries
from meshscope.core.unavailable import Unavailable, known
from meshscope.page.heat.cells import MEMORY_COLUMNS, read_memory
from meshscope.store.read.arrays import Floats, Int64s

_MAX_POINTS = 2000
MAX_LOGGED = 40
"""Names that a program or framework logged."""
_MAX_BAD_STEPS = 500


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One quantity over steps; one entry per bucket of consecutive steps."""

    key: str
    """`step`, `loss`, `grad_norm`, `lr`, `loss 2`, `rss_bytes`, or a logged name."""
    group: str
    """`time`, `training`, `memory` or `logged`."""
    unit: str
    """`ns`, `bytes`, or empty for a plain number."""
    source: str
    """What the mean is of: `median of 8 ranks`, `rank 3, the fullest`, `rank 0`."""
    num_values: int
    """Steps with a value."""
    step: Int64s
    """First step of each bucket."""
    low: Floats
    """Lowest of the bucket's steps, and of all ranks where `is_of_ranks`."""
    mean: Floats
    high: Floats
    is_of_ranks: bool
    bad_steps: tuple[int, ...]
    """Steps with NaN or Inf on any rank, the first 500."""


def list_curves(study: Study) -> tuple[Curve, ...]:
    """All curves that the run has."""
    drawers = (_draw_steps, _draw_signals, _draw_memory, _draw_logged)
    return tuple(curve for draw in drawers for curve in draw(study))


def _draw_steps(study: Study) -> Iterator[Curve]:
    steps = study.steps
    if steps.num_steps:
        value = steps.duration_ns.astype(np.float64)
        source = f"median of {len(study.ranks)} ranks"
        yield _bucket("step", "time", source, steps.step, value, unit="ns")


def _draw_signals(study: Study) -> Iterator[Curve]:
    found = known(study.convergence)
    if found is None:
        return
    usual = {"loss": found.loss, "grad_norm": found.grad_norm, LEARNING_RATE: found.learning_rate}
    series: dict[str, JobSeries | Unavailable] = {**usual, **found.further}
    for key, one in series.items():
        if isinstance(one, Unavailable) or not len(one):
            continue
        source = f"median of {one.num_ranks} ranks" if one.num_ranks > 1 else "one rank"
        band = (one.low, one.high) if one.num_ranks > 1 else None
        yield _bucket(
            key,
            "training",
            source,
            one.step,
            one.value,
            band=band,
            bad_steps=one.bad_steps,
        )


def _draw_memory(study: Study) -> Iterator[Curve]:
    """Of the rank that needs most, with all ranks as the band."""
    for column in MEMORY_COLUMNS:
        found = read_memory(study, column)
        if isinstance(found, Unavailable):
            continue
        fullest = int(np.nanargmax(np.nanmax(found.value, axis=1)))
        has_own = np.isfinite(found.value[fullest])
        value = found.value[:, has_own]
        # A step at which a rank has no sample yet shows its last one: a band of fewer ranks would
        # look as if they had met.
        value = _carry(value)
        yield _bucket(
            column,
            "memory",
            f"rank {found.ranks[fullest]}, the fullest",
            found.steps[has_own],
            value[fullest],
            unit="bytes",
            band=(np.nanmin(value, axis=0), np.nanmax(value, axis=0)),
        )


def _carry(value: Floats) -> Floats:
    """[rank, step], with each rank's last known value where it has none."""
    index = np.where(np.isfinite(value), np.arange(value.shape[1]), 0)
    return value[np.arange(len(value))[:, None], np.maximum.accumulate(index, axis=1)]


def _draw_logged(study: Study) -> Iterator[Curve]:
    """As the lowest rank logged them that logged any; names that were logged once are no curve."""
    logged = known(study.logged)
    names = {} if logged is None else {one.recorded_name: one for one in logged[:MAX_LOGGED]}
    for rank in sorted(study.attempt.ranks):
        if not names:
            return
        series = read_scalars(study.attempt.ranks[rank], frozenset(names))
        for name, one in series.items():
            if name not in names:
                continue
            is_good = np.isfinite(one.value)
            step, first = np.unique(one.step[is_good][::-1], return_index=True)
            if len(step) > 1:
                value = one.value[is_good][::-1][first]
                bad = np.unique(one.step[~is_good])
                yield _bucket(name, "logged", f"rank {rank}", step, value, bad_steps=bad)
        if series:
            return


def _bucket(
    key: str,
    group: str,
    source: str,
    step: Int64s,
    value: Floats,
    *,
    unit: str = "",
    band: tuple[Floats, Floats] | None = None,
    bad_steps: Int64s | None = None,
) -> Curve:
    num_points = max(min(len(step), _MAX_POINTS), 1)
    edges = np.arange(num_points) * len(step) // num_points
    low, high = (value, value) if band is None else band
    counts = np.diff(np.append(edges, len(step)))
    return Curve(
        key=key,
        group=group,
        unit=unit,
        source=source,
        num_values=len(step),
        step=step[edges],
        low=np.minimum.reduceat(low, edges),
        mean=np.add.reduceat(value / np.repeat(counts, counts), edges),
        high=np.maximum.reduceat(high, edges),
        is_of_ranks=band is not None,
        bad_steps=() if bad_steps is None else tuple(bad_steps[:_MAX_BAD_STEPS].tolist()),
    )
