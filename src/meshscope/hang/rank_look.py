"""Reads the state of every rank of an attempt, in a time that does not depend on its length.

It reads the journals, `now.bin`, the last records of a few tables, and the kernel's view of
processes of this host. The processes need not be alive.
"""

import itertools
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshscope.core.group_axis import name_axis
from meshscope.core.operations import POINT_TO_POINT, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.hang.processes import Here, Life, ProcessState, is_this_boot, look_at_process
from meshscope.hang.rank_states import (
    RECEIVES,
    SENDS,
    Meeting,
    OpenPhase,
    Operation,
    OperationGroup,
    RankState,
)
from meshscope.store.read.files import read_file_end
from meshscope.store.read.now_parts import read_open_step_part
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.read.tail import Record, read_last_rows, read_step_tail
from meshscope.store.schema import OPERATION_NOTES, TABLES, NoteCode, OperationFlag, Table
from meshscope.store.write.groups import Group
from meshscope.store.write.in_flight import NUM_CHANNELS, InFlight
from meshscope.store.write.journal import EXIT_LINE, JOURNAL_NAME, read_journal
from meshscope.store.write.open_step import read_open_step

_NUM_RECENT = 32
"""Last finished operations that are read of each rank; fewer if there are many ranks."""
_MIN_RECENT = 4
_MAX_RECENT_IN_ALL = 8192
_NUM_NOTES = 64
_MAX_SILENT = 1 << 16
"""Ranks without a recording that are listed: a header may claim any number."""
_COMMUNICATION = "communication"
_JOURNAL_END_BYTES = 8192
_RECORD = struct.Struct("<Q7q")


def look_at_ranks(attempt: Attempt, here: Here) -> dict[int, RankState]:
    """The state of every rank, also of those that recorded nothing."""
    look = _Look(attempt, here)
    states = {recording.rank: look.at(recording) for recording in attempt}
    if all(state.has_ended for state in states.values()):
        # A rank that waited did so until its end, and only its last record is known.
        end_ns = max((state.last_sign_unix_ns or 0 for state in states.values()), default=0)
        states = {rank: replace(s, looked_unix_ns=end_ns) for rank, s in states.items()}
    for rank in itertools.islice(attempt.missing_ranks, _MAX_SILENT):
        states[rank] = RankState(
            rank=rank,
            directory=None,
            process=ProcessState(life=Life.UNKNOWN, reason="it has recorded nothing"),
            looked_unix_ns=time.time_ns(),
        )
    return dict(sorted(states.items()))


class _Clocks:
    """Offsets of ranks' monotonic clocks: one number for all ranks of a boot."""

    def __init__(self, attempt: Attempt, here: Here) -> None:
        self._here = here
        self._offsets: dict[tuple[str, str], int] = {}
        for recording in attempt:
            key = self._key(recording)
            if key is not None:
                self._offsets.setdefault(key, recording.unix_offset_ns)

    @staticmethod
    def _key(recording: Recording) -> tuple[str, str] | None:
        host, boot = recording.header.get("host"), recording.header.get("clock_id")
        if isinstance(host, str) and isinstance(boot, str) and boot:
            return (host, boot)
        return None

    def offset_of(self, recording: Recording) -> int:
        key = self._key(recording)
        return self._offsets[key] if key is not None else recording.unix_offset_ns

    def now_of(self, recording: Recording) -> int:
        if self._key(recording) is not None and is_this_boot(recording.header, self._here):
            return time.monotonic_ns() + self.offset_of(recording)
        return time.time_ns()


