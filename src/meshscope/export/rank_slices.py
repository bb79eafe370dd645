"""What one window of steps has for the rows of one rank: intervals with names, in order of time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget_lines import Line
from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import MAX_SPAN_NS, MAX_TIME_NS, NO_PHASE
from meshscope.analyze.timeline.actions import ACTION_KINDS, Actions, read_actions
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.operations import Kind, Outcome
from meshscope.export.lanes import NEVER_NS
from meshscope.export.step_windows import StepWindow
from meshscope.export.trace_sink import Argument, Arrow
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.schema import SpanFlag, StepFlag

STEPS = "steps and phases"


@dataclass(slots=True, kw_only=True)
class Slice:
    """One interval on the aligned clock."""

    start_ns: int
    end_ns: int
    """`NEVER_NS` where it did not end."""
    category: str
    name: str
    arguments: Sequence[Argument] = ()
    arrows: Sequence[Arrow] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowFacts:
    """A window and the analyses of it."""

    window: StepWindow
    job: Job
    timeline: Timeline | None
    """None where no step of the window was finished by all ranks."""
    lines: Sequence[Line]
    line: Int64s
    """Of each piece of the timeline."""

    def has(self, rank: int, times: Int64s) -> Bools:
        """Which moments of a rank's own clock are in the window."""
        after, until = self.window.after_ns[rank], self.window.until_ns[rank]
        found: Bools = (times > after) & (times <= until)
        return found

    def align(self, rank: int, times: Int64s) -> Int64s:
        return self.job.alignment.to_reference(rank, times)


