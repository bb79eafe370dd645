"""Users' lists of layers: plans, stages, counts. What tp does to them is in tests/distributed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshscope.engine.model.tensor_parallel import ColumnParallelLinear
from meshscope.engine.model.user_model import (
    LayerPlan,
    build_user_stage,
    find_plan_problems,
)
from meshscope.errors import UsageError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 12)
        self.narrow = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def make_layers() -> list[Callable[[], nn.Module]]:
    return [lambda: nn.Embedding(10, 8), Block, Block, lambda: nn.Linear(8, 10)]


PLAN = {
    "layers.0": LayerPlan("vocab"),
    "layers.*.wide": LayerPlan("column"),
    "layers.*.narrow": LayerPlan("row"),
    "layers.3": LayerPlan("column", gather_output=True),
}


def test_stages_in_a_row_equal_the_whole_model_exactly() -> None:
    whole = build_user_stage(make_layers(), PLAN, loss=F.mse_loss, seed=1)
    stages = [
        build_user_stage(
            make_layers(), PLAN, index, 3, stage_sizes=[1, 2, 1], loss=F.mse_loss, seed=1
        )
        for index in range(3)
    ]
    x = inputs = torch.arange(10).view(2, 5)
    targets = torch.randn(2, 5, 10)
    for stage in stages[:-1]:
        x = stage(x)
    assert torch.equal(stages[-1](x), whole(inputs))
    assert torch.equal(stages[-1](x, targets), whole(inputs, targets))
    assert [stage.layer_range for stage in stages] == [range(0, 1), range(1, 3), range(3, 4)]
    assert [(stage.is_first, stage.is_last) for stage in stages] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip


def test_stages_hand_on_float32_under_autocast() -> None:
    layers = [lambda: nn.Linear(8, 8) for _ in range(3)]
    whole = build_user_stage(layers, {}, seed=1)
    stages = [build_user_stage(layers, {}, index, 3, seed=1) for index in range(3)]
    x = inputs = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(inputs)
        for stage in stages[:-1]:
            x = stage(x)
            assert x.dtype == torch.float32
        assert expected.dtype == torch.bfloat16
        assert torch.equal(stages[-1](x), expected)


def test_parallel_layers_on_one_rank_are_the_users_own() -> None:
    own, planned = (build_user_stage(make_layers(), plan, seed=2) for plan in ({}, PLAN))
    assert own.state_dict().keys() == planned.state_dict().keys()
    inputs = torch.arange(10).view(2, 5)
    assert torch.equal(own(inputs), planned(inputs))


def test_modules_keep_their_weights() -> None:
    layer = nn.Linear(4, 6)
    weight = layer.weight.detach().clone()
    stage = build_user_stage([layer], {"layers.0": LayerPlan("row")})
    assert torch.equal(stage.layers["0"].weight, weight)


def test_all_problems_of_a_plan_come_at_once() -> None:
    plan = {
        "layers.*.norm": LayerPlan("column"),
        "layers.1.wide": LayerPlan("vocab"),
        "layers.2.narrow": LayerPlan("row"),
        "layers.7": LayerPlan("replicated"),
        "layers.3": LayerPlan("column"),
    }
    assert find_plan_problems(make_layers(), plan, tp=5) == [
        "the plan's 'layers.7' matches no module of the model",
        "layers.1.norm is LayerNorm, but the strategy column needs nn.Linear",
        "layers.1.wide is Linear, but the strategy vocab needs nn.Embedding",
        "layers.2.norm is LayerNorm, but the strategy column needs nn.Linear",
        "layers.2.narrow has 12 inputs, which tp (5) does not divide",
    ]
    with pytest.raises(UsageError, match=r"layers\.7"):
        build_user_stage(make_layers(), plan)
    with pytest.raises(UsageError, match=r"4 layers cannot fill 5 stages.*stage 5 is outside"):
        build_user_stage(make_layers(), PLAN, 5, 5)


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one of column, row, vocab, replicated"):
        LayerPlan("diagonal")
    with pytest.raises(UsageError, match="gather_output is for column"):
        LayerPlan("row", gather_output=True)
    with pytest.raises(UsageError, match="mix up the outputs of 2 matrices"):
        ColumnParallelLinear(8, (8, 8), gather_output=True)


def test_communication_reads_as_a_sentence() -> None:
    assert str(LayerPlan("column", sequence_parallel=True).communication) == (
        "forward all_gather, backward all_gather + reduce_scatter, parameter gradients none"
    )
    assert str(LayerPlan("row").communication) == (
        "forward all_reduce, backward none, parameter gradients none"
    )
