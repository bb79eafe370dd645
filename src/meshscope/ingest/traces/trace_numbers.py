"""Numbers of the operations in traces: an operation has the same on all ranks of its group.

They are the group's own (`Seq`) where all traces say so; else they count by step, group and the
order in which each rank launched them. Without steps they count from the end of the trace, and also
where steps are a guess: that of a kernel without a launching call comes from its time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_collectives import TraceCollective
from meshscope.ingest.traces.trace_recording import RecordedCollective, TraceRecording
from meshscope.store.schema import MISSING

_Channel = tuple[str, int, int]


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
    last_step: int
    """Of its trace."""

    @property
    def size_bytes(self) -> int:
        """-1 where it is not known, as of one message of several."""
        size = self.recorded.found.size_bytes
        return MISSING if isinstance(size, Unavailable) or self.is_one_of_many else size


def _list_operations(trace: TraceRecording, rank: int) -> Iterator[Operation]:
    for recorded in _sort_by_launch(trace):
        yield from _expand(recorded, rank, _last_step(trace))


def _last_step(trace: TraceRecording) -> int:
    return int(trace.steps.number[-1]) if len(trace.steps.number) else MISSING


def _expand(recorded: RecordedCollective, rank: int, last_step: int) -> Iterator[Operation]:
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
                last_step=last_step,
            )
    if not found.messages:
        yield Operation(
            recorded=recorded,
            kind=next((kind for kind in Kind if kind.label == found.kind), Kind.CUSTOM),
            peer=MISSING,
            is_one_of_many=False,
            channel=(group, MISSING, MISSING),
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
    stated = _number_as_stated(operations)
    whole = _find_whole(by_rank, operations)
    counts = _count_operations(operations, whole)
    first: dict[_Cell, int] = {}
    total: dict[_Channel, int] = {}
    for step, channel in sorted(counts, key=lambda cell: cell[0]):
        first[step, channel] = total.get(channel, 0)
        total[channel] = first[step, channel] + max(counts[step, channel].values())
    numbered: dict[int, list[Numbered]] = {}
    for rank, traces in operations.items():
        seen: dict[_Cell, int] = {}
        numbered[rank] = []
        for own in traces:
            rows: Numbered = []
            for one in own:
                cell = _cell_of(one, whole)
                place = seen.get(cell, 0)
                seen[cell] = place + 1
                count = counts[cell]
                # Traces begin at different moments and end together.
                absent = max(count.values()) - count[rank] if one.channel in whole else 0
                number = stated.get(id(one))
                rows.append((one, first[cell] + absent + place if number is None else number))
            numbered[rank].append(rows)
    return numbered


def _sort_by_launch(trace: TraceRecording) -> list[RecordedCollective]:
    """Kernels on several streams may begin in another order on every rank. Where the trace lacks
    some of the launching calls, the order in which kernels began is kept: mixed, it is neither."""
    found = list(trace.collectives)
    if all(one.enqueue_ns < one.found.begin_ns for one in found):
        found.sort(key=lambda one: (one.enqueue_ns, one.found.begin_ns))
    return found


def _number_as_stated(operations: _Operations) -> dict[int, int]:
    """Numbers of the operations, by identity, of channels whose operations all have a `Seq`."""
    channels: dict[_Channel, dict[tuple[int | None, int], list[Operation]]] = {}
    for traces in operations.values():
        seen: dict[tuple[_Channel, int | None], int] = {}
        for one in (one for own in traces for one in own):
            sequence = one.recorded.found.sequence if one.peer == MISSING else None
            # A group that coalesces gives several the same number.
            place = seen[one.channel, sequence] = seen.get((one.channel, sequence), -1) + 1
            channels.setdefault(one.channel, {}).setdefault((sequence, place), []).append(one)
    numbers: dict[int, int] = {}
    for keyed in channels.values():
        if all(sequence is not None for sequence, _ in keyed):
            ordered = sorted(keyed, key=lambda key: (key[0] or 0, key[1]))
            numbers.update((id(one), at) for at, key in enumerate(ordered) for one in keyed[key])
    return numbers


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
