"""One step of all ranks, or of some, on the aligned clock: what each did from moment to moment.

Spans are the timeline's pieces with the line of the budget that they belong to, and the pipeline's
actions. If there are too many, neighbours that are shorter than a limit become one, with the line
that has most of its time: no time is left out.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget_lines import Line, Share, sort_bound_pieces
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import find_rows
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.timeline import ACTION_KINDS, Pieces, Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Missing, Unavailable, known, need, or_unavailable
from meshscope.store.read.arrays import Int64s

MAX_SPANS = 50_000
IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFacts:
    """What a span's time was spent on: a line of the budget."""

    share: str
    axis: str
    """Empty where time belongs to no axis."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceSpans:
    """Columns, one entry per span, by rank and start; a rank's spans have no gap in its period."""

    rank: Int64s
    """Index in `StepSpans.ranks`."""
    start_ns: Int64s
    """From `StepSpans.origin_ns`."""
    duration_ns: Int64s
    line: Int64s
    """Index in `StepSpans.lines`."""
    phase: Int64s
    """Index in `StepSpans.phases`; 0: in none."""
    action: Int64s
    """Index in `StepSpans.actions`: the action it is in or waits to start; -1 for none."""
    operation: Int64s
    """Index in `StepSpans.operations` of the one that held it up; -1 for none."""
    is_between: Int64s
    """1 in the gap before the step's own start."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionSpans:
    """Columns, one entry per pipeline action: one microbatch through one stage."""

    rank: Int64s
    """Index in `StepSpans.ranks`."""
    start_ns: Int64s
    duration_ns: Int64s
    kind: Int64s
    """Index in `StepSpans.action_kinds`."""
    stage: Int64s
    chunk: Int64s
    microbatch: Int64s
    wait_start_ns: Int64s
    """When it began to wait for its input; -1 if it did not."""
    wait_ns: Int64s
    """-1 if it did not wait."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationFacts:
    """Columns: the operations that spans point to."""

    kind: tuple[str, ...]
    axis: tuple[str, ...]
    group: tuple[str, ...]
    size_bytes: Int64s
    """-1 where it is not known."""
    match: Int64s
    """Entries with the same number are one operation, on several ranks; -1 where it is not
    matched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSpans:
    """One step."""

    step: int
    origin_ns: int
    """The earliest period's start on the reference clock."""
    length_ns: int
    """To the last period's end."""
    ranks: tuple[int, ...]
    num_ranks: int
    """Ranks that took part, shown or not."""
    period_start_ns: Int64s
    """By rank, from the origin."""
    step_start_ns: Int64s
    period_end_ns: Int64s
    clock_uncertainty_ns: tuple[int | Unavailable, ...]
    """By rank, against the reference clock."""
    on_device: tuple[bool, ...]
    """By rank: spans are the device stream's."""
    merged_below_ns: int
    """Neighbours shorter than this are one span; 0 where none were merged."""
    lines: tuple[LineFacts, ...]
    phases: tuple[str, ...]
    action_kinds: tuple[str, ...]
    pieces: PieceSpans
    actions: ActionSpans | None
    """Null where no pipeline was recorded."""
    operations: OperationFacts


@or_unavailable
def cut_step(
    study: Study, step: int, *, ranks: tuple[int, ...] | None = None, max_spans: int = MAX_SPANS
) -> StepSpans:
    """A step that the timeline has; of all ranks, or of those named."""
    timeline = need(study.timeline)
    column = int(find_rows(timeline.steps, np.array([step]))[0])
    if column < 0:
        raise Missing(f"step {step} is not on the timeline: left out, or not on all ranks")
    chosen = _choose_ranks(timeline, ranks)
    named = np.array(timeline.ranks, dtype=np.int64)[chosen]
    origin = int(timeline.period_start_ns[:, column].min())
    lines, line = need(study.get(_sort_pieces))
    pieces = timeline.pieces
    rows = np.flatnonzero((pieces.step == column) & np.isin(pieces.rank, named))
    limit_ns, groups = _merge(pieces, rows, line, max_spans)
    is_idle = study.attempt.is_from_traces and bool(timeline.on_device[chosen].all())
    operations, operation = _describe_operations(timeline, pieces.row[groups.main])
    actions, action = _cut_actions(timeline, named, column, origin, pieces.action[groups.main])
    return StepSpans(
        step=step,
        origin_ns=origin,
        length_ns=int(timeline.period_end_ns[:, column].max()) - origin,
        ranks=tuple(named.tolist()),
        num_ranks=len(timeline.ranks),
        period_start_ns=timeline.period_start_ns[chosen, column] - origin,
        step_start_ns=timeline.step_start_ns[chosen, column] - origin,
        period_end_ns=timeline.period_end_ns[chosen, column] - origin,
        clock_uncertainty_ns=tuple(_bound_clock(timeline, rank) for rank in named.tolist()),
        on_device=tuple(timeline.on_device[chosen].tolist()),
        merged_below_ns=limit_ns,
        lines=tuple(
            LineFacts(share=_name_share(one, is_idle=is_idle), axis=one.axis) for one in lines
        ),
        phases=timeline.phases,
        action_kinds=tuple(ACTION_KINDS),
        pieces=PieceSpans(
            rank=np.searchsorted(named, pieces.rank[groups.first]),
            start_ns=pieces.start_ns[groups.first] - origin,
            duration_ns=pieces.end_ns[groups.last] - pieces.start_ns[groups.first],
            line=line[groups.main],
            phase=pieces.phase[groups.main].astype(np.int64),
            action=action,
            operation=operation,
            is_between=pieces.is_between[groups.main].astype(np.int64),
        ),
        actions=actions,
        operations=operations,
    )


