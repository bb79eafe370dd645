"""The kernel samples of one rank, as arrays: what the device did, and what launched it.

A sample counts only when it was read to its end and all its rows are there. Times are on the
clock of the rank's host. Rows whose times lie outside of the sample's window are damage: they are
left out; a launch at an impossible time is one that is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.numerics.intervals import Intervals, unite
from meshscope.store.kernel_table import KernelKind
from meshscope.store.read.arrays import Bools, Int64s
from meshscope.store.read.columns import Columns, int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.table_window import TimeWindows
from meshscope.store.read.trace_windows import KERNEL_LINE, TraceWindow, read_windows
from meshscope.store.schema import MISSING

_SLACK_NS = 1_000_000_000
"""By how much a row may lie outside of its sample: clocks are placed to microseconds."""
_BLOCKING_COPY = "memcpy dtoh"
_PROFILER_CALLS = frozenset(
    ("activity buffer request", "buffer flush", "instrumentation", "resource", "uvm activity init")
)
"""What CUPTI calls the time it takes itself. Its "Command Buffer Full" is none: the device's queue
is full, watched or not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceWork:
    """Pieces of work of a device in order of their start."""

    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s
    """`KernelKind`, up to FILL."""
    stream: Int64s
    launch_ns: Int64s
    """When the host began the call that launched it; -1 when it is not known."""
    launched_ns: Int64s
    """When that call was over; -1 when it is not known."""
    thread: Int64s
    """Of the call; 0 when it is not known."""
    is_graph: Bools
    name_id: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)

    def unite(self, *kinds: KernelKind) -> Intervals:
        """When work of any of the kinds ran."""
        picked = np.isin(self.kind, [int(kind) for kind in kinds])
        return unite(self.start_ns[picked], self.end_ns[picked])

    def find_compute_stream(self) -> int:
        """The stream with most time in kernels that compute; -1 without any."""
        rows = np.flatnonzero(self.kind == KernelKind.COMPUTE)
        streams, index = np.unique(self.stream[rows], return_inverse=True)
        total = np.bincount(index, weights=(self.end_ns - self.start_ns)[rows])
        return int(streams[np.argmax(total)]) if len(rows) else -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuntimeCalls:
    """Calls of the host that waited for the device, or took long."""

    start_ns: Int64s
    end_ns: Int64s
    is_synchronising: Bools
    thread: Int64s
    name_id: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelSample:
    """A few steps in which the device was watched."""

    rank: int
    number: int
    first_step: int
    last_step: int
    begin_ns: int
    end_ns: int
    work: DeviceWork
    calls: RuntimeCalls
    synchronising: Intervals
    """When a thread that launches work waited for the device."""
    profiling: Intervals
    """When a thread was held up by the profiler itself, as far as that says so."""


def read_samples(recording: Recording) -> tuple[KernelSample, ...]:
    """All complete samples of the rank, in their order."""
    windows = read_windows(recording, KERNEL_LINE)
    if not any(window.num_rows for window in windows):
        return ()
    columns = recording.read("kernels")
    found = (_read_sample(recording, columns, window) for window in windows)
    return tuple(sample for sample in found if sample is not None)


