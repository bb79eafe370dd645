"""What one rank of the engine computes in a step, in closed form, for MFU and HFU.

Of the transformer only: a timed model computes nothing. Each rank has its stages' share of layers,
of each layer one tp-th, and the head if its last stage has it; with an even split of work over tp
that is exact, as the test against torch's counter shows. Recomputation is known for the strategies
that run a layer's forward once more or not at all; for the others there is no HFU.
"""

from typing import TYPE_CHECKING

from meshscope.core.config.model_config import ModelConfig, split_layers
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.flops import Flops, Recompute, TransformerShape, count_stage_flops

if TYPE_CHECKING:
    from meshscope.capture.recorder import Recorder

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_RECOMPUTE = {
    "basic": Recompute.NONE,
    "cpu_offload": Recompute.NONE,
    "standard": Recompute.FULL,
}
"""Recomputation by memory strategy; the others run parts of a stage twice more."""


def _shape_of(model: ModelConfig) -> TransformerShape:
    """The model as the closed form wants it."""
    return TransformerShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        sequence_length=model.sequence_length,
        vocab_size=model.vocab_size,
        ffn_size=model.ffn_hidden_size,
        num_ffn_inputs=model.num_ffn_inputs,
        kv_size=model.kv_size,
    )


def count_rank_flops(config: TrainConfig, model: ModelConfig, pp_rank: int) -> Flops:
    """FLOPs of a step on one rank at pipeline position `pp_rank`."""
    schedule, parallel = config.schedule, config.parallel
    ranges = split_layers(model.num_layers, schedule.num_stages, parallel.stage_sizes)
    recompute = _RECOMPUTE.get(config.memory.strategy, Recompute.NONE)
    total = Flops(model=0.0, hardware=0.0)
    for stage in schedule.stages_of(pp_rank):
        total += count_stage_flops(
            _shape_of(model),
            num_layers=len(ranges[stage]),
            has_head=stage == schedule.num_stages - 1,
            recompute=recompute,
        )
    tokens = config.batch.microbatch_size * model.sequence_length * schedule.num_microbatches
    return total.scaled(tokens / parallel.tp)


def record_flops(recorder: "Recorder", config: TrainConfig, pp_rank: int) -> None:
    """Tells the recorder, where the model is the engine's own transformer."""
    model = config.model
    if not isinstance(model, ModelConfig):
        return
    flops = count_rank_flops(config, model, pp_rank)
    is_known = config.memory.strategy in _RECOMPUTE
    recorder.set_flops(
        model_flops_per_step=flops.model,
        hardware_flops_per_step=flops.hardware if is_known else None,
        dtype=DTYPES[config.precision.compute],
        source="closed form: 6 FLOPs per matrix weight and token, and attention at full length",
    )
