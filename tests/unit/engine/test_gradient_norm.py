import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from torch import nn  # noqa: E402

from meshscope.engine.model.sharding import ParameterShard  # noqa: E402
from meshscope.engine.update.gradient_norm import (  # noqa: E402
    GradientHealth,
    clip_gradient_norm,
    sync_tied_gradients,
)
from meshscope.errors import UsageError  # noqa: E402


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model(torch.randn(5, 3)).square().sum().backward()
    return model


def test_clipping_on_one_rank_is_that_of_torch() -> None:
    model, expected = make_model(), make_model()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5).item()
    health = clip_gradient_norm(model, 0.5, tp_group=None, pp_group=None)
    assert health == GradientHealth(
        norm=pytest.approx(norm), clip_ratio=pytest.approx(0.5 / (norm + 1e-6))
    )
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_small_gradients_and_measuring_leave_gradients_alone() -> None:
    model, untouched = make_model(), make_model()
    for max_norm in (1e6, None):
        assert clip_gradient_norm(model, max_norm, tp_group=None, pp_group=None).clip_ratio == 1.0
    assert torch.equal(model[0].weight.grad, untouched[0].weight.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_reported_and_left_alone(bad: float) -> None:
    model, untouched = make_model(), make_model()
    model[0].bias.grad[0] = bad
    health = clip_gradient_norm(model, 0.5, tp_group=None, pp_group=None)
    assert not health.is_finite
    assert health.clip_ratio == 1.0
    assert torch.equal(model[1].weight.grad, untouched[1].weight.grad)


def test_a_tied_copy_is_scaled_but_not_counted() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.parameter_shards = {"weight": ParameterShard(full_shape=(2, 2), tied_to="first.weight")}
    first.weight.grad, last.weight.grad = torch.ones(2, 2), torch.ones(2, 2)
    health = clip_gradient_norm([last, first], 1.0, tp_group=None, pp_group=None)
    assert health.norm == 2.0
    assert torch.equal(first.weight.grad, last.weight.grad)
    assert first.weight.grad.norm().item() == pytest.approx(1.0)


def test_a_parameter_that_two_stages_of_a_rank_share_is_counted_and_scaled_once() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    last.parameter_shards = {"weight": ParameterShard(full_shape=(2, 2), tied_to="first.weight")}
    first.weight.grad = torch.ones(2, 2)
    health = clip_gradient_norm([last, first], 1.0, tp_group=None, pp_group=None)
    assert health.norm == 2.0
    assert first.weight.grad.norm().item() == pytest.approx(1.0)


def test_models_without_gradients_have_norm_zero() -> None:
    health = clip_gradient_norm(nn.Linear(2, 2), 1.0, tp_group=None, pp_group=None)
    assert health == GradientHealth(norm=0.0, clip_ratio=1.0)


def test_a_norm_of_zero_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="max_norm is 0"):
        clip_gradient_norm(nn.Linear(2, 2), 0, tp_group=None, pp_group=None)


def test_without_another_stage_a_tied_gradient_stays_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(2))
    sync_tied_gradients(weight, None)
    sync_tied_gradients(None, None)
    assert weight.grad is None
