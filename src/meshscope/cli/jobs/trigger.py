"""`meshscope trigger`: asks a running job for a trace of its next steps."""

import math
import os
from pathlib import Path

import click

from meshscope.capture.profiling.rank_choice import RankChoice
from meshscope.capture.profiling.window_request import (
    MAX_WINDOW_STEPS,
    TRIGGER_NAME,
    format_request,
)
from meshscope.cli.locate import locate_run
from meshscope.errors import UsageError
from meshscope.store.read.run import Attempt, open_run
from meshscope.store.read.tail import read_step_tail

_SEEN_AFTER_NS = 2_500_000_000
"""Ranks look once a second; by then all of them have."""
_MIN_AHEAD_STEPS = 3
"""A rank whose steps take longer looks once a step, and then warms up for one."""


@click.command("trigger", short_help="Ask a running job for a trace.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_WINDOW_STEPS),
    default=1,
    show_default=True,
    help="Steps to trace.",
)
@click.option("--ranks", help="all, stages, 0,3 or dp0.tp0.  [default: the job's own choice]")
def command(*, run: Path, steps: int, ranks: str | None) -> None:
    """Asks the ranks of a job that runs with --profiling to trace their next steps.

    It writes RUN/trigger. All ranks get the same steps, a few seconds ahead. To allow requests
    without a trace at the beginning, start the job with --trace-windows triggered.

    \b
        meshscope trigger runs/train/… --steps 2 --ranks 0,3
    """
    if ranks is not None:
        RankChoice.parse(ranks)
    directory = locate_run(run)
    attempt = open_run(directory).last_attempt
    _require_listeners(directory, attempt)
    first_step = _find_first_step(attempt)
    request = format_request(num_steps=steps, first_step=first_step, ranks=ranks)
    path = directory / TRIGGER_NAME
    part = path.with_name(f".{TRIGGER_NAME}.{os.getpid()}.part")
    try:
        part.write_bytes(request)
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    when = "as soon as ranks see it" if first_step is None else f"from step {first_step} on"
    click.echo(f"asked for {steps} step{'s' if steps > 1 else ''}, {when}: {directory / 'traces'}")


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
