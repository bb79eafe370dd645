import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ended_process import run_process
from meshscope.capture.launching.launch import (
    BOOT_DIR,
    SOURCE_DIR,
    CommandNotStarted,
    find_ignored_environment,
    find_program_name,
    find_shared_launch_id,
    injected_environment,
    prepare_launch,
    resolve_command,
    run_command,
)
from meshscope.capture.launching.launch_outcome import discard_empty_run
from meshscope.errors import LayoutError, UsageError

_NUM_LAUNCHERS = 4

BARE_PYTHON = getattr(sys, "_base_executable", sys.executable)
"""The interpreter outside our virtual environment, where meshscope is not installed."""


# --- preparing ------------------------------------------------------------------------------------


def test_the_environment_gains_our_variables_and_loses_nothing(tmp_path: Path) -> None:
    env = {"PATH": "/bin", "PYTHONPATH": "/a:/b", "PYTHONHASHSEED": "1"}
    assert injected_environment(env, run_dir=tmp_path, launch_id="abc", layout="dp=2") == {
        **env,
        "PYTHONPATH": f"{BOOT_DIR}:/a:/b",
        "MESHSCOPE_RUN_DIR": str(tmp_path),
        "MESHSCOPE_LAUNCH_ID": "abc",
        "MESHSCOPE_LAYOUT": "dp=2",
        "MESHSCOPE_SOURCE": str(SOURCE_DIR),
    }


@pytest.mark.parametrize("env", [{}, {"PYTHONPATH": ""}])
def test_an_unset_python_path_does_not_let_in_the_current_directory(env: dict[str, str]) -> None:
    path = injected_environment(env, run_dir=Path("x"), launch_id="abc")["PYTHONPATH"]
    assert path == str(BOOT_DIR)


def test_the_boot_folder_holds_only_our_sitecustomize() -> None:
    assert [path.name for path in BOOT_DIR.glob("*.py")] == ["sitecustomize.py"]


def test_a_script_gets_this_interpreter() -> None:
    assert resolve_command(["train.py", "-x"], {}) == (sys.executable, "train.py", "-x")


def test_a_program_beside_our_interpreter_is_found_without_an_activated_environment() -> None:
    beside = Path(sys.executable).with_name("pytest")
    assert resolve_command(["pytest", "-x"], {"PATH": "/bin"}) == (str(beside), "-x")


def test_a_program_on_the_path_is_left_as_it_is() -> None:
    assert resolve_command(["sh", "-c", "true"], {"PATH": "/bin"}) == ("sh", "-c", "true")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 2 examples/train_gpt.py --steps 3", "train_gpt"),
        ("python -m torch.distributed.run -m my.trainer", "my.trainer"),
        ("/usr/bin/bash job", "bash"),
    ],
)
def test_a_run_is_named_after_its_script(command: str, name: str) -> None:
    assert find_program_name(command.split()) == name


@pytest.mark.parametrize(
    ("env", "command", "launch_id"),
    [
        ({}, "torchrun train.py", None),
        ({"MESHSCOPE_LAUNCH_ID": "mine", "PMIX_NAMESPACE": "x"}, "train.py", "mine"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "train.py", "slurm-7.2.0"),
        ({"SLURM_JOB_ID": "7"}, "train.py", None),
        ({"PMIX_NAMESPACE": "prte-1"}, "train.py", "prte-1"),
        ({}, "torchrun --nnodes=2 --rdzv_id=job train.py", "job"),
        ({}, "torchrun --nnodes 1:4 --rdzv-id job train.py", "job"),
        ({}, "torchrun --nnodes 1 --rdzv-id job train.py", None),
    ],
)
def test_launchers_of_one_job_on_several_nodes_agree_on_its_id(
    env: Mapping[str, str], command: str, launch_id: str | None
) -> None:
    assert find_shared_launch_id(env, command.split()) == launch_id


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -I train.py", "-I"),
        ("torchrun --no-python python3.11 -uE train.py", "-E"),
        ("/usr/bin/python3 -S -m train", "-S"),
        ("python -W error -X dev -u train.py -I", None),
        ("python -Werror train.py -S", None),
        ("torchrun train.py -I", None),
    ],
)
def test_options_that_keep_the_recorder_out_are_seen(command: str, option: str | None) -> None:
    assert find_ignored_environment(command.split()) == option


