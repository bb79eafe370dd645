"""The one place where errors of the recorder end: counted, written down, never raised.

Training must survive us, so this module alone may catch everything. What it caught is in the
journal and at the head of the report. A call site that keeps failing is switched off.
"""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

MAX_ERRORS_PER_SITE = 100
"""After this many errors a call site is skipped: a broken hook must not cost every step."""

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Counts what went wrong per call site and tells whoever listens."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first_messages: dict[str, str] = {}
        self.on_first: Callable[[str, str], None] | None = None
        """Called once per site with its name and message, to write it into the journal."""

    @property
    def num_errors(self) -> int:
        """Errors caught so far, all sites together."""
        return sum(self.counts.values())

    def caught(self, site: str, error: BaseException) -> None:
        """Counts an error; the first of a site is logged and journalled."""
        self.counts[site] = self.counts.get(site, 0) + 1
        if site in self.first_messages:
            return
        message = f"{type(error).__name__}: {_safe_text(error)}"
        self.first_messages[site] = message
        logger.warning("meshscope caught an error of its own in %s: %s", site, message)
        if self.on_first is not None:
            try:
                self.on_first(site, message)
            except Exception as again:  # noqa: BLE001 - a full disk must not turn into a loop
                logger.warning("meshscope could not write that down: %s", again)

    def protect(self, site: str, function: Callable[P, R]) -> Callable[P, R | None]:
        """`function` that returns None instead of raising."""
        counts = self.counts

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - this is the guard
                self.caught(site, error)
            return None

        def until_broken(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return None if counts.get(site, 0) >= MAX_ERRORS_PER_SITE else guarded(*args, **kwargs)

        return until_broken if site in _SWITCHABLE_SITES else guarded

    def run(self, site: str, function: Callable[[], R]) -> R | None:
        """Calls `function` under the guard."""
        return self.protect(site, function)()


_SWITCHABLE_SITES = frozenset({"memory sample", "clock sample", "device events"})
"""Optional work; begin/end pairs are never skipped one-sidedly."""


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - even an error's text may raise
        return "(its message cannot be shown)"
