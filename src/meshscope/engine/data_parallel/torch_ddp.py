"""Data parallel by torch's DistributedDataParallel, and the interface all variants have in common.

    parallel = TorchDdp(stages, dp_group)
    executor = PipelineExecutor(schedule, parallel.modules, …)
    parallel.start_accumulating()
    …                                       # all backwards of a stage but the last
    parallel.start_last_backward(stage)     # just before the last
    …
    parallel.finish()                       # gradients are averages over dp, whole on every rank

DDP as it comes reduces in the backward that follows a forward, and so is wrong as soon as a second
microbatch is forwarded before the first one's backward: the first one's gradients alone are sent.
Here every forward runs as inside `no_sync`, and DDP learns of the last backward when it comes, as
torch's own pipelining does. It must therefore be announced for each stage, just before it: `finish`
raises if a stage had none, or more than one, after its announcement. Right for any schedule without
W (zero-bubble): weight gradients computed there are seen by no hook.

Gradients are views of DDP's buckets. Clipping and unscaling may change them in place after
`finish`; `zero_grad` must set them to None (its default), since views cannot be detached in place.

Wrong where a parameter gets no gradient in a step: DDP waits for it, what shares its bucket is not
averaged, and `finish` raises.
`find_unused_parameters`, static graphs and communication hooks are off. The reducer has
compression and strategies; this is here to compare with, and for those who trust DDP more.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from meshscope.engine.data_parallel.data_parallel import (
    DEFAULT_BUCKET_BYTES,
    GradientReducer,
    ReducerStatistics,
)
from meshscope.engine.data_parallel.limits import find_ddp_problems
from meshscope.engine.model.tensor_regions import Group, drop_single
from meshscope.errors import UsageError

# Our buffers never change, and sent with forwards they would get in the way of pipelines. torch
# 2.13 renamed the option and warns about the old name.
_WITHOUT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers": False
}

# torch has no types for it.
_add_hook: Any = Tensor.register_post_accumulate_grad_hook


class DataParallel(Protocol):
    """The engine's interface to any data parallelism. One for all stages of a rank."""

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """What the pipeline must call for each stage."""

    @property
    def shard_group(self) -> Group:
        """The group that shards gradients after `finish`; None when each rank has them whole."""

    @property
    def statistics(self) -> object:
        """Costs so far on this rank."""

    def module(self, stage: int) -> nn.Module: ...

    def start_accumulating(self) -> None:
        """Called before a step's first forward."""

    def start_last_backward(self, stage: int | None = None) -> None:
        """Just before the last backward of a stage; None when that is the last of all stages."""

    def finish(self) -> None:
        """After a step's last backward: the gradients of all stages are averages over dp."""

    def rescale(self, ratio: float) -> None:
        """Between steps: gradients to come are larger by that much (the loss scale changed)."""

    def close(self) -> None:
        """Removes its hooks."""


class ReducedDataParallel:
    """The engine's own `GradientReducer` for all stages of a rank."""

    shard_group: Group = None

    def __init__(
        self, stages: Mapping[int, nn.Module], dp_group: Group, **reducer_options: Any
    ) -> None:
        """`reducer_options` are `GradientReducer`'s."""
        self.modules: dict[int, nn.Module] = dict(stages)
        parameters = [p for stage in stages.values() for p in stage.parameters()]
        # It would skip them, and every dp rank would train a separate model.
        if drop_single(dp_group) is not None and any(hasattr(p, "to_local") for p in parameters):
            raise UsageError(
                "the reducer does not average DTensors over dp; use FSDP2, tensor parallel on "
                "plain tensors, or dp 1"
            )
        self.reducer = GradientReducer(parameters, dp_group, **reducer_options)
        self._announced: list[int] = []

    @property
    def statistics(self) -> ReducerStatistics:
        return self.reducer.statistics

    def module(self, stage: int) -> nn.Module:
        return self.modules[stage]

    def start_accumulating(self) -> None:
        """Backwards from now on send nothing."""
        self._announced = []
        self.reducer.start_accumulating()

    def start_last_backward(self, stage: int | None = None) -> None:
        """Sends begin with the last stage's last backward: buckets may hold several stages."""
        if stage is not None:
            self._announced.append(stage)
            if set(self._announced) != set(self.modules):
                return
        self.reducer.start_last_backward()
        for earlier in self._announced[:-1]:
            self.reducer.mark_ready(self.modules[earlier].parameters())

    def finish(self) -> None:
        """Sends what was not sent, and waits."""
        self._announced = []
        self.reducer.finish()

    def rescale(self, ratio: float) -> None:
        self.reducer.rescale(ratio)

    def close(self) -> None:
        self.reducer.close()


