"""`--engine`: who reads files and ranks (docs/cluster.md)."""

from collections.abc import Callable
from typing import Any

import click

from meshscope.pool.pool import ENGINES, use_engine


def _use(context: click.Context, _param: click.Parameter, name: str) -> None:
    if not context.resilient_parsing:
        context.with_resource(use_engine(name))


def engine_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option; the engine is in use until the command ends."""
    return click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default="local",
        show_default=True,
        expose_value=False,
        callback=_use,
        help="Who reads ranks and traces: this machine's cores, or workers of a Ray cluster "
        "(RAY_ADDRESS) or a Dask scheduler (DASK_SCHEDULER_ADDRESS).",
    )(command)
