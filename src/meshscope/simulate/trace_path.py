"""The critical path over the ranks of which there are traces, through a run made of them."""

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.critical_path import CriticalPath, find_critical_path
from meshscope.simulate.what_if import MAX_FIDELITY_ERROR_RATIO, Fidelity, build_replay


def find_trace_path(timeline: Timeline | Unavailable) -> CriticalPath | Unavailable:
    """The path over the steps that all traces have."""
    if isinstance(timeline, Unavailable):
        return timeline
    replay = build_replay(timeline)
    if isinstance(replay, Unavailable):
        return replay
    if not replay.fidelity.is_enough:
        return Unavailable(_explain(replay.fidelity))
    return find_critical_path(replay)


def _explain(fidelity: Fidelity) -> str:
    """Why the replay is not accurate enough."""
    if fidelity.unexplained_ratio >= MAX_FIDELITY_ERROR_RATIO:
        return (
            f"in {100 * fidelity.unexplained_ratio:.0f} % of their time ranks were held up by what "
            "the traces do not explain, such as ranks without a trace or groups without a name"
        )
    return (
        f"a replay of what the traces explain is {100 * fidelity.error_ratio:.0f} % off their "
        f"clocks, over {fidelity.num_steps} steps"
    )