@dataclass(slots=True, kw_only=True)
class DdpStatistics:
    """Costs of DDP so far on this rank."""

    gradient_bytes: int
    """Bytes reduced in each step."""
    num_steps: int = 0
    finish_ns: int = 0
    """In `finish`; DDP itself waits at the end of each stage's last backward."""


class TorchDdp:
    """Stages in DistributedDataParallel, right with several microbatches in flight."""

    shard_group: Group = None

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        dp_group: dist.ProcessGroup,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        """Collective over the group: DDP compares shapes and sends rank 0's parameters."""
        parameters = list(dict.fromkeys(p for stage in stages.values() for p in stage.parameters()))
        problems = find_ddp_problems(uses_dtensor=any(hasattr(p, "to_local") for p in parameters))
        if bucket_bytes < 1:
            problems.append(f"bucket_bytes is {bucket_bytes}; expected at least 1")
        if problems:
            raise UsageError("; ".join(problems))
        self._wrapped = {
            index: DistributedDataParallel(
                stage,
                process_group=dp_group,
                bucket_cap_mb=bucket_bytes / 2**20,
                gradient_as_bucket_view=gradient_as_bucket_view,
                **_WITHOUT_BUFFERS,
            )
            for index, stage in stages.items()
        }
        self.modules: dict[int, nn.Module] = dict(self._wrapped)
        self.statistics = DdpStatistics(
            gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad)
        )
        self._num_announced_backwards: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []
        for index, wrapped in self._wrapped.items():
            wrapped.require_backward_grad_sync = False  # as inside no_sync
            watched = next(p for p in wrapped.parameters() if p.requires_grad)
            self._handles.append(_add_hook(watched, self._make_counter(index)))

    def module(self, stage: int) -> nn.Module:
        return self.modules[stage]

    def start_accumulating(self) -> None:
        """Backwards from now on add to gradients and send nothing."""
        self._num_announced_backwards = {}

    def start_last_backward(self, stage: int | None = None) -> None:
        """The next backward of this stage (of all) is its last."""
        for index in self._wrapped if stage is None else (stage,):
            self._num_announced_backwards[index] = 0
            self._wrapped[index].reducer.prepare_for_backward([])

    def finish(self) -> None:
        """Raises UsageError unless each stage's last backward was announced, and was the last, and
        all parameters have gradients."""
        began_ns = time.perf_counter_ns()
        self._raise_if_unused()
        counts = {index: self._num_announced_backwards.get(index, 0) for index in self._wrapped}
        self._num_announced_backwards = {}
        wrong = [f"stage {index} had {n}" for index, n in counts.items() if n != 1]
        if wrong:
            raise UsageError(
                f"of backwards after start_last_backward {', '.join(wrong)}, expected 1; call it "
                "for each stage just before the stage's last backward"
            )
        self.statistics.num_steps += 1
        self.statistics.finish_ns += time.perf_counter_ns() - began_ns

    def _raise_if_unused(self) -> None:
        """DDP itself says so in the next forward, when a step with wrong gradients was taken."""
        unused, num_used = [], 0
        for index, wrapped in self._wrapped.items():
            for name, parameter in wrapped.module.named_parameters():
                if parameter.requires_grad and parameter.grad is None:
                    unused.append(f"stage {index}'s {name}")
                num_used += parameter.grad is not None
        if unused and num_used:  # else there was no backward at all
            raise UsageError(
                f"{len(unused)} parameters got no gradient in this step ({', '.join(unused[:3])}), "
                "for which DDP waits; use the reducer, freeze them, or leave them out of the model"
            )

    def rescale(self, ratio: float) -> None: ...

    def close(self) -> None:
        """Removes our hooks; DDP's go with the wrappers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _make_counter(self, index: int) -> Any:
        def count(_: Tensor) -> None:
            if index in self._num_announced_backwards:
                self._num_announced_backwards[index] += 1

        return count
