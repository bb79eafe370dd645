"""Runs a command so that every Python process below it that trains is recorded.

The command gets a copy of the environment with our `boot` folder at the head of PYTHONPATH; the
sitecustomize in it starts the recorder once torch is imported. The command itself is not looked
into, so torchrun, accelerate, deepspeed, a shell script and plain Python all work. Nothing is
injected where Python ignores PYTHONPATH (-E, -I, -S) or where the environment does not arrive
(ssh, containers): `launch_outcome` says so afterwards. Standard library only.
"""

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshscope.capture.config import MAX_DISK_VARIABLE, OFF_VARIABLE, read_off
from meshscope.capture.identity import LAYOUT_VARIABLE, PROFILING_VARIABLE, RUN_DIR_VARIABLE
from meshscope.core.config.given_flops import GivenFlops
from meshscope.errors import UsageError
from meshscope.store.read.tail import list_attempts, list_ranks
from meshscope.store.write.access import FOLDER_MODE
from meshscope.store.write.manifest import is_draft_of
from meshscope.store.write.redaction import redact_arguments
from meshscope.store.write.writer import MANIFEST_NAME, ensure_manifest, rank_dir_name

_LAUNCH_ID_VARIABLE = "MESHSCOPE_LAUNCH_ID"
_SOURCE_VARIABLE = "MESHSCOPE_SOURCE"
BOOT_DIR = Path(__file__).parents[1] / "boot"
SOURCE_DIR = Path(__file__).parents[3]

_COMMAND_NOT_FOUND = 127
_COMMAND_NOT_EXECUTABLE = 126
SIGNAL_EXIT_BASE = 128
"""Exit codes as a shell gives them."""

_PYTHON_NAME = re.compile(r"python(\d+(\.\d+)*)?t?$|pypy\d*$")
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command ready to run, and where what it records goes."""

    command: tuple[str, ...]
    environment: dict[str, str]
    run_dir: Path
    """As the user wrote it; the environment carries the absolute path."""
    launch_id: str
    num_earlier_attempts: dict[int, int]
    """Attempts per rank that the directory held before this launch."""
    made_run_dir: bool
    """The directory was not there before."""
    notes: tuple[str, ...] = ()
    """What the user should know before it starts, one sentence each."""

    @property
    def is_new_run(self) -> bool:
        """Whether the directory held no recordings before."""
        return not self.num_earlier_attempts


def prepare_launch(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    layout: str | None = None,
    profiling: str | None = None,
    off: str | None = None,
    flops: GivenFlops | None = None,
    max_disk_bytes: int | None = None,
) -> Launch:
    """Resolves the command and the run directory, which is made; UsageError or LayoutError if not.

    An existing run directory is gone on with: ranks add a further attempt to it.
    """
    if not command:
        raise UsageError(
            "no command was given; write it after `--`: meshscope run -- torchrun … train.py"
        )
    if layout is not None:
        from meshscope.core.layout import Layout  # the launcher starts in a moment without it

        Layout.parse(layout)  # now, rather than once per rank
    profiling = profiling or env.get(PROFILING_VARIABLE)
    if profiling:
        from meshscope.capture.profiling.settings import parse_settings

        parse_settings(profiling)
    read_off(off or "")
    shared_id = find_shared_launch_id(env, command)
    stem = name or find_program_name(command)
    directory = Path(run_dir or env.get(RUN_DIR_VARIABLE) or _default_run_dir(stem, shared_id))
    manifest: dict[str, object] = {"name": stem, "command": redact_arguments(command)}
    made_run_dir = _make_run_dir(directory, manifest)
    launch_id = shared_id or os.urandom(6).hex()
    return Launch(
        command=resolve_command(command, env),
        environment=injected_environment(
            env,
            run_dir=directory,
            launch_id=launch_id,
            layout=layout,
            profiling=profiling,
            off=off,
            flops=flops,
            max_disk_bytes=max_disk_bytes,
        ),
        run_dir=directory,
        launch_id=launch_id,
        num_earlier_attempts={
            rank: len(list_attempts(directory / rank_dir_name(rank)))
            for rank in list_ranks(directory)
        },
        made_run_dir=made_run_dir,
        notes=_find_notes(command, shared_id),
    )


def injected_environment(
    env: Mapping[str, str],
    *,
    run_dir: Path,
    launch_id: str,
    layout: str | None = None,
    profiling: str | None = None,
    off: str | None = None,
    flops: GivenFlops | None = None,
    max_disk_bytes: int | None = None,
) -> dict[str, str]:
    """A copy of `env` in which every Python process finds our sitecustomize first."""
    # An empty entry would mean the current directory, which an unset PYTHONPATH does not.
    folders = [str(BOOT_DIR), *filter(None, [env.get("PYTHONPATH")])]
    changed = {
        RUN_DIR_VARIABLE: str(run_dir.absolute()),
        _LAUNCH_ID_VARIABLE: launch_id,
        _SOURCE_VARIABLE: str(SOURCE_DIR),
        "PYTHONPATH": os.pathsep.join(folders),
    }
    given = {LAYOUT_VARIABLE: layout, PROFILING_VARIABLE: profiling, OFF_VARIABLE: off}
    if flops is not None:
        changed |= flops.to_environment()
    if max_disk_bytes is not None:
        changed[MAX_DISK_VARIABLE] = str(max_disk_bytes)
    return {**env, **changed, **{name: value for name, value in given.items() if value}}


def resolve_command(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The command with a Python script given an interpreter, and programs of our venv found.

    A program that is not on PATH is looked for beside our interpreter, so that torchrun works in
    a virtual environment that is not activated.
    """
    program, *arguments = command
    if program.endswith(".py"):
        return (sys.executable, *command)
    if os.sep not in program and shutil.which(program, path=env.get("PATH")) is None:
        beside = Path(sys.executable).parent / program
        if os.access(beside, os.X_OK):
            return (str(beside), *arguments)
    return tuple(command)


