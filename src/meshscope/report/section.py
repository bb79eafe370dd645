"""The content of a report without a medium: titles and parts in order. `render/` shows it.

Text from a run must be cleaned (`format.clean_text`) first; renderers escape what their medium
would act on. Columns that do not fit are dropped, the least important first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from meshscope.core.unavailable import Unavailable

T = TypeVar("T")


class Tone(StrEnum):
    """The meaning of a text; each medium shows it in its own way."""

    PLAIN = "plain"
    STRONG = "strong"
    QUIET = "quiet"
    NOTICE = "notice"
    """Needs attention."""
    ALARM = "alarm"
    CRITICAL = "critical"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVAL = "eval"
    SERIES = "series"


@dataclass(frozen=True, slots=True)
class Cell:
    """Text in a table or beside a fact's name."""

    text: str
    tone: Tone = Tone.PLAIN
    is_cut: bool = False
    """A word longer than a line is shortened in its middle instead of being broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: cells, or shares that are drawn as bars."""

    title: str
    cells: tuple[Cell, ...]
    importance: int
    """The lowest is dropped first."""
    is_right: bool = True
    bars: tuple[float, ...] = ()
    """Shares from 0 to 1; each cell's text is then empty and its tone colours the bar."""
    fixed_width: int = 0
    """Columns the other cells of the row take, for the width of bars."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A line at the left edge."""

    text: str
    tone: Tone = Tone.STRONG


@dataclass(frozen=True, slots=True)
class Line:
    """An indented sentence."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with their values."""

    rows: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a line of titles."""

    columns: tuple[Column, ...]

    @property
    def num_rows(self) -> int:
        return max((len(column.cells) for column in self.columns), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Numbers in order, drawn small: one mark each, or one for the highest of several."""

    values: tuple[float, ...]
    weights: tuple[int, ...]
    """How many things (steps) each value stands for."""
    describe: Callable[[Sequence[float], int], str]
    """Caption: of the marks that are drawn, and the most things one of them stands for."""


@dataclass(frozen=True, slots=True)
class Blank:
    """An empty line between parts."""


Part = Headline | Line | Facts | Table | Series | Blank


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One subject of a report."""

    key: str
    """Names it on the command line: `--section budget`."""
    title: str
    """Empty for a head without one."""
    note: str = ""
    """Stands beside the title: what the numbers are over."""
    parts: tuple[Part, ...] = ()


def missing_section(key: str, title: str, reason: Unavailable | str, *, note: str = "") -> Section:
    """A section that says why there is nothing to show."""
    text = reason.reason if isinstance(reason, Unavailable) else reason
    return Section(key=key, title=title, note=note, parts=(Line(f"n/a: {text}", Tone.QUIET),))


def make_column(
    title: str,
    rows: Iterable[T],
    show: Callable[[T], str | Cell],
    importance: int,
    *,
    is_right: bool = True,
) -> Column:
    cells = tuple(_as_cell(show(row)) for row in rows)
    return Column(title=title, cells=cells, importance=importance, is_right=is_right)


def make_facts(rows: Iterable[tuple[str, str | Cell]]) -> Facts:
    return Facts(tuple((name, _as_cell(value)) for name, value in rows))


def _as_cell(value: str | Cell) -> Cell:
    return Cell(value) if isinstance(value, str) else value
