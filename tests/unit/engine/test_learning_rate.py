"""Learning rates against closed forms written out by hand."""

from math import cos, pi

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from meshscope.core.config.train_config import OptimizerConfig  # noqa: E402
from meshscope.engine.update.learning_rate import LearningRate, set_learning_rate  # noqa: E402
from meshscope.engine.update.optimizer import make_learning_rate  # noqa: E402
from meshscope.errors import UsageError  # noqa: E402


def rates(**fields: object) -> list[float]:
    schedule = LearningRate(**{"peak": 2.0, "num_steps": 10, **fields})
    return [schedule.at(step) for step in range(12)]


def test_warm_up_rises_by_equal_amounts_and_constant_stays() -> None:
    assert rates(num_warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, *[2.0] * 9])


def test_linear_falls_from_the_peak_to_the_final_ratio_at_the_last_step() -> None:
    found = rates(kind="linear", num_warmup_steps=2, final_ratio=0.3)
    expected = [1.0, 2.0, 2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.6, 0.6]
    assert found == pytest.approx(expected)


def test_cosine_is_half_a_period() -> None:
    found = rates(kind="cosine", num_warmup_steps=1, final_ratio=0.1)
    falling = [0.2 + 1.8 * (1 + cos(pi * step / 8)) / 2 for step in range(9)]
    assert found == pytest.approx([2.0, *falling, 0.2, 0.2])
    assert found[5] == pytest.approx(1.1), "half way between peak and end"


def test_wsd_is_flat_and_then_falls_in_a_line() -> None:
    found = rates(kind="wsd", num_warmup_steps=2, num_decay_steps=5)
    assert found == pytest.approx([1.0, *[2.0] * 5, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0])


def test_wsd_decays_over_a_fifth_unless_told() -> None:
    schedule = LearningRate(kind="wsd", peak=1.0, num_steps=20)
    assert [schedule.at(step) for step in (15, 16, 17, 18, 19)] == pytest.approx(
        [1, 1, 2 / 3, 1 / 3, 0]
    )


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_a_training_of_one_step_has_the_peak(kind: str) -> None:
    assert LearningRate(kind=kind, peak=0.1, num_steps=1).at(0) == 0.1


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        LearningRate(
            kind="square", peak=0, num_steps=5, num_warmup_steps=6, num_decay_steps=1, final_ratio=2
        )
    assert str(caught.value) == (
        "learning-rate kind is 'square', expected one of constant, linear, cosine, wsd; "
        "peak learning rate is 0, expected a number above 0; "
        "num_warmup_steps is 6, expected 0..5 (num_steps); final_ratio is 2, expected 0..1; "
        "num_decay_steps is for wsd, but the kind is square; leave it out"
    )


def test_warm_up_and_decay_must_fit_into_the_steps() -> None:
    with pytest.raises(UsageError, match=r"num_decay_steps is 7, expected 0\.\.6"):
        LearningRate(kind="wsd", peak=1, num_steps=10, num_warmup_steps=4, num_decay_steps=7)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(UsageError, match="step is -1"):
        LearningRate(peak=1, num_steps=10).at(-1)


def test_a_configuration_gives_the_rate_of_every_step() -> None:
    config = OptimizerConfig(
        learning_rate=0.4, rate_schedule="linear", num_warmup_steps=2, final_rate_ratio=0.5
    )
    rate = make_learning_rate(config, 5)
    assert [rate.at(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.4, 0.3, 0.2])


def test_wsd_decays_over_the_last_fifth_unless_told_otherwise() -> None:
    config = OptimizerConfig(learning_rate=1.0, rate_schedule="wsd", final_rate_ratio=0.0)
    rate = make_learning_rate(config, 20)
    assert [rate.at(step) for step in (15, 16, 19)] == pytest.approx([1.0, 1.0, 0.0])
    assert 0 < rate.at(17) < 1


def test_it_is_set_in_every_group_and_in_place_in_tensors() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    rate = torch.tensor(1.0)
    optimizer = torch.optim.AdamW(
        [
            {"params": weights[:1]},
            {"params": weights[1:2], "lr_scale": 0.5},
            {"params": weights[2:], "lr": rate, "foreach": False, "capturable": False},
        ],
        lr=1.0,
    )
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups[:2]] == [0.25, 0.125]
    assert optimizer.param_groups[2]["lr"] is rate
    assert rate.item() == 0.25
