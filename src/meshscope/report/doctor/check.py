"""One thing that was looked at, and the document of all of them."""

from dataclasses import dataclass
from enum import StrEnum

DOCUMENT = ("meshscope-doctor", 1)


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    ABSENT = "absent"
    """Not there, and not needed for what else is there."""
    LIMITED = "limited"
    """Works, with less."""
    BROKEN = "broken"
    """Recording or reading cannot work without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    """What is here."""
    meaning: str = ""
    """What follows from it; empty where all is well."""
    command: str = ""
    """One command, or one change, that gets what is missing; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All checks, by subject."""

    meshscope_version: str
    python_version: str
    can_record: bool
    can_read: bool
    installed: tuple[Check, ...]
    recorded: tuple[Check, ...]
    """What a recording on this machine would have."""
    folder: tuple[Check, ...]
    """Where the run would be."""

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.installed + self.recorded + self.folder
