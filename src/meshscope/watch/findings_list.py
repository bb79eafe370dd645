"""Findings in one line, one line each, or in full."""

import textwrap
from collections.abc import Iterator

from rich.text import Text

from meshscope.diagnose.finding import Finding
from meshscope.report import format as form
from meshscope.report.sections.run.findings import describe_price
from meshscope.watch import marks
from meshscope.watch.glance import Glance, name_severity


def name_findings(glance: Glance) -> Text:
    line = Text()
    for one in glance.findings:
        saved = f" −{form.duration(one.saved_ns)}" if one.saved_ns > 0 else ""
        line.append(f"{name_severity(one)} {one.code}{saved}   ", _tone(one))
    return line if glance.findings else Text("no finding", marks.QUIET)


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
