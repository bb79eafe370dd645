"""Other stages, schedules and microbatches: predicted gains are those of runs really changed."""

from dataclasses import replace

import numpy as np
import pytest

from meshscope.analyze.pipeline.pipeline import analyze_pipeline
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.pipeline.pipeline_edits import (
    LayerMove,
    advise_moves,
    level_factors,
    price_level_position,
    price_move,
    price_no_communication,
)
from meshscope.simulate.pipeline.pipeline_replay import build_pipeline_replay, edit_stages
from meshscope.simulate.pipeline.schedule_edits import price_schedule, rank_schedules
from meshscope.simulate.what_if import build_replay
from meshscope.store.read.run import open_run
from pipeline_builders import (
    GAP_NS,
    TAIL_NS,
    Recipe,
    make_pipeline_run,
    stage_cost,
)

LAG_NS = 300_000


def load(path, recipe):
    attempt = open_run(make_pipeline_run(path, recipe)).last_attempt
    timeline = build_timeline(attempt, warmup_steps=0)
    assert not isinstance(timeline, Unavailable)
    analysis = analyze_pipeline(timeline, attempt)
    assert not isinstance(analysis, Unavailable)
    replay = build_pipeline_replay(
        timeline, analysis.times, analysis.work, analysis.bubble.action_gaps
    )
    assert not isinstance(replay, Unavailable)
    return timeline, replay


def recipe_of(stage_ms, *, layers=None, name="1f1b", m=8, num_chains=1):
    parts = {stage: {"Block": count} for stage, count in enumerate(layers or ())}
    return Recipe(
        schedule=build_schedule(name, len(stage_ms), m),
        cost=stage_cost(dict(enumerate(stage_ms))),
        communication_ns=LAG_NS,
        num_chains=num_chains,
        parts=parts,
    )


def makespan_ns(recipe):
    schedule = recipe.schedule
    costs = {
        (a.kind, a.stage, a.microbatch): recipe.cost(0, 0, a)
        for row in schedule.actions
        for a in row
    }
    return replay_schedule(
        schedule, ActionCosts(by_stage={}, by_microbatch=costs, communication_ns=LAG_NS)
    ).makespan_ns


def test_a_step_is_the_pipeline_and_what_surrounds_it(tmp_path):
    recipe = recipe_of([(2, 4)] * 3)
    _, replay = load(tmp_path / "run", recipe)
    assert replay.step_ns == pytest.approx(makespan_ns(recipe) + TAIL_NS + GAP_NS, rel=0.02)
    assert replay.fidelity.error_ratio < 1e-9
    assert replay.fidelity.measured_ns == pytest.approx(makespan_ns(recipe))


