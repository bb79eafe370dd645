"""`meshscope trace`: what torch.profiler's traces say, of one rank or of many."""

from collections.abc import Sequence
from pathlib import Path

import click

from meshscope.analyze.trace_diff import compare_traces
from meshscope.analyze.trace_ranks import compare_ranks
from meshscope.analyze.trace_summary import TraceSummary, summarize_trace
from meshscope.cli.terminal_screen import choose_screen
from meshscope.errors import TraceError
from meshscope.ingest.kineto import read_trace
from meshscope.ingest.trace_files import find_traces
from meshscope.report.plain_document import encode_plain
from meshscope.store.trace_cache import load_trace, store_trace
from meshscope.store.trace_columns import Trace

DOCUMENT_VERSION = 1


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
    "--no-cache", is_flag=True, help="Neither use nor write the columns kept beside a trace."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="A trace or folder to compare with: what changed from it to PATHS.",
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
) -> None:
    """Says where the time of devices went in PATHS: traces, or folders with traces below them.

    JSON of Kineto or Chrome, plain, gzip or zstd. Several ranks of a job are put together. Exit
    codes: 0 fine, 2 usage, 3 a trace cannot be read.
    """
    summaries = _summarize(paths, use_cache=not no_cache)
    difference = None
    if against is not None:
        difference = compare_traces(_summarize([against], use_cache=not no_cache), summaries)
    comparison = compare_ranks(summaries)
    if as_json:
        document = {
            "document": "meshscope-trace",
            "document_version": DOCUMENT_VERSION,
            "traces": summaries,
            "across_ranks": comparison,
            "difference": difference,
        }
        click.echo(encode_plain(document), nl=False)
        return
    from meshscope.report.trace_text import render_difference, render_traces

    screen = choose_screen(context)
    if difference is None:
        text = render_traces(summaries, comparison, screen, num_rows=num_rows)
    else:
        text = render_difference(difference, screen, num_rows=num_rows)
    click.echo(text, nl=False, color=True)  # colours were decided when the text was made


def _summarize(paths: Sequence[Path], *, use_cache: bool) -> list[TraceSummary]:
    """Every trace that can be read; a folder may have a few that cannot."""
    files = find_traces(paths)
    summaries = []
    for file in files:
        try:
            summaries.append(summarize_trace(_load(file, use_cache=use_cache)))
        except TraceError as error:
            if len(files) == 1:
                raise
            click.echo(f"meshscope: left out: {error}", err=True)
    if not summaries:
        raise TraceError(f"none of {len(files)} files could be read")
    return summaries


def _load(path: Path, *, use_cache: bool) -> Trace:
    trace = load_trace(path) if use_cache else None
    if trace is None:
        trace = read_trace(path)
        if use_cache:
            store_trace(path, trace)
    return trace
