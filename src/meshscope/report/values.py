"""Values of the JSON document: what is missing stays an object with its reason, text is valid.

What is not known is `{"unavailable": "why"}` in the number's place, never 0 and never null.
"""

import math
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from meshscope.core.unavailable import Unavailable
from meshscope.store.read.rank_ranges import RankRanges

T = TypeVar("T")


class Absent(msgspec.Struct, frozen=True):
    """Stands where a value could not be had."""

    unavailable: str
    """Why."""


class RankRange(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive ranks, both ends included."""

    first: int
    last: int


def as_text(text: str) -> str:
    """JSON is UTF-8; half a surrogate pair from a hostile name is not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_value(value: T | Unavailable) -> T | Absent:
    """The value, or why there is none."""
    return Absent(as_text(value.reason)) if isinstance(value, Unavailable) else value


def as_string(value: str | Unavailable) -> str | Absent:
    """Text from a run, or why there is none."""
    return Absent(as_text(value.reason)) if isinstance(value, Unavailable) else as_text(value)


def as_number(value: float | Unavailable) -> float | Absent:
    """A number that JSON can hold, or why there is none."""
    if isinstance(value, Unavailable):
        return Absent(as_text(value.reason))
    return value if math.isfinite(value) else Absent(f"not a finite number ({value})")


def as_ranges(ranks: Iterable[int]) -> list[RankRange]:
    """Ranks as stretches."""
    found = ranks if isinstance(ranks, RankRanges) else RankRanges.of(ranks)
    return [RankRange(first=stretch[0], last=stretch[-1]) for stretch in found.stretches]


def list_ranges(ranges: Iterable[RankRange]) -> RankRanges:
    """The ranks of such stretches again."""
    return RankRanges(range(part.first, part.last + 1) for part in ranges)