class _Groups:
    """The groups of all ranks, each once: those with one name and the same members.

    Ranks that are stuck may not have met the same groups yet, so names count here even if no two
    ranks have one in common.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._layout = None if isinstance(attempt.layout, Unavailable) else attempt.layout
        self._world_size = attempt.world_size
        self._found: dict[tuple[str, tuple[int, ...], int], OperationGroup] = {}
        self._users: dict[str, list[int]] = {}
        for recording in attempt:
            for group in recording.groups.values():
                self._users.setdefault(group.name, []).append(recording.rank)

    def number(self, recording: Recording) -> dict[int, OperationGroup]:
        """By the rank's own numbers. A group that is made again under its name is another one."""
        num_seen: dict[tuple[str, tuple[int, ...]], int] = {}
        groups = {}
        for group_id, group in sorted(recording.groups.items()):
            ranks = tuple(sorted(set(group.ranks or self._users[group.name])))
            repeat = num_seen.get((group.name, ranks), 0)
            num_seen[group.name, ranks] = repeat + 1
            found = self._found.get((group.name, ranks, repeat))
            if found is None:
                found = self._make(group, ranks)
                self._found[group.name, ranks, repeat] = found
            groups[group_id] = found
        return groups

    def _make(self, group: Group, ranks: tuple[int, ...]) -> OperationGroup:
        axis, _ = name_axis(
            ranks, group.description, layout=self._layout, world_size=self._world_size
        )
        return OperationGroup(
            name=group.name,
            description=group.description,
            backend=group.backend,
            ranks=ranks,
            axis=axis,
        )


class _Field:
    """Reads one column of a record's seven words."""

    def __init__(self, table: Table, name: str) -> None:
        column = table.column(name)
        self._word = column.word - 1
        self._shift = column.shift
        self._mask = (1 << column.width) - 1 if column.width < 64 else 0
        self._less = 1 if column.is_stored_plus_one else 0

    def read(self, words: Record) -> int:
        word = words[self._word]
        return (word >> self._shift & self._mask) - self._less if self._mask else word


_OPERATION = {
    column.name: _Field(TABLES["collectives"], column.name)
    for column in TABLES["collectives"].columns
}
_NOTE = {column.name: _Field(OPERATION_NOTES, column.name) for column in OPERATION_NOTES.columns}


class _Look:
    """Reads the states of ranks."""

    def __init__(self, attempt: Attempt, here: Here) -> None:
        self._here = here
        self._clocks = _Clocks(attempt, here)
        self._groups = _Groups(attempt)
        share = _MAX_RECENT_IN_ALL // max(len(attempt.ranks), 1)
        self._num_recent = min(max(share, _MIN_RECENT), _NUM_RECENT)

    def at(self, recording: Recording) -> RankState:
        # Open operations before the tables: one that ends in between is then in both.
        found = _read_in_flight(recording)
        now_ns = self._clocks.now_of(recording)
        offset_ns = self._clocks.offset_of(recording)
        reading = _Reading(recording, self._groups.number(recording), offset_ns)
        tail = _tail(recording, "collectives", self._num_recent)
        recent = reading.operations(tail, _read_messages(recording, tail))
        records = [_RECORD.unpack(record)[1:] for record in found.records] if found else []
        in_flight = reading.in_flight(records, recent)
        steps = read_step_tail(recording.directory)
        last_end_ns = steps.end_host_mono_ns if steps else 0
        phase, last_phase, stamp_ns = _read_phase(recording, last_end_ns)
        end_ns = (recording.closing or {}).get("end_host_mono_ns")
        operations = (*recent, *in_flight)
        signs_ns = [
            *(max(o.entered_unix_ns, o.ended_unix_ns or 0) for o in operations),
            *(time_ns + offset_ns for time_ns in (last_end_ns, stamp_ns) if time_ns),
            *([end_ns + offset_ns] if isinstance(end_ns, int) else []),
            *(c.last_host_mono_ns + offset_ns for c in (found.channels if found else ())),
        ]
        counts = _count_entered(found, reading.groups, operations)
        resting = None if found is None else found.resting_since_step
        return RankState(
            rank=recording.rank,
            directory=recording.directory,
            host=str(recording.header.get("host", ""))[:200],
            process=look_at_process(recording.header, self._here),
            looked_unix_ns=now_ns,
            is_closed=recording.closing is not None,
            closed_unix_ns=end_ns + offset_ns if isinstance(end_ns, int) else None,
            exception=read_exception(recording),
            stack_signal=_find_stack_signal(recording),
            entered=counts.entered,
            entered_last_kind=counts.last_kinds,
            messages=counts.messages,
            message_tags=counts.message_tags,
            is_complete=(found is None or len(found.channels) < NUM_CHANNELS)
            and _notes_operations(recording)
            and resting is None,
            resting_since_step=resting,
            is_delayed=recording.header.get("sink") == "append",
            in_flight=in_flight,
            recent=recent,
            phase=OpenPhase(name=phase[0], since_unix_ns=phase[1] + offset_ns) if phase else None,
            last_phase=last_phase,
            step=_find_step(
                operations,
                steps.last_step if steps else None,
                has_phase=phase is not None or bool(last_phase),  # of the step after the last
            ),
            step_ns=steps.mean_step_ns if steps else None,
            last_sign_unix_ns=max(signs_ns, default=None),
            problem="; ".join(problem.text for problem in recording.problems[:3]),
        )


