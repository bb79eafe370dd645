"""Run directories of stuck and dead jobs, written by the real writers, and real processes.

    job = Job(tmp_path / "run", world_size=4)
    job.rank(0).enters("all_reduce", job.world, ago_s=2)      # and is still in it
    job.rank(3).finishes("all_reduce", job.world, ago_s=3)

Times are seconds before now. A rank without a process is on another host, of which nothing is
known; `Processes` starts those whose state the kernel is to tell.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from meshscope.core.layout import Layout
from meshscope.core.operations import EndSource, Kind, Outcome, kind_from_label
from meshscope.hang.hang import Hang, diagnose_hang
from meshscope.hang.processes import this_machine
from meshscope.store.read.run import open_run
from meshscope.store.schema import MISSING, NoteCode, OperationFlag
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.in_flight import InFlightWriter, channel_code
from meshscope.store.write.now_file import NOW_NAME, NowFile
from meshscope.store.write.open_step import (
    FIRST_STAMP_WORD,
    PHASE_ORDER,
    STAMP_FACTOR,
    OpenStepWriter,
)
from meshscope.store.write.writer import RankWriter

CONNECTION_LOST = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
TIMED_OUT = "RuntimeError: Timed out waiting 5000ms for recv operation to complete"
BEGAN_AGO_S = 1000
_WAITER = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
_SLEEPER = "import time; time.sleep(600)"


def read_start_ticks(pid: int) -> int:
    """When a process began, as the kernel counts."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[19])


def read_state(pid: int) -> str:
    """`S`, `T`, `Z` …"""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()


def wait_for_state(pid: int, *states: str) -> None:
    deadline = time.monotonic() + 20
    while read_state(pid) not in states:
        assert time.monotonic() < deadline, f"{pid} is {read_state(pid)}, not one of {states}"
        time.sleep(0.005)


@dataclass(frozen=True)
class Process:
    """A process as its recorder would have noted it."""

    pid: int
    start_ticks: int


class Processes:
    """Children of the test; all are gone at its end."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, code: str, call: int | None = None) -> Process:
        """A child that runs `code`; with `call`, once its main thread waits in that call."""
        child = subprocess.Popen([sys.executable, "-S", "-c", code])
        self._children.append(child)
        deadline = time.monotonic() + 20
        while call is not None and time.monotonic() < deadline:
            text = Path(f"/proc/{child.pid}/syscall").read_text(encoding="ascii")
            if text.split()[0] == str(call):
                break
            time.sleep(0.005)
        return Process(child.pid, read_start_ticks(child.pid))

    def waiter(self) -> Process:
        """Waits for a lock, as a rank in an operation of gloo does."""
        return self.start(_WAITER, {"x86_64": 202, "aarch64": 98}[os.uname().machine])

    def sleeper(self) -> Process:
        """Sleeps by the clock: it is not in an operation."""
        return self.start(_SLEEPER, {"x86_64": 230, "aarch64": 115}[os.uname().machine])

    def stopped(self) -> Process:
        found = self.start(_SLEEPER)
        os.kill(found.pid, signal.SIGSTOP)
        wait_for_state(found.pid, "T")
        return found

    def zombie(self) -> Process:
        found = self.start(_SLEEPER)
        os.kill(found.pid, signal.SIGKILL)
        wait_for_state(found.pid, "Z")
        return found

    def killed(self) -> Process:
        found = self.zombie()
        self._children.pop().wait()
        return found

    def end(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


@dataclass(frozen=True)
class JobGroup:
    """A group by the name its maker would give it."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    backend: str = "gloo"


class Job:
    """A run directory in the making."""

    def __init__(
        self, path: Path, world_size: int | None = None, layout: Layout | None = None
    ) -> None:
        self.path = path
        self.layout = layout
        self.world_size = layout.world_size if layout else world_size or 1
        self.world = JobGroup("0", tuple(range(self.world_size)), "default_pg")
        self.now_ns = time.monotonic_ns()
        self._ranks: dict[int, JobRank] = {}

    def axis_group(self, axis: str, rank: int) -> JobGroup:
        """The group of a rank along an axis, as a DeviceMesh makes it."""
        assert self.layout is not None
        ranks = self.layout.group_ranks(axis, rank)
        return JobGroup(f"{axis}{ranks[0]}", ranks, f"mesh_{axis}")

    def rank(self, rank: int, process: Process | None = None, **header: object) -> "JobRank":
        """The rank's recording, made when it is first asked for."""
        found = self._ranks.get(rank)
        if found is None:
            found = self._ranks[rank] = JobRank(self, rank, process, header)
        return found

    def diagnose(self, after_s: float = 5.0, **options: object) -> Hang:
        """What is the matter with the job as it stands."""
        return diagnose_hang(
            open_run(self.path).last_attempt,
            this_machine(),
            after_ns=int(after_s * 1e9),
            **options,
        )