def list_steps(facts: WindowFacts, rank: int) -> Iterator[tuple[str, Slice]]:
    """Steps and, inside and between them, phases; those of other threads have rows of their own."""
    recording = facts.window.attempt.ranks[rank]
    if facts.window.steps is not None:
        yield from ((STEPS, one) for one in _list_whole_steps(facts, rank))
    columns = recording.read("spans")
    start = int64_column(columns, "start_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    is_good = (start >= 0) & (start < MAX_TIME_NS) & (duration >= 0) & (duration < MAX_SPAN_NS)
    row = np.flatnonzero(is_good & facts.has(rank, np.where(is_good, start + duration, -1)))
    begin, end = facts.align(rank, start[row]), facts.align(rank, (start + duration)[row])
    names = columns["name_id"][row].tolist()
    flags, threads = columns["flags"][row].tolist(), columns["thread"][row].tolist()
    microbatches = int64_column(columns, "microbatch")[row].tolist()
    for at, (name_id, flag, thread) in enumerate(zip(names, flags, threads, strict=True)):
        arguments: list[Argument] = []
        if microbatches[at] >= 0:
            arguments.append(("microbatch", microbatches[at]))
        if flag & SpanFlag.ABORTED:
            arguments.append(("end", "aborted, or its end never came"))
        yield (
            STEPS if thread == 0 else f"thread {thread}",
            Slice(
                start_ns=int(begin[at]),
                end_ns=max(int(end[at]), int(begin[at])),
                category="detail" if flag & SpanFlag.DETAIL else "phase",
                name=recording.name_of(name_id),
                arguments=arguments,
            ),
        )


def _list_whole_steps(facts: WindowFacts, rank: int) -> Iterator[Slice]:
    steps = facts.window.steps
    assert steps is not None
    columns = facts.window.attempt.ranks[rank].read_steps([steps])
    start = int64_column(columns, "start_host_mono_ns")
    end = int64_column(columns, "end_host_mono_ns")
    row = np.flatnonzero((start >= 0) & (end >= start) & (end < MAX_TIME_NS))
    counts = {
        name: int64_column(columns, name)[row].tolist()
        for name in ("input_tokens", "input_samples", "num_microbatches")
    }
    numbers = int64_column(columns, "step")[row].tolist()
    flags = columns["flags"][row].tolist()
    begin, finish = facts.align(rank, start[row]), facts.align(rank, end[row])
    for at, number in enumerate(numbers):
        arguments: list[Argument] = [("step", number)]
        arguments += [(name, values[at]) for name, values in counts.items() if values[at] > 0]
        if flags[at] & StepFlag.ABORTED:
            arguments.append(("end", "left by an exception"))
        yield Slice(
            start_ns=int(begin[at]),
            end_ns=max(int(finish[at]), int(begin[at])),
            category="step",
            name=f"step {number}",
            arguments=arguments,
        )


def list_pieces(facts: WindowFacts, rank: int) -> Iterator[Slice]:
    """Where the time goes: lines of the budget, which fill every kept step's period."""
    timeline = facts.timeline
    if timeline is None:
        return
    pieces = timeline.pieces
    # Sorted by rank.
    low, high = np.searchsorted(pieces.rank, [rank, rank + 1]).tolist()
    rows, job = range(low, high), timeline.communication
    columns = zip(
        rows,
        pieces.start_ns[low:high].tolist(),
        pieces.end_ns[low:high].tolist(),
        facts.line[low:high].tolist(),
        pieces.phase[low:high].tolist(),
        pieces.row[low:high].tolist(),
        pieces.step[low:high].tolist(),
        strict=True,
    )
    for _, start, end, line, phase, held, step in columns:
        if end <= start:
            continue
        arguments: list[Argument] = [("step", int(timeline.steps[step]))]
        if phase:
            arguments.append(("phase", timeline.phases[phase]))
        if held >= 0 and job is not None:
            arguments.append(("operation", name_operation(job, held)))
        yield Slice(
            start_ns=start,
            end_ns=end,
            category="time",
            name=facts.lines[line].name,
            arguments=arguments,
        )


def list_actions(facts: WindowFacts, rank: int) -> Iterator[Slice]:
    """One microbatch through one stage, and the wait for its input before it."""
    window, timeline = facts.window, facts.timeline
    recording = window.attempt.ranks[rank]
    if window.steps is None or not recording.has_table("actions"):
        return
    first, last = window.steps
    numbers = np.arange(first, last + 2)
    is_on_device = timeline is not None and bool(
        timeline.on_device[np.searchsorted(timeline.ranks, rank)]
    )
    if is_on_device and timeline is not None and timeline.actions is not None:
        actions, numbers = timeline.actions, timeline.steps
        rows = np.flatnonzero(actions.rank == rank)
    else:
        actions = read_actions(recording, numbers, None, lambda times: times)
        rows = np.flatnonzero(facts.has(rank, actions.start_ns))
        actions = _align_actions(facts, rank, actions)
    for row in rows.tolist():
        name = f"{ACTION_KINDS[actions.kind[row]]}{actions.microbatch[row]}"
        arguments: list[Argument] = [
            ("stage", int(actions.stage[row])),
            ("chunk", int(actions.chunk[row])),
            ("microbatch", int(actions.microbatch[row])),
            ("step", int(numbers[actions.step[row]])),
        ]
        wait_ns = int(actions.wait_ns[row])
        if wait_ns > 0:
            wait_start = int(actions.wait_start_ns[row])
            yield Slice(
                start_ns=wait_start,
                end_ns=wait_start + wait_ns,
                category="wait",
                name=f"wait for input of {name}",
                arguments=arguments,
            )
        yield Slice(
            start_ns=int(actions.start_ns[row]),
            end_ns=int(actions.end_ns[row]),
            category="action",
            name=name,
            arguments=arguments,
        )


def _align_actions(facts: WindowFacts, rank: int, actions: Actions) -> Actions:
    """Of one rank, read on its own clock."""
    waits = actions.wait_ns >= 0
    wait_start = np.where(waits, actions.wait_start_ns, actions.start_ns)
    begin = facts.align(rank, wait_start)
    end = facts.align(rank, wait_start + np.where(waits, actions.wait_ns, 0))
    start = facts.align(rank, actions.start_ns)
    return Actions(
        rank=actions.rank,
        step=actions.step,
        kind=actions.kind,
        stage=actions.stage,
        chunk=actions.chunk,
        microbatch=actions.microbatch,
        start_ns=start,
        end_ns=np.maximum(facts.align(rank, actions.end_ns), start),
        wait_start_ns=np.where(waits, begin, -1),
        wait_ns=np.where(waits, end - begin, -1),
    )


def list_operations(
    facts: WindowFacts, rank: int, arrows: Mapping[int, list[Arrow]]
) -> Iterator[tuple[str, Slice]]:
    """By axis; `arrows` by row of the operations."""
    job = facts.job
    rows, times, split = job.operations.rows, job.times, job.row_times
    low, high = np.searchsorted(rows.rank, [rank, rank + 1]).tolist()
    inside = facts.has(rank, rows.enqueue_ns[low:high])
    for row in (np.flatnonzero(inside) + low).tolist():
        group_index = int(rows.group[row])
        group = job.operations.groups[group_index] if group_index >= 0 else None
        axis = OTHER if group is None else group.axis
        size, peer, microbatch = (
            int(column[row]) for column in (rows.size_bytes, rows.peer, rows.microbatch)
        )
        phase = job.operations.phases[rows.phase[row]]
        arguments: list[Argument] = [("kind", Kind(int(rows.kind[row])).label), ("axis", axis)]
        if group is not None:
            arguments += [("group", group.name), ("group_size", len(group.ranks))]
        arguments += [("bytes", size)] if size >= 0 else []
        arguments += [("peer", peer)] if peer >= 0 else []
        arguments += [("sequence", int(rows.sequence[row])), ("step", int(rows.step[row]))]
        arguments += [("microbatch", microbatch)] if microbatch >= 0 else []
        arguments += [("phase", phase)] if phase != NO_PHASE else []
        if split.is_split[row]:
            wait, transfer = int(split.wait_ns[row]), int(split.transfer_ns[row])
            arguments += [("wait_ns", wait), ("transfer_ns", transfer)]
        outcome = Outcome(int(rows.outcome[row]))
        if outcome is not Outcome.OK:
            arguments.append(("outcome", outcome.label))
        has_end = bool(rows.has_end[row])
        yield (
            axis,
            Slice(
                start_ns=int(times.arrival_ns[row]),
                end_ns=int(times.end_ns[row]) if has_end else NEVER_NS,
                category="operation",
                name=name_operation(job, row),
                arguments=arguments,
                arrows=arrows.get(row, []),
            ),
        )


def list_waits(facts: WindowFacts, rank: int) -> Iterator[Slice]:
    """Calls in which the program waited for an operation that it had started."""
    job, waits = facts.job, facts.job.waits
    own = np.flatnonzero(waits.rank == rank)
    own = own[facts.has(rank, waits.start_ns[own]) & (waits.duration_ns[own] > 0)]
    start = waits.start_ns[own]
    begin, end = facts.align(rank, start), facts.align(rank, start + waits.duration_ns[own])
    for at, row in enumerate(waits.row[own].tolist()):
        what = "an operation" if row < 0 else name_operation(job, row)
        yield Slice(
            start_ns=int(begin[at]),
            end_ns=max(int(end[at]), int(begin[at])),
            category="wait",
            name=f"wait for {what}",
            arguments=[("step", int(waits.step[own[at]]))],
        )


def name_operation(job: Job, row: int) -> str:
    """`all_reduce dp`."""
    rows = job.operations.rows
    group = int(rows.group[row])
    axis = job.operations.groups[group].axis if group >= 0 else OTHER
    return f"{Kind(int(rows.kind[row])).label} {axis}"


def find_arrows(facts: WindowFacts, ranks: frozenset[int]) -> dict[int, list[Arrow]]:
    """By row of the operations: an arrow from every other rank of a matched operation to the one
    that came last, between ranks and moments that are exported."""
    job, window = facts.job, facts.window
    rows, matches = job.operations.rows, job.matches
    is_shown = np.zeros(len(rows), dtype=np.bool_)
    for rank in ranks:
        low, high = np.searchsorted(rows.rank, [rank, rank + 1]).tolist()
        until = window.until_ns[rank] if window.is_last else MAX_TIME_NS
        times = rows.enqueue_ns[low:high]
        is_shown[low:high] = (times > window.first_ns[rank]) & (times <= until)
    kept = matches.is_usable[matches.of_member] & is_shown[matches.member]
    member, match = matches.member[kept], matches.of_member[kept]
    arrival = job.times.arrival_ns[member]
    order = np.lexsort((rows.rank[member], arrival, match))
    member, match = member[order], match[order]
    found: dict[int, list[Arrow]] = {}
    ends = np.flatnonzero(np.append(np.diff(match) != 0, len(match) > 0)).tolist()
    begin = 0
    for end in ends:
        last = int(member[end])
        for row in member[begin:end].tolist():
            flow = _number_arrow(facts, last, row)
            found.setdefault(row, []).append((flow, False))
            found.setdefault(last, []).append((flow, True))
        begin = end + 1
    return found


def _number_arrow(facts: WindowFacts, last: int, row: int) -> int:
    """The same in every window that sees both: ranks and moments of its ends."""
    rows = facts.job.operations.rows
    ends = (rows.rank[last], rows.enqueue_ns[last], rows.rank[row], rows.enqueue_ns[row])
    return hash(tuple(int(value) for value in ends)) & 0x7FFFFFFFFFFFFFFF or 1