def _notes_operations(recording: Recording) -> bool:
    """Whether its recorder sees communication, as far as the journal says."""
    if any(line.get("where") == _COMMUNICATION for line in recording.health):
        return False
    is_on = recording.header.get(_COMMUNICATION) is not False
    for update in recording.updates:
        if "paused_host_mono_ns" in update:
            is_on = False
        if "resumed_host_mono_ns" in update:
            is_on = True
        config = update.get("config")
        if isinstance(config, dict) and _COMMUNICATION in config:
            is_on = config[_COMMUNICATION] == "True"
    return is_on


def _read_in_flight(recording: Recording) -> InFlight | None:
    found = recording.in_flight()
    if found is not None and found.num_damaged:
        again = recording.in_flight()  # it may just have been written
        found = again if again is not None and again.num_damaged < found.num_damaged else found
    return found


def _tail(recording: Recording, table: str, count: int) -> list[Record]:
    try:
        return read_last_rows(recording.directory, table, count)
    except OSError:  # the rank wrote none
        return []


class _Reading:
    def __init__(
        self, recording: Recording, groups: Mapping[int, OperationGroup], offset_ns: int
    ) -> None:
        self.groups = groups
        self._recording = recording
        self._offset_ns = offset_ns

    def operations(
        self, records: Iterable[Record], messages: Mapping[int, str]
    ) -> tuple[Operation, ...]:
        """Those in known groups."""
        read = (self._operation(words, messages) for words in records)
        return tuple(operation for operation in read if operation is not None)

    def in_flight(
        self, records: Iterable[Record], recent: Iterable[Operation]
    ) -> tuple[Operation, ...]:
        """Those that are not over, oldest first; none if the rank has ended."""
        if self._recording.closing is not None:
            return ()
        ended = {operation.entered_unix_ns for operation in recent}
        found = [o for o in self.operations(records, {}) if o.entered_unix_ns not in ended]
        return tuple(sorted(found, key=lambda operation: operation.entered_unix_ns))

    def _operation(self, words: Record, messages: Mapping[int, str]) -> Operation | None:
        def value(name: str) -> int:
            return _OPERATION[name].read(words)

        group = self.groups.get(value("group_id"))
        enqueue_ns, end_ns = value("enqueue_host_mono_ns"), value("end_host_mono_ns")
        if group is None:
            return None
        try:
            kind, outcome = Kind(value("kind")), Outcome(value("outcome"))
        except ValueError:  # of a later version
            kind, outcome = Kind.CUSTOM, Outcome.UNSEEN
        flags, peer, phase_id = value("flags"), value("peer"), value("phase_id")
        return Operation(
            rank=self._recording.rank,
            kind=kind,
            meeting=self._meeting(group, kind, value("sequence"), peer, value("tag")),
            peer=peer,
            size_bytes=value("size_bytes"),
            is_async=bool(flags & OperationFlag.ASYNC),
            is_device=bool(flags & OperationFlag.DEVICE),
            entered_unix_ns=enqueue_ns + self._offset_ns,
            ended_unix_ns=end_ns + self._offset_ns if end_ns >= 0 else None,
            outcome=outcome,
            message=messages.get(enqueue_ns, ""),
            phase=self._recording.name_of(phase_id) if phase_id else "",
            step=step if (step := value("step")) >= 0 else None,
        )

    def _meeting(
        self, group: OperationGroup, kind: Kind, sequence: int, peer: int, tag: int
    ) -> Meeting:
        if kind not in POINT_TO_POINT:
            return Meeting(group, sequence)
        ends = (self._recording.rank, peer) if kind is Kind.SEND else (peer, self._recording.rank)
        return Meeting(group, sequence, *ends, tag)


