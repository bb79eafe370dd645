"""The ledger of lost time as readers see it."""

from dataclasses import dataclass

from meshscope.simulate.ledger.ledger import Entry, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntryFacts:
    """One loss."""

    name: str
    """`rank 5, forward: slower than peers`."""
    kind: str
    """`slower than peers`; empty for all small ones together."""
    ranks: tuple[int, ...]
    """Empty for all."""
    place: str
    """A phase, `between steps`, `outside of phases`, or an axis; empty for all."""
    share_ns: float
    """Per step: its share of what is lost."""
    alone_ns: float
    """Per step: what removing it alone would save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """The way from the measured step to the best one; shares sum to the difference."""

    measured_ns: float
    """Per step, by the clock."""
    best_ns: float
    """Per step, replayed without any loss."""
    error_ns: float
    """Of the replay against the clock, per step."""
    entries: tuple[LedgerEntryFacts, ...]


def describe_ledger(ledger: Ledger) -> LedgerFacts:
    return LedgerFacts(
        measured_ns=ledger.measured_ns,
        best_ns=ledger.best_ns,
        error_ns=ledger.error_ns,
        entries=tuple(_describe_entry(entry) for entry in ledger.entries),
    )


def _describe_entry(entry: Entry) -> LedgerEntryFacts:
    loss = entry.loss
    place = "" if loss is None else loss.axis if loss.place is None else loss.place.name
    return LedgerEntryFacts(
        name=entry.name,
        kind="" if loss is None else str(loss.kind),
        ranks=() if loss is None else loss.ranks,
        place=place,
        share_ns=entry.share_ns,
        alone_ns=entry.alone_ns,
    )
