"""`meshscope import`: makes a run of torch.profiler's traces."""

from pathlib import Path

import click

from meshscope.cli import plain
from meshscope.cli.options import engine_option
from meshscope.cli.places import READ, WRITE_FOLDER
from meshscope.cli.trace_loading import load_traces
from meshscope.core.layout import Layout
from meshscope.errors import TraceError, UsageError
from meshscope.store.read.memory import write_run


@click.command("import", short_help="Turn traces of torch.profiler into a run.")
@click.argument("paths", nargs=-1, required=True, type=READ)
@click.option(
    "-o",
    "--run-dir",
    required=True,
    type=WRITE_FOLDER,
    help="A new or empty folder for the run.",
)
@engine_option
@click.option("--layout", "layout_text", metavar="TEXT", help="The mesh, such as dp=4,tp=2.")
@click.option(
    "--no-cache", is_flag=True, help="Neither read nor write the cache file beside a trace."
)
def command(
    *, paths: tuple[Path, ...], run_dir: Path, layout_text: str | None, no_cache: bool
) -> None:
    """Turns PATHS, traces or folders with traces below them, into a run.

    All commands that read runs can read it: report, simulate, compare, sql. They also read traces
    directly. Exit codes: 0 fine, 2 usage, 3 a trace cannot be read, or the traces are not of one
    job.
    """
    layout = None if layout_text is None else Layout.parse(layout_text)
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UsageError(f"{run_dir} exists already; name a new folder")
    loaded = load_traces(paths, layout=layout, use_cache=not no_cache)
    try:
        write_run(loaded.run, run_dir)
    except OSError as error:
        raise TraceError(f"{run_dir} cannot be written: {error.strerror or error}") from error
    attempt = loaded.run.last_attempt
    click.echo(f"{run_dir}: traces of {len(attempt.ranks)} of {attempt.world_size} ranks")
    for note in loaded.notes:
        click.echo(f"  {plain(note)}")
