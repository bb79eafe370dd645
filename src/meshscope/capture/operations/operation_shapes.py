"""What torch's communication operations are called, and where they keep what we want to know.

The running torch is asked which operations its dispatcher has and what their arguments are called,
instead of keeping a list per version: one that this version of meshscope has never heard of is
still seen, as a custom operation under torch's name. Methods of `ProcessGroup` cannot be asked;
their arguments are in `_METHOD_ARGUMENTS`. Kind, size and peer follow from the names, by the same
rules for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshscope.core.operations import DTYPES, Kind

NAMESPACE = "c10d"
_NOT_OPERATIONS = frozenset(("check_for_nan",))
"""In torch's list, but nothing is communicated."""

_KINDS = {
    "allreduce": Kind.ALL_REDUCE,
    "all_reduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "gather": Kind.GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "broadcast": Kind.BROADCAST,
    "reduce": Kind.REDUCE,
    "scatter": Kind.SCATTER,
    "send": Kind.SEND,
    "recv": Kind.RECV,
    "barrier": Kind.BARRIER,
    "monitored_barrier": Kind.BARRIER,
    "alltoall": Kind.ALL_TO_ALL,
    "all_gather": Kind.ALL_GATHER,
    "all_to_all": Kind.ALL_TO_ALL,
}
_SUFFIXES = (
    "_any_source", "_anysource", "_into_tensor", "_tensor", "_coalesced", "_base", "_single",
    "_out",
)  # fmt: skip
_OUTPUT_INPUT = ("output_tensors", "input_tensors")
_INTO = ("output", "input")
_LISTS = ("outputs", "inputs")
_METHOD_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "allreduce": ("tensors",),
    "allreduce_coalesced": ("tensors",),
    "broadcast": ("tensors",),
    "reduce": ("tensors",),
    "allgather": _OUTPUT_INPUT,
    "allgather_coalesced": ("output_lists", "input_list"),
    "_allgather_base": _INTO,
    "all_gather_single": _INTO,
    "allgather_into_tensor_coalesced": _LISTS,
    "all_gather_single_coalesced": _LISTS,
    "gather": _OUTPUT_INPUT,
    "gather_into_tensor": _INTO,
    "gather_single": _INTO,
    "scatter": _OUTPUT_INPUT,
    "reduce_scatter": _OUTPUT_INPUT,
    "_reduce_scatter_base": ("outputTensor", "inputTensor"),
    "reduce_scatter_single": ("outputTensor", "inputTensor"),
    "reduce_scatter_tensor_coalesced": _LISTS,
    "reduce_scatter_single_coalesced": _LISTS,
    "alltoall": _OUTPUT_INPUT,
    "alltoall_base": _INTO,
    "all_to_all_single": _INTO,
    "send": ("tensors", "dstRank", "tag"),
    "recv": ("tensors", "srcRank", "tag"),
    "recv_anysource": ("tensors", "tag"),
    "barrier": (),
    "monitored_barrier": (),
}
"""The first arguments of each method, as far as they matter."""
_MIXED = DTYPES.index("(mixed)")
_OTHER = DTYPES.index("(other)")

_Measure = Callable[[tuple[Any, ...], int], tuple[int, int, Any]]
"""Arguments and number of ranks → size in bytes, dtype code, one of the tensors or None."""


def kind_of(op_name: str) -> Kind:
    """`_reduce_scatter_base_` → REDUCE_SCATTER; CUSTOM for a name this version does not know."""
    plain = op_name.strip("_")
    is_trimmed = True
    while is_trimmed:
        is_trimmed = False
        for suffix in _SUFFIXES:
            if plain.endswith(suffix):
                plain = plain.removesuffix(suffix)
                is_trimmed = True
    return _KINDS.get(plain, Kind.CUSTOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationShape:
    """Where an operation keeps what we want to know."""

    op_name: str
    overload: Any
    kind: Kind
    kind_code: int
    group_index: int
    async_index: int
    """Index of the flag `async_op`; beyond the arguments when there is none."""
    is_async_by_default: bool
    """What it means when the flag is left out; an operation without one is always a handle."""
    peer_index: int
    """Index of root, source or destination (a rank within the group); -1 when there is none."""
    tag_index: int
    output_index: int
    """Index of the tensors that hold the result; -1 when there are none."""
    size_index: int
    """Index of the tensors whose bytes are the operation's size; -1 when there are none."""
    is_size_per_rank: bool
    """Whether that is one rank's share of it."""
    measure: _Measure
    dtype_codes: dict[Any, int]


def find_shapes(torch: Any) -> list[OperationShape]:
    """Every operation of the running torch that takes a process group."""
    shapes = []
    codes = dtype_codes_of(torch)
    names = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{NAMESPACE}::")
    }
    for name in sorted(names - _NOT_OPERATIONS):
        packet = getattr(torch.ops.c10d, name)
        for overload_name in packet.overloads():
            shape = _read_shape(name, getattr(packet, overload_name), codes)
            if shape is not None:
                shapes.append(shape)
    return shapes


