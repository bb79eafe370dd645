"""Parameters, gradients and optimizer state cut over data parallel: torch's FSDP2, as ZeRO 1, 2, 3.

    parallel = FullyShardedDataParallel(stages, dp_group, zero_stage=3)
    optimizer = SGD(p for stage in stages.values() for p in stage.parameters())    # after it
    parallel.start_accumulating()
    executor.run_step(microbatches)      # may call start_last_backward(stage) on the way
    parallel.finish()                    # gradients are averages over dp, each rank has its part

Every entry of `stage.layers` is one group of parameters, the rest of a stage another. Between steps
a rank holds 1/dp of everything (arXiv 1910.02054). Within a step of m microbatches and g groups:

    zero_stage  parameters                    gradients                    collectives over dp
    1           whole, forward to finish      whole until a stage's last   g gathers, g reductions
                                              backward, then 1/dp
    2           whole, forward to finish      a group's whole while its    g gathers, m·g reductions
                                              backward runs, else 1/dp
    3           a group's whole while it      as 2                         2·m·g gathers,
                runs, else 1/dp                                            m·g reductions

A gather is an all-gather of parameters, a reduction a reduce-scatter of gradients. As published,
stages 1 and 2 keep parameters whole between steps too; here they are gathered in the first forward
instead of after the optimizer, which is the same traffic and less memory.

Any schedule is right. What a zero-bubble W computes is seen by no hook of FSDP2: it lies whole in
memory until the group's next I, or `finish`, reduces it. Where backward recomputes several layers
at once, stage 3 has all of these whole meanwhile. Forwards without gradients give whole parameters
back at once, so evaluation gathers for each microbatch.

Wrong where dp ranks use different parameters in a step: their reductions do not match. The
optimizer must be made after this, and parameters and gradients left alone between forward and
`finish`. With `cpu_offload` gradients are on the host: what sums them needs a group with gloo.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.hooks import RemovableHandle

from meshscope.engine.data_parallel.limits import find_fsdp_problems
from meshscope.engine.model.tensor_regions import Group
from meshscope.errors import UsageError

# What torch's own pipelining calls to reduce what is left. Without it stage 1 would lose gradients.
_FLUSH = "_root_post_backward_final_callback"


@dataclass(slots=True, kw_only=True)
class FullyShardedStatistics:
    """Sizes and costs on this rank."""

    num_groups: int
    """Groups of parameters that are gathered and reduced together, over all stages."""
    whole_bytes: int
    """Unsharded parameters of this rank's stages (of this tp rank)."""
    shard_bytes: int
    """This rank's part of them, without padding."""
    num_steps: int = 0
    finish_ns: int = 0
    """Time in `finish`: what backward did not hide, as the host sees it."""


