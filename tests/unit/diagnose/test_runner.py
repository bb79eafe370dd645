import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import context_of, make_finding, make_rule, scale_work

from builders import Faults, make_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Estimate, StepLoss
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose
from meshscope.simulate.what_if import Gain

SLOW_RANK = 2


@pytest.fixture
def context(tmp_path):
    faults = Faults(slow={SLOW_RANK: 1.5})
    return context_of(make_run(tmp_path, layout=Layout(dp=4), num_steps=16, faults=faults))


def saving(saved_ns):
    return Estimate(saved_ns=saved_ns, step_ns=100e6, basis="made up")


def rules_of(*findings, patterns=(), **resources):
    """One rule per code of the findings."""
    codes = {finding.code for finding in findings}
    return {
        code: make_rule(
            code,
            lambda context, code=code: [f for f in findings if f.code == code],
            is_pattern=code in patterns,
            resources=resources.get(code, ()),
        )
        for code in codes
    }


def priced(context, code, title, scale):
    """A finding whose gain is the replay's of its edit."""
    edit = scale_work(context, title, scale)
    (gain,) = context.price([edit])
    return make_finding(code, title=title, gain=gain, edit=edit, severity=severity_of(gain))


def test_a_rule_that_raises_becomes_a_finding_and_the_others_stand(context):
    def fail(context):
        yield make_finding("ST001")
        raise ZeroDivisionError("made up")

    rules = {
        "HE001": RULES["HE001"],
        "ST001": make_rule("ST001", fail),
        "TI001": make_rule("TI001", lambda context: [make_finding("TI001")]),
    }
    found = diagnose(context, rules=rules).findings
    assert [(one.code, one.severity) for one in found] == [
        ("TI001", Severity.HIGH),
        ("HE001", Severity.MEDIUM),
    ]
    assert found[1].title == "rule ST001 failed"
    assert "ZeroDivisionError: made up (test_runner.py:" in found[1].summary


def test_an_analysis_that_raises_is_told_once_for_all_rules_that_ask_for_it(context):
    def broken(context):
        raise RuntimeError("made up")

    def ask(context):
        assert isinstance(context.study.get(broken), Unavailable)
        return []

    rules = {code: make_rule(code, ask) for code in ("ST001", "ST002")}
    found = diagnose(context, rules={"HE001": RULES["HE001"], **rules}).findings
    assert [one.title for one in found] == ["broken failed"]


def test_findings_are_ordered_by_severity_then_gain_whatever_the_order_of_rules(context):
    findings = (
        make_finding("ST001", severity=Severity.MEDIUM, gain=saving(9e6)),
        make_finding("CV001", severity=Severity.CRITICAL),
        make_finding("IM001", severity=Severity.MEDIUM, gain=saving(5e6)),
        make_finding("ME001", severity=Severity.LOW, gain=saving(50e6)),
        make_finding("IM001", severity=Severity.MEDIUM, gain=saving(5e6), ranks=(1,)),
    )
    rules = rules_of(*findings)
    found = diagnose(context, rules=rules).findings
    assert [one.code for one in found] == ["CV001", "ST001", "IM001", "IM001", "ME001"]
    backwards = dict(reversed(rules.items()))
    assert diagnose(context, rules=backwards).findings == found


def every_fourth(context, extra_ns):
    steps = context.study.timeline.steps
    return StepLoss(step=steps, lost_ns=np.where(steps % 4 == 0, float(extra_ns), 0.0))


def test_a_pattern_of_steps_is_explained_by_what_is_lost_in_them(context):
    """Work of one rank in every fourth step, and that every fourth step is long."""
    every = context.study.timeline.steps % 4 == 0
    cause = priced(
        context,
        "ST005",
        "rank 2 is slow in some steps",
        lambda p: np.where((p.rank == SLOW_RANK) & every[p.step], 2 / 3, 1),
    )
    lost_ns = 4 * cause.saved_ns
    pattern = make_finding(
        "TI002", gain=saving(cause.saved_ns), lost_steps=every_fourth(context, lost_ns)
    )
    found = diagnose(context, rules=rules_of(cause, pattern, patterns=["TI002"])).findings
    assert found == (
        cause,
        replace(pattern, severity=Severity.LOW, explained_by="ST005 rank 2 is slow in some steps"),
    )
    twice = replace(pattern, lost_steps=every_fourth(context, 3 * lost_ns))
    found = diagnose(context, rules=rules_of(cause, twice, patterns=["TI002"])).findings
    assert [one.explained_by for one in found] == [None, None], "a third of it"


