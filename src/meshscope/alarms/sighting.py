"""Something that is wrong now, before anybody is told."""

from dataclasses import dataclass

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.report import format as form

_NO_PRICE = Unavailable("what it costs is not time of a step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One cause, seen in one look."""

    code: str
    severity: Severity
    title: str
    summary: str
    ranks: tuple[int, ...] = ()
    change: str = ""
    saved_ns: float | Unavailable = _NO_PRICE
    step_ns: float | Unavailable = _NO_PRICE
    confidence: str = "counted, not estimated"
    is_certain: bool = False
    """It needs no second look."""

    @property
    def saved_ratio(self) -> float | Unavailable:
        saved, step = self.saved_ns, self.step_ns
        if isinstance(saved, Unavailable) or isinstance(step, Unavailable) or step <= 0:
            return saved if isinstance(saved, Unavailable) else _NO_PRICE
        return saved / step

    def is_same_cause(self, other: "Sighting") -> bool:
        """One rule of no specific rank; or rules of one subject (`ST`) that name one rank at least:
        a rank that became slow is slow, later."""
        if not (self.ranks and other.ranks):
            return self.code == other.code and not (self.ranks or other.ranks)
        is_one_subject = self.code[:2] == other.code[:2]
        return is_one_subject and bool(set(self.ranks) & set(other.ranks))


def note_finding(finding: Finding) -> Sighting:
    gain = finding.gain
    return Sighting(
        code=finding.code,
        severity=finding.severity,
        title=form.clean_text(finding.title, 200),
        summary=form.clean_text(finding.summary, 600),
        ranks=tuple(finding.ranks),
        change=form.clean_text(finding.change, 300),
        saved_ns=gain if isinstance(gain, Unavailable) else float(gain.saved_ns),
        step_ns=gain if isinstance(gain, Unavailable) else float(gain.step_ns),
        confidence=form.clean_text(finding.confidence.text, 200),
    )
