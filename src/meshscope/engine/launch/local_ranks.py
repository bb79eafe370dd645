"""Starts the ranks of a run on this machine and sees them through to their end.

    outcome = run_local_ranks(train_rank, LocalLaunch(world_size=8, run_dir=run_dir, …))

torch is imported once, here, and ranks are forked: 8 of them start in about 2 s instead of 28 s.
That needs a parent that has computed nothing: one thread is set before any operation, and CUDA is
never touched (`probe_devices` asks in a child). It takes signals, so call it from the main thread.

When a rank fails, the others have `grace_s` to notice and end by themselves, then SIGTERM, then
SIGKILL. Which failure was first is read from times and kinds (see `failures`); all ranks start
again, with a new place to meet, up to `max_restarts` times. SIGINT or SIGTERM asks every rank to
stop after its step; a second one kills. If the launcher itself is killed, the kernel kills the
ranks (Linux). Processes that ranks start are theirs to end.
"""

import atexit
import ctypes
import mmap
import os
import pickle
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

from meshscope.engine.launch.failures import (
    RankFailure,
    attempt_folder,
    explain,
    find_exit_failure,
    find_failure,
    find_first,
    read_failure,
    share_steps,
    write_failure,
)
from meshscope.engine.launch.rendezvous import STORE_FILE_VARIABLE
from meshscope.engine.launch.stop_request import STOP_SIGNALS, StopRequest

EXIT_RANK_FAILED = 6
SIGNAL_EXIT_BASE = 128

_RankFunction = Callable[[StopRequest], None]
"""What each rank runs, with the environment that torchrun would set."""

_WATCHED = frozenset({*STOP_SIGNALS, signal.SIGCHLD})
_LOOK_S = 0.2
"""How often the launcher polls its ranks."""
_SAME_SIGNAL_S = 0.2
"""`timeout` and others signal a process and then its group: within this time it is one signal."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STEP = struct.Struct("q")
_FOR_RANKS = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
"""Loaded once, before the fork; each rank would take seconds for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLaunch:
    world_size: int
    run_dir: Path
    """Folder for tracebacks."""
    run_id: str
    """Names the launch to the recorder."""
    label: Callable[[int], str]
    """A rank's coordinates, for messages."""
    say: Callable[[str], None]
    """Called with a line about a restart."""
    max_restarts: int = 0
    grace_s: float = 5.0
    kill_after_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOutcome:
    exit_code: int
    """0, `EXIT_RANK_FAILED`, or 128 + the signal that asked for the end."""
    message: str | None = None
    """One line, where a rank failed."""
    num_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """The GPUs that torch finds here."""

    num_gpus: int
    memory_bytes: int | None
    """Memory of the smallest GPU; None without one."""
    name: str | None = None
    """Of the first GPU; None without one."""


def run_local_ranks(function: _RankFunction, launch: LocalLaunch) -> LocalOutcome:
    """Runs `function` in `world_size` processes, again after a failure if so set."""
    _prepare_parent()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        attempt = 0
        while True:
            ranks = _Attempt(function, launch, attempt, old_mask)
            ranks.run()
            outcome = ranks.find_outcome()
            if outcome.exit_code != EXIT_RANK_FAILED or not ranks.may_restart:
                return outcome
            attempt += 1
            launch.say(f"{outcome.message}; restart {attempt} of {launch.max_restarts}")
    finally:
        while signal.sigtimedwait(_WATCHED, 0) is not None:
            pass  # what came after the end concerned the ranks
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _prepare_parent() -> None:
    """Imports what ranks need, once, and leaves torch as a parent of forks must have it."""
    # A child of a process that has used a pool of threads hangs in its first matrix product.
    torch.set_num_threads(1)
    for name in _FOR_RANKS:
        import_module(name)
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert not is_used, "CUDA does not survive a fork"


def probe_devices() -> DeviceProbe:
    """Asks for the GPUs in a child, so that CUDA stays untouched here."""
    if torch.version.cuda is None and torch.version.hip is None:
        return DeviceProbe(num_gpus=0, memory_bytes=None)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        count, sizes, name = 0, [], None
        try:
            count = torch.cuda.device_count()
            name = torch.cuda.get_device_name(0) if count else None
            sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
        except (RuntimeError, AssertionError):  # a driver that does not fit: no GPU to use
            count = 0
        finally:
            os.write(writing, pickle.dumps((count, min(sizes, default=None), name)))
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    num_gpus, memory_bytes, name = pickle.loads(answer) if answer else (0, None, None)
    return DeviceProbe(num_gpus=num_gpus, memory_bytes=memory_bytes, name=name)


