"""The phases of one rank as layers: the innermost phase of each moment, host or device.

Phases that cross the start or end of a step are left out, as in `rank.phases`: they are blocks
around a loop and would claim all time outside other phases.
"""

from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.job.operations import MAX_SPAN_NS, MAX_TIME_NS, PhaseBook
from meshscope.analyze.rank.device import join_spans, tighten_offsets
from meshscope.analyze.rank.device_clock import DeviceOffsets, fit_offsets
from meshscope.analyze.rank.kernel_sample import narrow_to_samples, read_samples
from meshscope.analyze.rank.phases import PhaseSpans, StepTimes, assign_phases
from meshscope.numerics.interval_layers import Layer, make_layer
from meshscope.numerics.intervals import unite
from meshscope.store.read.arrays import Int32s, Int64s
from meshscope.store.read.columns import Columns, int64_column, select_rows
from meshscope.store.read.recording import Recording

_COMPILE = "compile"
_TRACED = ("forward", "backward", "optimizer")
_MAX_EARLY_NS = 1_000_000
"""Marks that put a device this far ahead of its host are not believed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPhases:
    """Spans of a rank's training thread with their phase indices."""

    spans: PhaseSpans
    phase: Int32s

    @property
    def start_ns(self) -> Int64s:
        """On the rank's own clock."""
        return self.spans.start_ns

    @property
    def end_ns(self) -> Int64s:
        """On the rank's own clock."""
        return self.spans.start_ns + self.spans.duration_ns


def read_phases(recording: Recording, steps: StepTimes, book: PhaseBook) -> RankPhases:
    columns = recording.read("spans")
    start = int64_column(columns, "start_host_mono_ns")
    duration = int64_column(columns, "duration_ns")
    is_good = (start >= 0) & (start < MAX_TIME_NS) & (duration >= 0) & (duration < MAX_SPAN_NS)
    if not is_good.all():
        columns = select_rows(columns, is_good)
    spans, _ = assign_phases(steps, columns)
    phase = book.translate(spans.name_id.astype(np.int64), recording)
    return RankPhases(spans=_leave_out_traced(spans, phase, book), phase=phase)


def _leave_out_traced(spans: PhaseSpans, phase: Int32s, book: PhaseBook) -> PhaseSpans:
    """Without a model's phases in a compilation: the compiler runs it to see what it does."""
    is_compile = phase == book.find(_COMPILE)
    if not is_compile.any():
        return spans
    start, end = spans.start_ns[is_compile], (spans.start_ns + spans.duration_ns)[is_compile]
    inside = unite(start, end).within(spans.start_ns, spans.start_ns + 1) > 0
    inside &= np.isin(phase, [book.find(name) for name in _TRACED]) & (spans.interval >= 0)
    return replace(spans, interval=np.where(inside, -1, spans.interval))


def layer_by_depth(
    start_ns: Int64s, end_ns: Int64s, depth: Int64s, value: Int64s
) -> tuple[Layer, ...]:
    """One layer per depth, the outermost first."""
    return tuple(
        make_layer(start_ns[rows], end_ns[rows], value[rows])
        for level in np.unique(depth).tolist()
        if len(rows := np.flatnonzero(depth == level))
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceMarks:
    """Device spans of a rank, placed on the clock of its host."""

    start_ns: Int64s
    end_ns: Int64s
    host_start_ns: Int64s
    """Start of the host span they belong to."""
    depth: Int64s
    interval: Int64s
    """As `PhaseSpans.interval`."""
    phase: Int32s

    def __len__(self) -> int:
        return len(self.start_ns)


def fit_mark_offsets(recording: Recording) -> DeviceOffsets | None:
    """Where marks lie on the host's clock, as kernel samples say; None without one."""
    samples = read_samples(recording)
    if not samples:
        return None
    marks = narrow_to_samples(recording, samples).read("device_spans")
    issued = int64_column(marks, "host_start_host_mono_ns")
    reached = int64_column(marks, "start_device_ns")
    is_good = (issued >= 0) & (issued < MAX_TIME_NS) & (reached >= 0) & (reached < MAX_TIME_NS)
    return fit_offsets(samples, issued[is_good], reached[is_good])


def place_device_spans(
    columns: Columns, phases: RankPhases, offsets: DeviceOffsets | None = None
) -> DeviceMarks:
    """Puts device spans on the host's clock: as kernel samples say, else by the tightest bound.

    The device cannot reach a mark before the host issued it: each step bounds the offset from
    below, and the highest bound of the steps around holds. Spans whose bounds contradict each
    other, or whose host span is not known, are left out.
    """
    start = int64_column(columns, "start_device_ns")
    duration = int64_column(columns, "duration_ns")
    low, high = int64_column(columns, "offset_min_ns"), int64_column(columns, "offset_max_ns")
    host_row = join_spans(phases.spans, columns)
    is_good = (host_row >= 0) & (np.abs(low) < MAX_TIME_NS) & (low <= high)
    is_good &= (start >= 0) & (start < MAX_TIME_NS) & (duration >= 0) & (duration < MAX_SPAN_NS)
    is_good[is_good] &= phases.spans.interval[host_row[is_good]] >= 0
    start, duration, low, host_row = (
        values[is_good] for values in (start, duration, low, host_row)
    )
    interval = phases.spans.interval[host_row]
    host_start = phases.spans.start_ns[host_row]
    since = start + (
        tighten_offsets(low, interval // 2) if offsets is None else offsets.find(host_start)
    )
    kept = since >= host_start - _MAX_EARLY_NS
    return DeviceMarks(
        start_ns=since[kept],
        end_ns=(since + duration)[kept],
        host_start_ns=host_start[kept],
        depth=phases.spans.depth[host_row][kept].astype(np.int64),
        interval=interval[kept],
        phase=phases.phase[host_row][kept],
    )
