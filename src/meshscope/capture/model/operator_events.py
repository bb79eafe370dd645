"""FLOPs of what really ran, from the operators that torch's profiler saw and their shapes.

Events come as each thread made them, begins and ends in order. Only the innermost operator with a
formula counts: `linear` is an `addmm`, and a sharded tensor's product is one of its local parts.
Forward is what runs outside of the autograd engine with gradients enabled: an operator then has a
sequence number. What has none there is an evaluation, or a model that is not trained. What has one
inside of the engine is a forward made again: HFU counts it, MFU does not. An optimizer's own
products are neither; but what the engine has a node for was the forward of a closure, inside of
which Lightning and L-BFGS train.

A convolution's shapes do not tell its stride: its output's shape is that of the gradient in its
backward. Which gradients were wanted is seen by what comes next in the engine.

Checkpointing stops a recomputation where the last saved tensor is met again, which is inside of an
operator that saves its inputs and has not computed yet: such a one, last and with nothing inside,
does not count.

Wrong where backward itself is differentiated (`create_graph`): those products pass for recomputed
ones. Not seen: kernels that are no operators of torch, such as those that compiled code or other
libraries launch by themselves.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from meshscope.capture.model.flops import CountedFlops
from meshscope.core.flops import COUNTED_OPERATORS, count_operator_flops

_ENGINE = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_CONVOLUTION = "aten::convolution"
_CONVOLUTION_BACKWARD = "aten::convolution_backward"
_DETACH = "aten::detach"
_TRANSPOSED = "aten::conv_transpose"
_RECURRENT = ("aten::_cudnn_rnn", "aten::mkldnn_rnn_layer", "aten::miopen_rnn")
_QUIET_NAMESPACES = frozenset(
    (
        "aten", "prim", "prims", "profiler", "autograd", "torch", "c10d", "c10d_functional",
        "_c10d_functional", "_c10d_functional_autograd", "fsdp", "symm_mem", "_dtensor", "inductor",
    )
)  # fmt: skip
"""Their operators multiply nothing, or are counted by name."""
_FUNCTION_SCOPE = 0
_BACKWARD_SCOPE = 1
_FORWARD, _BACKWARD, _RECOMPUTED, _OPTIMIZING, _UNTRAINED = range(5)
_MAX_UNCOUNTED = 20
_EVENTS_AT_ONCE = 8
_REENTRANT = "CheckpointFunctionBackward"

Shape = tuple[int, ...]


class Event(Protocol):
    """What is read of an event of torch's profiler."""

    def kind(self) -> str: ...
    def name(self) -> str: ...
    def shapes(self) -> list[list[int]]: ...
    def sequence_nr(self) -> int: ...
    def scope(self) -> int: ...
    def handle(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCount:
    """The FLOPs of some time of a program."""

    flops: CountedFlops
    untrained_flops: int
    """Forward without gradients: an evaluation, a frozen teacher. Not in `flops`."""
    num_products: int
    """Operators counted."""
    has_compiled: bool
    """Compiled code ran: its own kernels are not seen."""


class _Frame:
    """An operator that has begun and not ended."""

    __slots__ = ("event", "is_compiled", "is_opaque", "is_started", "name", "part", "was_counted")

    def __init__(self, name: str, event: Event | None, part: int) -> None:
        self.name = name
        self.event = event
        self.part = part
        self.was_counted = False
        """Something inside of it was."""
        self.is_opaque = False
        """Nothing inside of it is to be counted."""
        self.is_compiled = False
        self.is_started = False
        """Something happened inside of it beside saving its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    part: int
    input: Shape
    weight: Shape
    gradient: Shape = ()
    """Of the output; empty of a forward."""
    is_compiled: bool = False


class _Tally:
    def __init__(self, threads: Sequence[Sequence[Event]]) -> None:
        self._threads = threads
        self._node_numbers: set[int] | None = None
        self.by_part = [0, 0, 0, 0, 0]
        self.num_products = 0
        self.uncounted: set[str] = set()
        self.has_compiled = False
        self.convolutions: list[_Convolution] = []
        self.transposed: set[tuple[Shape, Shape]] = set()
        self.unsure_flops = 0
        """Of the last product that was computed again, if it may have been stopped."""
        self.gradients: set[Shape] = set()
        """Shapes of what the engine's nodes were given."""

    def add(self, part: int, flops: int) -> None:
        self.by_part[part] += flops
        self.num_products += 1

    def has_node(self, sequence_number: int) -> bool:
        """Whether the engine ran a node of this number; only closures make that matter."""
        if self._node_numbers is None:
            self._node_numbers = {
                event.sequence_nr()
                for events in self._threads
                for event in events
                if event.kind() == "push" and event.scope() == _BACKWARD_SCOPE
            }
        return sequence_number in self._node_numbers

    def miss(self, name: str) -> None:
        if len(self.uncounted) < _MAX_UNCOUNTED:
            self.uncounted.add(name)


def count_events(threads: Iterable[Sequence[Event]]) -> Iterator[OperatorCount | None]:
    """Adds up the events of a window, thread by thread; None after every few dozen, and last
    what it came to: whoever calls has other things to do."""
    threads = list(threads)
    tally = _Tally(threads)
    for events in threads:
        yield from _walk(events, tally)
    _add_convolutions(tally)
    forward, backward, recomputed, _, untrained = tally.by_part
    yield OperatorCount(
        flops=CountedFlops(
            forward_flops=forward,
            backward_flops=backward,
            recomputed_flops=recomputed,
            flops_by_dtype={},
            uncounted=tuple(sorted(tally.uncounted)),
        ),
        untrained_flops=untrained,
        num_products=tally.num_products,
        has_compiled=tally.has_compiled,
    )


def _walk(events: Sequence[Event], tally: _Tally) -> Iterator[None]:
    stack = [_Frame("", None, _UNTRAINED)]
    handles = [-1]
    are_plain: dict[str, bool] = {}
    for index, event in enumerate(events):
        if index % _EVENTS_AT_ONCE == 0:
            yield
        kind = event.kind()
        if kind == "push":
            name, parent = event.name(), stack[-1]
            is_plain = are_plain.get(name)
            if is_plain is None:
                is_plain = are_plain[name] = _is_plain(name)
            if is_plain and not tally.unsure_flops:
                parent.is_started = True
                stack.append(parent)  # most events: what is inside is as good as inside the parent
            else:
                stack.append(_enter(name, event, parent, tally))
            handles.append(event.handle())
        elif kind == "pop":
            handle = event.handle()
            if handle not in handles:
                continue
            while handles.pop() != handle:  # a collective, which ends when it likes
                stack.pop()
            frame = stack.pop()
            if frame is not stack[-1]:
                _leave(frame, tally)
                stack[-1].was_counted |= frame.was_counted


def _is_plain(name: str) -> bool:
    """Whether an operator of this name can be passed over."""
    return (
        name.startswith("aten::")
        and name not in COUNTED_OPERATORS
        and name not in (_CONVOLUTION, _CONVOLUTION_BACKWARD, _DETACH, *_RECURRENT)
        and not name.startswith(_TRANSPOSED)
    )


def _enter(name: str, event: Event, parent: _Frame, tally: _Tally) -> _Frame:
    frame = _Frame(name, event, parent.part)
    parent.is_started |= name not in (_DETACH, "detach")
    frame.is_opaque = parent.is_opaque or parent.name in (_CONVOLUTION, _CONVOLUTION_BACKWARD)
    frame.is_compiled = parent.is_compiled
    if name.startswith(_ENGINE):
        frame.part = _BACKWARD
    elif name.startswith(_OPTIMIZER):
        frame.part = _OPTIMIZING
    elif name.startswith(_COMPILED):
        frame.is_compiled = tally.has_compiled = True
    if parent.part == frame.part == _UNTRAINED:
        is_trained = event.scope() == _FUNCTION_SCOPE and event.sequence_nr() >= 0
        frame.part = _FORWARD if is_trained else _UNTRAINED
    elif parent.part == frame.part == _OPTIMIZING:
        number = event.sequence_nr() if event.scope() == _FUNCTION_SCOPE else -1
        frame.part = _FORWARD if number >= 0 and tally.has_node(number) else _OPTIMIZING
    elif parent.part == frame.part == _BACKWARD:
        scope = event.scope()
        if scope == _BACKWARD_SCOPE:
            tally.gradients.update(map(tuple, event.shapes()[:1]))
        elif scope == _FUNCTION_SCOPE and event.sequence_nr() >= 0:
            frame.part = _RECOMPUTED
    if tally.unsure_flops:
        # More was computed again, or its backward runs now, in an engine of its own.
        is_whole = frame.part == _RECOMPUTED or parent.name == _REENTRANT
        if is_whole:
            tally.add(_RECOMPUTED, tally.unsure_flops)
        tally.unsure_flops = 0
    return frame


def _leave(frame: _Frame, tally: _Tally) -> None:
    name, event = frame.name, frame.event
    if event is None or frame.is_opaque:
        return
    if name in (_CONVOLUTION, _CONVOLUTION_BACKWARD):
        frame.was_counted = True
        if frame.part == _RECOMPUTED and not frame.is_started:
            return
        shapes = [tuple(shape) for shape in event.shapes()]
        is_backward = name == _CONVOLUTION_BACKWARD
        given = shapes[: 2 + is_backward]
        tally.convolutions.append(
            _Convolution(
                part=frame.part,
                input=given[-2],
                weight=given[-1],
                gradient=given[0] if is_backward else (),
                is_compiled=frame.is_compiled,
            )
        )
    elif name.startswith(_TRANSPOSED):
        given = [tuple(shape) for shape in event.shapes()[:2]]
        tally.transposed.add((given[0], given[1]))
    elif name in COUNTED_OPERATORS:
        if not frame.was_counted:
            flops = count_operator_flops(name, event.shapes())
            if flops is None:
                tally.miss(name)
            elif frame.part == _RECOMPUTED and not frame.is_started:
                tally.unsure_flops = flops
            else:
                tally.add(frame.part, flops)
            frame.was_counted = True
    elif not frame.was_counted and _is_unknown(name, event):
        tally.miss(name)


def _is_unknown(name: str, event: Event) -> bool:
    """Whether this may be arithmetic without a formula."""
    if name in _RECURRENT:
        return True
    space, colons, _ = name.partition("::")
    is_quiet = space.partition(".")[0] in _QUIET_NAMESPACES
    return bool(colons) and not is_quiet and event.scope() == _FUNCTION_SCOPE


def _add_convolutions(tally: _Tally) -> None:
    outputs = {(one.input, one.weight): one.gradient for one in tally.convolutions if one.gradient}
    for one in tally.convolutions:
        key = one.input, one.weight
        output = one.gradient or outputs.get(key, ())
        if not output:
            tally.miss("convolutions without a backward")
            continue
        is_transposed = key in tally.transposed or (
            one.weight[0] != output[1] and one.weight[0] == one.input[1]
        )
        flops = 2 * math.prod(one.input if is_transposed else output) * math.prod(one.weight[1:])
        num_products = 1
        if one.gradient and not one.is_compiled:
            num_products = sum(wanted in tally.gradients for wanted in key)
        elif one.gradient:
            num_products = 2
        if num_products:
            tally.add(one.part, num_products * flops)


_PRODUCT_NODES = (
    "AddmmBackward", "MmBackward", "BmmBackward", "BaddbmmBackward", "ConvolutionBackward",
    "LinearBackward", "ScaledDotProduct", "GroupedMmBackward",
)  # fmt: skip
_COMPILED_NODE = "CompiledFunctionBackward"
_HALF = ("bfloat16", "float16")
_MAX_NODES = 200
_ENOUGH_NODES = 9
"""Each node looked at becomes an object, and after 700 of them Python collects garbage."""


def find_graph_dtype(loss: Any) -> str | None:
    """Dtype of most products that `loss` was made of, by the graph of its backward; None where it
    does not tell. Nothing that was saved is touched: that would undo checkpointing."""
    pending = [getattr(loss, "grad_fn", None)]
    counts: dict[str, int] = {}
    seen: dict[int, Any] = {}  # alive: another node's object could have a dropped one's id
    halves: set[str] = set()
    while pending and len(seen) < _MAX_NODES and sum(counts.values()) < _ENOUGH_NODES:
        node = pending.pop(0)
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        name = node.name()
        if name.startswith(_PRODUCT_NODES):
            dtype = str(node._input_metadata[0].dtype).removeprefix("torch.")
            counts[dtype] = counts.get(dtype, 0) + 1
        elif name.startswith(_COMPILED_NODE):
            dtypes = [str(one.dtype).removeprefix("torch.") for one in node._input_metadata]
            halves.update(dtype for dtype in dtypes if dtype in _HALF)
        pending.extend(following for following, _ in node.next_functions)
    if counts:
        return max(counts, key=counts.__getitem__)
    return halves.pop() if len(halves) == 1 else None
