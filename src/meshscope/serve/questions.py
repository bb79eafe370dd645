"""What can be asked about a run, read from the text of an address. Wrong text is a UsageError."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.errors import UsageError
from meshscope.page.heat.matrix import MAX_COLUMNS, MAX_ROWS, Window
from meshscope.page.step_spans import MAX_SPANS

MAX_RANKS_NAMED = 4096
_MAX_NUMBER = 1 << 53
_RANGE = re.compile(r"(\d{1,16})(?:-(\d{1,16}))?")

Given = Mapping[str, str]


def read_number(given: Given, name: str, *, low: int = 0, high: int = _MAX_NUMBER) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 16:
        raise UsageError(f"{name} is {text[:40]!r}; it takes a whole number")
    if not low <= int(text) <= high:
        raise UsageError(f"{name} is {text}; it takes {low} to {high}")
    return int(text)


def read_pair(given: Given, name: str) -> tuple[int, int] | None:
    """`3-8`, or `3` for one."""
    text = given.get(name)
    if text is None:
        return None
    found = _RANGE.fullmatch(text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UsageError(f"{name} is {text[:40]!r}; it takes a range such as 3-8")
    return int(found[1]), int(found[2] or found[1])


def read_ranks(given: Given) -> tuple[int, ...] | None:
    """`0,3-5`."""
    text = given.get("ranks")
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first or last - first + len(ranks) >= MAX_RANKS_NAMED:
            raise UsageError(
                f"ranks is {text[:40]!r}; it takes numbers and ranges such as 0,3-5, at most "
                f"{MAX_RANKS_NAMED} ranks"
            )
        ranks.update(range(first, last + 1))
    return tuple(sorted(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixQuestion:
    """A picture of one metric."""

    metric: str
    phase: str | None
    window: Window
    agg: str
    """`max`, `mean` or `both`."""
    is_binary: bool


def read_matrix(given: Given) -> MatrixQuestion:
    agg = given.get("agg", "both")
    if agg not in ("max", "mean", "both"):
        raise UsageError(f"agg is {agg[:40]!r}; it takes max, mean or both")
    form = given.get("format", "binary")
    if form not in ("binary", "json"):
        raise UsageError(f"format is {form[:40]!r}; it takes binary or json")
    return MatrixQuestion(
        metric=given.get("metric", "excess"),
        phase=given.get("phase") or None,
        window=Window(
            ranks=read_pair(given, "ranks"),
            steps=read_pair(given, "steps"),
            num_rows=read_number(given, "h", low=1, high=MAX_ROWS) or MAX_ROWS,
            num_columns=read_number(given, "w", low=1, high=MAX_COLUMNS) or MAX_COLUMNS,
        ),
        agg=agg,
        is_binary=form == "binary",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineQuestion:
    """One step of some ranks."""

    step: int
    ranks: tuple[int, ...] | None
    t0_ns: int | None
    """From the step's origin; spans that end before are left out."""
    t1_ns: int | None
    max_spans: int


def read_timeline(given: Given) -> TimelineQuestion:
    step = read_number(given, "step")
    if step is None:
        raise UsageError("step is missing; add ?step=NUMBER")
    return TimelineQuestion(
        step=step,
        ranks=read_ranks(given),
        t0_ns=read_number(given, "t0"),
        t1_ns=read_number(given, "t1"),
        max_spans=read_number(given, "max_spans", low=1, high=MAX_SPANS) or MAX_SPANS,
    )
