"""Averages gradients over data-parallel ranks while backward still runs.

    reducer = GradientReducer(model.parameters(), dp_group)
    for batch in batches:
        with reducer.accumulating():                 # all microbatches but the last
            for microbatch in batch[:-1]:
                loss(microbatch).backward()
        loss(batch[-1]).backward()                   # buckets are sent as they fill
        reducer.finish()                             # gradients are averages now
        optimizer.step()

Gradients must not change between the last backward and `finish`: what also changes them (sums over
tensor parallel, tied tables, unscaling, clipping) comes after it, and `finish` raises if it did
not. Weight gradients that a zero-bubble schedule computes apart from backward are seen by no hook:
such a step stays in `start_accumulating` until they are there, and `finish` sends everything.

Buckets are sent in one order on every rank, in any order of hooks: a full bucket waits for
those before it. Each launch also takes earlier transfers of several steps (ring, int8, …) one step
further, so that those too run beside backward. Buckets not full by then (a parameter has no
gradient in this step) are sent by `finish`, with zeros for what is missing. No other code may use
the group for other collectives between the last backward's begin and `finish`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshscope.core.unavailable import Unavailable
from meshscope.engine.data_parallel.allreduce import Strategy, make_strategy
from meshscope.engine.data_parallel.channel import GradientChannel, Traffic, Transfer
from meshscope.engine.data_parallel.compression import Compressor, make_compressor
from meshscope.engine.data_parallel.gradient_buckets import (
    Bucket,
    build_buckets,
    is_reduced_elsewhere,
)
from meshscope.errors import UsageError

DEFAULT_BUCKET_BYTES = 25 << 20

_NOT_COMPRESSED = Unavailable("gradients are not compressed")

# torch has no types for either.
_make_stream: Any = torch.cuda.Stream
_add_hook: Any = Tensor.register_post_accumulate_grad_hook


@dataclass(slots=True, kw_only=True)
class BucketStatistics:
    """Costs of one bucket so far on this rank."""

    num_parameters: int
    num_elements: int
    size_bytes: int
    """Size of the bucket's buffer."""
    traffic: Traffic = field(default_factory=Traffic)
    launch_ns: int = 0
    """Copying gradients in, compressing and starting: this time is taken from backward."""
    wait_ns: int = 0
    """Time in `finish`, decompression included: what backward did not hide."""
    compression_error: float | Unavailable = _NOT_COMPRESSED
    """Relative L2 error of what this rank sent last."""


@dataclass(slots=True, kw_only=True)
class ReducerStatistics:
    """Costs of gradient synchronisation so far on this rank."""

    buckets: list[BucketStatistics]
    num_steps: int = 0
    num_early_buckets: int = 0
    """Buckets sent before `finish` was called, over all steps."""
    write_back_ns: int = 0
    """Copying averages to the gradients."""
    bookkeeping: Traffic = field(default_factory=Traffic)
    """Time to find out which parameters were not used."""

    @property
    def traffic(self) -> Traffic:
        total = Traffic()
        total.merge(self.bookkeeping)
        for bucket in self.buckets:
            total.merge(bucket.traffic)
        return total

    @property
    def launch_ns(self) -> int:
        return sum(bucket.launch_ns for bucket in self.buckets)

    @property
    def wait_ns(self) -> int:
        return sum(bucket.wait_ns for bucket in self.buckets)


