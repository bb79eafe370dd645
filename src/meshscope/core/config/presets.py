"""Known models by name, and what a model table may leave out.

Shapes are those of the published configurations; their parameter counts are tested against the
published ones. `gpt-350m` is GPT-2 medium without biases and with a vocabulary rounded up to a
multiple of 128, as speed is usually measured.
"""

from collections.abc import Mapping
from typing import Any

_GPT2 = {
    "vocab_size": 50_257,
    "sequence_length": 1024,
    "norm": "layernorm",
    "position": "learned",
    "activation": "gelu",
    "bias": True,
    "tie_embeddings": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        "vocab_size": 512,
        "num_layers": 4,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "sequence_length": 64,
    },
    "gpt2-small": {**_GPT2, "num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "gpt2-medium": {**_GPT2, "num_layers": 24, "hidden_size": 1024, "num_heads": 16},
    "gpt2-large": {**_GPT2, "num_layers": 36, "hidden_size": 1280, "num_heads": 20},
    "gpt2-xl": {**_GPT2, "num_layers": 48, "hidden_size": 1600, "num_heads": 25},
    "gpt-350m": {
        **_GPT2,
        "vocab_size": 50_304,
        "bias": False,
        "num_layers": 24,
        "hidden_size": 1024,
        "num_heads": 16,
    },
    "llama-3.2-1b": {
        "vocab_size": 128_256,
        "num_layers": 16,
        "hidden_size": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_hidden_size": 8192,
        "sequence_length": 8192,
        "tie_embeddings": True,
        "rope_theta": 500_000.0,
    },
    "llama-2-7b": {
        "vocab_size": 32_000,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "ffn_hidden_size": 11_008,
        "sequence_length": 4096,
    },
    "llama-3-8b": {
        "vocab_size": 128_256,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_hidden_size": 14_336,
        "sequence_length": 8192,
        "rope_theta": 500_000.0,
    },
}
"""Fields of `ModelConfig` by the preset's name."""

_FFN_MULTIPLE = 64
"""What a swiglu width that is left out is rounded up to."""


def fill_model_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Adds num_kv_heads = num_heads, and the MLP's width, where they are left out.

    The width is 4·hidden_size with gelu; with swiglu, which has a third matrix, 8/3 of hidden_size
    rounded up to a multiple of 64, so that the MLP has about as many weights.
    """
    filled = dict(fields)
    num_heads, hidden_size = filled.get("num_heads"), filled.get("hidden_size")
    # A missing or wrong input of these is reported once, not twice.
    filled.setdefault("num_kv_heads", num_heads if isinstance(num_heads, int) else 1)
    if "ffn_hidden_size" not in filled:
        size = hidden_size if isinstance(hidden_size, int) else 1
        is_gated = filled.get("activation", "swiglu") == "swiglu"
        wide = -(-8 * size // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE
        filled["ffn_hidden_size"] = wide if is_gated else 4 * size
    return filled
