"""A model from the `config.json` that Hugging Face's transformers reads.

`model_type` says what a layer is made of, so kinds that are not listed here (encoders, state
spaces, decoders with other layers) are refused and not counted as if they were llama. Keys that are
missing and have a default there have it here; a key that is needed and missing, or no number, is a
problem, and all problems are said at once. The file is foreign: nothing in it is executed, and its
size is limited.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshscope.errors import UsageError
from meshscope.plan.model.model_shape import Experts, LatentAttention, ModelShape

_MAX_BYTES = 4 << 20
_MOST, _MOST_LAYERS = 10**9, 10**5
_GPT_KINDS = (
    "gpt2", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_bigcode", "gptj", "codegen", "opt",
    "bloom", "biogpt", "phi", "starcoder2", "falcon", "mpt", "persimmon", "jais2",
)  # fmt: skip
"""Norms with a bias, an MLP without a gate; biases, but for what `_has_bias` reads."""
_UNGATED_KINDS = ("nemotron", "arcee", "apertus", "nanochat")
"""Like Llama but for an MLP without a gate (squared ReLU, xIELU)."""
_LLAMA_KINDS = (
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "phimoe", "olmo", "olmo2", "olmo3",
    "olmoe", "granite", "granitemoe", "smollm3", "deepseek_v2", "deepseek_v3", "kimi_k2",
    "gpt_oss", "glm", "glm4", "glm4_moe", "cohere", "cohere2", "stablelm", "exaone4", "seed_oss",
    "helium", "ernie4_5", "hunyuan_v1_dense", "internlm2", "internlm3", "baichuan", "dots1",
    "minimax_m2", "dbrx", "cwm", "emu3_text_model", "granitemoeshared", "granite_swa",
    "granitemoe_swa", "hyperclovax", "mellum", "minicpm3", "ministral3", "vaultgemma", "youtu",
    *_UNGATED_KINDS,
)  # fmt: skip
"""RMS norms, rotated positions, a gated MLP or experts that have one."""
_LAYERNORM_KINDS = ("cohere", "cohere2", "stablelm", "nemotron", "phimoe", "dbrx")
_TIED_KINDS = (
    "gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "biogpt", "falcon", "mpt", "starcoder2",
    "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2",
)  # fmt: skip
"""Whose head is the table of tokens unless `tie_word_embeddings` says otherwise."""


_LEARNED_KINDS = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "biogpt")
"""Positions from a table; ALiBi has no parameters and counts as rotated."""
_MULTI_QUERY_KINDS = ("falcon", "gpt_bigcode")
"""One head of keys and values unless `multi_query` says otherwise."""
KNOWN_KINDS = (*_GPT_KINDS, *_LLAMA_KINDS)
_INNER_KEYS = ("kv_n_heads", "ffn_hidden_size", "moe_num_experts", "moe_top_k")
_OLD_LENGTH = 2048
"""Of falcon and bloom, whose configurations need not say it."""
_SPARSE_KEYS = ("decoder_sparse_step", "moe_layer_freq")


def read_hugging_face(path: Path, sequence_length: int | None = None) -> ModelShape:
    """The model of a `config.json`, or of the folder that has one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}; give a config.json") from None
    if len(text) > _MAX_BYTES:
        raise UsageError(f"{file} is larger than {_MAX_BYTES >> 20} MiB, no config.json is")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no JSON: {str(error)[:100]}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object; give a model's config.json")
    reader = _Reader(_flatten(config))
    name = file.resolve().parent.name if file.stem == "config" else file.stem
    model = _make_model(reader, sequence_length, name=name or "model")
    if reader.problems:
        raise UsageError(f"{file}: {'; '.join(reader.problems)}")
    return model


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    """With the part that is a language model's, and what DBRX has in parts of their own."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    parts = [config.get(name) for name in ("attn_config", "ffn_config")]
    inner = {key: one for part in parts if isinstance(part, dict) for key, one in part.items()}
    return {**{key: inner[key] for key in _INNER_KEYS if key in inner}, **config}


class _Reader:
    """Numbers of a configuration by any of their names; collects what is wrong."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def number(
        self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST
    ) -> int:
        """A whole number in its limits; a problem gives one that is."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                self.problems.append(
                    f"{name} is {repr(value)[:40]}, expected a whole number from {least} to "
                    f"{most:,}"
                )
                return default or 1
            return value
        if default is None:
            self.problems.append(f"{' or '.join(names)} is missing")
            return 1
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.problems.append(f"{name} is {repr(value)[:40]}, expected true or false")
        return value if isinstance(value, bool) else default


def _make_model(reader: _Reader, sequence_length: int | None, name: str) -> ModelShape:
    kind = str(reader.config.get("model_type") or "")[:40]
    is_gpt = kind in _GPT_KINDS
    if not is_gpt and kind not in _LLAMA_KINDS:
        known = ", ".join(sorted(KNOWN_KINDS))
        found = f"model_type {kind!r} is unknown" if kind else "model_type is missing"
        reader.problems.append(
            f"{found}; known are {known}; a decoder with layers like Llama's can be given as llama"
        )
    hidden = reader.number("hidden_size", "n_embd", "n_embed", "d_model")
    heads = reader.number("num_attention_heads", "num_heads", "n_head", "n_heads")
    length = sequence_length or reader.number(
        "max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len",
        default=_OLD_LENGTH if kind in ("falcon", "bloom") else None,
    )  # fmt: skip
    layers = reader.number(
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", most=_MOST_LAYERS
    )
    kv_heads = _read_kv_heads(reader, kind, heads)
    wide = reader.number("expansion_ratio", default=4) * hidden
    inner = reader.number(
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        default=wide if is_gpt else None,
    )
    return ModelShape(
        name=name,
        vocab_size=reader.number("vocab_size"),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_read_head_size(reader, hidden, heads),
        ffn_hidden_size=inner,
        sequence_length=length,
        norm="layernorm" if is_gpt or kind in _LAYERNORM_KINDS else "rmsnorm",
        position="learned" if kind in _LEARNED_KINDS else "rope",
        activation="gelu" if is_gpt or kind in _UNGATED_KINDS else "swiglu",
        bias=_has_bias(reader, kind),
        tie_embeddings=reader.flag("tie_word_embeddings", default=kind in _TIED_KINDS),
        experts=_read_experts(reader, inner, layers),
        latent=_read_latent(reader),
    )


def _read_head_size(reader: _Reader, hidden: int, heads: int) -> int:
    size = reader.number("head_dim", default=0)
    if not size and hidden > 1 and hidden % heads:
        reader.problems.append(
            f"{heads} heads do not divide a hidden size of {hidden:,}, and head_dim is missing"
        )
    return size or max(1, hidden // heads)


def _read_kv_heads(reader: _Reader, kind: str, heads: int) -> int:
    if kind in _MULTI_QUERY_KINDS and not reader.flag("new_decoder_architecture", default=False):
        return 1 if reader.flag("multi_query", default=True) else heads
    found = reader.number("num_key_value_heads", "num_kv_heads", "kv_n_heads", default=heads)
    if heads > 1 and heads % found:
        reader.problems.append(f"{heads} heads cannot share {found} heads of keys and values")
    return found


def _has_bias(reader: _Reader, kind: str) -> bool:
    if kind == "mpt":
        return not reader.flag("no_bias", default=True)
    if kind == "falcon":
        return reader.flag("bias", default=False)
    return kind in _GPT_KINDS or kind == "gpt_oss"


def _read_experts(reader: _Reader, inner: int, num_layers: int) -> Experts | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    count = reader.number(*names, default=0, least=0)
    if not count:
        return None
    reader.problems += [
        f"{key} is {str(reader.config[key])[:40]}: mixtures in some layers only, beyond the first "
        "(first_k_dense_replace), are not known"
        for key in (*_SPARSE_KEYS, "mlp_only_layers")
        if reader.config.get(key) not in (None, 1, [])
    ]
    width = reader.number("moe_intermediate_size", default=inner)
    shared = reader.number("n_shared_experts", default=0, least=0)
    wide = reader.number("shared_expert_intermediate_size", default=0, least=0)
    return Experts(
        count=count,
        active=reader.number("num_experts_per_tok", "moe_top_k", most=count),
        width=width,
        num_shared=shared or wide // width,
        num_dense_layers=reader.number(
            "first_k_dense_replace", default=0, least=0, most=num_layers - 1
        ),
    )


def _read_latent(reader: _Reader) -> LatentAttention | None:
    rank = reader.number("kv_lora_rank", default=0, least=0)
    if not rank:
        return None
    return LatentAttention(
        kv_rank=rank,
        query_rank=reader.number("q_lora_rank", default=0, least=0),
        nope_size=reader.number("qk_nope_head_dim"),
        rope_size=reader.number("qk_rope_head_dim"),
        value_size=reader.number("v_head_dim"),
    )
