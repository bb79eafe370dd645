"""Numbers of a command's flags, read by the command itself so that all that are wrong are said at
once: click would stop at the first that is no number."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class NumberFlag:
    """What a flag may be."""

    flag: str
    least: float
    most: float
    is_whole: bool = True
    is_above: bool = False
    """Whether `least` itself is too little."""

    def read(self, text: str) -> float | str:
        """The number; what is wrong with it where it is none."""
        value = _read(text, is_whole=self.is_whole)
        if value is not None and self._is_inside(value):
            return value
        kind = "a whole number" if self.is_whole else "a number"
        bound = "above" if self.is_above else "from"
        return (
            f"{self.flag} is {text.strip()[:40] or 'empty'}, expected {kind} {bound} "
            f"{self.least:g} to {self.most:,.10g}"
        )

    def _is_inside(self, value: float) -> bool:
        over = value > self.least if self.is_above else value >= self.least
        return over and value <= self.most


def _read(text: str, *, is_whole: bool) -> float | None:
    if is_whole:
        return int(text) if _WHOLE.fullmatch(text.strip()) else None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_numbers(
    given: Mapping[str, Any], flags: Mapping[str, NumberFlag]
) -> tuple[dict[str, float], list[str]]:
    """Those that are numbers in their limits, and what is wrong with the others; not given ones
    are in neither."""
    numbers: dict[str, float] = {}
    problems = []
    for name, flag in flags.items():
        if given[name] is None:
            continue
        found = flag.read(str(given[name]))
        if isinstance(found, str):
            problems.append(found)
        else:
            numbers[name] = found
    return numbers, problems
