"""The arithmetic rate a device reaches at best, measured: the fastest of some matrix products.

For devices whose peak stands in no table, processors first of all. The matrices are large enough to
leave the caches' latency behind and small enough to take milliseconds. It is what this process can
reach with the threads it has while nothing else runs: measured beside other work it is too low, and
an MFU made with it too high.
"""

import time
from dataclasses import dataclass
from typing import Any

from meshscope.core.hardware import TF32
from meshscope.errors import CaptureError

_PEAK_SECONDS = 0.3
"""How long the fastest product is looked for, at least."""
_CPU_GEMM_SIZE = 1024
_DEVICE_GEMM_SIZE = 8192
_NUM_WARMUP = 2


def effective_dtype(torch: Any, dtype: str, device_type: str) -> str:
    """What the matrix units compute in: tf32 where the program lets float32 become that."""
    if dtype != "float32" or device_type != "cuda" or torch.version.cuda is None:
        return dtype
    return TF32 if torch.backends.cuda.matmul.allow_tf32 else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """The fastest of some square matrix products."""

    flops_per_s: float
    dtype: str
    device: str
    size: int
    num_products: int


def measure_gemm_peak(
    torch: Any, dtype: Any = None, device: Any = None, size: int | None = None,
    seconds: float = _PEAK_SECONDS,
) -> MeasuredPeak:  # fmt: skip
    """Multiplies two square matrices again and again; waits for the device, so not in training."""
    on_device = torch.device(device if device is not None else _usual_device(torch))
    kind = torch.float32 if dtype is None and on_device.type == "cpu" else dtype or torch.bfloat16
    kind = getattr(torch, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise CaptureError(f"a peak is measured with a floating-point dtype, not {dtype}")
    size = size or (_CPU_GEMM_SIZE if on_device.type == "cpu" else _DEVICE_GEMM_SIZE)
    with torch.no_grad():
        left = torch.ones(size, size, dtype=kind, device=on_device)
        result = torch.empty_like(left)
        best_ns, number = _time_products(torch, left, result, on_device, int(seconds * 1e9))
    name = effective_dtype(torch, str(kind).removeprefix("torch."), on_device.type)
    return MeasuredPeak(
        flops_per_s=2.0 * size**3 / (best_ns / 1e9),
        dtype=name,
        device=str(on_device),
        size=size,
        num_products=number,
    )


def _usual_device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"


def _time_products(
    torch: Any, left: Any, result: Any, on_device: Any, budget_ns: int
) -> tuple[int, int]:
    """Time of the fastest product, after two that warm up, and how many there were."""
    wait = (lambda: None) if on_device.type == "cpu" else getattr(torch, on_device.type).synchronize
    best_ns, number, start_ns = 0, 0, time.monotonic_ns()
    while number < 5 or time.monotonic_ns() - start_ns < budget_ns:
        wait()
        before_ns = time.monotonic_ns()
        torch.matmul(left, left, out=result)
        wait()
        taken_ns = max(time.monotonic_ns() - before_ns, 1)
        number += 1
        if number > _NUM_WARMUP:
            best_ns = min(best_ns or taken_ns, taken_ns)
    return best_ns, number
