"""`make test-frameworks`: the loss that is recorded is the one the program itself writes down."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshscope.analyze.rank.signals import read_scalars
from meshscope.store.read.run import open_run

PROGRAM = Path(__file__).parent / "programs" / "losses" / "own_losses.py"
KINDS = ("trainer", "trainer-own-loss", "sft", "accelerate", "lightning", "scaler", "gan")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_loss_is_the_programs_own(kind: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "meshscope", "run", "-o", str(tmp_path / "run")]
    subprocess.run(
        [*launch, sys.executable, str(PROGRAM), kind],
        cwd=tmp_path,
        env=os.environ | QUIET,
        check=True,
        capture_output=True,
    )
    lines = (tmp_path / "truth.jsonl").read_text(encoding="utf-8").splitlines()
    recording = next(iter(open_run(tmp_path / "run").last_attempt))
    found = read_scalars(recording, frozenset(("backward_loss",)))
    for optimizer, name in ((1, "backward_loss"), (2, "backward_loss 2")):
        own = {step: loss for number, step, loss in map(json.loads, lines) if number == optimizer}
        assert (name in found) == bool(own)
        if own:
            series = found[name]
            assert series.step[-1] == max(own)
            assert series.value == pytest.approx([own[step] for step in series.step], rel=1e-5)
