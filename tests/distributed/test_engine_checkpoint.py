"""A checkpoint of any layout loads on any other, bit for bit, on real gloo ranks.

`engine_checkpoint` runs once and does the work; here what it left is judged.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.run_program import run_program

pytest.importorskip("torch", reason="the engine trains with torch")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

TOLERANCE = 1e-5
PLACES = [
    (1, "llama_sgd: mesh on 1×1×1"),
    (1, "gpt_adamw: mesh on 1×1×1"),
    (1, "llama_sgd: mesh_sharded on 1×1×1"),
    (1, "gpt_adamw: mesh_sharded on 1×1×1"),
    (1, "llama_sgd: single on 1×1×1"),
    (1, "gpt_adamw: single on 1×1×1"),
    (4, "llama_sgd: mesh on 1×2×2 uneven"),
    (4, "gpt_adamw: mesh on 2×1×2 zb_v"),
    (4, "llama_sgd: mesh on FSDP2 4×1×1"),
    (4, "gpt_adamw: mesh on FSDP2 2×2×1"),
    (8, "llama_sgd: single on 2×2×2"),
    (8, "gpt_adamw: single on 2×2×2"),
    (8, "llama_sgd: mesh on 4×1×2 uneven"),
    (8, "gpt_adamw: mesh on 4×1×2 uneven"),
]
NUM_TENSORS = {"llama_sgd": 2 * 27, "gpt_adamw": 4 * 52}
"""Parameters, and as many or three times as many tensors of state: a layer has 6 or 12 parameters,
and beside the layers there are 3 or, with a tied head, 4."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every rank left what it found."""
    folder = tmp_path_factory.mktemp("checkpoint")
    run_program("engine_checkpoint", folder, timeout_s=170)
    return folder


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def read_ranks(folder: Path, num_ranks: int, case: str) -> list[dict[str, Any]]:
    return [read(folder, f"{num_ranks}_{rank}")[case] for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_ranks", "case"), PLACES)
def test_every_parameter_and_state_is_bit_for_bit_what_another_layout_had(
    folder: Path, num_ranks: int, case: str
) -> None:
    ranks = read_ranks(folder, num_ranks, case)
    model = case.split(":")[0]
    assert [rank["differing"] for rank in ranks] == [[]] * num_ranks
    names = {name for rank in ranks for name in rank["names"]}
    assert len(names) == NUM_TENSORS[model], "together the ranks have compared the whole model"
    assert all(rank["step"] == 3 and rank["state"]["case"] == model for rank in ranks)


@pytest.mark.parametrize(("num_ranks", "case"), PLACES)
def test_training_goes_on_as_if_it_had_never_stopped(
    folder: Path, num_ranks: int, case: str
) -> None:
    expected = read(folder, "single")[case.split(":")[0]]
    losses = [rank["losses"] for rank in read_ranks(folder, num_ranks, case) if rank["losses"]]
    assert losses
    for found in losses:
        assert found == pytest.approx(expected, abs=TOLERANCE)
    assert max(expected) - min(expected) > 1000 * TOLERANCE, "a lost momentum must be seen"


def test_random_generators_are_restored_on_the_same_number_of_ranks_only(folder: Path) -> None:
    found = read(folder, "1_0")
    assert found["llama_sgd: single on 1×1×1"]["has_random_state"]
    assert not found["llama_sgd: mesh on 1×1×1"]["has_random_state"]


def test_pieces_that_several_ranks_hold_are_written_once_and_by_all_of_them(folder: Path) -> None:
    single = sum(file.stat().st_size for file in folder.glob("single_gpt_adamw/*/*.distcp"))
    sizes = [file.stat().st_size for file in folder.glob("mesh_gpt_adamw/*/*.distcp")]
    assert len(sizes) == 8
    assert max(sizes) < 2 * min(sizes)
    # A piece has a kilobyte of torch's about it, and there are twice as many; written by both data-
    # parallel ranks, it would be twice that.
    assert sum(sizes) < 3 * single


def test_a_rank_whose_disk_is_full_makes_all_ranks_raise_the_same_and_leaves_the_older_one(
    folder: Path,
) -> None:
    ranks = [read(folder, f"failed_{rank}") for rank in range(4)]
    path = folder / "failed" / "step-00000002"
    assert {rank["message"] for rank in ranks} == {
        f"the checkpoint {path} could not be saved: rank 2: OSError: [Errno 27] File too large"
    }
    assert [rank["latest"] for rank in ranks] == [1] * 4
    assert [rank["differing"] for rank in ranks] == [[]] * 4, "the older one loads"
    assert ranks[0]["left"] == ["step-00000001"], "the disk is freed"
    assert ranks[0]["after"] == ["step-00000001", "step-00000003"], "and can be used again"


def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint_the_latest(
    folder: Path,
) -> None:
    survivors = [read(folder, f"killed_{rank}") for rank in (0, 1, 3)]
    for survivor in survivors:
        assert survivor["latest"] == 1
        assert "could not be saved, as a rank does not answer" in survivor["message"]
    after = [read(folder, f"after_kill_{rank}") for rank in range(2)]
    assert [rank["step"] for rank in after] == [1, 1]
    assert after[0]["left"] == ["step-00000002"], "what was left is gone, and keep=1 is kept"
