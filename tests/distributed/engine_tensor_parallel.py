"""Trains tensor-parallel models and their single-process twins, and writes how far they differ.

    python -m tests.distributed.engine_tensor_parallel FOLDER

Every rank leaves `FOLDER/tp<n>_rank<r>.json`: for each case both loss curves and the largest
difference of gradients over all steps (this rank's part; in the last step the gathered whole) and
of gathered weights at the end; and single parts.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.distributed.fork_ranks import import_everything, run_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from meshscope.engine import (
    LayerPlan,
    ModelConfig,
    build_stage,
    build_user_stage,
    find_parameter_shards,
    gather_parameter,
    put_off_weight_gradients,
    reduce_sequence_parallel_gradients,
    vocab_parallel_cross_entropy,
)
from meshscope.engine.model.put_off_gradients import PutOffGradients
from meshscope.engine.model.tensor_regions import (
    copy_to_region,
    gather_from_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
    scatter_to_region,
)

NUM_STEPS = 5
LEARNING_RATE = 0.5
MOMENTUM = 0.9
SEED = 5

LLAMA = ModelConfig(
    vocab_size=101,  # prime: the last rank's shard is smaller
    num_layers=2,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=96,
    sequence_length=32,
    init_std=0.14,  # where five steps at this learning rate amplify rounding little
)
GPT = dataclasses.replace(
    LLAMA, num_kv_heads=8, norm="layernorm", position="learned", activation="gelu", bias=True,
    tie_embeddings=True,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tie_embeddings=True),
    "gpt": GPT,
    "gpt untied": dataclasses.replace(GPT, tie_embeddings=False, num_kv_heads=4),
    "layernorm rope": dataclasses.replace(LLAMA, norm="layernorm", activation="gelu", bias=True),
    "rmsnorm learned": dataclasses.replace(LLAMA, position="learned", tie_embeddings=True),
}
EXACT = ("llama", "gpt")
"""Compared in float64 as well."""


@dataclass
class Reference:
    """How a model trained in one process."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step, by parameter."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


@dataclass
class Comparison:
    """Largest differences between a tensor-parallel model, as one rank sees it, and its twin."""

    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    gradient_difference: float = 0.0
    worst_gradient: str = ""
    weight_difference: float = 0.0
    worst_weight: str = ""

    def add(self, what: str, name: str, full: Tensor, expected: Tensor) -> None:
        assert full.shape == expected.shape, (name, full.shape, expected.shape)
        difference = (full - expected).abs().max().item()
        if not difference <= getattr(self, f"{what}_difference"):  # nan is a difference as well
            setattr(self, f"{what}_difference", difference)
            setattr(self, f"worst_{what}", name)


