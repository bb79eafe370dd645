"""Tensor parallel by torch's DTensor and `parallelize_module`: an option beside the fast path.

    stage = build_stage(config, stage_index, num_stages)          # without tp_group
    parallelize_stage(stage, mesh["tp"], sequence_parallel=True)  # changed in place
    …                                                             # used as any other stage
    reduce_partial_gradients(stage)                               # before clipping and the step

For checkpoints and tools that expect DTensors, and to compare with: on plain tensors the same
stage sends as much and costs a fraction of the host's time (`benchmarks/tensor_parallel.py`).

Matrices that are one in the model (queries, keys and values; gate and value) become one
`nn.Linear` for each, so that each is cut by itself; they share one gathering of their input.
Between layers there are plain tensors, this rank's heads and columns as on the fast path, so a
stage takes and gives the same, and pipelines need not know. The loss is the engine's own
vocabulary-parallel one, on plain tensors: torch's `loss_parallel` would have to be entered around
every backward.

All parameters become DTensors on the tp mesh. Those that are whole on every rank and see a part of
the sequence only get gradients that are sums yet to be made (`Partial`): `reduce_partial_gradients`
makes them in one all-reduce, else the optimizer would, one by one. DTensor's gradient of a
vocabulary-parallel table covers the whole table on every rank until then. Names are those of the
rebuilt modules; `find_model_rows` and `gather_full_tensors` give the model's back.

Data parallel over these: FSDP2 (it makes the sums itself), or dp 1. The reducer leaves DTensors
alone and DDP loses them, so both refuse. Zero-bubble schedules are right but gain nothing: all
weight gradients are computed in I.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshscope.engine.model.sharding import ParameterShard
from meshscope.engine.model.tensor_parallel import (
    SEQUENCE_DIM,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from meshscope.engine.model.transformer import Attention, Block, Mlp, PositionEmbedding, Stage
from meshscope.errors import UsageError

_ReadTensor = Callable[[nn.Parameter], Tensor | None]


def parallelize_stage(
    stage: Stage, tp_mesh: DeviceMesh, *, sequence_parallel: bool = False
) -> Stage:
    """Spreads a stage that was built whole over a 1-D mesh, in place; hands the stage back.

    Every rank must have the same weights, which the engine's initialisation gives. On a mesh of
    one rank nothing changes. Make the optimizer, and FSDP2, after it.
    """
    _raise_if_unfit(stage, tp_mesh, sequence_parallel)
    if tp_mesh.size() == 1:
        return stage
    stage.tp_group = tp_mesh.get_group()
    stage.sequence_parallel = sequence_parallel
    plan = _rebuild(stage, tp_mesh, sequence_parallel)
    # Every rank cuts its own weights; nothing is sent.
    parallelize_module(stage, tp_mesh, plan, src_data_rank=None)
    if stage.is_first and stage.is_last and stage.config.tie_embeddings:
        stage.head.weight = stage.token_embedding.weight
    return stage


@torch.no_grad()
def reduce_partial_gradients(module: nn.Module) -> None:
    """Makes gradients lie as their parameters do, the sums of all tp ranks.

    Once per step, when all backwards are done and before gradients are read. After FSDP2's
    `finish`, and where all lie so already, nothing is sent. Collective over tp.
    """
    whole: list[nn.Parameter] = []
    for parameter in module.parameters():
        grad = parameter.grad
        if not isinstance(grad, DTensor) or grad.placements == _as_dtensor(parameter).placements:
            continue
        if all(p.is_replicate() for p in _as_dtensor(parameter).placements):
            whole.append(parameter)
        else:
            parameter.grad = grad.redistribute(placements=_as_dtensor(parameter).placements)
    for dtype in dict.fromkeys(p.dtype for p in whole):
        _sum_whole([p for p in whole if p.dtype == dtype])


def _sum_whole(parameters: list[nn.Parameter]) -> None:
    mesh = _as_dtensor(parameters[0]).device_mesh
    flat = torch.cat([_as_dtensor(p.grad).to_local().flatten() for p in parameters])
    dist.all_reduce(flat, group=mesh.get_group())
    sums = torch.split(flat, [p.numel() for p in parameters])
    for parameter, summed in zip(parameters, sums, strict=True):
        parameter.grad = DTensor.from_local(
            summed.view(parameter.shape), mesh, [Replicate()], run_check=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelRows:
    """Which rows of the model's parameter a parameter is."""

    name: str
    """Name in the full model."""
    first_row: int
    full_shape: tuple[int, ...]
    """Shape in the full model."""


