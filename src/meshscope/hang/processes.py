"""Whether the process of a rank is alive, and what the kernel says it is doing.

Read from /proc, for processes of this host and this boot only. A process is the recorded one if it
started at the same tick or, without a recorded tick, before the recording did. If the pid was
recorded in another pid namespace (a container), nothing is claimed.

Wrong if a container shares the host's name and its recorder did not note its pid namespace: its
processes are then not found, and count as gone.
"""

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PROC = Path("/proc")
_START_TICKS_FIELD = 22
_STATE_FIELD = 3
_EXIT_STATUS_FIELD = 52
_SIGNAL_BITS = 0x7F
_REQUESTED = frozenset((int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP)))
"""Signals that end a process on request."""
_SLACK_NS = 2_000_000_000
"""How much later than its recording a process may seem to start, without a recorded tick: ticks are
coarse, and a machine that slept counts them on another clock."""

_SYSTEM_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read", 7: "poll", 23: "select", 35: "nanosleep", 42: "connect", 45: "recvfrom",
        47: "recvmsg", 61: "wait4", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait",
        247: "waitid", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
        74: "fsync", 1: "write", 449: "futex_waitv",
    },
    "aarch64": {
        22: "epoll_pwait", 63: "read", 64: "write", 72: "pselect6", 73: "ppoll", 82: "fsync",
        95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 203: "connect",
        207: "recvfrom", 212: "recvmsg", 242: "accept4", 260: "wait4", 449: "futex_waitv",
    },
}  # fmt: skip
"""Calls that a Python program waits in; others are shown by their number."""


class Life(StrEnum):
    """State of a process."""

    RUNNING = "running"
    """On a processor, or ready for one."""
    SLEEPING = "sleeping"
    """Waiting for something: a message, a lock, a clock, a disk."""
    STOPPED = "stopped"
    """By a signal or a debugger: it does nothing until it is continued."""
    ZOMBIE = "zombie"
    """It has ended, and its parent has not collected it yet."""
    DEAD = "dead"
    UNKNOWN = "unknown"


_GONE = frozenset((Life.ZOMBIE, Life.DEAD))


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The machine this program runs on."""

    host: str
    boot_id: str
    """Changes with every boot; empty when not known."""
    pid_namespace: int
    """0 when not known."""
    ticks_per_s: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process as the kernel shows it."""

    life: Life
    reason: str = ""
    """Why nothing is known, or how its end is known."""
    pid: int | None = None
    is_verified: bool = False
    """It started at the tick its recording names: certainly the same process."""
    is_traced: bool = False
    """Stopped by a debugger rather than by a signal."""
    exit_signal: int | None = None
    """What ended a zombie; 0 when it ended by itself, None when that is not known."""
    system_call: str = ""
    """What its main thread waits in: `futex`, `clock_nanosleep`; empty when not known."""

    @property
    def is_gone(self) -> bool:
        return self.life in _GONE

    @property
    def was_sent_off(self) -> bool:
        """Whether it is known to have ended by itself or on request, rather than by a crash or
        kill."""
        return self.exit_signal is not None and (
            self.exit_signal == 0 or self.exit_signal in _REQUESTED
        )

    @property
    def waits_for_no_lock(self) -> bool:
        """Whether its main thread is certainly not inside a wait of torch's host threads."""
        if not self.is_verified:
            return False
        return self.life is Life.RUNNING or (
            bool(self.system_call) and not self.system_call.startswith("futex")
        )


def this_machine() -> Here:
    try:
        boot_id = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        boot_id = ""
    try:
        namespace = os.stat(PROC / "self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return Here(
        host=socket.gethostname(),
        boot_id=boot_id,
        pid_namespace=namespace,
        ticks_per_s=os.sysconf("SC_CLK_TCK"),
    )


def is_this_boot(header: Mapping[str, object], here: Here) -> bool:
    """Whether a recording was made on this machine since its last boot."""
    clock_id = header.get("clock_id")
    if isinstance(clock_id, str) and clock_id and here.boot_id and clock_id != here.boot_id:
        return False
    return bool(here.host) and header.get("host") == here.host


def look_at_process(header: Mapping[str, object], here: Here, *, proc: Path = PROC) -> ProcessState:
    """The state of the process that wrote this journal header."""
    pid = header.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return _unknown("its recording does not name a process")
    if header.get("host") != here.host:
        return _unknown("it ran on another host", pid)
    clock_id = header.get("clock_id")
    if isinstance(clock_id, str) and clock_id and here.boot_id and clock_id != here.boot_id:
        text = "the machine was started again since"
        return ProcessState(life=Life.DEAD, reason=text, pid=pid)
    namespace = header.get("pid_namespace")
    if isinstance(namespace, int) and here.pid_namespace and namespace != here.pid_namespace:
        return _unknown("it ran in another container", pid)
    if not (proc / "self").exists():
        return _unknown("this system has no /proc", pid)
    try:
        stat = (proc / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessState(life=Life.DEAD, reason="no such process", pid=pid)
    except OSError as error:
        return _unknown(f"/proc cannot be read: {error.strerror}", pid)
    return _judge(header, here, pid, stat, proc)


def _judge(
    header: Mapping[str, object], here: Here, pid: int, stat: bytes, proc: Path
) -> ProcessState:
    # The name in brackets may hold anything, brackets and blanks included.
    fields = stat.rpartition(b")")[2].split()
    try:
        state = fields[_STATE_FIELD - 3].decode("ascii")
        start_ticks = int(fields[_START_TICKS_FIELD - 3])
    except (IndexError, ValueError):
        return _unknown("/proc has it in a form that is not known", pid)
    recorded = header.get("process_start_ticks")
    has_ticks = isinstance(recorded, int) and not isinstance(recorded, bool)
    if has_ticks:
        is_another = recorded != start_ticks
    else:
        start_ns = header.get("start_host_mono_ns")
        process_start_ns = start_ticks * 1_000_000_000 // here.ticks_per_s
        is_another = isinstance(start_ns, int) and process_start_ns > start_ns + _SLACK_NS
    if is_another:
        text = "its pid belongs to another process now"
        return ProcessState(life=Life.DEAD, reason=text, pid=pid)
    life = {"R": Life.RUNNING, "T": Life.STOPPED, "t": Life.STOPPED, "Z": Life.ZOMBIE}.get(
        state, Life.DEAD if state in "Xx" else Life.SLEEPING
    )
    return ProcessState(
        life=life,
        reason="in the kernel and not to be interrupted" if state == "D" else "",
        pid=pid,
        is_verified=has_ticks,
        is_traced=state == "t",
        exit_signal=_read_exit_signal(fields) if life is Life.ZOMBIE else None,
        system_call=_read_system_call(proc, pid) if life is Life.SLEEPING else "",
    )


def _read_exit_signal(fields: list[bytes]) -> int | None:
    """The signal in a zombie's exit status; None if the kernel hides it."""
    try:
        status = int(fields[_EXIT_STATUS_FIELD - 3])
    except (IndexError, ValueError):
        return None
    return status & _SIGNAL_BITS if status else None


def _read_system_call(proc: Path, pid: int) -> str:
    """The system call the main thread is in; empty if the kernel hides it."""
    try:
        code = int((proc / str(pid) / "syscall").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # ours to ask only for our own processes
        return ""
    if code < 0:
        return ""
    return _SYSTEM_CALLS.get(os.uname().machine, {}).get(code, f"system call {code}")


def _unknown(reason: str, pid: int | None = None) -> ProcessState:
    return ProcessState(life=Life.UNKNOWN, reason=reason, pid=pid)
