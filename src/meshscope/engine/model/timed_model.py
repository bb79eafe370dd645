"""A model whose layers take a stated time and no processor: known answers on any machine.

    config = TimedModelConfig(num_layers=8, forward_ms=9.0, input_grad_ms=9.0, weight_grad_ms=9.0)
    stage = build_timed_stage(config, stage_index, num_stages)
    put_off = {stage_index: stage.put_off_weight_gradients()}   # W apart from I
    executor = PipelineExecutor(schedule, {stage_index: stage}, pp_group, put_off=put_off,
                                hidden_shape=stage.hidden_shape(microbatch_size))

A layer multiplies each channel by a weight and sleeps until its time is over, so that what a
schedule must cost is `replay_schedule(schedule, config.costs.for_schedule(schedule))`, and 8 ranks
need no 8 cores. Gradients are true ones: an embedding comes first, a head and cross entropy last,
both in no stated time, and training learns.

Sleeps end at absolute times. By how much a layer's sleep ended late is taken from the next one that
begins within `MAX_GAP_NS` of it, so late wake-ups do not add up, over the layers of an action and
over actions that follow each other without waiting; single layers may so be shorter than stated.
What torch and the executor take between layers and actions is not hidden: some 50 us each.

Wrong as a model of compute that fights for cores, memory or a device: sleeps do not. On an
accelerator it is the host that sleeps, kernels show none of it. Under tensor parallel every rank
holds all of it and sleeps all of the time.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshscope.core.config.model_config import split_layers
from meshscope.core.config.timed_model_config import TimedCosts, TimedModelConfig
from meshscope.engine.model.initialization import initialize_parameters
from meshscope.engine.model.put_off_gradients import PutOffGradients
from meshscope.engine.model.sharding import ParameterShard
from meshscope.engine.model.tensor_regions import Group, apply_function, drop_single, group_size
from meshscope.errors import UsageError

MAX_GAP_NS = 1_000_000
"""A layer that begins later than this after the one before was waited for, and owes nothing."""

_SPIN_NS = 50_000
"""Kernels wake sleepers about this late (Linux: 50 us of timer slack), so the rest is spun."""

_INIT_STD = 0.02
IGNORED_TARGET = -100


class DeadlineSleeper:
    """Sleeps one after the other whose errors do not add up; see the module's docstring."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._late_ns = 0
        self._woke_ns = 0

    def find_start_ns(self) -> int:
        """When what starts now counts as begun: earlier, where the sleep before it ran late."""
        now_ns = self._clock()
        follows = now_ns - self._woke_ns <= MAX_GAP_NS
        return now_ns - self._late_ns if follows else now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """Returns at that time of the clock, or at once if it is over; spins at most 50 us."""
        while (left_ns := deadline_ns - self._clock()) > 0:
            if left_ns > _SPIN_NS:
                self._sleep((left_ns - _SPIN_NS) / 1e9)
        self._woke_ns = self._clock()
        self._late_ns = self._woke_ns - deadline_ns


