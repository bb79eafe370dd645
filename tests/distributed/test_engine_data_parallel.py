"""Gradient synchronisation on real gloo ranks: exact where it says so, and counted.

`engine_data_parallel` runs once and does the work; here its numbers are judged.
"""

import json
from math import ceil, isnan
from typing import Any

import pytest
from tests.distributed.run_program import run_program

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

WORLDS = (2, 3, 4, 8)
Results = dict[int, dict[str, Any]]

NUM_STEPS = 5
TOLERANCE = 1e-6
STRATEGIES = (
    "flat", "ring", "tree", "adaptive",
    *(f"hierarchical{how}, {n} per node" for n in (2, 3, 4) for how in ("", " by leaders")),
)  # fmt: skip
COMPRESSORS = (
    "fp16", "bf16", "int8", "int8, small blocks", "topk 1 %", "topk 10 %",
    "powersgd 1", "powersgd 4", "powersgd 2 after 3",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What rank 0 wrote, by number of ranks."""
    folder = tmp_path_factory.mktemp("data_parallel")
    run_program("engine_data_parallel", folder, timeout_s=170)
    return {
        world: json.loads((folder / f"world{world}.json").read_text(encoding="utf-8"))
        for world in WORLDS
    }


# --- strategies -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_every_strategy_gives_the_sum_of_all_reduce_with_the_same_bits_on_all_ranks(
    results: Results, world: int
) -> None:
    exact = {"exact": True, "same bits": True}
    assert results[world]["strategies"] == dict.fromkeys(STRATEGIES, exact)


@pytest.mark.parametrize("world", WORLDS)
def test_transfers_of_different_strategies_run_beside_each_other(
    results: Results, world: int
) -> None:
    assert results[world]["interleaving"]


@pytest.mark.parametrize("world", WORLDS)
def test_strategies_send_what_their_formulas_say(results: Results, world: int) -> None:
    found, size = results[world]["strategy bytes"], 4000
    for rank in range(world):
        flat, ring, tree = (found[name][rank] for name in ("flat", "ring", "tree"))
        assert (flat["num_operations"], flat["handed_bytes"]) == (1, size)
        assert flat["wire_bytes"] == pytest.approx(2 * (world - 1) / world * size)
        assert ring["num_operations"] == 2 * (world - 1)
        assert ring["wire_bytes"] == pytest.approx(2 * (world - 1) / world * size, abs=8)
        if world != 3:
            assert tree["wire_bytes"] == size * (world.bit_length() - 1)
        for strategy in (flat, ring, tree):
            assert strategy["seen"] == strategy["handed_bytes"], "what torch was given"
    if world == 3:  # 0 gives to 1, which exchanges with 2 and gives back
        assert [rank["handed_bytes"] for rank in found["tree"]] == [size, 2 * size, size]


def test_a_measured_table_is_the_same_on_all_ranks_and_the_first_rank_decides(
    results: Results,
) -> None:
    table = results[4]["table"]
    assert "measured on 99 ranks, but the group has 4" in table.pop("wrong size")
    names = ["flat", "ring", "tree"]
    assert table == {"same": True, "round trip": True, "rows": [names, names], "sum": True}


# --- the reducer ------------------------------------------------------------------------------

SOME_CASES = ("flat", "accumulation", "ring", "tree", "hierarchical")
ALL_CASES = (
    *SOME_CASES, "adaptive", "small buckets", "one parameter each", "float64 buckets",
    "unused kept",
)  # fmt: skip


@pytest.mark.parametrize(
    ("world", "case"),
    [(w, case) for w in WORLDS for case in (SOME_CASES if w in (3, 8) else ALL_CASES)],
)
def test_five_steps_of_sgd_equal_those_of_one_process(
    results: Results, world: int, case: str
) -> None:
    found = results[world]["training"][case]
    assert found["gradient difference"] <= TOLERANCE
    assert found["weight difference"] <= TOLERANCE
    assert found["same bits"]
    assert found["largest gradient"] > 0.01
    assert found["losses"][-1] < 0.8 * found["losses"][0], "it must have learned something"


@pytest.mark.parametrize("world", WORLDS)
def test_buckets_are_sent_while_backward_runs_except_those_with_an_unused_parameter(
    results: Results, world: int
) -> None:
    whole, cut = (results[world]["training"][name] for name in ("flat", "accumulation"))
    assert (whole["buckets"], whole["early"]) == (1, 0), "it holds a parameter that nobody uses"
    # In the step in which nobody uses it, `some`, which is in the first bucket, holds up all.
    assert cut["buckets"] == 6
    assert 0 < cut["early"] <= NUM_STEPS * 5
    assert cut["spent"]


@pytest.mark.parametrize("world", WORLDS)
def test_statistics_count_the_bytes_of_every_step(results: Results, world: int) -> None:
    for case in ("flat", "accumulation"):
        found = results[world]["training"][case]
        assert found["traffic"] == {
            "num_operations": NUM_STEPS * found["buckets"],
            "handed_bytes": NUM_STEPS * found["size"],
            "wire_bytes": pytest.approx(2 * (world - 1) / world * NUM_STEPS * found["size"]),
        }


def test_gradients_that_change_after_they_were_sent_are_reported(results: Results) -> None:
    manners = results[2]["manners"]
    for message in manners["unannounced backward"]:
        assert message.startswith("2 gradients changed after they had been sent")
    for message in manners["changed gradient"]:
        assert message.startswith("1 gradients changed after they had been sent (parameter 0")
    assert manners["works after an error"] == [[[3.0] * 3] * 2] * 2


def test_gradients_are_beside_their_buckets_until_they_are_sent(results: Results) -> None:
    manners = results[2]["manners"]
    assert manners["copies while accumulating"] == [2.0, 2.0]
    assert manners["copies when sent"] == [1.0, 1.0]


def test_a_step_that_ended_in_the_middle_is_named_by_the_next(results: Results) -> None:
    for message in results[2]["manners"]["next step"]:
        assert message.startswith("an earlier step ended after 1 of 1 buckets of gradients had")


def test_a_rebuild_takes_in_frozen_and_new_parameters(results: Results) -> None:
    manners = results[2]["manners"]
    assert all("call rebuild()" in message for message in manners["frozen"])
    assert manners["after rebuild"] == [[[[3.0] * 3] * 2, None]] * 2
    assert manners["other parameters"] == [[[3.0] * 3]] * 2


def test_closed_reducers_and_marked_parameters_are_left_alone(results: Results) -> None:
    manners = results[2]["manners"]
    assert manners["closed"] == [True, True]
    assert manners["marked"] == [True, True]
    assert manners["sum"] == [[4.0, 4.0]] * 2


def test_gradients_that_no_hook_sees_can_be_announced(results: Results) -> None:
    assert results[2]["manners"]["marked ready"] == [[[0.5], 2]] * 2


def test_each_dtype_has_buckets_of_its_own(results: Results) -> None:
    values = {"torch.float32": [0.5], "torch.bfloat16": [0.5]}
    assert results[2]["manners"]["dtypes"] == [[[2, 4], values]] * 2


def test_checkpointed_layers_are_reduced_too(results: Results) -> None:
    assert results[2]["manners"]["checkpointed"] == [True, True]


# --- compression ------------------------------------------------------------------------------

SHAPES = ((33, 65), (65,), (8, 15), (2, 2), (1,))


def compute_handed_bytes(compressor: str, num_ranks: int) -> int:
    """One step's bytes in closed form."""
    num_elements = 33 * 65 + 65 + 8 * 15 + 4 + 1
    kind, *rest = compressor.replace(",", "").split()
    if kind in ("fp16", "bf16"):
        return 2 * num_elements
    if kind == "topk":
        return 6 * ceil(int(rest[0]) / 100 * num_elements)
    if kind == "int8":
        block = min(32 if rest else 1024, ceil(num_elements / num_ranks))
        num_blocks = ceil(ceil(num_elements / num_ranks) / block)
        return (num_ranks + 1) * num_blocks * (block + 4)
    if kind == "powersgd" and len(rest) == 1:
        rank = int(rest[0])
        shrinks = [len(s) == 2 and rank * sum(s) < s[0] * s[1] for s in SHAPES]
        factors = sum(rank * sum(s) for s, low in zip(SHAPES, shrinks, strict=True) if low)
        plain = [s[0] * (s[1] if len(s) == 2 else 1) for s in SHAPES]
        return 4 * (factors + sum(n for n, low in zip(plain, shrinks, strict=True) if not low))
    return 4 * num_elements


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("compressor", ["none", *COMPRESSORS])
def test_compressed_bytes_are_those_of_the_formula_and_all_ranks_agree(
    results: Results, world: int, compressor: str
) -> None:
    found = results[world]["compression"]["bytes"][compressor]
    assert found["num_elements"] == 2335
    assert found["traffic"]["handed_bytes"] == 2 * compute_handed_bytes(compressor, world)
    assert found["seen"] == found["traffic"]["handed_bytes"], "what torch was given"
    assert found["same bits"]


def test_bytes_on_the_wire_follow_from_the_collectives(results: Results) -> None:
    found = results[4]["compression"]["bytes"]
    chunk = 584 + 4  # int8 of 2,335 elements on 4 ranks, one scale
    assert found["int8"]["traffic"]["wire_bytes"] == 2 * (3 * chunk + 3 * chunk)
    assert found["topk 1 %"]["traffic"]["wire_bytes"] == 2 * 3 * 6 * 24
    assert found["fp16"]["traffic"]["wire_bytes"] == 2 * 2 * 3 / 4 * 2 * 2335


@pytest.mark.parametrize(
    ("compressor", "largest"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2), ("none", 1e-6)]
)
def test_the_first_sum_is_about_right(results: Results, compressor: str, largest: float) -> None:
    found = results[4]["compression"]["bytes"][compressor]
    assert found["errors"][0] < largest
    if compressor != "none":
        assert 0 < found["own error"] < largest


