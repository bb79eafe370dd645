"""A screen of a given width: headings, lines, facts and tables.

Text from a run reaches Rich as plain `Text`, so markup and escape sequences in it have no effect.
Tables have no boxes and drop their least important columns if they do not fit.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from meshscope.report import format as form

_MIN_WIDTH = 40
_INDENT = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    width: int = 100
    """Columns; below 40 lines may be wrapped by the terminal."""
    is_colored: bool = False
    is_unicode: bool = True
    """Whether blocks and typographic characters can be shown."""
    wraps: bool = True
    """Whether long lines are wrapped; not if they are to be copied or searched."""


@dataclass(slots=True, kw_only=True)
class Column:
    """A column of a table; it may be dropped."""

    title: str
    cells: list[Text]
    importance: int
    """The lowest goes first."""
    is_right: bool = True

    @property
    def width(self) -> int:
        """Cells of the widest line."""
        return max(len(self.title), *(cell.cell_len for cell in self.cells), 1)


def make_column(
    title: str,
    rows: Iterable[T],
    show: Callable[[T], str],
    importance: int,
    *,
    is_right: bool = True,
) -> Column:
    cells = [Text(show(row)) for row in rows]
    return Column(title=title, cells=cells, importance=importance, is_right=is_right)


class ScreenWriter:
    """Writes for one screen; `finish` returns the text."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.width = max(screen.width, _MIN_WIDTH)
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer,
            width=self.width,
            force_terminal=screen.is_colored,
            color_system="standard" if screen.is_colored else None,
            no_color=not screen.is_colored,
            legacy_windows=False,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def finish(self) -> str:
        """All text; ends with a newline."""
        lines = (line.rstrip() for line in self._buffer.getvalue().splitlines())
        text = "\n".join(lines) + "\n"
        return text if self.screen.is_unicode else form.to_ascii(text)

    @property
    def room(self) -> int:
        """Columns beside the indentation."""
        return self.width - _INDENT

    def blank(self) -> None:
        self._console.print()

    def headline(self, text: str, style: str) -> None:
        """A line at the left edge."""
        self._print(Text(text, style=style), indent=0)

    def section(self, title: str, note: str = "") -> None:
        """Starts a section; the note stands beside its title, or below if it does not fit."""
        self.blank()
        line = Text(title, style="bold")
        fits = len(title) + 2 + len(note) <= self.width
        if note and fits:
            line.append(f"  {note}", style="dim")
        self._console.print(line)
        if note and not fits:
            self.line(note, "dim")

    def line(self, text: str, style: str = "") -> None:
        """An indented line; wrapped if it is too long and the screen wraps."""
        self._print(Text(text, style=style), indent=_INDENT)

    def facts(self, facts: Iterable[tuple[str, str | Text]]) -> None:
        """Names with their values."""
        rows = list(facts)
        name_width = max((cell_len(name) for name, _ in rows), default=0) + 2
        for name, value in rows:
            text = Text(value) if isinstance(value, str) else value
            lead = Text(" " * _INDENT).append(set_cell_size(name, name_width), "dim")
            self._print(text, indent=_INDENT + name_width, lead=lead)

    def table(self, columns: Sequence[Column]) -> None:
        """Rows under a line of titles; columns may be dropped, rows never."""
        kept = _fit(columns, self.room)
        widths = [column.width for column in kept]
        rows = [Text("  ").join(_pad_row(kept, widths, [Text(c.title) for c in kept]))]
        rows[0].stylize("dim")
        rows += [
            Text("  ").join(_pad_row(kept, widths, [column.cells[at] for column in kept]))
            for at in range(len(kept[0].cells))
        ]
        body = Text("\n", no_wrap=True, overflow="ellipsis").join(rows)
        self._console.print(Padding(body, (0, 0, 0, _INDENT)))

    def rows(self, columns: Sequence[Column]) -> None:
        """A table after a blank line; nothing where there are no rows."""
        if columns[0].cells:
            self.blank()
            self.table(columns)

    def _print(self, text: Text, *, indent: int, lead: Text | None = None) -> None:
        """Wraps between words if the screen wraps; a path stays whole, however wide it is."""
        if not self.screen.wraps:
            self._console.print((lead or Text(" " * indent)) + text, soft_wrap=True)
            return
        room = max(self.width - indent, 1)
        is_wide = any(len(word) > room and "/" in word for word in text.plain.split())
        text.overflow = "ignore" if is_wide else "fold"
        before = lead or Text(" " * indent)
        for line in text.wrap(self._console, room):
            self._console.print(before + line, soft_wrap=True)
            before = Text(" " * indent)


def _fit(columns: Sequence[Column], room: int) -> list[Column]:
    """Drops the least important columns until the rest fits with two-space gutters."""
    kept = list(columns)
    while len(kept) > 2 and sum(column.width + 2 for column in kept) - 2 > room:
        kept.remove(min(kept, key=lambda column: column.importance))
    return kept


def _pad_row(columns: list[Column], widths: list[int], cells: list[Text]) -> list[Text]:
    padded = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        shown = cell.copy()
        missing = width - shown.cell_len
        shown.pad_left(missing) if column.is_right else shown.pad_right(missing)
        padded.append(shown)
    return padded
