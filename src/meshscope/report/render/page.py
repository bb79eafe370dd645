"""Sections as one static page without scripts, for notebooks, mails and archives.

Nothing is loaded from anywhere, and all text is escaped.
"""

from collections.abc import Iterable
from html import escape

from meshscope.report import format as form
from meshscope.report.section import (
    Blank,
    Cell,
    Column,
    Facts,
    Headline,
    Line,
    Part,
    Section,
    Series,
    Table,
)

_STYLE = """
.meshscope{font:14px/1.5 system-ui,sans-serif;max-width:72rem;margin:1rem auto;padding:0 1rem;
 color:#1b1f24;background:#fff}
.meshscope h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
.meshscope .note,.meshscope .quiet{color:#59636e}
.meshscope h2 .note{font-weight:400;font-size:.9rem;margin-left:.6rem}
.meshscope p{margin:.2rem 0}
.meshscope .strong{font-weight:600}
.meshscope .notice{color:#7a5b00}
.meshscope .alarm,.meshscope .critical{color:#b3261e}
.meshscope .critical{font-weight:600}
.meshscope table{border-collapse:collapse;margin:.4rem 0;font-variant-numeric:tabular-nums}
.meshscope th{font-weight:400;color:#59636e;text-align:left;padding:.1rem .8rem .1rem 0}
.meshscope td{padding:.1rem .8rem .1rem 0;vertical-align:top}
.meshscope .right{text-align:right}
.meshscope .bar{display:inline-block;height:.7em;background:#4c78a8;min-width:1px}
.meshscope .bar.data{background:#c9a227}.meshscope .bar.backward{background:#9a60b4}
.meshscope .bar.optimizer{background:#3a9d9d}.meshscope .bar.eval{background:#54a24b}
.meshscope .bar.alarm{background:#b3261e}.meshscope .bar.quiet{background:#b0b7bf}
.meshscope .bars{width:18rem}
.meshscope .series{font-family:monospace;letter-spacing:0;color:#3a7d9d}
@media (prefers-color-scheme:dark){.meshscope{color:#e6edf3;background:#0d1117}
 .meshscope .note,.meshscope .quiet,.meshscope th{color:#9198a1}
 .meshscope .notice{color:#d8b84a}.meshscope .alarm,.meshscope .critical{color:#ff7b72}}
"""
_PAGE_STYLE = """
body{margin:0;background:#fff;color:#1b1f24}
h1{font:600 1.2rem/1.5 system-ui,sans-serif;max-width:72rem;margin:1rem auto 0;padding:0 1rem;
 overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(sections: Iterable[Section], *, title: str) -> str:
    """A whole document; ends with a newline."""
    name = escape(form.clean_path(title))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}</title><style>{_PAGE_STYLE}</style></head><body>\n"
        f"<h1>{name}</h1>\n{render_fragment(sections)}</body></html>\n"
    )


def render_fragment(sections: Iterable[Section]) -> str:
    """One element for a notebook or a page, without a script."""
    body = "\n".join(_write_section(section) for section in sections)
    return f'<div class="meshscope"><style>{_STYLE}</style>\n{body}\n</div>\n'


def _write_section(section: Section) -> str:
    head = ""
    if section.title:
        note = f'<span class="note">{_show(section.note)}</span>' if section.note else ""
        head = f"<h2>{_show(section.title)}{note}</h2>"
    body = "".join(map(_write_part, section.parts))
    return f'<section id="{_show(section.key)}">{head}{body}</section>'


def _write_part(part: Part) -> str:
    match part:
        case Headline(text, tone) | Line(text, tone):
            return f'<p class="{tone}">{_show(text)}</p>'
        case Facts(rows):
            shown = "".join(f"<tr><th>{_show(name)}</th>{_cell(cell)}</tr>" for name, cell in rows)
            return f"<table>{shown}</table>"
        case Table(columns):
            return _write_table(part, columns)
        case Series(values=values):
            if len(values) < 2:
                return ""
            caption = _show(part.describe(values, max(part.weights)))
            marks = _show(form.sparkline(values))
            return f'<p class="series">{marks}</p><p class="quiet">{caption}</p>'
        case Blank():
            return ""


def _write_table(table: Table, columns: tuple[Column, ...]) -> str:
    titles = "".join(
        f'<th class="{"right" if column.is_right else ""}">{_show(column.title)}</th>'
        for column in columns
    )
    rows = "".join(
        "<tr>" + "".join(_table_cell(column, at) for column in columns) + "</tr>"
        for at in range(table.num_rows)
    )
    return f"<table><tr>{titles}</tr>{rows}</table>"


def _table_cell(column: Column, at: int) -> str:
    cell = column.cells[at]
    if at < len(column.bars):
        percent = 100 * min(max(column.bars[at], 0.0), 1.0)
        bar = f'<span class="bar {cell.tone}" style="width:{percent:.1f}%"></span>'
        return f'<td class="bars">{bar}</td>'
    return _cell(cell, "right" if column.is_right else "")


def _cell(cell: Cell, align: str = "") -> str:
    names = " ".join(filter(None, (str(cell.tone), align)))
    return f'<td class="{names}">{_show(cell.text)}</td>'


def _show(text: str) -> str:
    return escape(text, quote=True)