@pytest.mark.parametrize("compressor", ["topk 1 %", "topk 10 %", "powersgd 1", "powersgd 4"])
def test_what_is_left_out_is_told(results: Results, compressor: str) -> None:
    assert 0.5 < results[4]["compression"]["bytes"][compressor]["own error"] < 1.0


@pytest.mark.parametrize(
    ("compressor", "largest"),
    [("int8", 1e-3), ("topk 10 %", 0.2), ("topk 1 %", 0.75), ("powersgd 4", 0.2)],
)
def test_what_is_left_out_comes_later(results: Results, compressor: str, largest: float) -> None:
    found = results[4]["compression"]
    assert found["feedback"][compressor] < largest
    # Powers of two: the same numbers with another exponent, so the same elements are chosen.
    assert found["feedback, rescaled"][compressor] == pytest.approx(
        found["feedback"][compressor], rel=1e-3
    )


@pytest.mark.parametrize(
    ("compressor", "ratio"),
    [
        ("fp16", 1.001),
        ("bf16", 1.001),
        ("int8", 1.001),
        ("int8, small blocks", 1.001),
        ("topk 10 %", 2.0),
        ("topk 1 %", 15.0),
        ("powersgd 4", 1.2),
        ("powersgd 2 after 3", 1.6),
        ("powersgd 1", 5.0),
    ],
)
def test_training_converges_under_compression(
    results: Results, compressor: str, ratio: float
) -> None:
    found = results[4]["compression"]["convergence"]
    exact, compressed = found["none"], found[compressor]
    assert exact["losses"][-1] < 0.02 * exact["losses"][0]
    assert compressed["losses"][-1] < ratio * exact["losses"][-1]
    assert compressed["same bits"]
    assert compressed["handed_bytes"] < 0.51 * exact["handed_bytes"]


