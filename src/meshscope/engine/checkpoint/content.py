"""What of a model and its optimizer a checkpoint holds, by names that no layout changes.

    model/layers.7.mlp.down.weight                 a parameter, or the master copy of it
    buffer/layers.7.batch_norm.running_mean        a persistent buffer, whole on every rank
    optimizer/exp_avg/layers.7.mlp.down.weight     optimizer state of a parameter's shape
    optimizer/step/layers.7.mlp.down.weight        a scalar of the optimizer

A copy of a tied table has the name of the table on every stage, so that it is stored
once. Optimizers whose state has another shape than the parameter (Adafactor, LBFGS) are refused:
it could not be cut anew.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshscope.engine.checkpoint.pieces import (
    PiecedTensor,
    cut_into_pieces,
    local_values,
    whole_tensor,
)
from meshscope.engine.model.sharding import ParameterShard, find_parameter_shards
from meshscope.errors import UsageError

MODEL = "model/"
BUFFER = "buffer/"
OPTIMIZER = "optimizer/"

Masters = Mapping[nn.Parameter, Tensor]
"""The tensor of higher precision that the optimizer steps instead of a parameter."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile and torch's wrappers put into names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter with its name in the whole model."""

    name: str
    parameter: nn.Parameter
    stepped: Tensor
    """What the optimizer steps: the parameter itself, or its master."""
    shard: ParameterShard


@dataclass(slots=True, kw_only=True)
class Content:
    """Tensors by key; of several with the same, the first is stored and the others are copies."""

    tensors: dict[str, PiecedTensor] = field(default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """After reading: from where, and to where."""
    sources: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, tensor: Tensor, shard: ParameterShard | None = None) -> None:
        """Adds a tensor; without a shard it is whole on every rank."""
        if key in self.sources:
            self.copies.append((local_values(self.sources[key]), local_values(tensor)))
            return
        self.sources[key] = tensor
        self.tensors[key] = (
            whole_tensor(tensor) if shard is None else cut_into_pieces(tensor, shard)
        )

    def copy_tied(self) -> None:
        """Copies what was read to the tied tensors."""
        for source, target in self.copies:
            target.copy_(source)


def find_parameters(
    stages: Mapping[int, nn.Module], masters: Masters | None = None
) -> list[NamedParameter]:
    """Every parameter object of this rank's stages, in the order of stages."""
    found: dict[nn.Parameter, NamedParameter] = {}
    by_name: dict[str, NamedParameter] = {}
    for index in sorted(stages):
        stage = _unwrap(stages[index])
        shards = find_parameter_shards(stage)
        for wrapped_name, parameter in stage.named_parameters():
            shard = shards[wrapped_name]
            own_name = _clean(wrapped_name)
            if parameter in found:
                continue
            if own_name in by_name:
                raise UsageError(
                    f"stages {sorted(stages)} have two parameters named {own_name}; "
                    "give parameters the names of the whole model"
                )
            found[parameter] = by_name[own_name] = NamedParameter(
                name=shard.tied_to or own_name,
                parameter=parameter,
                stepped=(masters or {}).get(parameter, parameter),
                shard=shard,
            )
    return list(found.values())


def collect_model(
    stages: Mapping[int, nn.Module], parameters: Sequence[NamedParameter], content: Content
) -> None:
    """Adds parameters and persistent buffers."""
    for named in parameters:
        content.add(MODEL + named.name, named.stepped, named.shard)
    for index in sorted(stages):
        for name, buffer in _find_buffers(_unwrap(stages[index])):
            content.add(BUFFER + name, buffer)


def collect_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[NamedParameter],
    content: Content,
) -> None:
    """Adds the state that optimizers keep for the parameters."""
    require_known(optimizers, parameters)
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    for named in parameters:
        for key, value in states.get(named.stepped, {}).items():
            if value is None:  # what torch's SGD keeps without momentum
                continue
            content.add(
                f"{OPTIMIZER}{key}/{named.name}", value, _find_state_shard(named, key, value)
            )


def prepare_optimizer_state(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[NamedParameter],
    stored: Mapping[str, TensorStorageMetadata],
    content: Content,
) -> dict[torch.optim.Optimizer, dict[Tensor, dict[str, Tensor]]]:
    """Adds memory for the stored state; what is handed back becomes the optimizers' when read.

    `stored` describes every tensor of the checkpoint.
    """
    keys_of: dict[str, list[str]] = {}
    for path in stored:
        if path.startswith(OPTIMIZER):
            key, name = path.removeprefix(OPTIMIZER).split("/", 1)
            keys_of.setdefault(name, []).append(key)
    named_of = {named.stepped: named for named in parameters}
    states: dict[torch.optim.Optimizer, dict[Tensor, dict[str, Tensor]]] = {}
    for optimizer in optimizers:
        states[optimizer] = {}
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for stepped in group["params"]:
                named = named_of[stepped]
                old = optimizer.state.get(stepped, {})
                state = states[optimizer][stepped] = {}
                for key in keys_of.get(named.name, []):
                    path = f"{OPTIMIZER}{key}/{named.name}"
                    is_scalar = not stored[path].size and bool(named.shard.full_shape)
                    shape = () if is_scalar else stepped.shape
                    known = old.get(key)
                    if isinstance(known, Tensor) and known.shape == shape:
                        state[key] = torch.empty_like(known)
                    elif is_scalar:  # on the CPU unless a fused kernel reads it, as torch has it
                        state[key] = torch.empty(
                            (),
                            dtype=stored[path].properties.dtype,
                            device=stepped.device if on_device else "cpu",
                        )
                    else:
                        state[key] = torch.empty_like(stepped, requires_grad=False)
                    content.add(path, state[key], None if is_scalar else named.shard)
    return states


def require_known(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[NamedParameter]
) -> None:
    """Raises UsageError when an optimizer steps what is no parameter of the stages."""
    known = {named.stepped for named in parameters}
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    unknown = [p for p in stepped if p not in known]
    if unknown:
        shapes = ", ".join(str(tuple(p.shape)) for p in unknown[:3])
        raise UsageError(
            f"{len(unknown)} of the optimizer's {len(stepped)} parameters belong to none of the "
            f"stages (shapes {shapes}); give all stages, and the masters it steps in their place"
        )


def describe_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """The kinds of optimizers, to compare a checkpoint's with a run's."""
    return sorted({type(optimizer).__name__ for optimizer in optimizers})


def _find_state_shard(named: NamedParameter, key: str, value: object) -> ParameterShard | None:
    if isinstance(value, Tensor):
        if value.shape == named.stepped.shape:
            return named.shard
        if not value.ndim:
            return None
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise UsageError(
        f"the optimizer keeps {found} as {key} of {named.name}, whose shape here is "
        f"{tuple(named.stepped.shape)}; checkpoints take state of the parameter's shape and scalar "
        "tensors only, so use an optimizer like SGD or AdamW"
    )


def _find_buffers(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in stage.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield _clean(f"{prefix}.{name}" if prefix else name), buffer


def _unwrap(stage: nn.Module) -> nn.Module:
    return stage.module if isinstance(stage, nn.parallel.DistributedDataParallel) else stage


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
