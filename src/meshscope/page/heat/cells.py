"""One number per rank and step, by metric: what the heat map and the mesh show.

Every metric is taken from an analysis of the study. `excess` is the work that slow ranks are found
by (`Study.compared_work`) less the median of the rank's other peers; a rank without peers has none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.communication.last_arrivers import sum_costs_by_step
from meshscope.analyze.rank.not_in_traces import explain_no_memory
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.peer_work import sum_compared
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.core.unavailable import Missing, Unavailable, known, need, or_unavailable
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.columns import int64_column

_FIRST_SHARE = 0.1
"""Of the steps: those that a rank's later ones are compared with."""
_MIN_FIRST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a cell can say."""

    key: str
    label: str
    denial: str
    """What the number is not."""
    unit: str = "ns"
    """`ns` or `bytes`."""
    has_phases: bool = False
    """Whether it can be asked for one phase."""
    is_excess: bool = False
    """Above something: 0 is usual, and more is worse."""


METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric(
            key="excess",
            label="own work above peers",
            denial="step time, which waiting makes alike on all ranks; faster than peers is 0",
            has_phases=True,
            is_excess=True,
        ),
        Metric(
            key="rise",
            label="own work above its own first steps",
            denial="a comparison with other ranks; what all ranks share rises here, too",
            has_phases=True,
            is_excess=True,
        ),
        Metric(
            key="work",
            label="own work",
            denial="busy time of a device: it is what no operation held up",
            has_phases=True,
        ),
        Metric(
            key="caused",
            label="caused wait",
            denial="what the job would gain: others may have computed meanwhile",
            is_excess=True,
        ),
        Metric(
            key="wait",
            label="exposed wait",
            denial="the fault of the rank that waits: look at those that do not",
        ),
        Metric(
            key="transfer",
            label="exposed transfer",
            denial="all communication: what runs behind compute is hidden",
        ),
        Metric(
            key="period",
            label="step period",
            denial="a sign of a slow rank: ranks that wait for each other share it",
        ),
        Metric(
            key="memory",
            label="memory",
            denial="the peak inside a step: it was read at the step's end",
            unit="bytes",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """Values of one metric."""

    metric: Metric
    phase: str | None
    ranks: tuple[int, ...]
    steps: Int64s
    """Ascending numbers of the steps that have values."""
    value: Floats
    """[rank, step]; NaN where it is not known."""


def measure_cells(study: Study, key: str, phase: str | None = None) -> Cells | Unavailable:
    """The values of a metric, made once per study where they are of all phases."""
    metric = METRICS.get(key)
    if metric is None:
        return Unavailable(f"there is no metric {key}; there are {', '.join(METRICS)}")
    if phase is None:
        return study.get(_WHOLE[key])
    if not metric.has_phases:
        return Unavailable(f"{metric.label} is not split by phase")
    found: Cells | Unavailable = _PHASED[key](study, phase)
    return found


def list_phases(study: Study) -> tuple[str, ...]:
    """The phases that work is compared in, most work first; "" is work outside all phases."""
    work = known(study.compared_work)
    return () if work is None else work.phases


def _measure_excess(study: Study) -> Cells:
    work = need(study.compared_work)
    if not work.groups:
        raise Missing("no two ranks do the same work: nobody has a peer")
    return _make(study, "excess", _exceed_peers(study, work.total_ns))


@or_unavailable
def _measure_phase_excess(study: Study, phase: str) -> Cells:
    return _make(study, "excess", _exceed_peers(study, _phase_work(study, phase)), phase)


def _exceed_peers(study: Study, work_ns: Floats) -> Floats:
    """[step, rank]: work less the median of the other peers; 0 where it is less."""
    found = np.full(work_ns.shape, np.nan)
    for group in need(study.compared_work).groups:
        columns = list(group.indices)
        own = work_ns[:, columns]
        found[:, columns] = np.maximum(own - take_others_median(own), 0.0)
    return found


def take_others_median(values: Floats) -> Floats:
    """[row, column]: the median of the row without the column's own value."""
    count = values.shape[1]
    order = np.argsort(values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(count)[None, :], axis=1)
    low, high = (count - 2) // 2, (count - 1) // 2
    # Without the value at `place`, those from there on move one down.
    low_at, high_at = low + (place <= low), high + (place <= high)
    both = np.take_along_axis(ordered, low_at, 1) + np.take_along_axis(ordered, high_at, 1)
    return np.asarray(both / 2, dtype=np.float64)


def _measure_work(study: Study) -> Cells:
    return _make(study, "work", _total_work(study))


@or_unavailable
def _measure_phase_work(study: Study, phase: str) -> Cells:
    return _make(study, "work", _phase_work(study, phase), phase)


def _measure_rise(study: Study) -> Cells:
    return _make(study, "rise", _exceed_first(_total_work(study)))


