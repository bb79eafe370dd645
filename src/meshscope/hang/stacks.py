"""Asks live processes of this host for the Python stacks of their main threads.

A recorder may have registered a signal at which its process writes all stacks into its file
from C, without the interpreter lock and wherever it is stuck. A signal would end a process that did
not register it, and a run directory cannot be trusted. It is therefore sent only if the process
started at the recorded tick, has a handler for that signal, and holds that very file open. Stopped
processes are not asked.
"""

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshscope.hang.processes import PROC, Life, ProcessState
from meshscope.store.write.now_file import NOW_NAME

_ANSWER_SECONDS = 0.3
"""Time limit for an answer."""
_POLL_SECONDS = 0.01
_MAX_BYTES = 1 << 20
_MAX_DESCRIPTORS = 4096
_ALLOWED_SIGNALS = frozenset(
    (signal.SIGUSR1, signal.SIGUSR2, *range(int(signal.SIGRTMIN), int(signal.SIGRTMAX) + 1))
)
"""Recorders register only these: no other signal is sent, whatever a header says."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? \(.*\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THE_RECORDER = re.compile(r"/meshscope/(?:capture|store)/")
_NOT_THE_PROGRAM = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
_THREAD_BOOTSTRAP = "_bootstrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int | None
    function: str

    @property
    def is_program(self) -> bool:
        """Whether it belongs to the training program rather than a library."""
        return _NOT_THE_PROGRAM.search(self.file) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Askable:
    """A process that may be sent its signal."""

    pid: int
    signal_number: int
    path: Path


def find_askable(number: int | None, process: ProcessState, directory: Path) -> Askable | None:
    """How to ask this process, if it may be asked with the signal that its recording names."""
    if (
        process.pid is None
        or not process.is_verified
        or process.life not in (Life.RUNNING, Life.SLEEPING)
        or number is None
        or number not in _ALLOWED_SIGNALS
    ):
        return None
    path = directory / NOW_NAME
    if _catches(PROC, process.pid, number) and _holds_open(PROC, process.pid, path):
        return Askable(pid=process.pid, signal_number=number, path=path)
    return None


def _catches(proc: Path, pid: int, number: int) -> bool:
    try:
        status = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("SigCgt:"):
            try:
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
            except (IndexError, ValueError):
                return False
    return False


def _holds_open(proc: Path, pid: int, path: Path) -> bool:
    descriptors = proc / str(pid) / "fd"
    try:
        wanted = os.lstat(path)
        if not stat.S_ISREG(wanted.st_mode):
            return False
        names = os.listdir(descriptors)[:_MAX_DESCRIPTORS]
    except OSError:
        return False
    for name in names:
        try:
            found = os.stat(descriptors / name)
        except OSError:
            continue
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


def ask_for_stacks(
    targets: Mapping[int, Askable], *, answer_seconds: float = _ANSWER_SECONDS
) -> dict[int, tuple[Frame, ...]]:
    """Stacks of main threads, innermost frame first, by rank; of those that answered in time."""
    offsets: dict[int, int] = {}
    for rank, target in targets.items():
        with contextlib.suppress(OSError):  # it has just ended
            offsets[rank] = os.lstat(target.path).st_size
            os.kill(target.pid, target.signal_number)
    answers: dict[int, bytes] = {}
    is_settled = dict.fromkeys(offsets, False)
    deadline = time.monotonic() + answer_seconds
    while not all(is_settled.values()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank, offset in offsets.items():
            answer = _read_from(targets[rank].path, offset)
            is_settled[rank] = bool(answer) and answer == answers.get(rank)
            answers[rank] = answer
    stacks = {rank: find_main_stack(parse_stacks(answer)) for rank, answer in answers.items()}
    return {rank: stack for rank, stack in stacks.items() if stack}


def _read_from(path: Path, offset: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, _MAX_BYTES, offset)
    except OSError:
        return b""
    finally:
        os.close(fd)


def parse_stacks(data: bytes) -> list[tuple[Frame, ...]]:
    """The threads of a `faulthandler` dump, in its order, innermost frames first."""
    threads: list[list[Frame]] = []
    for line in data.decode("utf-8", errors="replace").splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            number = match["line"]
            threads[-1].append(
                Frame(
                    file=match["file"],
                    line=int(number) if number.isdecimal() else None,
                    function=match["function"],
                )
            )
    return [tuple(frames) for frames in threads]


def find_main_stack(threads: list[tuple[Frame, ...]]) -> tuple[Frame, ...]:
    """The main thread's frames: the last thread that `threading` did not start."""
    for frames in reversed(threads):
        if frames and frames[-1].function != _THREAD_BOOTSTRAP:
            return frames
    return ()


_NUM_TELLING = 4


def pick_telling_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The innermost frame, then the innermost frame of the program and its callers.

    Frames of the recorder, which surround every operation, are left out.
    """
    frames = tuple(frame for frame in frames if not _THE_RECORDER.search(frame.file))
    if not frames:
        return ()
    program = [frame for frame in frames if frame.is_program]
    inside = [] if frames[0].is_program else [frames[0]]
    return (*inside, *program[: _NUM_TELLING - len(inside)])
