"""Reads traces of torch.profiler, with the columns kept beside them, and makes runs of them."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from meshscope.core.layout import Layout
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_cache import load_trace, store_trace
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.kineto.trace_files import find_traces
from meshscope.ingest.traces.trace_recording import TraceRecording, record_trace
from meshscope.ingest.traces.trace_run import MAX_SPANS, ImportedRun, write_run


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
        click.echo(f"meshscope: {plain(note)}", err=True)
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
            click.echo(f"meshscope: left out: {plain(str(error))}", err=True)
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


def plain(text: str) -> str:
    """One line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
