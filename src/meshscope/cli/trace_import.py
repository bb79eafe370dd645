"""`meshscope import`: makes a run of torch.profiler's traces; others do so for the moment."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from meshscope.analyze.trace_recording import TraceRecording, record_trace
from meshscope.analyze.trace_run import MAX_SPANS, ImportedRun, write_run
from meshscope.core.layout import Layout
from meshscope.errors import TraceError, UsageError
from meshscope.ingest.kineto import read_trace
from meshscope.ingest.trace_files import find_traces
from meshscope.store.trace_cache import load_trace, store_trace
from meshscope.store.trace_columns import Trace


@click.command("import", short_help="Make a run of torch.profiler's traces.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--run-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="Where to write the run; nothing may be there yet.",
)
@click.option("--layout", "layout_text", metavar="TEXT", help="The mesh, such as dp=4,tp=2.")
@click.option(
    "--no-cache", is_flag=True, help="Neither use nor write the columns kept beside a trace."
)
def command(
    *, paths: tuple[Path, ...], run_dir: Path, layout_text: str | None, no_cache: bool
) -> None:
    """Writes what PATHS, traces or folders with traces below them, say of a job as a run.

    All commands that read runs read it: report, simulate, compare, sql. They also take traces as
    they are, and make such a run for the moment. Exit codes: 0 fine, 2 usage, 3 a trace cannot be
    read, or the traces are not of one job.
    """
    layout = None if layout_text is None else Layout.parse(layout_text)
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UsageError(f"{run_dir} is there already; name a folder that is not")
    imported = import_traces(paths, run_dir, layout=layout, use_cache=not no_cache)
    count = len(imported.ranks)
    click.echo(f"{imported.path}: traces of {count} of {imported.world_size} ranks")
    for note in imported.notes:
        click.echo(f"  {_plain(note)}")


def import_traces(
    paths: Sequence[Path],
    run_dir: Path,
    *,
    layout: Layout | None = None,
    use_cache: bool = True,
    shown_path: str | None = None,
) -> ImportedRun:
    """Reads traces one after the other and writes a run; what cannot be read is said."""
    recordings = list(_record(paths, use_cache=use_cache))
    try:
        return write_run(recordings, run_dir, layout=layout, shown_path=shown_path)
    except OSError as error:
        raise TraceError(f"{run_dir} cannot be written: {error.strerror or error}") from error


def import_for_now(path: Path) -> Path:
    """A run of the traces at `path`, which is gone when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="meshscope-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    name = path.name.split(".")[0] or "traces"
    imported = import_traces([path], folder / name, shown_path=str(path))
    for note in imported.notes:
        click.echo(f"meshscope: {_plain(note)}", err=True)
    return imported.path


def _record(paths: Sequence[Path], *, use_cache: bool) -> Iterator[TraceRecording]:
    files = find_traces(paths)
    max_spans = max(MAX_SPANS // len(files), 1000)
    num_read = 0
    for file in files:
        try:
            trace = load_file(file, use_cache=use_cache)
        except TraceError as error:
            if len(files) == 1:
                raise
            click.echo(f"meshscope: left out: {_plain(str(error))}", err=True)
            continue
        num_read += 1
        yield record_trace(trace, max_spans=max_spans)
    if not num_read:
        raise TraceError(f"none of {len(files)} files could be read")


def load_file(path: Path, *, use_cache: bool) -> Trace:
    """A trace, from the columns kept beside it where they are good."""
    trace = load_trace(path) if use_cache else None
    if trace is None:
        trace = read_trace(path)
        if use_cache:
            store_trace(path, trace)
    return trace


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
