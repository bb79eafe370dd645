"""Numbers that a framework logs, as scalars under its own names with who logged them.

A tap and a callback may both hear of one: it is written once for each of the framework's steps.
"""

from collections.abc import Mapping
from typing import Any

from meshscope.capture.session import Session


class LoggedValues:
    """What frameworks logged in one process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._said: dict[tuple[str, ...], object] = {}

    def begin_attempt(self) -> None:
        self._said.clear()

    @property
    def has_begun(self) -> bool:
        """Whether training has: a process that only evaluates is not recorded."""
        session = self._session
        if session.is_paused or session.is_closed:
            return False
        return session.writer is not None or bool(session.timeline.step_start_ns)

    def log(self, framework: str, values: Mapping[str, Any], step: object) -> None:
        """Takes the numbers among `values`, for the open step or the last one."""
        if not self.has_begun:
            return
        for name, value in values.items():
            if _is_number(value) and self.is_new(step, framework, "log", str(name)):
                self._session.scalars.log(f"{name} (logged by {framework})", value)

    def is_new(self, value: object, *event: str) -> bool:
        """Whether an event comes with another value than the last time."""
        if event in self._said and self._said[event] == value:
            return False
        self._said[event] = value
        return True

    def switch(self, event: str, *, is_on: bool) -> bool:
        """Whether something that is off at first is now on, or off, and was not."""
        was_on = self._said.get((event,)) is True
        self._said[event,] = is_on
        return was_on != is_on


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, str)):
        return False
    return isinstance(value, (int, float)) or (
        hasattr(value, "is_cuda") and type(value).__name__ != "DTensor" and value.numel() == 1
    )
