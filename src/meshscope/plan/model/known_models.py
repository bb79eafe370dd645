"""Models by name: the engine's presets, and larger ones that only a planner asks about.

Shapes are the published ones (arXiv 2104.04473 and 2205.05198 for the GPTs, the models' own
`config.json` for the others); tests compare parameter counts with the published totals.
"""

import difflib
from typing import Any

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.presets import PRESETS, fill_model_defaults
from meshscope.errors import UsageError
from meshscope.plan.model.model_shape import Experts, LatentAttention, ModelShape, from_model_config


def make_gpt(
    name: str,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    sequence_length: int = 2048,
    vocab_size: int = 51_200,
) -> ModelShape:
    """As Megatron-LM's papers have them: biases, learned positions, a tied head."""
    return ModelShape(
        name=name,
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        ffn_hidden_size=4 * hidden_size,
        sequence_length=sequence_length,
        norm="layernorm",
        position="learned",
        activation="gelu",
        bias=True,
        tie_embeddings=True,
    )


def _llama(name: str, **given: Any) -> ModelShape:
    fields: dict[str, Any] = {"vocab_size": 128_256, "sequence_length": 8192, "head_size": 128}
    return ModelShape(name=name, **(fields | given))


_LARGE: tuple[ModelShape, ...] = (
    make_gpt("gpt-22b", hidden_size=6144, num_layers=48, num_heads=64),
    make_gpt("gpt-175b", hidden_size=12_288, num_layers=96, num_heads=96),
    make_gpt("gpt-530b", hidden_size=20_480, num_layers=105, num_heads=128),
    make_gpt("gpt-1t", hidden_size=25_600, num_layers=128, num_heads=160),
    _llama(
        "llama-3-70b", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8,
        ffn_hidden_size=28_672,
    ),
    _llama(
        "llama-3.1-405b", num_layers=126, hidden_size=16_384, num_heads=128, num_kv_heads=8,
        ffn_hidden_size=53_248,
    ),
    _llama(
        "mixtral-8x7b", vocab_size=32_000, sequence_length=4096, num_layers=32, hidden_size=4096,
        num_heads=32, num_kv_heads=8, ffn_hidden_size=14_336,
        experts=Experts(count=8, active=2, width=14_336),
    ),
    _llama(
        "deepseek-v3", vocab_size=129_280, sequence_length=4096, num_layers=61, hidden_size=7168,
        num_heads=128, num_kv_heads=128, ffn_hidden_size=18_432,
        experts=Experts(count=256, active=8, width=2048, num_shared=1, num_dense_layers=3),
        latent=LatentAttention(
            kv_rank=512, query_rank=1536, nope_size=128, rope_size=64, value_size=128
        ),
    ),
)  # fmt: skip

KNOWN_NAMES: tuple[str, ...] = (*PRESETS, *(model.name for model in _LARGE))


def find_model(name: str) -> ModelShape:
    """By its name, in capitals or not; UsageError lists all."""
    key = name.strip().casefold()
    for model in _LARGE:
        if model.name == key:
            return model
    if key in PRESETS:
        return from_model_config(ModelConfig(**fill_model_defaults(PRESETS[key])), key)
    near = difflib.get_close_matches(key, KNOWN_NAMES, 1, 0.6)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"there is no model {name[:60]!r}; {meant}use one of {', '.join(KNOWN_NAMES)}, or the path "
        "of a config.json"
    )