def find_host_memory_bytes() -> int:
    """Memory of this machine, or the control group's limit if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def count_threads(num_ranks: int, env: Mapping[str, str]) -> int:
    """Threads of each rank: what OMP_NUM_THREADS says, else its share of the cores."""
    declared = env.get("OMP_NUM_THREADS", "")
    if declared.isdecimal() and int(declared) > 0:
        return int(declared)
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


@dataclass(slots=True)
class _Stopping:
    """A signal that asked for the end."""

    number: int
    at_s: float
    is_killing: bool = False


@dataclass(slots=True)
class _Attempt:
    """One launch of all ranks."""

    function: _RankFunction
    launch: LocalLaunch
    attempt: int
    old_mask: set[int | signal.Signals]
    running: dict[int, int] = field(default_factory=dict)
    """Rank by process id."""
    failures: dict[int, RankFailure] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    """Ranks that the launcher killed."""
    stopping: _Stopping | None = None
    _failed_at_s: float | None = None
    _was_terminated: bool = False
    _steps: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self._steps = mmap.mmap(-1, _STEP.size * self.launch.world_size)
        for rank in range(self.launch.world_size):
            _STEP.pack_into(self._steps, _STEP.size * rank, -1)

    @property
    def folder(self) -> Path:
        return attempt_folder(self.launch.run_dir, self.attempt)

    @property
    def may_restart(self) -> bool:
        return (
            self.attempt < self.launch.max_restarts
            and self.stopping is None
            and not find_first(self.failures.values()).is_permanent
        )

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="meshscope-") as meeting:
            try:
                for rank in range(self.launch.world_size):
                    self._start(rank, f"{meeting}/store")
                while self.running:
                    self._wait_a_moment()
            finally:
                self._signal(signal.SIGKILL)
                for pid in list(self.running):
                    os.waitpid(pid, 0)

    def find_outcome(self) -> LocalOutcome:
        is_forced = self.stopping is not None and self.stopping.is_killing
        if self.failures and not is_forced:
            return LocalOutcome(
                exit_code=EXIT_RANK_FAILED,
                message=explain(
                    list(self.failures.values()),
                    label=self.launch.label,
                    still_running=sorted(self.killed),
                ),
                num_restarts=self.attempt,
            )
        code = SIGNAL_EXIT_BASE + self.stopping.number if self.stopping is not None else 0
        return LocalOutcome(exit_code=code, num_restarts=self.attempt)

    # --- the launcher's side -----------------------------------------------------------------

    def _start(self, rank: int, store_file: str) -> None:
        # What waits in a buffer would be written by every child.
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_rank(rank, store_file, launcher)
        self.running[pid] = rank

    def _wait_a_moment(self) -> None:
        info = signal.sigtimedwait(_WATCHED, _LOOK_S)
        if info is not None and info.si_signo in STOP_SIGNALS:
            self._handle_stop(info.si_signo)
        self._reap()
        self._hurry()

    def _handle_stop(self, number: int) -> None:
        now_s = time.monotonic()
        if self.stopping is None:
            self.stopping = _Stopping(number, now_s)
            self._signal(signal.SIGTERM)
        elif number != self.stopping.number or now_s - self.stopping.at_s > _SAME_SIGNAL_S:
            self.stopping.is_killing = True
            self._signal(signal.SIGKILL)

    def _reap(self) -> None:
        for pid, rank in list(self.running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self.running[pid]
            code = os.waitstatus_to_exitcode(status)
            if code == 0 or (rank in self.killed and code == -signal.SIGKILL):
                continue
            self.killed.discard(rank)  # it went by itself, before the signal came
            self.failures[rank] = read_failure(self.folder, rank) or find_exit_failure(
                rank, code, self._step_of(rank)
            )
            if self._failed_at_s is None:
                self._failed_at_s = time.monotonic()

    def _hurry(self) -> None:
        """Ends ranks that are still there some time after the first failure."""
        if self._failed_at_s is None or not self.running:
            return
        waited_s = time.monotonic() - self._failed_at_s
        if waited_s > self.launch.grace_s + self.launch.kill_after_s:
            self._signal(signal.SIGKILL)
        elif waited_s > self.launch.grace_s and not self._was_terminated:
            self._was_terminated = True
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for pid, rank in self.running.items():
            if number == signal.SIGKILL:
                self.killed.add(rank)
            os.kill(pid, number)  # ours, and not waited for yet: the id is still its own

    def _step_of(self, rank: int) -> int | None:
        (step,) = _STEP.unpack_from(self._steps, _STEP.size * rank)
        return None if step < 0 else int(step)

    # --- a rank's side -----------------------------------------------------------------------

    def _run_rank(self, rank: int, store_file: str, launcher: int) -> NoReturn:
        code = EXIT_RANK_FAILED
        try:
            _die_with(launcher)
            # What the launcher registered is not for its children to run.
            atexit._clear()
            os.environ.update(self._environment(rank, store_file))
            share_steps(lambda step: _STEP.pack_into(self._steps, _STEP.size * rank, step))
            torch.set_num_threads(count_threads(self.launch.world_size, os.environ))
            with StopRequest.on_signals() as stop:
                signal.pthread_sigmask(signal.SIG_SETMASK, self.old_mask)
                code = self._call(rank, stop)
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _call(self, rank: int, stop: StopRequest) -> int:
        try:
            self.function(stop)
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:  # noqa: BLE001 - every error is reported and ends here
            write_failure(self.folder, find_failure(error, rank), error)
            sys.last_value = error  # the recorder looks for it there
            return EXIT_RANK_FAILED
        return 0

    def _environment(self, rank: int, store_file: str) -> dict[str, str]:
        """The environment that torchrun would set."""
        size = str(self.launch.world_size)
        values = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": self.launch.run_id,
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.launch.max_restarts),
            STORE_FILE_VARIABLE: store_file,
        }
        if sys.platform == "linux":
            # They are all here: no need for the host's name to lead anywhere.
            values["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return values


def _die_with(launcher: int) -> None:
    """Asks the kernel to kill this process when the launcher ends."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it ended before we could ask
            os._exit(EXIT_RANK_FAILED)
