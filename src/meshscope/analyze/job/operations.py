"""The communication operations of one attempt, all ranks in one set of arrays.

Rows are ordered by rank and then by the time of the call. Damaged and hostile records are handled
here: a row without a usable time is left out, a missing start is the time of the call, an end
before the start is no end, and kinds this version does not know are `CUSTOM`. Each is counted.

Times are as recorded, on the clock of the rank's host; `job.clocks` aligns them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from meshscope.analyze.job.group_axes import UNKNOWN_GROUP, JobGroup, merge_groups
from meshscope.analyze.rank.device_clock import PlacedClock, fit_placed_clock
from meshscope.analyze.rank.kernel_sample import narrow_to_samples, read_samples
from meshscope.analyze.rank.phase_names import join_phase_names
from meshscope.core.operations import DTYPES, IS_EXACT_END, EndSource, Kind, Outcome
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Int32s, Int64s, Uint8s
from meshscope.store.read.columns import Columns, int64_column, select_rows
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.schema import MISSING, NoteCode, OperationFlag, StepFlag, WaitSource

MAX_TIME_NS = 1 << 62
"""146 years after boot: a later time is damage."""
MAX_SPAN_NS = 1 << 53
"""104 days: no operation takes longer; sums of such stay exact in float64."""
NO_PHASE = "(no phase)"
"""Issued outside of any phase."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperationRows:
    """One entry per operation and rank."""

    rank: Int32s
    kind: Uint8s
    outcome: Uint8s
    end_source: Uint8s
    flags: Uint8s
    group: Int32s
    """Index in `Operations.groups`; -1 when the group is not known."""
    phase: Int32s
    """Index in `Operations.phases`."""
    sequence: Int64s
    peer: Int64s
    enqueue_ns: Int64s
    start_ns: Int64s
    end_ns: Int64s
    """-1 when it is not known; never before `start_ns`."""
    size_bytes: Int64s
    """-1 when it was damaged, or a trace does not say it."""
    step: Int32s
    microbatch: Int32s
    dtype: Uint8s
    tag: Uint8s

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def has_end(self) -> Bools:
        """The end is known, exactly or as a bound."""
        return self.end_ns >= 0

    @property
    def has_exact_end(self) -> Bools:
        """It succeeded, and the end is the operation's own, not a later moment."""
        is_exact: Bools = _EXACT_SOURCES[self.end_source]
        is_ok: Bools = self.outcome == Outcome.OK
        return is_exact & is_ok & self.has_end

    def has_flag(self, flag: int) -> Bools:
        found: Bools = (self.flags & flag) != 0
        return found

    @property
    def has_numbered_group(self) -> Bools:
        found: Bools = self.group != UNKNOWN_GROUP
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operations:
    """The operations of one attempt."""

    ranks: tuple[int, ...]
    """Ranks that recorded, in ascending order, whether they communicated or not."""
    world_size: int
    groups: tuple[JobGroup, ...]
    phases: tuple[str, ...]
    rows: OperationRows
    num_damaged: int
    """Rows left out because their times are impossible."""
    num_bad_ends: int
    """Ends before the start, or implausibly late; such rows count as without an end."""
    is_from_traces: bool = False
    """Traces often cover only some ranks: an absent member of a group may have been the last."""
    clocks: Mapping[int, PlacedClock] = field(default_factory=dict)
    """By rank, how the times of its device were corrected; only ranks with kernel samples."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """One entry per wait for an operation that the program had started."""

    rank: Int32s
    row: Int64s
    """The operation's index in `Operations.rows`; -1 if it is not known."""
    start_ns: Int64s
    duration_ns: Int64s
    device_ns: Int64s
    """-1 without a device."""
    device_end_ns: Int64s
    """When the device's stream went on; -1 where it is not known."""
    step: Int32s
    is_unqueued: Bools
    """The operation ran alone and held nothing up: see `WaitSource.UNQUEUED`."""
    num_damaged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An operation that ended with an error."""

    rank: int
    kind: Kind
    outcome: Outcome
    group: JobGroup | None
    sequence: int
    step: int | Unavailable
    phase: str | Unavailable
    message: str | Unavailable


def dtype_label(dtype: int) -> str | Unavailable:
    label = DTYPES[dtype] if 0 <= dtype < len(DTYPES) else f"(unknown {dtype})"
    return label or Unavailable("the number format is not known")


def known_size(size_bytes: int) -> int | Unavailable:
    return size_bytes if size_bytes >= 0 else Unavailable("not recorded, or damaged")


def known_step(step: int) -> int | Unavailable:
    return step if step >= 0 else Unavailable("outside of any step")


def known_phase(phase: str) -> str | Unavailable:
    return Unavailable("outside of any phase") if phase == NO_PHASE else phase


def load_operations(attempt: Attempt, unwatched: Int64s | None = None) -> Operations:
    """Reads table `collectives` of every rank, less steps that some rank did not record.

    `unwatched`: what `find_unwatched` gives, where that is known.
    """
    groups, indices = merge_groups(attempt)
    phases = PhaseBook(NO_PHASE)
    clocks: dict[int, PlacedClock] = {}
    parts = [
        _read_rank(recording, indices.get(recording.rank, {}), phases, clocks)
        for recording in attempt
    ]
    if unwatched is None:  # after the rows: they may be thinned while they are read
        unwatched = find_unwatched(attempt)
    return Operations(
        ranks=tuple(recording.rank for recording in attempt),
        world_size=attempt.world_size,
        groups=groups,
        phases=tuple(phases.names),
        rows=_leave_out(_concatenate([rows for rows, _, _ in parts]), unwatched),
        num_damaged=sum(damaged for _, damaged, _ in parts),
        num_bad_ends=sum(bad for _, _, bad in parts),
        is_from_traces=attempt.is_from_traces,
        clocks=clocks,
    )


def find_unwatched(recordings: Iterable[Recording]) -> Int64s:
    """Steps whose communication some rank did not record, or no longer has all of."""
    found = [np.empty(0, dtype=np.int64)]
    for recording in recordings:
        columns = recording.read("steps")
        is_without = (int64_column(columns, "flags") & StepFlag.WITHOUT_OPERATIONS) != 0
        if is_without.any():
            found.append(int64_column(columns, "step")[is_without])
    return np.unique(np.concatenate(found))


def _leave_out(rows: OperationRows, steps: Int64s) -> OperationRows:
    if not len(steps):
        return rows
    kept = ~np.isin(rows.step, steps)
    names = [field.name for field in fields(OperationRows)]
    return OperationRows(**{name: getattr(rows, name)[kept] for name in names})


def load_waits(attempt: Attempt, operations: Operations, unwatched: Int64s | None = None) -> Waits:
    """Reads table `waits` of every rank and finds the operations waited for."""
    rows, clocks = operations.rows, operations.clocks
    if unwatched is None:
        unwatched = find_unwatched(attempt)
    parts = [_read_waits(recording, rows, clocks, unwatched) for recording in attempt]
    none = np.empty(0, dtype=np.int64)

    def join(index: int) -> Int64s:
        return np.concatenate([none, *(part[index] for part in parts)])

    return Waits(
        rank=join(0).astype(np.int32),
        row=join(1),
        start_ns=join(2),
        duration_ns=join(3),
        device_ns=join(4),
        device_end_ns=join(5),
        step=join(6).astype(np.int32),
        is_unqueued=join(7) == WaitSource.UNQUEUED,
        num_damaged=sum(part[8] for part in parts),
    )


def load_failures(attempt: Attempt, operations: Operations, *, limit: int) -> tuple[Failure, ...]:
    """The first operations that failed or timed out, with their messages."""
    rows = operations.rows
    is_failed = (rows.outcome == Outcome.ERROR) | (rows.outcome == Outcome.TIMEOUT)
    failed = np.flatnonzero(is_failed)
    failed = failed[np.argsort(rows.enqueue_ns[failed], kind="stable")][:limit]
    messages = {
        rank: _read_messages(attempt.ranks[rank]) for rank in set(rows.rank[failed].tolist())
    }
    found = []
    for row in failed.tolist():
        rank, group = int(rows.rank[row]), int(rows.group[row])
        found.append(
            Failure(
                rank=rank,
                kind=Kind(int(rows.kind[row])),
                outcome=Outcome(int(rows.outcome[row])),
                group=operations.groups[group] if group >= 0 else None,
                sequence=int(rows.sequence[row]),
                step=known_step(int(rows.step[row])),
                phase=known_phase(operations.phases[rows.phase[row]]),
                message=messages[rank].get(int(rows.enqueue_ns[row]), "")
                or Unavailable("no message was recorded"),
            )
        )
    return tuple(found)


class PhaseBook:
    """Phase names of all ranks, each once; the first stands for no phase."""

    def __init__(self, no_phase: str = "") -> None:
        self.names = [no_phase]
        self._index = {no_phase: 0}

    def add(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = len(self.names)
            self.names.append(name)
        return self._index[name]

    def find(self, name: str) -> int:
        """-1 when no rank used the name."""
        return self._index.get(name, -1)

    def translate(self, ids: Int64s, recording: Recording) -> Int32s:
        """Indices in `names` of a rank's own name ids."""
        used = np.flatnonzero(np.bincount(ids, minlength=1))
        index_of = np.zeros(int(used[-1]) + 1 if len(used) else 1, dtype=np.int32)
        ids_used = used.tolist()
        for name_id, name in zip(
            ids_used, join_phase_names(ids_used, recording.names), strict=True
        ):
            # An operation outside of phases has id 0; a span never has.
            is_named = name_id or not self.names[0]
            index_of[name_id] = self.add(name) if is_named else 0
        found: Int32s = index_of[ids]
        return found


