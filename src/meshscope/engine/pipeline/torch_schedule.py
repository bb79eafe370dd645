"""Runs torch's own pipeline schedules (torch.distributed.pipelining) on this engine's stages.

    executor = TorchScheduleExecutor("1f1b", stages, pp_group, num_microbatches=8, hidden_shape=…)
    losses = executor.run_step(microbatches)

Takes the same stages, microbatches and recorder as `pipeline.PipelineExecutor`, for comparison and
for those who prefer torch's runtime. F, B, I and W are recorded around the methods of torch's
`PipelineStage`; waits are not, since torch waits outside of them. W is what `put_off_gradients`
leaves for later, as with the other executor, not torch's own cut through the autograd graph.

Evaluate with the other executor. All microbatches must have the same size, and losses are averaged
with equal weights. zb_v and dualpipe_v send from a rank to itself, which gloo before torch 2.13
cannot do.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from torch import Tensor, nn

from meshscope.core.schedule import Action, ActionKind
from meshscope.engine.model.put_off_gradients import LaterGradients, PutOffGradients
from meshscope.engine.model.tensor_parallel import put_off_weight_gradients
from meshscope.engine.pipeline.pipeline import ActionRecorder, Microbatch, NoRecorder
from meshscope.errors import UsageError

# Not documented, but the way in: without them nothing would be recorded, in silence.
_RECORDED_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchSchedule:
    class_name: str
    num_chunks: int = 1
    """Stages on each rank; looped schedules take any number, here 2."""
    is_v_shaped: bool = False
    """Whether the second chunks go back from the last rank to the first."""
    is_split: bool = False
    """Whether it runs I and W."""

    def num_stages(self, num_ranks: int) -> int:
        """Stages of the whole pipeline."""
        return num_ranks * self.num_chunks

    def stages_of(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds."""
        if self.is_v_shaped:
            return rank, 2 * num_ranks - 1 - rank
        return tuple(range(rank, self.num_stages(num_ranks), num_ranks))


TORCH_SCHEDULES: dict[str, _TorchSchedule] = {
    "gpipe": _TorchSchedule(class_name="ScheduleGPipe"),
    "1f1b": _TorchSchedule(class_name="Schedule1F1B"),
    "interleaved_1f1b": _TorchSchedule(class_name="ScheduleInterleaved1F1B", num_chunks=2),
    "looped_bfs": _TorchSchedule(class_name="ScheduleLoopedBFS", num_chunks=2),
    "interleaved_zb": _TorchSchedule(
        class_name="ScheduleInterleavedZeroBubble", num_chunks=2, is_split=True
    ),
    "zb_v": _TorchSchedule(
        class_name="ScheduleZBVZeroBubble", num_chunks=2, is_v_shaped=True, is_split=True
    ),
    "dualpipe_v": _TorchSchedule(
        class_name="ScheduleDualPipeV", num_chunks=2, is_v_shaped=True, is_split=True
    ),
}
"""torch's schedules, by the names of `core.schedule_builders` where both have one."""


