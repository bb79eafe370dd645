"""How fast operators ran against what the device can do, from the shapes the profiler recorded.

Counted are matrix products, convolutions and attention, forward; a multiply-add is two operations.
Attention counts every pair of positions, causal or not. The rate is those operations over the
operator's device time, summed over its calls; its share is of the dense peak of the device for the
operator's type (`core.hardware`), float32 against plain float32. Operators of other kinds move
bytes more than they compute, and have none here.

Wrong where the recorded shapes are not those computed with (nested or sparse tensors), and where a
device runs float32 on matrix units (tf32): a share above 1 says so and is left as it is.
"""

import json
import math
from dataclasses import dataclass

from meshscope.core.hardware import find_peak
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_tables import OperatorRow

Shapes = list[list[int]]

PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::matmul": (0, 1),
}
ATTENTION = (
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
HEADS_SECOND = ("aten::_flash_attention_forward", "aten::_efficient_attention_forward")
"""Their inputs are [batch, sequence, heads, width]; the others' [batch, heads, sequence, width]."""
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
        flops = count_flops(row.name, parse_shapes(row.shapes))
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


def count_flops(name: str, shapes: Shapes) -> int | None:
    """Operations of one call; None where they cannot be counted."""
    if name in PRODUCTS:
        left, right = PRODUCTS[name]
        return _count_product(_pick(shapes, left), _pick(shapes, right))
    if name in ATTENTION:
        query, key = _pick(shapes, 0), _pick(shapes, 1)
        return _count_attention(query, key, heads_second=name in HEADS_SECOND)
    if name == "aten::linear":
        inputs, weight = _pick(shapes, 0), _pick(shapes, 1)
        if len(inputs) < 1 or len(weight) != 2 or inputs[-1] != weight[1]:
            return None
        return 2 * math.prod(inputs) * weight[0]
    return None


def _pick(shapes: Shapes, place: int) -> list[int]:
    return shapes[place] if place < len(shapes) else []


def _count_product(left: list[int], right: list[int]) -> int | None:
    """Two matrices, or as many pairs of them; [..., m, k] and [..., k, n]."""
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return None
    if len(right) > 2 and left[:-2] != right[:-2]:
        return None
    return 2 * math.prod(left) * right[-1]


def _count_attention(query: list[int], key: list[int], *, heads_second: bool) -> int | None:
    """Scores and weighted values: two products for each head."""
    if len(query) != 4 or len(key) != 4:
        return None
    batch, heads, width = query[0], query[2 if heads_second else 1], query[3]
    num_queries, num_keys = (query[1], key[1]) if heads_second else (query[2], key[2])
    return 4 * batch * heads * num_queries * num_keys * width


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