_EXACT_SOURCES: Bools = np.isin(np.arange(256), [int(source) for source in IS_EXACT_END])
_KNOWN_KINDS: Bools = np.isin(np.arange(256), [int(kind) for kind in Kind])


def _is_time(times: Int64s) -> Bools:
    found: Bools = (times >= 0) & (times < MAX_TIME_NS)
    return found


def _read_rank(
    recording: Recording,
    indices: dict[int, int],
    phases: PhaseBook,
    clocks: dict[int, PlacedClock],
) -> tuple[OperationRows, int, int]:
    columns = recording.read("collectives")
    enqueue = int64_column(columns, "enqueue_host_mono_ns")
    num_all = len(enqueue)
    usable = np.flatnonzero(_is_time(enqueue))
    usable = usable[np.argsort(enqueue[usable], kind="stable")]
    columns = {name: array[usable] for name, array in columns.items()}
    enqueue = enqueue[usable]
    start = int64_column(columns, "start_host_mono_ns")
    is_start = _is_time(start)
    is_start &= np.abs(np.where(is_start, start, enqueue) - enqueue) < MAX_SPAN_NS
    start = np.where(is_start, start, enqueue)
    end = int64_column(columns, "end_host_mono_ns")
    is_end = _is_time(end) & (end >= start)
    is_end &= np.where(is_end, end, start) - start < MAX_SPAN_NS
    num_bad_ends = int(np.count_nonzero(~is_end & (end != MISSING)))
    kind = _small(columns, "kind")
    size = int64_column(columns, "size_bytes")
    step, microbatch = _number_by_steps(
        recording, enqueue, _step(columns, "step"), _step(columns, "microbatch")
    )
    rows = OperationRows(
        rank=np.full(len(enqueue), recording.rank, dtype=np.int32),
        kind=np.where(_KNOWN_KINDS[kind], kind, np.uint8(Kind.CUSTOM)),
        outcome=_small(columns, "outcome"),
        end_source=_small(columns, "end_source"),
        flags=_small(columns, "flags"),
        group=_translate_groups(int64_column(columns, "group_id"), indices),
        phase=phases.translate(int64_column(columns, "phase_id"), recording),
        sequence=int64_column(columns, "sequence"),
        peer=int64_column(columns, "peer"),
        enqueue_ns=enqueue,
        start_ns=start,
        end_ns=np.where(is_end, end, MISSING),
        size_bytes=np.where((size >= 0) & (size < MAX_SPAN_NS), size, MISSING),
        step=step,
        microbatch=microbatch,
        dtype=_small(columns, "dtype"),
        tag=_small(columns, "tag"),
    )
    clock = _fit_clock(recording)
    if clock is not None:
        clocks[recording.rank] = clock
        rows = _correct_device_times(rows, clock)
    return _bound_reducer_ends(recording, rows), num_all - len(rows), num_bad_ends


