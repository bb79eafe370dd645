"""What is traced, when and on which ranks, and its text form.

    skip=5,wait=1,warmup=1,active=1,repeat=1,ranks=stages,shapes,stack

Every part may be left out; what stands above is the default, without shapes and stack. All that is
wrong in a text is reported at once, before anything starts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from meshscope.capture.profiling.rank_choice import RankChoice, is_rank_part
from meshscope.capture.profiling.window_schedule import FIELDS, WindowSchedule
from meshscope.errors import UsageError

DEFAULT_TEXT = "default"
_OFF_TEXT = "off"
WORDS = (
    "shapes", "stack", "modules", "memory", "plain", "signal", "anomaly", "triggered",
    "traces_only",
)  # fmt: skip
_COUNTS = ("cooldown", "cooldown_s", "limit")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTES = re.compile(r"([0-9]{1,15})\s*([a-z]{0,3})")
_MAX_TEXT = 2000
_DEFAULT_SCHEDULE = WindowSchedule()
_DEFAULT_RANKS = RankChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSettings:
    """One rank's trace windows."""

    schedule: WindowSchedule | None = _DEFAULT_SCHEDULE
    """None: only what is asked for, by a file, a signal or an anomaly."""
    ranks: RankChoice = _DEFAULT_RANKS
    shapes: bool = False
    stack: bool = False
    modules: bool = False
    memory: bool = False
    max_bytes: int = 1 << 30
    """Total size of one rank's trace files; beyond it no further window is taken."""
    compresses: bool = True
    signal: bool = False
    """SIGUSR2 asks for a window, where the program leaves that signal alone."""
    anomaly: bool = False
    """A slow step or a loss that is not finite asks for one."""
    cooldown_steps: int = 100
    cooldown_s: int = 600
    """An anomaly asks for nothing until so many steps and so much time since the last window."""
    max_anomalies: int = 5
    """Windows that anomalies may have in all."""
    traces_only: bool = False
    """No memory profile beside the traces."""

    @property
    def profiles_memory(self) -> bool:
        """Whether one step's memory is profiled too; nothing is unless a schedule asks for it."""
        return self.schedule is not None and not self.traces_only

    def to_text(self) -> str:
        """What `parse_settings` reads back."""
        schedule = self.schedule
        parts = ["triggered"] if schedule is None else []
        if schedule is not None:
            parts = [f"{name}={getattr(schedule, name)}" for name in FIELDS]
        parts.append(f"ranks={self.ranks}")
        parts += [name for name in ("shapes", "stack", "modules", "memory") if getattr(self, name)]
        parts.append(f"cap={self.max_bytes}")
        parts += [] if self.compresses else ["plain"]
        parts += [n for n in ("signal", "anomaly", "traces_only") if getattr(self, n)]
        parts += [f"cooldown={self.cooldown_steps}", f"cooldown_s={self.cooldown_s}"]
        return ",".join([*parts, f"limit={self.max_anomalies}"])


def parse_settings(text: str) -> ProfilingSettings | None:
    """Settings from their text; None for `off`. UsageError with all that is wrong."""
    text = text.strip()
    if text == _OFF_TEXT:
        return None
    if text in ("", DEFAULT_TEXT):
        return ProfilingSettings()
    if len(text) > _MAX_TEXT:
        raise UsageError(f"trace windows: {len(text)} characters; expected {_MAX_TEXT} at most")
    words, values, problems = _split(text)
    settings, more = _build(words, values)
    if problems or more:
        raise UsageError(f"trace windows {text!r}: {'; '.join([*problems, *more])}")
    return settings