def make_batch() -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, some of them ignored; one batch for all steps, so that it learns."""
    tokens = torch.randint(0, 101, (4, 33), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[0, 5:8] = -100
    return tokens[:, :-1], targets


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """No Adam: it would hide gradients of a wrong scale."""
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)


def train_reference(model: nn.Module) -> Reference:
    trained, optimizer = Reference(), make_optimizer(model)
    inputs, targets = make_batch()
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        trained.losses.append(loss.item())
        trained.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    trained.weights = {name: p.detach() for name, p in model.named_parameters()}
    return trained


@cache
def transformer_reference(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Reference:
    return train_reference(build_stage(config, seed=SEED, dtype=dtype))


@cache
def user_reference() -> Reference:
    plan = make_user_plan(sequence_parallel=False)
    return train_reference(build_user_stage(make_user_layers(), plan, loss=token_loss, seed=SEED))


def make_references() -> None:
    """Before ranks are forked, so that each of them has them."""
    for config in CONFIGS.values():
        transformer_reference(config)
    for name in EXACT:
        transformer_reference(CONFIGS[name], torch.float64)
    user_reference()


def compare(
    model: nn.Module,
    reference: Reference,
    *,
    sums_partial_gradients: bool = True,
    splits_backward: bool = False,
    checkpoints: bool = False,
) -> Comparison:
    """Trains a model as the reference was and compares every step. Every rank must call it."""
    if checkpoints:
        for block in model.layers.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    put_off = put_off_weight_gradients(model) if splits_backward else PutOffGradients()
    group = dist.group.WORLD
    shards = find_parameter_shards(model)
    assert set(shards) == set(reference.weights)
    found = Comparison(reference_losses=reference.losses)
    optimizer = make_optimizer(model)
    inputs, targets = make_batch()
    for gradients in reference.gradients:
        optimizer.zero_grad()
        loss = model(inputs, targets)
        with put_off.collect() as later:
            loss.backward()
        later.compute()
        found.losses.append(loss.item())
        if sums_partial_gradients:
            reduce_sequence_parallel_gradients(model, group)
        for name, parameter in model.named_parameters():
            found.add("gradient", name, parameter.grad, shards[name].take(gradients[name]))
        optimizer.step()
    for name, parameter in model.named_parameters():
        full = gather_parameter(parameter.grad, shards[name], group)
        found.add("gradient", name, full, reference.gradients[-1][name])
        full = gather_parameter(parameter.detach(), shards[name], group)
        found.add("weight", name, full, reference.weights[name])
    return found


def compare_transformer(
    config: ModelConfig, *, sequence_parallel: bool, dtype: torch.dtype = torch.float32, **how: bool
) -> Comparison:
    model = build_stage(
        config,
        tp_group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
        seed=SEED,
        dtype=dtype,
    )
    return compare(model, transformer_reference(config, dtype), **how)


# --- a user's model ---------------------------------------------------------------------------


class UserBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.wide = nn.Linear(32, 64)
        self.narrow = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def make_user_layers() -> list[Callable[[], nn.Module]]:
    return [
        lambda: nn.Embedding(101, 32),
        UserBlock,
        UserBlock,
        lambda: nn.Linear(32, 104, bias=False),
    ]


def make_user_plan(*, sequence_parallel: bool) -> dict[str, LayerPlan]:
    return {
        "layers.0": LayerPlan("vocab", sequence_parallel),
        "layers.*.wide": LayerPlan("column", sequence_parallel),
        "layers.*.narrow": LayerPlan("row", sequence_parallel),
        "layers.*.norm": LayerPlan("replicated", sequence_parallel),
        "layers.3": LayerPlan("column", sequence_parallel, gather_output=True),
    }


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def compare_user_model(*, sequence_parallel: bool) -> Comparison:
    plan = make_user_plan(sequence_parallel=sequence_parallel)
    layers = make_user_layers()
    model = build_user_stage(layers, plan, tp_group=dist.group.WORLD, loss=token_loss, seed=SEED)
    return compare(model, user_reference())


# --- single parts -----------------------------------------------------------------------------


def count_collectives(run: Callable[[], Any]) -> dict[str, int]:
    names = {
        "c10d::allreduce_": "all_reduce",
        "c10d::_allgather_base_": "all_gather",
        "c10d::_reduce_scatter_base_": "reduce_scatter",
    }
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return dict(Counter(names[e.name] for e in profiler.events() if e.name.startswith("c10d::")))


def count_planned_collectives() -> list[dict[str, Any]]:
    """For each row of a plan: what it says it sends, and what a layer of it sent."""
    rows = []
    for sequence_parallel in (False, True):
        for plan, layer in (
            (LayerPlan("column", sequence_parallel), nn.Linear(32, 64)),
            (LayerPlan("column", sequence_parallel, gather_output=True), nn.Linear(32, 64)),
            (LayerPlan("row", sequence_parallel), nn.Linear(32, 64)),
            (LayerPlan("vocab", sequence_parallel), nn.Embedding(32, 64)),
            (LayerPlan("replicated", sequence_parallel), nn.Linear(32, 64)),
        ):
            rows.append(_count_of_plan(plan, layer))
    return rows


def _count_of_plan(plan: LayerPlan, layer: nn.Module) -> dict[str, Any]:
    tp = dist.get_world_size()
    stage = build_user_stage([layer], {"layers.0": plan}, tp_group=dist.group.WORLD)
    if plan.strategy == "vocab":
        x = torch.zeros(2, 8, dtype=torch.long)
    else:
        is_part = plan.sequence_parallel and plan.strategy == "column"
        width = 32 // tp if plan.strategy == "row" else 32
        x = torch.randn(2, 8 // tp if is_part else 8, width, requires_grad=True)
    result: list[Tensor] = []
    forward = count_collectives(lambda: result.append(stage(x)))
    backward = count_collectives(lambda: result[0].sum().backward())
    gradients = count_collectives(
        lambda: reduce_sequence_parallel_gradients(stage, dist.group.WORLD)
    )
    said = plan.communication
    return {
        "plan": repr(plan),
        "said": [said.forward, said.backward, said.gradients],
        "seen": [forward, backward, gradients],
    }


def compare_cross_entropy() -> dict[str, float]:
    """Against torch's: relative losses and gradients; logits that overflow, ignored targets."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    logits = (50 * torch.randn(3, 7, 101, generator=generator)).requires_grad_()
    targets = torch.randint(0, 101, (3, 7), generator=generator)
    targets[0, :3], targets[1, 0], targets[1, 1] = -1, 0, 100
    weights = torch.rand(3, 7, generator=generator)
    expected = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
    ).view(3, 7)
    (expected * weights).sum().backward()
    own = logits.detach().chunk(tp, -1)[rank].clone().requires_grad_()
    options = {"vocab_size": 101, "group": dist.group.WORLD, "ignore_index": -1}
    losses = vocab_parallel_cross_entropy(own, targets, **options)
    (losses * weights).sum().backward()
    outside = vocab_parallel_cross_entropy(own, torch.full((3, 7), 101), **options)
    return {
        "loss": ((losses - expected).abs() / expected.clamp(min=1.0)).max().item(),
        "gradient": (own.grad - logits.grad.chunk(tp, -1)[rank]).abs().max().item(),
        "outside is infinite": float(outside.isinf().all()),
    }


