"""Users' own models: a list of layers, cut into stages, with a plan of what tp spreads and how.

    layers = [lambda: nn.Embedding(512, 64), lambda: MyBlock(), lambda: MyBlock(), MyHead]
    plan = {
        "layers.0": LayerPlan("vocab"),
        "layers.*.attention.w[qkv]": LayerPlan("column"),
        "layers.*.attention.wo": LayerPlan("row"),
    }
    stage = build_user_stage(layers, plan, stage_index, num_stages, tp_group=group)

The plan's keys are patterns (as of shells) for module names, `nn.Linear` and `nn.Embedding` are
put aside for their parallel counterparts, and everything else stays as it is. What lies between a
column- and a row-parallel layer sees this rank's part of the width: code there must not state the
full one (`view(batch, length, -1, head_size)`).

Wrong when layers share parameters, or draw random numbers in forward: every tp rank draws its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from meshscope.core.config.model_config import find_split_problems, split_layers
from meshscope.engine.memory.recompute import StageRunner
from meshscope.engine.model.initialization import seeded_by_name
from meshscope.engine.model.sharding import ParameterShard
from meshscope.engine.model.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from meshscope.engine.model.tensor_regions import Group, drop_single, group_size
from meshscope.errors import UsageError

UserLayer = nn.Module | Callable[[], nn.Module]
"""A module, or what makes one. Factories are better: a rank makes the layers of its stage only."""

Loss = Callable[[Tensor, Tensor], Tensor]


class ShardStrategy(StrEnum):
    """How a layer's parameters lie on the ranks of a tp group."""

    COLUMN = "column"
    """Each rank has other outputs of a linear layer."""
    ROW = "row"
    """Each rank has other inputs of a linear layer."""
    VOCAB = "vocab"
    """Each rank has other rows of an embedding."""
    REPLICATED = "replicated"
    """Each rank has everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What a layer sends over its tp group, `none` or the name of a collective."""

    forward: str
    backward: str
    gradients: str
    """Once per step, for parameters whose gradient each rank has in part."""

    def __str__(self) -> str:
        return (
            f"forward {self.forward}, backward {self.backward}, "
            f"parameter gradients {self.gradients}"
        )


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How one layer is spread over tp; the communication follows from it."""

    strategy: ShardStrategy | str
    sequence_parallel: bool = False
    """Whether the activations outside of the region hold a part of the sequence (dimension 1)."""
    gather_output: bool = False
    """For column: whether every rank gets all outputs, for a layer with no row-parallel partner."""

    def __post_init__(self) -> None:
        if self.strategy not in list(ShardStrategy):
            allowed = ", ".join(ShardStrategy)
            raise UsageError(f"strategy is {self.strategy!r}, expected one of {allowed}")
        if self.gather_output and self.strategy != ShardStrategy.COLUMN:
            raise UsageError(f"gather_output is for column, but the strategy is {self.strategy}")

    @property
    def communication(self) -> Communication:
        """Collectives of one forward and backward."""
        into_region = "reduce_scatter" if self.sequence_parallel else "all_reduce"
        out_of_part = "all_gather" if self.sequence_parallel else "none"
        if self.strategy == ShardStrategy.COLUMN:
            gathered = "all_gather" if self.gather_output else "none"
            forward = [name for name in (out_of_part, gathered) if name != "none"]
            # The sequence is gathered again in backward rather than kept.
            backward = [name for name in (out_of_part, into_region) if name != "none"]
            return Communication(
                forward=" + ".join(forward) or "none",
                backward=" + ".join(backward),
                gradients="none",
            )
        if self.strategy == ShardStrategy.REPLICATED:
            gradients = "all_reduce" if self.sequence_parallel else "none"
            return Communication(forward="none", backward="none", gradients=gradients)
        has_whole_bias = self.sequence_parallel and self.strategy == ShardStrategy.ROW
        return Communication(
            forward=into_region,
            backward=out_of_part,
            gradients="all_reduce of the bias" if has_whole_bias else "none",
        )


class UserStage(nn.Module):
    """A range of a user's layers, called one after the other; the last stage may have a loss."""

    def __init__(self, layers: Mapping[int, nn.Module], num_layers: int, loss: Loss | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        self.layer_range = range(min(layers), max(layers) + 1)
        self.is_first = self.layer_range.start == 0
        self.is_last = self.layer_range.stop == num_layers
        self.loss = loss
        self.runner = StageRunner()
        """Calls the layers and the loss; memory strategies put theirs here."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The last layer's output, or the loss where this stage has one and targets are given.

        Under autocast what goes to the next stage is float32, as the engine's pipeline expects,
        whatever the layer makes.
        """
        last = None
        if self.is_last and self.loss is not None and targets is not None:
            last = partial(_call_loss, self.loss, targets)
        x = self.runner.run_layers(list(self.layers.values()), x, last=last)
        is_cast = not self.is_last and torch.is_autocast_enabled(x.device.type)
        return x.float() if is_cast and x.is_floating_point() else x


def _call_loss(loss: Loss, targets: Tensor, x: Tensor) -> Tensor:
    return loss(x, targets)


def build_user_stage(
    layers: Sequence[UserLayer],
    plan: Mapping[str, LayerPlan],
    stage_index: int = 0,
    num_stages: int = 1,
    *,
    stage_sizes: Sequence[int] | None = None,
    tp_group: Group = None,
    loss: Loss | None = None,
    seed: int = 0,
) -> UserStage:
    """This rank's part of one stage of a user's model.

    Factories run with torch's generators seeded by the layer's name, so that the weights are the
    same for any layout. Modules keep their weights (they must be the same on every rank) and are
    changed in place. Raises UsageError with every problem.
    """
    problems = find_split_problems(len(layers), num_stages, stage_sizes)
    if not 0 <= stage_index < num_stages:
        problems.append(f"stage {stage_index} is outside 0..{num_stages - 1}")
    if problems:
        raise UsageError("; ".join(problems))
    problems = find_plan_problems(layers, plan, tp=group_size(tp_group))
    if problems:
        raise UsageError("; ".join(problems))
    built: dict[int, nn.Module] = {}
    for index in split_layers(len(layers), num_stages, stage_sizes)[stage_index]:
        name = f"layers.{index}"
        built[index] = _parallelize(_make_layer(layers[index], name, seed), name, plan, tp_group)
    return UserStage(built, len(layers), loss)


def find_plan_problems(
    layers: Sequence[UserLayer], plan: Mapping[str, LayerPlan], *, tp: int = 1
) -> list[str]:
    """Everything in the plan that does not fit the layers, one sentence each. Needs no memory."""
    modules = {
        name: module
        for index, layer in enumerate(layers)
        for name, module in _named_modules(_make_on_meta(layer), f"layers.{index}")
    }
    problems = [
        f"the plan's {pattern!r} matches no module of the model"
        for pattern in plan
        if not any(fnmatchcase(name, pattern) for name in modules)
    ]
    for name, module in modules.items():
        found = _find_plan(name, plan)
        if found is not None:
            problems += _find_row_problems(name, module, found, tp)
    return problems


def _parallelize(
    module: nn.Module, name: str, plan: Mapping[str, LayerPlan], tp_group: Group
) -> nn.Module:
    """`module` with its planned parts spread over the group; the returned one replaces it."""
    found = _find_plan(name, plan)
    if found is not None:
        module = _convert(module, found, drop_single(tp_group))
    for child_name, child in list(module.named_children()):
        setattr(module, child_name, _parallelize(child, f"{name}.{child_name}", plan, tp_group))
    return module


def _convert(module: nn.Module, plan: LayerPlan, group: Group) -> nn.Module:
    if plan.strategy == ShardStrategy.REPLICATED:
        return _note_replicated(module, plan)
    weight = module.weight
    assert isinstance(weight, Tensor), "find_plan_problems has checked the module's type"
    parallel: nn.Module
    if isinstance(module, nn.Embedding):
        parallel = VocabParallelEmbedding(
            *weight.shape,
            group=group,
            sequence_parallel=plan.sequence_parallel,
            device=weight.device,
            dtype=weight.dtype,
        )
    else:
        is_column = plan.strategy == ShardStrategy.COLUMN
        gather = {"gather_output": plan.gather_output} if is_column else {}
        parallel = (ColumnParallelLinear if is_column else RowParallelLinear)(
            weight.shape[1],
            weight.shape[0],
            group=group,
            bias=module.bias is not None,
            sequence_parallel=plan.sequence_parallel,
            device=weight.device,
            dtype=weight.dtype,
            **gather,
        )
    with torch.no_grad():
        for name, shard in parallel.parameter_shards.items():
            parallel.get_parameter(name).copy_(shard.take(module.get_parameter(name)))
    return parallel


def _note_replicated(module: nn.Module, plan: LayerPlan) -> nn.Module:
    for owner in module.modules():
        owner.parameter_shards = {  # type: ignore[assignment]  # a module takes any attribute
            name: ParameterShard(
                full_shape=tuple(parameter.shape), is_sequence_parallel=plan.sequence_parallel
            )
            for name, parameter in owner.named_parameters(recurse=False)
        }
    return module


def _find_row_problems(name: str, module: nn.Module, plan: LayerPlan, tp: int) -> list[str]:
    if plan.strategy == ShardStrategy.REPLICATED:
        return []
    kind = type(module).__name__
    if plan.strategy == ShardStrategy.VOCAB:
        if not isinstance(module, nn.Embedding):
            return [f"{name} is {kind}, but the strategy vocab needs nn.Embedding"]
        if module.padding_idx is not None or module.max_norm is not None:
            return [f"{name} has padding_idx or max_norm, which vocab does not keep"]
        return []
    if not isinstance(module, nn.Linear):
        return [f"{name} is {kind}, but the strategy {plan.strategy} needs nn.Linear"]
    is_column = plan.strategy == ShardStrategy.COLUMN
    size, what = (module.out_features, "outputs") if is_column else (module.in_features, "inputs")
    if size % tp:
        return [f"{name} has {size} {what}, which tp ({tp}) does not divide"]
    return []


def _find_plan(name: str, plan: Mapping[str, LayerPlan]) -> LayerPlan | None:
    """The first row whose pattern matches."""
    return next((row for pattern, row in plan.items() if fnmatchcase(name, pattern)), None)


def _make_layer(layer: UserLayer, name: str, seed: int) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    with seeded_by_name(name, seed=seed):
        return layer()


def _make_on_meta(layer: UserLayer) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    with torch.device("meta"):
        return layer()


def _named_modules(layer: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    return [
        (f"{name}.{inner}" if inner else name, module) for inner, module in layer.named_modules()
    ]