def test_what_is_lost_in_all_steps_does_not_explain_slow_ones(context):
    steady = priced(context, "ST001", "slow", lambda p: np.where(p.rank == SLOW_RANK, 2 / 3, 1))
    lost = every_fourth(context, steady.saved_ns)
    pattern = make_finding("TI002", gain=saving(20e6), lost_steps=lost)
    found = diagnose(context, rules=rules_of(steady, pattern, patterns=["TI002"])).findings
    assert all(one.explained_by is None for one in found)


def test_a_pattern_is_explained_by_a_cause_of_half_of_it(context):
    part = priced(
        context,
        "ST001",
        "part",
        lambda p: np.where((p.rank == SLOW_RANK) & (p.phase == 3), 2 / 3, 1),
    )
    whole = priced(context, "ST004", "whole", lambda p: np.where(p.rank == SLOW_RANK, 2 / 3, 1))
    found = diagnose(context, rules=rules_of(whole, part, patterns=["ST004"])).findings
    assert [(one.code, one.explained_by) for one in found] == [
        ("ST001", None),
        ("ST004", "ST001 part"),
    ]


def test_what_runs_out_on_the_same_ranks_has_one_cause(context):
    leak = make_finding("ME001", title="memory grows", ranks=(1,))
    full = make_finding("ME002", ranks=(1, 2))
    others = make_finding("ME002", ranks=(3,))
    rules = rules_of(leak, full, others, patterns=["ME002"], ME001=["memory"], ME002=["memory"])
    found = {one.ranks: one.explained_by for one in diagnose(context, rules=rules).findings}
    assert found == {(1,): None, (1, 2): "ME001 memory grows", (3,): None}


def test_of_two_causes_of_one_loss_the_one_that_removes_less_is_it(context):
    """The slow rank, and a whole half of the job with it."""
    half = priced(context, "PP003", "half", lambda p: np.where(p.rank >= SLOW_RANK, 2 / 3, 1))
    rank = priced(context, "ST001", "rank", lambda p: np.where(p.rank == SLOW_RANK, 2 / 3, 1))
    found = diagnose(context, rules=rules_of(half, rank)).findings
    assert [(one.code, one.explained_by) for one in found] == [
        ("ST001", None),
        ("PP003", "ST001 rank"),
    ]


def test_findings_about_the_same_waits_are_one_cause_by_replay(context):
    """All work of the slow rank made normal, and only its backward: the second adds nothing."""
    whole = priced(context, "ST001", "whole", lambda p: np.where(p.rank == SLOW_RANK, 2 / 3, 1))
    part = priced(
        context,
        "IM001",
        "part",
        lambda p: np.where((p.rank == SLOW_RANK) & (p.phase == 3), 2 / 3, 1),
    )
    assert 0 < part.saved_ns < whole.saved_ns
    found = diagnose(context, rules=rules_of(whole, part)).findings
    assert found[0] == whole
    assert (found[1].severity, found[1].explained_by) == (Severity.LOW, "ST001 whole")


def test_findings_about_different_waits_stay(context):
    forward = priced(
        context,
        "ST001",
        "forward",
        lambda p: np.where((p.rank == SLOW_RANK) & (p.phase == 2), 2 / 3, 1),
    )
    backward = priced(
        context,
        "IM001",
        "backward",
        lambda p: np.where((p.rank == SLOW_RANK) & (p.phase == 3), 2 / 3, 1),
    )
    found = diagnose(context, rules=rules_of(forward, backward)).findings
    assert [one.explained_by for one in found] == [None, None]
    assert [one.code for one in found] == ["IM001", "ST001"]


