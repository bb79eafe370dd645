"""The plan that is listed is the one that is built."""

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from dataclasses import replace  # noqa: E402

from meshscope.core.config.model_config import ModelConfig  # noqa: E402
from meshscope.core.config.presets import PRESETS, fill_model_defaults  # noqa: E402
from meshscope.core.config.tensor_plan import list_tensor_plan  # noqa: E402
from meshscope.core.config.train_config import ParallelConfig, TrainConfig  # noqa: E402
from meshscope.engine.model.transformer import build_stage  # noqa: E402


class TwoRanks:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("preset", ["llama-tiny", "gpt2-small"])
def test_shapes_are_those_of_a_built_stage(preset):
    model = replace(ModelConfig(**fill_model_defaults(PRESETS[preset])), num_layers=1)
    config = TrainConfig(model=model, parallel=ParallelConfig(tp=2))
    stage = build_stage(model, tp_group=TwoRanks(), device="meta")
    shapes = {name: tuple(weight.shape) for name, weight in stage.named_parameters()}
    listed = set()
    for part in list_tensor_plan(config):
        prefix, _, last = part.module.replace("*", "0").rpartition(".")
        for name in last.split(", ") if "," not in part.module else ["attention_norm", "mlp_norm"]:
            full = ".".join(filter(None, (prefix if "," not in part.module else "layers.0", name)))
            if not (full == "head" and model.tie_embeddings):
                assert shapes[f"{full}.weight"] == part.shape, full
            listed.add(f"{full}.weight")
    assert {name for name in shapes if name.endswith(".weight")} <= listed
