"""The factor of fp16 losses follows torch's GradScaler step by step."""

import pytest
import torch

from meshscope.engine.update.loss_scale import LossScale


def follow_torch(pattern: str, *, initial: float, growth_steps: int) -> list[float]:
    """The scales of torch's own scaler on steps that are finite (.) or not (x)."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=growth_steps)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    scales = []
    for letter in pattern:
        loss = weight.sum() * (float("inf") if letter == "x" else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("pattern", ["......", "x.....", "...x...", "xx..x....", "....x...x"])
def test_scales_are_those_of_torch(pattern):
    scale = LossScale(1024.0, 3, is_enabled=True)
    found = []
    for letter in pattern:
        scale.update(is_finite=letter == ".")
        found.append(scale.value)
    assert found == follow_torch(pattern, initial=1024.0, growth_steps=3)


def test_without_fp16_it_stays_one():
    scale = LossScale(1024.0, 1, is_enabled=False)
    for is_finite in (True, False, True):
        scale.update(is_finite=is_finite)
    assert scale.value == 1.0


def test_a_checkpoint_keeps_where_it_was():
    scale = LossScale(1024.0, 3, is_enabled=True)
    scale.update(is_finite=True)
    scale.update(is_finite=True)
    restored = LossScale(1.0, 3, is_enabled=True)
    restored.restore(scale.to_document())
    for one in (scale, restored):
        one.update(is_finite=True)
    assert scale.value == restored.value == 2048.0


def test_it_never_becomes_zero():
    scale = LossScale(1.0, 3, is_enabled=True)
    for _ in range(2000):
        scale.update(is_finite=False)
    assert scale.value > 0