def dtype_codes_of(torch: Any) -> dict[Any, int]:
    """Number formats of the running torch and their codes."""
    codes = {}
    for code, name in enumerate(DTYPES):
        dtype = getattr(torch, name, None) if name.isidentifier() else None
        if dtype is not None:
            codes[dtype] = code
    return codes


def _read_shape(name: str, overload: Any, codes: dict[Any, int]) -> OperationShape | None:
    arguments = overload._schema.arguments
    names = [argument.name for argument in arguments]
    types = [str(argument.type) for argument in arguments]
    groups = [index for index, text in enumerate(types) if text.endswith("ProcessGroup")]
    if not groups:
        return None
    kind = kind_of(name)
    beyond = len(names)
    async_index = _find(names, "async_op")
    tensors = [index for index, text in enumerate(types) if "Tensor" in text and "?" not in text]
    outputs = [index for index in tensors if names[index].startswith("output")]
    size_index, is_size_per_rank = _find_size(kind, names, tensors)
    return OperationShape(
        op_name=name,
        overload=overload,
        kind=kind,
        kind_code=int(kind),
        group_index=groups[0],
        async_index=async_index if async_index >= 0 else beyond,
        is_async_by_default=name != "monitored_barrier_",
        peer_index=_find(names, "root_rank", "src", "dst"),
        tag_index=_find(names, "tag"),
        output_index=(outputs or tensors or [-1])[0],
        size_index=size_index,
        is_size_per_rank=is_size_per_rank,
        measure=_make_measure(size_index, is_size_per_rank, codes),
        dtype_codes=codes,
    )


def _find(names: Sequence[str], *wanted: str) -> int:
    return next((index for index, text in enumerate(names) if text in wanted), -1)


def _find_size(kind: Kind, names: Sequence[str], tensors: list[int]) -> tuple[int, bool]:
    """Which argument an operation's size is read from (see `core.operations`), and whether that is
    one rank's share of it."""
    inputs = [index for index in tensors if names[index].startswith("input")]
    outputs = [index for index in tensors if names[index].startswith("output")]
    if kind is Kind.BARRIER or not tensors:
        return -1, False
    if kind is Kind.GATHER and inputs:  # only the root has outputs; every rank has an input
        return inputs[0], True
    if kind is Kind.SCATTER and outputs:
        return outputs[0], True
    whole = {
        Kind.ALL_GATHER: outputs,
        Kind.REDUCE_SCATTER: inputs,
        Kind.ALL_TO_ALL: inputs,
    }.get(kind, tensors)
    return (whole or tensors)[0], False


def _make_measure(size_index: int, is_size_per_rank: bool, codes: dict[Any, int]) -> _Measure:  # noqa: FBT001
    def measure(args: tuple[Any, ...], num_ranks: int) -> tuple[int, int, Any]:
        if size_index < 0:
            return 0, 0, None
        size_bytes, dtype, tensor = add_up(args[size_index], codes)
        return size_bytes * (num_ranks if is_size_per_rank else 1), dtype, tensor

    return measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Where a method of `ProcessGroup` keeps what we want to know; as in `OperationShape`."""

    kind: Kind
    names: tuple[str, ...]
    """Names of its arguments, as far as they matter."""
    size_index: int
    is_size_per_rank: bool
    peer_index: int
    """Index of the other rank of a message."""
    tag_index: int


def _read_method(name: str) -> Method:
    kind, names = kind_of(name), _METHOD_ARGUMENTS[name]
    tensors = [i for i, text in enumerate(names) if text.startswith(("tensors", "in", "out"))]
    size_index, is_size_per_rank = _find_size(kind, names, tensors)
    return Method(
        kind=kind,
        names=names,
        size_index=size_index,
        is_size_per_rank=is_size_per_rank,
        peer_index=_find(names, "srcRank", "dstRank"),
        tag_index=_find(names, "tag"),
    )


METHODS = {name: _read_method(name) for name in _METHOD_ARGUMENTS}


def covers(shapes: list[OperationShape]) -> bool:
    """Whether every operation of the running torch has a method that is known here."""
    known = {name.strip("_") for name in METHODS}
    names = {shape.op_name.strip("_").replace("any_source", "anysource") for shape in shapes}
    return names <= known


def add_up(value: Any, codes: dict[Any, int]) -> tuple[int, int, Any]:
    """Bytes, dtype code and first tensor of a tensor, a list of them, or a list of lists."""
    if type(value) is list:
        if len(value) == 1:  # the usual case, and the hot one
            return add_up(value[0], codes)
        if not value:
            return 0, 0, None
        parts = [add_up(part, codes) for part in value]
        found = {code for _, code, tensor in parts if tensor is not None}
        size_bytes = sum(part[0] for part in parts)
        first = next((part[2] for part in parts if part[2] is not None), None)
        return size_bytes, found.pop() if len(found) == 1 else _MIXED if found else 0, first
    try:
        size_bytes = value.nbytes
    except RuntimeError:  # a sparse tensor: what travels are its indices and values
        size_bytes = value._values().nbytes + value._indices().nbytes
    return size_bytes, codes.get(value.dtype, _OTHER), value
