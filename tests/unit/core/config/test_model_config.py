"""Closed forms of the model's size and work, against the real modules."""

from dataclasses import replace

import pytest
import torch
from tests.unit.engine.fake_group import FakeGroup
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from meshscope.core.config.model_config import ModelConfig, split_layers
from meshscope.engine.model.sharding import count_parameters
from meshscope.engine.model.transformer import build_stage
from meshscope.errors import UsageError

LLAMA = ModelConfig(
    vocab_size=101,
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    sequence_length=16,
)
GPT = replace(
    LLAMA, num_kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True,
    tie_embeddings=True,
)  # fmt: skip
CONFIGS = [
    LLAMA,
    GPT,
    replace(LLAMA, tie_embeddings=True, position="learned"),
    replace(GPT, tie_embeddings=False, num_kv_heads=2),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_counts_are_those_of_the_modules(config: ModelConfig) -> None:
    model = build_stage(config, device="meta")
    tables = ("token_embedding.", "position_embedding.")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert config.num_parameters == sum(sizes.values()) == count_parameters(model).full
    assert config.num_embedding_parameters == sum(
        size for name, size in sizes.items() if name.startswith(tables)
    )
    assert config.num_non_embedding_parameters == sum(
        size for name, size in sizes.items() if not name.startswith(tables)
    )
    assert config.num_layer_parameters == count_parameters(model.layers["1"]).full


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sizes", [[3], [1, 2], [1, 1, 1]])
def test_stage_counts_are_those_of_the_stages(config: ModelConfig, sizes: list[int]) -> None:
    counts = config.count_stage_parameters(len(sizes), sizes)
    assert counts == tuple(
        count_parameters(
            build_stage(config, index, len(sizes), stage_sizes=sizes, device="meta")
        ).local
        for index in range(len(sizes))
    )
    second_table = config.tie_embeddings and len(sizes) > 1
    table = config.vocab_size * config.hidden_size
    assert sum(counts) == config.num_parameters + (table if second_table else 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_stage_counts_with_tp_are_those_of_its_first_rank(config: ModelConfig) -> None:
    stages = [
        build_stage(config, index, 2, tp_group=FakeGroup(2), device="meta") for index in range(2)
    ]
    held = tuple(sum(p.numel() for p in stage.parameters()) for stage in stages)
    assert config.count_stage_parameters(2, tp=2) == held
    assert config.count_stage_parameters(2) == tuple(
        count_parameters(stage).full for stage in stages
    )


def test_counts_of_known_models() -> None:
    llama_7b = ModelConfig(
        vocab_size=32_000, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32,
        ffn_hidden_size=11_008, sequence_length=4096,
    )  # fmt: skip
    gpt2 = ModelConfig(
        vocab_size=50_257, num_layers=12, hidden_size=768, num_heads=12, num_kv_heads=12,
        ffn_hidden_size=3072, sequence_length=1024, norm="layernorm", position="learned",
        activation="gelu", bias=True, tie_embeddings=True,
    )  # fmt: skip
    assert llama_7b.num_parameters == 6_738_415_616
    assert gpt2.num_parameters == 124_439_808


def test_flops_per_token_of_a_gpt_are_those_of_the_paper() -> None:
    """Narayanan et al. 2021: 72·s·L·h²·(1 + s/6h + V/12Lh) per sequence, without recomputation."""
    config = replace(GPT, ffn_hidden_size=4 * 32, vocab_size=96)
    s, layers, h, vocab = 16, 3, 32, 96
    per_sequence = 72 * s * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert s * config.count_flops_per_token() == pytest.approx(per_sequence, rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_flops_per_token_are_those_torch_counts(config: ModelConfig) -> None:
    model = build_stage(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=_count_cpu_attention()) as counter:
        model(ids, ids).backward()
    assert counter.get_total_flops() == ids.numel() * config.count_flops_per_token(8)


def _count_cpu_attention() -> dict[object, object]:
    """torch 2.13 does not count attention on the CPU; backward is twice forward, as for GEMMs."""

    def forward(query, key, value, *_, out_shape=None, **__):
        # Grouped-query attention multiplies each query head all the same.
        num_heads = query[1]
        key, value = ((shape[0], num_heads, *shape[2:]) for shape in (key, value))
        return sdpa_flop_count(query, key, value)

    def backward(grad, query, key, value, *_, out_shape=None, **__):
        return 2 * forward(query, key, value)

    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def test_a_fitting_layout_has_no_problems() -> None:
    assert LLAMA.validate(tp=2, pp=3, sequence_parallel=True) == []
    assert LLAMA.validate(tp=1, pp=2, stage_sizes=[1, 2]) == []


def test_all_problems_of_a_layout_come_at_once() -> None:
    config = replace(LLAMA, hidden_size=36, num_heads=4, num_kv_heads=3, sequence_length=17)
    assert config.validate(tp=8, pp=4, stage_sizes=[1, 2], sequence_parallel=True) == [
        "num_heads (4) is not divisible by num_kv_heads (3); "
        "each kv head serves equally many heads",
        "head size (9) is odd, but rope rotates pairs; use an even head size or learned positions",
        "num_heads (4) is not divisible by tp (8); lower tp or change num_heads",
        "num_kv_heads (3) is not divisible by tp (8); lower tp, or use more kv heads",
        "sequence_length (17) is not divisible by tp (8); "
        "sequence parallel cuts the sequence into tp equal pieces",
        "2 stage sizes are given for 4 stages",
    ]
    assert replace(LLAMA, hidden_size=34).validate() == [
        "hidden_size (34) is not divisible by num_heads (4); change one of them"
    ]
    assert LLAMA.validate(pp=4) == [
        "3 layers cannot fill 4 stages; every stage needs a layer, lower the number of stages"
    ]
    assert replace(LLAMA, vocab_size=5, num_heads=4, num_kv_heads=4).validate(tp=4) == [
        "vocab_size (5) leaves the last of 4 tp ranks without a row; lower tp"
    ]


def test_all_wrong_values_come_at_once() -> None:
    config = replace(LLAMA, num_layers=0, num_heads=-1, norm="batchnorm", rope_theta=0.0)
    assert config.validate(tp=0) == [
        "num_layers is 0, expected at least 1",
        "num_heads is -1, expected at least 1",
        "norm is 'batchnorm', expected 'rmsnorm' or 'layernorm'",
        "rope_theta is 0.0, expected more than 0",
        "tp is 0, expected at least 1",
    ]


def test_layers_are_split_evenly_with_the_rest_in_front() -> None:
    assert split_layers(8, 3) == (range(0, 3), range(3, 6), range(6, 8))
    assert split_layers(8, 3, [1, 6, 1]) == (range(0, 1), range(1, 7), range(7, 8))
    with pytest.raises(UsageError, match="sum to 7"):
        split_layers(8, 2, [3, 4])
    with pytest.raises(UsageError, match="without a layer"):
        split_layers(8, 3, [4, 0, 4])