def _number_by_steps(
    recording: Recording, time_ns: Int64s, step: Int32s, microbatch: Int32s
) -> tuple[Int32s, Int32s]:
    """Steps and microbatches at these times, ascending, of steps that another optimizer extended.

    Behind the first optimizer the next step seemed to begin, and what came was numbered as its. The
    step's record was written again, as the longer one that it was. What was extended by comes as
    microbatches behind those before.
    """
    columns = recording.read("steps")
    number = int64_column(columns, "step")
    first = np.searchsorted(time_ns, int64_column(columns, "start_host_mono_ns"))
    last = np.searchsorted(time_ns, int64_column(columns, "end_host_mono_ns"))
    size = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(size)), size)
    row = np.arange(len(owner)) + np.repeat(first - (np.cumsum(size) - size), size)
    is_late = step[row] == number[owner] + 1
    if not is_late.any():
        return step, microbatch
    before = np.zeros(len(number), dtype=np.int32)
    is_own = step[row] == number[owner]
    np.maximum.at(before, owner[is_own], microbatch[row[is_own]] + 1)
    row, owner = row[is_late], owner[is_late]
    step, microbatch = step.copy(), microbatch.copy()
    step[row] = number[owner]
    microbatch[row] += before[owner]
    return step, microbatch


def _bound_reducer_ends(recording: Recording, rows: OperationRows) -> OperationRows:
    """Bounds what torch told late of a reducer: backward is over when another phase begins.

    torch tells of an end through the interpreter, which may be busy for long (a collection after
    the step). Backward returns when all of its reductions are over, so they were when the program
    went on with another phase.
    """
    told = rows.has_flag(OperationFlag.ENGINE) & (rows.end_source == EndSource.FUTURE)
    row = np.flatnonzero(told & (rows.end_ns >= 0))
    if not len(row) or not recording.has_table("spans"):
        return rows
    columns = recording.read("spans")
    start = int64_column(columns, "start_host_mono_ns")
    end = start + int64_column(columns, "duration_ns")

    def find(*names: str) -> Int64s:
        ids = [name_id for name_id, name in recording.names.items() if name in names]
        own = np.flatnonzero(np.isin(columns["name_id"], ids))
        return own[np.argsort(start[own], kind="stable")]

    backward, others = find("backward"), find("optimizer", "forward")
    if not len(backward) or not len(others):
        return rows
    enqueue = rows.enqueue_ns[row]
    within = backward[np.maximum(np.searchsorted(start[backward], enqueue, side="right") - 1, 0)]
    after = np.searchsorted(start[others], end[within])
    is_known = (start[within] <= enqueue) & (enqueue <= end[within]) & (after < len(others))
    bound = start[others[np.minimum(after, len(others) - 1)]]
    ends = rows.end_ns.copy()
    ends[row] = np.where(is_known, np.minimum(ends[row], np.maximum(bound, enqueue)), ends[row])
    return replace(rows, end_ns=np.maximum(ends, np.where(ends >= 0, rows.start_ns, ends)))


