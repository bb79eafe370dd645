"""`meshscope ls`: the runs below a folder, one line each."""

from pathlib import Path

import click

from meshscope.cli.locate import find_runs
from meshscope.cli.terminal_screen import show_document
from meshscope.errors import RunError
from meshscope.report.format import align, clean_path, clean_text, count, moment
from meshscope.report.listings import RUNS, Listing, RunsDocument
from meshscope.store.read.run import Attempt, open_run


@click.command("ls", short_help="List the runs below a folder.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(*, folder: Path, as_json: bool) -> None:
    """Lists the runs at or below FOLDER (default: here): when, ranks, steps, state.

    Ranks, steps and state are those of the last attempt; steps are counted on its first rank.
    """
    listings = [describe_run(path) for path in find_runs(folder)]
    if as_json:
        show_document(RUNS, RunsDocument(runs=tuple(listings)))
        return
    if not listings:
        click.echo(f"meshscope: no run at or below {clean_path(str(folder))}", err=True)
        return
    titles = ("RUN", "ID", "STARTED", "RANKS", "STEPS", "STATE")
    click.echo(align([titles, *map(_row, listings)]), nl=False)


def describe_run(path: Path) -> Listing:
    try:
        run = open_run(path)
        attempt = run.last_attempt
        first = next(iter(attempt))
        num_steps = len(first.read("steps")["step"])
    except RunError as error:
        return Listing(path=str(path), state=f"unreadable: {error}")
    run_id = run.manifest.get("run_id")
    return Listing(
        path=str(path),
        run_id=run_id if isinstance(run_id, str) else None,
        started_unix_ns=min(
            (start for rank in attempt if (start := rank.start_unix_ns)), default=None
        ),
        num_attempts=len(run.attempts),
        num_ranks=len(attempt.ranks),
        world_size=attempt.world_size,
        num_steps=num_steps,
        state=_describe_state(attempt),
    )


def _describe_state(attempt: Attempt) -> str:
    num_open = sum(rank.closing is None for rank in attempt)
    if num_open == len(attempt.ranks):
        state = "still running or killed"
    elif num_open:
        state = f"{num_open} of {len(attempt.ranks)} ranks without an end"
    else:
        state = _describe_end(attempt)
    missing = len(attempt.missing_ranks)
    return f"{state}, {missing} missing" if missing else state


def _describe_end(attempt: Attempt) -> str:
    """How ranks ended that all have an end: by themselves, or with an exception."""
    raised = [rank for rank in attempt if rank.exception is not None]
    if not raised:
        return "finished"
    kinds = [(rank.exception or "").partition(":")[0] for rank in raised]
    if set(kinds) == {KeyboardInterrupt.__name__}:
        return "interrupted"
    # What one rank raises is often an interrupt on the others.
    first = next(kind for kind in kinds if kind != KeyboardInterrupt.__name__)
    who = f"{len(raised)} of {len(attempt.ranks)} ranks " if len(attempt.ranks) > 1 else ""
    return f"{who}ended with {first}"


def _row(listing: Listing) -> tuple[str, str, str, str, str, str]:
    ranks = "n/a"
    if listing.num_ranks is not None and listing.world_size is not None:
        ranks = count(listing.num_ranks)
        if listing.num_ranks != listing.world_size:
            ranks += f"/{count(listing.world_size)}"
    return (
        clean_path(listing.path),
        clean_text(listing.run_id or "n/a", 16),
        "n/a" if listing.started_unix_ns is None else moment(listing.started_unix_ns),
        ranks,
        "n/a" if listing.num_steps is None else count(listing.num_steps),
        clean_text(listing.state),
    )
