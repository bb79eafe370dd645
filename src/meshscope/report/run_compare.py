"""Two runs, compared as `meshscope compare` does."""

from meshscope.analyze.compare.compare import compare_studies, judge
from meshscope.analyze.compare.compare_loss import Tolerance
from meshscope.analyze.study import Study
from meshscope.core.unavailable import known, need, or_unavailable
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding_changes import FindingChange, list_finding_changes
from meshscope.report.run_study import RunStudy
from meshscope.report.sections.compare import Compared
from meshscope.simulate.ledger.ledger_change import LedgerChange, compare_ledgers


def compare_runs(
    a: RunStudy,
    b: RunStudy,
    *,
    names: tuple[str, str],
    tolerance: Tolerance | None = None,
    limit_ratio: float | None = None,
    fails_on_loss: bool = False,
) -> Compared:
    """What changed from A to B; a verdict on a slowdown only where a limit is given."""
    comparison = compare_studies(a.study, b.study, tolerance=tolerance or Tolerance())
    return Compared(
        a=names[0],
        b=names[1],
        comparison=comparison,
        limit_ratio=limit_ratio,
        verdict=None if limit_ratio is None else judge(comparison.period, limit_ratio),
        ledger=_compare_ledgers(a.study, b.study),
        findings=_compare_findings(a, b),
        fails_on_loss=fails_on_loss,
    )


@or_unavailable
def _compare_ledgers(a: Study, b: Study) -> LedgerChange:
    return compare_ledgers(need(Context(a).ledger), need(Context(b).ledger))


def _compare_findings(a: RunStudy, b: RunStudy) -> tuple[FindingChange, ...]:
    steps_ns = (known(one.diagnosis.step_ns) or 0.0 for one in (a, b))
    return list_finding_changes(a.diagnosis.findings, b.diagnosis.findings, max(steps_ns))
