"""Where an engine's stages come from: the transformer family, the timed model, or a user's layers.

Engine(config)                                            # what config.model says
Engine(config, model=UserModel(layers, plan, loss, lambda n: (n, 128, 64)))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from meshscope.engine.config.train_config import TrainConfig
from meshscope.engine.model import build_stage
from meshscope.engine.model_config import ModelConfig
from meshscope.engine.tensor_regions import Group
from meshscope.engine.timed_model import TimedModelConfig, build_timed_stage
from meshscope.engine.user_model import LayerPlan, Loss, UserLayer, build_user_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
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

    def build(self, place: StagePlace) -> nn.Module:
        """One stage on its device, with the initial weights of the seed."""

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        """What a stage hands to the next, for one microbatch, on this rank."""


@dataclass(frozen=True, slots=True)
class TransformerSource:
    """The family of `model`."""

    config: ModelConfig

    def build(self, place: StagePlace) -> nn.Module:
        """Spread over tp."""
        return build_stage(
            self.config,
            place.index,
            place.num_stages,
            stage_sizes=place.stage_sizes,
            tp_group=place.tp_group,
            sequence_parallel=place.sequence_parallel,
            seed=place.seed,
            device=place.device,
        )

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        """As the stage says."""
        shape: tuple[int, ...] = stage.hidden_shape(microbatch_size)  # type: ignore[operator]
        return shape


@dataclass(frozen=True, slots=True)
class TimedSource:
    """The model whose layers take a stated time."""

    config: TimedModelConfig

    def build(self, place: StagePlace) -> nn.Module:
        """Every tp rank has the whole stage."""
        return build_timed_stage(
            self.config,
            place.index,
            place.num_stages,
            stage_sizes=place.stage_sizes,
            seed=place.seed,
            device=place.device,
        )

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        """As the stage says."""
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

    def build(self, place: StagePlace) -> nn.Module:
        """Layers of this stage only; sequence parallel is what the plan says of each layer."""
        stage = build_user_stage(
            self.layers,
            self.plan,
            place.index,
            place.num_stages,
            stage_sizes=place.stage_sizes,
            tp_group=place.tp_group,
            loss=self.loss,
            seed=place.seed,
        )
        return stage.to(place.device)

    def hidden_shape(self, stage: nn.Module, microbatch_size: int) -> tuple[int, ...]:
        """As the user says."""
        return tuple(self.shape(microbatch_size))


def make_source(config: TrainConfig) -> ModelSource:
    """The model that the configuration names."""
    if isinstance(config.model, TimedModelConfig):
        return TimedSource(config.model)
    return TransformerSource(config.model)
