"""Models from config.json: known ones, and everything wrong at once."""

import json

import pytest

from meshscope.errors import UsageError
from meshscope.plan.hugging_face import read_hugging_face

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "vocab_size": 50257,
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "num_hidden_layers": 48, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip


QWEN = {
    "model_type": "qwen2_moe", "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "intermediate_size": 18944,
    "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 131072,
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000,
}  # fmt: skip
LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 27, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
    "max_position_embeddings": 163840,
}  # fmt: skip
# Neither gemma's nor pythia's file says whether the head is tied: it is the kind's default.
GEMMA = {
    "model_type": "gemma", "hidden_size": 3072, "head_dim": 256, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 28, "intermediate_size": 24576,
    "vocab_size": 256000, "max_position_embeddings": 8192,
}  # fmt: skip
PYTHIA = {
    "model_type": "gpt_neox", "hidden_size": 2048, "num_attention_heads": 8,
    "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 50304,
    "max_position_embeddings": 2048,
}  # fmt: skip
PHI = {
    "model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
    "intermediate_size": 10240, "vocab_size": 51200, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA, 8.03), (DEEPSEEK, 671.0), (GPT2, 0.1244), (QWEN_MOE, 30.5), (QWEN, 57.41),
        (MIXTRAL, 46.70), (LITE, 15.706), (GEMMA, 8.538), (PYTHIA, 1.0118), (PHI, 2.7797),
    ],
)  # fmt: skip
def test_parameters_are_the_published_ones(tmp_path, config, billions):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert read_hugging_face(path).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert read_hugging_face(tmp_path, 2048).sequence_length == 2048


def test_all_problems_come_at_once(tmp_path):
    path = tmp_path / "config.json"
    wrong = {**LLAMA, "hidden_size": "wide", "vocab_size": None, "num_attention_heads": -4}
    path.write_text(json.dumps(wrong))
    with pytest.raises(UsageError) as raised:
        read_hugging_face(path)
    for word in ("hidden_size", "vocab_size", "num_attention_heads"):
        assert word in str(raised.value)


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba", "falcon", None])
def test_what_is_no_known_decoder_is_refused_by_its_kind(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": kind}))
    with pytest.raises(UsageError, match=r"model_type.*known are"):
        read_hugging_face(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null", '{"a": 1}'])
def test_what_is_no_model_is_one_message(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_hugging_face(path)
