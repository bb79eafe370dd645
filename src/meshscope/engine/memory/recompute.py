"""How a stage calls its parts: everything kept for backward, or parts of it made again there.

    stage.runner = StageRunner(Recompute.SEGMENTS, num_segments=2)

A stage hands its layers (and the last one its loss) to its `runner`, so recomputation needs no
wrapper modules, and parameters keep their names. What a part needs is made again by torch's
non-reentrant checkpoint, which nests: in a segment only the segment's input is kept; its backward
runs it once more, keeping the inputs of its parts, and then each part once more by itself.

Wrong where calling a part twice is not calling it once: modules that count their calls or change
buffers (batch norm's running statistics) do so twice or three times. Random numbers are the same
in both calls when `keeps_random_state` is set.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SEQUENCE_DIM = 1
"""Activations are [batch, sequence, width]."""

Layer = Callable[..., Tensor]


class Recompute(StrEnum):
    """What backward makes again."""

    NOTHING = "nothing"
    LAYERS = "layers"
    """The insides of each layer; the input of every layer is kept."""
    SEGMENTS = "segments"
    """Segments of layers, in them the parts of each layer, and the head in chunks of tokens."""


class _RecomputeObserver(Protocol):
    """Listens to what is checkpointed and made again."""

    def before_checkpoint(self) -> None:
        """The next tensors to be saved are the inputs of a part."""

    def in_forward(self) -> AbstractContextManager[object]:
        """Entered around the first call of a part."""

    def in_recompute(self) -> AbstractContextManager[object]:
        """Entered around each later call; left by an exception when no more of it is needed."""


class StageRunner:
    """Calls the parts of a stage; by default, one after the other and no more."""

    def __init__(
        self,
        recompute: Recompute = Recompute.NOTHING,
        *,
        num_segments: int = 1,
        keeps_random_state: bool = True,
        observer: _RecomputeObserver | None = None,
    ) -> None:
        self.recompute = recompute
        self.num_segments = num_segments
        self._keeps_random_state = keeps_random_state
        self._observer = observer

    def run_layers(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        *arguments: object,
        first: Layer | None = None,
        last: Layer | None = None,
    ) -> Tensor:
        """Each layer called with the output of the one before and `arguments`.

        `first` and `last` take the tensor alone; they are what comes before and after the layers,
        and part of the first and last segment.
        """
        calls = [partial(self._call_layer, layer, arguments) for layer in layers]
        is_cut = self._is_in(Recompute.SEGMENTS)
        segments = cut_evenly(calls, self.num_segments if is_cut else 1)
        if first is not None:
            segments[0].insert(0, partial(self.run_part, first))
        if last is not None:
            segments[-1].append(partial(self.run_part, last))
        for segment in segments:
            x = self._checkpoint(_run_all, segment, x) if is_cut else _run_all(segment, x)
        return x

    def run_part(self, part: Layer, *arguments: Any) -> Tensor:
        """A part of a layer, which is recomputed apart from its other parts if segments are."""
        if self._is_in(Recompute.SEGMENTS):
            return self._checkpoint(part, *arguments)
        return part(*arguments)

    def sum_losses(
        self,
        sum_losses: Callable[[Tensor, Tensor], Tensor],
        x_BsD: Tensor,
        targets_BS: Tensor,
        *,
        num_chunks: int,
        num_sequence_parts: int = 1,
    ) -> Tensor:
        """`sum_losses(x, targets)`; where segments are recomputed, of one chunk after the other.

        With `num_sequence_parts` this rank's `x` has that part of the sequence, and the function
        puts those of all ranks together: a chunk then has tokens out of every part.
        """
        if not self._is_in(Recompute.SEGMENTS):
            return sum_losses(x_BsD, targets_BS)
        size = math.ceil(x_BsD.shape[SEQUENCE_DIM] / num_chunks)
        # split, not slices: its backward puts gradients together once, not once for each chunk.
        parts_BPs = torch.unflatten(targets_BS, SEQUENCE_DIM, (num_sequence_parts, -1))
        targets = [chunk.flatten(1, 2) for chunk in torch.split(parts_BPs, size, SEQUENCE_DIM + 1)]
        sums = [
            self._checkpoint(_without_cast_cache, sum_losses, x, chunk)
            for x, chunk in zip(torch.split(x_BsD, size, SEQUENCE_DIM), targets, strict=True)
        ]
        return torch.stack(sums).sum()

    def _is_in(self, recompute: Recompute) -> bool:
        return self.recompute is recompute and torch.is_grad_enabled()

    def _call_layer(self, layer: Layer, arguments: Sequence[object], x: Tensor) -> Tensor:
        # A layer with its own runner recomputes its parts itself.
        has_parts = getattr(layer, "runner", None) is self
        if self._is_in(Recompute.LAYERS) or (self._is_in(Recompute.SEGMENTS) and not has_parts):
            return self._checkpoint(layer, x, *arguments)
        return layer(x, *arguments)

    def _checkpoint(self, part: Layer, *arguments: Any) -> Tensor:
        observer = self._observer
        contexts: dict[str, Any] = {}
        if observer is not None:
            observer.before_checkpoint()
            contexts["context_fn"] = lambda: (observer.in_forward(), observer.in_recompute())
        result: Tensor = checkpoint(
            part,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=self._keeps_random_state,
            **contexts,
        )
        return result


def cut_evenly(calls: Sequence[Layer], num_segments: int) -> list[list[Layer]]:
    """Cuts calls into at most that many runs; lengths differ by one at most."""
    num_segments = max(1, min(num_segments, len(calls)))
    bounds = [len(calls) * i // num_segments for i in range(num_segments + 1)]
    return [list(calls[start:stop]) for start, stop in pairwise(bounds)]


def _run_all(calls: Sequence[Layer], x: Tensor) -> Tensor:
    for call in calls:
        x = call(x)
    return x


def _without_cast_cache(
    sum_losses: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor
) -> Tensor:
    """Autocast would share one cast of the head's weight, and sum its gradient in 16 bits."""
    device_type = x.device.type
    context: AbstractContextManager[object] = nullcontext()
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        context = torch.autocast(device_type, dtype, cache_enabled=False)
    with context:
        return sum_losses(x, targets)


_MAX_UNREAD_EVENTS = 256


class RecomputeTimer:
    """Adds up the time of what is recomputed; on CUDA the device's, by events read when done."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._total_ns = 0
        self._depth = 0
        self._begin: Any = None
        self._unread: deque[tuple[Any, Any]] = deque()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begin = self._now()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._is_cuda:
            self._unread.append((self._begin, self._now()))
            if len(self._unread) > _MAX_UNREAD_EVENTS:
                self.read_ns()
        else:
            self._total_ns += self._now() - self._begin

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read_ns(self) -> int:
        """The total of what the device has finished."""
        while self._unread and self._unread[0][1].query():
            begin, end = self._unread.popleft()
            self._total_ns += round(begin.elapsed_time(end) * 1e6)
        return self._total_ns
