"""Two real NCCL ranks, on one GPU where there is only one: recorded, and unharmed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
from nccl_parcel import unpack

from meshscope.core.operations import Kind, Outcome
from meshscope.store.read.run import open_run
from meshscope.store.schema import StepFlag

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; run it where there is one"
)

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "nccl_truth.py"
NUM_STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("nccl")
    command = [sys.executable, str(SCRIPT), "--only", "ddp2", "--steps", str(NUM_STEPS)]
    done = subprocess.run(
        [*command, "--parcel", str(place / "ddp2.tar")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    told = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, told
    assert (place / "ddp2.tar").exists(), told
    (found,) = unpack([place / "ddp2.tar"], place)
    return found


def test_every_rank_recorded_its_steps_and_caught_nothing(folder: Path) -> None:
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    assert truth["caught"] == [{}, {}]
    ranks = open_run(folder / "run").last_attempt.ranks
    steps = {rank: len(one.read("steps")["step"]) for rank, one in ranks.items()}
    assert steps == {0: NUM_STEPS, 1: NUM_STEPS}


def test_all_reduces_of_both_ranks_ended_and_match(folder: Path) -> None:
    ranks = open_run(folder / "run").last_attempt.ranks
    found, watched = {}, {}
    for rank, recording in ranks.items():
        rows = recording.read("collectives")
        watched[rank] = (recording.read("steps")["flags"] & StepFlag.UNWATCHED == 0).sum()
        is_reduce = rows["kind"] == Kind.ALL_REDUCE
        assert set(rows["outcome"][is_reduce].tolist()) == {Outcome.OK}
        found[rank] = rows["size_bytes"][is_reduce].tolist()
    assert found[0] == found[1]
    told = f"{watched} steps of {NUM_STEPS} have their {len(found[0])} all-reduces recorded"
    # Where recording all would cost more than a hundredth, some steps are: the first two and more.
    assert watched[0] == watched[1] >= 3, told
    assert len(found[0]) % watched[0] == 0, told


def test_kernels_of_the_bare_program_show_communication_beside_compute(folder: Path) -> None:
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    for row in truth["kernels_ms"]:
        assert row["communication"] > row["overlapped"] > 0
        assert row["compute"] + row["exposed"] + row["copies_alone"] + row["idle"] == (
            pytest.approx(row["wall"], abs=0.01)
        )
