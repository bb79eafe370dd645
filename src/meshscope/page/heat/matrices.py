"""The matrices of one page, as many as its size allows, and what is left out of them.

Metrics come in order of use; one that no longer fits is left out, and named. Where all ranks or all
steps do not fit at full resolution, the ranks that stand out most do, and so do the surroundings of
findings.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.page.heat.cells import METRICS, Cells, Metric, list_phases, measure_cells
from meshscope.page.heat.matrix import Matrix, Window, draw_matrix, pack_matrix
from meshscope.store.read.arrays import Int64s

ORDER = ("excess", "wait", "transfer", "work", "period", "caused", "memory", "rise")
"""Of metrics, the most useful first; then phases of the excess."""
_PICTURE = Window(num_rows=1024, num_columns=1024)
_NUM_LENS_ROWS = 32
_LENS_COLUMNS = 10_000
_WORST_SHARE = 0.06
"""Of a rank's steps: their mean says how far it stands out."""
_AROUND_STEPS = 200
_AROUND_RANKS = 64
_MAX_AROUND = 8
"""Findings with surroundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFacts:
    """A metric of the heat map."""

    found: Metric
    reason: str | None
    """Why the page has none; null where it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Steps that were recorded and are in no matrix and no budget."""

    first_step: int
    last_step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrices:
    """Rank by step."""

    metrics: tuple[MetricFacts, ...]
    """The most useful first."""
    phases: tuple[str, ...]
    """Phases that the excess has layers of; "" is work outside of all phases."""
    left_out: tuple[LeftOut, ...]
    layers: tuple[Matrix, ...]
    """All ranks and steps."""
    parts: tuple[Matrix, ...]
    """Parts of them in full: the ranks that stand out most, and around findings."""


def draw_matrices(
    study: Study, findings: Iterable[Finding], *, max_bytes: int
) -> tuple[Matrices, list[str]]:
    """The matrices, and sentences on what did not fit."""
    recorded = study.steps.step
    excess = measure_cells(study, "excess")
    parts = [] if isinstance(excess, Unavailable) else list(_draw_parts(excess, recorded, findings))
    num_bytes = sum(map(_count_bytes, parts))
    layers: list[Matrix] = []
    facts: list[MetricFacts] = []
    dropped: list[str] = []
    for key in ORDER:
        cells = measure_cells(study, key)
        if isinstance(cells, Unavailable):
            facts.append(MetricFacts(found=METRICS[key], reason=cells.reason))
            continue
        layer = pack_matrix(draw_matrix(cells, recorded, _PICTURE))
        num_bytes += _count_bytes(layer)
        if dropped or num_bytes > max_bytes:
            dropped.append(cells.metric.label)
            facts.append(MetricFacts(found=METRICS[key], reason="left out to keep the page small"))
            continue
        layers.append(layer)
        facts.append(MetricFacts(found=METRICS[key], reason=None))
    phases = []
    for phase in () if dropped else list_phases(study):
        one = known(measure_cells(study, "excess", phase))
        if one is None:
            continue
        layer = pack_matrix(draw_matrix(one, recorded, _PICTURE))
        num_bytes += _count_bytes(layer)
        if num_bytes > max_bytes:
            dropped.append("the excess by phase")
            break
        layers.append(layer)
        phases.append(phase)
    matrices = Matrices(
        metrics=tuple(facts),
        phases=tuple(phases),
        left_out=tuple(_list_left_out(study)),
        layers=tuple(layers),
        parts=tuple(parts),
    )
    return matrices, [f"the heat map of {name}" for name in dropped]


def _count_bytes(matrix: Matrix) -> int:
    return len(matrix.largest_layer) + len(matrix.mean_layer or "")


def _draw_parts(excess: Cells, recorded: Int64s, findings: Iterable[Finding]) -> Iterator[Matrix]:
    """Full resolution of what stands out, where the whole picture has less."""
    num_ranks, num_steps = excess.value.shape
    if num_ranks <= _PICTURE.num_rows and num_steps <= _PICTURE.num_columns:
        return
    lens = _choose_outstanding(excess)
    yield pack_matrix(
        draw_matrix(_take_ranks(excess, lens), recorded, Window(num_columns=_LENS_COLUMNS))
    )
    urgent = [one for one in findings if one.severity > Severity.LOW and one.first_step is not None]
    for one in urgent[:_MAX_AROUND]:
        first = one.first_step or 0
        rows = _find_neighbours(excess, one.ranks)
        window = Window(
            steps=(first - _AROUND_STEPS, first + _AROUND_STEPS), num_columns=2 * _AROUND_STEPS + 1
        )
        yield pack_matrix(draw_matrix(_take_ranks(excess, rows), recorded, window))


def _choose_outstanding(excess: Cells) -> Int64s:
    """Rows with the highest mean of their worst steps, in order of rank."""
    num_worst = max(int(excess.value.shape[1] * _WORST_SHARE), 1)
    value = np.nan_to_num(excess.value, nan=0.0)
    worst = np.partition(value, -num_worst, axis=1)[:, -num_worst:].mean(axis=1)
    return np.sort(np.argsort(-worst, kind="stable")[:_NUM_LENS_ROWS])


def _find_neighbours(excess: Cells, ranks: tuple[int, ...]) -> Int64s:
    """Rows of these ranks and of those around the first."""
    named = np.array(excess.ranks)
    at = int(np.searchsorted(named, ranks[0])) if ranks else 0
    first = max(0, min(at - _AROUND_RANKS // 2, len(named) - _AROUND_RANKS))
    near = np.arange(first, min(first + _AROUND_RANKS, len(named)))
    own = np.flatnonzero(np.isin(named, np.array(ranks[:_AROUND_RANKS], dtype=np.int64)))
    return np.union1d(near, own)


def _take_ranks(cells: Cells, rows: Int64s) -> Cells:
    return Cells(
        metric=cells.metric,
        phase=cells.phase,
        ranks=tuple(np.array(cells.ranks)[rows].tolist()),
        steps=cells.steps,
        value=cells.value[rows],
    )


def _list_left_out(study: Study) -> Iterator[LeftOut]:
    steps, timeline = study.steps, study.timeline
    if isinstance(timeline, Unavailable):
        reasons = np.full(steps.num_steps, timeline.reason, dtype=object)
    else:
        sampled = "not analysed, to stay within memory"
        partial = "not whole on all ranks"
        reasons = np.full(steps.num_steps, sampled if timeline.num_left_out else partial, object)
        reasons[steps.is_profiled] = "profiled"
        reasons[: steps.num_warmup] = "warm-up"
        reasons[np.isin(steps.step, timeline.steps)] = ""
    open_: LeftOut | None = None
    for step, reason in zip(steps.step.tolist(), reasons.tolist(), strict=True):
        if open_ is not None and reason == open_.reason and step == open_.last_step + 1:
            open_ = LeftOut(first_step=open_.first_step, last_step=step, reason=reason)
            continue
        if open_ is not None:
            yield open_
        open_ = LeftOut(first_step=step, last_step=step, reason=reason) if reason else None
    if open_ is not None:
        yield open_
