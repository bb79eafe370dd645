"""`meshscope memory`: what ranks' memory was used for, at every point of a profile."""

from pathlib import Path

import click

from meshscope.analyze.memory.memory_attribution import summarize_memory
from meshscope.cli.locate import locate_run
from meshscope.cli.options import top_option
from meshscope.cli.places import READ, WRITE_FOLDER
from meshscope.cli.terminal_screen import show_document, show_sections
from meshscope.errors import UsageError
from meshscope.report.sections.memory import DOCUMENT, make_memory_section
from meshscope.store.read.memory_points import read_memory


@click.command("memory", short_help="Show what the memory of ranks was used for.")
@click.argument("run", type=READ)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document, in exact bytes.")
@click.option("--rank", type=click.IntRange(min=0), help="The rank to show in full.")
@top_option("Modules to list.")
@click.option(
    "--html",
    "html_folder",
    type=WRITE_FOLDER,
    help="Also write sunburst pages into this folder; they need no network.",
)
@click.pass_context
def command(
    context: click.Context,
    *,
    run: Path,
    as_json: bool,
    rank: int | None,
    num_rows: int,
    html_folder: Path | None,
) -> None:
    """Shows what filled the memory of RUN's ranks, by category and module, beside the allocator.

    RUN needs a memory profile: record it with `meshscope run --profiling` or `meshscope train
    --profiling`, or call `Recorder.profile_memory` in the program. Exit codes: 0 fine, 2 usage,
    3 there is no profile.
    """
    recordings = read_memory(locate_run(run))
    overview = summarize_memory(recordings)
    if rank is not None and rank not in {one.rank for one in overview.ranks}:
        known = ", ".join(str(one.rank) for one in overview.ranks[:16])
        raise UsageError(f"rank {rank} has no memory profile; these ranks have one: {known}")
    if html_folder is not None:
        from meshscope.report.render.sunburst import write_sunbursts

        written = write_sunbursts(recordings, overview, html_folder)
        click.echo(f"meshscope: {len(written)} pages; start with {written[-1]}", err=True)
    if as_json:
        show_document(DOCUMENT, overview)
    else:
        show_sections(context, [make_memory_section(overview, num_rows=num_rows, rank=rank)])
