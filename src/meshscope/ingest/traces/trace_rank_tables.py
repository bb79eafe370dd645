"""One rank's traces as the tables of a recording."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from meshscope.core.layout import Layout
from meshscope.core.operations import DTYPES, EndSource, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import lacks_end
from meshscope.ingest.traces.trace_collectives import TraceCollective
from meshscope.ingest.traces.trace_numbers import Numbered, group_key
from meshscope.ingest.traces.trace_phases import BACKWARD, NAMES
from meshscope.ingest.traces.trace_recording import (
    COPY,
    DeviceWork,
    TraceRecording,
)
from meshscope.ingest.traces.trace_step_memory import StepMemory
from meshscope.ingest.traces.trace_steps import TraceSteps
from meshscope.store.read.arrays import Int64s, find_true
from meshscope.store.read.columns import Columns, Problem, ProblemKind
from meshscope.store.read.memory import MemoryRecording, make_columns
from meshscope.store.read.recording import TRACE_SOURCE
from meshscope.store.schema import (
    BUILTIN_NAMES,
    FIRST_CUSTOM_NAME_ID,
    MISSING,
    SCHEMA_VERSION,
    OperationFlag,
    StepFlag,
    WaitSource,
)
from meshscope.store.write.groups import Group

_MAX_UNKNOWN_NS = (1 << 31) - 1
_DTYPE_NAMES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16",
    "long": "int64", "int": "int32", "short": "int16", "char": "int8", "byte": "uint8",
    "bool": "bool", "complexfloat": "complex64", "complexdouble": "complex128",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
}  # fmt: skip
_NAME_IDS = {**BUILTIN_NAMES}
for _name in (*NAMES, COPY):
    _NAME_IDS.setdefault(_name, FIRST_CUSTOM_NAME_ID + len(_NAME_IDS) - len(BUILTIN_NAMES))
_PHASE_IDS = np.array([_NAME_IDS[name] for name in NAMES], dtype=np.int64)
_Rows = dict[str, Int64s | int]
"""Columns; a number stands for all rows."""


class RankTables:
    """One rank's tables while they are filled."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: Layout | Unavailable,
        layout_source: str,
        origin_ns: int,
        recordings: list[TraceRecording],
        notes: Sequence[str],
    ) -> None:
        self._rank = rank
        self._notes = notes
        self._origin_ns = origin_ns
        self._shift_ns = 0
        self._recordings = recordings
        self._world_size = world_size
        first, last = recordings[0].extent_ns[0], max(one.extent_ns[1] for one in recordings)
        if first <= origin_ns or last - origin_ns >= 1 << 60:
            raise TraceError(
                f"{recordings[0].source} is more than 10 days earlier than the first trace, or on "
                "another kind of clock; give traces of one run"
            )
        self._first_ns, self._last_ns = first - origin_ns, last - origin_ns
        self._header = {
            "schema_version": SCHEMA_VERSION,
            "rank": rank,
            "world_size": world_size,
            "source": TRACE_SOURCE,
            "launch_id": TRACE_SOURCE,
            "restart_count": 0,
            **_name_clock(rank, recordings),
            "start_host_mono_ns": self._first_ns,
            **({"start_unix_ns": first} if recordings[0].is_on_wall_clock else {}),
            "layout": layout.to_dict() if isinstance(layout, Layout) else None,
            "layout_source": layout_source if isinstance(layout, Layout) else None,
            "traces": [one.source for one in recordings[:100]],
            "device_name": next((one.device_name for one in recordings if one.device_name), None),
            "has_host_memory": any(one.has_host_memory for one in recordings),
        }
        self._rows: dict[str, list[_Rows]] = {}
        self._groups: dict[str, Group] = {}
        self._used_keys: set[int] = set()

    def fill(self, operations: Sequence[Numbered]) -> MemoryRecording:
        """All tables; `operations` are those of each trace."""
        for recording, own in zip(self._recordings, operations, strict=True):
            # Times of a trace count from its own base.
            self._shift_ns = recording.base_ns - self._origin_ns
            self._add_steps(recording)
            if recording.work is not None:
                self._add_work(recording, recording.work)
            if recording.memory is not None:
                self._add_memory(recording.steps, recording.memory)
            if own:
                self._add_operations(recording, own)
        if self._recordings[0].is_on_wall_clock:
            first = np.array([self._first_ns], dtype=np.int64)
            unix_ns = first + self._origin_ns
            self._add("clocks", time_host_mono_ns=first, time_unix_ns=unix_ns, uncertainty_ns=1000)
        last_step = max((int(one.steps.number.max()) for one in self._recordings), default=-1)
        return MemoryRecording(
            rank=self._rank,
            attempt=0,
            directory=Path(self._recordings[0].source),
            header=self._header,
            names={name_id: text for text, name_id in _NAME_IDS.items()},
            closing={
                "end_host_mono_ns": self._last_ns,
                "last_step": last_step,
                "num_errors": 0,
                "errors": {},
            },
            health=tuple(
                {"cause": "gap", "where": "trace", "text": text}
                for text in (*self._notes, *self._list_warnings())
            ),
            groups={group.group_id: group for group in self._groups.values()},
            columns={name: _join_rows(name, parts) for name, parts in self._rows.items()},
            problems=[
                Problem(kind=ProblemKind.CUT, rank=self._rank, path=Path(one.source), text=text)
                for one in self._recordings
                for text in one.warnings
                if lacks_end(text)
            ],
        )

    def _list_warnings(self) -> list[str]:
        return [
            f"{Path(one.source).name}: {text}" for one in self._recordings for text in one.warnings
        ]

    def _add(self, table: str, **columns: Int64s | int) -> None:
        """Rows of a table; its first column says how many."""
        self._rows.setdefault(table, []).append(columns)

    def _add_steps(self, recording: TraceRecording) -> None:
        steps, phases = recording.steps, recording.phases
        passes = phases.step[phases.name == NAMES.index(BACKWARD)]
        self._add(
            "steps",
            step=steps.number,
            start_host_mono_ns=steps.begin_ns + self._shift_ns,
            end_host_mono_ns=steps.end_ns + self._shift_ns,
            num_microbatches=np.bincount(passes, minlength=len(steps)),
            flags=StepFlag.EXPLICIT,
            recorder_ns=MISSING,
            input_tokens=MISSING,
        )
        has_copy = np.zeros(len(phases), dtype=np.bool_)
        if recording.work is not None:
            has_copy[recording.work.copies.phase] = True
        # A copy's span is a place to hang the device's copies on; the host's time stays with the
        # phase it is in. Without any length it would be in the phase before as well.
        row = np.sort(np.append(np.arange(len(phases)), find_true(has_copy)))
        is_copy = np.append(False, row[1:] == row[:-1])[: len(row)]
        length = (phases.end_ns - phases.begin_ns)[row]
        self._add(
            "spans",
            name_id=np.where(is_copy, _NAME_IDS[COPY], _PHASE_IDS[phases.name[row]]),
            depth=is_copy.astype(np.int64),
            start_host_mono_ns=phases.begin_ns[row] + self._shift_ns,
            duration_ns=np.where(is_copy, np.minimum(length, 1), length),
            self_ns=np.where(is_copy, 0, length),
        )

    def _add_memory(self, steps: TraceSteps, memory: StepMemory) -> None:
        self._add(
            "memory",
            step=steps.number[memory.place],
            time_host_mono_ns=steps.end_ns[memory.place] + self._shift_ns,
            rss_bytes=MISSING,
            allocated_bytes=memory.allocated_bytes,
            reserved_bytes=memory.reserved_bytes,
            peak_allocated_bytes=memory.peak_allocated_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
        )

    def _add_work(self, recording: TraceRecording, work: DeviceWork) -> None:
        phases, gaps = recording.phases, work.gaps
        own = _PHASE_IDS[phases.name]
        for spans, name_id in (
            (work.spans, own),
            (work.copies, np.full_like(own, _NAME_IDS[COPY])),
            (work.edges, own),
        ):
            self._add(
                "device_spans",
                name_id=name_id[spans.phase],
                device_index=work.device & 0xFFFF,
                host_start_host_mono_ns=phases.begin_ns[spans.phase] + self._shift_ns,
                start_device_ns=spans.begin_ns + self._shift_ns,
                duration_ns=spans.end_ns - spans.begin_ns,
            )
        self._add(
            "device_gaps",
            step=np.minimum(work.gap_step, (1 << 31) - 2),
            unknown_ns=np.minimum(gaps.unknown_ns, _MAX_UNKNOWN_NS),
            start_host_mono_ns=gaps.begin_ns + self._shift_ns,
            host_ns=gaps.host_ns,
            synchronising_ns=gaps.synchronising_ns,
            communicating_ns=gaps.communicating_ns,
            launch_ns=gaps.launch_ns,
            dependency_ns=gaps.dependency_ns,
        )

    def _add_operations(self, recording: TraceRecording, numbered: Numbered) -> None:
        on_device = recording.work is not None
        flags = OperationFlag.ASYNC | (OperationFlag.DEVICE if on_device else 0)
        found = [one.recorded.found for one, _ in numbered]
        phase = _column(one.recorded.phase for one, _ in numbered)
        phase_id = np.where(phase >= 0, _PHASE_IDS[recording.phases.name[phase]], 0)
        key = _column(
            self._take_key(one.recorded.enqueue_ns + self._shift_ns) for one, _ in numbered
        )
        begin = _column(one.begin_ns for one in found) + self._shift_ns
        end = begin + _column(one.duration_ns for one in found)
        arrive = _column(one.recorded.arrive_ns for one, _ in numbered) + self._shift_ns
        step = _column(min(one.recorded.step, (1 << 32) - 2) for one, _ in numbered)
        is_one_of_many = _column(one.is_one_of_many for one, _ in numbered)
        self._add(
            "collectives",
            kind=_column(one.kind for one, _ in numbered),
            outcome=int(Outcome.OK),
            end_source=int(EndSource.DEVICE if on_device else EndSource.CALL),
            flags=flags | is_one_of_many * OperationFlag.COALESCED,
            group_id=_column(self._group_id(recording, one) for one in found),
            phase_id=phase_id,
            sequence=_column(sequence for _, sequence in numbered),
            peer=_column(one.peer for one, _ in numbered),
            enqueue_host_mono_ns=key,
            start_host_mono_ns=arrive,
            end_host_mono_ns=end,
            size_bytes=_column(one.size_bytes for one, _ in numbered),
            step=step,
            dtype=_column(_dtype_index(one.dtype) for one in found),
        )
        held_ns = _column(one.recorded.held_ns for one, _ in numbered)
        self._add(
            "waits",
            source=np.full(len(numbered), WaitSource.WORK, dtype=np.int64),
            phase_id=phase_id,
            operation_enqueue_host_mono_ns=key,
            start_host_mono_ns=end - held_ns,
            duration_ns=0 if on_device else held_ns,
            device_ns=held_ns if on_device else MISSING,
            step=step,
        )
        self._add_unqueued(numbered, key, phase_id, step)

    def _add_unqueued(
        self, numbered: Numbered, key: Int64s, phase_id: Int64s, step: Int64s
    ) -> None:
        """A row for each interval in which an operation ran alone and nothing was queued."""
        pieces = [one.recorded.unqueued for one, _ in numbered]
        row = np.repeat(np.arange(len(pieces)), [len(own) for own in pieces])
        begin = _column(since for own in pieces for since, _ in own)
        end = _column(until for own in pieces for _, until in own)
        self._add(
            "waits",
            source=np.full(len(row), WaitSource.UNQUEUED, dtype=np.int64),
            phase_id=phase_id[row],
            operation_enqueue_host_mono_ns=key[row],
            start_host_mono_ns=begin + self._shift_ns,
            duration_ns=end - begin,
            device_ns=MISSING,
            step=step[row],
        )

    def _take_key(self, enqueue_ns: int) -> int:
        """Keys are unique in a rank; a graph launches many operations at once."""
        while enqueue_ns in self._used_keys:
            enqueue_ns += 1
        self._used_keys.add(enqueue_ns)
        return enqueue_ns

    def _group_id(self, recording: TraceRecording, found: TraceCollective) -> int:
        key = group_key(found)
        if key not in self._groups:
            listed = next((one for one in recording.groups if one.name == found.group), None)
            self._groups[key] = Group(
                group_id=min(len(self._groups), (1 << 16) - 1),
                name=found.group[:200],
                description=found.description[:200],
                backend=listed.backend if listed is not None else "",
                ranks=self._members(found, listed.ranks if listed else ()),
            )
        return self._groups[key].group_id

    def _members(self, found: TraceCollective, listed: tuple[int, ...]) -> tuple[int, ...]:
        if found.ranks:
            return found.ranks
        is_world = found.group_size == self._world_size
        return listed or (tuple(range(self._world_size)) if is_world else ())