def change_settings(settings: ProfilingSettings, **changes: object) -> ProfilingSettings:
    """With some fields of the settings or of the schedule replaced, by name."""
    known = {field.name for field in fields(ProfilingSettings)} - {"schedule"}
    unknown = sorted(set(changes) - known - set(FIELDS))
    if unknown:
        names = ", ".join([*FIELDS, *sorted(known)])
        raise UsageError(f"unknown setting {', '.join(unknown)}; trace windows have: {names}")
    if "ranks" in changes and not isinstance(changes["ranks"], RankChoice):
        changes["ranks"] = _as_choice(changes["ranks"])
    for name, value in changes.items():
        _check_kind(name, value)
    cycle = {name: changes.pop(name) for name in FIELDS if name in changes}
    if cycle:
        schedule = replace(settings.schedule or WindowSchedule(), **cycle)  # type: ignore[arg-type]  # checked
        settings = replace(settings, schedule=schedule)
    return replace(settings, **changes)  # type: ignore[arg-type]  # checked


def _check_kind(name: str, value: object) -> None:
    """Before replacing: a wrong type would show only in the middle of training."""
    if name == "ranks":
        return
    is_number = name in FIELDS or name.startswith(("max_", "cooldown_"))
    is_good = isinstance(value, bool) != is_number and isinstance(value, int)
    if not is_good or (is_number and int(str(value)) < 0):
        expected = "a whole number of 0 or more" if is_number else "True or False"
        raise UsageError(f"{name} is {value!r}; expected {expected}")


def _as_choice(value: object) -> RankChoice:
    if isinstance(value, (list, tuple)):
        return RankChoice.parse(",".join(str(rank) for rank in value))
    return RankChoice.parse(str(value))


def _split(text: str) -> tuple[set[str], dict[str, str], list[str]]:
    """Words, values by name, and what is neither."""
    words: set[str] = set()
    values: dict[str, str] = {}
    problems: list[str] = []
    last = ""
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if equals and name in values:
            problems.append(f"{name} is given twice")
        elif equals:
            values[name] = value
        elif part in WORDS:
            words.add(part)
        elif last == "ranks" and is_rank_part(part):  # the list goes on: ranks=0,3
            values["ranks"] += f",{part}"
            continue
        else:
            problems.append(_explain_word(part))
        last = name if equals else ""
    return words, values, problems


def _explain_word(part: str) -> str:
    known = ", ".join(f"{name}=" for name in (*FIELDS, "ranks", "cap", *_COUNTS))
    return f"{part!r} is no setting; expected {known} or {', '.join(WORDS)}"


def _build(words: set[str], values: Mapping[str, str]) -> tuple[ProfilingSettings, list[str]]:
    problems = [
        _explain_word(f"{name}={value}")
        for name, value in values.items()
        if name not in (*FIELDS, "ranks", "cap", *_COUNTS)
    ]
    numbers = {
        name: _read_number(name, values[name], problems)
        for name in (*FIELDS, *_COUNTS)
        if name in values
    }
    settings = ProfilingSettings(
        compresses="plain" not in words,
        **{name: name in words for name in WORDS if name not in ("plain", "triggered")},  # type: ignore[arg-type]  # flags
    )
    cycle = {name: numbers[name] for name in FIELDS if name in numbers}
    if "triggered" in words and cycle:
        problems.append(f"triggered leaves the schedule out, and {', '.join(cycle)} is part of it")
    try:
        schedule = None if "triggered" in words else WindowSchedule(**cycle)
        settings = replace(
            settings,
            schedule=schedule,
            ranks=RankChoice.parse(values["ranks"]) if "ranks" in values else settings.ranks,
            max_bytes=read_bytes(values["cap"]) if "cap" in values else settings.max_bytes,
            cooldown_steps=numbers.get("cooldown", settings.cooldown_steps),
            cooldown_s=numbers.get("cooldown_s", settings.cooldown_s),
            max_anomalies=numbers.get("limit", settings.max_anomalies),
        )
    except UsageError as error:
        problems.append(str(error))
    return settings, problems


def _read_number(name: str, text: str, problems: list[str]) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 12:
        return int(text)
    problems.append(f"{name}={text[:40]} is no whole number")
    return 1


def read_bytes(text: str) -> int:
    """`512MiB`, `1GB`, `1000000`."""
    match = _BYTES.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{text[:40]!r} is no size; expected such as 512MiB")
    return int(match[1]) * _UNITS[match[2]]