class JobRank:
    """One rank's recording."""

    def __init__(
        self, job: Job, rank: int, process: Process | None, header: dict[str, object]
    ) -> None:
        here = this_machine()
        self.job = job
        self.rank = rank
        self.start_ns = job.now_ns - BEGAN_AGO_S * 10**9
        self.writer = RankWriter(
            job.path,
            rank,
            header={
                "rank": rank,
                "world_size": job.world_size,
                "launch_id": "launch",
                "restart_count": 0,
                "host": socket.gethostname() if process else "elsewhere",
                "pid": process.pid if process else 12345,
                "process_start_ticks": process.start_ticks if process else 1,
                "clock_id": here.boot_id,
                "start_host_mono_ns": self.start_ns,
                "start_unix_ns": time.time_ns() - BEGAN_AGO_S * 10**9,
                "layout": job.layout.to_dict() if job.layout else None,
                **{name: value for name, value in header.items() if name != "mapped"},
            },
            mapped=header.get("mapped", True),
        )
        self._now = NowFile(self.writer.directory / NOW_NAME, mapped=True)
        self.in_flight = InFlightWriter(self._now, self.start_ns)
        self._ids: dict[JobGroup, int] = {}
        self._rows: dict[tuple[object, ...], int] = {}
        self._numbers: Counter[tuple[object, ...]] = Counter()
        self._stamps: OpenStepWriter | None = None

    @property
    def directory(self) -> Path:
        return self.writer.directory

    def at(self, ago_s: float) -> int:
        return self.job.now_ns - int(ago_s * 1e9)

    def knows(self, group: JobGroup) -> int:
        """Writes the group into the journal, once."""
        if group not in self._ids:
            self._ids[group] = len(self._ids)
            self.writer.journal.write(
                GROUP_KIND,
                id=self._ids[group],
                name=group.name,
                description=group.description,
                backend=group.backend,
                ranks=pack_ranks(group.ranks),
            )
        return self._ids[group]

    def enters(
        self,
        kind: str,
        group: JobGroup,
        ago_s: float,
        *,
        peer: int = MISSING,
        is_async: bool = False,
        size_bytes: int = 4096,
        tag: int = 0,
        phase: str = "",
    ) -> "JobRank":
        """Calls an operation that does not end."""
        self._enter(kind, group, ago_s, peer, is_async, size_bytes, tag, phase)
        return self

    def finishes(
        self,
        kind: str,
        group: JobGroup,
        ago_s: float,
        *,
        took_s: float = 0.002,
        peer: int = MISSING,
        tag: int = 0,
        is_async: bool = False,
        outcome: Outcome = Outcome.OK,
        message: str = "",
    ) -> "JobRank":
        """Calls an operation that ended `ago_s` seconds ago."""
        words, slot = self._enter(kind, group, ago_s + took_s, peer, is_async, 4096, tag, "")
        a, b, enqueue_ns, size_bytes, g = words
        end_ns = self.at(ago_s)
        code = a | outcome << 8 | EndSource.WAIT << 16
        self.writer.table("collectives").put(code, b, enqueue_ns, enqueue_ns, end_ns, size_bytes, g)
        self.in_flight.release(slot)
        if message:
            name_id = self.writer.name_id(message)
            self.writer.table("operation_notes").put(
                name_id | NoteCode.ERROR << 16, enqueue_ns, end_ns, 0, 0, 0, 0
            )
        return self

    def fails(
        self, kind: str, group: JobGroup, ago_s: float, message: str, took_s: float = 0.5
    ) -> "JobRank":
        """Calls an operation that ended in an error."""
        outcome = Outcome.TIMEOUT if "imed out" in message else Outcome.ERROR
        return self.finishes(kind, group, ago_s, took_s=took_s, outcome=outcome, message=message)

    def _enter(
        self,
        label: str,
        group: JobGroup,
        ago_s: float,
        peer: int,
        is_async: bool,
        size_bytes: int,
        tag: int,
        phase: str,
    ) -> tuple[tuple[int, int, int, int, int], int]:
        kind = kind_from_label(label)
        is_message = kind in (Kind.SEND, Kind.RECV)
        group_id = self.knows(group)
        direction = {Kind.SEND: 1, Kind.RECV: 2}.get(kind, 0)
        other = peer if is_message else MISSING
        if (group, direction, other) not in self._rows:
            code = channel_code(group_id, other, direction)
            self._rows[group, direction, other] = self.in_flight.open_channel(code)
        number = self._numbers[group, direction, other, tag]
        self._numbers[group, direction, other, tag] += 1
        flags = OperationFlag.ASYNC if is_async or is_message else 0
        phase_id = self.writer.name_id(phase) if phase else 0
        a = kind | flags << 24 | group_id << 32 | phase_id << 48
        b = number | (peer + 1) << 32
        g = 1 | 1 << 32 | tag << 56
        row = self._rows[group, direction, other]
        slot = self.in_flight.enter(row, number + 1, a, b, self.at(ago_s), size_bytes, g)
        return (a, b, self.at(ago_s), size_bytes, g), slot

    def is_in_phase(self, name: str, ago_s: float) -> "JobRank":
        """Begins a phase that does not end."""
        if self._stamps is None:
            self._stamps = OpenStepWriter(self._now, self.start_ns)
        word = FIRST_STAMP_WORD + 2 * PHASE_ORDER.index(name)
        self._stamps.words[word] = (self.at(ago_s) - self._stamps.epoch_ns) * STAMP_FACTOR
        return self

    def ends_step(self, step: int, ago_s: float) -> "JobRank":
        """Ends a step of one second."""
        end_ns = self.at(ago_s)
        self.writer.table("steps").put(step, end_ns - 10**9, end_ns, 1, MISSING, MISSING, 0)
        return self

    def closes(self, ago_s: float, exception: str = "") -> "JobRank":
        """Ends its program."""
        if exception:
            self.writer.journal.write("exit", exception=exception)
        self.in_flight.close()
        self.writer.close(end_host_mono_ns=self.at(ago_s))
        return self
