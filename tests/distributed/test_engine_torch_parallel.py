"""FSDP2, DDP and DTensor tensor parallel train as one process does, on real gloo ranks.

`engine_torch_parallel` runs once and does the work; here its numbers are judged.
"""

import json
from typing import Any

import pytest
from tests.distributed.run_program import run_program

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

TOLERANCE = 1e-5
NUM_LAYERS = 2
"""Of the model whose collectives are counted."""
NUM_GROUPS = NUM_LAYERS + 1
NUM_MICROBATCHES = 4

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ranks]:
    """What each rank found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("torch_parallel")
    run_program("engine_torch_parallel", folder, timeout_s=170)
    return {
        num_ranks: [json.loads((folder / f"{num_ranks}_{rank}.json").read_text(encoding="utf-8"))
                    for rank in range(num_ranks)]
        for num_ranks in (2, 4)
    }  # fmt: skip


def select(results: dict[int, Ranks], *words: str) -> dict[str, Ranks]:
    """The cases whose names have all these words, with what every rank found."""
    return {
        name: [rank["cases"][name] for rank in ranks]
        for ranks in results.values()
        for name in ranks[0]["cases"]
        if set(words) <= set(name.split())
    }


def assert_equal_training(cases: dict[str, Ranks], expected_count: int) -> None:
    assert len(cases) == expected_count
    for name, ranks in cases.items():
        for rank in ranks:
            assert rank["loss_difference"] <= TOLERANCE, name
            assert rank["evaluation_difference"] <= TOLERANCE, name
            assert rank["gradient_difference"] <= TOLERANCE, (name, rank["worst_gradient"])
            assert rank["norm_difference"] <= TOLERANCE, name
            assert rank["largest_gradient"] > 1000 * TOLERANCE, "a wrong gradient must be seen"
            assert rank["num_gradients"] >= 7, "every parameter of a stage must have one"
        losses = [rank["losses"] for rank in ranks if rank["losses"][0]]
        assert losses, name
        for steps in losses:
            assert sum(steps[-1]) < 0.9 * sum(steps[0]), "it must have learned something"


@pytest.mark.parametrize(
    ("variant", "expected_count"),
    [("fsdp1", 4), ("fsdp2", 2), ("fsdp3", 1), ("ddp", 3), ("reducer", 3)],
)
def test_five_steps_of_sgd_equal_those_of_one_process(
    results: dict[int, Ranks], variant: str, expected_count: int
) -> None:
    assert_equal_training(select(results, variant), expected_count)


@pytest.mark.parametrize(
    ("words", "expected_count"),
    [
        (("uses_dtensor",), 2),
        (("sequence_parallel",), 2),
        (("aggressive",), 1),
        (("zb_h1",), 1),
        (("zb_v",), 1),
        (("interleaved_1f1b",), 2),
    ],
)
def test_the_cases_cover_what_must_go_together(
    results: dict[int, Ranks], words: tuple[str, ...], expected_count: int
) -> None:
    assert_equal_training(select(results, *words), expected_count)


def test_the_reducer_of_several_stages_sends_while_the_last_one_runs_backward(
    results: dict[int, Ranks],
) -> None:
    (ranks,) = select(results, "reducer", "interleaved_1f1b").values()
    assert all(rank["num_early_buckets"] > 0 for rank in ranks)


def test_zero_stages_gather_and_reduce_as_often_as_stated(results: dict[int, Ranks]) -> None:
    every = NUM_MICROBATCHES * NUM_GROUPS
    expected = {1: (NUM_GROUPS, NUM_GROUPS), 2: (NUM_GROUPS, every), 3: (2 * every, every)}
    for rank in results[2]:
        for stage, (num_gathers, num_reductions) in expected.items():
            assert rank["fsdp collectives"][str(stage)] == {
                "allgather": num_gathers,
                "reducescatter": num_reductions,
            }


def test_zero_stages_hold_what_is_stated_at_every_point_of_a_step(
    results: dict[int, Ranks],
) -> None:
    part, whole = 0.5, 1.0
    for rank in results[2]:
        for stage, held in rank["held"].items():
            parameters = part + (whole if stage in "12" else 0)
            assert held == {
                "before": [part, 0],
                "after forward": [parameters, 0],
                "before the last backward": [parameters, whole if stage == "1" else part],
                "after finish": [part, part],
                "after evaluation": [part, part],
                "statistics": [whole, part],
            }


def test_dtensor_sends_what_megatron_does(results: dict[int, Ranks]) -> None:
    into_and_out_of_layers = 4 * NUM_LAYERS
    embedding = head = norms = 1
    loss = 2
    for rank in results[2]:
        without, with_sequence_parallel = rank["dtensor collectives"]
        assert without == {"allreduce": into_and_out_of_layers + embedding + head + loss}
        assert with_sequence_parallel == {
            "allgather": into_and_out_of_layers + embedding + head,
            "reducescatter": into_and_out_of_layers + embedding + head,
            "allreduce": loss + norms,
        }


def test_ddp_as_it_comes_is_wrong_with_two_microbatches_in_flight_and_here_it_is_right(
    results: dict[int, Ranks],
) -> None:
    for rank in results[2]:
        found = rank["plain ddp"]
        assert found["ours"] == found["right"]
        assert found["plain"] != found["right"]


def test_ddp_notices_last_backwards_announced_too_early_or_not_at_all(
    results: dict[int, Ranks],
) -> None:
    for rank in results[2]:
        early, never = rank["plain ddp"]["messages"]
        assert "stage 0 had 2, expected 1" in early
        assert "stage 0 had 0, expected 1" in never


def test_fsdp_computes_in_one_dtype_and_sums_in_another(results: dict[int, Ranks]) -> None:
    for rank in results[2]:
        found = rank["mixed precision"]
        assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
        # bfloat16 keeps 8 bits: 0.4 % for each operation.
        assert 1e-4 < found["gradient difference"] < 0.1
        assert 0 < found["loss difference"] < 0.02


def test_combinations_that_would_be_wrong_are_refused(results: dict[int, Ranks]) -> None:
    for rank in results[2]:
        reducer, ddp, group, options, twice = rank["refusals"]
        assert reducer.startswith("the reducer does not average DTensors over dp")
        assert ddp.startswith("DDP loses DTensor parameters")
        assert "give the dp mesh" in group
        assert options.startswith("zero_stage is 4, expected 1, 2 or 3; cpu_offload is on")
        assert twice.startswith("the stage is spread over tp already")


def test_full_weights_go_into_a_spread_stage_and_come_back(results: dict[int, Ranks]) -> None:
    assert [rank["loading"] for rank in results[2]] == [0.0, 0.0]
