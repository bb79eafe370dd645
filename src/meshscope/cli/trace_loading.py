"""Reads traces of torch.profiler, with the columns kept beside them, and makes runs of them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from meshscope.cli import plain
from meshscope.core.layout import Layout
from meshscope.errors import TraceError
from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.kineto.trace_cache import load_trace, read_stamp, store_trace
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.kineto.trace_files import find_traces
from meshscope.pool.local import begin
from meshscope.pool.pool import map_items
from meshscope.store.read.files import file_size

if TYPE_CHECKING:  # loaded where a run is made of traces
    from meshscope.analyze.device.trace_summary import TraceSummary
    from meshscope.ingest.traces.trace_recording import TraceRecording
    from meshscope.ingest.traces.trace_run import TraceRun

T = TypeVar("T")
_MEMORY_RATIO = 0.35
"""Memory for each byte of JSON: columns, and what is computed from them."""
_EXPANSION = 16
"""Bytes of JSON in a byte of a compressed file; real traces have 8 to 30."""


def load_traces(
    paths: Sequence[Path], *, layout: Layout | None = None, use_cache: bool = True
) -> "TraceRun":
    """A run, in memory, of the traces at `paths`; what cannot be read is in its notes."""
    from meshscope.ingest.traces.trace_run import make_run

    files = find_traces(paths)
    work = partial(_record_file, max_spans=share_spans(files), use_cache=use_cache)
    left_out: list[str] = []
    recordings = list(read_files(files, work, left_out))
    return make_run(recordings, paths[0], layout=layout, left_out=left_out)


def summarize_traces(paths: Sequence[Path]) -> "list[TraceSummary]":
    """What each of the traces says for itself."""
    return list(read_files(find_traces(paths), _summarize_file))


def _summarize_file(path: Path) -> "TraceSummary | TraceError":
    from meshscope.analyze.device.trace_summary import summarize_trace

    try:
        return summarize_trace(load_file(path, use_cache=True))
    except TraceError as error:
        return error


def share_spans(files: Sequence[Path]) -> int:
    """Device spans that each of so many traces may have."""
    from meshscope.ingest.traces.trace_run import MAX_SPANS

    return max(MAX_SPANS // len(files), 1000)


def read_files(
    files: Sequence[Path],
    work: Callable[[Path], T | TraceError],
    left_out: list[str] | None = None,
) -> Iterator[T]:
    """What `work` makes of every trace that can be read, in their order, on all cores; a folder may
    have a few that cannot, which `left_out` then says."""
    num_read = 0
    for found in map_items(work, files, [_estimate_memory(file) for file in files]):
        if isinstance(found, TraceError):
            if len(files) == 1:
                raise found
            if left_out is None:
                click.echo(f"meshscope: left out: {plain(str(found))}", err=True)
            else:
                left_out.append(plain(str(found)))
            continue
        num_read += 1
        yield found
    if not num_read:
        raise TraceError(f"none of {len(files)} files could be read")


def begin_file(work: Callable[[Path], T], file: Path) -> Callable[[], T]:
    """Begins `work` on one more file, beside what is done here until its result is asked for."""
    return begin(work, file, _estimate_memory(file))


def _estimate_memory(file: Path) -> int:
    try:
        size = file_size(file)
    except OSError:
        return 0
    return int(_MEMORY_RATIO * (size if file.suffix == ".json" else _EXPANSION * size))


def _record_file(path: Path, *, max_spans: int, use_cache: bool) -> "TraceRecording | TraceError":
    from meshscope.ingest.traces.trace_recording import record_trace

    try:
        return record_trace(load_file(path, use_cache=use_cache), max_spans=max_spans)
    except TraceError as error:
        return error


def load_file(path: Path, *, use_cache: bool, keep: bool = True) -> Trace:
    """A trace, from the columns kept beside it where they are good; else they are kept there, if
    they are to be of use again."""
    if not use_cache:
        return read_trace(path)
    try:
        stamp = read_stamp(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    trace = load_trace(path, stamp)
    if trace is None:
        trace = read_trace(path)
        if keep:
            store_trace(path, trace, stamp)
    return trace
