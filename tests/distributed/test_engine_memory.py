"""Memory strategies change the memory that training takes and not what it computes.

`engine_memory` runs once on two gloo ranks and does the work; here its numbers are judged.
"""

import json
from typing import Any

import pytest
from tests.distributed.run_program import run_program

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

TOLERANCE = 5e-6  # of a parameter's largest gradient; tp alone has 1.5e-6
STRATEGIES = ["basic", "standard", "aggressive", "extreme"]
PIPELINES = [
    *(f"{schedule}, {strategy}" for schedule in ("1f1b", "zb_h1") for strategy in STRATEGIES),
    "zb_v, extreme",
]
OTHERS = ["tp, aggressive", "tp, extreme", "fsdp, standard", "fsdp, extreme"]
"""Tensor parallel is with sequence parallel under extreme, without under aggressive."""

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("memory")
    run_program("engine_memory", folder, timeout_s=170)
    assert list((folder / "activations").iterdir()) == []
    return [json.loads((folder / f"{i}.json").read_text(encoding="utf-8")) for i in range(2)]


@pytest.mark.parametrize("case", [*PIPELINES, *OTHERS])
def test_losses_and_gradients_are_those_of_one_process(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        assert rank[case]["loss_difference"] <= TOLERANCE
        assert rank[case]["gradient_difference"] <= TOLERANCE, rank[case]["worst_gradient"]


def test_under_autocast_gradients_are_off_by_what_autocast_itself_costs(ranks: Ranks) -> None:
    for rank in ranks:
        basic, case = rank["1f1b, bf16, basic"], rank["1f1b, bf16, extreme"]
        assert basic["gradient_difference"] > 1e-3, "bfloat16 was not used"
        assert case["gradient_difference"] == pytest.approx(basic["gradient_difference"], rel=0.01)


def test_each_strategy_takes_less_memory_than_the_one_before(ranks: Ranks) -> None:
    for rank in ranks:
        peaks = [rank[f"1f1b, {name}"]["peak_bytes"] for name in STRATEGIES]
        assert peaks == sorted(set(peaks), reverse=True)


def test_zero_bubble_takes_less_memory_up_to_what_waits_for_weight_gradients(ranks: Ranks) -> None:
    for rank in ranks:
        basic, standard, aggressive, extreme = (
            rank[f"zb_h1, {name}"]["peak_bytes"] for name in STRATEGIES
        )
        assert basic > standard > aggressive >= extreme


@pytest.mark.parametrize("case", PIPELINES)
def test_no_activations_are_left_after_a_step(ranks: Ranks, case: str) -> None:
    # Losses, the latest gradient of a tied table, inputs: less than one layer's activations.
    assert {rank[case]["left_bytes"] < 20_000 for rank in ranks} == {True}


def test_statistics_tell_what_was_saved_and_what_it_cost(ranks: Ranks) -> None:
    for rank in ranks:
        found = {name: rank[f"1f1b, {name}"]["statistics"] for name in STRATEGIES}
        assert [found[name]["num_forwards"] for name in STRATEGIES[1:]] == [8, 8, 8]
        saved = [found[name]["saved_bytes"] for name in STRATEGIES]
        assert saved == sorted(set(saved))
        assert found["basic"]["recompute_ns"] == 0
        assert all(found[name]["recompute_ns"] > 0 for name in STRATEGIES[1:])
        assert [found[name]["written_bytes"] for name in STRATEGIES[:3]] == [0, 0, 0]
        assert 0 < found["extreme"]["read_bytes"] <= found["extreme"]["written_bytes"]
