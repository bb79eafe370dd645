"""How the report writes values, and where text from a run is made safe.

Numbers with units are written by `core.unit_text`, which findings share. A value that is not there
is `n/a: reason`.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import TypeVar

from meshscope.core.unavailable import Unavailable
from meshscope.core.unit_text import bandwidth as bandwidth
from meshscope.core.unit_text import count as count
from meshscope.core.unit_text import duration as duration
from meshscope.core.unit_text import energy as energy
from meshscope.core.unit_text import memory as memory
from meshscope.core.unit_text import plural as plural
from meshscope.core.unit_text import rate as rate
from meshscope.core.unit_text import ratio as ratio
from meshscope.store.read.rank_ranges import abbreviate_ranks

T = TypeVar("T")

MAX_TEXT = 200
"""Characters of a name or message from a run that are shown at most."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.:-=+*#"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_ASCII_FOR = {
    **dict.fromkeys("▏▎▍", "|"),
    **dict.fromkeys("▌▋▊▉█", "#"),
    **dict(zip(_SPARKS[:-1], _ASCII_SPARKS, strict=False)),
    "·": "|",
    "…": "~",
    "×": "x",
    "→": ">",
    "←": "<",
    "α": "a",
    "β": "b",
    "µ": "u",
    "–": "-",
    "−": "-",
    "—": "-",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "≥": ">",
    "≤": "<",
    "±": "~",
    "²": "2",
    "°": " ",
    "✅": "+",
    "❌": "x",
}
"""One character for each that the report itself uses, so that columns stay where they are."""
_TO_ASCII = str.maketrans(_ASCII_FOR)
_STEADY_RATIO = 0.15
"""Coefficient of variation below which a spark line is drawn from 0."""


def clean_text(text: str, limit: int = MAX_TEXT) -> str:
    """Text from a run with nothing in it that a terminal would act on.

    Escape sequences, control characters, line breaks and characters that change the direction of
    writing are taken out; a lone surrogate becomes a question mark.
    """
    text = _ESCAPES.sub("", text)
    shown = "".join(_clean_character(character) for character in text[: 4 * limit])
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def clean_path(path: str) -> str:
    """As `clean_text`, but never shortened: a path is copied."""
    return clean_text(path, max(len(path), 1))


def _clean_character(character: str) -> str:
    if character.isascii() and character.isprintable():
        return character
    kind = unicodedata.category(character)
    if character in "\t\n\r" or kind in ("Zl", "Zp", "Zs"):
        return " "
    if kind == "Cs":
        return "?"
    return "" if kind in ("Cc", "Cf", "Cn", "Co") else character


def to_ascii(text: str) -> str:
    """For an encoding that has nothing else."""
    text = text.translate(_TO_ASCII)
    return text.encode("ascii", "replace").decode("ascii")


def or_reason(value: T | Unavailable, show: Callable[[T], str]) -> str:
    """The value as `show` writes it, else `n/a: reason`."""
    return f"n/a: {clean_text(value.reason)}" if isinstance(value, Unavailable) else show(value)


def or_dash(value: T | Unavailable, show: Callable[[T], str]) -> str:
    """For a table cell; the reason stands elsewhere."""
    return "n/a" if isinstance(value, Unavailable) else show(value)


def begin_sentence(text: str) -> str:
    """With a capital letter, whatever follows."""
    return f"{text[:1].upper()}{text[1:]}"


def part(value: float, whole: float) -> str:
    """`71 %`: the share of a whole; `n/a` if the whole is 0."""
    return ratio(value / whole) if whole else "n/a"


def drift(ppm: float) -> str:
    """`+12.3 ppm`."""
    return f"{ppm:+.1f} ppm"


def expected(times: float) -> str:
    """`12.5`: how often something is expected."""
    return f"{times:,.1f}"


def name_ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {abbreviate_ranks(ranks)}"


def numbers(*values: float) -> list[str]:
    """Logged values with four significant digits, all in the same notation."""
    sizes = [abs(value) for value in values if value]
    is_scientific = any(not 1e-3 <= size < 1e6 for size in sizes)
    return [_four_digits(value, is_scientific=is_scientific) for value in values]


def _four_digits(value: float, *, is_scientific: bool) -> str:
    if not value:
        return "0"
    if is_scientific:
        return f"{value:.3e}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def layout(text: str, degrees: Mapping[str, int]) -> str:
    """A layout's description without unused axes."""
    _, gap, order = clean_text(text).partition(" ")
    return f"{describe_degrees(degrees)}{gap}{order}"


def describe_degrees(degrees: Mapping[str, int]) -> str:
    """`dp2×tp4`: the axes in use; `dp1` when none is."""
    used = [f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1]
    return "×".join(used) or ("dp1" if degrees else "")


def position(label: str, degrees: Mapping[str, int]) -> str:
    """`dp3.tp1`: a rank's coordinates along the axes in use; `dp0` when none is."""
    parts = clean_text(label).split(".")
    used = [part for part in parts if degrees.get(part.rstrip("0123456789"), 1) > 1]
    return ".".join(used) or parts[0]


def script(path: str, directory: PurePath | None) -> str:
    """A script path relative to `directory`, else its name."""
    if not path.startswith(("/", "..")):
        return path
    found = PurePath(path)
    if directory is not None and found.is_relative_to(directory):
        return str(found.relative_to(directory))
    return found.name or path


def align(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Left-aligned columns, two spaces apart, for lists that other programs cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


def moment(unix_ns: int) -> str:
    """`2025-11-15 09:46:40 UTC`."""
    try:
        return f"{datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"unix time {unix_ns} ns"


def bar(value: float, width: int) -> str:
    """A bar of up to `width` cells for a ratio in 0..1, in eighths of a cell."""
    eighths = round(min(max(value, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")) or ("▏" if value > 0 else "")


def is_steady(values: Sequence[float]) -> bool:
    """Whether a scale from the smallest to the largest value would only show noise."""
    mean = sum(values) / len(values) if values else 0
    if mean <= 0:
        return False
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) < _STEADY_RATIO * mean


def sparkline(values: Sequence[float], *, is_unicode: bool = True) -> str:
    """One mark per value, from the smallest to the largest; from 0 if they are steady."""
    if not values:
        return ""
    low, high = 0 if is_steady(values) else min(values), max(values)
    span = high - low or 1
    marks = _SPARKS if is_unicode else _ASCII_SPARKS
    return "".join(marks[min(7, max(0, int((value - low) / span * 8)))] for value in values)
