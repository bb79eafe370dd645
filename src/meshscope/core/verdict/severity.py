"""How bad a finding is: four severities, and the grade that a share of the step time gets.

Severity follows from what a finding costs, so that two rules that see the same loss grade it alike.
A rule sets it itself only where time is not what is lost: a loss that is not a number, a dead rank,
memory about to run out.
"""

from enum import IntEnum

from meshscope.core.unavailable import Unavailable, known

_MEDIUM_FROM_RATIO = 0.03
"""Share of the step below which a loss is not worth acting on: steps of steady runs vary by it."""
_HIGH_FROM_RATIO = 0.10
_CRITICAL_FROM_RATIO = 0.30

_UNPRICED = Unavailable("not priced")


class Severity(IntEnum):
    """In rising order, so that severities compare."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        """The name on the command line and in documents."""
        return self.name.lower()


def parse_severity(word: str) -> Severity:
    """The severity of a word; ValueError for any other."""
    try:
        return Severity[word.upper()]
    except KeyError:
        known = ", ".join(severity.word for severity in Severity)
        raise ValueError(f"{word!r} is no severity; there are {known}") from None


def grade(
    gain_ratio: float | Unavailable, *, otherwise: float | Unavailable = _UNPRICED
) -> Severity:
    """Of a saving as share of the step: <3 % low, <10 % medium, <30 % high, else critical.

    `otherwise` is the share of the step that the cause takes by measurement, for where no gain can
    be had. It is an upper bound of the gain, so it is graded HIGH at most. Without either a finding
    is LOW: what cannot be priced must not raise an alarm.
    """
    gained, taken = known(gain_ratio), known(otherwise)
    if gained is not None:
        return _grade(gained)
    return Severity.LOW if taken is None else min(Severity.HIGH, _grade(taken))


def _grade(ratio: float) -> Severity:
    if not ratio >= _MEDIUM_FROM_RATIO:  # a NaN is low, too
        return Severity.LOW
    if ratio < _HIGH_FROM_RATIO:
        return Severity.MEDIUM
    return Severity.HIGH if ratio < _CRITICAL_FROM_RATIO else Severity.CRITICAL