def _name_clock(rank: int, recordings: Sequence[TraceRecording]) -> dict[str, str]:
    """Profilers of one host read one wall clock; of unknown hosts every rank has its own."""
    hosts = {one.host for one in recordings}
    if len(hosts) == 1 and all(one.host and one.is_on_wall_clock for one in recordings):
        return {"host": hosts.pop(), "clock_id": "wall clock"}
    return {"clock_id": f"trace of rank {rank}"}


def _column(values: Iterable[int]) -> Int64s:
    return np.fromiter(values, dtype=np.int64)


def _join_rows(name: str, parts: list[_Rows]) -> Columns:
    counts = [_count_rows(part) for part in parts]
    joined = parts[0]
    if len(parts) > 1:
        joined = {
            key: np.concatenate(
                [_spread(part[key], count) for part, count in zip(parts, counts, strict=True)]
            )
            for key in parts[0]
        }
    return make_columns(name, joined, sum(counts))


def _count_rows(rows: _Rows) -> int:
    first = next(iter(rows.values()))
    return len(first) if isinstance(first, np.ndarray) else 1


def _spread(values: Int64s | int, count: int) -> Int64s:
    return values if isinstance(values, np.ndarray) else np.full(count, values)


def _dtype_index(dtype: str) -> int:
    name = _DTYPE_NAMES.get(dtype.strip().lower(), "")
    return DTYPES.index(name) if name in DTYPES else 0
