"""The limits rules compare with: each named, with unit and meaning, and each can be changed.

A rule's module defines its limits as `Threshold`s and reads them by that object:
`context.thresholds[MIN_EFFECT_RATIO]`. Files and flags name them in words; a name no rule has is
refused, with the nearest that one has.
"""

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from meshscope.errors import UsageError

_SECTION = "thresholds"
"""The table of a TOML file that holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One limit of one rule, or of several that must agree."""

    name: str
    """Unique among all rules; ends in its unit: "straggler_min_effect_ratio"."""
    default: float
    meaning: str
    """One clause, where needed with the source of the number."""
    minimum: float = 0.0
    """Smallest value that makes sense."""


_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The defaults, and the values that a user changed."""

    changed: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    """Name to value, of those that were changed."""

    def __getitem__(self, threshold: Threshold) -> float:
        return self.changed.get(threshold.name, threshold.default)


def choose_thresholds(
    known: Iterable[Threshold], *, file: Path | None = None, assignments: Iterable[str] = ()
) -> Thresholds:
    """From a TOML file, then from `name=value` texts, which win. UsageError with all that is wrong.

    `known` are the thresholds of all rules.
    """
    by_name = {threshold.name: threshold for threshold in known}
    given: dict[str, object] = dict(_read_file(file)) if file is not None else {}
    problems: list[str] = []
    for text in assignments:
        name, is_there, value = text.partition("=")
        if not is_there:
            problems.append(f"{text!r} is not NAME=VALUE")
            continue
        given[name.strip()] = value.strip()
    changed: dict[str, float] = {}
    for name, raw in given.items():
        parsed = _check(name, raw, by_name)
        if isinstance(parsed, str):
            problems.append(parsed)
        else:
            changed[name] = parsed
    if problems:
        raise UsageError("; ".join(problems))
    return Thresholds(changed=MappingProxyType(changed))


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        parsed = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    table = parsed.get(_SECTION)
    if not isinstance(table, dict):
        raise UsageError(f"{path} has no table [{_SECTION}] with NAME = VALUE lines")
    return table


def _check(name: str, raw: object, known: Mapping[str, Threshold]) -> float | str:
    """The value, or what is wrong with it."""
    threshold = known.get(name)
    if threshold is None:
        return f"there is no threshold {name!r}{_suggest(name, known)}"
    value = _to_number(raw)
    if value is None:
        return f"{name} is {raw!r}; it takes a number (default {threshold.default:g})"
    if value < threshold.minimum:
        return f"{name} is {value:g}; it takes {threshold.minimum:g} or more"
    return value


def _to_number(raw: object) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return None
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _suggest(name: str, known: Mapping[str, Threshold]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {nearest[0]!r}" if nearest else "; `meshscope rules CODE` lists them"
