"""FLOPs of a step and peak of a device as a person gives them, on the command line or in Python.

They stand above what a recording has: whoever gives a number wants that one. FLOPs are those of the
whole job, which is what a formula such as 6·N·tokens of the global batch yields.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.errors import UsageError

FLOPS_VARIABLE = "MESHSCOPE_FLOPS_PER_STEP"
PEAK_VARIABLE = "MESHSCOPE_PEAK_TFLOPS"
"""How `meshscope run` hands both to the processes below it."""
_TERA = 1e12
_LEAST_FLOPS = 1e3
_PEAK_TFLOPS = (1e-4, 1e5)
"""From a tenth of a GFLOP/s to beyond any device: outside of it the unit was another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlops:
    """What a person said; None where nothing was said."""

    flops_per_step: float | None = None
    """Model FLOPs of a step, all ranks together."""
    peak_flops_per_s: float | None = None
    """Of one device."""

    def to_environment(self) -> dict[str, str]:
        """What `read_environment` reads back."""
        peak = self.peak_flops_per_s
        found = {
            FLOPS_VARIABLE: self.flops_per_step,
            PEAK_VARIABLE: None if peak is None else peak / _TERA,
        }
        return {name: repr(value) for name, value in found.items() if value is not None}


def check_given(flops_per_step: object = None, peak_tflops: object = None) -> GivenFlops:
    """Numbers or their text; UsageError when one makes no sense or has another unit."""
    flops = _check(
        "FLOPs per step", flops_per_step, "the FLOPs of a step of the whole job, such as 6.2e15"
    )
    peak = _check(
        "peak", peak_tflops, "the dense TFLOP/s of one device, such as 989 (and not 989e12)"
    )
    if flops is not None and flops < _LEAST_FLOPS:
        raise UsageError(f"FLOPs per step: {flops:g} are too few; give FLOPs, not TFLOPs: 6.2e15")
    low, high = _PEAK_TFLOPS
    if peak is not None and not low <= peak <= high:
        raise UsageError(
            f"peak: {peak:g} TFLOP/s is no device's; give the TFLOP/s of one device, such as 989"
        )
    return GivenFlops(flops_per_step=flops, peak_flops_per_s=None if peak is None else peak * _TERA)


def read_environment(environment: Mapping[str, str]) -> GivenFlops:
    """What `meshscope run` was given; UsageError as for `check_given`."""
    return check_given(
        environment.get(FLOPS_VARIABLE) or None, environment.get(PEAK_VARIABLE) or None
    )


def _check(what: str, value: object, expected: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise UsageError(f"{what}: {str(value)[:60]!r} is not a number above 0; give {expected}")
    return number
