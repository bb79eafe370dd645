"""Each pipeline rule: the fault it is about, what it must be silent on, and what just misses it."""

import numpy as np
import pytest
from diagnosed import context_of, find

from meshscope.core.schedule_builders import build_schedule
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import ConfidenceLevel
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from pipeline_builders import Recipe, make_pipeline_run, stage_cost

CODES = ("PP001", "PP002", "PP003", "PP004")
MS = 1_000_000


def noisy(stage_ms, seed=1, ratio=0.03):
    """Stage times with 3 % of noise."""
    noise = np.random.default_rng(seed)
    exact = stage_cost(dict(enumerate(stage_ms)))
    return lambda step, chain, action: round(exact(step, chain, action) * noise.lognormal(0, ratio))


def write(path, stage_ms, *, layers=None, extras=None, m=16, name="1f1b", cost=None, **options):
    parts = {stage: {"Block": count} for stage, count in enumerate(layers or ())}
    for stage, extra in (extras or {}).items():
        parts[stage] = {**parts[stage], extra: 1}
    recipe = Recipe(
        schedule=build_schedule(name, len(stage_ms), m),
        cost=cost or noisy(stage_ms),
        parts=parts,
        num_steps=6,
        **{"communication_ns": 100_000, **options},
    )
    return make_pipeline_run(path / "run", recipe)


def loud(path):
    """Codes of findings above LOW, symptoms taken off, of all pipeline rules."""
    rules = {code: RULES[code] for code in CODES}
    diagnosis = diagnose(context_of(path), rules=rules)
    return [finding.code for finding in diagnosis.findings if finding.severity > Severity.LOW]


def saved_ns(faulty, clean):
    """What a step takes less where the fault is really gone."""
    return context_of(faulty).study.step_ns - context_of(clean).study.step_ns


EVEN = [(2, 4)] * 4


class TestHealthy:
    @pytest.mark.parametrize("records_actions", [True, False])
    def test_an_even_pipeline_with_many_microbatches_is_silent(self, tmp_path, records_actions):
        path = write(tmp_path, EVEN, layers=(2, 2, 2, 2), records_actions=records_actions)
        assert loud(path) == []

    def test_without_known_layers_it_is_silent_too(self, tmp_path):
        assert loud(write(tmp_path, EVEN)) == []

    @pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zb_h1", "zb_v"])
    def test_other_schedules_are_silent(self, tmp_path, name):
        schedule = build_schedule(name, 4, 16)
        times = [(2, 2, 2) if name.startswith("zb") else (2, 4)] * schedule.num_stages
        recipe = Recipe(schedule=schedule, cost=noisy(times), communication_ns=100_000)
        assert loud(make_pipeline_run(tmp_path / "run", recipe)) == []

    @pytest.mark.parametrize("seed", range(4))
    def test_jitter_of_a_busy_machine_is_no_slow_stage(self, tmp_path, seed):
        noise = np.random.default_rng(seed)
        exact = stage_cost(dict.fromkeys(range(4), (2, 4)))

        def cost(step, chain, action):
            return round(exact(step, chain, action) * (1 + noise.exponential(0.8)))

        path = write(tmp_path, EVEN, layers=(2, 2, 2, 2), cost=cost)
        assert loud(path) == []

    def test_a_small_head_is_no_finding(self, tmp_path):
        path = write(tmp_path, [*EVEN[:3], (2.15, 4.3)], layers=(2, 2, 2, 2), extras={3: "head"})
        assert loud(path) == []

    def test_a_run_without_a_pipeline_says_nothing(self, tmp_path):
        path = write(tmp_path, [(2, 4)])
        assert [finding for code in CODES for finding in find(code, path)] == []


class TestTooFewMicrobatches:
    def test_is_found_and_priced(self, tmp_path):
        path = write(tmp_path, [(8, 16)] * 4, layers=(2, 2, 2, 2), m=2)
        assert loud(path) == ["PP001"]
        (found,) = find("PP001", path)
        assert found.severity is Severity.CRITICAL
        assert found.title == "2 microbatches for 4 stages"
        assert "6 microbatches instead of 2" in found.change
        more = write(tmp_path / "more", [(8 / 3, 16 / 3)] * 4, m=6)
        assert found.gain.saved_ns == pytest.approx(saved_ns(path, more), rel=0.05)
        assert any(evidence.name.startswith("saved with zb_") for evidence in found.evidence)

    def test_is_found_from_phases_too(self, tmp_path):
        path = write(tmp_path, [(8, 16)] * 4, m=2, records_actions=False)
        assert loud(path) == ["PP001"]

    def test_enough_are_low_at_most(self, tmp_path):
        path = write(tmp_path, EVEN, m=6)
        (found,) = find("PP001", path)
        assert found.severity is Severity.LOW
        (found,) = find("PP001", path, pipeline_min_microbatches_per_stage=2)
        assert found.severity > Severity.LOW

    def test_a_schedule_without_a_bubble_has_enough(self, tmp_path):
        path = write(tmp_path, [(2, 2, 2)] * 4, name="zb_h2", m=7)
        assert find("PP001", path, pipeline_min_microbatches_per_stage=4) == []


