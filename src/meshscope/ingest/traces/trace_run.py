"""Traces of a job's ranks as a run in memory, so that everything that reads runs reads them.

Every rank has a clock of its own, which `analyze.clocks` aligns by what ranks did together, unless
the names of traces tell that they are of one host. A rank may have several traces, of different
steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshscope.core.layout import Layout
from meshscope.core.operations import DTYPES, EndSource, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import lacks_end
from meshscope.ingest.traces.trace_axes import coordinates_of, infer_layout
from meshscope.ingest.traces.trace_collectives import SYMMETRIC, TraceCollective
from meshscope.ingest.traces.trace_numbers import Numbered, group_key, number_operations
from meshscope.ingest.traces.trace_phases import BACKWARD, NAMES
from meshscope.ingest.traces.trace_recording import (
    COPY,
    DeviceWork,
    TraceRecording,
)
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Columns, Problem, ProblemKind
from meshscope.store.read.memory import MemoryRecording, make_columns
from meshscope.store.read.run import TRACE_SOURCE, Run, group_attempts
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

MAX_SPANS = 60_000
"""Device spans of all ranks together; beyond, short gaps are not kept apart from work."""
LAYOUT_FROM_NAMES = "from the folders' names"
_LEAD_NS = 10 * 86_400 * 1_000_000_000
"""Clocks of the run begin this long before the first event of the first trace."""
_MAX_UNKNOWN_NS = (1 << 31) - 1
_MAX_RANKS = 1 << 20

_DTYPE_NAMES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16",
    "long": "int64", "int": "int32", "short": "int16", "char": "int8", "byte": "uint8",
    "bool": "bool", "complexfloat": "complex64", "complexdouble": "complex128",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """A run made of traces."""

    run: Run
    """One attempt, its recordings in memory."""
    notes: tuple[str, ...]
    """What readers of the run should know."""


def make_run(
    recordings: Sequence[TraceRecording], path: Path, *, layout: Layout | None = None
) -> TraceRun:
    """A run of the traces at `path`; TraceError where they are not of one job."""
    empty = [one.source for one in recordings if not len(one.steps)]
    if empty:
        raise TraceError(
            f"{empty[0]} has no operator, annotation or kernel with a begin and a length, as "
            "torch.profiler writes them: nothing to make a run of"
        )
    by_rank = _sort_by_rank(recordings)
    world_size = _find_world_size(recordings, by_rank)
    found = layout if layout is not None else _infer_layout(by_rank, world_size)
    source = LAYOUT_FROM_NAMES if layout is None else "declared"
    if isinstance(found, Layout) and found.world_size != world_size:
        raise TraceError(
            f"the layout {found.describe()} has {found.world_size} ranks, the traces are of a job "
            f"with {world_size}"
        )
    origin_ns = recordings[0].extent_ns[0] - _LEAD_NS
    notes = _find_notes(recordings, by_rank, world_size)
    by_rank, num_assumed = _assume_all_ranks(by_rank, world_size)
    if num_assumed:
        notes.append(
            f"the traces tell no group of {num_assumed} collectives of a rank: taken for those of "
            "all ranks"
        )
    numbered = number_operations(by_rank)
    made = [
        _RankTables(rank, world_size, found, source, origin_ns, own).fill(numbered[rank])
        for rank, own in by_rank.items()
    ]
    run = Run(path=path, manifest={"source": TRACE_SOURCE}, attempts=group_attempts(made))
    return TraceRun(run=run, notes=tuple(notes))


_ByRank = dict[int, list[TraceRecording]]


def _sort_by_rank(recordings: Sequence[TraceRecording]) -> _ByRank:
    found: _ByRank = {}
    for one in recordings:
        found.setdefault(_rank_of(one, is_only=len(recordings) == 1), []).append(one)
    for rank, own in found.items():
        own.sort(key=lambda one: one.extent_ns)
        seen: dict[int, str] = {}
        for one in own:
            for step in one.steps.number.tolist():
                if step in seen:
                    raise TraceError(
                        f"{seen[step]} and {one.source} are both of step {step} of rank {rank}; "
                        "give traces of one run, and one for a rank and step"
                    )
                seen[step] = one.source
    return dict(sorted(found.items()))


def _assume_all_ranks(by_rank: _ByRank, world_size: int) -> tuple[_ByRank, int]:
    """Collectives of devices whose traces tell no group at all are of all ranks, and how many.

    Only where all ranks have traces, of the same collectives in the same order in every step and of
    nothing else: with messages among them, who waited for whom would be half known.
    """
    found = [
        [(one.step, one.found) for recording in own for one in recording.collectives]
        for own in by_rank.values()
    ]
    orders = {tuple((step, one.kind, str(one.size_bytes)) for step, one in own) for own in found}
    is_told = any(one.groups or one.work is None for own in by_rank.values() for one in own)
    is_groupless = all(_is_groupless(one) for own in found for _, one in own)
    if is_told or not is_groupless or len(by_rank) < max(world_size, 2) or len(orders) > 1:
        return by_rank, 0
    everyone = tuple(range(world_size))
    named = {rank: [_name_members(one, everyone) for one in own] for rank, own in by_rank.items()}
    return named, len(found[0])


def _is_groupless(found: TraceCollective) -> bool:
    is_of_all = found.kind in SYMMETRIC or found.kind in ("broadcast", "reduce")
    return is_of_all and not (found.group or found.description or found.ranks)


def _name_members(recording: TraceRecording, ranks: tuple[int, ...]) -> TraceRecording:
    collectives = tuple(
        replace(one, found=replace(one.found, ranks=ranks)) for one in recording.collectives
    )
    return replace(recording, collectives=collectives)


def _rank_of(one: TraceRecording, *, is_only: bool) -> int:
    if not isinstance(one.rank, Unavailable):
        rank = one.rank
    elif (named := coordinates_of(one.source)) is not None:
        rank = named[0]
    elif is_only:
        rank = 0
    else:
        raise TraceError(
            f"{one.source} does not say its rank, and no folder above it is called rank{{g}}_…: "
            "leave it out, or put it into such a folder"
        )
    if not 0 <= rank < _MAX_RANKS:
        raise TraceError(f"{one.source} is of rank {rank}, which no job has")
    return rank


def _find_world_size(recordings: Sequence[TraceRecording], by_rank: _ByRank) -> int:
    stated = {one.world_size for one in recordings if isinstance(one.world_size, int)}
    if len(stated) > 1:
        raise TraceError(
            f"the traces are of jobs with {' and '.join(map(str, sorted(stated)))} ranks; give "
            "those of one job"
        )
    size = max(next(iter(stated), 0), max(by_rank) + 1)
    if size > _MAX_RANKS:
        raise TraceError(f"the traces are of a job with {size} ranks, which is not believed")
    return size


def _infer_layout(by_rank: _ByRank, world_size: int) -> Layout | Unavailable:
    coordinates = {}
    for rank, own in by_rank.items():
        named = coordinates_of(own[0].source)
        if named is not None and named[0] == rank and named[1]:
            coordinates[rank] = named[1]
    if not coordinates:
        return Unavailable("no folder says where its rank lies in the mesh")
    return infer_layout(coordinates, world_size)


def _find_notes(
    recordings: Sequence[TraceRecording], by_rank: _ByRank, world_size: int
) -> list[str]:
    notes = []
    if not all(one.has_steps for one in recordings):
        notes.append("a trace without ProfilerStep#n counts as one step")
    if len(by_rank) < world_size:
        notes.append(
            f"traces of {len(by_rank)} of {world_size} ranks: others may have waited for a rank "
            "that has none"
        )
    merged_ns = max((one.work.merged_gap_ns for one in recordings if one.work), default=0)
    if merged_ns:
        notes.append(f"gaps of a device up to {merged_ns / 1e3:g} µs count as the work around them")
    num_outside = sum(one.num_outside for one in recordings)
    if num_outside:
        notes.append(f"{num_outside:,} device events outside of steps are left out")
    earlier_ns = max((one.earlier_ns for one in recordings), default=0)
    if earlier_ns:
        notes.append(
            f"the first step includes up to {earlier_ns / 1e6:.3g} ms of work that was launched "
            "before the traces began"
        )
    if any(one.other_devices for one in recordings):
        notes.append("of a trace with several devices the one with the most events is looked at")
    notes += [f"{one.source}: {text}" for one in recordings for text in one.warnings]
    return notes


_NAME_IDS = {**BUILTIN_NAMES}
for _name in (*NAMES, COPY):
    _NAME_IDS.setdefault(_name, FIRST_CUSTOM_NAME_ID + len(_NAME_IDS) - len(BUILTIN_NAMES))
_PHASE_IDS = np.array([_NAME_IDS[name] for name in NAMES], dtype=np.int64)
_Rows = dict[str, Int64s]


class _RankTables:
    """One rank's tables while they are filled."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        layout: Layout | Unavailable,
        layout_source: str,
        origin_ns: int,
        recordings: list[TraceRecording],
    ) -> None:
        self._rank = rank
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
                {"cause": "gap", "where": "trace", "text": f"{Path(one.source).name}: {text}"}
                for one in self._recordings
                for text in one.warnings
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

    def _add(self, table: str, **columns: Int64s | int) -> None:
        """Rows of a table; its first column says how many."""
        num_rows = len(np.atleast_1d(next(iter(columns.values()))))
        rows = {name: np.broadcast_to(values, num_rows) for name, values in columns.items()}
        self._rows.setdefault(table, []).append(rows)

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
        # phase it follows.
        row = np.sort(np.append(np.arange(len(phases)), np.flatnonzero(has_copy)))
        is_copy = np.append(False, row[1:] == row[:-1])[: len(row)]
        length = np.where(is_copy, 0, (phases.end_ns - phases.begin_ns)[row])
        self._add(
            "spans",
            name_id=np.where(is_copy, _NAME_IDS[COPY], _PHASE_IDS[phases.name[row]]),
            depth=is_copy.astype(np.int64),
            start_host_mono_ns=phases.begin_ns[row] + self._shift_ns,
            duration_ns=length,
            self_ns=length,
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
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return make_columns(name, joined, len(next(iter(joined.values()))))


def _dtype_index(dtype: str) -> int:
    name = _DTYPE_NAMES.get(dtype.strip().lower(), "")
    return DTYPES.index(name) if name in DTYPES else 0