class TestMoves:
    def test_moving_layers_wins_what_the_moved_run_takes_less(self, tmp_path):
        uneven = recipe_of([(6, 12), (2, 4), (2, 4), (2, 4)], layers=(3, 1, 1, 1))
        after = recipe_of([(4, 8), (4, 8), (2, 4), (2, 4)])
        _, replay = load(tmp_path / "run", uneven)
        gain = price_move(replay, LayerMove(count=1, source=0, target=1))
        assert not isinstance(gain, Unavailable)
        assert gain.saved_ns == pytest.approx(makespan_ns(uneven) - makespan_ns(after), rel=1e-3)

    def test_the_best_moves_are_found(self, tmp_path):
        uneven = recipe_of([(10, 20), (2, 4), (2, 4), (2, 4)], layers=(5, 1, 1, 1))
        even = recipe_of([(4, 8)] * 4)
        _, replay = load(tmp_path / "run", uneven)
        advice = advise_moves(replay)
        assert not isinstance(advice, Unavailable)
        assert advice.num_layers == (2, 2, 2, 2)
        assert [str(move) for move in advice.moves] == [
            "1 layer from stage 0 to stage 1",
            "1 layer from stage 0 to stage 2",
            "1 layer from stage 0 to stage 3",
        ]
        assert not isinstance(advice.gain, Unavailable)
        expected = makespan_ns(uneven) - makespan_ns(even)
        assert advice.gain.saved_ns == pytest.approx(expected, rel=1e-3)

    def test_advice_does_not_stop_where_no_single_move_helps(self, tmp_path):
        # Moves one by one go to the first stage, a little faster, until two are the fullest.
        stages = [(2, 4), (2.05, 4.1), (2.05, 4.1), (10, 20)]
        _, replay = load(tmp_path / "run", recipe_of(stages, layers=(1, 1, 1, 5)))
        advice = advise_moves(replay)
        assert not isinstance(advice, Unavailable)
        assert advice.num_layers == (2, 2, 2, 2)

    def test_a_slow_stage_is_relieved_at_its_own_pace(self, tmp_path):
        # Stage 1 takes twice as long per layer, and would for another one.
        slow = recipe_of([(4, 8), (8, 16), (4, 8)], layers=(4, 4, 4))
        after = recipe_of([(5, 10), (6, 12), (4, 8)])
        _, replay = load(tmp_path / "run", slow)
        gain = price_move(replay, LayerMove(count=1, source=1, target=0))
        assert not isinstance(gain, Unavailable)
        assert gain.saved_ns == pytest.approx(makespan_ns(slow) - makespan_ns(after), rel=1e-3)

    def test_even_stages_have_nothing_to_move(self, tmp_path):
        _, replay = load(tmp_path / "run", recipe_of([(2, 4)] * 4, layers=(2, 2, 2, 2)))
        assert isinstance(advise_moves(replay), Unavailable)

    def test_without_layers_there_is_no_advice(self, tmp_path):
        _, replay = load(tmp_path / "run", recipe_of([(4, 8), (2, 4)]))
        assert isinstance(advise_moves(replay), Unavailable)
        move = LayerMove(count=1, source=0, target=1)
        assert isinstance(price_move(replay, move), Unavailable)

    @pytest.mark.parametrize("move", [(5, 0, 1), (1, 0, 7), (1, -1, 1)])
    def test_impossible_moves_are_refused(self, tmp_path, move):
        _, replay = load(tmp_path / "run", recipe_of([(4, 8), (2, 4)], layers=(2, 1)))
        count, source, target = move
        refused = price_move(replay, LayerMove(count=count, source=source, target=target))
        assert isinstance(refused, Unavailable)


class TestStages:
    def test_a_stage_as_fast_as_the_others_wins_what_it_costs(self, tmp_path):
        slow = recipe_of([(2, 4), (2, 4), (6, 4), (2, 4)], layers=(2, 2, 2, 2), num_chains=2)
        healthy = recipe_of([(2, 4)] * 4)
        _, replay = load(tmp_path / "run", slow)
        gain = price_level_position(replay, 2)
        assert not isinstance(gain, Unavailable)
        expected = makespan_ns(slow) - makespan_ns(healthy)
        assert gain.saved_ns == pytest.approx(expected, rel=1e-3)

    def test_the_replay_of_the_whole_run_says_the_same(self, tmp_path):
        slow = recipe_of([(2, 4), (6, 4), (2, 4)], layers=(1, 1, 1))
        timeline, replay = load(tmp_path / "run", slow)
        factors = level_factors(replay.work, (1,))
        assert not isinstance(factors, Unavailable)
        edit = edit_stages(timeline, replay.times, factors, "level")
        assert edit.work_ns is not None
        changed = edit.work_ns != timeline.pieces.duration_ns
        assert set(timeline.pieces.rank[changed].tolist()) == {1}
        assert timeline.pieces.duration_ns[changed].sum() == 6 * 8 * 6_000_000
        assert edit.work_ns[changed].sum() == 6 * 8 * 2_000_000
        whole = build_replay(timeline)
        assert not isinstance(whole, Unavailable)
        (gain,) = whole.price([edit])
        own = price_level_position(replay, 1)
        assert not isinstance(gain, Unavailable)
        assert not isinstance(own, Unavailable)
        # Not the same to the nanosecond: here nothing that was recorded ties ranks at a step's end.
        assert own.saved_ns == pytest.approx(gain.saved_ns, rel=0.1)

    def test_instant_transfers_win_their_time_on_the_way(self, tmp_path):
        recipe = recipe_of([(2, 4)] * 3, name="gpipe")
        _, replay = load(tmp_path / "run", recipe)
        gain = price_no_communication(replay)
        assert not isinstance(gain, Unavailable)
        assert gain.saved_ns == pytest.approx(4 * LAG_NS, rel=1e-3)


