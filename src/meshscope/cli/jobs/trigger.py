"""`meshscope trigger`: asks a running job for a trace of its next steps."""

from pathlib import Path

import click

from meshscope.capture.profiling.rank_choice import RankChoice
from meshscope.capture.profiling.window_request import MAX_WINDOW_STEPS
from meshscope.cli.locate import locate_run
from meshscope.cli.places import LOCAL
from meshscope.live.trace_request import request_trace
from meshscope.store.read.run import open_run


@click.command("trigger", short_help="Ask a running job for a trace.")
@click.argument("run", type=LOCAL)
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
    first_step = request_trace(directory, attempt, num_steps=steps, ranks=ranks)
    when = "as soon as ranks see it" if first_step is None else f"from step {first_step} on"
    click.echo(f"asked for {steps} step{'s' if steps > 1 else ''}, {when}: {directory / 'traces'}")
