"""Communication of one attempt over all ranks: its time, who waited for whom, how fast it was.

    load_job → measure_exposed → sums

Statistics leave out operations of warm-up steps and before the first step; clocks and matching use
all. Operations of groups with one rank are left out: nothing can be late there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.communication.bandwidth import (
    BandwidthRow,
    FitRefused,
    LatencyFit,
    MessageFlow,
    collect_transfers,
    fit_latencies,
    tabulate_bandwidth,
    tabulate_messages,
)
from meshscope.analyze.communication.communication_sums import (
    AxisKindSum,
    AxisSum,
    CommunicationSum,
    RankSum,
    StepSums,
    add_sums,
    collect_parts,
    sum_by_axis,
    sum_by_step,
    tabulate_parts,
)
from meshscope.analyze.communication.last_arrivers import LastArriver, rank_last_arrivers
from meshscope.analyze.job.arrivals import AlignedTimes, Arrivals, RowTimes
from meshscope.analyze.job.clocks import ClockAlignment
from meshscope.analyze.job.exposed import measure_exposed
from meshscope.analyze.job.group_axes import JobGroup
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.matching import Desynchronisation, Matches, SequenceShift
from meshscope.analyze.job.operations import (
    Failure,
    Operations,
    count_unrecognised,
    dtype_label,
    known_phase,
    known_size,
    known_step,
    load_failures,
)
from meshscope.analyze.rank.lost_records import OPERATION_TABLES, mark_incomplete
from meshscope.analyze.rank.steps import count_warmup
from meshscope.analyze.timeline.timeline_steps import KeptSteps
from meshscope.core.group_axis import OTHER
from meshscope.core.operations import Kind, Outcome
from meshscope.core.unavailable import Missing, Unavailable, or_unavailable
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.trace_windows import TraceWindow, disturbing_windows, mark_profiled
from meshscope.store.schema import OperationFlag

_NUM_SLOWEST = 20
_MAX_FAILURES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowOperation:
    """One operation with its members' time."""

    axis: str
    kind: Kind
    group: JobGroup
    sequence: int
    size_bytes: int | Unavailable
    dtype: str | Unavailable
    step: int | Unavailable
    phase: str | Unavailable
    total_ns: int
    """Waiting and transfer, all ranks together."""
    wait_ns: int
    max_transfer_ns: int
    last_rank: int | Unavailable
    """The last to arrive, if known."""
    gap_ns: int | Unavailable
    """How long after the second-to-last it arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """A group with members that did not record its operations."""

    group: JobGroup
    missing_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationHealth:
    """How much of the recording the numbers are based on."""

    num_rank_operations: int
    """Rows of all ranks, warm-up included."""
    num_recognised: int
    """Rows of known kind, or timed by the program itself."""
    num_single_rank: int
    """Rows of groups with one rank; left out."""
    num_unknown_group: int
    """Rows of groups with unknown members; they cannot be matched."""
    num_matched: int
    """Operations found on all ranks that recorded them."""
    num_unmatched: int
    """Operations that were not found on all, or are not trusted."""
    num_stopped: int
    """Unmatched because a rank stopped or started to record later."""
    num_lost: int
    """Unmatched because a rank lacks them in the middle."""
    num_untrusted: int
    """Unmatched because they follow a disagreement."""
    num_ambiguous: int
    num_unfinished: int
    """Rows that were entered and not left."""
    num_unseen: int
    """Rows whose end was never observed."""
    num_failed: int
    failures: tuple[Failure, ...]
    """The first of them."""
    num_inexact_ends: int
    """Rows whose end is only a bound."""
    num_engine_outside_steps: int
    """Rows that backward's engine issued outside of steps: their exposed time is unknown and counts
    as overlapped."""
    num_unknown_waits: int
    """Waits for operations that are not known."""
    unknown_wait_ns: int
    num_clock_errors: int
    """Rows that end 10 ms or more before the operation can have started; their transfer is 0."""
    num_damaged: int
    """Rows and waits left out because their times are impossible."""
    num_bad_ends: int
    num_warmup: int
    """Rows left out of the statistics: before `first_step`, or in a profiled step."""
    partial_groups: tuple[PartialGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPart:
    """The steps whose communication was recorded and, of a long run, read."""

    num_steps: Mapping[int, int]
    """By rank."""
    wall_ns: Mapping[int, int]
    """By rank: total duration of these steps."""
    num_left_out: int
    """Steps after warm-up that were not read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Communication:
    """Communication of one attempt."""

    ranks: tuple[int, ...]
    """Ranks that recorded."""
    first_step: int
    """Earlier and profiled steps are left out of the statistics; -1 leaves none out."""
    groups: tuple[JobGroup, ...]
    clocks: ClockAlignment
    observed_ns: int
    """From the first arrival to the last end in the statistics."""
    total: CommunicationSum
    by_axis_and_kind: tuple[AxisKindSum, ...]
    by_axis: tuple[AxisSum, ...]
    by_rank: tuple[RankSum, ...]
    by_step: StepSums
    bandwidth: tuple[BandwidthRow, ...]
    fits: tuple[LatencyFit | FitRefused, ...]
    messages: tuple[MessageFlow, ...]
    last_arrivers: tuple[LastArriver, ...]
    num_undecided: int
    """Operations whose last arrival the clocks cannot decide."""
    slowest: tuple[SlowOperation, ...]
    desynchronisations: tuple[Desynchronisation, ...]
    num_desynchronised: int
    shifts: tuple[SequenceShift, ...]
    health: CommunicationHealth
    part: _StepPart | None
    """None if all steps were read."""