def _read_messages(recording: Recording, tail: Sequence[Record]) -> dict[int, str]:
    """Error texts of failed operations by the time of their call."""
    outcome = _OPERATION["outcome"]
    if all(outcome.read(words) not in (Outcome.ERROR, Outcome.TIMEOUT) for words in tail):
        return {}
    return {
        _NOTE["operation_enqueue_host_mono_ns"].read(words): recording.name_of(
            _NOTE["name_id"].read(words)
        )
        for words in _tail(recording, "operation_notes", _NUM_NOTES)
        if _NOTE["code"].read(words) == NoteCode.ERROR
    }


@dataclass(slots=True)
class _Counts:
    entered: dict[OperationGroup, int] = field(default_factory=dict)
    last_kinds: dict[OperationGroup, Kind] = field(default_factory=dict)
    messages: dict[tuple[OperationGroup, int, int], int] = field(default_factory=dict)
    message_tags: dict[tuple[OperationGroup, int, int, int], int] = field(default_factory=dict)


def _count_entered(
    found: InFlight | None, groups: Mapping[int, OperationGroup], operations: Iterable[Operation]
) -> _Counts:
    """Counts of called operations per channel, from the channel rows and the operations."""
    counts = _Counts()
    for channel in found.channels if found else ():
        group = groups.get(channel.group_id)
        if group is None:
            continue
        if channel.direction in (SENDS, RECEIVES):
            counts.messages[group, channel.direction, channel.peer] = channel.num_entered
            continue
        counts.entered[group] = channel.num_entered
        try:
            counts.last_kinds[group] = Kind(channel.last_kind)
        except ValueError:
            pass
    for operation in operations:
        meeting, number = operation.meeting, operation.meeting.sequence + 1
        group = meeting.group
        if not meeting.is_message:
            if number > counts.entered.get(group, 0):
                counts.entered[group] = number
                counts.last_kinds[group] = operation.kind
            continue
        direction = SENDS if operation.kind is Kind.SEND else RECEIVES
        key = (group, direction, operation.peer, meeting.tag)
        counts.message_tags[key] = max(number, counts.message_tags.get(key, 0))
    return counts


def _read_phase(recording: Recording, last_end_ns: int) -> tuple[tuple[str, int] | None, str, int]:
    """The open phase and its start, the last finished phase, and the latest time stamp."""
    if recording.closing is not None:
        return None, "", 0
    try:
        _, data = read_open_step_part(recording.directory)
        phases = [] if data is None else read_open_step(data, last_end_ns)[0]
    except (OSError, ValueError):  # not where files cannot be mapped
        return None, "", 0
    stamps = [p.end_host_mono_ns or p.start_host_mono_ns for p in phases]
    going_on = [p for p in phases if p.end_host_mono_ns is None]
    over = [p for p in phases if p.end_host_mono_ns is not None]
    last = max(over, key=lambda p: p.end_host_mono_ns or 0, default=None)
    current = max(going_on, key=lambda p: p.start_host_mono_ns, default=None)
    return (
        (recording.name_of(current.name_id), current.start_host_mono_ns) if current else None,
        recording.name_of(last.name_id) if last else "",
        max(stamps, default=0),
    )


def _find_step(
    operations: Sequence[Operation], last_step: int | None, *, has_phase: bool
) -> int | None:
    latest = max(operations, key=lambda o: o.entered_unix_ns, default=None)
    named = latest.step if latest is not None else None
    if last_step is None:
        return named if named is not None else (0 if has_phase else None)
    reached = last_step + 1 if has_phase else last_step
    return max(reached, named) if named is not None else reached


def read_exception(recording: Recording) -> str:
    """The exception that the program ended with, from the last lines of the journal."""
    if recording.closing is None:
        return ""
    try:
        data = read_file_end(recording.directory / JOURNAL_NAME, _JOURNAL_END_BYTES)
    except OSError:
        return ""
    lines, _ = read_journal(data)
    texts = [line.get("exception") for line in lines if line["kind"] == EXIT_LINE]
    return str(texts[-1])[:500] if texts else ""


def _find_stack_signal(recording: Recording) -> int | None:
    found = None
    for fields in (recording.header, *recording.updates):
        number = fields.get("stack_signal", found)
        found = number if isinstance(number, int) and not isinstance(number, bool) else None
    return found
