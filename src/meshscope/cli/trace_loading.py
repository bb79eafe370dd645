"""Reads traces of torch.profiler, with the columns kept beside them, and makes runs of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from meshscope.core.layout import Layout
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_cache import load_trace, store_trace
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.kineto.trace_files import find_traces
from meshscope.ingest.traces.trace_recording import record_trace
from meshscope.ingest.traces.trace_run import MAX_SPANS, TraceRun, make_run


def load_traces(
    paths: Sequence[Path], *, layout: Layout | None = None, use_cache: bool = True
) -> TraceRun:
    """A run, in memory, of the traces at `paths`; what cannot be read is said on stderr."""
    files = find_traces(paths)
    max_spans = share_spans(files)
    recordings = [
        record_trace(trace, max_spans=max_spans) for trace in read_files(files, use_cache=use_cache)
    ]
    return make_run(recordings, paths[0], layout=layout)


def share_spans(files: Sequence[Path]) -> int:
    """Device spans that each of so many traces may have."""
    return max(MAX_SPANS // len(files), 1000)


def read_files(files: Sequence[Path], *, use_cache: bool) -> Iterator[Trace]:
    """Every trace that can be read, one after the other; a folder may have a few that cannot."""
    num_read = 0
    for file in files:
        try:
            trace = _load_file(file, use_cache=use_cache)
        except TraceError as error:
            if len(files) == 1:
                raise
            click.echo(f"meshscope: left out: {plain(str(error))}", err=True)
            continue
        num_read += 1
        yield trace
    if not num_read:
        raise TraceError(f"none of {len(files)} files could be read")


def _load_file(path: Path, *, use_cache: bool) -> Trace:
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
