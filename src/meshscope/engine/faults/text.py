"""Faults as they are written on the command line and in TOML, and everything wrong with them.

    parse_fault("slow rank=5 phase=forward ms=20 steps=10-20")
    fault_from_mapping({"kind": "crash", "pp": 1, "steps": 7, "how": "SIGSEGV"})
    find_fault_problems(config.faults, layout)           # all of them, one sentence each

docs/faults.md has the table of kinds and keys. No torch here.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshscope.core.layout import Axis, Layout
from meshscope.engine.faults.kinds import (
    CRASH_WAYS,
    EVERY_ATTEMPT,
    LINK_OPERATIONS,
    NAN_TARGETS,
    NEEDS_STEPS,
    PIPELINE_PHASES,
    Fault,
    FaultKind,
    Phase,
    StepRange,
)
from meshscope.errors import UsageError

# --- keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """One key of the written form."""

    field: str
    read: Callable[[Any], Any]
    """From a string or a TOML value; ValueError where it cannot be."""
    expected: str
    write: Callable[[Any], str] = str


def _read_int(value: Any) -> int:
    number = int(value)
    if number < 0 or isinstance(value, bool) or number != float(value):
        raise ValueError
    return number


def _read_ints(value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(_read_int(one) for one in (parts if isinstance(parts, Sequence) else [parts]))


def _read_positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0) or isinstance(value, bool):
        raise ValueError
    return number


def _read_factor(value: Any) -> float:
    if (factor := _read_positive(value)) <= 1:
        raise ValueError
    return factor


def _read_bool(value: Any) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
        str(value).lower()
    ]


def _read_attempts(value: Any) -> tuple[int, ...]:
    return EVERY_ATTEMPT if value == "any" else _read_ints(value)


def _read_link(value: Any) -> tuple[int, int]:
    first, second = value.split("-") if isinstance(value, str) else value
    link = _read_int(first), _read_int(second)
    if link[0] == link[1]:
        raise ValueError
    return link


_STEPS = re.compile(r"(?:(?P<first>\d+)(?P<dash>-(?P<last>\d+)?)?|\*)(?:/(?P<every>[1-9]\d*))?")


def _read_steps(value: Any) -> tuple[StepRange, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(one for part in value for one in _read_steps(part))
    found = []
    for part in str(value).split(","):
        match = _STEPS.fullmatch(part.strip())
        if match is None:
            raise ValueError
        first = int(match["first"] or 0)
        last = int(match["last"]) if match["last"] else None
        if last is None and match["first"] and not match["dash"]:
            last = first
        if last is not None and last < first:
            raise ValueError
        found.append(StepRange(first, last, int(match["every"] or 1)))
    return tuple(found)


def _choose(names: Iterable[str]) -> Callable[[Any], str]:
    by_lower = {str(name).lower(): name for name in names}
    return lambda value: by_lower[str(value).lower()]


def _list(names: Iterable[str]) -> str:
    return " or ".join(str(name) for name in names)


def _join(values: Iterable[Any]) -> str:
    return ",".join(str(value) for value in values)


def _make_key(field: str, read: Callable[[Any], Any], expected: str, write: Any = str) -> _Key:
    return _Key(field=field, read=read, expected=expected, write=write)


def _key_of_choice(field: str, names: Iterable[str]) -> _Key:
    names = tuple(names)
    return _make_key(field, _choose(names), _list(names))


_COUNT = "a whole number of at least 0"
_POSITIVE = "a number above 0"
_STEPS_EXPECTED = "steps such as 7, 3,9, 10-20, 10-, 10-20/5 or */5, counted from 0"
_KEYS: dict[str, _Key] = {
    "rank": _make_key("ranks", _read_ints, "ranks such as 5 or 1,3", _join),
    "ranks": _make_key("ranks", _read_ints, "ranks such as 5 or 1,3", _join),
    **{str(axis): _make_key("coordinates", _read_int, f"an index along {axis}") for axis in Axis},
    "steps": _make_key("steps", _read_steps, _STEPS_EXPECTED, _join),
    "attempt": _make_key(
        "attempts", _read_attempts, "any, or attempts such as 0 or 0,1",
        lambda value: _join(value) or "any",
    ),
    "phase": _make_key("phase", lambda value: Phase(str(value)), _list(Phase)),
    "stage": _make_key("stage", _read_int, _COUNT),
    "microbatch": _make_key("microbatch", _read_int, _COUNT),
    "ms": _make_key(
        "delay_ns", lambda value: round(_read_positive(value) * 1e6), "milliseconds above 0",
        lambda value: f"{value / 1e6:g}",
    ),
    "factor": _make_key("factor", _read_factor, "a number above 1"),
    "burn": _make_key("burns_cpu", _read_bool, "true or false", lambda value: str(value).lower()),
    "mb_per_s": _make_key(
        "bytes_per_s", lambda value: _read_positive(value) * 1e6, _POSITIVE,
        lambda value: f"{value / 1e6:g}",
    ),
    "link": _make_key(
        "link", _read_link, "two different ranks such as 0-1", lambda v: f"{v[0]}-{v[1]}"
    ),
    "axis": _key_of_choice("axis", Axis),
    "operation": _key_of_choice("operation", LINK_OPERATIONS),
    "mb": _make_key(
        "size_bytes", lambda value: round(_read_positive(value) * 1e6), _POSITIVE,
        lambda value: f"{value / 1e6:g}",
    ),
    "device": _make_key("on_device", _read_bool, "true or false", lambda v: str(v).lower()),
    "target": _key_of_choice("target", NAN_TARGETS),
    "parameter": _make_key("parameter", str, "a part of a parameter's name"),
    "objects": _make_key("num_objects", _read_int, _COUNT),
    "how": _key_of_choice("how", CRASH_WAYS),
    "exit_code": _make_key("exit_code", _read_int, _COUNT),
}  # fmt: skip

_COMMON = ("rank", "ranks", *map(str, Axis), "steps", "attempt")
_OWN = {
    FaultKind.SLOW: ("phase", "stage", "microbatch", "ms", "factor", "burn"),
    FaultKind.SLOW_LINK: ("link", "axis", "operation", "ms", "mb_per_s"),
    FaultKind.STALLED_LOADER: ("ms", "burn"),
    FaultKind.LEAK: ("mb", "device"),
    FaultKind.NAN: ("target", "parameter", "stage", "microbatch"),
    FaultKind.GC_PAUSE: ("phase", "stage", "microbatch", "ms", "objects"),
    FaultKind.CRASH: ("phase", "stage", "microbatch", "axis", "how", "exit_code"),
    FaultKind.HANG: ("phase", "stage", "microbatch", "axis"),
}
KEYS_OF: dict[FaultKind, tuple[str, ...]] = {kind: (*_COMMON, *keys) for kind, keys in _OWN.items()}
"""The keys that each kind knows."""

_BLANK = Fault(kind=FaultKind.SLOW)


def write_fault(fault: Fault) -> str:
    words = [str(fault.kind)]
    for key in KEYS_OF[fault.kind]:
        entry = _KEYS[key]
        value = getattr(fault, entry.field)
        if entry.field == "coordinates":
            words += [f"{key}={index}" for axis, index in fault.coordinates if axis == key]
        elif key != "ranks" and value != getattr(_BLANK, entry.field):
            words.append(f"{key}={entry.write(value)}")
    return " ".join(words)


# --- reading -------------------------------------------------------------------------------------

_WORD_BREAK = re.compile(r"\s+|,(?=[A-Za-z_]+=)")


def parse_fault(text: str) -> Fault:
    """From the command line's form: a kind, then `key=value`. UsageError with every problem."""
    kind, *words = _WORD_BREAK.split(text.strip())
    given: dict[str, Any] = {"kind": kind}
    problems = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            problems.append(f"{word!r} is not key=value")
        elif key in given:
            problems.append(f"{key} is given twice")
        else:
            given[key] = value
    problems += _read(given)[1]
    _raise_if_any(problems, text)
    return _read(given)[0]