def describe_part(kept: KeptSteps, first_step: int) -> _StepPart | None:
    """The steps from `first_step` that were read, with all their operations; None if none was left
    out. The operations must have been loaded: that shows which are lost."""
    incomplete = [
        mark_incomplete(kept.attempt.ranks[rank], own, OPERATION_TABLES)
        for rank, own in zip(kept.ranks, kept.by_rank, strict=True)
    ]
    has_lost = any(lost.any() for lost in incomplete)
    if not kept.num_left_out and not len(kept.unwatched) and not has_lost:
        return None
    windows = disturbing_windows(kept.attempt)
    counted = [
        (own.step >= first_step)
        & ~mark_profiled(own.step, windows)
        & ~np.isin(own.step, kept.unwatched)
        & ~lost
        for own, lost in zip(kept.by_rank, incomplete, strict=True)
    ]
    pairs = list(zip(kept.ranks, kept.by_rank, counted, strict=True))
    return _StepPart(
        num_steps={rank: int(np.count_nonzero(rows)) for rank, _, rows in pairs},
        wall_ns={rank: int(own.duration_ns[rows].sum()) for rank, own, rows in pairs},
        num_left_out=kept.num_left_out,
    )


@or_unavailable
def analyze_communication(
    job: Job, *, first_step: int | None = None, part: _StepPart | None = None
) -> Communication:
    """Analyses a job's communication; `part` describes the steps that were read.

    Statistics start with `first_step`; by default they leave out the first of four steps or more.
    Steps that a trace window disturbed are left out.
    """
    operations, matches, times, row_times = job.operations, job.matches, job.times, job.row_times
    alignment, arrivals, rows = job.alignment, job.arrivals, job.operations.rows
    if not len(operations):
        raise Missing(
            "no communication was recorded: the job did not communicate, or its operations were "
            "not watched"
        )
    if not len(matches) and not bool((_group_sizes(operations)[rows.group] != 1).any()):
        raise Missing("every operation was of a group with one rank")
    exposed = measure_exposed(rows, job.waits, times, row_times, alignment)
    first = choose_first_step(rows.step.astype(np.int64), first_step)
    row_included, match_included = _choose_rows(
        operations, matches, first, disturbing_windows(job.attempt)
    )
    parts = collect_parts(rows, row_times, exposed, _mark_first(operations, matches))
    axes = tuple(dict.fromkeys([group.axis for group in operations.groups] + [OTHER]))
    axis_of_group = np.array([axes.index(g.axis) for g in operations.groups] + [axes.index(OTHER)])
    table = tabulate_parts(
        parts, row_included, rows, axis_of_group[rows.group], axes=axes, ranks=operations.ranks
    )
    by_axis_and_kind = table.by_axis_and_kind()
    transfers = collect_transfers(operations, matches, row_times, match_included, alignment)
    is_counted = match_included[arrivals.match]
    return Communication(
        ranks=operations.ranks,
        first_step=first,
        groups=operations.groups,
        clocks=alignment,
        observed_ns=_measure_observed(times, row_included),
        total=add_sums([one.total for one in by_axis_and_kind]),
        by_axis_and_kind=by_axis_and_kind,
        by_axis=sum_by_axis(by_axis_and_kind),
        by_rank=table.by_rank(),
        by_step=sum_by_step(parts, row_included, rows, exposed, operations.ranks),
        bandwidth=tabulate_bandwidth(transfers),
        fits=fit_latencies(transfers),
        messages=tabulate_messages(operations, matches, row_times, match_included, alignment),
        last_arrivers=rank_last_arrivers(operations, matches, arrivals, match_included),
        num_undecided=int(np.count_nonzero(is_counted & ~arrivals.is_decided)),
        slowest=_find_slowest(operations, matches, row_times, arrivals, match_included),
        desynchronisations=matches.desynchronisations,
        num_desynchronised=matches.num_desynchronised,
        shifts=matches.shifts,
        health=_assess(job, row_included),
        part=part,
    )


