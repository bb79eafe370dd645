"""What the verdicts of the fault matrix come to: rates, prices, ledgers, and how sure is right."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.distributed.fault_verdict import ANY_CODE, Effect, Truth, Verdict

from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import ConfidenceLevel

Z_95 = 1.96


@dataclass(frozen=True, kw_only=True)
class LedgerSum:
    """A ledger against the clock."""

    lost_ns: float
    """The sum of its entries."""
    gap_ns: float
    """Between that and the measured step less the best one."""
    error_ns: float
    """That it states itself."""
    best_ns: float

    @property
    def is_closed(self) -> bool:
        return abs(self.gap_ns) <= self.error_ns + 1.0


def sum_ledger(context: Context) -> LedgerSum | Unavailable:
    ledger = context.ledger
    if isinstance(ledger, Unavailable):
        return ledger
    lost_ns = float(sum(entry.share_ns for entry in ledger.entries))
    return LedgerSum(
        lost_ns=lost_ns,
        gap_ns=ledger.measured_ns - ledger.best_ns - lost_ns,
        error_ns=ledger.error_ns,
        best_ns=ledger.best_ns,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One recording, judged."""

    name: str
    part: str
    is_twin: bool
    truths: tuple[Truth, ...]
    verdict: Verdict
    effect: Effect | None
    tolerance_ratio: float
    ledger: LedgerSum | Unavailable
    best_of_twin_ns: float | None
    """The best step by the ledger of the clean run."""
    queued_ratio: float | None = None
    """Of the time, in which its threads had no core."""
    num_rounds: int = 1
    """Recordings of it and its twin by which its cost is known."""

    @property
    def kind(self) -> str:
        kinds = dict.fromkeys(truth.kind for truth in self.truths)
        return " + ".join(kinds) if len(self.truths) < 2 else f"pair: {' + '.join(kinds)}"

    @property
    def is_healthy(self) -> bool:
        return not any(truth.codes for truth in self.truths)

    @property
    def is_price_right(self) -> bool:
        """Strictly within the tolerance; a fault that is not named has none."""
        error = self.verdict.gain_error_ratio
        return error is not None and abs(error) <= self.tolerance_ratio

    @property
    def is_right(self) -> bool:
        verdict = self.verdict
        is_priced = self.effect is None or self.is_price_right
        return verdict.is_culprit_named and not verdict.others and is_priced

    @property
    def is_best_alike(self) -> bool | None:
        """Whether the best step is that of the run without the fault; None where not known."""
        if isinstance(self.ledger, Unavailable) or not self.best_of_twin_ns:
            return None
        return abs(self.ledger.best_ns / self.best_of_twin_ns - 1.0) <= self.tolerance_ratio

    def to_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "name": self.name,
            "half": self.part,
            "kind": self.kind,
            "is_right": self.is_right,
            "is_culprit_named": self.verdict.is_culprit_named,
            "false_findings": list(self.verdict.others),
            "found": list(self.verdict.found),
        }
        if self.effect is not None:
            error = self.verdict.gain_error_ratio
            document |= {
                "saved_ms": round(self.effect.saved_ns / 1e6, 2),
                "standard_error_ms": round(self.effect.error_ns / 1e6, 2),
                "clean_step_ms": round(self.effect.clean_ns / 1e6, 2),
                "gain_error_ratio": None if error is None else round(error, 4),
                "tolerance_ratio": self.tolerance_ratio,
                "rounds": self.num_rounds,
            }
        if self.queued_ratio is not None:
            document["waited_for_cores_ratio"] = round(self.queued_ratio, 4)
        if isinstance(self.ledger, LedgerSum):
            document["ledger_gap_ms"] = round(self.ledger.gap_ns / 1e6, 3)
            document["ledger_error_ms"] = round(self.ledger.error_ns / 1e6, 3)
        return document


# --- rates ---------------------------------------------------------------------------------------


