"""The ledger: from the measured step to the best one, loss by loss."""

from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.run.ledger import LedgerFacts
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Section, Table, make_column

MIN_RATIO = 0.001
"""Of the step: entries below are combined."""


def show_ledger(report: Report, detail: Detail) -> Section | None:
    """None without a diagnosis."""
    ledger = report.ledger
    if ledger is None:
        return None
    if isinstance(ledger, Unavailable):
        line = Line(f"n/a: {form.clean_text(ledger.reason)}")
        return Section(key="ledger", title="Lost time", parts=(line,))
    note = "per step; best: every rank at its peers' usual, data ready, nothing between steps"
    return Section(key="ledger", title="Lost time", note=note, parts=(_make_table(ledger),))


def _make_table(ledger: LedgerFacts) -> Table:
    least_ns = MIN_RATIO * ledger.measured_ns
    rows = [("measured", ledger.measured_ns, 1.0, "")]
    small_ns = 0.0
    for entry in ledger.entries:
        if not entry.kind or abs(entry.share_ns) < least_ns:
            small_ns += entry.share_ns
            continue
        share = entry.share_ns / ledger.measured_ns if ledger.measured_ns else 0.0
        rows.append(
            (form.clean_text(entry.name), entry.share_ns, share, form.duration(entry.alone_ns))
        )
    small = small_ns / ledger.measured_ns if ledger.measured_ns else 0.0
    rows.append(("smaller losses", small_ns, small, ""))
    best = ledger.best_ns / ledger.measured_ns if ledger.measured_ns else 0.0
    rows.append((f"best step, ± {form.duration(ledger.error_ns)}", ledger.best_ns, best, ""))
    return Table(
        (
            make_column("", rows, lambda row: row[0], 3, is_right=False),
            make_column("time", rows, lambda row: form.duration(row[1]), 2),
            make_column("share", rows, lambda row: form.ratio(row[2]), 2),
            make_column("alone saves", rows, lambda row: row[3], 2),
        )
    )
