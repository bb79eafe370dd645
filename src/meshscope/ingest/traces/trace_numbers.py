"""Numbers of the operations in traces: an operation has the same on all ranks of its group.

They are the group's own (`Seq`) where all traces say so; else they count by step, group and the
order in which each rank launched them. In its first step a trace may lack operations at the front:
there they count from the step's end, unless their kinds and sizes say otherwise. Without steps they
count from the end of the trace, and also where steps are a guess: that of a kernel without a
launching call comes from its time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_collectives import TraceCollective
from meshscope.ingest.traces.trace_recording import RecordedCollective, TraceRecording
from meshscope.store.schema import MISSING

_Channel = tuple[str, int, int]
_MAX_TRIED = 256
"""Operations at most that a trace may lack in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of `collectives`: a kernel, or one of the messages that a kernel sends at once."""

    recorded: RecordedCollective
    kind: Kind
    peer: int
    """The other side of a message; -1."""
    is_one_of_many: bool
    channel: _Channel
    """Operations of one are matched by their order: a group, and of a message who to whom."""
    first_step: int
    """Of its trace."""
    last_step: int
    """Of its trace."""

    @property
    def size_bytes(self) -> int:
        """-1 where it is not known, as of one message of several."""
        size = self.recorded.found.size_bytes
        return MISSING if isinstance(size, Unavailable) or self.is_one_of_many else size


def _list_operations(trace: TraceRecording, rank: int) -> Iterator[Operation]:
    for recorded in _sort_by_launch(trace):
        yield from _expand(recorded, rank, _first_step(trace), _last_step(trace))


def _last_step(trace: TraceRecording) -> int:
    return int(trace.steps.number[-1]) if len(trace.steps.number) else MISSING


def _first_step(trace: TraceRecording) -> int:
    return int(trace.steps.number[0]) if len(trace.steps.number) else MISSING


def _expand(
    recorded: RecordedCollective, rank: int, first_step: int, last_step: int
) -> Iterator[Operation]:
    """What a recorder would have seen of a kernel.

    Messages whose sides are not known are CUSTOM: whom they wait for is not known either.
    """
    found = recorded.found
    group = group_key(found)
    for sender, receiver in found.messages:
        if rank in (sender, receiver) and sender != receiver:
            is_send = rank == sender
            yield Operation(
                recorded=recorded,
                kind=Kind.SEND if is_send else Kind.RECV,
                peer=receiver if is_send else sender,
                is_one_of_many=len(found.messages) > 1,
                channel=(group, sender, receiver),
                first_step=first_step,
                last_step=last_step,
            )
    if not found.messages:
        yield Operation(
            recorded=recorded,
            kind=next((kind for kind in Kind if kind.label == found.kind), Kind.CUSTOM),
            peer=MISSING,
            is_one_of_many=False,
            channel=(group, MISSING, MISSING),
            first_step=first_step,
            last_step=last_step,
        )


Numbered = list[tuple[Operation, int]]
_Operations = Mapping[int, list[list[Operation]]]
"""By rank, of each of its traces."""


def number_operations(by_rank: Mapping[int, Sequence[TraceRecording]]) -> dict[int, list[Numbered]]:
    """Per rank and trace its operations with their sequence numbers, alike on all ranks."""
    operations = {
        rank: [list(_list_operations(trace, rank)) for trace in own]
        for rank, own in by_rank.items()
    }
    numbers = _count_by_step(operations, _find_whole(by_rank, operations))
    numbers |= _number_as_stated(operations)
    return {
        rank: [[(one, numbers[id(one)]) for one in own] for own in traces]
        for rank, traces in operations.items()
    }


def _count_by_step(operations: _Operations, whole: Collection[_Channel]) -> dict[int, int]:
    """Numbers by identity: in each step as the rank counts that has the most operations there."""
    cells: dict[_Cell, dict[int, list[Operation]]] = {}
    for rank, traces in operations.items():
        for one in (one for own in traces for one in own):
            cells.setdefault(_cell_of(one, whole), {}).setdefault(rank, []).append(one)
    numbers: dict[int, int] = {}
    total: dict[_Channel, int] = {}
    for step, channel in sorted(cells, key=lambda cell: cell[0]):
        ranks = cells[step, channel]
        longest = max(ranks.values(), key=len)
        first = total.get(channel, 0)
        total[channel] = first + len(longest)
        for own in ranks.values():
            # Traces begin at different operations, in the middle of their first step.
            is_opening = channel in whole or step == own[0].first_step
            start = first + _find_offset(longest, own, at_end=is_opening)
            numbers.update((id(one), start + place) for place, one in enumerate(own))
    return numbers


def _find_offset(longest: list[Operation], own: list[Operation], *, at_end: bool) -> int:
    """How many of the longest list come before the first of this one: all that are missing, or
    none, or what else makes operations alike."""
    room = len(longest) - len(own)
    tried = range(min(room, _MAX_TRIED) + 1)
    if at_end:
        tried = range(room, max(room - _MAX_TRIED, 0) - 1, -1)
    alike = (
        offset for offset in tried if all(map(_is_alike, longest[offset : offset + len(own)], own))
    )
    return next(alike, tried[0])


def _is_alike(one: Operation, other: Operation) -> bool:
    is_message = one.peer != MISSING
    sizes = {one.size_bytes, other.size_bytes} - {MISSING}
    return (is_message or one.kind == other.kind) and len(sizes) < 2


def _sort_by_launch(trace: TraceRecording) -> list[RecordedCollective]:
    """Kernels on several streams may begin in another order on every rank. Where the trace lacks
    some of the launching calls, the order in which kernels began is kept: mixed, it is neither."""
    found = list(trace.collectives)
    if all(one.enqueue_ns < one.found.begin_ns for one in found):
        found.sort(key=lambda one: (one.enqueue_ns, one.found.begin_ns))
    return found


def _number_as_stated(operations: _Operations) -> dict[int, int]:
    """Numbers of the operations, by identity, of channels whose operations have a `Seq`.

    What was launched before a trace began has none: it counts back from the first that does. Where
    ranks then disagree, such an operation is matched with none.
    """
    channels: dict[_Channel, dict[int, list[Operation]]] = {}
    for rank, traces in operations.items():
        for one in (one for own in traces for one in own if one.peer == MISSING):
            channels.setdefault(one.channel, {}).setdefault(rank, []).append(one)
    numbers: dict[int, int] = {}
    for ranks in channels.values():
        keyed: dict[_StatedKey, list[Operation]] = {}
        if all(_add_stated(keyed, own) for own in ranks.values()):
            for rank, own in ranks.items():
                _add_earlier(keyed, own, rank)
            ordered = sorted(keyed)
            numbers.update((id(one), at) for at, key in enumerate(ordered) for one in keyed[key])
    return numbers


_StatedKey = tuple[int, int, int]
"""Sequence number, place among those with the same, and 0, or 1 + the rank that has it alone."""


def _add_stated(keyed: dict[_StatedKey, list[Operation]], own: list[Operation]) -> bool:
    """Whether all operations of a rank from its first stated one on have a number."""
    stated = own[_count_unstated(own) :]
    seen: dict[int, int] = {}
    for one in stated:
        sequence = one.recorded.found.sequence
        if sequence is None:
            return False
        # A group that coalesces gives several the same number.
        place = seen[sequence] = seen.get(sequence, -1) + 1
        keyed.setdefault((sequence, place, 0), []).append(one)
    return bool(stated)


def _add_earlier(keyed: dict[_StatedKey, list[Operation]], own: list[Operation], rank: int) -> None:
    count = _count_unstated(own)
    first = own[count].recorded.found.sequence or 0
    for place, one in enumerate(own[:count]):
        key = (first - count + place, 0, 0)
        if not all(_is_alike(one, other) for other in keyed.get(key, ())):
            key = (key[0], 0, 1 + rank)
        keyed.setdefault(key, []).append(one)


def _count_unstated(own: list[Operation]) -> int:
    """Operations before the first that has a number."""
    stated = (i for i, one in enumerate(own) if one.recorded.found.sequence is not None)
    return next(stated, len(own))


_Cell = tuple[int, _Channel]
"""A step and a channel."""


def _cell_of(one: Operation, whole: Collection[_Channel]) -> _Cell:
    return one.last_step if one.channel in whole else one.recorded.step, one.channel


def _find_whole(
    by_rank: Mapping[int, Sequence[TraceRecording]], operations: _Operations
) -> set[_Channel]:
    """Channels that are counted over a whole trace and not by step: traces without steps, and
    kernels without a launching call whose steps, guessed from times, differ between ranks."""
    counts = _count_operations(operations, ())
    if not all(one.has_steps for own in by_rank.values() for one in own):
        return {channel for _, channel in counts}
    if len({tuple(map(_last_step, own)) for own in by_rank.values()}) > 1:
        return set()
    guessed = {
        one.channel
        for traces in operations.values()
        for own in traces
        for one in own
        if one.recorded.enqueue_ns >= one.recorded.found.begin_ns
    }
    ranks: dict[_Channel, set[int]] = {}
    for (_, channel), count in counts.items():
        ranks.setdefault(channel, set()).update(count)
    return {
        channel
        for (_, channel), count in counts.items()
        if channel in guessed and len({count.get(rank, 0) for rank in ranks[channel]}) > 1
    }


def _count_operations(
    operations: _Operations, whole: Collection[_Channel]
) -> dict[_Cell, dict[int, int]]:
    """By step and channel how many each side of it has: of messages, sender and receiver."""
    counts: dict[_Cell, dict[int, int]] = {}
    for rank, traces in operations.items():
        for own in traces:
            for one in own:
                count = counts.setdefault(_cell_of(one, whole), {})
                count[rank] = count.get(rank, 0) + 1
    return counts


def group_key(found: TraceCollective) -> str:
    return f"{found.group}\0{','.join(map(str, found.ranks))}"
