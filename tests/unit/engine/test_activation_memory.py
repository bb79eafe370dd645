"""Memory strategies in one process: same gradients, less memory, and what is said about it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.engine_memory import TensorPeak
from torch import Tensor, nn

from meshscope.core.config.layer_memory import choose_num_segments
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.unavailable import Unavailable
from meshscope.engine.memory.limits import find_memory_problems
from meshscope.engine.memory.recompute import cut_evenly
from meshscope.engine.memory.strategy import (
    MemoryStrategy,
    make_memory_strategy,
)
from meshscope.engine.model.transformer import Stage, build_stage
from meshscope.engine.model.user_model import UserStage, build_user_stage
from meshscope.errors import UsageError

STRATEGIES = ["basic", "standard", "aggressive", "extreme"]
CONFIG = ModelConfig(
    vocab_size=307,
    num_layers=6,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    sequence_length=40,
    tie_embeddings=True,
)
NUM_IN_FLIGHT = 3


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryStrategy]:
    made = make_memory_strategy(request.param, offload_dir=tmp_path, num_in_flight=NUM_IN_FLIGHT)
    yield made
    made.close()


def make_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 307, (4, 41), generator=torch.Generator().manual_seed(2))
    targets = tokens[:, 1:].clone()
    targets[0, :7] = -100
    return tokens[:, :-1], targets


def train(stage: nn.Module, strategy: MemoryStrategy) -> list[Tensor]:
    """As a pipeline does: several forwards, then their backwards, oldest first."""
    x, targets = make_batch()
    losses = []
    for index in range(NUM_IN_FLIGHT):
        with strategy.forward_context():
            losses.append(stage(x.roll(index, 0), targets.roll(index, 0)))
    found = [loss.detach() for loss in losses]
    while losses:
        losses.pop(0).backward()
    return found


def assert_like_basic(make_stage: type | object, strategy: MemoryStrategy) -> None:
    expected, stage = make_stage(), make_stage()  # type: ignore[operator]
    names = list(stage.state_dict())
    strategy.prepare(stage)
    assert list(stage.state_dict()) == names
    losses = train(stage, strategy)
    for loss, right in zip(losses, train(expected, make_memory_strategy("basic")), strict=True):
        assert abs(loss - right) <= 1e-6
    for (name, one), other in zip(stage.named_parameters(), expected.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() <= 1e-6 * other.grad.abs().max() + 1e-9, name


def test_the_models_gradients_do_not_change(strategy: MemoryStrategy) -> None:
    assert_like_basic(lambda: build_stage(CONFIG, seed=1), strategy)


class Half(nn.Module):
    """Draws random numbers, and has no parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + torch.tanh(self.linear(x)), 0.5)


def make_user_stage() -> UserStage:
    layers = [lambda: nn.Embedding(307, 16), *[Half] * 5, lambda: nn.Linear(16, 307)]
    return build_user_stage(
        layers, {}, loss=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten())
    )