@or_unavailable
def _measure_phase_rise(study: Study, phase: str) -> Cells:
    return _make(study, "rise", _exceed_first(_phase_work(study, phase)), phase)


def _exceed_first(work_ns: Floats) -> Floats:
    num_first = max(_MIN_FIRST_STEPS, int(len(work_ns) * _FIRST_SHARE))
    if len(work_ns) < 2 * _MIN_FIRST_STEPS:
        raise Missing(f"it takes {2 * _MIN_FIRST_STEPS} steps to compare with the first ones")
    return np.asarray(np.maximum(work_ns - np.median(work_ns[:num_first], axis=0), 0.0))


def _total_work(study: Study) -> Floats:
    """[step, rank]; of a single rank, which is compared with nobody, too."""
    work = known(study.compared_work)
    if work is not None:
        return work.total_ns
    timeline = need(study.timeline)
    return sum_compared(timeline, timeline.pieces.duration_ns)


def _phase_work(study: Study, phase: str) -> Floats:
    work = need(study.compared_work)
    if phase not in work.phases:
        raise Missing(f"work in {phase or 'no phase'} is less than 1 % of a step")
    return np.asarray(work.work_ns[work.phases.index(phase)], dtype=np.float64)


def _make(study: Study, key: str, value: Floats, phase: str | None = None) -> Cells:
    """Of values that are [step, rank]."""
    timeline = need(study.timeline)
    return Cells(
        metric=METRICS[key], phase=phase, ranks=timeline.ranks, steps=timeline.steps, value=value.T
    )


def _measure_wait(study: Study) -> Cells:
    return _take_held(study, "wait", PieceKind.WAIT)


def _measure_transfer(study: Study) -> Cells:
    return _take_held(study, "transfer", PieceKind.TRANSFER)


def _take_held(study: Study, key: str, kind: PieceKind) -> Cells:
    work = need(study.work)
    return Cells(
        metric=METRICS[key],
        phase=None,
        ranks=work.ranks,
        steps=work.steps,
        value=work.held_ns[:, :, kind],
    )


def _measure_period(study: Study) -> Cells:
    work = need(study.work)
    return Cells(
        metric=METRICS["period"],
        phase=None,
        ranks=work.ranks,
        steps=work.steps,
        value=work.period_ns,
    )


def _measure_caused(study: Study) -> Cells:
    """How long only this rank was missing from operations in which all wait for all."""
    job, timeline = need(study.timeline).communication, need(study.timeline)
    if job is None:
        raise Missing("no operation was recorded")
    cost = sum_costs_by_step(job.operations, job.matches, job.arrivals, timeline.steps)
    rows = np.searchsorted(np.array(job.operations.ranks), np.array(timeline.ranks))
    return Cells(
        metric=METRICS["caused"],
        phase=None,
        ranks=timeline.ranks,
        steps=timeline.steps,
        value=cost[rows].astype(np.float64),
    )


def _measure_memory(study: Study) -> Cells:
    """Allocated on the device where any rank has one, else resident on the host."""
    return need(read_memory(study, "allocated_bytes" if study.has_accelerators else "rss_bytes"))


MEMORY_COLUMNS = ("rss_bytes", "allocated_bytes", "reserved_bytes", "peak_allocated_bytes")
"""Of table `memory`."""


@or_unavailable
def read_memory(study: Study, column: str) -> Cells:
    """What ranks read of their memory at the end of steps."""
    ranks: list[int] = []
    parts: list[tuple[Int64s, Int64s]] = []
    for recording in study.attempt:
        samples = recording.read("memory")
        step, value = int64_column(samples, "step"), int64_column(samples, column)
        is_known = (value >= 0) & (step >= 0)
        if is_known.any():
            ranks.append(recording.rank)
            parts.append((step[is_known], value[is_known]))
    if not ranks:
        raise Missing(explain_no_memory(next(iter(study.attempt))))
    steps = np.unique(np.concatenate([step for step, _ in parts]))
    table = np.full((len(ranks), len(steps)), np.nan)
    for row, (step, sizes) in zip(table, parts, strict=True):
        row[np.searchsorted(steps, step)] = sizes
    return Cells(metric=METRICS["memory"], phase=None, ranks=tuple(ranks), steps=steps, value=table)


_WHOLE: Mapping[str, Callable[[Study], Cells]] = {
    "excess": _measure_excess,
    "rise": _measure_rise,
    "work": _measure_work,
    "caused": _measure_caused,
    "wait": _measure_wait,
    "transfer": _measure_transfer,
    "period": _measure_period,
    "memory": _measure_memory,
}
_PHASED: Mapping[str, Callable[[Study, str], Cells | Unavailable]] = {
    "excess": _measure_phase_excess,
    "rise": _measure_phase_rise,
    "work": _measure_phase_work,
}
