"""`meshscope compare`: two runs side by side, for people, CI systems and programs."""

from pathlib import Path

import click

from meshscope.analyze.compare.compare_loss import ABSOLUTE, RELATIVE, Tolerance
from meshscope.cli.locate import open_located, pick_attempt
from meshscope.cli.options import (
    check_redact,
    engine_option,
    page_options,
    warmup_option,
)
from meshscope.cli.page_files import write_compare_page
from meshscope.cli.places import READ, WRITE_FILE
from meshscope.cli.terminal_screen import show_document, show_sections, write_file
from meshscope.report.run_compare import compare_runs
from meshscope.report.run_study import RunStudy
from meshscope.report.sections.compare import (
    DOCUMENT,
    SHAPES,
    Compared,
    make_compare_page,
    make_compare_sections,
)
from meshscope.store.remote.mirror import name_place

_EXIT_FAILED = 7
"""B is beyond what --fail-on or --fail-on-loss allows."""


@click.command("compare", short_help="Compare two runs: step time, budget, loss, settings.")
@click.argument("a", type=READ)
@click.argument("b", type=READ)
@click.option(
    "--fail-on",
    "limit_percent",
    type=click.FloatRange(min=0, max=1e6),
    metavar="PERCENT",
    help="Exit with 7 if the whole 95 % interval of B's slowdown is above this.",
)
@click.option("--fail-on-loss", is_flag=True, help="Exit with 7 if the losses do not agree.")
@click.option("--exact", is_flag=True, help="Losses agree only if every bit does.")
@click.option(
    "--rtol",
    "relative",
    type=click.FloatRange(min=0),
    default=RELATIVE,
    show_default=True,
    help="Relative difference at which two losses still agree.",
)
@click.option(
    "--atol",
    "absolute",
    type=click.FloatRange(min=0),
    default=ABSOLUTE,
    show_default=True,
    help="Absolute difference that is allowed in addition.",
)
@warmup_option(" of both")
@click.option("--attempt-a", type=click.IntRange(min=0), help="Launch of A.  [default: the last]")
@click.option("--attempt-b", type=click.IntRange(min=0), help="Launch of B.  [default: the last]")
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option(
    "--markdown",
    type=WRITE_FILE,
    metavar="FILE",
    help="Also write Markdown to this file.",
)
@page_options
@click.option(
    "--junit",
    type=WRITE_FILE,
    metavar="FILE",
    help="Also write JUnit XML to this file.",
)
@click.pass_context
def command(
    context: click.Context,
    *,
    a: Path,
    b: Path,
    limit_percent: float | None,
    fail_on_loss: bool,
    exact: bool,
    relative: float,
    absolute: float,
    warmup_steps: int | None,
    attempt_a: int | None,
    attempt_b: int | None,
    as_json: bool,
    markdown: Path | None,
    junit: Path | None,
    page: Path | None,
    redact: bool,
) -> None:
    """Shows what changed from run A to run B, and whether B is slower.

    The verdict is about the step period (gaps included) with a 95 % interval: B fails only if the
    whole interval lies beyond the limit. Exit codes: 0 fine or inconclusive, 7 beyond the limit, 2
    usage, 3 a run cannot be read.
    """
    check_redact(page, redact=redact)
    run_a, run_b = _open(a, attempt_a, warmup_steps), _open(b, attempt_b, warmup_steps)
    compared = compare_runs(
        run_a,
        run_b,
        names=(name_place(a), name_place(b)),
        tolerance=Tolerance(absolute=absolute, relative=relative, is_exact=exact),
        limit_ratio=None if limit_percent is None else limit_percent / 100,
        fails_on_loss=fail_on_loss,
    )
    _write_files(compared, markdown, junit)
    if page is not None:
        contents = run_a.report().content, run_b.report().content
        write_compare_page(compared, contents, page, is_redacted=redact)
    if as_json:
        show_document(DOCUMENT, compared, SHAPES)
    else:
        show_sections(context, make_compare_sections(compared))
    if compared.has_failed:
        context.exit(_EXIT_FAILED)


def _open(path: Path, index: int | None, warmup_steps: int | None) -> RunStudy:
    run = open_located(path)
    return RunStudy(run, pick_attempt(run, index), warmup_steps=warmup_steps)


def _write_files(compared: Compared, markdown: Path | None, junit: Path | None) -> None:
    if markdown is not None:
        from meshscope.report.render.markdown import render_markdown

        write_file(render_markdown(make_compare_page(compared)), markdown)
    if junit is not None:
        from meshscope.report.render.junit import render_junit

        write_file(render_junit(compared), junit)