def _read_sample(
    recording: Recording, columns: Columns, window: TraceWindow
) -> KernelSample | None:
    first, last, end_ns = window.first_step, window.last_step, window.end_host_mono_ns
    if not window.num_rows or first is None or last is None or end_ns is None:
        return None
    low, high = window.begin_host_mono_ns - _SLACK_NS, end_ns + _SLACK_NS
    start = int64_column(columns, "start_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    is_good = (columns["sample"] == window.number) & (start >= low) & (start <= high)
    is_good &= (duration >= 0) & (duration <= high - low)
    rows = np.flatnonzero(is_good)
    if len(rows) < window.num_rows:
        return None
    rows = rows[np.argsort(start[rows], kind="stable")]
    kind = int64_column(columns, "kind")[rows]
    work = _read_work(columns, rows[kind <= KernelKind.FILL], low, high)
    is_call = (kind == KernelKind.SYNCHRONISATION) | (kind == KernelKind.UNLAUNCHED)
    calls = _read_calls(columns, rows[is_call])
    return KernelSample(
        rank=recording.rank,
        number=window.number,
        first_step=first,
        last_step=last,
        begin_ns=window.begin_host_mono_ns,
        end_ns=end_ns,
        work=work,
        calls=calls,
        synchronising=_find_synchronising(recording, work, calls),
        profiling=_find_profiling(recording, calls),
    )


def _read_work(columns: Columns, rows: Int64s, low_ns: int, high_ns: int) -> DeviceWork:
    start = int64_column(columns, "start_host_mono_ns")[rows]
    launch = int64_column(columns, "launch_host_mono_ns")[rows]
    launch_ns = int64_column(columns, "launch_ns")[rows]
    is_launched = (launch >= max(low_ns, 0)) & (launch <= high_ns)
    is_launched &= (launch_ns >= 0) & (launch_ns <= high_ns - low_ns)
    return DeviceWork(
        start_ns=start,
        end_ns=start + int64_column(columns, "duration_ns")[rows],
        kind=int64_column(columns, "kind")[rows],
        stream=int64_column(columns, "stream")[rows],
        launch_ns=np.where(is_launched, launch, MISSING),
        launched_ns=np.where(is_launched, launch + launch_ns, MISSING),
        thread=int64_column(columns, "launch_thread")[rows],
        is_graph=int64_column(columns, "is_graph")[rows] == 1,
        name_id=int64_column(columns, "name_id")[rows],
    )


def _read_calls(columns: Columns, rows: Int64s) -> RuntimeCalls:
    start = int64_column(columns, "start_host_mono_ns")[rows]
    return RuntimeCalls(
        start_ns=start,
        end_ns=start + int64_column(columns, "duration_ns")[rows],
        is_synchronising=int64_column(columns, "kind")[rows] == KernelKind.SYNCHRONISATION,
        thread=int64_column(columns, "launch_thread")[rows],
        name_id=int64_column(columns, "name_id")[rows],
    )


def _find_synchronising(recording: Recording, work: DeviceWork, calls: RuntimeCalls) -> Intervals:
    """Synchronising calls, and copies to the host whose call lasted until the copy was done."""
    threads = np.unique(work.thread[work.launch_ns >= 0])
    waits = np.flatnonzero(calls.is_synchronising & np.isin(calls.thread, threads))
    blocking = (work.kind == KernelKind.COPY) & (work.launched_ns >= work.end_ns)
    names = {
        name_id: recording.name_of(name_id).lower()
        for name_id in np.unique(work.name_id[blocking]).tolist()
    }
    to_host = [name_id for name_id, name in names.items() if name.startswith(_BLOCKING_COPY)]
    copies = np.flatnonzero(blocking & np.isin(work.name_id, to_host))
    return unite(
        np.concatenate([calls.start_ns[waits], work.launch_ns[copies]]),
        np.concatenate([calls.end_ns[waits], work.launched_ns[copies]]),
    )


def _find_profiling(recording: Recording, calls: RuntimeCalls) -> Intervals:
    names = np.unique(calls.name_id).tolist()
    own = [one for one in names if recording.name_of(one).lower() in _PROFILER_CALLS]
    is_own = np.isin(calls.name_id, own)
    return unite(calls.start_ns[is_own], calls.end_ns[is_own])


def narrow_to_samples(recording: Recording, samples: Sequence[KernelSample]) -> Recording:
    """The recording around its samples; of a long run other windows may be read."""
    return recording.narrow(
        TimeWindows(
            start_ns=np.array([sample.begin_ns - _SLACK_NS for sample in samples]),
            end_ns=np.array([sample.end_ns + _SLACK_NS for sample in samples]),
        )
    )