class TestSchedules:
    @pytest.mark.parametrize("name", ["gpipe", "1f1b"])
    @pytest.mark.parametrize("factor", [2, 4])
    def test_more_and_smaller_microbatches_win_what_they_take_less(self, tmp_path, name, factor):
        few = recipe_of([(8, 16)] * 4, name=name, m=2)
        more = recipe_of([(8 / factor, 16 / factor)] * 4, name=name, m=2 * factor)
        _, replay = load(tmp_path / "run", few)
        priced = price_schedule(replay, num_microbatches=2 * factor)
        assert not isinstance(priced, Unavailable)
        assert not isinstance(priced.gain, Unavailable)
        expected = makespan_ns(few) - makespan_ns(more)
        assert priced.gain.saved_ns == pytest.approx(expected, rel=1e-3)

    def test_more_microbatches_of_the_same_size_win_per_sample(self, tmp_path):
        few, more = recipe_of([(2, 4)] * 4, m=2), recipe_of([(2, 4)] * 4, m=8)
        _, replay = load(tmp_path / "run", few)
        priced = price_schedule(replay, num_microbatches=8, keeps_microbatch_size=True)
        assert not isinstance(priced, Unavailable)
        assert not isinstance(priced.gain, Unavailable)
        rest_ns = replay.step_ns - makespan_ns(few)
        expected = replay.step_ns - (makespan_ns(more) + rest_ns) / 4
        assert priced.gain.saved_ns == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
    def test_zero_bubble_from_a_recording_of_1f1b(self, tmp_path, name):
        recorded, other = recipe_of([(2, 4)] * 4), recipe_of([(2, 2, 2)] * 4, name=name)
        _, replay = load(tmp_path / "run", recorded)
        priced = price_schedule(replay, name=name)
        assert not isinstance(priced, Unavailable)
        assert not isinstance(priced.gain, Unavailable)
        expected = makespan_ns(recorded) - makespan_ns(other)
        assert priced.gain.saved_ns == pytest.approx(expected, rel=1e-3)

    def test_1f1b_from_a_recording_of_zero_bubble(self, tmp_path):
        recorded, other = recipe_of([(2, 2, 2)] * 4, name="zb_h1"), recipe_of([(2, 4)] * 4)
        _, replay = load(tmp_path / "run", recorded)
        priced = price_schedule(replay, name="1f1b")
        assert not isinstance(priced, Unavailable)
        assert not isinstance(priced.gain, Unavailable)
        expected = makespan_ns(recorded) - makespan_ns(other)
        assert priced.gain.saved_ns == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("name", BUILDERS)
    def test_the_recorded_schedule_wins_nothing(self, tmp_path, name):
        schedule = build_schedule(name, 2, 4)
        noise = np.random.default_rng(3)
        recipe = Recipe(
            schedule=schedule,
            cost=lambda step, chain, action: round(1e6 * noise.lognormal(0, 0.1)),
            communication_ns=LAG_NS,
        )
        _, replay = load(tmp_path / "run", recipe)
        priced = price_schedule(replay)
        assert not isinstance(priced, Unavailable)
        assert not isinstance(priced.gain, Unavailable)
        assert priced.name == name
        assert abs(priced.gain.saved_ratio) < 0.02

    def test_schedules_are_ranked_by_what_they_win(self, tmp_path):
        _, replay = load(tmp_path / "run", recipe_of([(2, 4)] * 4, m=4))
        ranked = rank_schedules(replay)
        assert {one.name for one in ranked} == set(BUILDERS)
        assert ranked[0].name.startswith("zb_")

    def test_what_cannot_be_built_is_refused(self, tmp_path):
        _, replay = load(tmp_path / "run", recipe_of([(2, 4)] * 4))
        assert isinstance(price_schedule(replay, name="nonsense"), Unavailable)
        assert isinstance(price_schedule(replay, num_microbatches=0), Unavailable)


def test_a_replay_that_misses_the_clock_answers_nothing(tmp_path):
    _, replay = load(tmp_path / "run", recipe_of([(2, 4)] * 3, layers=(1, 1, 1)))
    action_gaps = replay.action_gaps
    wrong = replace(
        replay, action_gaps=replace(action_gaps, replayed_ns=action_gaps.replayed_ns * 1.06)
    )
    refused = price_level_position(wrong, 1)
    assert isinstance(refused, Unavailable)
    assert "6.0%" in refused.reason
