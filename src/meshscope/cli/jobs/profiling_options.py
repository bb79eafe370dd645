"""The options of `run` and `train` that take traces: a switch, and when, where and what."""

from collections.abc import Callable
from typing import Any

import click

from meshscope.capture.profiling.settings import DEFAULT_TEXT, parse_settings


def profiling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --profiling and --trace-windows to a command."""
    windows = click.option(
        "--trace-windows",
        metavar="TEXT",
        help="Which steps and ranks to trace, and what, such as "
        "'skip=5,active=2,ranks=stages,shapes' (docs/profiling.md); implies --profiling.",
    )
    switch = click.option(
        "--profiling",
        is_flag=True,
        help="Trace one step on one rank per pipeline stage with torch.profiler, and record what "
        "the memory of one step on every rank is used for (meshscope memory RUN).",
    )
    return switch(windows(function))


def profiling_text(*, is_wanted: bool, text: str | None) -> str | None:
    """The settings for ranks, None if nothing is wanted; UsageError if they are wrong."""
    if text is not None:
        parse_settings(text)
    return text or (DEFAULT_TEXT if is_wanted else None)
