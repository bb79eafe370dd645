"""The 3D monitor: how training goes right now, from inside the training process.

    print(recorder.report())
    recorder.stats().windows[10].tokens_per_s
    recorder.analysis().bottlenecks

Looks at the newest records of this rank when asked, and holds nothing but the moment since when:
no cost between queries, bounded memory, any thread may ask. It knows this rank only; which rank
makes the others wait is for `meshscope report`, which sees them all.
"""

from collections.abc import Callable

from meshscope.capture.guard import Guard
from meshscope.capture.monitor.monitor_analysis import make_analysis, make_stats
from meshscope.capture.monitor.monitor_records import Snapshot, Surroundings, take_snapshot
from meshscope.capture.monitor.monitor_results import (
    MonitorAnalysis,
    MonitorStats,
    MonitorThresholds,
)
from meshscope.capture.monitor.monitor_text import render_monitor

_EMPTY = take_snapshot(Surroundings(), 0)


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
        """Counts only steps that start from now on."""
        self._since_ns = self._clock()

    def stats(self) -> MonitorStats:
        """Counts, sums and rates; over no step when reading failed."""
        found = self._guard.run("monitor", lambda: make_stats(self.snapshot()))
        return make_stats(_EMPTY) if found is None else found

    def analysis(self) -> MonitorAnalysis:
        """Ratios and bottlenecks; over no step when reading failed."""
        found = self._guard.run("monitor", lambda: make_analysis(self.snapshot(), self.thresholds))
        return make_analysis(_EMPTY, self.thresholds) if found is None else found

    def report(self) -> str:
        """Both as text, of one snapshot."""
        found = self._guard.run("monitor", self._report)
        return "monitor: an error of the recorder's own, see the log" if found is None else found

    def _report(self) -> str:
        snapshot = self.snapshot()
        around = snapshot.around
        layout = f", {around.layout.describe()}" if around.layout else ""
        who = f"rank {around.rank} of {around.world_size}{layout}"
        return render_monitor(make_stats(snapshot), make_analysis(snapshot, self.thresholds), who)

    def snapshot(self) -> Snapshot:
        """Reads the newest records, once."""
        return take_snapshot(self._look(), self._since_ns)