def choose_first_step(step: Int64s, asked: int | None) -> int:
    """The first step of the statistics; -1 includes everything."""
    if asked is not None:
        return asked
    steps = np.unique(step[step >= 0])
    num_warmup = count_warmup(len(steps), None)
    return int(steps[num_warmup]) if num_warmup else -1


def _group_sizes(operations: Operations) -> Int64s:
    """Number of members by group; the last entry is for unknown groups."""
    return np.array([len(group.ranks) for group in operations.groups] + [0], dtype=np.int64)


def _choose_rows(
    operations: Operations, matches: Matches, first: int, windows: Sequence[TraceWindow]
) -> tuple[Bools, Bools]:
    """Rows and operations of the statistics: all rows of an operation, or none."""
    rows = operations.rows
    row_included = (rows.step >= first) & ~mark_profiled(rows.step.astype(np.int64), windows)
    match_included = np.zeros(len(matches), dtype=np.bool_)
    if len(matches):
        match_included = np.logical_or.reduceat(row_included[matches.member], matches.first)
    row_included[matches.member] = match_included[matches.of_member]
    return row_included & (_group_sizes(operations)[rows.group] != 1), match_included


def _measure_observed(times: AlignedTimes, is_included: Bools) -> int:
    if not is_included.any():
        return 0
    return int(times.end_ns[is_included].max()) - int(times.arrival_ns[is_included].min())


def _mark_first(operations: Operations, matches: Matches) -> Bools:
    """Marks one row of every collective, and every send, recv and unmatched row."""
    is_first = np.ones(len(operations), dtype=np.bool_)
    is_first[matches.member[~matches.is_point_to_point[matches.of_member]]] = False
    is_first[matches.member[matches.first]] = True
    return is_first


