"""Splits one rank's time line into steps, gaps and phases, exactly, in int64 nanoseconds.

Steps cut the recorded time into intervals: before the first step, steps, gaps, after the last step.
A phase (on the training thread, not a detail span) belongs to the interval that contains it. A
phase that crosses a cut, such as one around the whole loop, is a container: it is counted and left
out, because its self time cannot be split. In every interval the self times of its phases plus
`unattributed_ns` are its wall clock: unattributed is what no phase claimed, not idle time. What
feeds an evaluation is a part of it (`evaluation`).

Where records were lost, the time of a lost phase shows as unattributed; `steady_steps` leaves such
steps out (`lost_records`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.rank.evaluation import EVAL, find_evaluation
from meshscope.analyze.rank.phase_names import join_phase_names
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.schema import SpanFlag

_EXACT_BELOW = 1 << 53
"""Sums of integers in float64 are exact below this; in nanoseconds, 104 days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """An interval of wall clock by phase. `sum(phase_ns) + unattributed_ns == wall_ns`, always."""

    wall_ns: int
    phase_ns: Mapping[str, int]
    """Self time per phase name, only phases that occurred."""

    @property
    def unattributed_ns(self) -> int:
        """What no phase claimed; negative only if recorded phases overlap, which is damage."""
        return self.wall_ns - sum(self.phase_ns.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The finished steps of one rank in order of time, none overlapping another."""

    step: Int64s
    start_ns: Int64s
    """Host monotonic clock of the rank."""
    end_ns: Int64s
    num_overlapping: int
    """Steps left out because they start before an earlier one ended."""
    num_reversed: int = 0
    """Steps left out because they end before they start, which is damage."""

    @property
    def duration_ns(self) -> Int64s:
        return self.end_ns - self.start_ns

    @property
    def is_followed(self) -> npt.NDArray[np.bool_]:
        """Per step except the last: the next one is there too. Of very long runs steps are
        thinned."""
        return np.diff(self.step) <= 1

    @property
    def num_finished(self) -> int:
        """With those that were thinned away."""
        return len(self) + int(np.maximum(np.diff(self.step) - 1, 0).sum())

    @property
    def missing_ns(self) -> int:
        """Between steps of which those that came between are not there."""
        return int((self.start_ns[1:] - self.end_ns[:-1])[~self.is_followed].sum())

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpans:
    """The spans of the partition and the interval of each."""

    name_id: npt.NDArray[np.uint16]
    depth: npt.NDArray[np.uint8]
    start_ns: Int64s
    duration_ns: Int64s
    self_ns: Int64s
    interval: Int64s
    """2k+1 inside the k-th step, 2k in the gap before it, -1 for a container."""
    given_ids: frozenset[int] = frozenset()
    """Name ids of phases of which some were measured by the program itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseTable:
    """Self time per interval and phase."""

    total_ns: Int64s
    """One row per interval, as `PhaseSpans.interval` counts them; one column per phase."""
    phases: list[str]

    @property
    def in_steps_ns(self) -> Int64s:
        """The rows that are steps."""
        return self.total_ns[1::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPartition:
    """Everything one rank recorded, from `start_ns` to `end_ns`, in four parts that add up with
    `thinned_ns`."""

    start_ns: int
    """Host monotonic clock: the header's start, or the first thing recorded if that is earlier."""
    end_ns: int
    """The closing line, or the last thing recorded."""
    before_first: TimeSplit
    """Start-up: up to the first step. All of the run when no step finished."""
    steps: TimeSplit
    between: TimeSplit
    """Gaps between steps: evaluation, checkpoints, logging."""
    after_last: TimeSplit
    """From the last finished step's end, an unfinished step included."""
    thinned_ns: int
    """Of steps whose records a very long run no longer has; in none of the parts."""
    steady_steps: TimeSplit
    """`steps` without warm-up and profiled steps."""
    containers: Mapping[str, int]
    """Number of spans per phase name that cross a step boundary and are left out."""
    num_other_threads: int
    """Phases of other threads; left out, because they run beside the training thread."""
    given: frozenset[str] = frozenset()
    """Phases of which some were measured by the program itself (`Recorder.add_duration`)."""

    @property
    def wall_ns(self) -> int:
        """The whole recorded time."""
        return self.end_ns - self.start_ns


def order_steps(columns: Columns) -> StepTimes:
    """The step table in order of time, with steps that overlap an earlier one left out."""
    step = int64_column(columns, "step")
    start = int64_column(columns, "start_host_mono_ns")
    end = int64_column(columns, "end_host_mono_ns")
    cuts = _interleave(start, end)
    if bool((cuts[1:] >= cuts[:-1]).all()):
        return StepTimes(step=step, start_ns=start, end_ns=end, num_overlapping=0)
    order = np.lexsort((end, start))
    kept: list[int] = []
    last_end = -(1 << 63)
    order = order[start[order] <= end[order]]
    for row in order.tolist():
        if last_end <= start[row]:
            kept.append(row)
            last_end = int(end[row])
    rows = np.array(kept, dtype=np.int64)
    return StepTimes(
        step=step[rows],
        start_ns=start[rows],
        end_ns=end[rows],
        num_overlapping=len(order) - len(rows),
        num_reversed=len(step) - len(order),
    )


def assign_phases(steps: StepTimes, spans: Columns) -> tuple[PhaseSpans, int]:
    """Phases of the training thread with their intervals; number of other threads' phases."""
    name_id: npt.NDArray[np.uint16] = spans["name_id"].astype(np.uint16, copy=False)
    depth: npt.NDArray[np.uint8] = spans["depth"].astype(np.uint8, copy=False)
    start = int64_column(spans, "start_host_mono_ns")
    duration = int64_column(spans, "duration_ns")
    self_ns = int64_column(spans, "self_ns")
    flags = spans["flags"].astype(np.uint8, copy=False)
    is_detail = flags & SpanFlag.DETAIL
    thread = spans["thread"]
    is_given = (flags & SpanFlag.GIVEN) != 0
    given_ids: frozenset[int] = frozenset()
    if is_given.any():
        is_outer = (thread == 0) & (depth == 0)
        is_detail = is_detail.copy()
        is_detail[_find_free(is_outer & is_given, is_outer & (is_detail == 0), start, duration)] = 0
        given_ids = frozenset(name_id[is_given & (thread == 0) & (is_detail == 0)].tolist())
    num_other_threads = 0
    if is_detail.any() or thread.any():
        num_other_threads = int(np.count_nonzero((thread != 0) & (is_detail == 0)))
        keep = (is_detail == 0) & (thread == 0)
        name_id, depth, start = name_id[keep], depth[keep], start[keep]
        duration, self_ns = duration[keep], self_ns[keep]
    cuts = _interleave(steps.start_ns, steps.end_ns)
    interval = np.searchsorted(cuts, start, side="right")
    ends = np.append(cuts, np.iinfo(np.int64).max)[interval]
    # An empty span on a cut belongs to the interval that starts there.
    interval = np.where(start + duration <= ends, interval, -1)
    if (name_id == EVAL).any():
        rows = np.flatnonzero(depth == 0)
        rows = rows[np.argsort(start[rows], kind="stable")]
        belongs, pause = find_evaluation(
            name_id[rows], interval[rows], start[rows], (start + duration)[rows]
        )
        name_id, duration, self_ns = name_id.copy(), duration.copy(), self_ns.copy()
        name_id[rows[belongs]] = EVAL
        duration[rows] += pause
        self_ns[rows] += pause
    placed = PhaseSpans(
        name_id=name_id,
        depth=depth,
        start_ns=start,
        duration_ns=duration,
        self_ns=self_ns,
        interval=interval,
        given_ids=given_ids,
    )
    return placed, num_other_threads


def _find_free(is_given: Bools, is_taken: Bools, start: Int64s, duration: Int64s) -> Int64s:
    """Rows of given durations that overlap neither a measured phase nor an earlier given one."""
    rows = np.flatnonzero(is_given & ~is_taken)
    rows = rows[np.argsort(start[rows], kind="stable")]
    taken = np.flatnonzero(is_taken)
    taken = taken[np.argsort(start[taken], kind="stable")]
    # The latest end of all phases that begin before a duration's end.
    latest = np.append(np.iinfo(np.int64).min, np.maximum.accumulate((start + duration)[taken]))
    before = np.searchsorted(start[taken], (start + duration)[rows], side="left")
    rows = rows[latest[before] <= start[rows]]
    latest = np.append(np.iinfo(np.int64).min, np.maximum.accumulate((start + duration)[rows]))
    free: Int64s = rows[latest[:-1] <= start[rows]]
    return free


def tabulate_phases(spans: PhaseSpans, names: Mapping[int, str], *, num_steps: int) -> PhaseTable:
    """Self time of every phase in every interval."""
    table, phases = sum_by_interval(spans, spans.self_ns, names, num_intervals=2 * num_steps + 1)
    return PhaseTable(total_ns=table, phases=phases)


def partition_rank(
    steps: StepTimes,
    spans: PhaseSpans,
    tabulated: PhaseTable,
    names: Mapping[int, str],
    *,
    recorded_ns: tuple[int, int],
    is_steady: Bools,
    num_other_threads: int = 0,
) -> RankPartition:
    """Splits the time from `recorded_ns[0]` to `recorded_ns[1]`, which contains all steps; without
    that of steps which a very long run no longer has."""
    start_ns, end_ns = recorded_ns
    table, phases = tabulated.total_ns, tabulated.phases
    num_steps = len(steps)
    first, last = end_ns, end_ns
    if num_steps:
        first, last = int(steps.start_ns[0]), int(steps.end_ns[-1])
    in_steps = int((steps.end_ns - steps.start_ns).sum())
    steady = steps.duration_ns[is_steady]

    def split(wall_ns: int, totals: Int64s) -> TimeSplit:
        return TimeSplit(wall_ns=wall_ns, phase_ns=_name_totals(phases, totals))

    inside = tabulated.in_steps_ns
    return RankPartition(
        start_ns=start_ns,
        end_ns=end_ns,
        before_first=split(first - start_ns, table[0]),
        steps=split(in_steps, inside.sum(axis=0)),
        between=split(last - first - in_steps - steps.missing_ns, table[2:-1:2].sum(axis=0)),
        after_last=split(end_ns - last, table[-1] if num_steps else np.zeros_like(table[0])),
        thinned_ns=steps.missing_ns,
        steady_steps=split(int(steady.sum()), inside[is_steady].sum(axis=0)),
        containers=_count_containers(spans, names),
        num_other_threads=num_other_threads,
        given=frozenset(names.get(one, f"(unnamed {one})") for one in spans.given_ids),
    )


def sum_by_interval(
    spans: PhaseSpans, values: Int64s, names: Mapping[int, str], *, num_intervals: int
) -> tuple[Int64s, list[str]]:
    """`values` of the spans summed per interval (rows) and phase (columns, named by the list)."""
    inside = spans.interval >= 0
    name_id, interval = spans.name_id, spans.interval
    if not inside.all():
        name_id, interval, values = name_id[inside], interval[inside], values[inside]
    used = np.flatnonzero(np.bincount(name_id, minlength=1))
    texts = join_phase_names(used.tolist(), names)
    phases = list(dict.fromkeys(texts))
    places = {text: place for place, text in enumerate(phases)}
    column_of = np.zeros(int(used[-1]) + 1 if len(used) else 1, dtype=np.int64)
    column_of[used] = [places[text] for text in texts]
    cells = interval * len(phases) + column_of[name_id]
    return _sum_cells(cells, values, (num_intervals, len(phases))), phases


def _sum_cells(cells: Int64s, values: Int64s, shape: tuple[int, int]) -> Int64s:
    if not shape[1]:
        return np.zeros(shape, dtype=np.int64)
    size = shape[0] * shape[1]
    weights = values.astype(np.float64)
    if float(np.abs(weights).sum()) < _EXACT_BELOW:
        sums = np.bincount(cells, weights=weights, minlength=size).astype(np.int64)
    else:  # only made-up or damaged times are this large; slower, still exact
        sums = np.zeros(size, dtype=np.int64)
        np.add.at(sums, cells, values)
    return sums.reshape(shape)


def _name_totals(phases: list[str], totals: Int64s) -> dict[str, int]:
    return {name: total for name, total in zip(phases, totals.tolist(), strict=True) if total}


def _count_containers(spans: PhaseSpans, names: Mapping[int, str]) -> dict[str, int]:
    crossing = spans.name_id[spans.interval < 0]
    if not len(crossing):
        return {}
    ids, counts = np.unique(crossing, return_counts=True)
    found: dict[str, int] = {}
    for name_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
        text = names.get(name_id, f"(unnamed {name_id})")
        found[text] = found.get(text, 0) + count
    return found


def _interleave(start: Int64s, end: Int64s) -> Int64s:
    cuts = np.empty(2 * len(start), dtype=np.int64)
    cuts[0::2] = start
    cuts[1::2] = end
    return cuts


def add_splits(splits: list[TimeSplit]) -> TimeSplit:
    phase_ns: dict[str, int] = {}
    for split in splits:
        for name, total in split.phase_ns.items():
            phase_ns[name] = phase_ns.get(name, 0) + total
    return TimeSplit(wall_ns=sum(split.wall_ns for split in splits), phase_ns=phase_ns)
