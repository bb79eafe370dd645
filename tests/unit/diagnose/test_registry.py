import pytest

from meshscope.diagnose.counterparts import COUNTERPARTS
from meshscope.diagnose.registry import RULES, list_thresholds
from meshscope.diagnose.rule import CODE_PATTERN, SUBJECTS, Rule, describe, split_page

PYTSCOPE_RULES = {
    "TIMING.DATALOADER_BOUND",
    "TIMING.BACKWARD_HEAVY",
    "TIMING.OPTIMIZER_HEAVY",
    "TIMING.JITTER",
    "MEMORY.FRAGMENTATION",
    "MEMORY.GROWTH",
    "CONVERGENCE.DIVERGED",
    "CONVERGENCE.NO_PROGRESS",
    "CROSS.CORRELATED_INSTABILITY",
    "DIST.STRAGGLER",
    "DIST.LOAD_IMBALANCE",
    "DIST.COMM_BOUND",
    "DIST.EXPOSED_COMM",
    "DIST.PIPELINE_BUBBLE",
    "EFFICIENCY.LOW_MFU",
    "EFFICIENCY.RECOVERABLE",
}
TORSH_RULES = {"Communication", "Memory", "Pipeline", "TensorParallel"}


@pytest.mark.parametrize("code", sorted(RULES))
def test_every_rule_is_whole(code):
    rule = RULES[code]
    assert issubclass(rule, Rule)
    assert rule.code == code
    assert CODE_PATTERN.fullmatch(code)
    assert rule.name == rule.name.lower().replace(" ", "-").replace("_", "-")
    assert rule.severities[0] <= rule.severities[1]
    assert describe(rule).endswith(".")
    assert len(describe(rule)) <= 100
    assert list(split_page(rule))


def test_names_are_unique_and_codes_are_in_order():
    names = [rule.name for rule in RULES.values()]
    assert len(set(names)) == len(names)
    by_subject = {letters: [c for c in RULES if c.startswith(letters)] for letters in SUBJECTS}
    assert all(codes == sorted(codes) for codes in by_subject.values())


def test_one_name_of_a_threshold_is_one_limit():
    known = {threshold.name: threshold for threshold in list_thresholds()}
    for rule in RULES.values():
        for threshold in rule.thresholds:
            assert known[threshold.name] is threshold
            assert threshold.default >= threshold.minimum


def test_every_rule_of_the_founding_monitors_has_its_counterpart():
    found = {
        tool: [c.rule for c in COUNTERPARTS if c.tool == tool] for tool in ("pytscope", "torsh")
    }
    assert set(found["pytscope"]) == PYTSCOPE_RULES
    assert set(found["torsh"]) == TORSH_RULES
    assert len(COUNTERPARTS) == 20
    for counterpart in COUNTERPARTS:
        assert counterpart.difference
        for code in counterpart.codes:
            assert code in RULES, f"{counterpart.rule} names {code}"
