"""`meshscope doctor`: what is installed, what would be recorded here, and what is missing.

Needs neither rich nor numpy for its text: it is asked where those may be missing.
"""

import textwrap
from pathlib import Path

import click

from meshscope.cli import plain
from meshscope.cli.terminal_screen import show_document, terminal_width
from meshscope.report.doctor.check import DOCUMENT, Check, Examination
from meshscope.report.doctor.examine import examine

_EXIT_BROKEN = 1
_NAME_COLUMNS = 20
_STATE_COLUMNS = 9


@click.command("doctor", short_help="Say what is installed, and what would be recorded here.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option(
    "--torch",
    "asks_torch",
    is_flag=True,
    help="Also import torch, in a process of its own, and ask it for devices and backends "
    "(seconds).",
)
@click.pass_context
def command(context: click.Context, *, folder: Path, as_json: bool, asks_torch: bool) -> None:
    """Says what is installed, what a recording below FOLDER (default: runs) would have, what is
    missing, and the command that gets it.

    Changes nothing and imports no torch. Exit codes: 0 recording and reading work, 1 one of
    them does not.
    """
    examination = examine(folder, asks_torch=asks_torch)
    if as_json:
        show_document(DOCUMENT, examination)
    else:
        click.echo(describe(examination, terminal_width()), nl=False)
    if not (examination.can_record and examination.can_read):
        context.exit(_EXIT_BROKEN)


def describe(examination: Examination, width: int) -> str:
    """The text: a headline, then each subject's checks."""
    record = "works" if examination.can_record else "does not work"
    read = "works" if examination.can_read else "does not work"
    lines = [
        f"meshscope {examination.meshscope_version} on Python {examination.python_version}: "
        f"recording {record}, reading {read}."
    ]
    for title, checks in (
        ("Installed", examination.installed),
        ("What would be recorded here", examination.recorded),
        ("Where the run would be", examination.folder),
    ):
        lines += ["", title]
        for check in checks:
            lines += _describe_check(check, width)
    return "\n".join(lines) + "\n"


def _describe_check(check: Check, width: int) -> list[str]:
    head = f"  {check.state.value:<{_STATE_COLUMNS}}{check.name:<{_NAME_COLUMNS}}"
    indent = " " * len(head)
    wrap = textwrap.TextWrapper(
        width=max(width, len(head) + 40),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    wrap.initial_indent = head
    lines = wrap.wrap(plain(check.found))
    wrap.initial_indent = indent
    if check.meaning:
        lines += wrap.wrap(plain(check.meaning))
    if check.command:
        lines.append(f"{indent}→ {plain(check.command)}")  # whole, so that it can be copied
    return lines
