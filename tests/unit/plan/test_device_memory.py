"""Peaks that an H200 had (benchmarks/results/planner_gpu.json) against `estimate_memory`: tensor
bytes in MiB, without what cuBLAS holds."""

import pytest

from meshscope.core.config.memory_model import estimate_memory
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import (
    BatchConfig,
    MemoryConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

SMALL = (512, 8, 8, 8, 1408, 512, 8192)
MIDDLE = (1024, 24, 16, 4, 2816, 1024, 32_000)
LARGE = (2048, 18, 16, 16, 5632, 2048, 32_000)
"""Hidden size, layers, heads, key heads, MLP, tokens, vocabulary."""


@pytest.mark.parametrize(
    ("shape", "b", "m", "strategy", "parallel", "measured_mib"),
    [
        (LARGE, 4, 1, "basic", {}, 29_866.8),
        (LARGE, 2, 4, "standard", {}, 19_879.7),
        (MIDDLE, 16, 1, "basic", {}, 25_518.1),
        (MIDDLE, 16, 1, "standard", {}, 11_075.2),
        (SMALL, 4, 1, "basic", {"dp": 4}, 1133.4),
        (SMALL, 4, 1, "basic", {"dp": 4, "data_parallel": "fsdp"}, 629.0),
        (SMALL, 4, 2, "basic", {"dp": 2, "tp": 2}, 688.2),
        (SMALL, 4, 4, "standard", {"tp": 4, "sequence_parallel": True}, 188.7),
        (SMALL, 2, 8, "basic", {"pp": 4, "schedule": "zb_h1"}, 480.7),
    ],
)
def test_peaks_are_within_five_percent(shape, b, m, strategy, parallel, measured_mib):
    hidden, layers, heads, kv_heads, ffn, tokens, vocabulary = shape
    config = TrainConfig(
        model=ModelConfig(
            hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
            ffn_hidden_size=ffn, sequence_length=tokens, vocab_size=vocabulary,
        ),
        device="cuda",
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(compute="bf16"),
        batch=BatchConfig(microbatch_size=b, num_microbatches=m),
        memory=MemoryConfig(strategy=strategy),
    )  # fmt: skip
    found = estimate_memory(config, device_type="cuda").worst.total_bytes / 2**20
    assert found == pytest.approx(measured_mib, rel=0.05)
