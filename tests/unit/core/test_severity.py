import math

import pytest

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity, grade, parse_severity


@pytest.mark.parametrize(
    ("ratio", "severity"),
    [
        (-0.5, Severity.LOW),
        (0.0, Severity.LOW),
        (0.0299, Severity.LOW),
        (0.03, Severity.MEDIUM),
        (0.0999, Severity.MEDIUM),
        (0.10, Severity.HIGH),
        (0.2999, Severity.HIGH),
        (0.30, Severity.CRITICAL),
        (5.0, Severity.CRITICAL),
        (math.nan, Severity.LOW),
    ],
)
def test_a_share_of_the_step_is_graded(ratio, severity):
    assert grade(ratio) is severity


def test_what_is_not_priced_is_low_or_graded_by_what_it_takes_but_never_critical():
    refused = Unavailable("no replay")
    assert grade(refused) is Severity.LOW
    assert grade(refused, otherwise=refused) is Severity.LOW
    assert grade(refused, otherwise=0.05) is Severity.MEDIUM
    assert grade(refused, otherwise=0.9) is Severity.HIGH
    assert grade(0.01, otherwise=0.9) is Severity.LOW, "a price goes before a bound"


def test_severities_compare_and_have_words():
    assert Severity.LOW < Severity.MEDIUM < Severity.HIGH < Severity.CRITICAL
    assert [parse_severity(severity.word) for severity in Severity] == list(Severity)
    with pytest.raises(ValueError, match="'bad' is no severity; there are low, medium"):
        parse_severity("bad")