def _fit_clock(recording: Recording) -> PlacedClock | None:
    """From where the main stream reached operations, and where it went on after waits."""
    samples = read_samples(recording) if recording.has_table("kernels") else ()
    if not samples:
        return None
    around = narrow_to_samples(recording, samples)
    rows, waits = around.read("collectives"), around.read("waits")
    enqueue = int64_column(rows, "enqueue_host_mono_ns")
    reached = int64_column(rows, "start_host_mono_ns")
    is_timed = (int64_column(rows, "flags") & OperationFlag.DEVICE != 0) & _is_time(enqueue)
    is_timed &= _is_time(reached) & _is_time(int64_column(rows, "end_host_mono_ns"))
    wait_start = int64_column(waits, "start_host_mono_ns")
    went_on = int64_column(waits, "device_end_host_mono_ns")
    is_placed = _is_time(went_on) & _is_time(wait_start)
    issued = wait_start + np.clip(int64_column(waits, "duration_ns"), 0, MAX_SPAN_NS)
    return fit_placed_clock(
        samples,
        recording.updates,
        np.concatenate([enqueue[is_timed], issued[is_placed]]),
        np.concatenate([reached[is_timed], went_on[is_placed]]),
    )


def _correct_device_times(rows: OperationRows, clock: PlacedClock) -> OperationRows:
    is_timed = rows.has_flag(OperationFlag.DEVICE) & (rows.end_ns != MISSING)
    start, end = clock.correct(rows.start_ns), clock.correct(rows.end_ns)
    return replace(
        rows,
        start_ns=np.where(is_timed, start, rows.start_ns),
        end_ns=np.where(is_timed, np.maximum(end, start), rows.end_ns),
    )


def _small(columns: Columns, name: str) -> Uint8s:
    return columns[name].astype(np.uint8, copy=False)


def _step(columns: Columns, name: str) -> Int32s:
    numbers = int64_column(columns, name)
    return np.where(numbers < 1 << 31, numbers, MISSING).astype(np.int32)


