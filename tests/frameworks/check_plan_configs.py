"""Parameters of every kind of `config.json` that `meshscope plan` reads, against the models that
transformers makes of the kind's own defaults."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from meshscope.plan.model.hugging_face import KNOWN_KINDS, read_hugging_face

REMOTE = ("internlm2", "internlm3", "baichuan", "kimi_k2")
"""Their code is not in transformers."""
MORE = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
}
"""What a kind's defaults lack."""
PARTS = ("gemma3", "emu3_text_model")
"""With another part that sees images, or part of such a model."""
BROKEN = ("dbrx", "dots1")
"""Whose defaults this transformers cannot make a model of."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", sorted({*KNOWN_KINDS} - {*REMOTE, *PARTS, *BROKEN}))
def test_a_model_has_the_parameters_that_are_planned_with(kind, tmp_path):
    config = AutoConfig.for_model(kind, **MORE.get(kind, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    found = read_hugging_face(tmp_path).num_parameters
    # Sinks of gpt_oss, norms on heads of qwen3, a bias on routers: less than that.
    assert found == pytest.approx(sum(one.numel() for one in model.parameters()), rel=1e-3)