def find_program_name(command: Sequence[str]) -> str:
    """A name for the run: the first script's stem, else the module after `-m`, else the program."""
    script = next((word for word in command if word.endswith(".py")), None)
    if script is not None:
        return Path(script).stem
    modules = [after for word, after in itertools.pairwise(command) if word == "-m"]
    return re.sub(r"[^A-Za-z0-9._-]", "_", modules[-1] if modules else Path(command[0]).name)


def find_shared_launch_id(env: Mapping[str, str], command: Sequence[str]) -> str | None:
    """An id that launchers of the same job on other nodes arrive at as well, if there is one.

    What the user set, the Slurm step, the PMIx namespace, or torchrun's rendezvous id when it
    runs on several nodes. None: this launcher is alone and makes up its own.
    """
    if env.get(_LAUNCH_ID_VARIABLE):
        return env[_LAUNCH_ID_VARIABLE]
    if env.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_JOB_ID" in env:
        restarts = env.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{restarts}"
    if env.get("PMIX_NAMESPACE"):
        return env["PMIX_NAMESPACE"]
    return _option_value(command, "rdzv-id") if _spans_nodes(command) else None


def find_ignored_environment(command: Sequence[str]) -> str | None:
    """The option by which a Python in the command ignores PYTHONPATH: `-I`, `-E` or `-S`."""
    for position, word in enumerate(command):
        if not _PYTHON_NAME.match(Path(word).name):
            continue
        options = iter(command[position + 1 :])
        for option in options:
            if not option.startswith("-") or option in ("-", "-c", "-m"):
                break
            if option in _PYTHON_OPTIONS_WITH_VALUE:
                next(options, None)
            elif not option.startswith("--") and option[1] not in "cmWX":
                found = next((letter for letter in option[1:] if letter in "ISE"), None)
                if found:
                    return f"-{found}"
    return None


def run_command(
    launch: Launch, *, on_tick: Callable[[], None] | None = None, tick_s: float = 1.0
) -> int:
    """Runs the command to its end and returns its exit code, signal deaths as 128 + signal.

    Signals that reach us are passed on exactly once. At a terminal the command shares our process
    group: it can read the keyboard, Ctrl-C and Ctrl-Z reach it from the kernel and are not passed
    on a second time. Elsewhere it leads its own group, so that a signal to our group reaches
    it only through us. If we are killed, the kernel sends it SIGTERM (Linux).

    `on_tick` is called about every `tick_s` seconds; its OSError or ValueError ends the calls.
    """
    watched = _FORWARDED | {signal.SIGCHLD}
    # Blocked signals wait for sigtimedwait, which also tells who sent them.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        shares_group = _is_in_foreground()
        try:
            child = subprocess.Popen(
                launch.command,
                env=launch.environment,
                process_group=None if shares_group else 0,
                preexec_fn=_child_setup(old_mask),  # safe: no thread of ours runs
            )
        except FileNotFoundError:
            raise CommandNotStarted(launch.command[0], _COMMAND_NOT_FOUND) from None
        except PermissionError:
            raise CommandNotStarted(launch.command[0], _COMMAND_NOT_EXECUTABLE) from None
        try:
            _wait(child, watched, shares_group=shares_group, on_tick=on_tick, tick_s=tick_s)
        finally:
            if child.poll() is None:  # an error of ours: do not leave it behind
                child.terminate()
                child.wait()
        while signal.sigtimedwait(watched, 0) is not None:
            pass  # what came after its end concerned the command
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    code = child.returncode
    return code if code >= 0 else SIGNAL_EXIT_BASE - code