def find_model_rows(stage: nn.Module) -> dict[str, _ModelRows]:
    """Where in the model each parameter belongs, by the names of `named_parameters`."""
    named = list(stage.named_parameters())
    num_rows: dict[str, int] = {}
    first_rows = []
    for name, parameter in named:
        model_name = _model_name(name)
        first_rows.append(num_rows.get(model_name, 0))
        num_rows[model_name] = first_rows[-1] + (parameter.shape[0] if parameter.ndim else 0)
    return {
        name: _ModelRows(
            name=_model_name(name),
            first_row=first_row,
            full_shape=(num_rows[_model_name(name)], *parameter.shape[1:])[: parameter.ndim],
        )
        for (name, parameter), first_row in zip(named, first_rows, strict=True)
    }


@torch.no_grad()
def gather_full_tensors(
    stage: nn.Module, read: _ReadTensor = lambda parameter: parameter
) -> dict[str, Tensor]:
    """Every parameter by its name in the model and in full; collective over tp (and FSDP2's dp).

    `read` chooses what of it, such as `lambda p: p.grad`; parameters it gives None for are left
    out.
    """
    found: dict[str, list[Tensor]] = {}
    for name, parameter in stage.named_parameters():
        value = read(parameter)
        if value is not None:
            full = _as_dtensor(value).full_tensor() if hasattr(value, "full_tensor") else value
            found.setdefault(_model_name(name), []).append(full)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


@torch.no_grad()
def load_full_tensors(stage: nn.Module, full: dict[str, Tensor]) -> None:
    """Puts full parameters, by their names in the model, into this rank's parts."""
    model_rows = find_model_rows(stage)
    for name, parameter in stage.named_parameters():
        rows = model_rows[name]
        source = full[rows.name]
        if source.ndim:
            source = source.narrow(0, rows.first_row, parameter.shape[0])
        _assign(parameter, source)


def _assign(parameter: nn.Parameter, source: Tensor) -> None:
    if not hasattr(parameter, "to_local"):
        parameter.copy_(source)
        return
    cut = _as_dtensor(parameter)
    source = source.to(device=cut.device, dtype=cut.dtype)
    # Every rank has the source, so nothing needs to be sent.
    whole = [Replicate()] * cut.device_mesh.ndim
    spread = DTensor.from_local(source, cut.device_mesh, whole, run_check=False)
    cut.copy_(spread.redistribute(placements=cut.placements))


# --- modules that DTensor's styles know ----------------------------------------------------------

_PARTS = "matrices"


