"""Whole engines in many layouts learn what the single-process model learns, step by step."""

import json

import pytest

torch = pytest.importorskip("torch", reason="the engine trains with torch")

from tests.distributed.engine_equality import (  # noqa: E402
    TOLERANCE,
    make_covering_selection,
    make_full_cross,
)
from tests.distributed.run_program import run_program  # noqa: E402

from meshscope.core.schedule_builders import BUILDERS  # noqa: E402

CASES = make_covering_selection()

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equality")
    run_program("engine_equality", folder, timeout_s=580, is_strict=False)
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {line["case"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_gradients_and_weights_are_those_of_one_process(results, case):
    found = results[case.name]
    assert "error" not in found, found["error"]
    assert found["num_ranks_done"] == case.world_size
    differences = found["differences"]
    for what in ("loss", "gradient", "weight", "norm"):
        assert differences[what] <= TOLERANCE, (what, differences)


def test_it_learned_something(results):
    """A model that stands still would equal itself for any gradient."""
    for line in results.values():
        assert line["differences"]["last_loss"] < line["differences"]["first_loss"] - 0.05


def test_every_value_of_every_dimension_is_selected():
    assert {case.schedule.split(maxsplit=1)[0] for case in CASES} == {*BUILDERS, "auto"}
    assert {(c.dp, c.tp, c.pp, c.is_uneven) for c in make_full_cross()} <= {
        (c.dp, c.tp, c.pp, c.is_uneven) for c in CASES
    }
    assert {c.data_parallel for c in CASES} == {"reducer", "ddp", "fsdp"}
    assert {c.zero_stage for c in CASES if c.data_parallel == "fsdp"} == {1, 2, 3}
    assert {c.memory for c in CASES} == {"basic", "standard", "aggressive", "extreme"}
    assert {c.sequence_parallel for c in CASES if c.tp > 1} == {True, False}