def test_the_default_run_directory_is_named_by_script_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = prepare_launch(["train.py"], {})
    assert re.fullmatch(r"runs/train/\d{8}-\d{6}-[0-9a-f]{4}", str(launch.run_dir))
    assert launch.environment["MESHSCOPE_RUN_DIR"] == str(tmp_path / launch.run_dir)
    assert launch.is_new_run
    assert launch.launch_id != prepare_launch(["train.py"], {}).launch_id


def test_several_nodes_without_a_common_id_are_pointed_out(tmp_path: Path) -> None:
    command = ["torchrun", "--nnodes", "2", "train.py"]
    (note,) = prepare_launch(command, {}, run_dir=tmp_path).notes
    assert "--rdzv-id" in note
    assert "MESHSCOPE_LAUNCH_ID" in note


def test_launchers_that_begin_together_share_a_new_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(_NUM_LAUNCHERS) as pool:
        for index in range(20):
            run_dir, barrier = tmp_path / f"{index}", Barrier(_NUM_LAUNCHERS)

            def prepare(_: int, run_dir: Path = run_dir, barrier: Barrier = barrier) -> bool:
                barrier.wait()
                return prepare_launch(["train.py"], {}, run_dir=run_dir).made_run_dir

            assert sum(pool.map(prepare, range(_NUM_LAUNCHERS))) == 1
            assert os.listdir(run_dir) == ["run.json"]


def test_launchers_that_find_nothing_to_record_do_not_take_the_folder_from_others(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"

    def launch_nothing(_: int) -> None:
        for _ in range(20):
            discard_empty_run(prepare_launch(["train.py"], {}, run_dir=run_dir))

    with ThreadPoolExecutor(_NUM_LAUNCHERS) as pool:
        list(pool.map(launch_nothing, range(_NUM_LAUNCHERS)))


def test_a_folder_another_rank_has_begun_in_stays_a_run(tmp_path: Path) -> None:
    launch = prepare_launch(["train.py"], {}, run_dir=tmp_path / "run")
    manifest = (launch.run_dir / "run.json").read_bytes()
    (launch.run_dir / "hardware").mkdir()
    discard_empty_run(launch)
    assert (launch.run_dir / "run.json").read_bytes() == manifest


def test_a_launch_imports_neither_the_recorder_nor_the_screens() -> None:
    code = "import sys, meshscope.cli.jobs.run; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"meshscope.capture.recorder", "rich.console", "numpy"} & {*loaded}


def test_what_cannot_be_launched_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="not a run"):
        prepare_launch(["train.py"], {}, run_dir=tmp_path)
    with pytest.raises(UsageError, match="cannot be a run directory"):
        prepare_launch(["train.py"], {}, run_dir=tmp_path / "notes.txt" / "run")
    with pytest.raises(UsageError, match="no command"):
        prepare_launch([], {}, run_dir=tmp_path / "run")
    with pytest.raises(LayoutError):
        prepare_launch(["train.py"], {}, run_dir=tmp_path / "run", layout="dp=zero")
    assert not (tmp_path / "run").exists()


# --- running --------------------------------------------------------------------------------------


def run_shell(tmp_path: Path, script: str) -> int:
    launch = prepare_launch(["sh", "-c", script], os.environ, run_dir=tmp_path / "run")
    return run_command(launch)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_the_exit_code_is_passed_on(tmp_path: Path, script: str, code: int) -> None:
    assert run_shell(tmp_path, script) == code


def test_a_missing_program_ends_like_in_a_shell(tmp_path: Path) -> None:
    with pytest.raises(CommandNotStarted, match="command not found") as caught:
        run_command(prepare_launch(["no-such-program"], {}, run_dir=tmp_path / "run"))
    assert caught.value.exit_code == 127
    with pytest.raises(CommandNotStarted, match="cannot be executed") as caught:
        run_command(prepare_launch([str(tmp_path)], {}, run_dir=tmp_path / "run"))
    assert caught.value.exit_code == 126


def test_the_tick_is_called_and_its_failure_does_not_end_the_command(tmp_path: Path) -> None:
    calls = []
    ticked = tmp_path / "ticked"

    def tick() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            ticked.touch()
            raise BrokenPipeError

    # A fourth call would come while it sleeps.
    script = f"until [ -e {shlex.quote(str(ticked))} ]; do sleep 0.01; done; sleep 0.1; exit 5"
    launch = prepare_launch(["sh", "-c", script], os.environ, run_dir=tmp_path / "r")
    assert run_command(launch, on_tick=tick, tick_s=0.02) == 5
    assert len(calls) == 3


