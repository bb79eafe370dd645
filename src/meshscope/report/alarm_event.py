"""What a watcher tells of a run: one JSON document for every alarm that begins, changes or ends."""

from dataclasses import dataclass
from enum import StrEnum

from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.report.encode import Shape, Shapes

DOCUMENT = ("meshscope-alarm", 1)


class EventKind(StrEnum):
    """What happened to an alarm."""

    RAISED = "raised"
    CHANGED = "changed"
    """It is worse than it was, or names other ranks."""
    REMINDED = "reminded"
    """It still stands, after the time that the settings give."""
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEvent:
    """An alarm of one run, at one moment."""

    event: EventKind
    id: str
    """The same from the moment it is raised until it is cleared: `ST001-769-2`."""
    run: str
    """Path of the run."""
    name: str
    """Of the run: its folder, after that of its job."""
    attempt: int
    code: str
    """Of the rule that found it; `stuck`, `dead`, `stall`, `behind` or `failed` where the watcher
    itself did."""
    severity: Severity
    title: str
    summary: str
    change: str
    """What to do; empty where nothing is known."""
    ranks: tuple[int, ...]
    """The culprits; empty: all ranks, or no specific one."""
    hosts: tuple[str, ...]
    """Of the culprits."""
    saved_ns: float | Unavailable
    """A step would be shorter by this without the cause."""
    step_ns: float | Unavailable
    """The step that it is a part of."""
    saved_ratio: float | Unavailable
    confidence: str
    step: int | None
    """Last step that was finished when it was told."""
    since_unix_ns: int
    """When it was first seen, by the watcher's clock."""
    told_unix_ns: int
    reason: str
    """Why it was cleared; empty for other events."""


SHAPES: Shapes = {AlarmEvent: Shape(ranges=("ranks",))}
