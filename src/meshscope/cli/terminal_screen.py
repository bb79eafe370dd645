"""What commands write: sections for the terminal, one JSON document, files, and notes to stderr."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshscope.cli import is_color_wanted
from meshscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshscope.report.encode import Shapes
    from meshscope.report.screen import Screen
    from meshscope.report.section import Section

SILENT_VARIABLE = "MESHSCOPE_SILENT_S"
_SILENT_SECONDS = 2.0
"""A command that takes longer says that it is at work; the variable has another number."""
_at_work: list[str] = []
"""What is told to be going on, the innermost last."""
_PIPE_WIDTH = 100
"""Columns where there is no terminal."""


def is_unicode_shown() -> bool:
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def terminal_width() -> int:
    return shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns


def choose_screen(context: click.Context) -> "Screen":
    """As wide as the terminal, with its colours and characters."""
    from meshscope.report.screen import Screen  # Rich is not needed for JSON

    return Screen(
        width=terminal_width(),
        is_colored=is_color_wanted(context),
        is_unicode=is_unicode_shown(),
    )


def say(text: str) -> None:
    """A note to stderr, apart from results."""
    click.echo(f"meshscope: {text}", err=True)


@contextmanager
def tell_work(what: str, silent_s: float | None = None) -> Iterator[None]:
    """Says on stderr that this is still going on: after two seconds, then after each doubling, and
    how many ranks or files are done. Inside another it only says what that one is at."""
    _at_work.append(what)
    _forget_progress()
    if len(_at_work) > 1:
        try:
            yield
        finally:
            _at_work.pop()
            _forget_progress()
        return
    is_over = threading.Event()
    start_s = time.monotonic()

    def tell() -> None:
        pause_s = _choose_silence() if silent_s is None else silent_s
        while not is_over.wait(start_s + pause_s - time.monotonic()):
            say(f"still {_describe_work(what)}, {pause_s:.0f} s so far")
            pause_s *= 2

    teller = threading.Thread(target=tell, name="meshscope-tell", daemon=True)
    teller.start()
    try:
        yield
    finally:
        _at_work.pop()
        is_over.set()
        teller.join()  # nothing is said after the result


def _choose_silence() -> float:
    try:
        return max(float(os.environ.get(SILENT_VARIABLE, "")), 0.1)
    except ValueError:
        return _SILENT_SECONDS


def _forget_progress() -> None:
    """What was counted before was of another work: all files are read, no rank is explained yet."""
    pool = sys.modules.get("meshscope.pool.pool")
    if pool is not None:
        pool.progress.num_done = pool.progress.num_items = 0


def _describe_work(outermost: str) -> str:
    what = _at_work[-1] if _at_work else outermost
    pool = sys.modules.get("meshscope.pool.pool")  # none is loaded to say so
    done = str(pool.progress) if pool is not None else ""
    return f"{what} ({done})" if done else what


def write_file(text: str, path: Path) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def show_sections(
    context: click.Context, sections: "Iterable[Section]", *, wraps: bool = True
) -> None:
    from meshscope.report.render.terminal import render_terminal

    text = render_terminal(sections, replace(choose_screen(context), wraps=wraps))
    click.echo(text, nl=False, color=True)  # colours were decided when the text was made


def show_document(
    envelope: tuple[str, int], document: object, shapes: "Shapes | None" = None
) -> None:
    from meshscope.report.encode import encode

    click.echo(encode(*envelope, document, shapes), nl=False)
