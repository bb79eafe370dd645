"""The critical path over the ranks of which there are traces, through a run made of them."""

from collections.abc import Sequence
from pathlib import Path

from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import MeshscopeError
from meshscope.ingest.traces.trace_recording import TraceRecording
from meshscope.ingest.traces.trace_run import make_run
from meshscope.simulate.critical_path import CriticalPath, find_critical_path
from meshscope.simulate.what_if import MAX_FIDELITY_ERROR_RATIO, Fidelity, build_replay


def find_trace_path(
    recordings: Sequence[TraceRecording], layout: Layout | None
) -> CriticalPath | Unavailable:
    """The path of the steps that all traces have."""
    try:
        made = make_run(recordings, Path(recordings[0].source), layout=layout)
    except MeshscopeError as error:
        return Unavailable(str(error))
    timeline = build_timeline(made.run.last_attempt)
    if isinstance(timeline, Unavailable):
        return timeline
    replay = build_replay(timeline)
    if isinstance(replay, Unavailable):
        return replay
    if not replay.fidelity.is_enough:
        return Unavailable(_explain(replay.fidelity))
    return find_critical_path(replay)


def _explain(fidelity: Fidelity) -> str:
    """Why a replay does not speak for the traces."""
    if fidelity.unexplained_ratio >= MAX_FIDELITY_ERROR_RATIO:
        return (
            f"in {100 * fidelity.unexplained_ratio:.0f} % of their time ranks were held up by what "
            "the traces do not explain, such as ranks without a trace or groups without a name"
        )
    return (
        f"a replay of what the traces explain is {100 * fidelity.error_ratio:.0f} % off their "
        f"clocks, over {fidelity.num_steps} steps"
    )
