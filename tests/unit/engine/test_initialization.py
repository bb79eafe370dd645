"""Initial weights do not depend on how the model is cut."""

from dataclasses import replace

import pytest
import torch
from tests.unit.engine.fake_group import FakeGroup
from torch import nn

from meshscope.core.config.model_config import ModelConfig
from meshscope.engine.model import initialization
from meshscope.engine.model.initialization import initialize_parameters, seeded_by_name
from meshscope.engine.model.sharding import ParameterShard, find_parameter_shards
from meshscope.engine.model.transformer import build_stage

CONFIG = ModelConfig(
    vocab_size=101,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    ffn_hidden_size=48,
    sequence_length=16,
)


def make_parameter(shard: ParameterShard, seed: int = 0, name: str = "weight") -> torch.Tensor:
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.empty(shard.shape)))
    module.parameter_shards = {name: shard}
    initialize_parameters(module, seed=seed)
    return module.get_parameter(name).detach()


@pytest.mark.parametrize("block_elements", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(("dim", "parts"), [(0, (12, 4, 4)), (0, (20,)), (1, (9,)), (1, (6, 3))])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_every_shard_is_a_part_of_the_same_full_parameter(
    monkeypatch: pytest.MonkeyPatch,
    block_elements: int,
    dim: int,
    parts: tuple[int, ...],
    num_shards: int,
) -> None:
    monkeypatch.setattr(initialization, "BLOCK_ELEMENTS", block_elements)
    full_shard = ParameterShard(full_shape=(20, 9), init_std=0.5, init_mean=2.0)
    full = make_parameter(full_shard)
    shards = [
        replace(full_shard, dim=dim, parts=parts, num_shards=num_shards, shard_index=index)
        for index in range(num_shards)
    ]
    made = [make_parameter(shard) for shard in shards]
    for shard, part in zip(shards, made, strict=True):
        assert torch.equal(part, shard.take(full))
    assert torch.equal(shards[0].join(made), full)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_any_layout_has_the_weights_of_the_whole_model(tp: int, pp: int, tied: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tied, position="learned", bias=True)
    whole = {name: p.detach() for name, p in build_stage(config, seed=8).named_parameters()}
    seen = set()
    for index in range(pp):
        ranks = [
            build_stage(config, index, pp, tp_group=FakeGroup(tp, rank), seed=8)
            for rank in range(tp)
        ]
        for name, shard in find_parameter_shards(ranks[0]).items():
            full = shard.join([stage.get_parameter(name).detach() for stage in ranks])
            assert torch.equal(full, whole[shard.tied_to or name])
            seen.add(shard.tied_to or name)
    assert seen == set(whole)


def test_seed_name_and_place_tell_weights_apart() -> None:
    shard = ParameterShard(full_shape=(400, 400), init_std=1.0)
    weights = make_parameter(shard)
    assert torch.equal(weights, make_parameter(shard))
    for other in (make_parameter(shard, seed=1), make_parameter(shard, name="other")):
        assert abs((weights * other).mean().item()) < 0.02, "independent"
    assert weights.unique().numel() > 0.95 * weights.numel(), "blocks do not repeat"
    assert weights.mean().item() == pytest.approx(0, abs=0.01)
    assert weights.std().item() == pytest.approx(1, abs=0.01)


def test_weights_are_written_down() -> None:
    """A change of these numbers changes the weights of every run."""
    weights = make_parameter(ParameterShard(full_shape=(2, 3), init_std=1.0), name="w")
    assert torch.allclose(
        weights,
        torch.tensor([[1.286137, -0.154152, 0.558052], [0.643975, -0.861185, 1.018409]]),
        atol=1e-5,
    )


def test_matrices_that_write_to_the_residual_stream_are_smaller() -> None:
    config = replace(CONFIG, hidden_size=128, ffn_hidden_size=512, norm="layernorm", bias=True)
    stage = build_stage(config)
    block = stage.layers["1"]
    for weight, std in (
        (stage.token_embedding.weight, 0.02),
        (stage.head.weight, 0.02),
        (block.attention.qkv.weight, 0.02),
        (block.mlp.up.weight, 0.02),
        (block.attention.output.weight, 0.01),
        (block.mlp.down.weight, 0.01),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert (block.mlp_norm.weight == 1).all()
    assert (block.mlp_norm.bias == 0).all()
    assert (block.mlp.up.bias == 0).all()


def test_narrow_weights_are_the_wide_ones_rounded() -> None:
    wide, narrow = build_stage(CONFIG), build_stage(CONFIG, dtype=torch.bfloat16)
    for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)


def test_users_layers_are_seeded_by_name_and_leave_the_generator_alone() -> None:
    def make(name: str) -> torch.Tensor:
        with seeded_by_name(name, seed=3):
            return torch.randn(4)

    state = torch.get_rng_state()
    assert torch.equal(make("layers.0"), make("layers.0"))
    assert not torch.equal(make("layers.0"), make("layers.1"))
    assert torch.equal(torch.get_rng_state(), state)
