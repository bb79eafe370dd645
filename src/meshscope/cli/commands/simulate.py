"""`meshscope simulate`: what a run would have taken, had something been different."""

from pathlib import Path

import click

from meshscope.cli.locate import open_located, pick_attempt
from meshscope.cli.options import attempt_option, warmup_option
from meshscope.cli.places import READ
from meshscope.cli.terminal_screen import show_document, show_sections
from meshscope.errors import UsageError
from meshscope.ingest.straggler.straggler_trace import find_trace_file
from meshscope.report.sections.simulate import DOCUMENT, SHAPES, make_simulation_section
from meshscope.simulate.edit_text import FORMS, parse_edit
from meshscope.simulate.simulation import simulate_run, simulate_trace
from meshscope.store.read.run import is_run_directory


@click.command("simulate", short_help="Replay a run with other durations.")
@click.argument("run", type=READ)
@click.option(
    "--edit",
    "edit_texts",
    multiple=True,
    metavar="EDIT",
    help=f"What to change; may be given several times, each is priced alone.  [{FORMS}]",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@attempt_option
@warmup_option("")
@click.pass_context
def command(
    context: click.Context,
    *,
    run: Path,
    edit_texts: tuple[str, ...],
    as_json: bool,
    attempt_index: int | None,
    warmup_steps: int | None,
) -> None:
    """Replays RUN: a run directory, a folder with one run below it, or a straggler trace.

    A straggler trace is a Parquet file of the open form, or a folder with one trace-*.parquet.
    Without edits it shows how much slower the job was than an even one, which ranks cause it, and
    the critical path. With edits it shows what each saves per step. Every answer comes with the
    error of the replay against the clock; from 5 % on there is no answer.
    """
    wanted = [parse_edit(text) for text in edit_texts]
    trace = None if is_run_directory(run) else find_trace_file(run)
    if trace is not None:
        if attempt_index is not None or warmup_steps is not None:
            raise UsageError(
                f"{trace} is a straggler trace, which has neither attempts nor a warm-up; "
                f"remove --attempt and --warmup"
            )
        simulation = simulate_trace(trace, wanted)
    else:
        opened = open_located(run)
        attempt = pick_attempt(opened, attempt_index)
        simulation = simulate_run(attempt, wanted, name=opened.path.name, warmup_steps=warmup_steps)
    if as_json:
        show_document(DOCUMENT, simulation, SHAPES)
    else:
        show_sections(context, [make_simulation_section(simulation)], wraps=False)
