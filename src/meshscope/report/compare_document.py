"""A comparison of two runs as one JSON document: what is missing is an object with its reason.

Times are nanoseconds, ratios are over A. `verdict` is null unless a limit was given.
"""

import json
import math
from dataclasses import asdict, dataclass

from meshscope.analyze.compare.compare import Comparison, Metric, Verdict
from meshscope.analyze.compare.compare_budget import BudgetChange, LineChange
from meshscope.analyze.compare.compare_loss import LossComparison
from meshscope.analyze.compare.compare_provenance import Difference
from meshscope.core.unavailable import Unavailable
from meshscope.report.values import as_text

DOCUMENT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison, and what it was asked for."""

    a: str
    """What the user called the runs."""
    b: str
    comparison: Comparison
    limit_ratio: float | None
    """`--fail-on` as a ratio; None when no limit was given."""
    verdict: Verdict | None
    fails_on_loss: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the command is to end with exit code 7."""
        return self.verdict is Verdict.SLOWER or self.is_loss_failure

    @property
    def is_loss_failure(self) -> bool:
        """Whether losses were to agree and do not, or could not be compared."""
        loss = self.comparison.loss
        if not self.fails_on_loss:
            return False
        return isinstance(loss, Unavailable) or loss.divergence is not None


def encode_comparison(compared: Compared) -> str:
    """The document's text, with a newline at its end."""
    comparison = compared.comparison
    document = {
        "version": DOCUMENT_VERSION,
        "a": as_text(compared.a),
        "b": as_text(compared.b),
        "num_steps": list(comparison.num_steps),
        "num_warmup": list(comparison.num_warmup),
        "limit_ratio": compared.limit_ratio,
        "verdict": None if compared.verdict is None else compared.verdict.value,
        "has_failed": compared.has_failed,
        "metrics": [_metric_document(metric) for metric in comparison.metrics],
        "budget": _budget_document(comparison.budget),
        "loss": _loss_document(comparison.loss),
        "provenance": _provenance_document(comparison.provenance),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _missing(value: Unavailable) -> dict[str, object]:
    return {"unavailable": as_text(value.reason)}


def _number(value: float | Unavailable) -> object:
    if isinstance(value, Unavailable):
        return _missing(value)
    return value if math.isfinite(value) else {"unavailable": f"not a finite number ({value})"}


def _metric_document(metric: Metric) -> dict[str, object]:
    shift, interval = metric.shift, metric.interval_ratio
    return {
        "name": metric.name,
        "unit": metric.unit,
        "a": _number(metric.a),
        "b": _number(metric.b),
        "change_ratio": _number(metric.change_ratio),
        "interval_ratio": _missing(interval)
        if isinstance(interval, Unavailable)
        else [_number(end) for end in interval],
        "shift": _missing(shift) if isinstance(shift, Unavailable) else asdict(shift),
        "is_lower_better": metric.is_lower_better,
    }


def _budget_document(budget: BudgetChange | Unavailable) -> dict[str, object]:
    if isinstance(budget, Unavailable):
        return _missing(budget)
    return {
        "period": _line_document(budget.period),
        "lines": [_line_document(line) for line in budget.lines],
    }


def _line_document(line: LineChange) -> dict[str, object]:
    return {**asdict(line), "name": as_text(line.name), "change_ns": line.change_ns}


def _loss_document(loss: LossComparison | Unavailable) -> dict[str, object]:
    if isinstance(loss, Unavailable):
        return _missing(loss)
    found = loss.divergence
    return {
        "name": loss.name,
        "tolerance": asdict(loss.tolerance),
        "num_values": loss.num_values,
        "num_ranks": loss.num_ranks,
        "first_step": loss.first_step,
        "last_step": loss.last_step,
        "num_beyond": loss.num_beyond,
        "largest_difference": _number(loss.largest_difference),
        "first_divergence": None
        if found is None
        else {
            "step": found.step,
            "rank": found.rank,
            "a": _number(found.a),
            "b": _number(found.b),
        },
    }


def _provenance_document(differences: tuple[Difference, ...] | Unavailable) -> object:
    if isinstance(differences, Unavailable):
        return _missing(differences)
    return [
        {
            "subject": difference.subject.value,
            "name": as_text(difference.name),
            "a": None if difference.a is None else as_text(difference.a),
            "b": None if difference.b is None else as_text(difference.b),
        }
        for difference in differences
    ]
