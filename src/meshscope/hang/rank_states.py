"""The state of a rank: what it has entered, what it is in, how it ended.

`rank_look` fills these in from a run directory. Times are unix nanoseconds. Ranks of one boot of
one host share a clock, and their times compare exactly; times of different hosts are as far off as
their wall clocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from meshscope.core.layout import Layout
from meshscope.core.operations import STEP_SHIFT, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.hang.processes import ProcessState

SENDS, RECEIVES = 1, 2
"""Directions of messages, as `in_flight.bin` has them."""
_NO_RANK = -1
_STEP_MASK = (1 << 32 - STEP_SHIFT) - 1
"""Steps in a sequence number go round."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationGroup:
    """A process group of the job; one object per group, for quick look-up."""

    name: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    """Members in ascending order; if no rank recorded them, the ranks with a group of this name."""
    axis: str
    """`tp`, `dp+cp`, `world`, `other`: see `group_axes`."""


class Meeting(NamedTuple):
    """What ranks meet in: a group's n-th collective, or one message."""

    group: OperationGroup
    sequence: int
    source: int = _NO_RANK
    """Of a message; -1 for a collective, or if any rank may send it."""
    destination: int = _NO_RANK
    tag: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it is a send and its receive."""
        return self.destination != _NO_RANK

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks it needs; all that could send if the source is open."""
        if not self.is_message:
            return self.group.ranks
        if self.source == _NO_RANK:
            return self.group.ranks
        return (self.source, self.destination)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on one rank."""

    rank: int
    kind: Kind
    meeting: Meeting
    peer: int
    """Root or other side; -1 when there is none."""
    size_bytes: int
    is_async: bool
    """The program got a handle, so it may not hold its caller up."""
    is_device: bool
    entered_unix_ns: int
    ended_unix_ns: int | None
    outcome: Outcome
    message: str
    """Of one that failed."""
    phase: str
    step: int | None

    @property
    def group(self) -> OperationGroup:
        return self.meeting.group

    @property
    def group_name(self) -> str:
        """torch's name for the group."""
        return self.meeting.group.name

    @property
    def axis(self) -> str:
        """The axis of the group."""
        return self.meeting.group.axis

    @property
    def sequence(self) -> int:
        """Index among the operations of its group, from 0."""
        return self.meeting.sequence

    @property
    def known_peer(self) -> int | None:
        """Root or other side; None when there is none."""
        return self.peer if self.peer >= 0 else None

    @property
    def is_failed(self) -> bool:
        """Whether it ended in an error."""
        return self.outcome in (Outcome.ERROR, Outcome.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPhase:
    name: str
    since_unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of one rank."""

    rank: int
    directory: Path | None
    """None when it has recorded nothing at all."""
    host: str = ""
    process: ProcessState
    looked_unix_ns: int
    """Now, on its clock; if the job is over, the time of the last record."""
    is_closed: bool = False
    """It has a closing line: its program ended, well or not."""
    closed_unix_ns: int | None = None
    exception: str = ""
    """The exception its program ended with, if known."""
    stack_signal: int | None = None
    entered: Mapping[OperationGroup, int] = field(default_factory=dict)
    """Collectives called per group."""
    entered_last_kind: Mapping[OperationGroup, Kind] = field(default_factory=dict)
    messages: Mapping[tuple[OperationGroup, int, int], int] = field(default_factory=dict)
    """Number of sends to (1) or receives from (2) a peer, by the rank's own count."""
    message_tags: Mapping[tuple[OperationGroup, int, int, int], int] = field(default_factory=dict)
    """The same per tag, as far as the operations in memory show it."""
    is_complete: bool = True
    """False if not all of its operations are recorded: then it may have entered any of them."""
    resting_since_step: int | None = None
    """From this step on operations are not recorded, to keep the cost small; None: they are."""
    is_delayed: bool = False
    """Its files cannot be mapped and are written a few times a second."""
    in_flight: tuple[Operation, ...] = ()
    """Entered and not known to have ended, oldest first."""
    recent: tuple[Operation, ...] = ()
    """The last operations that ended, oldest first."""
    phase: OpenPhase | None = None
    last_phase: str = ""
    step: int | None = None
    """The step it is in, or was in last."""
    step_ns: int | None = None
    """Mean time of its last steps; None before the second."""
    last_sign_unix_ns: int | None = None
    """Time of its last record."""
    problem: str = ""
    """What could not be read."""

    @property
    def failures(self) -> tuple[Operation, ...]:
        """Operations that ended in an error, oldest first."""
        failed = (operation for operation in self.recent if operation.is_failed)
        return tuple(sorted(failed, key=lambda o: o.ended_unix_ns or 0))

    @property
    def is_resting(self) -> bool:
        """Whether it is in a step whose operations it does not record, or died in one."""
        return self.resting_since_step is not None and not self.is_closed

    @property
    def has_ended(self) -> bool:
        """Whether it will certainly enter nothing more."""
        return self.is_closed or self.process.is_gone

    def is_before(self, meeting: Meeting) -> bool:
        """Whether this member, which rests, has certainly not called its part: numbers say the
        step on such ranks, and it has not finished the one before."""
        if self.step is None:
            return False
        reached = self.step if self.phase is not None or self.last_phase else self.step + 1
        ahead = (meeting.sequence >> STEP_SHIFT) - reached & _STEP_MASK
        return 0 < ahead <= _STEP_MASK >> 1

    def has_entered(self, meeting: Meeting) -> bool:
        """Whether this member has called its part."""
        if not meeting.is_message:
            return self.entered.get(meeting.group, 0) > meeting.sequence
        is_sender = self.rank != meeting.destination
        direction = SENDS if is_sender else RECEIVES
        peer = meeting.destination if is_sender else meeting.source
        by_tag = self.message_tags.get((meeting.group, direction, peer, meeting.tag), 0)
        if by_tag > meeting.sequence:
            return True
        tags = {
            tag
            for group, way, other, tag in self.message_tags
            if (group, way, other) == (meeting.group, direction, peer)
        }
        if tags - {meeting.tag}:  # the channel counts all tags together
            return False
        return self.messages.get((meeting.group, direction, peer), 0) > meeting.sequence

    def find(self, meeting: Meeting) -> Operation | None:
        """Its part in a meeting, if it is still in memory."""
        for operation in (*self.in_flight, *reversed(self.recent)):
            if operation.meeting == meeting:
                return operation
        return None

    def is_inside(self, meeting: Meeting) -> bool:
        """Whether it has called its part and has not finished it."""
        operation = self.find(meeting)
        if operation is not None:
            return operation.outcome is Outcome.UNFINISHED
        # Killed between noting the call and noting the operation.
        is_last = self.entered.get(meeting.group) == meeting.sequence + 1
        return is_last and not meeting.is_message and self.has_entered(meeting)

    def kind_in(self, meeting: Meeting) -> Kind | None:
        """The kind that it called there; None if it has not, or if that is no longer known."""
        operation = self.find(meeting)
        if operation is not None:
            return operation.kind
        if not meeting.is_message and self.entered.get(meeting.group) == meeting.sequence + 1:
            return self.entered_last_kind.get(meeting.group)
        return None


def find_pair_axis(
    group: OperationGroup, source: int, destination: int, layout: Layout | Unavailable
) -> str:
    """The axis along which a message travels; its group's if that cannot be inferred."""
    if isinstance(layout, Unavailable) or max(source, destination) >= layout.world_size:
        return group.axis
    if min(source, destination) < 0:
        return group.axis
    here, there = layout.coordinates(source), layout.coordinates(destination)
    axes = [str(axis) for axis in layout.named_axes if here.along(axis) != there.along(axis)]
    return axes[0] if len(axes) == 1 else group.axis
