"""Edits as people write them: `rank=5:ideal`, `phase=data:0`, `bandwidth.dp=2x`, `schedule=zb_h1`.

| text | meaning |
|---|---|
| `rank=5:ideal`, `rank=5,7:ideal` | these ranks work like their peers |
| `stage=2:ideal`, `dp=1:ideal`, `tp=0:ideal` | the ranks there do an even share |
| `rank=5:0.5x`, `stage=2:0.5x` | their work takes half as long |
| `phase=data:0`, `phase=forward:0.8x` | a phase takes no time, or 0.8 times as long |
| `phase=forward:ideal` | a phase takes an even time on all ranks |
| `compute=0.5x` | what ranks compute takes half as long |
| `bandwidth.dp=2x`, `bandwidth=2x` | transfers along an axis, or all, take half as long |
| `microbatches=16`, `schedule=zb_h1` | another pipeline |
| `move=2@1->3` | 2 layers from stage 1 to stage 3 |
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from meshscope.core.layout import Axis
from meshscope.errors import UsageError

_MAX_FACTOR = 1e6
MAX_NUMBER = 1_000_000
FORMS = (
    "rank=5:ideal, stage=2:ideal, phase=data:0, compute=0.5x, bandwidth.dp=2x, microbatches=16, "
    "schedule=zb_h1, move=2@1->3"
)
_FACTOR = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)x?")
_MOVE = re.compile(r"([0-9]{1,6})@([0-9]{1,6})->([0-9]{1,6})")
_NUMBERS = re.compile(r"[0-9]{1,6}(?:,[0-9]{1,6})*")
_NAME = re.compile(r"[A-Za-z0-9_]{1,40}")


class EditKind(StrEnum):
    RANKS = "rank"
    AXIS = "axis"
    PHASE = "phase"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    MICROBATCHES = "microbatches"
    SCHEDULE = "schedule"
    MOVE = "move"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedEdit:
    """An edit as parsed, not yet applied to a run."""

    text: str
    kind: EditKind
    numbers: tuple[int, ...] = ()
    """RANKS: ranks; AXIS: coordinates; MICROBATCHES: how many; MOVE: layers, source, target."""
    name: str = ""
    """AXIS: the axis; PHASE: the phase; BANDWIDTH: the axis, or empty; SCHEDULE: its name."""
    factor: float | None = None
    """Of durations; None: ideal. BANDWIDTH: of speed."""


def parse_edit(text: str) -> WantedEdit:
    """Reads one edit; UsageError says what was expected."""
    subject, separator, value = text.partition("=")
    subject = subject.strip().lower()
    value = value.strip()
    if not separator or not value:
        raise _wrong(text, "an edit is SUBJECT=VALUE")
    if subject == "rank":
        numbers, factor = _parse_targets(text, value)
        return WantedEdit(text=text, kind=EditKind.RANKS, numbers=numbers, factor=factor)
    if subject == "stage" or subject in list(Axis):
        numbers, factor = _parse_targets(text, value)
        axis = "pp" if subject == "stage" else subject
        return WantedEdit(text=text, kind=EditKind.AXIS, name=axis, numbers=numbers, factor=factor)
    if subject == "phase":
        name, _, amount = value.rpartition(":")
        if not name:
            raise _wrong(text, "a phase needs what to make of it: phase=data:0")
        factor = None if amount == "ideal" else _parse_factor(text, amount)
        return WantedEdit(text=text, kind=EditKind.PHASE, name=name, factor=factor)
    return _parse_plain(text, subject, value)


def _parse_plain(text: str, subject: str, value: str) -> WantedEdit:
    if subject == "compute":
        return WantedEdit(text=text, kind=EditKind.COMPUTE, factor=_parse_factor(text, value))
    head, _, axis = subject.partition(".")
    if head == "bandwidth":
        factor = _parse_factor(text, value)
        if factor <= 0:
            raise _wrong(text, "a bandwidth must be above 0")
        return WantedEdit(text=text, kind=EditKind.BANDWIDTH, name=axis, factor=factor)
    if subject == "microbatches":
        numbers = _parse_numbers(text, value)
        if len(numbers) != 1 or numbers[0] < 1:
            raise _wrong(text, "microbatches are one number of at least 1")
        return WantedEdit(text=text, kind=EditKind.MICROBATCHES, numbers=numbers)
    if subject == "schedule":
        if _NAME.fullmatch(value) is None:
            raise _wrong(text, "a schedule is a name such as 1f1b")
        return WantedEdit(text=text, kind=EditKind.SCHEDULE, name=value.lower())
    if subject == "move":
        found = _MOVE.fullmatch(value)
        if found is None:
            raise _wrong(text, "a move is LAYERS@FROM->TO, such as move=2@1->3")
        numbers = tuple(int(part) for part in found.groups())
        return WantedEdit(text=text, kind=EditKind.MOVE, numbers=numbers)
    raise _wrong(text, "it changes nothing that is known")


def _parse_targets(text: str, value: str) -> tuple[tuple[int, ...], float | None]:
    targets, separator, amount = value.partition(":")
    if not separator:
        raise _wrong(text, "say what to make of it: ideal, or a factor such as 0.5x")
    factor = None if amount == "ideal" else _parse_factor(text, amount)
    return _parse_numbers(text, targets), factor


def _parse_numbers(text: str, value: str) -> tuple[int, ...]:
    if _NUMBERS.fullmatch(value) is None:
        raise _wrong(text, "numbers are expected, such as 5 or 5,7")
    return tuple(sorted({int(part) for part in value.split(",")}))


def _parse_factor(text: str, value: str) -> float:
    found = _FACTOR.fullmatch(value)
    factor = float(found[1]) if found else math.nan
    if not factor <= _MAX_FACTOR:
        raise _wrong(text, f"a factor between 0 and {_MAX_FACTOR:.0f} is expected, such as 0.5x")
    return factor


def _wrong(text: str, reason: str) -> UsageError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return UsageError(f"edit {shown!r}: {reason}; forms: {FORMS}")
