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
from meshscope.core.unavailable import known
from meshscope.core.verdict.severity import grade
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import ConfidenceLevel, Estimate, Finding
from meshscope.diagnose.rules.lost_time import UnnamedLoss
from meshscope.diagnose.wording import duration
from meshscope.simulate.ledger.ledger import CAUSES, Entry, Ledger
from meshscope.simulate.recorded_graph import measured_work
from meshscope.simulate.what_if import Edit

UNNAMED_CODE = UnnamedLoss.code
_MIN_OVERLAP_RATIO = 0.5
"""Of an entry's removed work that a finding's edit must remove to own it."""
_MIN_HIDDEN_RATIO = 0.01
"""Of the step: by which a share must exceed what the finding saves alone."""


def settle_findings(findings: Sequence[Finding], context: Context) -> list[Finding]:
    """Prices of faults that hide each other; without unnamed losses that a finding names."""
    ledger, timeline = known(context.ledger), known(context.study.timeline)
    if ledger is None or timeline is None:
        return list(findings)
    named = [one for one in findings if one.code != UNNAMED_CODE]
    owned: dict[int, list[Entry]] = {index: [] for index in range(len(named))}
    free: list[Entry] = []
    for entry in ledger.entries:
        if entry.loss is None or entry.loss.kind not in CAUSES:
            continue
        owners = [i for i, one in enumerate(named) if _owns(timeline, one.edit, entry.edit)]
        for index in owners:
            owned[index].append(entry)
        if not owners:
            free.append(entry)
    unnamed = [
        one
        for one in findings
        if one.code == UNNAMED_CODE and any(entry.edit is one.edit for entry in free)
    ]
    priced = [_share_price(one, owned[index], ledger) for index, one in enumerate(named)]
    return [*priced, *unnamed]


def _owns(timeline: Timeline, edit: Edit | None, entry: Edit) -> bool:
    if edit is None or edit.work_ns is None or entry.work_ns is None:
        return False
    work = measured_work(timeline)
    wanted = np.maximum(work - entry.work_ns, 0)
    removed = np.maximum(work - edit.work_ns, 0)
    total = float(wanted.sum())
    return total > 0 and float(np.minimum(wanted, removed).sum()) >= _MIN_OVERLAP_RATIO * total


def _share_price(finding: Finding, entries: Sequence[Entry], ledger: Ledger) -> Finding:
    hidden = [entry for entry in entries if entry.is_hidden]
    share_ns = sum(entry.share_ns for entry in hidden)
    least_ns = max(0.0, finding.saved_ns) + _MIN_HIDDEN_RATIO * ledger.replayed_ns
    is_unsure = finding.confidence.level is ConfidenceLevel.LOW
    if share_ns < least_ns or is_unsure:
        return finding
    gain = Estimate(
        saved_ns=share_ns,
        step_ns=ledger.replayed_ns,
        basis="its share of a replay without any loss",
    )
    text = (
        f" Another loss hides it: fixing it alone saves {duration(max(0.0, finding.saved_ns))}, "
        f"its share of fixing all is {duration(share_ns)}."
    )
    severity = max(finding.severity, grade(gain.saved_ratio))
    return replace(finding, gain=gain, severity=severity, summary=finding.summary + text)
