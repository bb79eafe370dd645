"""The measured bubble, its parts, and the published numbers of Zero Bubble."""

from dataclasses import fields

import numpy as np
import pytest

from meshscope.analyze.pipeline.bubble import find_closed_form
from meshscope.analyze.pipeline.executed_schedule import recognise_schedule
from meshscope.analyze.pipeline.pipeline import PipelineAnalysis, analyze_pipeline
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.schedule import ActionKind
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run
from pipeline_builders import Recipe, make_pipeline_run, stage_cost

# METHODS §5: p, m, T_F, T_B, T_W, T_comm in us (Table 9), rates of 1F1B, ZB-H1, ZB-H2 (Table 5).
ZERO_BUBBLE = [
    (8, 24, 18522, 18086, 9337, 601, {"1f1b": 0.2431, "zb_h1": 0.1585, "zb_h2": 0.1083}),
    (8, 24, 29718, 29444, 19927, 527, {"1f1b": 0.2347, "zb_h1": 0.1323, "zb_h2": 0.0698}),
    (16, 48, 11347, 11248, 8132, 377, {"1f1b": 0.2552, "zb_h1": 0.1397, "zb_h2": 0.0672}),
    (32, 96, 10419, 10207, 7715, 408, {"1f1b": 0.2646, "zb_h1": 0.1421, "zb_h2": 0.0641}),
]


def analyze(path, recipe) -> PipelineAnalysis:
    attempt = open_run(make_pipeline_run(path, recipe)).last_attempt
    timeline = build_timeline(attempt, warmup_steps=0)
    assert not isinstance(timeline, Unavailable)
    analysis = analyze_pipeline(timeline, attempt)
    assert not isinstance(analysis, Unavailable), analysis
    return analysis


def uniform(num_stages, *times):
    return stage_cost(dict.fromkeys(range(num_stages), times))


class TestPublishedRates:
    @pytest.mark.parametrize("row", ZERO_BUBBLE, ids=["1.5B", "6.2B", "14.6B", "28.3B"])
    @pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
    def test_recorded_actions_have_the_papers_bubble(self, tmp_path, row, name):
        p, m, forward, inputs, weights, lag_us, rates = row
        whole = name == "1f1b"
        times = (forward, inputs + weights) if whole else (forward, inputs, weights)
        recipe = Recipe(
            schedule=build_schedule(name, p, m),
            cost=uniform(p, *(time / 1e3 for time in times)),
            communication_ns=lag_us * 1000,
            num_steps=1,
        )
        bubble = analyze(tmp_path / "run", recipe).bubble
        assert bubble.executed.name == name
        if whole:
            assert round(bubble.bubble_ratio, 4) == rates[name]
        assert bubble.bubble_ratio == pytest.approx(rates[name], abs=0.01)
        assert bubble.executed_ratio == pytest.approx(bubble.bubble_ratio, abs=1e-6)