class TestUnevenStages:
    def test_is_found_with_the_moves(self, tmp_path):
        path = write(tmp_path, [(8, 16), (2, 4), (2, 4), (4, 8)], layers=(4, 1, 1, 2))
        assert loud(path) == ["PP002"]
        (found,) = find("PP002", path)
        assert found.ranks == (0,)
        assert found.title == "stage 0 holds more layers than the others"
        assert found.change == (
            "Move 1 layer from stage 0 to stage 1, 1 layer from stage 0 to stage 2."
        )
        even = write(tmp_path / "even", [(4, 8)] * 4)
        assert found.gain.saved_ns == pytest.approx(saved_ns(path, even), rel=0.05)
        assert found.edit is not None

    def test_a_heavy_head_is_relieved_by_a_move(self, tmp_path):
        path = write(tmp_path, [(8, 16)] * 3 + [(16, 32)], layers=(8, 8, 8, 8), extras={3: "head"})
        assert loud(path) == ["PP002"]
        (found,) = find("PP002", path)
        assert found.ranks == (3,)
        assert "from stage 3 to stage" in found.change

    def test_unknown_layers_name_the_stage_and_say_so(self, tmp_path):
        path = write(tmp_path, [(2, 4), (2, 4), (4, 8), (2, 4)], num_chains=2)
        assert loud(path) == ["PP002"]
        (found,) = find("PP002", path)
        assert found.ranks == (2, 6)
        assert found.title == "stage 2 takes longer than the others"
        assert "not recorded" in found.summary
        assert found.confidence.level is ConfidenceLevel.MEDIUM

    def test_a_few_percent_are_no_finding(self, tmp_path):
        path = write(tmp_path, [(2, 4), (2.12, 4.24), (2, 4)], layers=(2, 2, 2))
        assert loud(path) == []

    def test_more_layers_that_nobody_can_take_are_no_finding(self, tmp_path):
        # Three layers on two stages: one of them has two.
        path = write(tmp_path, [(4, 8), (2, 4)], layers=(2, 1))
        assert find("PP002", path) == []


class TestSlowStage:
    def test_is_found_with_all_its_ranks_and_priced(self, tmp_path):
        path = write(tmp_path, [(2, 4), (6, 4), (2, 4), (2, 4)], layers=(2, 2, 2, 2), num_chains=2)
        assert loud(path) == ["PP003"]
        (found,) = find("PP003", path)
        assert found.ranks == (1, 5)
        assert found.title == "stage 1 is slow in forward"
        healthy = write(tmp_path / "healthy", EVEN, num_chains=2)
        assert found.gain.saved_ns == pytest.approx(saved_ns(path, healthy), rel=0.05)
        assert found.edit is not None

    def test_is_found_from_phases_and_counted_layers(self, tmp_path):
        path = write(tmp_path, [(2, 4), (2, 8), (2, 4)], layers=(1, 1, 1), records_actions=False)
        assert loud(path) == ["PP003"]
        assert find("PP003", path)[0].title == "stage 1 is slow in backward"

    def test_one_slow_rank_of_a_stage_is_left_to_the_stragglers(self, tmp_path):
        exact = noisy(EVEN)

        def cost(step, chain, action):
            is_slow = chain == 0 and action.stage == 1
            return exact(step, chain, action) + (4 * MS if is_slow else 0)

        path = write(tmp_path, EVEN, layers=(2, 2, 2, 2), num_chains=2, cost=cost)
        assert loud(path) == []

    def test_more_layers_are_not_slow(self, tmp_path):
        path = write(tmp_path, [(6, 12), (2, 4), (2, 4)], layers=(3, 1, 1))
        assert find("PP003", path) == []


class TestSlowHandovers:
    def test_are_found_and_priced(self, tmp_path):
        path = write(tmp_path, EVEN, layers=(2, 2, 2, 2), communication_ns=4 * MS)
        assert loud(path) == ["PP004"]
        (found,) = find("PP004", path)
        fast = write(tmp_path / "fast", EVEN, communication_ns=0)
        assert found.gain.saved_ns == pytest.approx(saved_ns(path, fast), rel=0.05)

    def test_short_ones_are_not(self, tmp_path):
        path = write(tmp_path, EVEN, layers=(2, 2, 2, 2), communication_ns=300_000)
        assert find("PP004", path) == []
