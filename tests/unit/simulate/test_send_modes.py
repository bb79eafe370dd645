"""Whether sends wait for their receivers is seen in the times, and priced so."""

import pytest

from made_programs import MS, ProgramRun, hand, receive, reduce, send, work
from meshscope.analyze.pipeline.action_replay import SendMode, list_actions
from meshscope.analyze.pipeline.pipeline import analyze_pipeline
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.pipeline.pipeline_edits import price_level_position
from meshscope.simulate.pipeline.pipeline_replay import PipelineReplay, build_pipeline_replay
from meshscope.simulate.what_if import Gain

LATENCY_NS = MS // 5


def gpipe(sending, *, slow_rank: int = -1) -> ProgramRun:
    """Four stages, eight microbatches; forwards of one rank may take 5 ms longer."""
    schedule = build_schedule("gpipe", 4, 8, None)

    def make(rank: int, step: int):
        lines = []
        for action in schedule.actions[rank]:
            is_forward = str(action.kind) == "F"
            before, after = (rank - 1, rank + 1) if is_forward else (rank + 1, rank - 1)
            if 0 <= before < 4:
                lines.append(receive(before, LATENCY_NS))
            extra_ns = 5 * MS if is_forward and rank == slow_rank else 0
            lines.append(work("forward" if is_forward else "backward", 2 * MS + extra_ns))
            if 0 <= after < 4:
                lines.append(sending(after))
        return [*lines, reduce((0, 1, 2, 3), MS)]

    return ProgramRun(make, num_ranks=4, num_steps=5, layout=Layout(pp=4))


def load(run: ProgramRun, path) -> PipelineReplay:
    attempt = run.record(path)
    timeline = build_timeline(attempt)
    assert not isinstance(timeline, Unavailable), timeline
    analysis = analyze_pipeline(timeline, attempt)
    assert not isinstance(analysis, Unavailable), analysis
    replay = build_pipeline_replay(
        timeline, analysis.times, analysis.work, analysis.bubble.action_gaps
    )
    assert not isinstance(replay, Unavailable), replay
    return replay


@pytest.mark.parametrize("slow_rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("sending", "is_free"), [(hand, False), (send, True)], ids=["blocking", "buffered"]
)
def test_a_slow_stage_is_priced_by_how_sends_wait(tmp_path, sending, is_free, slow_rank):
    slow = gpipe(sending, slow_rank=slow_rank)
    replay = load(slow, tmp_path)
    assert (replay.plan.mode is SendMode.FREE) == is_free
    gain = price_level_position(replay, slow_rank)
    assert isinstance(gain, Gain), gain
    assert gain.saved_ns == pytest.approx(slow.step_ns - gpipe(sending).step_ns, rel=0.02)


def test_a_blocked_send_is_no_wait_for_input(tmp_path):
    times = load(gpipe(hand, slow_rank=2), tmp_path).times
    actions = [(a.stage, str(a.kind), a.microbatch) for a in list_actions(times.schedule)]
    # Rank 1 asks for its input only when rank 2 has taken the output before.
    asking, taking = actions.index((1, "F", 5)), actions.index((2, "F", 4))
    assert (times.wait_start_ns[asking] == times.start_ns[taking]).all()
