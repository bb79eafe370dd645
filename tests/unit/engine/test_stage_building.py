"""What the engine tells the recorder about its stages."""

import pytest

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.engine.model.timed_model import build_timed_stage
from meshscope.engine.model.transformer import build_stage
from meshscope.engine.stage_building import count_parts

SMALL = ModelConfig(
    vocab_size=64,
    num_layers=5,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=32,
    sequence_length=8,
)


@pytest.mark.parametrize(("stage", "num_layers"), [(0, 3), (1, 1), (2, 1)])
def test_layers_of_a_transformer_are_counted_beside_its_ends(stage, num_layers):
    parts = count_parts(build_stage(SMALL, stage, 3, stage_sizes=(3, 1, 1)))
    assert parts["Block"] == num_layers
    assert ("token_embedding" in parts, "head" in parts) == (stage == 0, stage == 2)


def test_the_timed_model_has_layers_too():
    config = TimedModelConfig(num_layers=4, forward_ms=1.0, input_grad_ms=1.0, weight_grad_ms=1.0)
    assert count_parts(build_timed_stage(config, 0, 2)) == {"token_embedding": 1, "TimedLayer": 2}