def choose_steps(study: Study) -> dict[str, int]:
    """The fastest, median and slowest step of the timeline, by the job's period."""
    work = known(study.work)
    if work is None or not len(work.steps):
        return {}
    order = np.argsort(work.step_ns, kind="stable")
    picked = {"fastest": order[0], "median": order[(len(order) - 1) // 2], "slowest": order[-1]}
    return {name: int(work.steps[index]) for name, index in picked.items()}


def _sort_pieces(study: Study) -> tuple[list[Line], Int64s]:
    return sort_bound_pieces(need(study.timeline), known(study.device_parts))


def _name_share(line: Line, *, is_idle: bool) -> str:
    """Traces have all work of a device: between its phases it idles. The budget has the causes,
    which are summed by step."""
    return IDLE if is_idle and line.share is Share.BETWEEN else str(line.share)


def _choose_ranks(timeline: Timeline, ranks: tuple[int, ...] | None) -> Int64s:
    """Indices in `timeline.ranks`."""
    if ranks is None:
        return np.arange(len(timeline.ranks))
    found = np.flatnonzero(np.isin(np.array(timeline.ranks), np.array(ranks)))
    if not len(found):
        raise Missing("none of these ranks is on the timeline")
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups:
    """Rows of pieces that became one span each."""

    first: Int64s
    last: Int64s
    main: Int64s
    """The row that stands for the others."""


def _merge(pieces: Pieces, rows: Int64s, line: Int64s, max_spans: int) -> tuple[int, _Groups]:
    """The spans of these rows, and the length below which neighbours were joined."""
    limit_ns, groups = 0, _Groups(first=rows, last=rows, main=rows)
    duration = pieces.duration_ns[rows]
    while len(groups.first) > max_spans and limit_ns < int(duration.max()):
        limit_ns = 2 * limit_ns or max(int(np.median(duration)), 1)
        groups = _join_short(pieces, rows, line, limit_ns)
    return limit_ns, groups


def _join_short(pieces: Pieces, rows: Int64s, line: Int64s, limit_ns: int) -> _Groups:
    """Joins neighbours of one rank that are shorter than the limit and begin in the same bin of its
    length."""
    rank, start = pieces.rank[rows], pieces.start_ns[rows]
    duration, line = pieces.duration_ns[rows], line[rows]
    slot = np.where(duration < limit_ns, start // limit_ns, -1)
    is_first = np.ones(len(rows), dtype=np.bool_)
    is_first[1:] = (rank[1:] != rank[:-1]) | (slot[1:] != slot[:-1]) | (slot[1:] < 0)
    first = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    _, cell = np.unique(group * (int(line.max()) + 1) + line, return_inverse=True)
    on_line = np.bincount(cell, duration)[cell]
    order = np.lexsort((duration, on_line, group))
    is_largest = np.append(np.diff(group[order]) != 0, True)
    last = np.append(first[1:], len(rows)) - 1
    return _Groups(first=rows[first], last=rows[last], main=rows[order[is_largest]])


def _describe_operations(timeline: Timeline, row: Int64s) -> tuple[OperationFacts, Int64s]:
    """The operations of these rows, each once, and which of them each row is."""
    job = timeline.communication
    known_rows, index = np.unique(row[row >= 0], return_inverse=True)
    place = np.full(len(row), -1, dtype=np.int64)
    place[row >= 0] = index
    if job is None or not len(known_rows):
        none = np.empty(0, dtype=np.int64)
        return OperationFacts(kind=(), axis=(), group=(), size_bytes=none, match=none), place
    rows, groups = job.operations.rows, job.operations.groups
    group = rows.group[known_rows].tolist()
    return OperationFacts(
        kind=tuple(Kind(kind).label for kind in rows.kind[known_rows].tolist()),
        axis=tuple(groups[one].axis if one >= 0 else OTHER for one in group),
        group=tuple(groups[one].name if one >= 0 else "" for one in group),
        size_bytes=rows.size_bytes[known_rows].astype(np.int64),
        match=_match_rows(job)[known_rows],
    ), place


def _match_rows(job: Job) -> Int64s:
    """Per row of the operations the match it is in; -1 for none."""
    found = np.full(len(job.operations), -1, dtype=np.int64)
    found[job.matches.member] = job.matches.of_member
    return found


def _cut_actions(
    timeline: Timeline, named: Int64s, column: int, origin: int, wanted: Int64s
) -> tuple[ActionSpans | None, Int64s]:
    """The actions of a step, and which of them the wanted rows are."""
    actions = timeline.actions
    if actions is None:
        return None, np.full(len(wanted), -1, dtype=np.int64)
    rows = np.flatnonzero((actions.step == column) & np.isin(actions.rank, named))
    waits = actions.wait_ns[rows] >= 0
    spans = ActionSpans(
        rank=np.searchsorted(named, actions.rank[rows]),
        start_ns=actions.start_ns[rows] - origin,
        duration_ns=(actions.end_ns - actions.start_ns)[rows],
        kind=actions.kind[rows].astype(np.int64),
        stage=actions.stage[rows].astype(np.int64),
        chunk=actions.chunk[rows].astype(np.int64),
        microbatch=actions.microbatch[rows].astype(np.int64),
        wait_start_ns=np.where(waits, actions.wait_start_ns[rows] - origin, -1),
        wait_ns=actions.wait_ns[rows],
    )
    return spans, find_rows(rows, wanted)


def _bound_clock(timeline: Timeline, rank: int) -> int | Unavailable:
    alignment = timeline.alignment
    index = int(alignment.of_rank[rank]) if rank < len(alignment.of_rank) else -1
    return Unavailable("no clock") if index < 0 else alignment.clocks[index].uncertainty_ns
