"""Models from config.json: known ones, and everything wrong at once."""

import json

import pytest

from meshscope.errors import UsageError
from meshscope.plan.model.hugging_face import read_hugging_face
from meshscope.plan.model.known_models import find_model

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


def make_config(kind, hidden, heads, layers, kv, inner, vocab, **more):
    return {
        "model_type": kind, "hidden_size": hidden, "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": kv, "intermediate_size": inner,
        "vocab_size": vocab, "max_position_embeddings": 4096, **more,
    }  # fmt: skip


FALCON = {"model_type": "falcon", "multi_query": True, "bias": False, "vocab_size": 65024}
LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1,
}  # fmt: skip
# Sums over the tensors of the published checkpoints; a tied head is counted once.
PUBLISHED = {
    "llama-2-7b": (make_config("llama", 4096, 32, 32, 32, 11008, 32000), 6_738_415_616),
    "llama-2-70b": (make_config("llama", 8192, 64, 80, 8, 28672, 32000), 68_976_648_192),
    "mistral-nemo": (
        make_config("mistral", 5120, 32, 40, 8, 14336, 131072, head_dim=128), 12_247_782_400,
    ),
    "qwen2-7b": (make_config("qwen2", 3584, 28, 28, 4, 18944, 152064), 7_615_616_512),
    "qwen3-8b": (
        make_config("qwen3", 4096, 32, 36, 8, 12288, 151936, head_dim=128), 8_190_735_360,
    ),
    "qwen3-235b": (
        make_config(
            "qwen3_moe", 4096, 64, 94, 4, 12288, 151936, head_dim=128, num_experts=128,
            num_experts_per_tok=8, moe_intermediate_size=1536, decoder_sparse_step=1,
            mlp_only_layers=[],
        ), 235_093_634_560,
    ),
    "deepseek-v2": (
        make_config(
            "deepseek_v2", 5120, 128, 60, 128, 12288, 102400, moe_intermediate_size=1536,
            n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, **LATENT,
        ), 235_741_434_880,
    ),
    "gpt-oss-120b": (
        make_config(
            "gpt_oss", 2880, 64, 36, 8, 2880, 201088, head_dim=64, num_local_experts=128,
            num_experts_per_tok=4,
        ), 116_829_156_672,
    ),
    "gemma-2-9b": (
        make_config("gemma2", 3584, 16, 42, 8, 14336, 256000, head_dim=256), 9_241_705_984,
    ),
    "gpt-neox-20b": (make_config("gpt_neox", 6144, 64, 44, 64, 24576, 50432), 20_554_567_680),
    "phi-3-mini": (make_config("phi3", 3072, 32, 32, 32, 8192, 32064), 3_821_079_552),
    "olmo-7b": (make_config("olmo", 4096, 32, 32, 32, 11008, 50304), 6_888_095_744),
    "starcoder2-7b": (make_config("starcoder2", 4608, 36, 32, 4, 18432, 49152), 7_173_923_840),
    "falcon-7b": (
        {**FALCON, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32},
        6_921_720_704,
    ),
    "falcon-40b": (
        {
            **FALCON, "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60,
            "num_kv_heads": 8, "new_decoder_architecture": True,
        }, 41_303_293_952,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40,
            "n_positions": 8192, "vocab_size": 49152,
        }, 15_517_456_384,
    ),
    "bloom": (
        {
            "model_type": "bloom", "n_embed": 14336, "num_attention_heads": 112, "n_layer": 70,
            "vocab_size": 250880, "seq_length": 2048,
        }, 176_247_271_424,
    ),
    "mpt-7b": (
        {
            "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
            "max_seq_len": 2048, "vocab_size": 50432,
        }, 6_649_286_656,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_kinds_of_decoders_have_their_checkpoints_parameters(tmp_path, name):
    config, total = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hugging_face(tmp_path).num_parameters == pytest.approx(total, rel=5e-4)


def test_dbrx_has_its_widths_in_parts(tmp_path):
    config = {
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
        "vocab_size": 100352, "attn_config": {"kv_n_heads": 8, "model_type": ""},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_hugging_face(tmp_path)
    assert model.num_parameters / 1e9 == pytest.approx(131.6, rel=2e-3)
    assert model.num_active_parameters / 1e9 == pytest.approx(36, rel=0.02)


@pytest.mark.parametrize("more", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [3, 5]}])
def test_mixtures_in_some_layers_only_are_refused(tmp_path, more):
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_MOE, **more}))
    with pytest.raises(UsageError, match="mixtures in some layers"):
        read_hugging_face(tmp_path)


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


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**8}, "from 1 to 100,000"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"num_key_value_heads": 7}, "32 heads cannot share 7"),
        ({"num_attention_heads": 33}, "33 heads do not divide"),
        ({"tie_word_embeddings": "no"}, "expected true or false"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 0},
            "moe_intermediate_size is 0",
        ),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 99},
            "from 0 to 31",
        ),
    ],
)  # fmt: skip
def test_numbers_that_no_model_has_are_refused(tmp_path, more, word):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **more}))
    with pytest.raises(UsageError, match=word):
        read_hugging_face(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "t5", "mamba", "llama4", None])
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


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean llama-3-8b\?"):
        find_model("llama-3-8c")
    with pytest.raises(UsageError, match="there is no model 'banana'; use one of"):
        find_model("banana")
