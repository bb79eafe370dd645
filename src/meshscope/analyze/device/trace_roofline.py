"""How fast operators ran against what the device can do, from the shapes the profiler recorded.

Counted is what `core.flops.count_operator_flops` knows from shapes alone; a multiply-add is two
operations. The rate is those operations over the
operator's device time, summed over its calls; its share is of the dense peak of the device for the
operator's type (`core.hardware`), float32 against plain float32. Operators of other kinds move
bytes more than they compute, and have none here.

Wrong where the recorded shapes are not those computed with (nested or sparse tensors), and where a
device runs float32 on matrix units (tf32): a share above 1 says so and is left as it is.
"""

import json
from dataclasses import dataclass

from meshscope.core.flops import Shapes, count_operator_flops
from meshscope.core.hardware import find_peak
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_tables import OperatorRow

DTYPES = {
    "c10::BFloat16": "bfloat16",
    "BFloat16": "bfloat16",
    "c10::Half": "float16",
    "Half": "float16",
    "float": "float32",
    "Float": "float32",
    "double": "float64",
    "Double": "float64",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
_MAX_SIZE = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRate:
    """One operator and shape."""

    name: str
    shapes: str
    count: int
    device_ns: int
    flops: int
    """Of all calls."""
    flops_per_s: float
    peak_ratio: float | Unavailable


def measure_rates(operators: tuple[OperatorRow, ...], device_name: str) -> tuple[OperatorRate, ...]:
    """The operators whose arithmetic can be counted, most device time first."""
    rates = []
    for row in operators:
        flops = count_operator_flops(row.name, parse_shapes(row.shapes))
        if flops is None or row.device_ns <= 0 or not row.count:
            continue
        per_s = flops * row.count / row.device_ns * 1e9
        rates.append(
            OperatorRate(
                name=row.name,
                shapes=row.shapes,
                count=row.count,
                device_ns=row.device_ns,
                flops=flops * row.count,
                flops_per_s=per_s,
                peak_ratio=_compare_with_peak(per_s, device_name, row.types),
            )
        )
    return tuple(rates)


def parse_shapes(text: str) -> Shapes:
    """`[[2, 3], []]`; an input that is no tensor has no sizes."""
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, list):
        return []
    return [_sizes(entry) for entry in found]


def _sizes(entry: object) -> list[int]:
    if not isinstance(entry, list):
        return []
    is_shape = all(type(size) is int and 0 <= size < _MAX_SIZE for size in entry)
    return entry if is_shape else []


def _compare_with_peak(per_s: float, device_name: str, types: str) -> float | Unavailable:
    if not device_name:
        return Unavailable("the trace does not name the device")
    try:
        found = json.loads(types) if types else []
    except (ValueError, RecursionError):
        found = []
    named = found if isinstance(found, list) else []
    dtype = next((DTYPES[one] for one in named if isinstance(one, str) and one in DTYPES), None)
    if dtype is None:
        return Unavailable("the trace does not say the operator's type")
    peak = find_peak(device_name, dtype)
    return peak if isinstance(peak, Unavailable) else per_s / peak