def _translate_groups(ids: Int64s, indices: dict[int, int]) -> Int32s:
    index_of = np.full(1 << 16, UNKNOWN_GROUP, dtype=np.int32)
    for group_id, index in indices.items():
        if 0 <= group_id < len(index_of):
            index_of[group_id] = index
    found: Int32s = index_of[ids]
    return found


def _concatenate(parts: list[OperationRows]) -> OperationRows:
    names = [field.name for field in fields(OperationRows)]
    return OperationRows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def _read_waits(
    recording: Recording,
    rows: OperationRows,
    clocks: Mapping[int, PlacedClock],
    unwatched: Int64s,
) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s, Int64s, Int64s, Int64s, int]:
    columns = recording.read("waits")
    if len(unwatched):
        columns = select_rows(columns, ~np.isin(_step(columns, "step"), unwatched))
    start = int64_column(columns, "start_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    is_good = _is_time(start) & (duration >= 0) & (duration < MAX_SPAN_NS)
    start, duration = start[is_good], duration[is_good]
    device = int64_column(columns, "device_ns")[is_good]
    device = np.where((device >= 0) & (device < MAX_SPAN_NS), device, MISSING)
    device_end = int64_column(columns, "device_end_host_mono_ns")[is_good]
    device_end = np.where(_is_time(device_end), device_end, MISSING)
    key = int64_column(columns, "operation_enqueue_host_mono_ns")[is_good]
    first, last = np.searchsorted(rows.rank, (recording.rank, recording.rank + 1))
    clock = clocks.get(recording.rank)
    if clock is not None:
        device_end = np.where(device_end >= 0, clock.correct(device_end), device_end)
    row = find_rows(rows.enqueue_ns[first:last], key)
    order = np.argsort(start, kind="stable")
    step = _step(columns, "step")[is_good]
    step[order], _ = _number_by_steps(recording, start[order], step[order], np.zeros_like(step))
    return (
        np.full(len(start), recording.rank, dtype=np.int64),
        np.where(row >= 0, row + first, -1),
        start,
        duration,
        device,
        device_end,
        step.astype(np.int64),
        int64_column(columns, "source")[is_good],
        int(np.count_nonzero(~is_good)),
    )


def find_rows(keys: Int64s, wanted: Int64s) -> Int64s:
    """For each wanted value its index in the sorted `keys`; -1 where it is not there."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, index, -1)


def _read_messages(recording: Recording) -> dict[int, str]:
    columns = recording.read("operation_notes")
    is_error = columns["code"] == NoteCode.ERROR
    keys = int64_column(columns, "operation_enqueue_host_mono_ns")[is_error].tolist()
    names: Iterable[int] = int64_column(columns, "name_id")[is_error].tolist()
    return {key: recording.name_of(name) for key, name in zip(keys, names, strict=True)}


def slice_runs(values: Int32s) -> list[tuple[int, slice]]:
    """Each value with the slice of its entries; equal values are adjacent."""
    if not len(values):
        return []
    cuts = np.flatnonzero(values[1:] != values[:-1]) + 1
    first, last = [0, *cuts.tolist()], [*cuts.tolist(), len(values)]
    return [(int(values[start]), slice(start, end)) for start, end in zip(first, last, strict=True)]


def code_pairs(rank: Int32s, peer: Int64s, world_size: int) -> Int64s:
    """One number for two ranks, whichever of them sends; `divmod` by `world_size` has them back."""
    one = rank.astype(np.int64)
    return np.minimum(one, peer) * world_size + np.maximum(one, peer)


def number_values(values: Int64s) -> tuple[Int64s, Int64s]:
    """The distinct values in ascending order, and the index of each entry among them.

    `np.unique`, but without sorting if the values are close together.
    """
    low = int(values.min(initial=0))
    width = int(values.max(initial=0)) - low + 1
    if width > 4 * len(values) + 1024:
        found, index = np.unique(values, return_inverse=True)
        return found.astype(np.int64), index.astype(np.int64)
    is_there = np.bincount(values - low, minlength=width) > 0
    found = np.flatnonzero(is_there)
    index_of = np.cumsum(is_there) - 1
    return found + low, index_of[values - low]


def count_unrecognised(rows: OperationRows) -> int:
    """Operations of torch that this version has no kind for."""
    is_unnamed = (rows.kind == Kind.CUSTOM) & ~rows.has_flag(OperationFlag.MANUAL)
    return int(np.count_nonzero(is_unnamed))
