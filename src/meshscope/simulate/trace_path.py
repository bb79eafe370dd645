"""The critical path over the ranks of which there are traces, through a run made of them."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshscope.analyze.timeline import build_timeline
from meshscope.analyze.trace_recording import TraceRecording
from meshscope.analyze.trace_run import write_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError
from meshscope.simulate.critical_path import CriticalPath, find_critical_path
from meshscope.simulate.what_if import build_replay
from meshscope.store.reader import open_run


def find_trace_path(
    recordings: Sequence[TraceRecording], layout: Layout | None
) -> CriticalPath | Unavailable:
    """The path of the steps that all traces have."""
    with tempfile.TemporaryDirectory(prefix="meshscope-") as folder:
        try:
            imported = write_run(recordings, Path(folder) / "run", layout=layout)
            timeline = build_timeline(open_run(imported.path).last_attempt)
        except (MeshscopeError, OSError) as error:
            return Unavailable(str(error))
        if isinstance(timeline, Unavailable):
            return timeline
        replay = build_replay(timeline)
        if isinstance(replay, Unavailable):
            return replay
        if not replay.fidelity.is_enough:
            share = replay.fidelity.unexplained_ratio
            return Unavailable(
                f"in {share:.0%} of their time ranks were held up by what the traces do not "
                "explain, such as ranks without a trace"
            )
        return find_critical_path(replay)
