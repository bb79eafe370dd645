"""How fast operators ran against what the device can do, from the shapes the profiler recorded.

What a call costs at the least is `core.operator_cost`'s: arithmetic of products, convolutions and
attention, bytes of these and of operators that only move data. The rates are those over the
operator's device time, summed over its calls. A roofline's share is the time the device would need
at its dense peak, or its memory's bandwidth, whichever takes longer, over the time it took. float32
is held against plain float32, unless the kernel's name says that it ran on matrix units (tf32).

Of lists of tensors the profiler gives sizes without types, which the kernel's name tells, and of
long lists neither: an optimizer over many tensors is not counted.

Coverage says of how much device time anything can be said; what is not counted is listed, with its
reason. Communication and copies between host and device are not in it: their limits are links.

Wrong where recorded shapes are not those computed with (nested or sparse tensors), and where
tensors stay in a cache: a share above 1 says so and is left as it is.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.core.flops import COUNTED_OPERATORS, Shapes
from meshscope.core.hardware import TF32, find_bandwidth, find_peak
from meshscope.core.operator_cost import ITEM_BYTES, Call, OperatorCost, Tensor, count_cost
from meshscope.core.unavailable import Unavailable, known
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
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
}
_ITEM_IN_KERNEL = re.compile(
    r"OpaqueType<(?P<size>\d{1,2})|Functor<(?P<type>c10::\w+|float|double)\b"
)
"""Kernels over lists of tensors name the type, or its size, in their templates."""
_NO_OPERATOR = "(no operator)"
_UNTOLD = "the trace does not say which operator launched it"
_REPLAYED = (
    "(graphs)",
    "a trace has neither operators nor shapes of what a graph replays, and nothing ties it to the "
    "operators that it was captured from",
)
_MAX_SIZE = 1 << 40
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRate:
    """One operator and shape."""

    name: str
    shapes: str
    count: int
    device_ns: int
    """Without communication and copies between host and device."""
    flops: int
    """Of all calls; 0 for operators that only move data."""
    flops_per_s: float
    num_bytes: int
    """Of all calls, at least."""
    bytes_per_s: float
    peak_ratio: float | Unavailable
    """Of the arithmetic's dense peak."""
    bandwidth_ratio: float | Unavailable
    """Of the memory's bandwidth."""
    bound: str
    """`arithmetic` or `memory`: what takes longer at the device's peaks; "" where these are not
    known."""
    roofline_ratio: float | Unavailable
    """The time at the peaks over the time it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncounted:
    """Device time of one operator of which nothing can be said."""

    name: str
    device_ns: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Of how much device time the cost is known; sums over events, without those on links."""

    device_ns: int
    counted_ns: int
    arithmetic_ns: int
    """Of the counted: with arithmetic; the rest moves data."""
    unlaunched_ns: int
    """Of `device_ns`: the operator is not in the trace, as of work that was launched before it
    began, or that a graph replays."""
    ratio: float | Unavailable
    """`counted_ns` over `device_ns`."""
    launched_ratio: float | Unavailable
    """`counted_ns` over what operators of the trace launched."""
    roofline_ratio: float | Unavailable
    """Time at the device's peaks over `counted_ns`."""
    uncounted: tuple[Uncounted, ...]
    """The most time first."""


def measure_rates(operators: tuple[OperatorRow, ...], device_name: str) -> tuple[OperatorRate, ...]:
    """The operators whose cost can be counted, most device time first."""
    rates = []
    for row in operators:
        cost = _count(row)
        own_ns = row.device_ns - row.link_ns
        if isinstance(cost, OperatorCost) and own_ns > 0 and row.count:
            rates.append(_rate(row, cost, device_name))
    return tuple(rates)


