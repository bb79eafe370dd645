"""Forks real ranks, in a program of its own: pytest's process has used torch's threads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ended_process import run_process
from meshscope.engine.launch.local_ranks import count_threads, find_host_memory_bytes, probe_devices

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "tests.distributed.engine_local_ranks"]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = run_process([*PROGRAM, str(folder)], cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, json.loads((folder / "results.json").read_text())


pytestmark = pytest.mark.gloo


def test_a_rank_that_raises_is_named_with_its_step_and_no_traceback_is_printed(scenarios):
    folder, results = scenarios
    path = folder / "raise" / "failures" / "attempt_0" / "rank_2.txt"
    assert results["raise"] == {
        "exit_code": 6,
        "message": "rank 2 (dp2) failed in step 3: ValueError: the loader is empty; 3 ended "
        f"because of it; traceback in {path}",
        "num_restarts": 0,
        "said": [],
    }
    assert "in raise_in_rank_2" in path.read_text() or "at_step" in path.read_text()


def test_a_rank_that_is_killed_is_named_although_it_left_nothing(scenarios):
    _, results = scenarios
    assert results["kill"]["exit_code"] == 6
    assert results["kill"]["message"].startswith("rank 1 (dp1) failed in step 2: was ended by SIG")


def test_a_rank_that_hangs_is_named_and_not_those_that_waited_for_it(scenarios):
    _, results = scenarios
    message = results["hang"]["message"]
    assert message.startswith("rank 1 (dp1) did not go on, and rank ")
    assert "waited in vain in step 1: RuntimeError: Timed out waiting 1000ms" in message


def test_all_ranks_start_again_and_know_their_attempt(scenarios):
    folder, results = scenarios
    outcome = results["restart"]
    assert (outcome["exit_code"], outcome["num_restarts"]) == (0, 1)
    (said,) = outcome["said"]
    assert said.startswith("rank 0 (dp0) failed in step 1: RuntimeError: only once")
    assert said.endswith("; restart 1 of 2")
    places = [json.loads((folder / f"place_{rank}").read_text()) for rank in range(4)]
    assert places == [
        {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        for rank in range(4)
    ]


def test_a_wrong_setting_is_not_tried_again(scenarios):
    _, results = scenarios
    outcome = results["permanent"]
    assert (outcome["exit_code"], outcome["num_restarts"], outcome["said"]) == (6, 0, [])
    assert "UsageError: momentum is -1" in outcome["message"]


def test_restarts_end(scenarios):
    _, results = scenarios
    outcome = results["silent"]
    assert (outcome["exit_code"], outcome["num_restarts"]) == (6, 1)
    assert outcome["message"].startswith("rank 1 (dp1) failed: exited with code 9")


def test_a_request_to_stop_reaches_every_rank_which_stop_at_one_step(scenarios):
    folder, results = scenarios
    assert (results["stop"]["exit_code"], results["stop"]["message"]) == (143, None)
    steps = {(folder / f"stopped_{rank}").read_text() for rank in range(4)}
    assert len(steps) == 1
    assert 2 <= int(steps.pop()) < 9_999


def test_a_second_interrupt_kills(scenarios):
    _, results = scenarios
    assert (results["interrupt"]["exit_code"], results["interrupt"]["message"]) == (130, None)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path):
    launcher = subprocess.Popen([*PROGRAM, str(tmp_path), "forever"], cwd=ROOT)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid_*"))) == 4)
        wait_until(lambda: all(path.read_text() for path in tmp_path.glob("pid_*")))
        pids = [int(path.read_text()) for path in tmp_path.glob("pid_*")]
        assert all(is_running(pid) for pid in pids)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def wait_until(holds, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# --- what a rank gets ----------------------------------------------------------------------------


def test_ranks_share_the_cores_unless_told_otherwise():
    num_cores = len(os.sched_getaffinity(0))
    assert count_threads(1, {}) == num_cores
    assert count_threads(10 * num_cores, {}) == 1
    assert count_threads(4, {"OMP_NUM_THREADS": "3"}) == 3
    assert count_threads(10 * num_cores, {"OMP_NUM_THREADS": "0"}) == 1


def test_memory_of_the_host_is_what_the_kernel_says_or_less():
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    total = 1024 * int(next(line for line in lines if line.startswith("MemTotal")).split()[1])
    assert 0 < find_host_memory_bytes() <= total


def test_asking_for_gpus_initialises_nothing_here():
    import torch

    probe = probe_devices()
    assert probe.num_gpus == torch.cuda.device_count()
    assert (probe.memory_bytes is None) == (probe.num_gpus == 0)
    assert not torch.cuda.is_initialized()
