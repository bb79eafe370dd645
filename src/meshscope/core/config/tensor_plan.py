"""How tensor parallelism splits the engine's transformer: which module, along what, how large."""

from dataclasses import dataclass
from math import ceil

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import TrainConfig

_OUTPUTS = "outputs (rows of W)"
_INPUTS = "inputs, summed (columns of W)"
_WHOLE = "whole on every rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """One module's weight."""

    module: str
    """Its name in a stage; `*` stands for every layer."""
    split: str
    shape: tuple[int, ...]
    """On the tp rank that holds most."""


def list_tensor_plan(config: TrainConfig) -> tuple[TensorPart, ...]:
    """In the order of the forward pass; empty for a timed model, which has no such modules."""
    model, tp = config.model, config.parallel.tp
    if not isinstance(model, ModelConfig):
        return ()
    width, ffn = model.hidden_size, model.ffn_hidden_size
    vocabulary = "vocabulary" if tp > 1 else _WHOLE
    table = ceil(model.vocab_size / tp), width
    norm = f"{_WHOLE}; its sequence is split" if config.parallel.sequence_parallel else _WHOLE
    found: list[tuple[str, str, tuple[int, ...]]] = [("token_embedding", vocabulary, table)]
    if model.position == "learned":
        found.append(("position_embedding", _WHOLE, (model.sequence_length, width)))
    found += [
        ("layers.*.attention_norm, mlp_norm", norm, (width,)),
        (
            "layers.*.attention.qkv",
            f"{_OUTPUTS}: heads",
            ((width + 2 * model.kv_size) // tp, width),
        ),
        ("layers.*.attention.output", f"{_INPUTS}: heads", (width, width // tp)),
        ("layers.*.mlp.up", _OUTPUTS, (model.num_ffn_inputs * ffn // tp, width)),
        ("layers.*.mlp.down", _INPUTS, (width, ffn // tp)),
        ("final_norm", norm, (width,)),
        ("head", f"{vocabulary}{', tied to the embedding' * model.tie_embeddings}", table),
    ]
    return tuple(TensorPart(module=name, split=split, shape=shape) for name, split, shape in found)
