"""Asks the ranks of a running job for a trace of their next steps, by the file they look for."""

import math
from pathlib import Path

from meshscope.capture.profiling.window_request import TRIGGER_NAME, format_request
from meshscope.errors import UsageError
from meshscope.store.read.run import Attempt
from meshscope.store.read.tail import read_step_tail
from meshscope.store.write.manifest import replace_whole

_SEEN_AFTER_NS = 2_500_000_000
"""Ranks look once a second; by then all of them have."""
_MIN_AHEAD_STEPS = 3
"""A rank whose steps take longer looks once a step, and then warms up for one."""


def request_trace(
    directory: Path, attempt: Attempt, *, num_steps: int, ranks: str | None
) -> int | None:
    """Writes RUN/trigger; gives the first step of the trace, None where it is not known. UsageError
    where no rank looks for it or it cannot be written."""
    _require_listeners(directory, attempt)
    first_step = _find_first_step(attempt)
    request = format_request(num_steps=num_steps, first_step=first_step, ranks=ranks)
    path = directory / TRIGGER_NAME
    try:
        replace_whole(path, request)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    return first_step


def _require_listeners(directory: Path, attempt: Attempt) -> None:
    listening = [r for r in attempt if any("profiling" in update for update in r.updates)]
    if not listening:
        raise UsageError(
            f"no rank of {directory} looks for triggers; start the job with --profiling or with "
            "--trace-windows triggered"
        )
    if all(recording.closing is not None for recording in listening):
        raise UsageError(f"{directory} has ended; a trace needs a running job")


def _find_first_step(attempt: Attempt) -> int | None:
    """A step that no rank has started when all have seen the request; None: not known."""
    tails = [read_step_tail(recording.directory) for recording in attempt]
    known = [tail for tail in tails if tail is not None]
    paces = [tail.mean_step_ns for tail in known if tail.mean_step_ns]
    if not paces:
        return None
    ahead = max(_MIN_AHEAD_STEPS, math.ceil(_SEEN_AFTER_NS / min(paces)))
    return max(tail.last_step for tail in known) + 1 + ahead
