"""Traces of a job's ranks as a run directory, so that everything that reads runs reads them.

Collectives are numbered by step, group and order on each rank; without steps, from the end. Every
rank has a clock of its own, which `analyze.clocks` aligns by what ranks did together. A rank may
have several traces, of different steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshscope.core.layout import Layout
from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError
from meshscope.ingest.traces.trace_axes import coordinates_of, infer_layout
from meshscope.ingest.traces.trace_collectives import SYMMETRIC, TraceCollective
from meshscope.ingest.traces.trace_phases import BACKWARD, NAMES
from meshscope.ingest.traces.trace_recording import (
    COPY,
    DeviceSpans,
    DeviceWork,
    RecordedCollective,
    TraceRecording,
)
from meshscope.store.read.run import SHOWN_PATH, TRACE_SOURCE
from meshscope.store.schema import MISSING, OperationFlag, StepFlag, WaitSource
from meshscope.store.write.groups import pack_ranks
from meshscope.store.write.writer import RankWriter, ensure_manifest

MAX_SPANS = 60_000
"""Device spans of all ranks together; beyond, short gaps are not kept apart from work."""
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
class ImportedRun:
    """A run made of traces."""

    path: Path
    ranks: tuple[int, ...]
    world_size: int
    layout: Layout | Unavailable
    notes: tuple[str, ...]
    """What readers of the run should know."""


def write_run(
    recordings: Sequence[TraceRecording],
    run_dir: Path,
    *,
    layout: Layout | None = None,
    shown_path: str | None = None,
) -> ImportedRun:
    """Writes a run directory; TraceError where the traces are not of one job.

    `shown_path` is what reports call the run, where that is not its own path.
    """
    empty = [one.source for one in recordings if not len(one.steps)]
    if empty:
        raise TraceError(
            f"{empty[0]} has no operator, annotation or kernel with a begin and a length, as "
            "torch.profiler writes them: nothing to make a run of"
        )
    by_rank = _sort_by_rank(recordings)
    world_size = _find_world_size(recordings, by_rank)
    found = layout if layout is not None else _infer_layout(by_rank, world_size)
    if isinstance(found, Layout) and found.world_size != world_size:
        raise TraceError(
            f"the layout {found.describe()} has {found.world_size} ranks, the traces are of a job "
            f"with {world_size}"
        )
    origin_ns = recordings[0].extent_ns[0] - _LEAD_NS
    shown = {} if shown_path is None else {SHOWN_PATH: shown_path}
    ensure_manifest(_make(run_dir), {"source": TRACE_SOURCE, **shown})
    notes = _find_notes(recordings, by_rank, world_size)
    by_rank, num_assumed = _assume_all_ranks(by_rank, world_size)
    if num_assumed:
        notes.append(
            f"the traces tell no group of {num_assumed} collectives of a rank: taken for those of "
            "all ranks"
        )
    numbered = _number_operations(by_rank)
    for rank, own in by_rank.items():
        _RankFile(run_dir, rank, world_size, found, origin_ns, own).write(numbered[rank])
    return ImportedRun(
        path=run_dir,
        ranks=tuple(by_rank),
        world_size=world_size,
        layout=found,
        notes=tuple(notes),
    )


def _make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
            f"traces of {len(by_rank)} of {world_size} ranks: whoever has none may have been the "
            "one others waited for"
        )
    merged_ns = max((one.work.merged_gap_ns for one in recordings if one.work), default=0)
    if merged_ns:
        notes.append(f"gaps of a device up to {merged_ns / 1e3:g} µs count as the work around them")
    num_outside = sum(one.num_outside for one in recordings)
    if num_outside:
        notes.append(f"{num_outside:,} device events outside of steps are left out")
    if any(one.other_devices for one in recordings):
        notes.append("of a trace with several devices the one with the most events is looked at")
    notes += [f"{one.source}: {text}" for one in recordings for text in one.warnings]
    return notes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One row of `collectives`: a kernel, or one of the messages that a kernel sends at once."""

    recorded: RecordedCollective
    kind: Kind
    peer: int
    """The other side of a message; -1."""
    is_one_of_many: bool
    channel: tuple[str, int, int]
    """Operations of one are matched by their order: a group, and of a message who to whom."""

    @property
    def size_bytes(self) -> int:
        """-1 where it is not known, as of one message of several."""
        size = self.recorded.found.size_bytes
        return MISSING if isinstance(size, Unavailable) or self.is_one_of_many else size


def _expand(recorded: RecordedCollective, rank: int) -> Iterator[_Operation]:
    """What a recorder would have seen of a kernel.

    Messages whose sides are not known are CUSTOM: whom they wait for is not known either.
    """
    found = recorded.found
    group = _group_key(found)
    for sender, receiver in found.messages:
        if rank in (sender, receiver) and sender != receiver:
            is_send = rank == sender
            yield _Operation(
                recorded=recorded,
                kind=Kind.SEND if is_send else Kind.RECV,
                peer=receiver if is_send else sender,
                is_one_of_many=len(found.messages) > 1,
                channel=(group, sender, receiver),
            )
    if not found.messages:
        yield _Operation(
            recorded=recorded,
            kind=next((kind for kind in Kind if kind.label == found.kind), Kind.CUSTOM),
            peer=MISSING,
            is_one_of_many=False,
            channel=(group, MISSING, MISSING),
        )


