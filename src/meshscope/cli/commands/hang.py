"""`meshscope hang`: which rank holds a stuck or dead job up, and how that is known."""

from pathlib import Path

import click

from meshscope.cli.locate import locate_run, pick_attempt
from meshscope.cli.options import attempt_option, check_redact, page_options
from meshscope.cli.page_files import write_hang_page
from meshscope.cli.places import READ, READ_THERE
from meshscope.cli.terminal_screen import show_document, show_sections
from meshscope.hang.flight_recorder import DUMPS_NAME
from meshscope.hang.hang import diagnose_hang
from meshscope.hang.hang_rules import AFTER_NS
from meshscope.hang.processes import this_machine
from meshscope.report.sections.hang import (
    DOCUMENT,
    SHAPES,
    make_hang_document,
    make_hang_section,
)
from meshscope.store.read.run import open_run
from meshscope.store.remote.mirror import name_place

_EXIT_STUCK = 5
"""A hang or a death was found."""


@click.command("hang", short_help="Name the rank that a stuck or dead job waits for.")
@click.argument("run", type=READ)
@attempt_option
@click.option(
    "--after",
    "after_s",
    type=click.FloatRange(min=0, max=1e9),
    default=AFTER_NS / 1e9,
    show_default=True,
    metavar="SECONDS",
    help="A wait older than this is a hang.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@page_options
@click.option("--all-ranks", is_flag=True, help="Show every rank, not only those held up.")
@click.option(
    "--stacks/--no-stacks",
    default=True,
    show_default=True,
    help="Ask the missing ranks on this host for their Python stacks, by a signal.",
)
@click.option(
    "--flight-recorder",
    type=READ_THERE,
    help=f"Dumps of torch's flight recorder.  [default: RUN/{DUMPS_NAME} if it is there]",
)
@click.pass_context
def command(
    context: click.Context,
    *,
    run: Path,
    attempt_index: int | None,
    after_s: float,
    as_json: bool,
    page: Path | None,
    redact: bool,
    all_ranks: bool,
    stacks: bool,
    flight_recorder: Path | None,
) -> None:
    """Names the ranks that are missing from an operation of RUN, since when, and why.

    It reads the run directory of a running, stuck, killed or finished job, and looks at the
    processes of this host. Exit codes: 0 nothing hangs, 5 a hang or a death, 2 usage, 3
    the run cannot be read.
    """
    check_redact(page, redact=redact)
    directory = locate_run(run)
    opened = open_run(directory)
    attempt = pick_attempt(opened, attempt_index)
    dumps = flight_recorder
    if dumps is None and (directory / DUMPS_NAME).is_dir():
        dumps = directory / DUMPS_NAME
    hang = diagnose_hang(
        attempt,
        this_machine(),
        after_ns=int(after_s * 1e9),
        asks_stacks=stacks,
        flight_recorder=dumps,
    )
    if page is not None:
        write_hang_page(opened, attempt, hang, page, is_redacted=redact)
    if as_json:
        document = make_hang_document(
            hang, run=name_place(opened.path), attempt=attempt.index, shows_all_ranks=all_ranks
        )
        show_document(DOCUMENT, document, SHAPES)
    else:
        section = make_hang_section(hang, shows_all_ranks=all_ranks)
        show_sections(context, [section], wraps=False)
    if hang.is_stuck:
        context.exit(_EXIT_STUCK)
