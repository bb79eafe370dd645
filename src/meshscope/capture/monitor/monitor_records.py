"""What the monitor reads: the newest records of this process's own tables, in plain values.

Records are read back from the files they were written to, so that watching costs training nothing
until a query, and what is shown is what was recorded. A record that another thread is just
writing does not match its checksum and is left out. At most `MAX_RECORDS` of a table are read.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from meshscope.core.layout import Layout
from meshscope.store.schema import (
    ACTIONS,
    ALLOCATOR,
    COLLECTIVES,
    DEVICE_SPANS,
    MEMORY,
    PHASES,
    SCALARS,
    SPANS,
    STEPS,
    WAITS,
    Column,
    OperationFlag,
    SpanFlag,
    StepFlag,
    Table,
)
from meshscope.store.write.open_step import PHASE_IDS

MAX_RECORDS = 20_000
"""Records read of one table; about 60 ms."""

Record = tuple[int, ...]
_ReadTable = Callable[[str, int], Sequence[Record]]
"""Gives the newest records of a table, oldest first; none when there is no such table."""
_STAMPS = [
    f"{name}_{which}_host_mono_ns"
    for name in ("data", "forward", "backward")
    for which in ("start", "end")
]


class Step(NamedTuple):
    step: int
    start_ns: int
    end_ns: int
    num_microbatches: int
    num_tokens: int
    """-1 when they were not counted."""
    is_watched: bool = True
    """Whether its communication was recorded."""


class PhaseTime(NamedTuple):
    """A phase of the training thread, with its self time."""

    name_id: int
    start_ns: int
    self_ns: int
    on_device: bool


class HoldUp(NamedTuple):
    """An interval in which communication held this rank up."""

    start_ns: int
    end_ns: int
    group_id: int


class ActionTime(NamedTuple):
    """One microbatch through one stage."""

    start_ns: int
    end_ns: int
    microbatch: int
    chunk: int


class Memory(NamedTuple):
    """One reading; -1 where not known."""

    time_ns: int
    rss_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_free_bytes: int
    device_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the recorder knows besides its tables, and how to read those."""

    read: _ReadTable = lambda name, count: ()
    layout: Layout | None = None
    rank: int = 0
    world_size: int = 1
    axes: Mapping[int, str] = field(default_factory=dict)
    """Axis of each process group."""
    has_communication: bool = False
    """Whether communication is watched at all."""
    host_limit_bytes: int = -1
    """Memory this process may use on its host; -1 when not known."""
    tokens_name_id: int = 0
    """Name id of the scalar `tokens`; 0 when it was never logged."""
    facts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Lines `flops` and `peak`, as `model_facts` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything one query needs, read at once and never changed."""

    around: Surroundings
    steps: Sequence[Step]
    phases: Sequence[PhaseTime]
    hold_ups: Sequence[HoldUp]
    actions: Sequence[ActionTime]
    memory: Sequence[Memory]
    complete_since_ns: int
    """Phases and communication before this were not all read; 0 when they were."""


def take_snapshot(around: Surroundings, since_ns: int) -> Snapshot:
    """Reads the newest records, once; only what begins from `since_ns` on."""
    read = around.read
    phases, phases_since_ns = read_phases(read, since_ns)
    hold_ups, operations_since_ns = _read_hold_ups(read, since_ns)
    return Snapshot(
        around=around,
        steps=read_steps(read, since_ns, _read_logged_tokens(read, around.tokens_name_id)),
        phases=phases,
        hold_ups=hold_ups,
        actions=read_actions(read, since_ns),
        memory=read_memory(read, since_ns),
        complete_since_ns=max(phases_since_ns, operations_since_ns),
    )


def _get(record: Record, column: Column) -> int:
    word = record[column.word - 1]
    if column.width < 64:
        word = word >> column.shift & (1 << column.width) - 1
    return word - 1 if column.is_stored_plus_one else word


def _read_rows(read: _ReadTable, table: Table, *names: str) -> list[tuple[int, ...]]:
    """The newest records of a table: these columns of each, oldest first."""
    columns = [table.column(name) for name in names]
    return [
        tuple(_get(record, column) for column in columns)
        for record in read(table.name, MAX_RECORDS)
    ]


def read_steps(read: _ReadTable, since_ns: int, logged_tokens: Mapping[int, int]) -> list[Step]:
    """Finished steps in order; those that an exception ended are left out. `logged_tokens` of a
    step come before what the recorder counted."""
    found: dict[int, Step] = {}
    times = ("start_host_mono_ns", "end_host_mono_ns")
    rows = _read_rows(read, STEPS, "flags", "step", *times, "num_microbatches", "input_tokens")
    for flags, step, start_ns, end_ns, num_microbatches, tokens in rows:
        if start_ns >= since_ns and not flags & StepFlag.ABORTED:
            num_tokens = logged_tokens.get(step, tokens)
            found[step] = Step(
                step, start_ns, end_ns, num_microbatches, num_tokens,
                is_watched=not flags & StepFlag.UNWATCHED,
            )  # fmt: skip
    return sorted(found.values(), key=lambda one: one.end_ns)


def _read_logged_tokens(read: _ReadTable, name_id: int) -> dict[int, int]:
    """Values of the scalar `tokens` by step, as far as they are counts."""
    found: dict[int, int] = {}
    rows = _read_rows(read, SCALARS, "name_id", "step", "value") if name_id else ()
    for name, step, bits in rows:
        value = struct.unpack("<d", struct.pack("<q", bits))[0]
        if name == name_id and 0 <= value < 1e15:
            found[step] = found.get(step, 0) + int(value)
    return found


def read_phases(read: _ReadTable, since_ns: int) -> tuple[list[PhaseTime], int]:
    """Phases of the training thread, and the moment before which some were not read."""
    packed = _read_rows(read, PHASES, *_STAMPS, "optimizer_gap_ns", "optimizer_ns")
    names = ("start_host_mono_ns", "self_ns", "name_id", "flags", "thread", "duration_ns")
    spans = _read_rows(read, SPANS, *names)
    device = _read_rows(read, DEVICE_SPANS, "host_start_host_mono_ns", "duration_ns", "name_id")
    found = [one for row in packed for one in _unpack_phases(*row)]
    taken = [(one.start_ns, one.start_ns + one.self_ns) for one in found]
    given = []
    for start_ns, self_ns, name_id, flags, thread, duration_ns in spans:
        one = PhaseTime(name_id, start_ns, self_ns, on_device=False)
        if not thread and not flags & SpanFlag.DETAIL:
            found.append(one)
            taken.append((start_ns, start_ns + duration_ns))
        elif not thread and flags & SpanFlag.GIVEN:
            given.append(one)
    found += _find_free(given, taken)
    found += [PhaseTime(name_id, start_ns, ns, on_device=True) for start_ns, ns, name_id in device]
    starts = [
        rows[0][column]
        for rows, column in ((packed, 2), (spans, 0), (device, 0))
        if len(rows) >= MAX_RECORDS
    ]
    return [one for one in found if one.start_ns >= since_ns], max(starts, default=0)


def _find_free(given: list[PhaseTime], taken: list[tuple[int, int]]) -> list[PhaseTime]:
    """Durations the program gave that overlap neither a measured phase nor each other."""
    taken.sort()
    latest_ns = list(accumulate((end_ns for _, end_ns in taken), max, initial=0))
    free, covered_ns = [], 0
    for one in sorted(given, key=lambda one: one.start_ns):
        end_ns = one.start_ns + one.self_ns
        before_ns = latest_ns[bisect_left(taken, (end_ns,))]
        if max(before_ns, covered_ns) <= one.start_ns:
            free.append(one)
            covered_ns = end_ns
    return free


def _unpack_phases(*words: int) -> Iterable[PhaseTime]:
    """`words`: begin and end of data, forward and backward, then gap and duration of the update."""
    for name_id, start_ns, end_ns in zip(PHASE_IDS[:3], words[0:6:2], words[1:6:2], strict=True):
        if start_ns:
            yield PhaseTime(name_id, start_ns, end_ns - start_ns, on_device=False)
    gap_ns, duration_ns = words[6:]
    if gap_ns or duration_ns:
        yield PhaseTime(PHASE_IDS[3], words[5] + gap_ns, duration_ns, on_device=False)


def read_actions(read: _ReadTable, since_ns: int) -> list[ActionTime]:
    rows = _read_rows(read, ACTIONS, "begin_host_mono_ns", "duration_ns", "microbatch", "chunk")
    return [
        ActionTime(start_ns, start_ns + duration_ns, *which)
        for start_ns, duration_ns, *which in rows
        if start_ns >= since_ns
    ]


def read_memory(read: _ReadTable, since_ns: int) -> list[Memory]:
    """Readings of memory, with the allocator's at the same time."""
    names, time_name = Memory._fields, "time_host_mono_ns"
    allocator = {
        time_ns: rest for time_ns, *rest in _read_rows(read, ALLOCATOR, time_name, *names[6:])
    }
    return [
        Memory(*row, *allocator.get(row[0], (-1, -1)))
        for row in _read_rows(read, MEMORY, time_name, *names[1:6])
        if row[0] >= since_ns
    ]


