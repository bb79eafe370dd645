"""What the monitor looks at: the newest records of this process's own tables, in plain values.

Records are read back from the files they were written to, so that watching costs training nothing
until somebody asks, and what is shown is what was recorded. A record that another thread is just
writing does not match its checksum and is left out. At most `MAX_RECORDS` of a table are read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""Of one table; some 60 ms."""

Record = tuple[int, ...]
Interval = tuple[int, int]
ReadTable = Callable[[str, int], Sequence[Record]]
"""Gives the newest records of a table, oldest first; none when there is no such table."""


class Step(NamedTuple):
    """One finished step."""

    step: int
    begin_ns: int
    end_ns: int
    num_microbatches: int
    num_tokens: int
    """-1 when they were not counted."""


class PhaseTime(NamedTuple):
    """A phase of the training thread, with its self time."""

    name_id: int
    begin_ns: int
    self_ns: int
    on_device: bool


class HoldUp(NamedTuple):
    """A stretch in which communication held this rank up."""

    begin_ns: int
    end_ns: int
    group_id: int


class ActionTime(NamedTuple):
    """One microbatch through one stage."""

    begin_ns: int
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
    inactive_split_bytes: int
    device_free_bytes: int
    device_total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything one look needs, taken at once and never changed."""

    steps: tuple[Step, ...]
    phases: tuple[PhaseTime, ...]
    hold_ups: tuple[HoldUp, ...]
    operations_since_ns: int
    """Communication before this was not read; 0 when all was."""
    phases_since_ns: int
    actions: tuple[ActionTime, ...]
    memory: tuple[Memory, ...]
    layout: Layout | None
    rank: int
    world_size: int
    axes: Mapping[int, str]
    """Axis of each process group."""
    has_communication: bool
    """Whether communication is watched at all."""
    host_limit_bytes: int
    """Memory this process may use on its host; -1 when not known."""
    flops_per_step: float | None
    peak_flops_per_s: float | None


def _get(record: Record, column: Column) -> int:
    word = record[column.word - 1]
    if column.width < 64:
        word = word >> column.shift & (1 << column.width) - 1
    return word - 1 if column.is_stored_plus_one else word


def _getter(table: Table, *names: str) -> Callable[[Record], tuple[int, ...]]:
    columns = [table.column(name) for name in names]
    return lambda record: tuple(_get(record, column) for column in columns)


_STEP = _getter(
    STEPS, "step", "start_host_mono_ns", "end_host_mono_ns", "num_microbatches", "input_tokens",
    "flags",
)  # fmt: skip
_SPAN = _getter(SPANS, "name_id", "flags", "thread", "start_host_mono_ns", "self_ns")
_DEVICE_SPAN = _getter(DEVICE_SPANS, "name_id", "host_start_host_mono_ns", "duration_ns")
_OPERATION = _getter(
    COLLECTIVES, "flags", "group_id", "enqueue_host_mono_ns", "start_host_mono_ns",
    "end_host_mono_ns", "step", "microbatch",
)  # fmt: skip
_WAIT = _getter(
    WAITS, "operation_enqueue_host_mono_ns", "start_host_mono_ns", "duration_ns", "device_ns"
)
_ACTION = _getter(ACTIONS, "begin_host_mono_ns", "duration_ns", "microbatch", "chunk")
_MEMORY = _getter(
    MEMORY, "time_host_mono_ns", "rss_bytes", "allocated_bytes", "reserved_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes",
)  # fmt: skip
_ALLOCATOR = _getter(
    ALLOCATOR, "time_host_mono_ns", "inactive_split_bytes", "device_free_bytes",
    "device_total_bytes",
)  # fmt: skip
_SCALAR = _getter(SCALARS, "name_id", "step", "value")
_PHASE_COLUMNS = [
    (PHASES.column(f"{name}_start_host_mono_ns"), PHASES.column(f"{name}_end_host_mono_ns"))
    for name in ("data", "forward", "backward")
]
_OPTIMIZER = _getter(PHASES, "optimizer_gap_ns", "optimizer_ns")


def read_steps(read: ReadTable, since_ns: int, logged_tokens: Mapping[int, int]) -> list[Step]:
    """Finished steps in order; those that an exception ended are left out. `logged_tokens` of a
    step come before what the recorder counted."""
    found: dict[int, Step] = {}
    for record in read("steps", MAX_RECORDS):
        step, begin_ns, end_ns, num_microbatches, tokens, flags = _STEP(record)
        if begin_ns >= since_ns and not flags & StepFlag.ABORTED:
            found[step] = Step(
                step, begin_ns, end_ns, num_microbatches, logged_tokens.get(step, tokens)
            )
    return sorted(found.values(), key=lambda one: one.end_ns)


def read_logged_tokens(
    read: ReadTable, name_id: int, to_float: Callable[[int], float]
) -> dict[int, int]:
    """Values of the scalar `tokens` by step, as far as they are counts."""
    found: dict[int, int] = {}
    if name_id:
        for record in read("scalars", MAX_RECORDS):
            name, step, bits = _SCALAR(record)
            value = to_float(bits)
            if name == name_id and 0 <= value < 1e15:
                found[step] = found.get(step, 0) + int(value)
    return found


def read_phases(read: ReadTable, since_ns: int) -> tuple[list[PhaseTime], int]:
    """Phases of the training thread, and the moment before which some were not read."""
    packed, spans = read("phases", MAX_RECORDS), read("spans", MAX_RECORDS)
    device = read("device_spans", MAX_RECORDS)
    found = [one for record in packed for one in _unpack_phases(record)]
    for record in spans:
        name_id, flags, thread, begin_ns, self_ns = _SPAN(record)
        if not thread and not flags & SpanFlag.DETAIL:
            found.append(PhaseTime(name_id, begin_ns, self_ns, on_device=False))
    for record in device:
        name_id, begin_ns, duration_ns = _DEVICE_SPAN(record)
        found.append(PhaseTime(name_id, begin_ns, duration_ns, on_device=True))
    begins = [
        _first_time(records, word)
        for records, word in ((packed, 2), (spans, 1), (device, 1))
        if len(records) >= MAX_RECORDS
    ]
    kept = [one for one in found if one.begin_ns >= since_ns]
    return kept, max(begins, default=0)


def _first_time(records: Sequence[Record], word: int) -> int:
    return records[0][word]


def _unpack_phases(record: Record) -> Iterable[PhaseTime]:
    for name_id, (begin, end) in zip(PHASE_IDS[:3], _PHASE_COLUMNS, strict=True):
        begin_ns = _get(record, begin)
        if begin_ns:
            yield PhaseTime(name_id, begin_ns, _get(record, end) - begin_ns, on_device=False)
    gap_ns, duration_ns = _OPTIMIZER(record)
    if gap_ns or duration_ns:
        begin_ns = _get(record, _PHASE_COLUMNS[2][1]) + gap_ns
        yield PhaseTime(PHASE_IDS[3], begin_ns, duration_ns, on_device=False)


def read_actions(read: ReadTable, since_ns: int) -> list[ActionTime]:
    """Pipeline actions."""
    found = []
    for record in read("actions", MAX_RECORDS):
        begin_ns, duration_ns, microbatch, chunk = _ACTION(record)
        if begin_ns >= since_ns:
            found.append(ActionTime(begin_ns, begin_ns + duration_ns, microbatch, chunk))
    return found


def read_memory(read: ReadTable, since_ns: int) -> list[Memory]:
    """Readings of memory, with what the allocator said at the same time."""
    allocator = {row[0]: row[1:] for row in map(_ALLOCATOR, read("allocator", MAX_RECORDS))}
    return [
        Memory(*row, *allocator.get(row[0], (-1, -1, -1)))
        for row in map(_MEMORY, read("memory", MAX_RECORDS))
        if row[0] >= since_ns
    ]


def read_hold_ups(read: ReadTable, since_ns: int) -> tuple[list[HoldUp], int]:
    """Stretches in which communication held this rank up, as `analyze.exposed` defines them, each
    moment once; and the moment before which not all was read."""
    records = read("collectives", MAX_RECORDS)
    rows = [_OPERATION(record) for record in records]
    found: list[HoldUp] = []
    engine: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for row in rows:
        flags, group_id, enqueue_ns, start_ns, end_ns, step, microbatch = row
        if end_ns < 0:
            continue
        if flags & OperationFlag.ENGINE:
            engine.setdefault((step, microbatch), []).append(row)
        elif not flags & OperationFlag.ASYNC:
            begin_ns = start_ns if flags & OperationFlag.DEVICE else enqueue_ns
            found.append(HoldUp(begin_ns, end_ns, group_id))
    found += _find_waits(read, {row[2]: row for row in rows})
    found += [_find_engine_stretch(one) for (step, _), one in engine.items() if step >= 0]
    since = rows[0][2] if len(records) >= MAX_RECORDS else 0
    return count_once(one for one in found if one.begin_ns >= since_ns), since


def _find_waits(read: ReadTable, by_key: Mapping[int, tuple[int, ...]]) -> list[HoldUp]:
    found = []
    for record in read("waits", MAX_RECORDS):
        key, begin_ns, duration_ns, device_ns = _WAIT(record)
        row = by_key.get(key)
        if row is None:
            continue
        end_ns = begin_ns + duration_ns
        if device_ns >= 0 and row[4] >= 0:
            begin_ns, end_ns = row[4] - device_ns, row[4]
        found.append(HoldUp(begin_ns, end_ns, row[1]))
    return found


def _find_engine_stretch(rows: Sequence[tuple[int, ...]]) -> HoldUp:
    """From the last operation that backward's engine issued to the end of the last one."""
    issued = max(row[3] if row[0] & OperationFlag.DEVICE else row[2] for row in rows)
    last = max(rows, key=lambda row: row[4])
    return HoldUp(min(issued, last[4]), last[4], last[1])


def count_once(found: Iterable[HoldUp]) -> list[HoldUp]:
    """Each moment belongs to the stretch that began first."""
    covered = 0
    kept = []
    for one in sorted(found):
        begin_ns = max(one.begin_ns, covered)
        if one.end_ns > begin_ns:
            kept.append(HoldUp(begin_ns, one.end_ns, one.group_id))
            covered = one.end_ns
    return kept
