"""`meshscope trace`: what torch.profiler's traces say, of one rank or of many."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from meshscope.analyze.communication.rank_comparison import RankComparison, compare_ranks
from meshscope.analyze.compare.trace_diff import compare_traces
from meshscope.analyze.device.trace_summary import TraceSummary, summarize_trace
from meshscope.analyze.study import Study
from meshscope.cli.terminal_screen import choose_screen, show_document
from meshscope.cli.trace_loading import read_files, share_spans
from meshscope.core.layout import Layout, check_layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError, UsageError
from meshscope.ingest.kineto.trace_columns import Trace
from meshscope.ingest.kineto.trace_files import find_traces
from meshscope.ingest.traces.trace_axes import coordinates_of, infer_layout
from meshscope.ingest.traces.trace_recording import TraceRecording, record_trace
from meshscope.ingest.traces.trace_run import make_run
from meshscope.ingest.traces.trace_view import TraceView
from meshscope.report import format as form
from meshscope.report.trace_document import DOCUMENT, TraceDocument
from meshscope.simulate.critical_path import CriticalPath
from meshscope.simulate.trace_path import find_trace_path


@click.command("trace", short_help="Explain traces of torch.profiler.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option(
    "--top",
    "num_rows",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Rows of each table.",
)
@click.option(
    "--no-cache", is_flag=True, help="Neither read nor write the cache file beside a trace."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="A trace or folder to compare with; shows what changed from it to PATHS.",
)
@click.option(
    "--layout",
    "layout_text",
    help="The mesh, such as dp=4,tp=2, which names the axes of groups.  [default: from folder "
    "names such as rank0_dp0_tp0_pp0]",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="With more than two traces, show this rank in full; may be given several times.  "
    "[default: the rank that others waited for most, otherwise the first]",
)
@click.pass_context
def command(
    context: click.Context,
    *,
    paths: tuple[Path, ...],
    as_json: bool,
    num_rows: int,
    no_cache: bool,
    against: Path | None,
    layout_text: str | None,
    ranks: tuple[int, ...],
) -> None:
    """Shows where the time of devices went in PATHS: traces, or folders with traces below them.

    Reads JSON of Kineto, Chrome, XLA and Ascend (trace_view.json); plain, gzip, zstd, bzip2 or xz.
    Traces of several ranks of a job are combined. Exit codes: 0 fine, 2 usage, 3 a trace cannot be
    read.
    """
    given = None if layout_text is None else Layout.parse(layout_text)
    compared = [against] if against is not None else []
    read = _read(paths, compared, given, use_cache=not no_cache)
    layout, summaries = read.layout, read.summaries
    _check_ranks(ranks, summaries)
    difference, path = None, None
    if compared:
        earlier = _read(compared, paths, given, use_cache=not no_cache, may_differ=True)
        difference = compare_traces(earlier.summaries, summaries)
    comparison: RankComparison | Unavailable
    comparison = Unavailable("it takes traces of two ranks or more, of the same steps")
    if len(read.recordings) > 1:
        comparison, path = _put_together(read)
    if as_json:
        document = TraceDocument(
            layout=layout if isinstance(layout, Unavailable) else layout.to_dict(),
            traces=tuple(summaries),
            across_ranks=comparison,
            critical_path=path,
            difference=difference,
        )
        show_document(DOCUMENT, document)
        return
    from meshscope.report.trace_diff_text import render_difference
    from meshscope.report.trace_text import render_traces

    screen = choose_screen(context)
    if difference is None:
        text = render_traces(
            summaries,
            comparison,
            screen,
            layout=layout,
            path=path,
            num_rows=num_rows,
            ranks=ranks,
        )
    else:
        text = render_difference(difference, screen, num_rows=num_rows)
    click.echo(text, nl=False, color=True)  # colours were decided when the text was made


def _check_ranks(wanted: Sequence[int], summaries: Sequence[TraceSummary]) -> None:
    known = sorted({one.rank for one in summaries if isinstance(one.rank, int)})
    missing = [rank for rank in wanted if rank not in known]
    if missing:
        there = f"traces of {form.name_ranks(known)}" if known else "no trace that names its rank"
        raise UsageError(f"--rank {missing[0]}: this rank has no trace; there are {there}")


def _put_together(read: "_Read") -> tuple[RankComparison | Unavailable, CriticalPath | Unavailable]:
    """What ranks did together, and the critical path over them."""
    layout = read.layout if isinstance(read.layout, Layout) else None
    try:
        made = make_run(read.recordings, Path(read.recordings[0].source), layout=layout)
    except TraceError as error:
        return Unavailable(str(error)), Unavailable(str(error))
    study = Study(made.run.last_attempt)
    return compare_ranks(study.communication), find_trace_path(study.timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A set of traces."""

    layout: Layout | Unavailable
    summaries: list[TraceSummary]
    recordings: list[TraceRecording]
    """Of several traces: what the path over ranks is found in."""


def _read(
    paths: Sequence[Path],
    beside: Sequence[Path],
    given: Layout | None,
    *,
    use_cache: bool,
    may_differ: bool = False,
) -> _Read:
    """Every trace that can be read; a folder may have a few that cannot.

    What the names of traces that are compared with say of the mesh counts where their own say
    too little: both sets then name axes alike. A set that `may_differ` in size from the layout
    given does without it.
    """
    files = find_traces(paths)
    named = _read_names(files)
    more = {**_read_names(find_traces(beside)), **named} if beside else named
    summaries, recordings = [], []
    layout: Layout | Unavailable = Unavailable("no trace says the world size")
    for trace in read_files(files, use_cache=use_cache):
        if isinstance(layout, Unavailable):
            fits = given is None or trace.world_size == given.world_size
            chosen = given if fits or not may_differ else None
            layout = _find_layout(chosen, named, more, trace)
        known = None if isinstance(layout, Unavailable) else layout
        view = TraceView(trace, known)
        summaries.append(summarize_trace(trace, view=view))
        if len(files) > 1 and not beside:
            recordings.append(record_trace(trace, max_spans=share_spans(files), view=view))
    return _Read(layout=layout, summaries=summaries, recordings=recordings)


_Names = dict[int, dict[str, int]]


def _read_names(files: Sequence[Path]) -> _Names:
    return dict(filter(None, (coordinates_of(str(file)) for file in files)))


def _find_layout(
    given: Layout | None, named: _Names, more: _Names, trace: Trace
) -> Layout | Unavailable:
    """As the user says, who must not contradict the trace; else as the folders' names tell."""
    if given is None:
        layout = infer_layout(named, trace.world_size)
        return infer_layout(more, trace.world_size) if isinstance(layout, Unavailable) else layout
    if not isinstance(trace.world_size, Unavailable):
        check_layout(given, world_size=trace.world_size)
    return given
