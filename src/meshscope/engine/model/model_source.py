"""Where an engine's stages come from: the transformer family, the timed model, or a user's layers.

Engine(config)                                            # what config.model says
Engine(config, model=UserModel(layers, plan, loss, lambda n: (n, 128, 64)))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.engine.model.tensor_regions import Group
from meshscope.engine.model.timed_model import build_timed_stage
from meshscope.engine.model.transformer import build_stage
from meshscope.engine.model.user_model import LayerPlan, Loss, UserLayer, build_user_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """Which stage, of how many, and what it is spread over."""

    index: int
    num_stages: int
    stage_sizes: tuple[int, ...] | None
    tp_group: Group
    sequence_parallel: bool
    seed: int
    device: torch.device


class ModelSource(Protocol):
    """Makes the stages that a rank holds."""

    def build(self, setup: StageSetup) -> nn.Module:
        """One stage on its device, with the initial weights of the seed."""

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        """What a stage hands to the next, for one microbatch, on this rank."""


@dataclass(frozen=True, slots=True)
class ConfiguredModel:
    """The family of `model`, or the model whose layers take a stated time."""

    config: ModelConfig | TimedModelConfig

    def build(self, setup: StageSetup) -> nn.Module:
        """Spread over tp; of a timed model every tp rank has the whole stage."""
        options: dict[str, Any] = {
            "stage_sizes": setup.stage_sizes,
            "tp_group": setup.tp_group,
            "sequence_parallel": setup.sequence_parallel,
            "seed": setup.seed,
            "device": setup.device,
        }
        if isinstance(self.config, TimedModelConfig):
            return build_timed_stage(self.config, setup.index, setup.num_stages, **options)
        return build_stage(self.config, setup.index, setup.num_stages, **options)

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = stage.hidden_shape(microbatch_size)  # type: ignore[operator]
        return shape


@dataclass(frozen=True, slots=True)
class UserModel:
    """A user's own layers, one after the other, with the plan of what tp spreads."""

    layers: Sequence[UserLayer]
    plan: Mapping[str, LayerPlan]
    loss: Loss
    shape: Callable[[int], Sequence[int]]
    """From the microbatch size to the shape that one stage hands to the next."""

    def build(self, setup: StageSetup) -> nn.Module:
        """Layers of this stage only; sequence parallel is what the plan says of each layer."""
        stage = build_user_stage(
            self.layers,
            self.plan,
            setup.index,
            setup.num_stages,
            stage_sizes=setup.stage_sizes,
            tp_group=setup.tp_group,
            loss=self.loss,
            seed=setup.seed,
        )
        return stage.to(setup.device)

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        return tuple(self.shape(microbatch_size))
