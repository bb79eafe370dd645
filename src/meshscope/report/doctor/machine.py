"""What a recording on this machine would have: devices, backends, clock, signals, the launcher."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshscope.capture.hardware.nvml import LIBRARY, Nvml
from meshscope.capture.launching.launch import injected_environment
from meshscope.report.doctor.check import Check, State

_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_NUM_READINGS = 2000
_SLOW_READING_NS = 500
"""A clock that is asked by a system call takes about this long; one of the processor 50 ns."""
_START_SECONDS = 10.0
_TORCH_SECONDS = 120.0

_ASK_HOOK = "import sys; print(any(type(f).__name__ == 'TorchWatcher' for f in sys.meta_path))"
_ASK_TORCH = """
import json, torch
d = torch.distributed
names = [n for n in ("gloo", "nccl", "mpi", "ucc", "xccl")
         if d.is_available() and getattr(d, f"is_{n}_available", lambda: False)()]
kind, titles = "cpu", []
if torch.accelerator.is_available():
    kind = torch.accelerator.current_accelerator().type
    name_of = getattr(getattr(torch, kind, None), "get_device_name", lambda index: kind)
    titles = [str(name_of(index)) for index in range(torch.accelerator.device_count())]
print(json.dumps({"kind": kind, "devices": titles, "backends": names}))
"""


def check_launcher() -> Check:
    """Starts this Python as `meshscope run` does, and looks whether the recorder waits in it."""
    env = injected_environment(os.environ, run_dir=Path("doctor"), launch_id="doctor")
    done = _ask(_ASK_HOOK, env, _START_SECONDS)
    if isinstance(done, str) or done.stdout.split()[-1:] != ["True"]:
        why = done if isinstance(done, str) else done.stderr.strip()[-200:] or "no reason was given"
        return Check(
            name="launcher",
            state=State.LIMITED,
            found=f"a process below `meshscope run` is not reached: {why}",
            meaning="programs are recorded only if they call meshscope.start themselves",
            command="import meshscope; meshscope.start().attach(model, optimizer)",
        )
    return Check(
        name="launcher", state=State.OK, found="processes below `meshscope run` are reached"
    )


def _ask(
    code: str, env: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str] | str:
    """What a new Python answers, or why there is no answer."""
    try:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {timeout_s:.0f} s"
    except OSError as error:
        return str(error)


def check_system() -> Check:
    """The recorder needs Linux; the cores are those this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{platform.system()} {platform.machine()}, {cores} cores"
    if platform.system() != "Linux":
        return Check(
            name="system",
            state=State.LIMITED,
            found=found,
            meaning="only Linux is tested",
        )
    return Check(name="system", state=State.OK, found=found)


def check_devices() -> Check:
    """By the driver's files and library; no device is started."""
    models = [_read_model(path) for path in sorted(_DRIVER_FOLDER.glob("*/information"))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    try:
        library = Nvml(LIBRARY)
    except OSError as error:
        if models:
            return Check(
                name="devices",
                state=State.LIMITED,
                found=f"{_list_models(models)}{shown}; NVML does not open: {error}",
                meaning="clocks, power, temperature and errors of devices are not recorded",
                command="install the library of the driver (libnvidia-ml.so.1), in a container "
                "with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            )
        return Check(
            name="devices",
            state=State.ABSENT,
            found="no NVIDIA driver here",
            meaning="CPU programs are recorded; other accelerators are seen through torch "
            "(meshscope doctor --torch)",
        )
    try:
        num_devices = library.count_devices()
    finally:
        library.close()
    found = _list_models(models) if len(models) == num_devices else f"{num_devices} devices"
    return Check(name="devices", state=State.OK, found=f"{found}{shown}, NVML opens")


def _read_model(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
    return found[1] if found else "NVIDIA device"


def _list_models(models: list[str]) -> str:
    return ", ".join(f"{models.count(model)} × {model}" for model in dict.fromkeys(models))


def check_clock() -> Check:
    """Its source, and what one reading costs: a step has about twenty."""
    start_ns = time.perf_counter_ns()
    for _ in range(_NUM_READINGS):
        time.monotonic_ns()
    reading_ns = (time.perf_counter_ns() - start_ns) / _NUM_READINGS
    try:
        source = _CLOCK_SOURCE.read_text(encoding="ascii").strip()
    except OSError:
        source = "unknown source"
    found = f"CLOCK_MONOTONIC by {source}, {reading_ns:.0f} ns a reading"
    if reading_ns < _SLOW_READING_NS:
        return Check(name="clock", state=State.OK, found=found)
    return Check(
        name="clock",
        state=State.LIMITED,
        found=found,
        meaning="each reading is a system call: a recorded step costs some 10 to 50 µs more",
        command="boot with clocksource=tsc, if the processor's counter is stable",
    )


def check_stacks() -> Check:
    """`meshscope hang` asks ranks for their stacks by a real-time signal that nobody uses."""
    if not hasattr(signal, "SIGRTMAX"):
        return Check(
            name="stacks",
            state=State.LIMITED,
            found="this system has no real-time signals",
            meaning="`meshscope hang` shows no stacks",
        )
    return Check(name="stacks", state=State.OK, found="real-time signals for `meshscope hang`")


def ask_torch() -> Check:
    """Imports torch in a process of its own: what breaks there breaks nothing here."""
    done = _ask(_ASK_TORCH, dict(os.environ), _TORCH_SECONDS)
    if isinstance(done, str) or done.returncode:
        why = done if isinstance(done, str) else done.stderr.strip().rpartition("\n")[2][-300:]
        return Check(
            name="torch, asked",
            state=State.LIMITED,
            found=f"torch cannot be asked: {why}",
            meaning="whether programs of this Python can train is not known",
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    devices = _list_models(answer["devices"]) or "no accelerator"
    backends = ", ".join(answer["backends"]) or "none"
    return Check(
        name="torch, asked",
        state=State.OK,
        found=f"{devices}; backends of torch.distributed: {backends}",
    )