def test_a_diagnosis_says_what_it_rests_on(context):
    diagnosis = diagnose(context, rules={})
    assert diagnosis.worst is None
    assert (diagnosis.scale.num_steps, diagnosis.scale.num_ranks) == (16, 4)
    assert diagnosis.fidelity.error_ratio == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"num_steps": 0},
        {"num_steps": 1},
        {"num_steps": 3, "world_size": 2, "phases": ()},
        {"num_steps": 4, "world_size": 3, "faults": Faults(missing=frozenset({1}))},
        {"num_steps": 12, "world_size": 2, "faults": Faults(killed={0: 0, 1: 3})},
        {"num_steps": 12, "world_size": 2, "faults": Faults(damaged={0: "spans", 1: "steps"})},
        {"num_steps": 30, "device_ratio": 0.5, "memory": (1 << 30, 1, 2, 3, 4)},
    ],
)
def test_no_rule_fails_on_a_run_that_is_odd(tmp_path, options):
    found = diagnose(context_of(make_run(tmp_path, **options))).findings
    assert [one.summary for one in found if one.code == "HE001"] == []


def test_a_healthy_run_has_nothing_above_low(tmp_path):
    run = make_run(tmp_path, layout=Layout(dp=2, tp=2), num_steps=40, first_step_extra_ns=10**9)
    assert [one.label for one in diagnose(context_of(run)).findings if one.severity] == []


@pytest.mark.parametrize("layout", [None, Layout(dp=1 << 20), Layout(dp=1 << 17, tp=8)])
def test_a_million_missing_ranks_cost_nothing(tmp_path, layout):
    """A header can claim them; what it costs must depend on the ranks that are there."""
    header = {"world_size": 1 << 20, "layout": layout.to_dict() if layout else None}
    make_run(tmp_path, world_size=3, header=header, num_steps=30)
    diagnose(context_of(tmp_path))  # imports modules, which are not this run's cost
    context = context_of(tmp_path)
    tracemalloc.start()
    try:
        diagnosis = diagnose(context)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 << 20
    (missing,) = [one for one in diagnosis.findings if one.code == "HE002"]
    assert (missing.severity, len(missing.ranks)) == (Severity.MEDIUM, 1024)
    assert [one.summary for one in diagnosis.findings if one.code == "HE001"] == []


def test_a_saving_that_is_none_is_not_a_price(context):
    rules = rules_of(make_finding("ST004", severity=Severity.LOW, gain=saving(-26e6)))
    (found,) = diagnose(context, rules=rules).findings
    assert found.gain == Unavailable("without it a step would not be shorter")


def test_a_replay_that_misses_the_clock_supports_no_price(context):
    """A pipeline's own replay may agree with the clock where that of the run does not."""
    own = Gain(saved_ns=28e6, saved_ratio=0.4, step_ns=70e6, fidelity_ratio=0.01)
    replayed = make_finding("PP002", severity=Severity.CRITICAL, gain=own)
    estimated = make_finding("TI002", severity=Severity.CRITICAL, gain=saving(28e6))
    replay = context.replay
    context.replay = replace(replay, fidelity=replace(replay.fidelity, error_ratio=0.13))
    found = {
        one.code: one for one in diagnose(context, rules=rules_of(replayed, estimated)).findings
    }
    assert found["TI002"] == estimated
    assert (found["PP002"].severity, found["PP002"].saved_ns) == (Severity.HIGH, 0)
    assert "misses the measured step time by 13.0%" in found["PP002"].gain.reason


def test_a_rank_that_died_leads_whatever_the_steps_before_cost(context):
    dead = make_finding("HE002", severity=Severity.HIGH)
    input_bound = make_finding("IN002", severity=Severity.CRITICAL, gain=saving(80e6))
    found = diagnose(context, rules=rules_of(input_bound, dead)).findings
    assert [one.code for one in found] == ["HE002", "IN002"]