def _find_slowest(
    operations: Operations,
    matches: Matches,
    row_times: RowTimes,
    arrivals: Arrivals,
    is_included: Bools,
    *,
    limit: int = _NUM_SLOWEST,
) -> tuple[SlowOperation, ...]:
    """The operations with the most waiting and transfer over all ranks."""
    if not len(matches):
        return ()
    first, member = matches.first, matches.member
    wait = np.add.reduceat(row_times.wait_ns[member], first)
    total = wait + np.add.reduceat(row_times.transfer_ns[member], first)
    longest = np.maximum.reduceat(row_times.transfer_ns[member], first)
    candidates = np.flatnonzero(matches.is_usable & is_included & (total > 0))
    order = candidates[np.argsort(-total[candidates], kind="stable")][:limit]
    index = np.full(len(matches), -1, dtype=np.int64)
    index[arrivals.match] = np.arange(len(arrivals.match))
    rows = operations.rows
    found = []
    for match in order.tolist():
        row, at = int(member[first[match]]), int(index[match])
        is_known = at >= 0 and bool(arrivals.is_decided[at])
        unknown = Unavailable(
            "arrivals are closer together than the clocks can tell"
            if at >= 0
            else "not everyone waits for everyone in this kind"
        )
        group = operations.groups[matches.group[match]]
        found.append(
            SlowOperation(
                axis=group.axis,
                kind=Kind(int(rows.kind[row])),
                group=group,
                sequence=int(matches.sequence[match]),
                size_bytes=known_size(int(rows.size_bytes[row])),
                dtype=dtype_label(int(rows.dtype[row])),
                step=known_step(int(rows.step[row])),
                phase=known_phase(operations.phases[rows.phase[row]]),
                total_ns=int(total[match]),
                wait_ns=int(wait[match]),
                max_transfer_ns=int(longest[match]),
                last_rank=int(arrivals.rank[at]) if is_known else unknown,
                gap_ns=int(arrivals.gap_ns[at]) if is_known else unknown,
            )
        )
    return tuple(found)


def _assess(job: Job, row_included: Bools) -> CommunicationHealth:
    operations, matches, waits = job.operations, job.matches, job.waits
    rows = operations.rows
    is_failed = (rows.outcome == Outcome.ERROR) | (rows.outcome == Outcome.TIMEOUT)
    sizes = _group_sizes(operations)[rows.group]
    is_unknown_wait = waits.row < 0
    num_matched = int(np.count_nonzero(matches.is_usable))
    return CommunicationHealth(
        num_rank_operations=len(rows),
        num_recognised=len(rows) - count_unrecognised(rows),
        num_single_rank=int(np.count_nonzero(sizes == 1)),
        num_unknown_group=int(np.count_nonzero(~rows.has_numbered_group)),
        num_matched=num_matched,
        num_unmatched=len(matches) - num_matched,
        num_stopped=matches.num_stopped,
        num_lost=matches.num_lost,
        num_untrusted=int(np.count_nonzero(~matches.is_trusted)) - matches.num_ambiguous,
        num_ambiguous=matches.num_ambiguous,
        num_unfinished=int(np.count_nonzero(rows.outcome == Outcome.UNFINISHED)),
        num_unseen=int(np.count_nonzero(rows.outcome == Outcome.UNSEEN)),
        num_failed=int(np.count_nonzero(is_failed)),
        failures=load_failures(job.attempt, operations, limit=_MAX_FAILURES),
        num_inexact_ends=int(np.count_nonzero(rows.has_end & ~rows.has_exact_end)),
        num_engine_outside_steps=int(
            np.count_nonzero(rows.has_flag(OperationFlag.ENGINE) & (rows.step < 0))
        ),
        num_unknown_waits=int(np.count_nonzero(is_unknown_wait)),
        unknown_wait_ns=int(waits.duration_ns[is_unknown_wait].sum()),
        num_clock_errors=job.num_clock_errors,
        num_damaged=operations.num_damaged + waits.num_damaged,
        num_bad_ends=operations.num_bad_ends,
        num_warmup=int(np.count_nonzero(~row_included & (sizes != 1))),
        partial_groups=_find_partial_groups(operations, matches),
    )


def _find_partial_groups(operations: Operations, matches: Matches) -> tuple[PartialGroup, ...]:
    rows = operations.rows
    partial = []
    used = np.bincount(matches.group, minlength=len(operations.groups)) > 0
    for index in np.flatnonzero(used).tolist():
        group = operations.groups[index]
        if matches.num_present[index] == len(group.ranks):
            continue
        present = set(np.unique(rows.rank[rows.group == index]).tolist())
        missing = tuple(rank for rank in group.ranks if rank not in present)
        if missing:
            partial.append(PartialGroup(group=group, missing_ranks=missing))
    return tuple(partial)