def find_wilson(good: int, count: int) -> tuple[float, float]:
    """The interval that holds the true rate in 95 of 100 cases."""
    if not count:
        return 0.0, 1.0
    rate, z = good / count, Z_95
    middle = rate + z * z / (2 * count)
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def count_rate(values: Iterable[bool]) -> dict[str, Any]:
    known = list(values)
    low, high = find_wilson(sum(known), len(known))
    return {
        "good": sum(known),
        "of": len(known),
        "percent": round(100 * sum(known) / len(known), 1) if known else None,
        "interval_percent": [round(100 * low, 1), round(100 * high, 1)],
    }


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    faults = [row for row in rows if not row.is_healthy]
    priced = [row for row in faults if row.effect is not None]
    quiet = [row for row in rows if row.is_healthy]
    errors = [
        abs(row.verdict.gain_error_ratio or 0.0)
        for row in priced
        if row.verdict.gain_error_ratio is not None
    ]
    ledgers = [row.ledger for row in rows if isinstance(row.ledger, LedgerSum)]
    alike = [row.is_best_alike for row in priced]
    return {
        "recordings": len(rows),
        "culprit_right": count_rate(row.verdict.is_culprit_named for row in faults),
        "price_within_tolerance": count_rate(row.is_price_right for row in priced),
        "price_within_tolerance_where_named": count_rate(
            row.is_price_right for row in priced if row.verdict.is_culprit_named
        ),
        "price_right_or_within_3_standard_errors": count_rate(
            row.verdict.is_gain_right for row in priced
        ),
        "median_price_error": round(statistics.median(errors), 4) if errors else None,
        "no_second_finding": count_rate(not row.verdict.others for row in faults),
        "healthy_silent": count_rate(not row.verdict.others for row in quiet),
        "twins_silent": count_rate(not row.verdict.others for row in quiet if row.is_twin),
        "ledger_sums_to_measured_less_best": count_rate(ledger.is_closed for ledger in ledgers),
        "ledger_not_available": len(rows) - len(ledgers),
        "best_step_is_the_twins": count_rate(one for one in alike if one is not None),
        "confidence": {
            level.value: count_rate(
                is_right
                for row in rows
                for sure, is_right in row.verdict.sure
                if sure == level.value
            )
            for level in ConfidenceLevel
        },
    }  # fmt: skip


# --- what was said wrongly -----------------------------------------------------------------------


def write_failures(rows: Sequence[Row], summary: dict[str, Any], missing: Sequence[str]) -> str:
    """A table for each class of fault, the most costly class first."""
    wrong: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.is_right:
            wrong[row.kind].append(row)
    lines = ["# What was said wrongly", "", *write_summary(summary, missing), ""]
    for kind, failures in sorted(wrong.items(), key=lambda item: -sum(map(find_lost, item[1]))):
        total = sum(1 for row in rows if row.kind == kind)
        lines += [f"## {kind}: {len(failures)} of {total} wrong", ""]
        lines += [
            "| case | lost by twin | what is wrong | said | should be |",
            "|---|---|---|---|---|",
        ]
        for row in sorted(failures, key=lambda row: -find_lost(row)):
            said = "; ".join(row.verdict.found) or "nothing"
            cells = (row.name, row.effect or "", write_problem(row), said, write_truths(row.truths))
            lines.append(f"| {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def write_summary(summary: dict[str, Any], missing: Sequence[str]) -> list[str]:
    rates = {
        name: value for name, value in summary.items() if isinstance(value, dict) and "of" in value
    }
    rates |= {f"sure: {level}": value for level, value in summary["confidence"].items()}
    return [
        *(f"- {name.replace('_', ' ')}: {write_rate(value)}" for name, value in rates.items()),
        f"- not recorded: {', '.join(missing) or 'none'}",
    ]


def find_lost(row: Row) -> float:
    """By which failures are sorted: the share of the step."""
    return 0.01 if row.effect is None else row.effect.saved_ns / row.effect.faulty_ns


def write_rate(rate: dict[str, Any]) -> str:
    low, high = rate["interval_percent"]
    return f"{rate['good']} of {rate['of']} ({rate['percent']} %, {low} to {high})"


def write_problem(row: Row) -> str:
    verdict = row.verdict
    parts = [
        *([] if verdict.is_culprit_named else ["not named"]),
        *([f"{len(verdict.others)} besides"] if verdict.others and not row.is_healthy else []),
    ]
    if row.effect is not None and verdict.is_culprit_named and not row.is_price_right:
        error = verdict.gain_error_ratio
        parts.append("no price" if error is None else f"price {error:+.0%}")
    return ", ".join(parts) or "not silent"


def write_truths(truths: Sequence[Truth]) -> str:
    parts = []
    for truth in truths:
        codes = (
            "any rule" if truth.codes == ANY_CODE else "/".join(truth.codes) or "nothing above low"
        )
        ranks = "" if truth.ranks is None else f" ranks {', '.join(map(str, truth.ranks))}"
        words = [*truth.words, *(f"'{word}'" for word in (*truth.says, *truth.advises))]
        step = "" if truth.first_step is None else f" first step {truth.first_step}"
        parts.append(f"{codes}{ranks}{step}{' saying ' if words else ''}{' or '.join(words)}")
    return " AND ".join(parts)