def test_users_layers_see_the_same_random_numbers_again(strategy: MemoryStrategy) -> None:
    expected, stage = make_user_stage(), make_user_stage()
    strategy.prepare(stage)
    torch.manual_seed(7)
    losses = train(stage, strategy)
    torch.manual_seed(7)
    assert losses == train(expected, make_memory_strategy("basic"))
    for one, other in zip(stage.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_stages_without_a_runner_have_their_layers_recomputed(strategy: MemoryStrategy) -> None:
    class OwnStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleDict({"0": nn.Embedding(307, 16), "1": nn.Linear(16, 307)})

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return F.cross_entropy(x.flatten(0, 1), targets.flatten())

    assert_like_basic(OwnStage, strategy)
    if strategy.name != "basic":
        assert strategy.statistics.recompute_ns > 0


def test_gradients_under_autocast_are_those_of_autocast(strategy: MemoryStrategy) -> None:
    found = []
    for one in (make_memory_strategy("basic"), strategy):
        stage = build_stage(CONFIG, seed=1)
        one.prepare(stage)
        with torch.autocast("cpu", torch.bfloat16):
            train(stage, one)
        found.append({name: p.grad for name, p in stage.named_parameters()})
    basic, other = found
    for name, grad in basic.items():
        # Only the head's rows add up in another order, in float32.
        assert (other[name] - grad).abs().max() <= 4e-3 * grad.abs().max(), name


def measure_peak(name: str, folder: Path) -> int:
    stage = build_stage(CONFIG, seed=1)
    strategy = make_memory_strategy(name, offload_dir=folder, num_in_flight=NUM_IN_FLIGHT)
    strategy.prepare(stage)
    train(stage, strategy)  # gradients are there, and forwards have been measured
    gradients = [parameter.grad for parameter in stage.parameters()]
    with TensorPeak([*stage.parameters(), *gradients, *stage.buffers()]) as peak:
        before_bytes = peak.live_bytes
        train(stage, strategy)
    strategy.close()
    assert peak.live_bytes == before_bytes, "activations are left"
    return peak.peak_bytes


def test_each_strategy_takes_less_memory_than_the_one_before(tmp_path: Path) -> None:
    peaks = [measure_peak(name, tmp_path) for name in STRATEGIES]
    assert peaks == sorted(set(peaks), reverse=True)


def test_logits_are_never_whole_under_aggressive() -> None:
    class Largest(TensorPeak):
        num_elements = 0

        def _add(self, tensor: Tensor) -> None:
            if tensor.shape[-1:] == (CONFIG.vocab_size,):
                self.num_elements = max(self.num_elements, tensor.numel())

    stage = build_stage(CONFIG, seed=1)
    strategy = make_memory_strategy("aggressive")
    strategy.prepare(stage)
    x, targets = make_batch()
    with Largest() as largest:
        stage(x, targets).backward()
    assert largest.num_elements == x.numel() // 4 * CONFIG.vocab_size
    assert stage(x).shape == (*x.shape, CONFIG.vocab_size), "without targets they are asked for"


def test_saved_bytes_are_what_autograd_would_have_held(tmp_path: Path) -> None:
    """Against an independent count: tensors alive after forward under basic and under another."""
    held = {}
    for name in STRATEGIES:
        stage = build_stage(CONFIG, seed=1)
        strategy = make_memory_strategy(name, offload_dir=tmp_path)
        strategy.prepare(stage)
        x, targets = make_batch()
        with TensorPeak([*stage.parameters(), *stage.buffers(), x, targets]) as peak:
            before_bytes = peak.live_bytes
            with strategy.forward_context():
                loss = stage(x, targets)
            if strategy._offloader is not None:
                strategy._offloader.finish_writes()
            held[name] = (peak.live_bytes - before_bytes, strategy.statistics.saved_bytes)
        del loss
        strategy.close()
    for name in STRATEGIES[1:]:
        saved_bytes = held[name][1]
        assert isinstance(saved_bytes, int)
        assert saved_bytes == pytest.approx(held["basic"][0] - held[name][0], rel=0.01)
    assert isinstance(held["basic"][1], Unavailable)


def test_forwards_without_gradients_keep_and_count_nothing(strategy: MemoryStrategy) -> None:
    stage = build_stage(CONFIG, seed=1)
    strategy.prepare(stage)
    with torch.no_grad(), strategy.forward_context():
        found = stage(*make_batch())
    assert abs(found - build_stage(CONFIG, seed=1)(*make_batch()).detach()) <= 1e-6
    assert (strategy.statistics.num_forwards, strategy.statistics.written_bytes) == (0, 0)


def test_parts_of_a_block_are_recomputed_apart() -> None:
    stage = build_stage(CONFIG, seed=1)
    assert isinstance(stage, Stage)
    calls: list[str] = []
    block = stage.layers["0"]
    block.attention.register_forward_pre_hook(lambda *_: calls.append("attention"))
    block.mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    strategy = make_memory_strategy("aggressive", num_segments=1)
    strategy.prepare(stage)
    loss = stage(*make_batch())
    calls.append("backward")
    loss.backward()
    # The segment again; of it, each part again, last ones first.
    assert calls == ["attention", "mlp", "backward", "attention", "mlp", "mlp", "attention"]


@pytest.mark.parametrize(
    ("num_layers", "num_in_flight", "expected"), [(8, 1, 4), (8, 4, 2), (8, 16, 1), (1, 1, 1)]
)
def test_the_more_wait_the_fewer_segments(
    num_layers: int, num_in_flight: int, expected: int
) -> None:
    kept = {k: num_in_flight * k + 2 * num_layers / k for k in range(1, num_layers + 1)}
    assert choose_num_segments(num_layers, num_in_flight) == expected
    assert kept[expected] == min(kept.values())


@pytest.mark.parametrize("num_in_flight", [1, 8])
def test_the_chosen_segments_take_about_the_least_memory(num_in_flight: int) -> None:
    config = dataclasses.replace(CONFIG, num_layers=8)
    x, targets = make_batch()

    def measure(num_segments: int) -> int:
        stage = build_stage(config, seed=1)
        make_memory_strategy("aggressive", num_segments=num_segments).prepare(stage)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in stage.parameters()]
        with TensorPeak([*stage.parameters(), *gradients, *stage.buffers()]) as peak:
            before_bytes = peak.live_bytes
            losses = [stage(x, targets) for _ in range(num_in_flight)]
            while losses:
                losses.pop(0).backward()
        return peak.peak_bytes - before_bytes

    chosen = choose_num_segments(8, num_in_flight)
    peaks = {number: measure(number) for number in {1, 2, 4, 8, chosen}}
    assert peaks[chosen] <= 1.05 * min(peaks.values())
    assert max(peaks.values()) > 1.2 * min(peaks.values()), "the number does not matter"


def test_segments_are_even() -> None:
    calls = [torch.neg] * 7
    assert [len(part) for part in cut_evenly(calls, 3)] == [2, 2, 3]
    assert [len(part) for part in cut_evenly(calls, 9)] == [1] * 7


def test_problems_are_named_at_once(tmp_path: Path) -> None:
    assert find_memory_problems("basic", "cpu") == []
    assert find_memory_problems("cpu_offload", "cuda") == []
    assert find_memory_problems("cpu_offload", "cpu") == [
        "cpu_offload moves activations from a device to the host's memory, but the device is cpu, "
        "where they already are; use standard, aggressive or extreme"
    ]
    assert find_memory_problems("extreme", "cpu") == [
        "extreme needs offload_dir, a folder on a local disk; set it"
    ]
    assert find_memory_problems("huge", "cpu") == [
        "the memory strategy is 'huge', expected one of basic, standard, aggressive, extreme, "
        "cpu_offload"
    ]
    with pytest.raises(UsageError, match=r"cannot be written to.*num_segments is 0, expected"):
        make_memory_strategy("extreme", offload_dir="/proc/here", num_segments=0)