def check_regions() -> dict[str, bool]:
    """Each function's values and gradients, worked out by hand."""
    group, rank, tp = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    full = torch.arange(2.0 * 3 * 8).view(2, 3, 8)
    own, weight = full.chunk(tp, -1)[rank], full.flip(0)
    own_weight = weight.chunk(tp, -1)[rank]

    def run(function: Callable[..., Tensor], x: Tensor, grad: Tensor, *arguments: int) -> Any:
        x = x.clone().requires_grad_()
        y = function(x * 1.0, group, *arguments)
        y.backward(grad)
        return y.detach(), x.grad

    def equal(found: tuple[Tensor, Tensor], y: Tensor, grad: Tensor) -> bool:
        return torch.equal(found[0], y) and torch.equal(found[1], grad)

    odd = torch.arange(10.0).view(2, 5)
    odd_own = odd.chunk(tp, -1)[rank] if rank < len(odd.chunk(tp, -1)) else odd[:, 5:]
    return {
        "copy": equal(run(copy_to_region, full, weight), full, tp * weight),
        "reduce": equal(run(reduce_from_region, full, weight), tp * full, weight),
        "gather": equal(run(gather_from_region, own, weight, -1, 8), full, own_weight),
        "scatter": equal(run(scatter_to_region, full, own_weight, 2), own, weight),
        "gather sequence": equal(run(gather_sequence, own, weight, 2), full, tp * own_weight),
        "reduce-scatter sequence": equal(
            run(reduce_scatter_sequence, full, own_weight, -1), tp * own, weight
        ),
        "uneven gather": equal(run(gather_from_region, odd_own, odd, 1, 5), odd, odd_own),
        "uneven scatter": equal(run(scatter_to_region, odd, odd_own, 1), odd_own, odd),
    }


def compare_autocast() -> dict[str, Any]:
    """bfloat16 by autocast: same dtypes as on one rank, close losses and gradients."""
    model = build_stage(LLAMA, tp_group=dist.group.WORLD, sequence_parallel=True, seed=SEED)
    reference = build_stage(LLAMA, seed=SEED)
    inputs, targets = make_batch()
    losses = []
    for trained in (model, reference):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trained(inputs, targets)
        loss.backward()
        losses.append(loss.item())
    reduce_sequence_parallel_gradients(model, dist.group.WORLD)
    shards, twins = find_parameter_shards(model), dict(reference.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        full = gather_parameter(parameter.grad, shards[name], dist.group.WORLD)
        error = (full - twins[name].grad).norm() / twins[name].grad.norm()
        worst = max(worst, error.item())
    return {"losses": losses, "gradient error": worst}


def gathers_logits() -> float:
    """How far the logits without targets are from those of one rank."""
    inputs, _ = make_batch()
    model = build_stage(LLAMA, tp_group=dist.group.WORLD, seed=SEED)
    with torch.no_grad():
        return (model(inputs) - build_stage(LLAMA, seed=SEED)(inputs)).abs().max().item()


def compare_all() -> dict[str, Comparison]:
    found = {}
    for mark, sequence_parallel in (("", False), (", sequence parallel", True)):
        for name, config in CONFIGS.items():
            found[name + mark] = compare_transformer(config, sequence_parallel=sequence_parallel)
        for name in EXACT:
            found[f"{name}{mark}, float64"] = compare_transformer(
                CONFIGS[name], sequence_parallel=sequence_parallel, dtype=torch.float64
            )
        found[f"gpt{mark}, backward in two parts"] = compare_transformer(
            GPT, sequence_parallel=sequence_parallel, splits_backward=True
        )
        found[f"gpt{mark}, checkpointed"] = compare_transformer(
            GPT, sequence_parallel=sequence_parallel, checkpoints=True
        )
        found[f"user's model{mark}"] = compare_user_model(sequence_parallel=sequence_parallel)
    found["without the sum of partial gradients"] = compare_transformer(
        GPT, sequence_parallel=True, sums_partial_gradients=False
    )
    return found


def run_cases(folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, tp: int) -> None:
        found = {
            "cases": {name: dataclasses.asdict(case) for name, case in compare_all().items()},
            "collectives": count_planned_collectives(),
            "cross entropy": compare_cross_entropy(),
            "regions": check_regions(),
            "autocast": compare_autocast(),
            "logits": gathers_logits(),
        }
        path = folder / f"tp{tp}_rank{rank}.json"
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")

    return job


if __name__ == "__main__":
    import_everything()
    make_references()
    target = Path(sys.argv[1])
    codes = [code for tp in (2, 4) for code in run_ranks(run_cases(target), tp)]
    sys.exit(any(codes))