class TestParts:
    def test_equal_stages_and_instant_transfers_leave_the_inherent_part_only(self, tmp_path):
        recipe = Recipe(schedule=build_schedule("1f1b", 4, 8), cost=uniform(4, 2, 4))
        bubble = analyze(tmp_path / "run", recipe).bubble
        assert bubble.bubble_ratio == pytest.approx(3 / 11)
        assert bubble.balanced_ratio == pytest.approx(3 / 11)
        assert bubble.closed_form_ratio == pytest.approx(3 / 11)
        assert bubble.utilisation_ratio == pytest.approx(8 / 11)
        assert bubble.rank_bubble_ratio == pytest.approx([3 / 11] * 4)
        assert bubble.parts.inherent_ns == pytest.approx(18e6)
        others = [getattr(bubble.parts, f.name) for f in fields(bubble.parts)][1:]
        assert others == pytest.approx([0] * 5, abs=1)

    def test_a_longer_stage_is_imbalance(self, tmp_path):
        cost = stage_cost({0: (2, 4), 1: (2, 4), 2: (4, 8), 3: (2, 4)})
        bubble = analyze(
            tmp_path / "run", Recipe(schedule=build_schedule("1f1b", 4, 8), cost=cost)
        ).bubble
        # 8 microbatches of 12 ms on stage 2, two forwards there, two backwards from there, and
        # once 2 ms: stage 3 takes 6 ms for the first microbatch, stage 2 4 ms for the second.
        assert bubble.cost_ns == pytest.approx(8 * 12e6 + 2 * 2e6 + 2 * 4e6 + 2e6)
        assert bubble.busy_ns == pytest.approx(8 * 7.5e6)
        assert bubble.parts.inherent_ns == pytest.approx(3 * 7.5e6)
        assert bubble.parts.imbalance_ns == pytest.approx(50e6 - 3 * 7.5e6)
        assert bubble.parts.total_ns == pytest.approx(bubble.cost_ns - bubble.busy_ns)

    def test_transfers_are_communication(self, tmp_path):
        recipe = Recipe(
            schedule=build_schedule("gpipe", 3, 4), cost=uniform(3, 2, 4), communication_ns=500_000
        )
        parts = analyze(tmp_path / "run", recipe).bubble.parts
        # Two there and two back.
        assert parts.communication_ns == pytest.approx(4 * 0.5e6)
        assert parts.imbalance_ns == pytest.approx(0, abs=1)
        assert parts.stragglers_ns == pytest.approx(0, abs=1)

    def test_one_slow_microbatch_in_few_steps_is_a_straggler(self, tmp_path):
        def cost(step, chain, action):
            is_pause = step == 3 and str(action) == "1F2"
            return (2e6 if action.kind is ActionKind.FORWARD else 4e6) + 30e6 * is_pause

        bubble = analyze(
            tmp_path / "run",
            Recipe(schedule=build_schedule("1f1b", 3, 6), cost=cost, num_steps=10),
        ).bubble
        assert bubble.parts.imbalance_ns == pytest.approx(0, abs=1)
        # 30 ms in one of ten steps, of which its own rank (a third) is busy.
        assert bubble.parts.stragglers_ns == pytest.approx(3e6 * 2 / 3, rel=0.05)

    def test_a_slow_rank_of_one_pipeline_is_a_straggler_not_imbalance(self, tmp_path):
        def cost(step, chain, action):
            own = 2e6 if action.kind is ActionKind.FORWARD else 4e6
            return own * (1.5 if chain == 1 and action.stage == 1 else 1)

        bubble = analyze(
            tmp_path / "run",
            Recipe(schedule=build_schedule("1f1b", 2, 8), cost=cost, num_chains=3),
        ).bubble
        assert bubble.num_pipelines == 3
        assert bubble.parts.imbalance_ns == pytest.approx(0, abs=1)
        assert bubble.parts.stragglers_ns > 1e6

    @pytest.mark.parametrize("name", BUILDERS)
    def test_parts_sum_to_the_measured_bubble_under_noise(self, tmp_path, name):
        noise = np.random.default_rng(5)
        schedule = build_schedule(name, 3, 6)
        recipe = Recipe(
            schedule=schedule,
            cost=lambda step, chain, action: round(2e6 * noise.lognormal(0, 0.2)),
            communication_ns=100_000,
            num_chains=2,
        )
        bubble = analyze(tmp_path / "run", recipe).bubble
        assert bubble.executed.name == name
        assert bubble.parts.total_ns == pytest.approx(bubble.cost_ns - bubble.busy_ns, abs=10)
        assert abs(bubble.parts.unexplained_ns) < 0.02 * bubble.cost_ns


class TestClosedForm:
    @pytest.mark.parametrize(
        ("name", "m", "expected"),
        [
            ("gpipe", 8, 3 / 11),
            ("1f1b", 8, 3 / 11),
            ("interleaved_1f1b", 8, 3 / 19),
            ("zb_h1", 8, 1 / 9),
            ("zb_h2", 8, 0.0),
        ],
    )
    def test_is_the_replay_at_equal_stages(self, tmp_path, name, m, expected):
        schedule = build_schedule(name, 4, m)
        recipe = Recipe(schedule=schedule, cost=uniform(schedule.num_stages, 1, 1, 1), num_steps=2)
        if name in ("gpipe", "1f1b", "interleaved_1f1b"):
            recipe = Recipe(schedule=schedule, cost=uniform(schedule.num_stages, 1, 2), num_steps=2)
        bubble = analyze(tmp_path / "run", recipe).bubble
        assert bubble.closed_form_ratio == pytest.approx(expected)
        assert bubble.balanced_ratio == pytest.approx(expected, abs=1e-9)
        assert bubble.closed_form

    def test_is_refused_where_it_does_not_hold(self):
        stage_ns = {(kind, s): 1.0 for kind in "FIW" for s in range(4)}
        executed = recognise_schedule(build_schedule("zb_h1", 4, 2))
        found = find_closed_form(executed, {(ActionKind(k), s): 1.0 for k, s in stage_ns})
        assert isinstance(found, Unavailable)
        assert "from 4 microbatches on" in found.reason