class CommandNotStarted(UsageError):
    """The command could not be run; `exit_code` is the one a shell gives."""

    def __init__(self, program: str, exit_code: int) -> None:
        is_missing = exit_code == _COMMAND_NOT_FOUND
        super().__init__(
            f"{program}: command not found; check its spelling and PATH"
            if is_missing
            else f"{program} cannot be executed; check its mode, or name an interpreter before it"
        )
        self.exit_code = exit_code


_FORWARDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
_SENT_BY_KERNEL = 0x80  # SI_KERNEL of asm-generic/siginfo.h: a key press, not a process
_SAME_SIGNAL_S = 0.2
"""`timeout` and others signal a process and then its group: within this time it is one signal."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_TRIES = 5
_RETRY_S = 0.01


def _wait(
    child: "subprocess.Popen[bytes]",
    watched: frozenset[signal.Signals],
    *,
    shares_group: bool,
    on_tick: Callable[[], None] | None,
    tick_s: float,
) -> None:
    last_sent: dict[int, float] = {}
    next_tick = time.monotonic() + tick_s
    while child.poll() is None:
        info = signal.sigtimedwait(watched, max(0.0, next_tick - time.monotonic()))
        now = time.monotonic()
        if info is not None and info.si_signo in _FORWARDED:
            reached_it = shares_group and info.si_code == _SENT_BY_KERNEL
            if not reached_it and now - last_sent.get(info.si_signo, -1e9) > _SAME_SIGNAL_S:
                last_sent[info.si_signo] = now
                child.send_signal(info.si_signo)
        if now >= next_tick:
            next_tick = now + tick_s
            if on_tick is not None:
                try:
                    on_tick()
                except (OSError, ValueError):  # a closed terminal must not end the training
                    on_tick = None


def _is_in_foreground() -> bool:
    """Whether our process group is the one a terminal sends its key presses to."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _child_setup(mask: set[int | signal.Signals]) -> Callable[[], None]:
    """What the child does between fork and exec; everything it needs is loaded here."""
    launcher = os.getpid()
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    death_signal = int(signal.SIGTERM)

    def set_up() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
            if os.getppid() != launcher:  # it died before we asked for its death signal
                os._exit(SIGNAL_EXIT_BASE + death_signal)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return set_up


def _default_run_dir(stem: str, shared_id: str | None) -> Path:
    """`runs/<stem>/<time>-<4 hex>`, or a name all launchers of the job arrive at."""
    if shared_id is not None:
        return Path("runs") / stem / re.sub(r"[^A-Za-z0-9._-]", "_", shared_id)[:100]
    return Path("runs") / stem / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _make_run_dir(directory: Path, manifest: dict[str, object]) -> bool:
    """Before the start: an unwritable folder should not be found out after the training.

    Whether this launcher made it. Launchers of other nodes may make it, or take it away again
    because nothing was recorded, at the same moment.
    """
    tries_left = _MAX_TRIES
    while True:
        tries_left -= 1
        try:
            return _try_to_make_run_dir(directory, manifest)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or not tries_left:
                raise UsageError(
                    f"{directory} cannot be a run directory: {error.strerror}; choose another "
                    "with --run-dir"
                ) from error
        time.sleep(_RETRY_S)  # another launcher took it away: make it again


def _try_to_make_run_dir(directory: Path, manifest: dict[str, object]) -> bool:
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(FOLDER_MODE)
    except FileExistsError:
        is_made = False
    else:
        is_made = True
    names = os.listdir(directory)
    is_run = MANIFEST_NAME in names or all(is_draft_of(MANIFEST_NAME, name) for name in names)
    # The manifest is looked for again: whatever else is in a run came after it.
    if not (is_run or list_ranks(directory) or (directory / MANIFEST_NAME).exists()):
        raise UsageError(
            f"{directory} holds files but is not a run; give a new directory, or that of a "
            "run to add an attempt to"
        )
    ensure_manifest(directory, manifest)
    return is_made


def _find_notes(command: Sequence[str], shared_id: str | None) -> tuple[str, ...]:
    if shared_id is not None or not _spans_nodes(command):
        return ()
    return (
        f"the command runs on several nodes, and nothing tells their launchers that they belong "
        f"together; give torchrun an --rdzv-id, or set {_LAUNCH_ID_VARIABLE} and --run-dir to the "
        "same value on every node",
    )


def _spans_nodes(command: Sequence[str]) -> bool:
    nodes = _option_value(command, "nnodes")
    return nodes is not None and nodes.split(":")[-1] != "1"


def _option_value(command: Sequence[str], name: str) -> str | None:
    """The value of a torchrun option, in either spelling, with `=` or as the next word."""
    for position, word in enumerate(command):
        key, equals, value = word.partition("=")
        if key.startswith("--") and key[2:].replace("_", "-") == name:
            if equals:
                return value
            return command[position + 1] if position + 1 < len(command) else None
    return None
