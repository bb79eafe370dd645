"""A rank that is late under DistributedDataParallel is found, by who arrives when."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.gloo
def test_a_rank_that_sleeps_in_backward_is_the_one_that_costs_most(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "ddp_delay.py")]
    command += ["--steps", "80", "--output", str(tmp_path / "result.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    found = json.loads((tmp_path / "result.json").read_text())["delayed"]
    assert found["num_unmatched"] == 0
    assert found["beyond_chance"], "nobody was named"
    assert found["beyond_chance"][0]["rank"] == 1
    assert found["beyond_chance"][0]["phase"] == "backward"
    # No bound on times, only on who waits for whom.
    assert (
        found["with"]["exposed_wait_of_others_ms"] > found["with"]["exposed_wait_of_slow_rank_ms"]
    )