_Numbered = list[tuple[_Operation, int]]


def _number_operations(by_rank: _ByRank) -> dict[int, list[_Numbered]]:
    """Per rank and trace its operations with their sequence numbers, alike on all ranks."""
    operations = {
        rank: [
            [one for found in trace.collectives for one in _expand(found, rank)] for trace in own
        ]
        for rank, own in by_rank.items()
    }
    counts = _count_operations(operations)
    has_steps = all(one.has_steps for own in by_rank.values() for one in own)
    first: dict[_Cell, int] = {}
    total: dict[tuple[str, int, int], int] = {}
    for step, channel in sorted(counts, key=lambda cell: cell[0]):
        first[step, channel] = total.get(channel, 0)
        total[channel] = first[step, channel] + max(counts[step, channel].values())
    numbered: dict[int, list[_Numbered]] = {}
    for rank, traces in operations.items():
        seen: dict[_Cell, int] = {}
        numbered[rank] = []
        for own in traces:
            rows: _Numbered = []
            for one in own:
                cell = (one.recorded.step, one.channel)
                place = seen.get(cell, 0)
                seen[cell] = place + 1
                count = counts[cell]
                # Windows without steps began at different moments and ended together.
                absent = 0 if has_steps else max(count.values()) - count[rank]
                rows.append((one, first[cell] + absent + place))
            numbered[rank].append(rows)
    return numbered


_Cell = tuple[int, tuple[str, int, int]]
"""A step and a channel."""


def _count_operations(
    operations: Mapping[int, list[list[_Operation]]],
) -> dict[_Cell, dict[int, int]]:
    """By step and channel how many each side of it has: of messages, sender and receiver."""
    counts: dict[_Cell, dict[int, int]] = {}
    for rank, traces in operations.items():
        for own in traces:
            for one in own:
                count = counts.setdefault((one.recorded.step, one.channel), {})
                count[rank] = count.get(rank, 0) + 1
    return counts


def _group_key(found: TraceCollective) -> str:
    return f"{found.group}\0{','.join(map(str, found.ranks))}"


