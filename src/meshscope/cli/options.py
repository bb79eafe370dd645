"""Options that several commands have."""

from collections.abc import Callable
from typing import Any

import click

from meshscope.cli.places import WRITE_FILE
from meshscope.errors import UsageError
from meshscope.pool.pool import ENGINES, use_engine

Command = Callable[..., Any]

attempt_option = click.option(
    "--attempt",
    "attempt_index",
    type=click.IntRange(min=0),
    help="Which launch of the job, counted from 0.  [default: the last]",
)


def warmup_option(what: str) -> Callable[[Command], Command]:
    """Adds --warmup; `what` says what the first steps are left out of."""
    return click.option(
        "--warmup",
        "warmup_steps",
        type=click.IntRange(min=0),
        help=f"First steps to leave out{what}.  [default: 1 if there are more than 3]",
    )


def top_option(what: str) -> Callable[[Command], Command]:
    """Adds --top, how many rows of a table there are."""
    return click.option(
        "--top", "num_rows", type=click.IntRange(min=1), default=10, show_default=True, help=what
    )


def page_options(command: Command) -> Command:
    """Adds --html and --redact."""
    redact = click.option(
        "--redact", is_flag=True, help="Leave hosts, paths and command lines out of the page."
    )
    page = click.option(
        "--html",
        "page",
        type=WRITE_FILE,
        metavar="FILE",
        help="Also write the interactive page to this file; it needs no network.",
    )
    return page(redact(command))


def check_redact(page: object, *, redact: bool) -> None:
    """Raises UsageError where there is no page to leave something out of."""
    if redact and not page:
        raise UsageError("--redact is for the page; add --html FILE")


def flops_options(command: Command) -> Command:
    """Adds --flops-per-step and --peak-tflops."""
    peak = click.option(
        "--peak-tflops",
        metavar="T",
        help="Dense peak of one device in TFLOP/s, for MFU.  [default: by the device's name]",
    )
    flops = click.option(
        "--flops-per-step",
        metavar="F",
        help="Model FLOPs of a step of the whole job, for MFU, such as 6.2e15.  [default: counted]",
    )
    return flops(peak(command))


def _use_engine(context: click.Context, _param: click.Parameter, name: str) -> None:
    if not context.resilient_parsing:
        context.with_resource(use_engine(name))


engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="local",
    show_default=True,
    expose_value=False,
    callback=_use_engine,
    help="Who reads ranks and traces: this machine's cores, or workers of a Ray cluster "
    "(RAY_ADDRESS) or a Dask scheduler (DASK_SCHEDULER_ADDRESS).",
)
"""Who reads files and ranks (docs/cluster.md); the engine is in use until the command ends."""
