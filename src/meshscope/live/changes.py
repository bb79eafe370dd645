"""What is new, gone or different between two reports of one run."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from meshscope.diagnose.finding import Finding
from meshscope.page.evidence import name_findings


class ChangeKind(StrEnum):
    """How a finding differs from the report before."""

    NEW = "new"
    GONE = "gone"
    CHANGED = "changed"
    """Its severity or its title is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFinding:
    """What is remembered of a finding from one report to the next."""

    id: str
    """In its own report: the same cause may be `ST003.2` in the next."""
    code: str
    severity: str
    title: str
    ranks: tuple[int, ...]

    @property
    def cause(self) -> tuple[str, tuple[int, ...]]:
        """By this it is found again."""
        return self.code, self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingChange:
    """One finding that is not as it was."""

    kind: ChangeKind
    found: SeenFinding
    """As it is now; as it was where it is gone."""


def note_findings(findings: tuple[Finding, ...]) -> tuple[SeenFinding, ...]:
    return tuple(
        SeenFinding(
            id=name,
            code=one.code,
            severity=one.severity.word,
            title=one.title,
            ranks=tuple(one.ranks),
        )
        for name, one in zip(name_findings(findings), findings, strict=True)
    )


def compare_findings(
    before: Iterable[SeenFinding], after: Iterable[SeenFinding]
) -> tuple[FindingChange, ...]:
    """Those of `after` that are new or different, in order, then those that are gone. Two findings
    are one if rule and ranks are; several of one rule and ranks are told apart by their order."""
    old, new = _number(before), _number(after)
    changes = []
    for key, one in new.items():
        was = old.get(key)
        if was is None:
            changes.append(FindingChange(kind=ChangeKind.NEW, found=one))
        elif (was.severity, was.title) != (one.severity, one.title):
            changes.append(FindingChange(kind=ChangeKind.CHANGED, found=one))
    gone = (one for key, one in old.items() if key not in new)
    return (*changes, *(FindingChange(kind=ChangeKind.GONE, found=one) for one in gone))


def _number(
    findings: Iterable[SeenFinding],
) -> dict[tuple[str, tuple[int, ...], int], SeenFinding]:
    numbered: dict[tuple[str, tuple[int, ...], int], SeenFinding] = {}
    for one in findings:
        number = 0
        while (*one.cause, number) in numbered:
            number += 1
        numbered[*one.cause, number] = one
    return numbered