class FullyShardedDataParallel:
    """Cuts stages over a data-parallel group, in place; see the module's docstring."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        dp: DeviceMesh | dist.ProcessGroup,
        *,
        zero_stage: int = 3,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        cpu_offload: bool = False,
    ) -> None:
        """`dp` is this rank's group or 1-D mesh. With DTensor tensor parallel it must be a mesh,
        cut from the same one as tp's. Forward and backward compute in `param_dtype` and gradients
        are summed in `reduce_dtype`, by default the parameters' and `param_dtype`.
        """
        self.modules: dict[int, nn.Module] = dict(stages)
        self.zero_stage = zero_stage
        device_type = _find_device_type(stages.values())
        problems = find_fsdp_problems(
            zero_stage=zero_stage, device_type=device_type, cpu_offload=cpu_offload
        )
        if not isinstance(dp, DeviceMesh) and _has_dtensors(stages.values()):
            problems.append(
                "parameters are DTensors over tp, but dp is a process group; give the dp mesh "
                "that is cut from the same mesh as tp's"
            )
        if problems:
            raise UsageError("; ".join(problems))
        mesh = (
            dp
            if isinstance(dp, DeviceMesh)
            else DeviceMesh.from_group(dp, device_type, mesh_dim_names=("dp",))
        )
        self.shard_group: Group = mesh.get_group()
        whole_bytes = _count_local_bytes(stages.values())
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            "reshard_after_forward": zero_stage == 3,
            "offload_policy": (
                CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
                if cpu_offload
                else OffloadPolicy()
            ),
        }
        self._handles: list[RemovableHandle] = []
        for stage in stages.values():
            for layer in _find_layers(stage):
                fully_shard(layer, **options)
            fully_shard(stage, **options)
            # Without gradients there is no backward after which parameters would be given back.
            self._handles.append(stage.register_forward_hook(_reshard_without_gradients))
        self.statistics = FullyShardedStatistics(
            num_groups=sum(len(_find_cut(stage)) for stage in stages.values()),
            whole_bytes=whole_bytes,
            shard_bytes=_count_local_bytes(stages.values()),
        )
        self.start_accumulating()

    def module(self, stage: int) -> nn.Module:
        """What to call for a stage: the stage itself, which was changed in place."""
        return self.modules[stage]

    def start_accumulating(self) -> None:
        """The step's backwards come; stage 1 keeps whole gradients meanwhile."""
        for stage in self._roots():
            stage.set_is_last_backward(False)
            stage.set_reshard_after_backward(self.zero_stage == 3)
            stage.set_requires_gradient_sync(self.zero_stage > 1)

    def start_last_backward(self, stage: int | None = None) -> None:
        """The next backward of this stage (of all) is its last: reduce while it runs.

        Need not be called: `finish` reduces what is left. Called too early it costs reductions,
        but stays correct.
        """
        chosen = self._roots() if stage is None else [_as_fsdp(self.modules[stage])]
        for root in chosen:
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduces what is left, waits, and gives whole parameters back."""
        began_ns = time.perf_counter_ns()
        for stage in self._roots():
            stage.set_is_last_backward(True)
            stage.set_requires_gradient_sync(True)
            _flush(stage)
        self.reshard()
        self.start_accumulating()
        self.statistics.num_steps += 1
        self.statistics.finish_ns += time.perf_counter_ns() - began_ns

    def reshard(self) -> None:
        """Frees whole parameters and keeps this rank's parts."""
        for stage in self.modules.values():
            _reshard(stage)

    def rescale(self, ratio: float) -> None: ...

    def close(self) -> None:
        """Removes our hooks; the stages stay sharded."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _roots(self) -> list[FSDPModule]:
        return [_as_fsdp(stage) for stage in self.modules.values()]


def _has_dtensors(stages: Iterable[nn.Module]) -> bool:
    return any(hasattr(p, "to_local") for stage in stages for p in stage.parameters())


def _find_layers(stage: nn.Module) -> list[nn.Module]:
    layers = getattr(stage, "layers", None)
    found = list(layers.children()) if isinstance(layers, nn.Module) else []
    return [layer for layer in found if any(True for _ in layer.parameters())]


def _find_device_type(stages: Iterable[nn.Module]) -> str:
    found = sorted({p.device.type for stage in stages for p in stage.parameters()})
    if len(found) != 1:
        raise UsageError(
            f"parameters are on {', '.join(found) or 'no device'}, expected one device; "
            "move all stages of a rank to it first"
        )
    return found[0]


def _find_cut(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def _as_fsdp(stage: nn.Module) -> FSDPModule:
    assert isinstance(stage, FSDPModule), "fully_shard changes the class"
    return stage


def _reshard(stage: nn.Module) -> None:
    for module in _find_cut(stage):
        module.reshard()


def _reshard_without_gradients(stage: nn.Module, *_: object) -> None:
    if not torch.is_grad_enabled():
        _reshard(stage)


def _flush(stage: FSDPModule) -> None:
    """Reduces gradients that no backward will, and waits for all reductions."""
    get_state: Any = fully_shard.state  # type: ignore[attr-defined]  # put there by a decorator
    flush = getattr(get_state(stage), _FLUSH, None)
    if flush is None:
        raise UsageError(
            f"FSDP2 of torch {torch.__version__} has no {_FLUSH}, which reduces the rest of the "
            "gradients; use the reducer, or a torch from 2.11 on"
        )
    flush()


def _count_local_bytes(stages: Iterable[nn.Module]) -> int:
    locals_: list[Tensor] = [
        p.to_local() if hasattr(p, "to_local") else p
        for p in dict.fromkeys(p for stage in stages for p in stage.parameters())
    ]
    return sum(local.nbytes for local in locals_)
