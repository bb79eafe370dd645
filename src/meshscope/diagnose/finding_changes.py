"""Which findings of two runs differ: what is new, gone, or costs another amount.

Two findings are one if rule and ranks are. Those that are LOW in both runs are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding

_MIN_CHANGE_RATIO = 0.01
"""Of the step, by which prices must differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingChange:
    """One cause in two runs."""

    code: str
    title: str
    ranks: tuple[int, ...]
    severity_a: str | None
    """None: not found there."""
    severity_b: str | None
    saved_a_ns: float
    """Per step; 0 where it was not found or has no price."""
    saved_b_ns: float


def list_finding_changes(
    a: Iterable[Finding], b: Iterable[Finding], step_ns: float
) -> tuple[FindingChange, ...]:
    """The most important of B first, then what only A has."""
    old, new = _by_cause(a), _by_cause(b)
    found = []
    for key in dict.fromkeys((*new, *old)):
        was, now = old.get(key), new.get(key)
        shown = now or was
        known = [one for one in (was, now) if one is not None]
        if shown is None or max(one.severity for one in known) <= Severity.LOW:
            continue
        saved_a_ns, saved_b_ns = (one.saved_ns if one else 0.0 for one in (was, now))
        is_same = was is not None and now is not None and was.severity == now.severity
        if is_same and abs(saved_b_ns - saved_a_ns) < _MIN_CHANGE_RATIO * step_ns:
            continue
        found.append(
            FindingChange(
                code=shown.code,
                title=shown.title,
                ranks=shown.ranks,
                severity_a=was.severity.word if was else None,
                severity_b=now.severity.word if now else None,
                saved_a_ns=saved_a_ns,
                saved_b_ns=saved_b_ns,
            )
        )
    return tuple(found)


def _by_cause(findings: Iterable[Finding]) -> dict[tuple[str, tuple[int, ...]], Finding]:
    """Of several of one rule and ranks the first, the most urgent one."""
    found: dict[tuple[str, tuple[int, ...]], Finding] = {}
    for one in findings:
        found.setdefault((one.code, one.ranks), one)
    return found