def measure_coverage(
    operators: Sequence[OperatorRow], rates: Sequence[OperatorRate], graph_ns: int = 0
) -> Coverage:
    """How much of a device's time the rates are of; `graph_ns` is that of work without an operator
    which graphs replayed."""
    whole_ns = sum(row.device_ns - row.link_ns for row in operators)
    counted_ns = sum(one.device_ns for one in rates)
    at_peak = [
        one.roofline_ratio * one.device_ns
        for one in rates
        if not isinstance(one.roofline_ratio, Unavailable)
    ]
    peak_ns = sum(one.device_ns for one in rates if known(one.roofline_ratio) is not None)
    unlaunched_ns = sum(row.device_ns - row.link_ns for row in operators if not row.name)
    nothing = Unavailable("the device did not compute")
    return Coverage(
        device_ns=whole_ns,
        unlaunched_ns=unlaunched_ns,
        launched_ratio=counted_ns / (whole_ns - unlaunched_ns)
        if whole_ns > unlaunched_ns
        else nothing,
        counted_ns=counted_ns,
        arithmetic_ns=sum(one.device_ns for one in rates if one.flops),
        ratio=counted_ns / whole_ns if whole_ns else nothing,
        roofline_ratio=sum(at_peak) / peak_ns
        if peak_ns
        else Unavailable("the device's peaks are not known; name it with --device"),
        uncounted=_list_uncounted(operators, graph_ns),
    )


def _list_uncounted(operators: Sequence[OperatorRow], graph_ns: int) -> tuple[Uncounted, ...]:
    found: dict[tuple[str, str], int] = {}
    if graph_ns:
        found = {_REPLAYED: graph_ns, (_NO_OPERATOR, _UNTOLD): -graph_ns}
    for row in operators:
        cost = _count(row)
        own_ns = row.device_ns - row.link_ns
        if isinstance(cost, Unavailable) and own_ns:
            key = (row.name or _NO_OPERATOR, cost.reason)
            found[key] = found.get(key, 0) + own_ns
    order = sorted(((key, ns) for key, ns in found.items() if ns > 0), key=lambda item: -item[1])
    return tuple(
        Uncounted(name=name, device_ns=ns, reason=reason)
        for (name, reason), ns in order[:_MAX_LISTED]
    )


def _count(row: OperatorRow) -> OperatorCost | Unavailable:
    if not row.name:
        return Unavailable(_UNTOLD)
    if not row.shapes:
        return Unavailable("no shapes recorded (record_shapes=True)")
    inputs = _read_inputs(row)
    if inputs is None:
        return Unavailable("shapes or types of tensors are not recorded")
    if row.name not in COUNTED_OPERATORS and _has_long_list(row.types, inputs):
        return Unavailable("the profiler does not write the shapes of a long list of tensors")
    cost = count_cost(Call(name=row.name, inputs=inputs, values=_read_values(row.values)))
    return cost or Unavailable("its cost is not known from its shapes")


def _rate(row: OperatorRow, cost: OperatorCost, device_name: str) -> OperatorRate:
    flops, num_bytes = cost.flops * row.count, cost.num_bytes * row.count
    own_ns = row.device_ns - row.link_ns
    seconds = own_ns / 1e9
    peak_ratio = (
        _compare_with_peak(flops / seconds, device_name, row)
        if flops
        else Unavailable("it moves data")
    )
    bandwidth = find_bandwidth(device_name) if device_name else Unavailable(_NO_DEVICE)
    bandwidth_ratio = (
        bandwidth if isinstance(bandwidth, Unavailable) else num_bytes / seconds / bandwidth
    )
    sides = [
        (ratio, bound)
        for ratio, bound in ((peak_ratio, "arithmetic"), (bandwidth_ratio, "memory"))
        if not isinstance(ratio, Unavailable)
    ]
    is_whole = len(sides) == (2 if flops else 1)
    ratio, bound = max(sides, default=(0.0, "")) if is_whole else (0.0, "")
    return OperatorRate(
        name=row.name,
        shapes=row.shapes,
        count=row.count,
        device_ns=own_ns,
        flops=flops,
        flops_per_s=flops / seconds,
        num_bytes=num_bytes,
        bytes_per_s=num_bytes / seconds,
        peak_ratio=peak_ratio,
        bandwidth_ratio=bandwidth_ratio,
        bound=bound,
        roofline_ratio=ratio if is_whole else Unavailable("a peak of the device is not known"),
    )


