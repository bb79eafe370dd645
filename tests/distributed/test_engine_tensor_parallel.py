"""Tensor-parallel models equal their single-process twins, on real gloo ranks.

`engine_tensor_parallel` runs once and does the work; here its numbers are judged.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.run_program import run_program

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo]

TOLERANCE = 1e-5
ARCHITECTURES = ("llama", "llama tied", "gpt", "gpt untied", "layernorm rope", "rmsnorm learned")


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every rank of every degree left what it found."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    run_program("engine_tensor_parallel", folder, timeout_s=150)
    return folder


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"])
def ranks(folder: Path, request: pytest.FixtureRequest) -> Results:
    """What each rank found, for both degrees in turn."""
    paths = [folder / f"tp{request.param}_rank{rank}.json" for rank in range(request.param)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def assert_equal_training(ranks: Results, name: str, tolerance: float) -> None:
    for rank in ranks:
        case = rank["cases"][name]
        assert case["losses"] == pytest.approx(case["reference_losses"], abs=tolerance, rel=0)
        assert case["gradient_difference"] <= tolerance, case["worst_gradient"]
        assert case["weight_difference"] <= tolerance, case["worst_weight"]
        assert case["losses"][-1] < 0.75 * case["losses"][0], "it must have learned something"


@pytest.mark.parametrize("mark", ["", ", sequence parallel"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "user's model"])
def test_five_steps_of_sgd_equal_those_of_one_process(ranks: Results, name: str, mark: str) -> None:
    assert_equal_training(ranks, name + mark, TOLERANCE)


@pytest.mark.parametrize("mark", ["", ", sequence parallel"])
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_what_differs_is_rounding(ranks: Results, name: str, mark: str) -> None:
    assert_equal_training(ranks, f"{name}{mark}, float64", 1e-12)


@pytest.mark.parametrize("mark", ["", ", sequence parallel"])
@pytest.mark.parametrize("way", ["backward in two parts", "checkpointed"])
def test_what_is_computed_later_or_again_is_the_same(ranks: Results, mark: str, way: str) -> None:
    for rank in ranks:
        assert rank["cases"][f"gpt{mark}, {way}"] == rank["cases"][f"gpt{mark}"]


def test_a_missing_sum_over_the_sequence_would_be_seen(ranks: Results) -> None:
    for rank in ranks:
        case = rank["cases"]["without the sum of partial gradients"]
        assert case["gradient_difference"] > 1000 * TOLERANCE
        assert case["weight_difference"] > 1000 * TOLERANCE


def test_a_plan_tells_the_communication_that_happens(ranks: Results) -> None:
    for row in (row for rank in ranks for row in rank["collectives"]):
        told = [text.removesuffix(" of the bias").split(" + ") for text in row["said"]]
        expected = [sorted(kind for kind in kinds if kind != "none") for kinds in told]
        happened = [sorted(Counter(seen).elements()) for seen in row["seen"]]
        assert happened == expected, row["plan"]


def test_cross_entropy_over_shards_of_the_vocabulary_is_that_of_torch(ranks: Results) -> None:
    for rank in ranks:
        found = rank["cross entropy"]
        assert found["loss"] <= TOLERANCE
        assert found["gradient"] <= TOLERANCE
        assert found["outside is infinite"], "a wrong target must not pass for a right one"


def test_ways_into_and_out_of_the_region_do_what_their_table_says(ranks: Results) -> None:
    for rank in ranks:
        assert len(rank["regions"]) == 8
        assert all(rank["regions"].values()), rank["regions"]


def test_autocast_reaches_into_the_parallel_layers(ranks: Results) -> None:
    for rank in ranks:
        loss, expected = rank["autocast"]["losses"]
        assert loss == pytest.approx(expected, rel=1e-3)
        assert rank["autocast"]["gradient error"] < 0.03, "bfloat16 has 8 bits"


def test_without_targets_every_rank_gets_all_logits(ranks: Results) -> None:
    for rank in ranks:
        assert rank["logits"] <= TOLERANCE