def test_compression_works_over_other_strategies(results: Results) -> None:
    found = results[4]["compression"]
    assert found["fp16 by ring"]["same bits"]
    assert found["fp16 by ring"]["gradient difference"] < 1e-3
    assert found["powersgd by tree"]["same bits"]


# --- norms ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "1×1×2"), (2, "2×1×1"), (4, "1×2×2"), (4, "2×1×2"), (8, "2×2×2")],
)
def test_the_norm_over_the_mesh_is_that_of_the_whole_model(
    results: Results, world: int, layout: str
) -> None:
    found = results[world]["norms"][layout]
    assert found["found"] == [pytest.approx(found["norm"], rel=1e-6)] * world
    assert len(set(found["found"])) == 1
    assert found["ratio"] == pytest.approx(1.0 / found["norm"], rel=1e-6)
    assert found["difference"] <= TOLERANCE
    assert found["finite"] == [True] * world


def test_the_norm_under_fsdp_and_tensor_parallel_is_that_of_the_whole_model(
    results: Results,
) -> None:
    found = results[4]["norms"]["fsdp"]
    assert found["found"] == [pytest.approx(found["norm"], rel=1e-5)] * 4
    assert found["clipped"] == pytest.approx(0.1, rel=1e-5)
    assert found["buckets"] == 0, "what FSDP reduces is not reduced again"


@pytest.mark.parametrize("rank", [4, 5])
def test_nan_on_one_rank_of_the_mesh_is_known_to_all(results: Results, rank: int) -> None:
    found = results[8]["norms"][f"2×2×2, NaN on rank {rank}"]
    assert found["finite"] == [False] * 8
    assert all(map(isnan, found["found"]))
    assert found["ratio"] == 1.0


@pytest.mark.parametrize("compressor", ["none", *COMPRESSORS])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_bad_step_is_skipped_by_all_ranks_and_the_next_is_fine(
    results: Results, compressor: str, bad: str
) -> None:
    assert results[4]["compression"][bad][compressor] == {
        "finite": [[True, False, True, True]] * 4,
        "steps": [3] * 4,
        "same bits": True,
        "weights finite": True,
    }
