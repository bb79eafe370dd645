"""A report in the few numbers of a line in the list of runs."""

from collections.abc import Callable

from meshscope.core.unavailable import Missing, Unavailable, need
from meshscope.report.run.report import Report
from meshscope.serve.documents import RunSummary, WorstFinding


def summarize(report: Report) -> RunSummary:
    diagnosis, study = report.diagnosis, report.study
    first = None if diagnosis is None or not diagnosis.findings else diagnosis.findings[0]
    return RunSummary(
        step_ns=study.step_ns,
        tokens_per_s=_take(lambda: need(study.tokens).tokens_per_s),
        mfu_ratio=_take(lambda: need(need(study.budget).mfu).ratio),
        loss=_take(lambda: need(need(study.convergence).loss).last.value),
        worst=None
        if first is None
        else WorstFinding(severity=first.severity.word, code=first.code, title=first.title),
        is_complete=study.health.is_complete,
    )


def _take(read: Callable[[], float]) -> float | Unavailable:
    try:
        return float(read())
    except Missing as missing:
        return missing.value
