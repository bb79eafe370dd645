import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ended_process import run_process
from meshscope.cli import main
from meshscope.store.read.run import open_run

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "train_2x2x2.toml"
TWO_RANKS = ["--dp", "2", "--tp", "1", "--pp", "1"]


def invoke(*arguments, **env):
    return CliRunner().invoke(main, ["train", *map(str, arguments)], env=env)


def run(*arguments, cwd, **env):
    return run_process(
        [sys.executable, "-m", "meshscope", "train", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **env},
    )


# --- before it starts ----------------------------------------------------------------------------


def test_help_needs_no_torch():
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom meshscope.cli import main\n"
        "main(['train', '--help'])"
    )
    done = run_process([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "CONFIG.toml" in done.stdout


def test_without_torch_it_says_what_to_install():
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom meshscope.cli import main\n"
        f"main(['train', {str(EXAMPLE)!r}])"
    )
    done = run_process([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (
        4,
        "meshscope: this command needs torch, which is not installed; "
        "pip install 'meshscope[torch]'\n",
    )


def test_check_says_what_would_be_run():
    result = invoke(EXAMPLE, "--check")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ranks      8 processes, dp2×tp2×pp2")
    assert "262,720 parameters, 4 layers" in lines[1]
    # 2 dp ranks · 4 microbatches · 2 sequences · 64 tokens
    assert "1,024 tokens: 16 sequences in 4 microbatches of 2 on each of 2 dp ranks" in lines[2]
    # (p−1)/(m+p−1) with p = 2 and m = 4
    assert "1f1b, 2 stages: bubble 20 % of a step" in lines[3]
    # Half of the table and of the matrices of two layers, and their norms; see model_config.
    assert re.search(r"^0 +0 +0-1 +65,792$", result.stdout, re.M)
    assert re.search(r"^1 +1 +2-3 +65,856$", result.stdout, re.M)
    assert "(most)" in result.stdout


def test_check_asks_about_a_device_that_is_not_here():
    result = invoke(EXAMPLE, "--check", "--device", "H100-80GB")
    assert result.exit_code == 0, result.stderr
    assert "device     H100-80GB, 80.0 GiB: fits; pp rank 0 needs about" in result.stdout
    assert re.search(
        r"^layers\.\*\.mlp\.down +inputs, summed \(columns of W\) +64 × 96$", result.stdout, re.M
    )
    result = invoke(EXAMPLE, "--check", "--device", "2MiB")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "but a rank's device has 2 MiB" in result.stderr
    for words in (["--check", "--device", "H100"], ["--device", "H200"], ["--device", "tpu"]):
        result = invoke(EXAMPLE, *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1


def test_check_of_a_timed_model_has_the_bubble_of_its_own_times(tmp_path):
    path = tmp_path / "timed.toml"
    path.write_text(
        '[model]\nkind = "timed"\nnum_layers = 4\nforward_ms = 10\ninput_grad_ms = 10\n'
        "weight_grad_ms = 10\n[parallel]\npp = 4\n[batch]\nnum_microbatches = 9\n",
        encoding="utf-8",
    )
    text = invoke(path, "--check", "--device", "cpu").stdout
    assert "bubble 25 % of a step" in text  # 3/12
    assert "with the times of the model" in text


def test_flags_stand_for_settings():
    result = invoke(
        EXAMPLE, "--check", "--dp", 1, "--pp", 4, "--tp", 1, "--schedule", "gpipe",
        "--memory", "standard", "--steps", 3, "--seed", 5, "--device", "cpu",
        "--set", "batch.num_microbatches=3",
    )  # fmt: skip
    assert "dp1×tp1×pp4" in result.stdout
    assert "gpipe, 4 stages: bubble 50 %" in result.stdout  # 3/(3+3)


def test_all_problems_are_one_line_and_exit_2():
    result = invoke(EXAMPLE, "--tp", 3, "--set", "checkpoint.every=2", "--set", "num_steps=0")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"meshscope: {EXAMPLE}: num_steps is 0, expected at least 1; ")
    assert "checkpoint.every is set" in result.stderr
    assert "num_heads (4) is not divisible by tp (3)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_faults_of_the_command_line_come_beside_those_of_the_file(tmp_path):
    path = tmp_path / "faulty.toml"
    path.write_text(
        EXAMPLE.read_text(encoding="utf-8") + '\n[[faults]]\nkind = "leak"\nmb = 1\nrank = 8\n',
        encoding="utf-8",
    )
    result = invoke(path, "--check", "--fault", "leak mb=1 rank=9", "--fault", "leak mb=1 rank=7")
    assert result.exit_code == 2
    assert re.findall(r"there is no rank (\d+) among 8", result.stderr) == ["8", "9"]


def test_every_fault_that_cannot_be_read_is_told_with_the_problems_of_the_file():
    result = invoke(
        EXAMPLE, "--fault", "slw rank=1", "--fault", "crash", "--set", "parallel.pp=two"
    )
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert 'parallel.pp: got "two"' in result.stderr
    assert "did you mean slow?" in result.stderr
    assert "fault 'crash'" in result.stderr


def test_a_model_that_does_not_fit_is_refused_before_anything_starts():
    result = invoke(EXAMPLE, "--check", "--set", "memory.cap_gib=0.001")
    assert result.exit_code == 2
    assert "but memory.cap_gib allows 1.02 MiB" in result.stderr


def test_notes_go_to_stderr():
    result = invoke(EXAMPLE, "--check", "--set", "max_restarts=1")
    assert result.exit_code == 0
    assert result.stderr.startswith("meshscope: note: max_restarts without checkpoint.folder")


@pytest.mark.parametrize(("rank", "says"), [(0, True), (1, False)])
def test_under_a_launcher_only_the_first_rank_speaks(rank, says):
    env = {"RANK": str(rank), "WORLD_SIZE": "4"}
    result = invoke(EXAMPLE, **env)
    assert result.exit_code == 2
    assert ("= 8, but the world size is 4" in result.stderr) == says
    assert bool(result.stderr) == says
    # Nor does it when the file cannot be read at all.
    result = invoke("missing.toml", **env)
    assert result.exit_code == 2
    assert bool(result.stderr) == says


# --- real runs -----------------------------------------------------------------------------------

pytest_real = pytest.mark.gloo


@pytest_real
def test_ranks_are_started_train_and_are_recorded(tmp_path):
    done = run(EXAMPLE, *TWO_RANKS, "--steps", 3, "-o", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("meshscope: to see the run: meshscope report run\n")
    attempt = open_run(tmp_path / "run").last_attempt
    for rank in range(2):
        recording = attempt.ranks[rank]
        assert recording.read("steps")["step"].tolist() == [0, 1, 2]
        assert recording.closing is not None
    assert not (tmp_path / "run" / "failures").exists()


@pytest_real
def test_a_rank_that_fails_is_one_line_and_exit_6(tmp_path):
    fault = "crash rank=1 steps=1 how=exception"
    done = run(EXAMPLE, *TWO_RANKS, "--fault", fault, "-o", "run", cwd=tmp_path)
    assert done.returncode == 6, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("meshscope: ")]
    assert lines[0].startswith("meshscope: rank 1 (dp1.tp0.pp0) failed")
    assert lines[0].endswith("traceback in run/failures/attempt_0/rank_1.txt")
    assert "Traceback" not in done.stderr
    path = tmp_path / "run" / "failures" / "attempt_0" / "rank_1.txt"
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["rank"] == 1
    assert "Traceback" in path.read_text(encoding="utf-8")


@pytest_real
def test_asked_to_stop_it_saves_and_goes_on_from_there(tmp_path):
    arguments = [EXAMPLE, *TWO_RANKS, "--no-record", "--set", "checkpoint.folder=kept"]
    command = [sys.executable, "-m", "meshscope", "train", *map(str, arguments)]
    process = subprocess.Popen(
        [*command, "--steps", "100000"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step ") and len(seen) > 2:
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 143, "".join(seen) + rest
    (stopped,) = re.findall(r"stopped after step (\d+)", rest)
    again = run(*arguments, "--steps", int(stopped) + 2, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"from step {stopped}" in again.stderr
    assert f"done after step {int(stopped) + 2}" in again.stderr


@pytest_real
def test_after_a_kill_all_ranks_go_on_from_the_last_checkpoint(tmp_path):
    settings = ["max_restarts=1", "checkpoint.folder=kept", "checkpoint.every=2"]
    settings.append('faults=["crash rank=1 steps=3 how=SIGKILL"]')
    flags = [word for setting in settings for word in ("--set", setting)]
    done = run(EXAMPLE, *TWO_RANKS, "--steps", 5, *flags, "-o", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"meshscope: rank 1 \(.*SIGKILL.*; restart 1 of 1\n", done.stderr)
    first, second = open_run(tmp_path / "run").attempts
    assert first.ranks[1].read("steps")["step"].tolist() == [0, 1, 2]
    for rank in range(2):
        assert second.ranks[rank].read("steps")["step"].tolist() == [2, 3, 4]
