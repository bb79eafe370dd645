"""Settles findings against the ledger of lost time: one cause, one finding, one price.

A finding owns an entry of the ledger if its edit removes most of the work that the entry's does.
An entry that a rule with a name owns needs no finding of its own. What is saved by removing one of
two faults that hide each other is no measure of either: there the finding's price is its share of
what all entries save together, and it says so.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity, grade
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import ConfidenceLevel, Estimate, Finding
from meshscope.diagnose.rules.lost_time import UnnamedLoss
from meshscope.diagnose.wording import duration
from meshscope.simulate.ledger.ledger import CAUSES, Entry, Ledger
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit

UNNAMED_CODE = UnnamedLoss.code
_PLACELESS_CODES = frozenset({"ST004"})
"""Of ranks with more work, in no place and without a cause: the ledger's finding about the same
ranks says where."""
_MIN_OVERLAP_RATIO = 0.5
"""Of an entry's removed work that a finding's edit must remove to own it."""
_MIN_SHARED_RATIO = 0.01
"""Of the step: by which a share must differ from what removing the loss alone saves."""


def settle_findings(findings: Sequence[Finding], context: Context) -> list[Finding]:
    """Prices of faults that hide each other; without unnamed losses that a finding names."""
    ledger, timeline = known(context.ledger), known(context.study.timeline)
    if ledger is None or timeline is None:
        return list(findings)
    unnamed = [one for one in findings if one.code == UNNAMED_CODE]
    placed = {one.ranks for one in unnamed if one.ranks}
    named = [
        one
        for one in findings
        if one.code != UNNAMED_CODE and not (one.code in _PLACELESS_CODES and one.ranks in placed)
    ]
    causes = [one for one in ledger.entries if one.loss is not None and one.loss.kind in CAUSES]
    owners = {
        id(entry): [i for i, one in enumerate(named) if _owns(timeline, one.edit, entry.edit)]
        for entry in causes
    }
    priced = []
    for index, one in enumerate(named):
        entries = [entry for entry in causes if index in owners[id(entry)]]
        beside = _find_beside(entries, [entry for entry in causes if not owners[id(entry)]])
        if one.severity > Severity.LOW:
            for entry in beside:
                owners[id(entry)].append(index)
        one = _share_price(one, entries, ledger)
        priced.append(_add_beside(one, beside, ledger) if one.severity > Severity.LOW else one)
    free = [entry for entry in causes if not owners[id(entry)]]
    left = [one for one in unnamed if any(_owns(timeline, one.edit, entry.edit) for entry in free)]
    return [*priced, *left]


def _find_beside(entries: Sequence[Entry], free: Sequence[Entry]) -> list[Entry]:
    """What the same ranks do between steps beside what a finding names there: part of one thing,
    as an evaluation that has its phase only around the model's calls."""
    ranks = {one.loss.ranks for one in entries if _is_between(one) and one.loss is not None}
    return [
        one
        for one in free
        if _is_between(one) and one.loss is not None and one.loss.ranks and one.loss.ranks in ranks
    ]


def _is_between(entry: Entry) -> bool:
    place = None if entry.loss is None else entry.loss.place
    return place is not None and place.is_between


def _add_beside(finding: Finding, beside: Sequence[Entry], ledger: Ledger) -> Finding:
    share_ns = sum(entry.share_ns for entry in beside)
    if not beside or share_ns < _MIN_SHARED_RATIO * ledger.replayed_ns:
        return finding
    gain = Estimate(
        saved_ns=finding.saved_ns + share_ns,
        step_ns=ledger.replayed_ns,
        basis="with what the same ranks do beside it between steps",
    )
    places = [(one, one.loss.place) for one in beside if one.loss is not None]
    parts = [
        f"{duration(one.share_ns)} in {place.phase or 'no phase'}"
        for one, place in places
        if place is not None
    ]
    text = f" Beside it between steps: {', '.join(parts)}."
    severity = _grade_like(finding, gain)
    return replace(finding, gain=gain, severity=severity, summary=finding.summary + text)


def _grade_like(finding: Finding, gain: Estimate) -> Severity:
    """The severity of another price, lowered as the finding's own is for its doubts."""
    own = finding.gain
    lowered = 0 if isinstance(own, Unavailable) else grade(own.saved_ratio) - finding.severity
    return Severity(max(Severity.LOW, grade(gain.saved_ratio) - max(0, lowered)))


def _owns(timeline: Timeline, edit: Edit | None, entry: Edit) -> bool:
    if edit is None:
        return False
    total = common = 0.0
    pairs = [(measured_work(timeline), edit.work_ns, entry.work_ns)]
    if timeline.communication is not None:
        measured = timeline.communication.row_times.transfer_ns
        pairs.append((measured, edit.transfer_ns, entry.transfer_ns))
    for measured, left, least in pairs:
        if least is not None:
            wanted = np.maximum(measured - least, 0)
            total += float(wanted.sum())
            removed = 0 if left is None else np.maximum(measured - left, 0)
            common += float(np.minimum(wanted, removed).sum())
    return total > 0 and common >= _MIN_OVERLAP_RATIO * total


def _share_price(finding: Finding, entries: Sequence[Entry], ledger: Ledger) -> Finding:
    """The share of the entries a finding owns, where that is not what removing them alone saves.

    A finding may remove parts of other entries, too: what another loss hides is no less than what a
    replay of the finding's own edit saves.
    """
    share_ns = sum(entry.share_ns for entry in entries)
    alone_ns = sum(entry.alone_ns for entry in entries)
    least_ns = _MIN_SHARED_RATIO * ledger.replayed_ns
    is_unsure = finding.confidence.level is ConfidenceLevel.LOW
    if abs(share_ns - alone_ns) < least_ns or share_ns <= 0 or is_unsure:
        return finding
    if share_ns > alone_ns and finding.saved_ns >= share_ns:
        return finding
    gain = Estimate(
        saved_ns=share_ns,
        step_ns=ledger.replayed_ns,
        basis="its share of a replay without any loss",
        alone_ns=max(0.0, alone_ns) if alone_ns < share_ns / 2 else None,
    )
    hidden = "Another loss hides it" if share_ns > alone_ns else "Another loss is in the same time"
    text = (
        f" {hidden}: fixing it alone saves {duration(max(0.0, alone_ns))}, its share of fixing all "
        f"is {duration(share_ns)}."
    )
    severity = _grade_like(finding, gain)
    return replace(finding, gain=gain, severity=severity, summary=finding.summary + text)