class _Timed(torch.autograd.Function):
    """x · weight, in the layer's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "TimedLayer") -> Tensor:
        start_ns = layer.sleeper.find_start_ns()
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        y = x * weight.to(x.dtype)
        layer.sleeper.sleep_until(start_ns + layer.forward_ns)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        layer: TimedLayer = ctx.layer
        start_ns = layer.sleeper.find_start_ns()
        x, weight = ctx.saved_tensors
        input_grad = grad * weight.to(grad.dtype)
        layer.sleeper.sleep_until(start_ns + layer.input_grad_ns)
        # Without the graph of x: it may be put off.
        compute = partial(layer.compute_weight_grad, x.detach(), grad)
        if layer.put_off is not None and layer.put_off.later is not None:
            layer.put_off.later.add((layer.weight,), compute)
            return input_grad, None, None
        return input_grad, compute()[0], None


class TimedLayer(nn.Module):
    """One weight for each channel, and three times."""

    def __init__(
        self,
        costs: TimedCosts,
        index: int,
        hidden_size: int,
        sleeper: DeadlineSleeper,
        **options: Any,
    ) -> None:
        super().__init__()
        self.forward_ns = costs.forward_ns[index]
        self.input_grad_ns = costs.input_grad_ns[index]
        self.weight_grad_ns = costs.weight_grad_ns[index]
        self.sleeper = sleeper
        self.weight = nn.Parameter(torch.empty(hidden_size, **options))
        self.put_off: PutOffGradients | None = None
        """Where weight gradients can be left for later, as on the linear layers."""
        self.parameter_shards = {
            "weight": ParameterShard(full_shape=(hidden_size,), init_mean=1.0, init_std=_INIT_STD)
        }

    def forward(self, x: Tensor) -> Tensor:
        """Each channel times its weight."""
        return apply_function(_Timed, x, self.weight, self)

    def compute_weight_grad(self, x: Tensor, grad: Tensor) -> tuple[Tensor]:
        """In its own time: with backward, or later."""
        start_ns = self.sleeper.find_start_ns()
        weight_grad = (grad * x).flatten(0, -2).sum(0).to(self.weight.dtype)
        self.sleeper.sleep_until(start_ns + self.weight_grad_ns)
        return (weight_grad,)


class TimedStage(nn.Module):
    """A range of layers; the first stage embeds tokens, the last one has head and loss.

    Has what an engine asks of `model.Stage`.
    """

    def __init__(
        self, config: TimedModelConfig, layers: range, tp_group: Group = None, **options: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_range = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        self.tp_group = tp_group
        self.sequence_parallel = False
        sleeper = DeadlineSleeper()
        table = (config.vocab_size, config.hidden_size)
        if self.is_first:
            self.token_embedding = _Table(table, **options)
        self.layers = nn.ModuleDict(
            {
                str(index): TimedLayer(config.costs, index, config.hidden_size, sleeper, **options)
                for index in layers
            }
        )
        if self.is_last:
            self.head = _Table(table, **options)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        return None

    def hidden_shape(
        self, batch_size: int, sequence_length: int | None = None
    ) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next."""
        return batch_size, sequence_length or self.config.sequence_length, self.config.hidden_size

    def put_off_weight_gradients(self) -> PutOffGradients:
        """Lets backward leave weight gradients, and their time, for later."""
        put_off = PutOffGradients()
        for layer in self.layers.values():
            assert isinstance(layer, TimedLayer)
            layer.put_off = put_off
        return put_off

    def forward(
        self, x: Tensor, targets: Tensor | None = None, num_targets: Tensor | int | None = None
    ) -> Tensor:
        """From token ids (first stage) or hidden states to hidden states, or to loss or logits.

        The last stage's loss is the sum over tokens divided by `num_targets`, by default those of
        this batch that are not ignored.
        """
        hidden = F.embedding(x, self.token_embedding.weight) if self.is_first else x
        for layer in self.layers.values():
            hidden = layer(hidden)
        if not self.is_last:
            return hidden
        logits = F.linear(hidden, self.head.weight)
        if targets is None:
            return logits
        if num_targets is None:
            num_targets = (targets != IGNORED_TARGET).sum().clamp(min=1)
        losses = F.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )
        return losses / num_targets


class _Table(nn.Module):
    """A row for each token of the vocabulary."""

    def __init__(self, shape: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **options))
        self.parameter_shards = {"weight": ParameterShard(full_shape=shape, init_std=1.0)}


def build_timed_stage(
    config: TimedModelConfig,
    stage_index: int = 0,
    num_stages: int = 1,
    *,
    stage_sizes: Sequence[int] | None = None,
    tp_group: Group = None,
    sequence_parallel: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TimedStage:
    """One stage with initial weights, the same for any layout; by default, the whole model.

    Called as `model.build_stage` is. Raises UsageError with every problem.
    """
    tp_group = drop_single(tp_group)
    problems = config.validate(
        group_size(tp_group),
        num_stages,
        stage_sizes=stage_sizes,
        sequence_parallel=sequence_parallel,
    )
    if not 0 <= stage_index < num_stages:
        problems.append(f"stage {stage_index} is outside 0..{num_stages - 1}")
    if problems:
        raise UsageError("; ".join(problems))
    layers = split_layers(config.num_layers, num_stages, stage_sizes)[stage_index]
    stage = TimedStage(config, layers, tp_group, device=device, dtype=dtype)
    if torch.device(device).type != "meta":
        initialize_parameters(stage, seed=seed)
    return stage
