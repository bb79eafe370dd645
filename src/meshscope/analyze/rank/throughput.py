"""Steps, tokens and samples per second, gaps included.

A rank's rate is over its wall clock from its first step's start to its last step's end. Tokens
are the scalar `tokens` the program logged, each value taken as tokens since the value before,
else the step table's `input_tokens`, which the recorder counts from the model's integer inputs.
Samples are the scalar `samples`, else `input_samples`: the first dimension of the model's input.
The job's tokens/s is the sum over the ranks at tp 0 and pp 0: tensor-parallel ranks and pipeline
stages work on the same tokens, the other axes on different ones. Context-parallel ranks work on
parts of the same samples: of those the ranks at cp 0 count.

Wrong when a program logs the job's tokens on every rank rather than the rank's own, and for samples
where the first dimension is not the batch (time first, packed sequences, graphs). With several
losses a sample may pass the model several times a step: then samples are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshscope.analyze.rank.phases import StepTimes
from meshscope.analyze.rank.signals import SECOND_LOSS, ScalarSeries
from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.rank_ranges import abbreviate_ranks

TOKEN_SOURCES: dict[str, str] = {
    "tokens": "logged by the program as tokens",
    "input_tokens": "counted by the recorder from the model's integer inputs",
}
"""Sources of token counts, best first: a scalar, then a column of the step table."""
SAMPLE_SOURCES: dict[str, str] = {
    "samples": "logged by the program as samples",
    "input_samples": "counted by the recorder: the first dimension of the model's input",
}
_SHARED_AXES = {"tokens": (Axis.TP, Axis.PP), "samples": (Axis.TP, Axis.PP, Axis.CP)}
"""Axes along which ranks work on the same tokens or samples."""
_SOURCES = {"tokens": TOKEN_SOURCES, "samples": SAMPLE_SOURCES}
_MAX_LACKING_LISTED = 1000
"""The most ranks without tokens to list; a header may claim a million ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRate:
    """Tokens per second of one rank, or of the job."""

    tokens_per_s: float
    source: str
    """One of TOKEN_SOURCES."""
    num_steps: int
    """Steps that have a value."""
    num_nonfinite: int
    """Values left out because they are NaN or infinite."""
    num_ranks: int = 1
    """Ranks summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRate:
    """Samples per second of the job; see `TokenRate`."""

    samples_per_s: float
    source: str
    """One of SAMPLE_SOURCES."""
    num_steps: int
    num_nonfinite: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    per_s: float
    num_steps: int
    num_nonfinite: int


RankRates = Mapping[str, _Rate]
"""Per entry of TOKEN_SOURCES and SAMPLE_SOURCES that the rank has."""


def measure_steps_per_s(steps: StepTimes) -> float | Unavailable:
    """Finished steps over the time from the first one's start to the last one's end."""
    span_ns = stepping_ns(steps)
    return steps.num_finished * 1e9 / span_ns if span_ns > 0 else Unavailable("no step finished")


def stepping_ns(steps: StepTimes) -> int:
    """From the first step's start to the last step's end; 0 without steps."""
    return int(steps.end_ns[-1]) - int(steps.start_ns[0]) if len(steps) else 0


def measure_rates(
    steps: StepTimes, step_table: Columns, scalars: Mapping[str, ScalarSeries]
) -> RankRates:
    """The rank's rates; `scalars` has what it logged."""
    span_ns = stepping_ns(steps)
    rates: dict[str, _Rate] = {}
    found: dict[str, ScalarSeries | None] = {
        "tokens": scalars.get("tokens"),
        "input_tokens": _count_inputs(step_table, "input_tokens", least=0),
        "samples": scalars.get("samples"),
    }
    if SECOND_LOSS not in scalars:
        found["input_samples"] = _count_inputs(step_table, "input_samples", least=1)
    for name, series in found.items():
        if series is None or span_ns <= 0:
            continue
        in_steps = (series.step >= steps.step.min()) & (series.step <= steps.step.max())
        finite = in_steps & np.isfinite(series.value)
        num_logged = _count_distinct(series.step[finite])
        if num_logged:
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # absurd values: the report names inf
                total = float(series.value[finite].sum())
            if name.startswith("input_"):
                total *= _stretch_over_first(series.step[finite], steps.step)
            rates[name] = _Rate(
                # Steps that are no longer there had about as much.
                per_s=total * (steps.num_finished / len(steps)) * 1e9 / span_ns,
                num_steps=num_logged,
                num_nonfinite=int(np.count_nonzero(in_steps)) - int(np.count_nonzero(finite)),
            )
    return rates


def _stretch_over_first(counted: Int64s, steps: Int64s) -> float:
    """What counts of the other steps grow by where the first one has none: compiled modules tell
    who calls them from the second step on, and the first step's time is in the rate."""
    is_first_alone = len(steps) > 1 and counted.min() == steps[1]
    return len(steps) / (len(steps) - 1) if is_first_alone else 1.0