def fault_from_mapping(given: Mapping[str, Any]) -> Fault:
    """From a table of TOML: `kind` and the same keys. UsageError with every problem."""
    fault, problems = _read(given)
    _raise_if_any(problems, _join(f"{key} = {value!r}" for key, value in given.items()))
    return fault


def _raise_if_any(problems: Sequence[str], text: str) -> None:
    if problems:
        raise UsageError(f"fault {text!r}: {'; '.join(problems)}")


def _read(given: Mapping[str, Any]) -> tuple[Fault, list[str]]:
    """The fault, as far as it can be read, and what is wrong with it."""
    name = str(given.get("kind", ""))
    if name not in tuple(FaultKind):
        found = f"there is no fault {name!r}" if name else "it has no kind"
        return _BLANK, [f"{found}{_suggest(name, FaultKind)}, use one of {', '.join(FaultKind)}"]
    kind = FaultKind(name)
    problems, fields = [], dict[str, Any]()
    for key, value in given.items():
        if key == "kind":
            continue
        if key not in KEYS_OF[kind]:
            known = KEYS_OF[kind]
            problems.append(
                f"{kind} has no key {key!r}{_suggest(key, known)}, use some of {', '.join(known)}"
            )
            continue
        entry = _KEYS[key]
        try:
            read = entry.read(value)
        except (ValueError, KeyError, TypeError, OverflowError):
            problems.append(f"{key} is {value!r}, expected {entry.expected}")
            continue
        if key == "ranks" and "rank" in given:
            problems.append("rank and ranks are both given, use one")
        elif entry.field == "coordinates":
            fields["coordinates"] = tuple(sorted((*fields.get("coordinates", ()), (key, read))))
        else:
            fields[entry.field] = read
    fault = Fault(kind=kind, **fields)
    # A value that could not be read would be reported once more as missing.
    return fault, problems or _find_own_problems(fault)


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [str(one) for one in known], n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# --- problems ------------------------------------------------------------------------------------