def test_the_signal_mask_is_as_before(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run_shell(tmp_path, "exit 0")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_command_starts_with_no_signal_blocked(tmp_path: Path) -> None:
    script = tmp_path / "mask.py"
    script.write_text(
        "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    )
    launch = prepare_launch([str(script)], os.environ, run_dir=tmp_path / "run")
    assert run_command(launch) == 0


SIGNAL_COUNTER = """
import pathlib, signal, sys, time
seen = {"SIGINT": 0, "SIGTERM": 0}
def count(number, frame):
    seen[signal.Signals(number).name] += 1
signal.signal(signal.SIGINT, count)
signal.signal(signal.SIGTERM, count)
out = pathlib.Path(sys.argv[1])
(out / "ready").touch()
deadline = time.monotonic() + 20
while not any(seen.values()) and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.4)  # a second one would come now
(out / "half").write_text(" ".join(f"{name}={number}" for name, number in seen.items()))
(out / "half").rename(out / "seen")
sys.exit(9)
"""


def launcher_command(tmp_path: Path) -> list[str]:
    script = tmp_path / "counter.py"
    script.write_text(SIGNAL_COUNTER)
    options = ["--run-dir", str(tmp_path / "run")]
    return [sys.executable, "-m", "meshscope.capture", *options, "--", str(script), str(tmp_path)]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_once(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    with subprocess.Popen(
        launcher_command(tmp_path), start_new_session=True, stderr=subprocess.PIPE
    ) as launcher:
        wait_for(tmp_path / "ready")
        os.killpg(launcher.pid, number) if to_group else os.kill(launcher.pid, number)
        _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == 9
    seen = dict(pair.split("=") for pair in (tmp_path / "seen").read_text().split())
    assert seen == {"SIGINT": "0", "SIGTERM": "0", number.name: "1"}
    assert b"exit code 9" in stderr


def test_control_c_at_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # only exec may happen in this copy of the test process
        os.execv(sys.executable, launcher_command(tmp_path))
    wait_for(tmp_path / "ready")
    os.write(terminal, b"\x03")
    wait_for(tmp_path / "seen")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 9
    assert (tmp_path / "seen").read_text() == "SIGINT=1 SIGTERM=0"


def test_a_killed_launcher_does_not_orphan_the_command(tmp_path: Path) -> None:
    with subprocess.Popen(launcher_command(tmp_path), stderr=subprocess.DEVNULL) as launcher:
        wait_for(tmp_path / "ready")
        launcher.kill()
    wait_for(tmp_path / "seen")
    assert (tmp_path / "seen").read_text() == "SIGINT=0 SIGTERM=1"


# --- in the processes of the command --------------------------------------------------------------


def write_package(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FAKE_MESHSCOPE = {
    "meshscope/__init__.py": "",
    "meshscope/capture/__init__.py": "",
    "meshscope/capture/boot_hook.py": "def begin_recording():\n    print('begin')\n",
}
FAKE_TORCH = {"torch/__init__.py": "import torch.nn\nprint('torch ends')\n", "torch/nn.py": ""}


def run_booted(
    tmp_path: Path,
    code: str,
    *,
    path: list[Path] | None = None,
    source: Path | None = None,
    options: tuple[str, ...] = (),
) -> "subprocess.CompletedProcess[str]":
    """Runs code in a bare interpreter with our boot folder in front of `path`."""
    env = injected_environment(
        {"PYTHONPATH": os.pathsep.join(map(str, path or []))},
        run_dir=tmp_path / "run",
        launch_id="abc",
    )
    if source is not None:
        env["MESHSCOPE_SOURCE"] = str(source)
    return run_process([BARE_PYTHON, *options, "-c", code], env=env)


def test_recording_begins_when_torch_has_been_imported_to_its_end(tmp_path: Path) -> None:
    packages = write_package(tmp_path, {**FAKE_TORCH, **FAKE_MESHSCOPE})
    code = """
import sys
print([name for name in sys.modules if name.startswith("meshscope")])
import torch
import torch
print("exec_module" in vars(torch.__loader__), torch.__spec__.loader is torch.__loader__)
print([type(finder).__name__ for finder in sys.meta_path if "Torch" in type(finder).__name__])
"""
    done = run_booted(tmp_path, code, path=[packages])
    assert done.stdout.splitlines() == ["[]", "torch ends", "begin", "False True", "[]"]
    assert done.stderr == ""


def test_a_torch_that_fails_half_way_is_waited_for_again(tmp_path: Path) -> None:
    torch = (
        "import sys\nif not hasattr(sys, 'again'):\n    sys.again = 1\n    raise OSError('libx')\n"
    )
    packages = write_package(tmp_path, {"torch/__init__.py": torch, **FAKE_MESHSCOPE})
    code = """
try:
    import torch
except OSError as error:
    print(error)
import torch
"""
    done = run_booted(tmp_path, code, path=[packages])
    assert done.stdout.splitlines() == ["libx", "begin"]


def test_a_missing_torch_is_missing_as_ever(tmp_path: Path) -> None:
    done = run_booted(tmp_path, "import importlib.util as u; print(u.find_spec('torch'))")
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_asking_for_torch_without_importing_it_begins_nothing(tmp_path: Path) -> None:
    packages = write_package(tmp_path, {**FAKE_TORCH, **FAKE_MESHSCOPE})
    code = "import importlib.util as u; print(u.find_spec('torch').name)"
    assert run_booted(tmp_path, code, path=[packages]).stdout == "torch\n"


def test_torch_that_was_imported_before_us_is_recorded_at_once(tmp_path: Path) -> None:
    packages = write_package(tmp_path, {**FAKE_TORCH, **FAKE_MESHSCOPE})
    # As a .pth file would do it: site, which imports us, comes after torch.
    code = "import sys; sys.path[:0] = sys.argv[1:]; import torch; import site; site.main()"
    env = injected_environment({}, run_dir=tmp_path / "run", launch_id="abc")
    command = [BARE_PYTHON, "-S", "-c", code, str(BOOT_DIR), str(packages)]
    assert subprocess.check_output(command, env=env, text=True) == "torch ends\nbegin\n"


def test_meshscope_comes_from_the_launcher_where_it_is_not_installed(tmp_path: Path) -> None:
    packages = write_package(tmp_path / "site", FAKE_TORCH)
    source = write_package(tmp_path / "source", {**FAKE_MESHSCOPE, "stranger.py": ""})
    code = """
import importlib.util, sys, torch, meshscope
print(importlib.util.find_spec("stranger"))
"""
    done = run_booted(tmp_path, code, path=[packages], source=source)
    assert done.stdout.splitlines() == ["torch ends", "begin", "None"]


def test_an_installed_meshscope_comes_before_the_launchers(tmp_path: Path) -> None:
    packages = write_package(tmp_path / "site", {**FAKE_TORCH, **FAKE_MESHSCOPE})
    other = {**FAKE_MESHSCOPE, "meshscope/capture/boot_hook.py": "raise SystemError\n"}
    source = write_package(tmp_path / "source", other)
    done = run_booted(tmp_path, "import torch", path=[packages], source=source)
    assert done.stdout.splitlines() == ["torch ends", "begin"]


def test_a_failure_of_ours_is_one_line_and_torch_is_there(tmp_path: Path) -> None:
    packages = write_package(tmp_path / "site", FAKE_TORCH)
    code = "import torch; print(torch.nn.__name__)"
    done = run_booted(tmp_path, code, path=[packages], source=tmp_path / "nowhere")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["torch ends", "torch.nn"]
    assert done.stderr == (
        "meshscope: not recording: ModuleNotFoundError: No module named 'meshscope'\n"
    )


def test_a_process_outside_a_launch_is_left_alone(tmp_path: Path) -> None:
    packages = write_package(tmp_path, {**FAKE_TORCH, **FAKE_MESHSCOPE})
    env = {"PYTHONPATH": f"{BOOT_DIR}:{packages}"}
    command = [BARE_PYTHON, "-c", "import sys, torch; print(len(sys.meta_path))"]
    bare = subprocess.check_output([BARE_PYTHON, "-c", "import sys; print(len(sys.meta_path))"])
    assert subprocess.check_output(command, env=env) == b"torch ends\n" + bare


def test_an_existing_sitecustomize_still_runs(tmp_path: Path) -> None:
    theirs = write_package(tmp_path / "theirs", {"sitecustomize.py": "NAME = 'theirs'\n"})
    packages = write_package(tmp_path, {**FAKE_TORCH, **FAKE_MESHSCOPE})
    code = "import sitecustomize, torch; print(sitecustomize.NAME, sitecustomize.__file__)"
    done = run_booted(tmp_path, code, path=[theirs, packages])
    assert done.stdout.splitlines()[:2] == ["torch ends", "begin"]
    assert done.stdout.splitlines()[2] == f"theirs {theirs / 'sitecustomize.py'}"


def test_an_existing_sitecustomize_fails_as_it_would_without_us(tmp_path: Path) -> None:
    theirs = write_package(tmp_path / "theirs", {"sitecustomize.py": "raise OSError('theirs')\n"})
    packages = write_package(tmp_path, {**FAKE_TORCH, **FAKE_MESHSCOPE})
    done = run_booted(tmp_path, "import torch", path=[theirs, packages])
    assert done.stdout.splitlines() == ["torch ends", "begin"]
    assert "OSError: theirs" in done.stderr
    assert "meshscope" not in done.stderr


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_python_that_ignores_the_environment_is_not_touched(tmp_path: Path, option: str) -> None:
    done = run_booted(
        tmp_path, "import sys; print('sitecustomize' in sys.modules)", options=(option,)
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_process_that_never_imports_torch_imports_nothing_of_ours(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import sitecustomize
print(len(set(sys.modules) - before), "typing" in sys.modules, "meshscope" in sys.modules)
"""
    # -S keeps site from importing it first; MESHSCOPE_* are seen all the same.
    env = injected_environment({}, run_dir=tmp_path, launch_id="abc")
    command = [BARE_PYTHON, "-S", "-c", code, str(BOOT_DIR)]
    num_modules, *heavy = subprocess.check_output(command, env=env, text=True).split()
    assert heavy == ["False", "False"]
    assert int(num_modules) < 12


# --- the launcher without click and rich ----------------------------------------------------------


def test_the_bare_launcher_needs_the_standard_library_only(tmp_path: Path) -> None:
    code = """
import runpy, sys
for name in ("numpy", "duckdb", "msgspec", "click", "rich", "torch"):
    sys.modules[name] = None
sys.argv[0] = "meshscope.capture"
runpy.run_module("meshscope.capture", run_name="__main__")
"""
    arguments = ["-o", str(tmp_path / "run"), "--layout", "dp=1", "--", "sh", "-c", "exit 3"]
    done = run_process(
        [BARE_PYTHON, "-c", code, *arguments],
        env={"PYTHONPATH": str(SOURCE_DIR), "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 3
    assert "the command ended with exit code 3" in done.stderr
    assert "nothing was recorded" in done.stderr
    assert not (tmp_path / "run").exists()


def test_nothing_recorded_names_the_option_that_kept_us_out(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "meshscope.capture", "-o", str(tmp_path / "run"), "--"]
    command = [*launcher, sys.executable, "-I", "-c", "pass"]
    done = run_process(command)
    assert done.returncode == 0
    assert "nothing was recorded: python -I ignores" in done.stderr


def test_a_run_that_the_command_deletes_is_said_to_be_deleted(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "meshscope.capture", "-o", str(tmp_path / "run"), "--"]
    command = [*launcher, "rm", "-r", str(tmp_path / "run")]
    done = run_process(command)
    assert done.returncode == 0
    assert done.stderr.endswith("run was deleted while the command ran\n")


def test_a_command_that_cannot_start_leaves_no_run_behind(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "meshscope.capture", "--run-dir"]
    (tmp_path / "given").mkdir()
    for name in ("made", "given"):
        command = [*launcher, str(tmp_path / name), "--", "no-such-program"]
        done = run_process(command)
        assert done.returncode == 127
        assert "no-such-program: command not found" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_usage_errors_have_the_documented_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshscope.capture", "--layout", "dp=zero", "--", "true"]
    done = run_process(command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("meshscope: ")
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_takes_the_boot_folder_along() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="builds need hatchling")
    builder = wheel.WheelBuilder(str(SOURCE_DIR.parent))
    files = {file.distribution_path for file in builder.recurse_included_files()}
    assert "meshscope/capture/boot/sitecustomize.py" in files


def test_the_source_distribution_has_what_its_readme_calls() -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="builds need hatchling")
    builder = sdist.SdistBuilder(str(SOURCE_DIR.parent))
    files = {file.distribution_path for file in builder.recurse_included_files()}
    assert {"Makefile", "constraints.txt", ".ci/run", "examples/demo.py"} <= files
    assert {"tests/conftest.py", "src/meshscope/ingest/scanner.c"} <= files
    assert not any(name.endswith((".so", ".pyc")) for name in files)