class _RankFile:
    """Writes one rank."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        world_size: int,
        layout: Layout | Unavailable,
        origin_ns: int,
        recordings: list[TraceRecording],
    ) -> None:
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
        self._writer = RankWriter(
            run_dir,
            rank,
            header={
                "rank": rank,
                "world_size": world_size,
                "source": TRACE_SOURCE,
                "launch_id": TRACE_SOURCE,
                "restart_count": 0,
                "clock_id": f"trace of rank {rank}",
                "start_host_mono_ns": self._first_ns,
                **({"start_unix_ns": first} if recordings[0].is_on_wall_clock else {}),
                "layout": layout.to_dict() if isinstance(layout, Layout) else None,
                "layout_source": "declared" if isinstance(layout, Layout) else None,
                "traces": [one.source for one in recordings[:100]],
            },
        )
        self._groups: dict[str, int] = {}
        self._used_keys: set[int] = set()

    def write(self, operations: Sequence[_Numbered]) -> None:
        """All tables; `operations` are those of each trace."""
        for recording, own in zip(self._recordings, operations, strict=True):
            # Times of a trace count from its own base.
            self._shift_ns = recording.base_ns - self._origin_ns
            self._write_steps(recording)
            if recording.work is not None:
                self._write_work(recording, recording.work)
            for one, sequence in own:
                self._write_operation(recording, one, sequence)
        if self._recordings[0].is_on_wall_clock:
            unix_ns = self._first_ns + self._origin_ns
            self._writer.table("clocks").put(self._first_ns, unix_ns, 1000, 0, 0, 0, 0)
        last_step = max((int(one.steps.number.max()) for one in self._recordings), default=-1)
        self._writer.close(
            end_host_mono_ns=self._last_ns, last_step=last_step, num_errors=0, errors={}
        )

    def _write_steps(self, recording: TraceRecording) -> None:
        steps, phases = recording.steps, recording.phases
        passes = phases.step[phases.name == NAMES.index(BACKWARD)]
        for place in range(len(steps)):
            num_passes = int(np.count_nonzero(passes == place))
            self._writer.table("steps").put(
                int(steps.number[place]),
                int(steps.begin_ns[place]) + self._shift_ns,
                int(steps.end_ns[place]) + self._shift_ns,
                num_passes | StepFlag.EXPLICIT << 32,
                MISSING,
                MISSING,
                0,
            )
        has_copy = np.zeros(len(phases), dtype=np.bool_)
        if recording.work is not None:
            has_copy[recording.work.copies.phase] = True
        columns = (phases.begin_ns, phases.end_ns, phases.name, has_copy)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for begin, end, name, copies in rows:
            self._put_span(NAMES[name], 0, begin + self._shift_ns, end - begin)
            if copies:
                # A place to hang the device's copies on; the host's time stays with the phase.
                self._put_span(COPY, 1, begin + self._shift_ns, 0)

    def _put_span(self, name: str, depth: int, begin_ns: int, duration_ns: int) -> None:
        self._writer.table("spans").put(
            self._writer.name_id(name) | depth << 16, begin_ns, duration_ns, duration_ns, 0, 0, 0
        )

    def _write_work(self, recording: TraceRecording, work: DeviceWork) -> None:
        self._write_device_spans(recording, work.device, work.spans)
        self._write_device_spans(recording, work.device, work.copies, name=COPY)
        self._write_device_spans(recording, work.device, work.edges)
        self._write_gaps(work)

    def _write_device_spans(
        self,
        recording: TraceRecording,
        device: int,
        spans: DeviceSpans,
        *,
        name: str | None = None,
    ) -> None:
        phases = recording.phases
        names = NAMES if name is None else (name,) * len(NAMES)
        ids = np.array([self._writer.name_id(one) for one in names], dtype=np.int64)
        name_id = ids[phases.name[spans.phase]]
        host_begin = phases.begin_ns[spans.phase] + self._shift_ns
        begin = spans.begin_ns + self._shift_ns
        put = self._writer.table("device_spans").put
        columns = (
            name_id | (device & 0xFFFF) << 16,
            host_begin,
            begin,
            spans.end_ns - spans.begin_ns,
        )
        for name_word, host, start, length in zip(*(c.tolist() for c in columns), strict=True):
            put(name_word, host, start, length, 0, 0, 0)

    def _write_gaps(self, work: DeviceWork) -> None:
        gaps = work.gaps
        unknown = np.minimum(gaps.unknown_ns, _MAX_UNKNOWN_NS)
        first = (np.minimum(work.gap_step, (1 << 31) - 2) + 1) | unknown << 32
        columns = (
            first,
            gaps.begin_ns + self._shift_ns,
            gaps.host_ns,
            gaps.synchronising_ns,
            gaps.communicating_ns,
            gaps.launch_ns,
            gaps.dependency_ns,
        )
        put = self._writer.table("device_gaps").put
        for words in zip(*(column.tolist() for column in columns), strict=True):
            put(*words)

    def _write_operation(self, recording: TraceRecording, one: _Operation, sequence: int) -> None:
        recorded, found = one.recorded, one.recorded.found
        key = self._take_key(recorded.enqueue_ns + self._shift_ns)
        phase_id = 0
        if recorded.phase >= 0:
            phase_id = self._writer.name_id(NAMES[int(recording.phases.name[recorded.phase])])
        begin = found.begin_ns + self._shift_ns
        end = begin + found.duration_ns
        on_device = recording.work is not None
        flags = OperationFlag.ASYNC | (OperationFlag.DEVICE if on_device else 0)
        if one.is_one_of_many:
            flags |= OperationFlag.COALESCED
        step = min(recorded.step, (1 << 32) - 2) + 1
        self._writer.table("collectives").put(
            int(one.kind)
            | int(Outcome.OK) << 8
            | int(EndSource.DEVICE if on_device else EndSource.CALL) << 16
            | flags << 24
            | self._group_id(recording, found) << 32
            | phase_id << 48,
            sequence | (one.peer + 1) << 32,
            key,
            begin,
            end,
            one.size_bytes,
            step | _dtype_place(found.dtype) << 48,
        )
        self._writer.table("waits").put(
            WaitSource.WORK | phase_id << 48,
            key,
            end - recorded.held_ns,
            0 if on_device else recorded.held_ns,
            recorded.held_ns if on_device else MISSING,
            0,
            step,
        )

    def _take_key(self, enqueue_ns: int) -> int:
        """Keys are unique in a rank; a graph launches many operations at once."""
        while enqueue_ns in self._used_keys:
            enqueue_ns += 1
        self._used_keys.add(enqueue_ns)
        return enqueue_ns

    def _group_id(self, recording: TraceRecording, found: TraceCollective) -> int:
        key = _group_key(found)
        if key not in self._groups:
            number = self._groups[key] = min(len(self._groups), (1 << 16) - 1)
            listed = next((one for one in recording.groups if one.name == found.group), None)
            self._writer.journal.write(
                "group",
                id=number,
                name=found.group,
                description=found.description,
                backend=listed.backend if listed is not None else "",
                ranks=pack_ranks(self._members(found, listed.ranks if listed else ())),
            )
        return self._groups[key]

    def _members(self, found: TraceCollective, listed: tuple[int, ...]) -> tuple[int, ...]:
        if found.ranks:
            return found.ranks
        is_world = found.group_size == self._world_size
        return listed or (tuple(range(self._world_size)) if is_world else ())


def _dtype_place(dtype: str) -> int:
    name = _DTYPE_NAMES.get(dtype.strip().lower(), "")
    return DTYPES.index(name) if name in DTYPES else 0