def pick_rank_tokens(rates: RankRates) -> TokenRate | Unavailable:
    """The logged rate, else the one the recorder counted."""
    name = next((name for name in TOKEN_SOURCES if name in rates), None)
    if name is None:
        return Unavailable("the rank logged no tokens and its model has no integer inputs")
    return _as_tokens(name, [rates[name]])


def sum_tokens(
    per_rank: Mapping[int, RankRates], layout: Layout | Unavailable, world_size: int
) -> TokenRate | Unavailable:
    if world_size == 1:
        return pick_rank_tokens(per_rank.get(0, {}))
    found = _find_counted("tokens", per_rank, layout)
    return found if isinstance(found, Unavailable) else _as_tokens(*found)


def sum_samples(
    per_rank: Mapping[int, RankRates], layout: Layout | Unavailable, world_size: int
) -> SampleRate | Unavailable:
    if world_size == 1:
        rates = per_rank.get(0, {})
        name = next((name for name in SAMPLE_SOURCES if name in rates), None)
        if name is None:
            return Unavailable(
                "the program logged no samples, and the model's batch is not known, or passes "
                "for several losses: log samples=..."
            )
        found: tuple[str, list[_Rate]] | Unavailable = (name, [rates[name]])
    else:
        found = _find_counted("samples", per_rank, layout)
    if isinstance(found, Unavailable):
        return found
    name, counted = found
    return SampleRate(
        samples_per_s=sum(rate.per_s for rate in counted),
        source=SAMPLE_SOURCES[name],
        num_steps=max(rate.num_steps for rate in counted),
        num_nonfinite=sum(rate.num_nonfinite for rate in counted),
        num_ranks=len(counted),
    )


def _as_tokens(name: str, rates: list[_Rate]) -> TokenRate:
    return TokenRate(
        tokens_per_s=sum(rate.per_s for rate in rates),
        source=TOKEN_SOURCES[name],
        num_steps=max(rate.num_steps for rate in rates),
        num_nonfinite=sum(rate.num_nonfinite for rate in rates),
        num_ranks=len(rates),
    )


def _find_counted(
    unit: str, per_rank: Mapping[int, RankRates], layout: Layout | Unavailable
) -> tuple[str, list[_Rate]] | Unavailable:
    """Of ranks that work on different tokens or samples: where their counts are from, and those."""
    if isinstance(layout, Unavailable):
        return Unavailable(f"which ranks share {unit} is not known: {layout.reason}")
    counted = [rank for rank in sorted(per_rank) if _is_counted(layout, rank, unit)]
    num_counted = layout.world_size
    for axis in _SHARED_AXES[unit]:
        num_counted //= layout.degree(axis)
    for name in _SOURCES[unit]:
        rates = [per_rank[rank][name] for rank in counted if name in per_rank[rank]]
        if len(rates) == num_counted:
            return name, rates
    has_any = [not _SOURCES[unit].keys().isdisjoint(per_rank[rank]) for rank in counted]
    if sum(has_any) == num_counted:
        return Unavailable(f"some ranks log {unit} and others have only input_{unit}")
    lacking = _list_lacking(per_rank, layout, unit)
    ranks = f"rank {lacking}" if lacking.isdigit() else f"ranks {lacking}"
    return Unavailable(f"no {unit} were logged or counted on {ranks}")


def _is_counted(layout: Layout, rank: int, unit: str) -> bool:
    """Whether the rank is the first along the axes that share."""
    return all(
        rank // layout.stride(axis) % layout.degree(axis) == 0 for axis in _SHARED_AXES[unit]
    )


def _list_lacking(per_rank: Mapping[int, RankRates], layout: Layout, unit: str) -> str:
    """The first ranks that should have counted and did not."""
    lacking = (
        rank
        for rank in range(layout.world_size)
        if _SOURCES[unit].keys().isdisjoint(per_rank.get(rank, {}))
        and _is_counted(layout, rank, unit)
    )
    text = abbreviate_ranks(islice(lacking, _MAX_LACKING_LISTED))
    is_cut = next(lacking, None) is not None
    return text if not is_cut or text.endswith("…") else f"{text} …"


def _count_inputs(step_table: Columns, name: str, *, least: int) -> ScalarSeries | None:
    """A column of the step table, where it is known."""
    if name not in step_table:
        return None
    counts = int64_column(step_table, name)
    is_counted = counts >= least
    return ScalarSeries(
        step=int64_column(step_table, "step")[is_counted],
        value=counts[is_counted].astype(np.float64),
    )


def _count_distinct(steps: Int64s) -> int:
    if len(steps) and bool((steps[1:] >= steps[:-1]).all()):  # as a rank logs them
        return 1 + int(np.count_nonzero(steps[1:] != steps[:-1]))
    return len(np.unique(steps))
