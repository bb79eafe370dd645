"""What a program says, or lets be counted, about its arithmetic: FLOPs of a step, and the peak.

Both go into the journal, as lines that readers find in `updates`; what is known before the run is
open is written when it opens. The last word counts. Numbers are checked here, so that a slip
(a rate in TFLOP/s, a None) is an error of the recorder's and not a wrong MFU.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshscope.capture.model.flops import CountedFlops, count_model_flops
from meshscope.capture.model.gemm_peak import MeasuredPeak, effective_dtype, measure_gemm_peak
from meshscope.core.config.given_flops import read_environment
from meshscope.core.hardware import normalise_dtype
from meshscope.errors import CaptureError, UsageError

_LEAST_PEAK_FLOPS_PER_S = 1e8
"""A slower device than any that trains: the number was in other units."""
PER_STEP = "step"
_PER_MICROBATCH = "microbatch"


class ModelFacts:
    """FLOPs and peak of one process, as far as they are known."""

    def __init__(self, write: Callable[..., None]) -> None:
        """`write` adds a line to the journal, or does nothing while there is none."""
        self._write = write
        self.lines: dict[str, dict[str, object]] = {}
        """Facts by kind, for the journal of a run that opens later."""

    def write_all(self) -> None:
        """Writes the facts into a journal that was just opened, and what `meshscope run` was given.

        What is wrong there was said by the launcher, before anything started."""
        with contextlib.suppress(UsageError):
            given = asdict(read_environment(os.environ))
            if any(given.values()):
                self._write("update", given_flops=given)
        for name, fields in self.lines.items():
            self._write("update", **{name: fields})

    def _say(self, name: str, fields: dict[str, object]) -> None:
        self.lines[name] = fields
        self._write("update", **{name: fields})

    def set_flops(
        self,
        model_flops: float,
        hardware_flops: float | None,
        *,
        per: str,
        source: str,
        dtype: str | None,
    ) -> None:
        """FLOPs of this rank; `hardware_flops` None: not known how much is computed again."""
        model = _positive("model FLOPs", model_flops)
        hardware = None if hardware_flops is None else _positive("hardware FLOPs", hardware_flops)
        if hardware is not None and hardware < model:
            raise CaptureError(f"hardware FLOPs ({hardware:g}) are less than the model's")
        kind, device = _device_in_use()
        if dtype is not None:
            dtype = effective_dtype(sys.modules.get("torch"), normalise_dtype(dtype), kind)
        fields: dict[str, object] = {
            "model_flops": model,
            "hardware_flops": hardware,
            "per": per,
            "source": str(source),
            "dtype": dtype,
            "device": device,
        }
        self._say("flops", fields)

    def count(
        self,
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss_of: Callable[[Any], Any] | None,
        *,
        is_real: bool,
    ) -> CountedFlops:
        """Counts one forward and backward and notes it as what a microbatch takes."""
        torch = sys.modules.get("torch")
        if torch is None:
            raise CaptureError("count_flops needs torch, and this program has not imported it")
        found = count_model_flops(torch, model, args, kwargs, loss_of, is_real=is_real)
        if not found.model_flops:
            raise CaptureError("no operation with a known number of FLOPs was seen")
        without = ", ".join(found.uncounted)
        self.set_flops(
            found.model_flops,
            found.hardware_flops,
            per=_PER_MICROBATCH,
            source="counted on one forward and backward" + (f", without {without}" * bool(without)),
            dtype=found.main_dtype,
        )
        return found

    def set_peak(self, flops_per_s: float, dtype: str, source: str) -> None:
        """The rate one device reaches at best, FLOP/s."""
        rate = _positive("the peak", flops_per_s)
        if rate < _LEAST_PEAK_FLOPS_PER_S:
            raise CaptureError(f"a peak of {rate:g} FLOP/s: it is given in FLOP/s, not in TFLOP/s")
        device = _device_in_use()[1]
        self._say(
            "peak",
            {
                "flops_per_s": rate,
                "dtype": normalise_dtype(str(dtype)),
                "source": str(source),
                "device": device,
            },
        )

    def measure_peak(self, dtype: Any, device: Any) -> MeasuredPeak:
        """Measures matrix products, and notes the fastest."""
        torch = sys.modules.get("torch")
        if torch is None:
            raise CaptureError("measure_peak needs torch, and this program has not imported it")
        found = measure_gemm_peak(torch, dtype, device)
        self.set_peak(
            found.flops_per_s,
            found.dtype,
            f"measured: the fastest of {found.num_products} products of {found.size}² matrices on "
            f"{found.device}",
        )
        return found


def _positive(what: str, value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise CaptureError(f"{what}: {value!r} is not a number above 0")
    return number


def _device_in_use() -> tuple[str, str | None]:
    """Type and name of the accelerator that the program computes on; without one, the CPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "cpu", None
    return "cuda", str(torch.cuda.get_device_name())
