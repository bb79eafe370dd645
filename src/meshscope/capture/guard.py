"""Ends all errors of the recorder: counts them, writes them down, never raises them.

Training must survive us, so what is called from a training program is caught whole, here or, where
a further call would cost too much, in `hooks`, which hands it to `Guard.caught`. What was caught is
in the journal and at the head of the report.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

logger = logging.getLogger(__name__)

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


class Guard:
    """Counts errors per call site and calls the listeners."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first_messages: dict[str, str] = {}
        self.on_first: Callable[[str, str], None] | None = None
        """Called once per site with its name and message, to write it into the journal."""

    @property
    def num_errors(self) -> int:
        """Errors caught so far, all sites together."""
        return sum(self.counts.values())

    def forget(self) -> None:
        """A new attempt begins with a clean sheet."""
        self.counts.clear()
        self.first_messages.clear()

    def caught(self, site: str, error: BaseException) -> None:
        """Counts an error; the first of a site is logged and journalled."""
        self.counts[site] = self.counts.get(site, 0) + 1
        if site in self.first_messages:
            return
        message = f"{type(error).__name__}: {safe_text(error)}"
        self.first_messages[site] = message
        logger.warning("meshscope caught an error of its own in %s: %s", site, message)
        if self.on_first is not None:
            try:
                self.on_first(site, message)
            except Exception as again:  # noqa: BLE001 - a full disk must not turn into a loop
                logger.warning("meshscope could not write that down: %s", again)

    def protect(self, site: str, function: Callable[..., R]) -> Callable[..., R | None]:
        """`function` that returns None instead of raising. Positional arguments only: hooks are
        called so, and packing keywords would cost every step."""

        def guarded(*args: Any) -> R | None:
            try:
                return function(*args)
            except Exception as error:  # noqa: BLE001 - this is the guard
                self.caught(site, error)
            return None

        return guarded

    def run(
        self, site: str, function: Callable[[Unpack[Arguments]], R], *args: *Arguments
    ) -> R | None:
        """Calls `function` under the guard; None when it raised. Makes no closure: steps pass."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - this is the guard
            self.caught(site, error)
        return None


def safe_text(error: BaseException) -> str:
    """The message of an error, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - even an error's text may raise
        return "(its message cannot be shown)"
