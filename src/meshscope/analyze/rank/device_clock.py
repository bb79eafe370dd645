"""Where a device's recorded times lie on its host's clock, from kernel samples.

Events of a device are placed on the host's clock by bounds: an event is not reached before it was
issued. A device that is always behind its host so seems to run early, by as much as it lags: 5 to
200 ms were seen, and another value on every rank. Kernels of a sample are on the host's clock to
microseconds. An event on the main stream was reached after the work launched before it had ended,
and before the work launched after it began: where the stream is busy, both are a few microseconds
apart, and the true offset is known in the sample. Between samples it is interpolated.

Without a sample nothing is corrected.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.kernel_sample import KernelSample
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.recording import JsonFields

_TIGHT_NS = 30_000
"""Bounds this close together are as good as a measurement."""
_MIN_TIGHT = 3
_READ_LATE_NS = 60_000_000
"""How long after an event the recorder reads it, about; it is placed by the offset of then."""
_MAX_NS = 1 << 61
_LINE = "device_offset"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceOffsets:
    """Host time less device time at some moments; constant before the first and after the last."""

    host_ns: Int64s
    offset_ns: Int64s

    def find(self, host_ns: Int64s) -> Int64s:
        base = int(self.offset_ns[0])
        relative = np.interp(host_ns, self.host_ns, (self.offset_ns - base).astype(np.float64))
        return base + np.rint(relative).astype(np.int64)


def fit_offsets(
    samples: Sequence[KernelSample], issued_ns: Int64s, device_ns: Int64s
) -> DeviceOffsets | None:
    """From events on the main stream: when each was issued, and its device time."""
    found = [
        (int(sample.begin_ns + sample.end_ns) // 2, offset)
        for sample in samples
        if (offset := _fit_offset(sample, issued_ns, device_ns)) is not None
    ]
    if not found:
        return None
    host, offset = np.array(found, dtype=np.int64).T
    return DeviceOffsets(host_ns=host, offset_ns=offset)


def _fit_offset(sample: KernelSample, issued_ns: Int64s, device_ns: Int64s) -> int | None:
    work = sample.work
    rows = np.flatnonzero((work.stream == work.find_compute_stream()) & (work.launch_ns >= 0))
    if not len(rows):
        return None
    launch = work.launch_ns[rows]
    # A stream's work runs in the order of its launches.
    order = np.argsort(launch, kind="stable")
    launch, start = launch[order], work.start_ns[rows][order]
    end = np.maximum.accumulate(work.end_ns[rows][order])
    index = np.searchsorted(launch, issued_ns, side="right")
    inside = (index > 0) & (index < len(launch))
    index, issued, device = index[inside], issued_ns[inside], device_ns[inside]
    if not len(index):
        return None
    low = np.maximum(end[index - 1], issued) - device
    high = start[index] - device
    is_tight = (high >= low) & (high - low <= _TIGHT_NS)
    if np.count_nonzero(is_tight) >= _MIN_TIGHT:
        return int(np.median(low[is_tight]))
    return int(min(np.quantile(low, 0.9), np.quantile(high, 0.1)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UsedOffsets:
    """The offsets by which a recorder placed times, each from a moment on."""

    from_ns: Int64s
    offset_ns: Int64s

    def find(self, placed_ns: Int64s) -> Int64s:
        index = np.searchsorted(self.from_ns, placed_ns + _READ_LATE_NS, side="right") - 1
        found: Int64s = self.offset_ns[np.maximum(index, 0)]
        return found


def read_used_offsets(updates: Iterable[JsonFields]) -> UsedOffsets | None:
    """From a rank's journal; None where nothing was placed, or by an older recorder."""
    found = []
    for update in updates:
        line = update.get(_LINE)
        if isinstance(line, dict):
            pair = line.get("from_host_mono_ns"), line.get("offset_ns")
            if all(type(one) is int and abs(one) < _MAX_NS for one in pair):
                found.append(pair)
    if not found:
        return None
    start, offset = np.array(found, dtype=np.int64).T
    return UsedOffsets(from_ns=start, offset_ns=offset)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedClock:
    """Moves times that a recorder has placed to where they belong."""

    used: UsedOffsets
    true: DeviceOffsets

    def correct(self, placed_ns: Int64s) -> Int64s:
        return placed_ns + self.true.find(placed_ns) - self.used.find(placed_ns)


def fit_placed_clock(
    samples: Sequence[KernelSample],
    updates: Iterable[JsonFields],
    issued_ns: Int64s,
    placed_ns: Int64s,
) -> PlacedClock | None:
    """From events on the main stream that were placed; None where nothing is to be corrected."""
    used = read_used_offsets(updates)
    if used is None or not samples:
        return None
    true = fit_offsets(samples, issued_ns, placed_ns - used.find(placed_ns))
    return None if true is None else PlacedClock(used=used, true=true)
