"""A comparison as Markdown, for a comment on a change or a job's summary.

Text from a run is shown without control characters, and every character that Markdown or HTML would
act on is escaped: names cannot end a table, make a link or load an image.
"""

import re
from collections.abc import Iterable, Sequence

from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.compare_document import Compared
from meshscope.report.compare_text import (
    MAX_DIFFERENCES,
    Row,
    list_budget_rows,
    list_metric_rows,
    show_fact,
    tell_loss,
    tell_test,
    tell_verdict,
)

_ACTIVE = re.compile(r"([\\`*_{}\[\]#!|~$@])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_HEADINGS = ("", "A", "B", "change from A to B", "95 % interval")


def render_markdown(compared: Compared) -> str:
    """The whole page; ends with a newline."""
    comparison = compared.comparison
    mark = "❌" if compared.has_failed else "✅"
    parts = [
        f"### {mark} {escape(tell_verdict(compared))}",
        f"A: {escape(compared.a)}  \nB: {escape(compared.b)}",
        _table(_HEADINGS, map(_cells, list_metric_rows(compared))),
        escape(tell_test(comparison.period)),
        "#### Where the difference is",
        _missing(comparison.budget)
        if isinstance(comparison.budget, Unavailable)
        else _table(_HEADINGS, map(_cells, list_budget_rows(comparison.budget))),
        "#### Loss",
        escape(tell_loss(comparison.loss)),
        "#### What is different about the runs",
        _list_differences(compared),
    ]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    shown = "".join(_ENTITIES.get(character, character) for character in form.clean_text(text))
    # After the entities: their own & and ; are not touched by this.
    return _ACTIVE.sub(r"\\\1", shown)


def _missing(value: Unavailable) -> str:
    return f"n/a: {escape(value.reason)}"


def _cells(row: Row) -> tuple[str, ...]:
    return (row.name, row.a, row.b, row.change, row.interval)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(map(escape, cells)) + " |" for cells in rows),
    ]
    return "\n".join(lines)


def _list_differences(compared: Compared) -> str:
    differences = compared.comparison.provenance
    if isinstance(differences, Unavailable):
        return _missing(differences)
    if not differences:
        return "Nothing that was recorded."
    rows = [
        (d.subject.value, d.name, show_fact(d.a), show_fact(d.b))
        for d in differences[:MAX_DIFFERENCES]
    ]
    more = len(differences) - len(rows)
    table = _table(("", "", "A", "B"), rows)
    return f"{table}\n\nand {form.count(more)} more" if more else table
