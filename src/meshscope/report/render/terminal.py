"""Sections as text for a screen of a given width."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.text import Text

from meshscope.report import format as form
from meshscope.report import screen as on_screen
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
    Tone,
)

_MAX_SERIES_MARKS = 80
MIN_BAR, MAX_BAR = 8, 44
_STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.QUIET: "dim",
    Tone.NOTICE: "yellow",
    Tone.ALARM: "red",
    Tone.CRITICAL: "bold red",
    Tone.DATA: "yellow",
    Tone.FORWARD: "blue",
    Tone.BACKWARD: "magenta",
    Tone.OPTIMIZER: "cyan",
    Tone.EVAL: "green",
    Tone.SERIES: "cyan",
}


def render_terminal(sections: Iterable[Section], screen: on_screen.Screen) -> str:
    """All sections; ends with a newline."""
    out = on_screen.ScreenWriter(screen)
    for section in sections:
        _write_section(out, section)
    return out.finish()


def _write_section(out: on_screen.ScreenWriter, section: Section) -> None:
    """A section without a title starts at the left edge."""
    if section.title:
        out.section(section.title, section.note)
    for part in section.parts:
        _write_part(out, part)


def _write_part(out: on_screen.ScreenWriter, part: Part) -> None:
    match part:
        case Headline(text, tone):
            out.headline(text, _STYLES[tone])
        case Line(text, tone):
            out.line(text, _STYLES[tone])
        case Facts(rows):
            room = out.room - max(len(name) for name, _ in rows) - 2
            out.facts([(name, _show_fact(cell, room)) for name, cell in rows])
        case Table(columns):
            out.table([_show_column(out, column) for column in columns])
        case Series():
            _write_series(out, part)
        case Blank():
            out.blank()


def _show_fact(cell: Cell, room: int) -> Text:
    text = _fit_words(cell.text, room) if cell.is_cut else cell.text
    return Text(text, style=_STYLES[cell.tone])


def _fit_words(text: str, width: int) -> str:
    """Shortens words longer than a line in their middle."""
    return " ".join(word if cell_len(word) <= width else _cut(word, width) for word in text.split())


def _cut(word: str, width: int) -> str:
    head = max(0, width - 1) // 3
    tail = max(0, width - 1) - head
    while cell_len(word[:head]) + cell_len(word[len(word) - tail :]) + 1 > width and tail > 0:
        head, tail = head - (head > 0), tail - 1
    return f"{word[:head]}…{word[len(word) - tail :]}"


def _show_column(out: on_screen.ScreenWriter, column: Column) -> on_screen.Column:
    cells = [Text(cell.text, style=_STYLES[cell.tone]) for cell in column.cells]
    if column.bars:
        width = max(MIN_BAR, min(MAX_BAR, out.room - column.fixed_width))
        tones = [_STYLES[cell.tone] for cell in column.cells]
        drawn = [form.bar(share, width) for share in column.bars]
        cells[: len(drawn)] = [
            Text(bar, style=tone) for bar, tone in zip(drawn, tones, strict=False)
        ]
    return on_screen.Column(
        title=column.title, cells=cells, importance=column.importance, is_right=column.is_right
    )


def _write_series(out: on_screen.ScreenWriter, series: Series) -> None:
    if len(series.values) < 2:
        return
    marks, per_mark = _thin_out(series, min(out.room, _MAX_SERIES_MARKS))
    out.line(form.sparkline(marks, is_unicode=out.screen.is_unicode), _STYLES[Tone.SERIES])
    out.line(series.describe(marks, per_mark), _STYLES[Tone.QUIET])


def _thin_out(series: Series, max_marks: int) -> tuple[Sequence[float], int]:
    """At most `max_marks` marks, each the highest of its values, and the most values in one."""
    size = -(-len(series.values) // max_marks)
    starts = range(0, len(series.values), size)
    marks = [max(series.values[start : start + size]) for start in starts]
    return marks, max(sum(series.weights[start : start + size]) for start in starts)
