"""The options of `run` and `report` that give FLOPs and peak, for MFU."""

from collections.abc import Callable
from typing import Any

import click


def flops_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --flops-per-step and --peak-tflops to a command."""
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
    return flops(peak(function))
