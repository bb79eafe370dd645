"""The closed form of the engine's transformer against torch's own formulas."""

import pytest
import torch

from meshscope.capture.model.flops import count_model_flops
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import (
    BatchConfig,
    MemoryConfig,
    ParallelConfig,
    TrainConfig,
)
from meshscope.engine.model.transformer import build_stage
from meshscope.engine.stage_flops import count_rank_flops

LLAMA = ModelConfig(
    vocab_size=96, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2,
    ffn_hidden_size=48, sequence_length=16,
)  # fmt: skip
GPT = ModelConfig(
    vocab_size=96, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=4,
    ffn_hidden_size=128, sequence_length=16, norm="layernorm", position="learned",
    activation="gelu", bias=True, tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_stage_computes_what_the_closed_form_says(model, num_stages):
    config = TrainConfig(
        model=model,
        batch=BatchConfig(microbatch_size=2, num_microbatches=4),
        parallel=ParallelConfig(pp=num_stages),
    )
    for index in range(num_stages):
        stage = build_stage(model, index, num_stages, device="cpu")
        tokens = torch.zeros(2, model.sequence_length, dtype=torch.int64)
        hidden = torch.zeros(stage.hidden_shape(2), requires_grad=True)
        inputs = (tokens if index == 0 else hidden,)
        if index == num_stages - 1:
            inputs += (tokens,)
        counted = count_model_flops(torch, stage, inputs, {})
        assert count_rank_flops(config, model, index).model == 4 * counted.model_flops


def test_tensor_parallel_ranks_share_the_work_evenly():
    batch = BatchConfig(microbatch_size=2, num_microbatches=4)
    whole, half = (
        TrainConfig(model=LLAMA, batch=batch, parallel=ParallelConfig(tp=tp)) for tp in (1, 2)
    )
    assert count_rank_flops(half, LLAMA, 0).scaled(2) == count_rank_flops(whole, LLAMA, 0)


def test_recomputed_layers_are_counted_in_hardware_flops_only():
    kept, again = (
        TrainConfig(model=LLAMA, memory=MemoryConfig(strategy=strategy))
        for strategy in ("basic", "standard")
    )
    first, second = (count_rank_flops(config, LLAMA, 0) for config in (kept, again))
    assert first.model == first.hardware == second.model
    head = 2 * 32 * 96
    per_token = first.model / 16 / 3
    assert second.hardware - second.model == 16 * (per_token - head)