class TorchScheduleExecutor:
    """One rank's part in one of torch's schedules."""

    def __init__(
        self,
        name: str,
        stages: Mapping[int, nn.Module],
        pp_group: dist.ProcessGroup,
        *,
        num_microbatches: int,
        hidden_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        record: ActionRecorder | None = None,
        put_off: Mapping[int, PutOffGradients] | None = None,
    ) -> None:
        """As `PipelineExecutor`'s; all stages hand on the same shape."""
        if name not in TORCH_SCHEDULES:
            raise UsageError(
                f"torch has no schedule {name!r}; use one of {', '.join(TORCH_SCHEDULES)}"
            )
        self.schedule = TORCH_SCHEDULES[name]
        problems = _find_problems(self.schedule, stages, pp_group)
        if problems:
            raise UsageError("; ".join(problems))
        self.stages = dict(stages)
        self.num_stages = self.schedule.num_stages(pp_group.size())
        self.num_microbatches = num_microbatches
        self._group = pp_group
        # That it needs a gradient tells torch to send one back.
        self._hidden = torch.empty(*hidden_shape, dtype=dtype, device="meta", requires_grad=True)
        self._device = torch.device(device)
        self._record = record or NoRecorder()
        self._put_off = put_off or {}
        self._runtime: Any = None

    def run_step(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """As `PipelineExecutor.run_step`, losses weighted equally."""
        if len(microbatches) != self.num_microbatches:
            raise UsageError(
                f"got {len(microbatches)} microbatches, but the schedule was built for "
                f"{self.num_microbatches}; give that many"
            )
        if self._runtime is None:
            self._runtime = self._build(microbatches)
        arguments: list[Tensor] = []
        named: dict[str, Any] = {}
        losses: list[Tensor] = []
        if 0 in self.stages:
            arguments.append(_join("inputs", [inputs for inputs, _ in microbatches]))
        if self.num_stages - 1 in self.stages:
            targets = _join("targets", [targets for _, targets in microbatches])
            named = {"target": targets, "targets": targets, "losses": losses}
        self._runtime.step(*arguments, **named)
        return [loss.detach() * self.num_microbatches for loss in losses]

    def _build(self, microbatches: Sequence[Microbatch]) -> Any:
        """torch's schedule; it gets the sizes, because finding them out would run the model."""
        built = [self._build_stage(index, microbatches[0][0]) for index in sorted(self.stages)]
        schedule_class = getattr(torch_pipelining, self.schedule.class_name)
        return schedule_class(
            built if self.schedule.num_chunks > 1 else built[0],
            self.num_microbatches,
            loss_fn=lambda output, _: output.squeeze(0) / self.num_microbatches,
            scale_grads=False,
        )

    def _build_stage(self, index: int, inputs: Tensor | None) -> "_RecordedStage":
        module = self.stages[index]
        is_last = index == self.num_stages - 1
        if index == 0 and inputs is None:
            raise UsageError("microbatch 0 has no inputs; give them where the first stage is")
        put_off = None
        if self.schedule.is_split:
            put_off = self._put_off.get(index) or put_off_weight_gradients(module)
        return _RecordedStage(
            _StageModule(module, is_last=is_last),
            index,
            self.num_stages,
            self._device,
            input_args=inputs if index == 0 else self._hidden,
            output_args=torch.empty(1, device="meta", requires_grad=True)
            if is_last
            else self._hidden,
            group=self._group,
            record=self._record,
            put_off=put_off,
        )


class _StageModule(nn.Module):
    """A stage as torch calls it: every stage of a rank is given the targets, the last needs them,
    and what it makes must have a dimension."""

    def __init__(self, stage: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.stage = stage
        self.is_last = is_last

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        made: Tensor = self.stage(x, targets) if self.is_last else self.stage(x)
        return made.unsqueeze(0) if self.is_last else made


class _RecordedStage(torch_pipelining.PipelineStage):
    """Tells the recorder of each action, and leaves weight gradients to W."""

    def __init__(
        self,
        *arguments: Any,
        record: ActionRecorder,
        put_off: PutOffGradients | None,
        **named: Any,
    ) -> None:
        named["dw_builder"] = None if put_off is None else self._take_later
        super().__init__(*arguments, **named)
        self._record = record
        self._put_off = put_off
        self._later: LaterGradients | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._record.run(Action(ActionKind.FORWARD, self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001 - torch's
        *arguments: Any,
        **named: Any,
    ) -> Any:
        kind = ActionKind.BACKWARD if full_backward else ActionKind.INPUT_GRAD
        collect = nullcontext() if self._put_off is None else self._put_off.collect()
        with self._record.run(Action(kind, self.stage_index, bwd_chunk_id)), collect as self._later:
            return super().backward_one_chunk(
                bwd_chunk_id, loss, full_backward, *arguments, **named
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        with self._record.run(Action(ActionKind.WEIGHT_GRAD, self.stage_index, bwd_chunk_id)):
            return super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **named)

    def _take_later(self) -> Any:
        assert self._later is not None, "called inside of backward only"
        return self._later.compute


def _find_problems(
    schedule: _TorchSchedule, stages: Mapping[int, nn.Module], group: dist.ProcessGroup
) -> list[str]:
    problems = []
    if not hasattr(torch_pipelining, schedule.class_name):
        problems.append(
            f"torch {torch.__version__} has no {schedule.class_name}; use another schedule"
        )
    missing = [m for m in _RECORDED_METHODS if not hasattr(torch_pipelining.PipelineStage, m)]
    if missing:
        problems.append(
            f"PipelineStage of torch {torch.__version__} has no {', '.join(missing)}, by which "
            f"actions are recorded; use PipelineExecutor"
        )
    if schedule.is_v_shaped and dist.get_backend(group) == "gloo" and _is_before_2_13():
        problems.append(
            f"{schedule.class_name} sends from a rank to itself, which gloo of torch "
            f"{torch.__version__} cannot do; use PipelineExecutor or torch 2.13"
        )
    expected = schedule.stages_of(group.rank(), group.size())
    if tuple(sorted(stages)) != expected:
        problems.append(
            f"pipeline rank {group.rank()} got stages {sorted(stages)}, but "
            f"{schedule.class_name} places {list(expected)} there; build these"
        )
    return problems


def _is_before_2_13() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) < (2, 13)


def _join(what: str, parts: Sequence[Tensor | None]) -> Tensor:
    """One batch, which torch cuts again into as many parts."""
    given = [part for part in parts if part is not None]
    if len(given) < len(parts) or len({part.shape for part in given}) > 1:
        shapes = sorted({str(None if part is None else tuple(part.shape)) for part in parts})
        raise UsageError(
            f"{what} of the microbatches have the shapes {', '.join(shapes)}, but torch's "
            f"schedules need the same for all; cut the batch evenly"
        )
    return torch.cat(given)
