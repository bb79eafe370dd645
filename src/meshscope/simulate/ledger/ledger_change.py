"""What two ledgers differ in: which loss came, went or grew, and what all ranks need in each phase.

Losses are compared by what they are about: kind, place and ranks. A loss that one side does not
list is below 0.5 % of its step there, and counts as nothing. The changes of all losses and of the
best step sum to the change of the replayed step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.simulate.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One number of both ledgers, per step."""

    name: str
    a_ns: float
    b_ns: float

    @property
    def change_ns(self) -> float:
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerChange:
    losses: tuple[LedgerLine, ...]
    """The largest change first."""
    best: LedgerLine
    """The best step; `losses` and it sum to `step`."""
    step: LedgerLine
    """As replayed."""
    phases: tuple[LedgerLine, ...]
    """What training needs in each phase without losses, mean of a rank; largest change first."""


def compare_ledgers(a: Ledger, b: Ledger) -> LedgerChange:
    shares = [{entry.name: entry.share_ns for entry in ledger.entries} for ledger in (a, b)]
    return LedgerChange(
        losses=_list_lines(*shares),
        best=LedgerLine(name="best step", a_ns=a.best_ns, b_ns=b.best_ns),
        step=LedgerLine(name="step", a_ns=a.replayed_ns, b_ns=b.replayed_ns),
        phases=_list_lines(a.needed_ns, b.needed_ns),
    )


def _list_lines(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[LedgerLine, ...]:
    lines = [
        LedgerLine(name=name, a_ns=a.get(name, 0.0), b_ns=b.get(name, 0.0))
        for name in dict.fromkeys((*b, *a))
    ]
    return tuple(sorted(lines, key=lambda line: -abs(line.change_ns)))
