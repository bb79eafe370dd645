"""The 3D monitor: how training goes right now, from inside the training process.

    print(recorder.report())
    recorder.stats().windows[10].tokens_per_s
    recorder.analysis().bottlenecks

Looks at the newest records of this rank when asked, and holds nothing but the moment since when:
no cost while nobody asks, bounded memory, any thread may ask. It knows this rank only; which rank
makes the others wait is for `meshscope report`, which sees them all.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshscope.capture.guard import Guard
from meshscope.capture.monitor.monitor_analysis import make_analysis, make_stats
from meshscope.capture.monitor.monitor_records import (
    ReadTable,
    Snapshot,
    read_actions,
    read_hold_ups,
    read_logged_tokens,
    read_memory,
    read_phases,
    read_steps,
)
from meshscope.capture.monitor.monitor_results import (
    MonitorAnalysis,
    MonitorStats,
    MonitorThresholds,
)
from meshscope.capture.monitor.monitor_text import render_monitor
from meshscope.core.hardware import find_peak
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the recorder knows besides its tables."""

    read: ReadTable
    layout: Layout | None
    rank: int
    world_size: int
    axes: Mapping[int, str]
    has_communication: bool
    host_limit_bytes: int
    tokens_name_id: int
    """Of the scalar `tokens`; 0 when it was never logged."""
    facts: Mapping[str, Mapping[str, object]]
    """Lines `flops` and `peak`, as `model_facts` has them."""


class Monitor:
    """Answers from snapshots. See the module's docstring."""

    def __init__(
        self, look: Callable[[], Surroundings], clock: Callable[[], int], guard: Guard | None = None
    ) -> None:
        self._look = look
        self._clock = clock
        self._guard = guard or Guard()
        self._since_ns = 0
        self.thresholds = MonitorThresholds()

    def reset(self) -> None:
        """Forgets what was: only steps that begin from now on count."""
        self._since_ns = self._clock()

    def stats(self) -> MonitorStats:
        """Counts, sums and rates; of no step at all when looking failed."""
        found = self._guard.run("monitor", lambda: make_stats(self.snapshot()))
        return make_stats(_EMPTY) if found is None else found

    def analysis(self) -> MonitorAnalysis:
        """Ratios and bottlenecks; of no step at all when looking failed."""
        found = self._guard.run("monitor", lambda: make_analysis(self.snapshot(), self.thresholds))
        return make_analysis(_EMPTY, self.thresholds) if found is None else found

    def report(self) -> str:
        """Both as text, of one snapshot."""
        found = self._guard.run("monitor", self._report)
        return "monitor: an error of the recorder's own, see the log" if found is None else found

    def _report(self) -> str:
        snapshot = self.snapshot()
        layout = f", {snapshot.layout.describe()}" if snapshot.layout else ""
        place = f"rank {snapshot.rank} of {snapshot.world_size}{layout}"
        stats = make_stats(snapshot)
        return render_monitor(stats, make_analysis(snapshot, self.thresholds), place)

    def snapshot(self) -> Snapshot:
        """Reads the newest records, once."""
        around, since_ns = self._look(), self._since_ns
        read = around.read
        tokens = read_logged_tokens(read, around.tokens_name_id, _to_float)
        steps = read_steps(read, since_ns, tokens)
        phases, phases_since_ns = read_phases(read, since_ns)
        hold_ups, operations_since_ns = read_hold_ups(read, since_ns)
        return Snapshot(
            steps=tuple(steps),
            phases=tuple(phases),
            hold_ups=tuple(hold_ups),
            operations_since_ns=operations_since_ns,
            phases_since_ns=phases_since_ns,
            actions=tuple(read_actions(read, since_ns)),
            memory=tuple(read_memory(read, since_ns)),
            layout=around.layout,
            rank=around.rank,
            world_size=around.world_size,
            axes=around.axes,
            has_communication=around.has_communication,
            host_limit_bytes=around.host_limit_bytes,
            flops_per_step=_flops_per_step(around.facts, [s.num_microbatches for s in steps]),
            peak_flops_per_s=_peak(around.facts),
        )


_EMPTY = Snapshot(
    steps=(),
    phases=(),
    hold_ups=(),
    operations_since_ns=0,
    phases_since_ns=0,
    actions=(),
    memory=(),
    layout=None,
    rank=0,
    world_size=1,
    axes={},
    has_communication=False,
    host_limit_bytes=-1,
    flops_per_step=None,
    peak_flops_per_s=None,
)


def _to_float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


def _flops_per_step(
    facts: Mapping[str, Mapping[str, object]], num_microbatches: list[int]
) -> float | None:
    said = facts.get("flops", {})
    flops = said.get("model_flops")
    if not isinstance(flops, float):
        return None
    if said.get("per") != "microbatch":
        return flops
    return flops * num_microbatches[-1] if num_microbatches else None


def _peak(facts: Mapping[str, Mapping[str, object]]) -> float | None:
    flops, peak = facts.get("flops", {}), facts.get("peak", {})
    dtype, device, rate = flops.get("dtype"), flops.get("device"), peak.get("flops_per_s")
    if isinstance(rate, float) and peak.get("dtype") == dtype:
        return rate
    if not isinstance(dtype, str) or not isinstance(device, str):
        return None
    found = find_peak(device, dtype)
    return None if isinstance(found, Unavailable) else found
