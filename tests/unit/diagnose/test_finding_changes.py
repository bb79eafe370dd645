from diagnosed import make_finding

from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Estimate
from meshscope.diagnose.finding_changes import list_finding_changes


def found(code, severity, saved_ns=10.0, ranks=(1,)):
    gain = Estimate(saved_ns=saved_ns, step_ns=100.0, basis="made up")
    return make_finding(code, gain=gain, severity=severity, ranks=ranks)


def test_what_is_new_and_what_is_gone_is_told_with_its_price():
    a = [found("ST001", Severity.HIGH)]
    b = [found("IN001", Severity.MEDIUM, 5.0), found("CO001", Severity.LOW)]
    new, gone = list_finding_changes(a, b, step_ns=100.0)
    assert (new.code, new.severity_a, new.severity_b, new.saved_b_ns) == (
        "IN001", None, "medium", 5.0,
    )  # fmt: skip
    assert (gone.code, gone.severity_a, gone.severity_b, gone.saved_a_ns) == (
        "ST001", "high", None, 10.0,
    )  # fmt: skip


def test_the_same_cause_is_told_where_its_price_differs():
    a = [found("ST001", Severity.HIGH, 10.0), found("IN001", Severity.HIGH, 10.0)]
    b = [found("ST001", Severity.HIGH, 10.5), found("IN001", Severity.HIGH, 12.0)]
    (change,) = list_finding_changes(a, b, step_ns=100.0)
    assert (change.code, change.saved_a_ns, change.saved_b_ns) == ("IN001", 10.0, 12.0)


def test_the_same_rule_on_other_ranks_is_another_cause():
    a, b = [found("ST001", Severity.HIGH)], [found("ST001", Severity.HIGH, ranks=(2,))]
    assert [one.ranks for one in list_finding_changes(a, b, step_ns=100.0)] == [(2,), (1,)]
