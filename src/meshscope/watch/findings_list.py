"""Findings in one line, one line each, or in full."""

import textwrap
from collections.abc import Iterator

from rich.text import Text

from meshscope.diagnose.finding import Finding
from meshscope.diagnose.wording import capitalize
from meshscope.report import format as form
from meshscope.report.sections.run.findings import describe_onset, describe_price
from meshscope.watch import marks
from meshscope.watch.glance import Glance, name_severity


def name_findings(glance: Glance, width: int) -> Text:
    """As many as fit; then how many more there are."""
    line = Text()
    for at, one in enumerate(glance.findings):
        saved = f" −{form.duration(one.saved_ns)}" if one.saved_ns > 0 else ""
        text = f"{name_severity(one)} {one.code}{saved}   "
        rest = len(glance.findings) - at
        if line.cell_len + len(text) > width - (10 if rest > 1 else 0):
            return line.append(f"+{rest} (f)", marks.QUIET)
        line.append(text, _tone(one))
    return line if glance.findings else Text("no finding", marks.QUIET)


def tell_first(glance: Glance, width: int, num_rows: int) -> list[Text]:
    """What to do and since when, below a line of space, where there are rows for it."""
    lines = wrap_text(f"What to do: {glance.change}", width) if glance.change else []
    if glance.findings and glance.change == form.clean_text(glance.findings[0].change, 300):
        first = glance.findings[0]
        lines += wrap_text(f"{capitalize(describe_onset(first))}.", width)
        what = wrap_text(capitalize(form.clean_text(first.summary, 600)), width)
        lines = [*what, *lines] if len(what) + len(lines) < num_rows else lines
    return [Text(), *map(Text, lines)] if 0 < len(lines) < num_rows else []


def list_findings(glance: Glance, num_rows: int) -> list[Text]:
    lines = []
    for one in glance.findings[: max(num_rows, 0)]:
        price = describe_price(one)
        saves = f": saves {price}" if price else ""
        title = form.clean_text(one.title, 200)
        lines.append(Text(f"{name_severity(one)} {one.code} {title}{saves}", _tone(one)))
    return lines


def _tone(finding: Finding) -> str:
    mark = name_severity(finding)
    return {"▲": marks.TONES["bad"], "△": marks.TONES["attention"]}.get(mark, marks.QUIET)


def list_in_full(one: Finding, width: int) -> Iterator[Text]:
    price = describe_price(one)
    yield Text(f"{name_severity(one)} {one.code} {form.clean_text(one.title)}", _tone(one))
    rows = [
        ("what", one.summary),
        ("since", describe_onset(one).removeprefix("since ")),
        ("saves", price or f"not priced: {getattr(one.gain, 'reason', '')}"),
        ("change", one.change),
        ("sure", f"{one.confidence.level}: {one.confidence.text}"),
    ]
    if one.explained_by is not None:
        rows.append(("cause", one.explained_by))
    for name, text in rows:
        wrapped = wrap_text(form.clean_text(text, 600), width - 10)
        for at, part in enumerate(wrapped):
            yield Text(f"  {name if at == 0 else '':<7} {part}")


def wrap_text(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20)) or [""]