def parse_shapes(text: str) -> Shapes:
    """`[[2, 3], []]`; an input that is no tensor has no sizes."""
    found = _read_list(text)
    return [_sizes(entry) or [] for entry in found or []]


def _read_list(text: str) -> list[object] | None:
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _sizes(entry: object) -> list[int] | None:
    """Of one tensor."""
    if not isinstance(entry, list):
        return None
    is_shape = all(type(size) is int and 0 <= size < _MAX_SIZE for size in entry)
    return entry if is_shape else None


def _find_item_bytes(kernel: str) -> int | None:
    """Of a tensor in a list, as far as a kernel's name tells."""
    found = _ITEM_IN_KERNEL.search(kernel[:2000])
    if found is None:
        return None
    return int(found["size"]) if found["size"] else ITEM_BYTES.get(found["type"].lower())


def _has_long_list(types: str, inputs: tuple[tuple[Tensor, ...], ...]) -> bool:
    """Whether a list has no shapes; an empty one has nothing to compute."""
    kinds = _read_list(types) or []
    return any(kind == _LIST and not own for kind, own in zip(kinds, inputs, strict=True))


def _read_inputs(row: OperatorRow) -> tuple[tuple[Tensor, ...], ...] | None:
    """Every input's tensors; None where a tensor's type is not said. Lists are left out of products
    and attention: there they are scales of the factors, whose type no kernel tells."""
    sizes, kinds = _read_list(row.shapes), _read_list(row.types)
    if sizes is None or kinds is None or len(sizes) != len(kinds):
        return None
    has_scales = row.name in COUNTED_OPERATORS
    item_bytes = _find_item_bytes(row.kernel)
    found: list[tuple[Tensor, ...]] = []
    for entry, kind in zip(sizes, kinds, strict=True):
        is_left_out = has_scales and kind == _LIST
        own = () if is_left_out else _read_tensors(entry, kind, item_bytes)
        if own is None:
            return None
        found.append(own)
    return tuple(found)


def _read_tensors(entry: object, kind: object, item_bytes: int | None) -> tuple[Tensor, ...] | None:
    shape = _sizes(entry)
    is_list = isinstance(entry, list) and shape is None
    item = ITEM_BYTES.get(kind.lower()) if isinstance(kind, str) else None
    if kind == _LIST:
        if not shape and not is_list:
            return ()
        item = item_bytes
    if is_list:
        each = [_sizes(one) for one in entry] if isinstance(entry, list) else []
        if item is None or any(one is None for one in each):
            return None
        return tuple(Tensor(sizes=tuple(one or ()), item_bytes=item) for one in each)
    if shape is None or item is None:
        # A number, a list of numbers, nothing: no tensor.
        return () if not shape else None
    return (Tensor(sizes=tuple(shape), item_bytes=item),)


def _read_values(text: str) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else str(one) for one in _read_list(text) or ())


_NO_DEVICE = "the trace does not name the device; use --device"
_LIST = "TensorList"


def _compare_with_peak(per_s: float, device_name: str, row: OperatorRow) -> float | Unavailable:
    if not device_name:
        return Unavailable(_NO_DEVICE)
    # The first tensor's, not the first that is known: factors stand before their scales.
    tensors = zip(_read_list(row.shapes) or [], _read_list(row.types) or [], strict=False)
    named = next((kind for sizes, kind in tensors if sizes and kind != _LIST), None)
    dtype = DTYPES.get(named) if isinstance(named, str) else None
    if dtype is None:
        return Unavailable("the trace does not say the operator's type")
    is_tf32 = dtype == "float32" and TF32 in row.kernel.lower()
    peak = find_peak(device_name, TF32 if is_tf32 else dtype)
    return peak if isinstance(peak, Unavailable) else per_s / peak
