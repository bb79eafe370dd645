"""The terminal a command writes to, as the report's screens want it described."""

import shutil
import sys
from typing import TYPE_CHECKING

import click

from meshscope.cli import is_color_wanted

if TYPE_CHECKING:
    from meshscope.report.screen import Screen

PIPE_WIDTH = 100
"""Columns where there is no terminal."""


def is_unicode_shown() -> bool:
    """Whether stdout takes more than ASCII."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def terminal_width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((PIPE_WIDTH, 24)).columns


def choose_screen(context: click.Context) -> "Screen":
    """As wide as the terminal, with colours and typography where it has them."""
    from meshscope.report.screen import Screen  # Rich is not needed for JSON

    return Screen(
        width=terminal_width(),
        is_colored=is_color_wanted(context),
        is_unicode=is_unicode_shown(),
    )
