"""Stage times, what stages hold, and why one of them takes longest."""

import pytest

from builders import make_writer
from meshscope.analyze.pipeline.pipeline_times import collect_pipeline_times
from meshscope.analyze.pipeline.stage_verdict import StageCause, judge_stages
from meshscope.analyze.pipeline.stage_work import (
    PartsSource,
    lower_median,
    measure_stage_work,
    read_parts,
)
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.schedule import ActionKind
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from pipeline_builders import Recipe, make_pipeline_run, stage_cost


def measure(path, stage_ms, layers=None, *, cost=None, num_chains=1):
    schedule = build_schedule("1f1b", len(stage_ms), 4)
    recipe = Recipe(
        schedule=schedule,
        cost=cost or stage_cost(stage_ms),
        num_steps=3,
        num_chains=num_chains,
        parts=layers or {},
    )
    attempt = open_run(make_pipeline_run(path / "run", recipe)).last_attempt
    timeline = build_timeline(attempt, warmup_steps=0)
    assert not isinstance(timeline, Unavailable)
    times = collect_pipeline_times(timeline, attempt)
    assert not isinstance(times, Unavailable)
    return measure_stage_work(times, attempt)


def blocks(*counts):
    return {stage: {"Block": count} for stage, count in enumerate(counts)}


def test_stages_have_their_times_ranks_and_layers(tmp_path):
    layers = blocks(2, 3)
    layers[0]["embedding"] = layers[1]["head"] = 1
    work = measure(tmp_path, {0: (2, 4), 1: (3, 6)}, layers, num_chains=2)
    assert [stage.ranks for stage in work.stages] == [(0, 2), (1, 3)]
    assert [(s.forward_ns, s.backward_ns) for s in work.stages] == [(2e6, 4e6), (3e6, 6e6)]
    assert not isinstance(work.layers, Unavailable)
    assert (work.layers.source, work.layers.kind) == (PartsSource.TOLD, "Block")
    assert work.layers.num_layers == (2, 3)
    assert work.layers.extras == (("embedding",), ("head",))
    assert work.layer_ns() == 3e6


def test_one_slow_rank_of_two_does_not_make_a_slow_stage(tmp_path):
    def cost(step, chain, action):
        own = 2e6 if action.kind is ActionKind.FORWARD else 4e6
        return own * (2 if (chain, action.stage) == (1, 1) else 1)

    work = measure(tmp_path, {0: (), 1: ()}, cost=cost, num_chains=2)
    assert [stage.work_ns for stage in work.stages] == [6e6, 6e6]


def test_what_was_not_said_is_not_known(tmp_path):
    work = measure(tmp_path, {0: (2, 4), 1: (2, 4)})
    assert isinstance(work.layers, Unavailable)
    assert isinstance(work.layer_ns(), Unavailable)
    assert "set_stage_layers" in work.layers.reason


@pytest.mark.parametrize(
    "parts", [{"0": 3}, {"0": {"Block": -1}}, {"0": {"Block": True}}, {"0": {}}, [1], "x"]
)
def test_statements_that_cannot_be_are_not_believed(tmp_path, parts):
    path = tmp_path / "run"
    make_writer(path, stage_layers=parts).close()
    recording = open_run(path).last_attempt.ranks[0]
    assert read_parts(recording, 0, PartsSource.TOLD) is None


def test_lower_median_takes_the_smaller_of_two():
    assert lower_median([3, 1]) == 1
    assert lower_median([3, 1, 2]) == 2


class TestVerdict:
    def test_more_layers_are_uneven_stages(self, tmp_path):
        stage_ms = {0: (2, 4), 1: (6, 12), 2: (2, 4)}
        verdict = judge_stages(measure(tmp_path, stage_ms, blocks(1, 3, 1)))
        assert (verdict.position, verdict.cause) == (1, StageCause.UNEVEN)
        assert verdict.excess_ratio == pytest.approx(2)
        assert (verdict.num_layers, verdict.others_layers) == (3, 1)

    def test_longer_for_as_many_layers_is_slow(self, tmp_path):
        stage_ms = {0: (2, 4), 1: (4, 8), 2: (2, 4)}
        verdict = judge_stages(measure(tmp_path, stage_ms, blocks(2, 2, 2)))
        assert (verdict.stages, verdict.ranks) == ((1,), (1,))
        assert verdict.cause is StageCause.SLOW

    def test_two_that_are_equally_slow_are_one_verdict(self, tmp_path):
        stage_ms = {0: (2, 4), 1: (5, 4), 2: (2, 4), 3: (4.8, 4)}
        verdict = judge_stages(measure(tmp_path, stage_ms, blocks(2, 2, 2, 2)))
        assert (verdict.stages, verdict.ranks) == ((1, 3), (1, 3))
        assert (verdict.cause, verdict.others_ns) == (StageCause.SLOW, pytest.approx(6e6, rel=0.01))

    def test_longer_for_fewer_layers_is_slow(self, tmp_path):
        verdict = judge_stages(measure(tmp_path, {0: (4, 8), 1: (3, 6)}, blocks(1, 3)))
        assert verdict.cause is StageCause.SLOW

    def test_a_little_more_layers_do_not_explain_a_slow_stage(self, tmp_path):
        stage_ms = {0: (4, 8), 1: (15, 30), 2: (4, 8)}
        verdict = judge_stages(measure(tmp_path, stage_ms, blocks(4, 5, 4)))
        assert verdict.cause is StageCause.SLOW

    def test_a_head_costs_in_both_directions(self, tmp_path):
        layers = blocks(2, 2, 2)
        layers[2]["head"] = 1
        verdict = judge_stages(measure(tmp_path, {0: (2, 4), 1: (2, 4), 2: (3, 6)}, layers))
        assert (verdict.cause, verdict.extras) == (StageCause.EXTRAS, ("head",))

    def test_what_costs_in_forward_only_is_no_head(self, tmp_path):
        layers = blocks(2, 2, 2)
        layers[2]["head"] = 1
        verdict = judge_stages(measure(tmp_path, {0: (2, 4), 1: (2, 4), 2: (5, 4)}, layers))
        assert verdict.cause is StageCause.SLOW

    def test_without_layers_the_cause_is_open(self, tmp_path):
        verdict = judge_stages(measure(tmp_path, {0: (2, 4), 1: (4, 8)}))
        assert (verdict.position, verdict.cause) == (1, StageCause.UNKNOWN)