def _read_hold_ups(read: _ReadTable, since_ns: int) -> tuple[list[HoldUp], int]:
    """Intervals in which communication held this rank up, as `analyze.exposed` defines them, each
    moment once; and the moment before which not all was read."""
    times = ("enqueue_host_mono_ns", "start_host_mono_ns", "end_host_mono_ns")
    rows = _read_rows(read, COLLECTIVES, "flags", "group_id", *times, "step", "microbatch")
    found: list[HoldUp] = []
    engine: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for row in rows:
        flags, group_id, enqueue_ns, start_ns, end_ns, step, microbatch = row
        if end_ns < 0:
            continue
        if flags & OperationFlag.ENGINE:
            engine.setdefault((step, microbatch), []).append(row)
        elif not flags & OperationFlag.ASYNC:
            start_ns = start_ns if flags & OperationFlag.DEVICE else enqueue_ns
            found.append(HoldUp(start_ns, end_ns, group_id))
    found += _find_waits(read, {row[2]: row for row in rows})
    found += [_find_engine_interval(one) for (step, _), one in engine.items() if step >= 0]
    since = rows[0][2] if len(rows) >= MAX_RECORDS else 0
    return count_once(one for one in found if one.start_ns >= since_ns), since


def _find_waits(read: _ReadTable, by_key: Mapping[int, tuple[int, ...]]) -> list[HoldUp]:
    found = []
    names = ("operation_enqueue_host_mono_ns", "start_host_mono_ns", "duration_ns", "device_ns")
    for key, start_ns, duration_ns, device_ns in _read_rows(read, WAITS, *names):
        row = by_key.get(key)
        if row is None:
            continue
        if device_ns >= 0 and row[4] >= 0:
            found.append(HoldUp(row[4] - device_ns, row[4], row[1]))
        else:
            found.append(HoldUp(start_ns, start_ns + duration_ns, row[1]))
    return found


def _find_engine_interval(rows: Sequence[tuple[int, ...]]) -> HoldUp:
    """From the last operation that backward's engine issued to the end of the last one."""
    issued = max(row[3] if row[0] & OperationFlag.DEVICE else row[2] for row in rows)
    last = max(rows, key=lambda row: row[4])
    return HoldUp(min(issued, last[4]), last[4], last[1])


def count_once(found: Iterable[HoldUp]) -> list[HoldUp]:
    """Each moment belongs to the interval that began first."""
    covered = 0
    kept = []
    for one in sorted(found):
        start_ns = max(one.start_ns, covered)
        if one.end_ns > start_ns:
            kept.append(HoldUp(start_ns, one.end_ns, one.group_id))
            covered = one.end_ns
    return kept