def find_fault_problems(
    faults: Iterable[Fault | str | Mapping[str, Any]], layout: Layout | int | None = None
) -> list[str]:
    """Everything that is wrong with faults, written or read, one sentence each.

    `layout`, or the number of ranks, tells which ranks there are.
    """
    problems = []
    for index, given in enumerate(faults):
        try:
            fault = given if isinstance(given, Fault) else _read_any(given)
        except UsageError as error:
            problems.append(f"fault {index}: {str(error).removeprefix('fault ')}")
            continue
        found = _find_own_problems(fault) + _find_layout_problems(fault, layout)
        problems += [f"fault {index} ({write_fault(fault)}): {problem}" for problem in found]
    return problems


def _read_any(given: str | Mapping[str, Any]) -> Fault:
    return parse_fault(given) if isinstance(given, str) else fault_from_mapping(given)


def _find_own_problems(fault: Fault) -> list[str]:
    kind, problems = fault.kind, []
    if kind in NEEDS_STEPS and not fault.steps:
        problems.append(f"{kind} needs steps, such as steps=10")
    if kind is FaultKind.SLOW and (fault.delay_ns is None) == (fault.factor is None):
        problems.append("slow needs either ms or factor")
    if kind is FaultKind.STALLED_LOADER and fault.delay_ns is None:
        problems.append("stalled_loader needs ms")
    if kind is FaultKind.LEAK and fault.size_bytes is None:
        problems.append("leak needs mb, what it keeps in each step")
    if kind is FaultKind.SLOW_LINK:
        if fault.delay_ns is None and fault.bytes_per_s is None:
            problems.append("slow_link needs ms or mb_per_s")
        if fault.link is None and fault.axis is None and not (fault.ranks or fault.coordinates):
            problems.append("slow_link needs link, axis or ranks to say which operations are slow")
    is_operation = fault.point in (Phase.SEND, Phase.COLLECTIVE)
    if kind in (FaultKind.SLOW, FaultKind.GC_PAUSE) and is_operation:
        problems.append(f"{kind} cannot be in phase {fault.point}; use slow_link for operations")
    if fault.factor is not None and fault.point is Phase.STEP:
        problems.append("a factor needs a phase that has a length; step is only its begin")
    if kind is not FaultKind.SLOW_LINK and fault.axis is not None and not is_operation:
        problems.append("axis needs phase=send or phase=collective")
    has_action = fault.stage is not None or fault.microbatch is not None
    if has_action and kind is not FaultKind.NAN and fault.point not in PIPELINE_PHASES:
        problems.append(f"stage and microbatch need a phase out of {_list(PIPELINE_PHASES)}")
    if has_action and kind is FaultKind.NAN and fault.target == "gradient":
        problems.append("a gradient's NaN has no stage or microbatch, it comes after all of them")
    if fault.exit_code != 1 and fault.how != "exit":
        problems.append("exit_code needs how=exit")
    return problems


def _find_layout_problems(fault: Fault, layout: Layout | int | None) -> list[str]:
    if layout is None:
        return []
    world_size = layout if isinstance(layout, int) else layout.world_size
    problems = [
        f"there is no rank {rank} among {world_size}"
        for rank in (*fault.ranks, *(fault.link or ()))
        if rank >= world_size
    ]
    if isinstance(layout, int):
        return problems
    problems += [
        f"{axis} {index} is outside 0..{layout.degree(axis) - 1} of {layout.describe()}"
        for axis, index in fault.coordinates
        if index >= layout.degree(axis)
    ]
    if fault.axis is not None and layout.degree(fault.axis) == 1:
        problems.append(f"nothing is sent along {fault.axis}, its degree is 1")
    if not problems and not any(
        fault.concerns(rank, layout.coordinates(rank), attempt)
        for rank in range(world_size)
        for attempt in (fault.attempts or (0,))
    ):
        problems.append("no rank is at all the places it names")
    return problems
