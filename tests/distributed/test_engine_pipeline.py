"""Models in pipeline stages equal whole ones, under every schedule, on real gloo ranks.

`engine_pipeline` runs once and does the work; here its numbers are judged.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.run_program import run_program

from meshscope.core.schedule_builders import BUILDERS

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

TOLERANCE = 1e-5
DEGREES = (2, 4)
VARIANTS = ["1f1b, uneven", "zb_h1, uneven", "1f1b, tied", "interleaved_1f1b, tied", "zb_v, tied"]
TENSOR_PARALLEL = [
    "1f1b, tp 2, llama",
    "interleaved_1f1b, tp 2, gpt",
    "zb_h1, tp 2, tied",
    "zb_v, tp 2, gpt",
]
TORCH = [
    "torch gpipe",
    "torch 1f1b",
    "torch interleaved_1f1b",
    "torch looped_bfs",
    "torch interleaved_zb",
    "torch zb_v",
    "torch dualpipe_v",
]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every rank left what it found."""
    folder = tmp_path_factory.mktemp("pipeline")
    run_program("engine_pipeline", folder, timeout_s=170)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, Ranks]:
    """What each rank found, by the number of ranks."""
    return {
        num_ranks: [json.loads((folder / f"{num_ranks}_{rank}.json").read_text(encoding="utf-8"))
                    for rank in range(num_ranks)]
        for num_ranks in DEGREES
    }  # fmt: skip


def select(ranks: Ranks, case: str) -> Ranks:
    return [rank["cases"][case] for rank in ranks]


def assert_equal_training(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["loss_difference"] <= TOLERANCE
        assert rank["gradient_difference"] <= TOLERANCE, rank["worst_gradient"]
        assert rank["weight_difference"] <= TOLERANCE
        assert rank["largest_gradient"] > 1000 * TOLERANCE, "a wrong gradient must be seen"
    losses = [step for rank in ranks for step in rank["losses"] if step]
    assert sum(losses[-1]) < 0.9 * sum(losses[0]), "it must have learned something"


@pytest.mark.parametrize("num_ranks", DEGREES)
@pytest.mark.parametrize("case", [*BUILDERS, *VARIANTS])
def test_five_steps_of_sgd_equal_those_of_one_process(
    results: dict[int, Ranks], num_ranks: int, case: str
) -> None:
    assert_equal_training(select(results[num_ranks], case))


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_stages_in_tensor_and_sequence_parallel_equal_one_process(
    results: dict[int, Ranks], case: str
) -> None:
    assert_equal_training(select(results[4], case))


@pytest.mark.parametrize("case", TORCH)
def test_schedules_of_torch_run_the_same_stages_and_are_recorded(
    results: dict[int, Ranks], case: str
) -> None:
    if case not in results[2][0]["cases"]:
        pytest.skip("gloo of this torch cannot send to itself")
    ranks = select(results[2], case)
    assert_equal_training(ranks)
    assert all(rank["ran_as_scheduled"] for rank in ranks)


@pytest.mark.parametrize("num_ranks", DEGREES)
def test_ranks_record_exactly_their_rows_of_the_schedule(
    results: dict[int, Ranks], num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        wrong = [name for name, case in rank["cases"].items() if not case["ran_as_scheduled"]]
        assert wrong == []


@pytest.mark.parametrize("num_ranks", DEGREES)
def test_ranks_hold_as_many_activations_as_the_schedule_says(
    results: dict[int, Ranks], num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        for name, case in rank["cases"].items():
            if not name.startswith("torch"):
                assert case["peaks"] == [case["expected_peak"]] * 5, name


@pytest.mark.parametrize("num_ranks", DEGREES)
def test_evaluation_gives_the_losses_and_leaves_no_gradient(
    results: dict[int, Ranks], num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        for name, case in rank["cases"].items():
            assert case["evaluation_difference"] <= TOLERANCE, name


@pytest.mark.parametrize("num_ranks", DEGREES)
def test_any_number_of_microbatches_on_unsteady_ranks_ends_with_the_right_gradients(
    results: dict[int, Ranks], num_ranks: int
) -> None:
    for rank in results[num_ranks]:
        assert {run["name"] for run in rank["unsteady"]} == set(BUILDERS)
        for run in rank["unsteady"]:
            assert run["relative difference"] <= TOLERANCE, run


@pytest.mark.parametrize("num_ranks", DEGREES)
def test_graphs_are_freed_with_their_backward(results: dict[int, Ranks], num_ranks: int) -> None:
    for rank in results[num_ranks]:
        for run in rank["unsteady"]:
            assert run["peak"] == run["expected peak"], run
            assert run["alive at the end"] == 0, run
            # Where the backward is split the graph goes with I, before what W needs.
            assert run["most alive"] <= run["peak"], run
            assert run["is split"] or run["most alive"] == run["peak"], run


def test_a_rank_that_raises_names_the_action_and_the_others_end_with_their_timeout(
    folder: Path,
) -> None:
    ranks = [
        json.loads((folder / f"raise_{rank}.json").read_text(encoding="utf-8"))["messages"]
        for rank in range(4)
    ]
    assert ranks[1][0] == (
        "1F2 (forward of stage 1, microbatch 2) failed on pipeline rank 1, schedule 1f1b: "
        "ValueError: planted"
    )
    assert ranks[2][0].startswith(
        "2F2 (forward of stage 2, microbatch 2), waiting for the activation of stage 1 from "
        "pipeline rank 1, failed on pipeline rank 2"
    )
    assert ranks[0][0].startswith(
        "0B0 (backward of stage 0, microbatch 0), waiting for the gradient of stage 1 from "
        "pipeline rank 1, failed on pipeline rank 0"
    )
    for messages in ranks:
        assert messages[1].startswith("an earlier step failed"), "ranks are out of step"