class _Matrices(nn.Module):
    """Several linear maps of one input, their outputs side by side."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.matrices], -1)


class _Positions(nn.Module):
    """`PositionEmbedding` whose table is a DTensor."""

    def __init__(self, whole: PositionEmbedding, mesh: DeviceMesh, is_cut: bool) -> None:  # noqa: FBT001
        super().__init__()
        table = distribute_tensor(whole.weight.detach(), mesh, [Replicate()], src_data_rank=None)
        self.weight = nn.Parameter(table)
        self.parameter_shards = whole.parameter_shards
        self.part_index = mesh.get_local_rank() if is_cut else 0
        self._gradient = Partial() if is_cut else Replicate()

    def forward(self, x: Tensor) -> Tensor:
        table = _as_dtensor(self.weight).to_local(grad_placements=[self._gradient])
        length = x.shape[SEQUENCE_DIM]
        return x + table.narrow(0, self.part_index * length, length)


class _Whole(ParallelStyle):
    """For modules that see the same on every rank: parameters become DTensors, no more."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(
                parameter.detach(), device_mesh, [Replicate()], src_data_rank=None
            )
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> DTensor:
            return DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)

        def leave(_: nn.Module, __: object, output: DTensor) -> Tensor:
            return output.to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def _rebuild(stage: Stage, mesh: DeviceMesh, is_cut: bool) -> dict[str, ParallelStyle]:  # noqa: FBT001
    """Puts torch's modules in place of the engine's, and says how each is to be spread."""
    stream = Shard(SEQUENCE_DIM) if is_cut else Replicate()
    plan: dict[str, ParallelStyle] = {}

    def norm() -> ParallelStyle:
        return SequenceParallel(use_local_output=True) if is_cut else _Whole()

    if stage.is_first:
        stage.token_embedding = _to_embedding(stage.token_embedding, mesh)  # type: ignore[assignment]
        plan["token_embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        if stage.config.position == "learned":
            stage.position_embedding = _Positions(stage.position_embedding, mesh, is_cut)  # type: ignore[assignment]
    for index, block in stage.layers.items():
        assert isinstance(block, Block)
        _rebuild_block(block, mesh)
        prefix = f"layers.{index}"
        for name in ("attention_norm", "mlp_norm"):
            plan[f"{prefix}.{name}"] = norm()
        for name in ("attention.qkv", "mlp.up"):
            plan[f"{prefix}.{name}"] = PrepareModuleInput(
                input_layouts=(stream,), desired_input_layouts=(Replicate(),)
            )
            plan[f"{prefix}.{name}.{_PARTS}.*"] = ColwiseParallel()
        for name in ("attention.output", "mlp.down"):
            plan[f"{prefix}.{name}"] = RowwiseParallel(output_layouts=stream)
    if stage.is_last:
        plan["final_norm"] = norm()
        stage.head = _to_linears(stage.head, mesh)[0]  # type: ignore[assignment]
        plan["head"] = ColwiseParallel(input_layouts=stream)
    return plan


def _rebuild_block(block: Block, mesh: DeviceMesh) -> None:
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    attention.local_sizes = [size // mesh.size() for size in attention.local_sizes]
    attention.qkv = _Matrices(_to_linears(attention.qkv, mesh))  # type: ignore[assignment]
    mlp.up = _Matrices(_to_linears(mlp.up, mesh))  # type: ignore[assignment]
    attention.output = _to_row_linear(attention.output, mesh)  # type: ignore[assignment]
    mlp.down = _to_row_linear(mlp.down, mesh)  # type: ignore[assignment]


def _to_linears(layer: ColumnParallelLinear, mesh: DeviceMesh) -> list[nn.Linear]:
    """One for each matrix in the layer."""
    shards, sizes = layer.parameter_shards, list(layer.parameter_shards["weight"].parts)
    weights = torch.split(layer.weight.detach(), sizes)
    biases = [None] * len(sizes) if layer.bias is None else torch.split(layer.bias.detach(), sizes)
    made = []
    for weight, bias in zip(weights, biases, strict=True):
        linear = _make_linear(weight, bias)
        linear.parameter_shards = {  # type: ignore[assignment]  # a module takes any attribute
            name: _note_cut(replace(shards[name], full_shape=tuple(value.shape)), mesh, 0)
            for name, value in linear.named_parameters()
        }
        made.append(linear)
    if len(made) == 1:
        made[0].weight = layer.weight  # a tied table stays one
    return made


def _to_row_linear(layer: RowParallelLinear, mesh: DeviceMesh) -> nn.Linear:
    linear = _make_linear(layer.weight.detach(), layer.bias)
    shards = layer.parameter_shards
    linear.parameter_shards = {  # type: ignore[assignment]  # a module takes any attribute
        **shards,
        "weight": _note_cut(shards["weight"], mesh, 1),
    }
    return linear


def _to_embedding(layer: VocabParallelEmbedding, mesh: DeviceMesh) -> nn.Embedding:
    embedding = nn.Embedding(layer.weight.shape[0], layer.weight.shape[1], device="meta")
    embedding.weight = layer.weight
    embedding.parameter_shards = {  # type: ignore[assignment]  # a module takes any attribute
        "weight": _note_cut(layer.parameter_shards["weight"], mesh, 0)
    }
    return embedding


def _make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


def _note_cut(shard: ParameterShard, mesh: DeviceMesh, dim: int) -> ParameterShard:
    return replace(
        shard,
        dim=dim,
        parts=(shard.full_shape[dim],),
        num_shards=mesh.size(),
        shard_index=mesh.get_local_rank(),
    )


# --- what is what --------------------------------------------------------------------------------


def _raise_if_unfit(stage: Stage, tp_mesh: DeviceMesh, sequence_parallel: bool) -> None:  # noqa: FBT001
    problems = []
    if stage.tp_group is not None:
        problems.append("the stage is spread over tp already; build it without tp_group")
    if tp_mesh.ndim != 1:
        problems.append(f"tp_mesh has {tp_mesh.ndim} dimensions, expected 1; give mesh['tp']")
    else:
        problems += stage.config.validate(tp_mesh.size(), sequence_parallel=sequence_parallel)
    if problems:
        raise UsageError("; ".join(problems))


def _model_name(name: str) -> str:
    """The model's name for a parameter of a rebuilt module."""
    parts = name.split(".")
    if _PARTS in parts:
        index = parts.index(_PARTS)
        del parts[index : index + 2]
    return ".".join(parts)


def _as_dtensor(x: Any) -> DTensor:
    assert isinstance(x, DTensor)
    return x
