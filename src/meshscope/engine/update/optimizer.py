"""Makes the optimizer and the learning rates a configuration asks for."""

from collections.abc import Iterable

import torch
from torch import nn

from meshscope.core.config.train_config import OptimizerConfig
from meshscope.engine.update.learning_rate import LearningRate

_WSD_DECAY_FRACTION = 0.2
"""Share of all steps, where the configuration leaves it open."""


def make_optimizer(
    config: OptimizerConfig, modules: Iterable[nn.Module], device: torch.device
) -> torch.optim.Optimizer:
    """An optimizer of all parameters of `modules`; weight decay is for matrices only."""
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    present = [group for group in groups if group["params"]]
    if config.kind == "sgd":
        optimizer = torch.optim.SGD(
            present,
            config.learning_rate,
            momentum=config.momentum,
            fused=device.type == "cuda",
        )
        if config.momentum and device.type == "cuda":
            # The fused kernel leaves buffers uninitialised where the first step is skipped; from
            # zero the first step taken is the same.
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    return torch.optim.AdamW(
        present,
        config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=device.type == "cuda",
    )


def make_learning_rate(config: OptimizerConfig, num_steps: int) -> LearningRate:
    num_decay_steps = config.num_decay_steps
    if config.rate_schedule == "wsd" and num_decay_steps is None:
        num_decay_steps = max(1, round(_WSD_DECAY_FRACTION * num_steps))
    return LearningRate(
        kind=config.rate_schedule,
        peak=config.learning_rate,
        num_steps=num_steps,
        num_warmup_steps=config.num_warmup_steps,
        num_decay_steps=num_decay_steps,
        final_ratio=config.final_rate_ratio,
    )
