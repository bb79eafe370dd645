"""What commands write to stdout: sections for the terminal there, or one JSON document."""

import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from meshscope.cli import is_color_wanted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshscope.report.encode import Shapes
    from meshscope.report.screen import Screen
    from meshscope.report.section import Section

_PIPE_WIDTH = 100
"""Columns where there is no terminal."""


def is_unicode_shown() -> bool:
    """Whether stdout takes more than ASCII."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def terminal_width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns


def choose_screen(context: click.Context) -> "Screen":
    """As wide as the terminal, with colours and typography where it has them."""
    from meshscope.report.screen import Screen  # Rich is not needed for JSON

    return Screen(
        width=terminal_width(),
        is_colored=is_color_wanted(context),
        is_unicode=is_unicode_shown(),
    )


def show_sections(
    context: click.Context, sections: "Iterable[Section]", *, wraps: bool = True
) -> None:
    """Writes sections for people."""
    from meshscope.report.render.terminal import render_terminal

    text = render_terminal(sections, replace(choose_screen(context), wraps=wraps))
    click.echo(text, nl=False, color=True)  # colours were decided when the text was made


def show_document(
    envelope: tuple[str, int], document: object, shapes: "Shapes | None" = None
) -> None:
    """Writes a document for programs."""
    from meshscope.report.encode import encode

    click.echo(encode(*envelope, document, shapes), nl=False)