class GradientReducer:
    """Sums or averages the gradients of parameters over a group, bucket by bucket.

    With group None, or of one rank, nothing happens. Parameters that need no gradient, DTensors and
    those marked by `mark_reduced_elsewhere` are left alone. `gradient_dtype` is what gradients are
    summed in; by default each parameter's dtype.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        average: bool = True,
        strategy: str | Strategy = "flat",
        compression: str | Compressor | None = None,
        gradient_dtype: torch.dtype | None = None,
        keeps_unused: bool = False,
        local_world_size: int | None = None,
        max_buckets: int | None = None,
        overlaps: bool = True,
    ) -> None:
        """Collective over the group where `strategy` is "hierarchical" or "adaptive".

        Without `overlaps` everything is sent in `finish`. `max_buckets` lets buckets grow.

        `keeps_unused` leaves the gradient of a parameter that no rank used at None, as on one
        process, instead of zero, at the price of one more small all-reduce for each step.
        """
        self._parameters = list(dict.fromkeys(parameters))
        self.group = None if group is None or group.size() == 1 else group
        self._bucket_bytes = bucket_bytes
        self._max_buckets = max_buckets
        self._overlaps = overlaps
        self._scale = 1.0 / self.group.size() if self.group is not None and average else 1.0
        self._gradient_dtype = gradient_dtype
        self._keeps_unused = keeps_unused
        self.compressor = (
            make_compressor(compression) if isinstance(compression, str) else compression
        )
        self.strategy = strategy
        if self.group is not None and isinstance(strategy, str):
            device = self._parameters[0].device if self._parameters else "cpu"
            self.strategy = make_strategy(
                strategy, self.group, local_world_size=local_world_size, device=device
            )
        self._handles: list[RemovableHandle] = []
        self._is_accumulating = False
        self.rebuild()

    # --- a step ----------------------------------------------------------------------------------

    def start_accumulating(self) -> None:
        """Backwards from now on add to gradients and send nothing."""
        if self._transfers:
            raise UsageError(
                f"an earlier step ended after {len(self._transfers)} of {len(self.buckets)} "
                "buckets of gradients had been sent and before finish(), so ranks may no longer be "
                "in step; start the processes again"
            )
        self._is_accumulating = True

    def start_last_backward(self) -> None:
        """The next backward is the step's last: buckets are sent as they fill."""
        self._is_accumulating = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards inside send nothing; the one after it is the last."""
        self.start_accumulating()
        try:
            yield
        finally:
            self.start_last_backward()

    def mark_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Marks gradients that no hook sees as complete."""
        for parameter in parameters:
            self._on_gradient(parameter)

    def rescale(self, ratio: float) -> None:
        """Gradients to come are larger by that much, since the loss scale was changed: what
        compression keeps of earlier ones is made so too. Between steps.
        """
        if self.compressor is not None:
            with self._on_side_stream():
                self.compressor.rescale(ratio)

    @torch.no_grad()
    def finish(self) -> None:
        """Sends what was not sent, waits, and puts the averages into the gradients."""
        if self.group is None:
            self._is_accumulating = False
            return
        try:
            self._raise_if_changed()
            with self._on_side_stream():
                self._launch_rest()
                used = self._start_finding_used(self.group) if self._keeps_unused else None
                self._wait_for_all()
                if used is not None:
                    used[1].wait()
            self._wait_for_side_stream()
            self._raise_if_stale()
            self._write_back(None if used is None else used[0])
        finally:
            self._begin_step()
        self._statistics.num_steps += 1

    def _begin_step(self) -> None:
        self._is_accumulating = False
        self._transfers: list[Transfer] = []
        self._waiting = [set(bucket.parameters) for bucket in self.buckets]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._is_accumulating or not self._overlaps or parameter not in self._bucket_of:
            return
        self._waiting[self._bucket_of[parameter].index].discard(parameter)
        while len(self._transfers) < len(self.buckets) and not self._waiting[len(self._transfers)]:
            with self._on_side_stream():
                self._launch_next()
            self._statistics.num_early_buckets += 1

    def _launch_rest(self) -> None:
        while len(self._transfers) < len(self.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        # Which transfer takes which step when is the same on all ranks: it depends on the number
        # of launches only.
        began_ns = time.perf_counter_ns()
        for transfer in self._transfers:
            transfer.advance()
        bucket = self.buckets[len(self._transfers)]
        statistics = self._statistics.buckets[bucket.index]
        bucket.fill(self._scale)
        self._transfers.append(self._start(bucket, statistics.traffic))
        statistics.launch_ns += time.perf_counter_ns() - began_ns

    def _start(self, bucket: Bucket, traffic: Traffic) -> Transfer:
        assert self.group is not None
        assert not isinstance(self.strategy, str)
        channel = GradientChannel(self.group, traffic, tag=bucket.index)
        if self.compressor is not None:
            return self.compressor.reduce(bucket, channel, self.strategy)
        return Transfer(self.strategy.steps(bucket.buffer, channel))

    def _wait_for_all(self) -> None:
        """Advances all transfers in turn, so that they run beside each other."""
        under_way = list(enumerate(self._transfers))
        while under_way:
            for index, transfer in under_way:
                began_ns = time.perf_counter_ns()
                transfer.go_on()
                self._statistics.buckets[index].wait_ns += time.perf_counter_ns() - began_ns
            under_way = [(index, transfer) for index, transfer in under_way if not transfer.is_done]

    def _start_finding_used(self, group: dist.ProcessGroup) -> tuple[Tensor, Transfer]:
        """How many ranks have a gradient, for each parameter in the order of buckets."""
        device = self.buckets[0].buffer.device if self.buckets else None
        has_gradient = [sent.tensor is not None for bucket in self.buckets for sent in bucket.sent]
        used = torch.tensor(has_gradient, dtype=torch.int32, device=device)
        channel = GradientChannel(group, self._statistics.bookkeeping)
        return used, Transfer(iter([channel.all_reduce(used)]))

    def _write_back(self, used: Tensor | None) -> None:
        began_ns = time.perf_counter_ns()
        is_used = None if used is None else iter(used.gt(0).tolist())
        for bucket in self.buckets:
            bucket.write_back(
                None if is_used is None else [next(is_used) for _ in bucket.parameters]
            )
        self._statistics.write_back_ns += time.perf_counter_ns() - began_ns

    @property
    def statistics(self) -> ReducerStatistics:
        """Costs since buckets were made. With compression, reading waits for the accelerator."""
        if self.compressor is not None:
            for bucket in self.buckets:
                error = self.compressor.read_error(bucket)
                self._statistics.buckets[bucket.index].compression_error = error
        return self._statistics

    # --- what is reduced -------------------------------------------------------------------------

    def rebuild(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Makes buckets anew, after parameters were added, frozen, cast or moved.

        Takes the same parameters again unless others are given. All ranks must do it, between
        steps. Statistics and what compression keeps begin anew.
        """
        self.close()
        if parameters is not None:
            self._parameters = list(dict.fromkeys(parameters))
        reduced = self._find_reduced() if self.group is not None else []
        self.buckets = self._build_buckets(reduced)
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self._built_for = [_describe(parameter) for parameter in reduced]
        self._streams = {
            bucket.buffer.device: _make_stream(bucket.buffer.device)
            for bucket in self.buckets
            if bucket.buffer.is_cuda
        }
        self._statistics = ReducerStatistics(
            buckets=[
                BucketStatistics(
                    num_parameters=len(bucket.parameters),
                    num_elements=bucket.buffer.numel(),
                    size_bytes=bucket.buffer.nbytes,
                )
                for bucket in self.buckets
            ]
        )
        self._begin_step()
        self._handles = [_add_hook(p, self._on_gradient) for p in reduced]

    def _build_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        """Twice as large until they are few enough; each dtype and device has one at least."""
        bucket_bytes = self._bucket_bytes
        total_bytes = sum(p.numel() * p.element_size() for p in parameters)
        while True:
            buckets = build_buckets(parameters, bucket_bytes, self._gradient_dtype)
            is_few = self._max_buckets is None or len(buckets) <= self._max_buckets
            if is_few or bucket_bytes > total_bytes:
                return buckets
            bucket_bytes *= 2

    def close(self) -> None:
        """Removes the hooks; `rebuild` installs them again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _find_reduced(self) -> list[nn.Parameter]:
        return [
            p
            for p in self._parameters
            if p.requires_grad and p.numel() and not is_reduced_elsewhere(p)
        ]

    def _raise_if_changed(self) -> None:
        if [_describe(parameter) for parameter in self._find_reduced()] != self._built_for:
            raise UsageError(
                "parameters were frozen, released, cast, moved or resized since buckets were "
                "made; call rebuild() on every rank after such a change"
            )

    def _raise_if_stale(self) -> None:
        stale = [p for bucket in self.buckets for p in bucket.find_stale()]
        if stale:
            numbers = {parameter: index for index, parameter in enumerate(self._parameters)}
            named = ", ".join(f"{numbers[p]} of shape {tuple(p.shape)}" for p in stale[:3])
            raise UsageError(
                f"{len(stale)} gradients changed after they had been sent (parameter {named}); "
                "have all backwards but the step's last inside accumulating(), and change "
                "gradients after finish() only"
            )

    # --- accelerators ----------------------------------------------------------------------------

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """On an accelerator: behind what computes gradients, and not in its way."""
        contexts: list[AbstractContextManager[object]] = [nullcontext()]
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
            contexts.append(torch.cuda.stream(stream))
        for context in contexts:
            context.__enter__()
        try:
            yield
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)

    def _wait_for_side_stream(self) -> None:
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


def _describe(parameter: nn.Parameter) -> tuple[int, torch.Size, torch.dtype, torch.device]:
    return id(parameter), parameter.shape, parameter.dtype, parameter.device
