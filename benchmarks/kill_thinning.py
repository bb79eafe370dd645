"""The storm's mode `thinning`: a rank is killed while its old records are being thinned.

The child writes steps of ten operations and a record of phases, and a thread beside it thins all
of them into 1 MiB without rest, so that a kill finds every moment of a round. What must hold
afterwards is what the files themselves say: every acknowledged step and its phases are there where
their window is kept or not decided on; so is every acknowledged operation of a step that is called
whole, once and unchanged; sums cover exactly the rest.

In the modes `shipping` another process sends the run to an archive meanwhile, pass after pass. It
is killed too, with the rank, every fifth time. Whatever list the archive has then must be of a run
that can be read and has nothing wrong in it. A new uploader then sends the rest, and the archive,
every chunk of it checked, must have what the folder has.
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kill_recorder import Counts

from meshscope.errors import RunError, StorageError
from meshscope.store.read.columns import int64_column
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.read.table_files import lacks_segment, read_thinnings
from meshscope.store.read.whole_steps import mark_thinned
from meshscope.store.remote import storage
from meshscope.store.remote.mirror import mount
from meshscope.store.remote.upload import Uploader
from meshscope.store.retention_tables import THINNED_TABLES
from meshscope.store.write.writer import RankWriter

OPERATIONS_PER_STEP = 10
MAX_BYTES = 1 << 20
STEP_NS = 1_000_000
START_NS = 10**9


@dataclass(slots=True)
class Compared:
    num_acknowledged: int = 0
    num_read: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    num_rounds: int = 0
    num_step_rounds: int = 0


def operation_words(number: int) -> tuple[int, ...]:
    """The n-th operation; every word depends on it."""
    step, index = divmod(number, OPERATIONS_PER_STEP)
    at_ns = START_NS + step * STEP_NS + 1 + index * 1000
    return (1 | 1 << 8 | 3 << 48, number, at_ns, at_ns, at_ns + number % 977, number, step + 1)


def follow(run_dir: Path, acknowledged: Counts, *, mapped: bool) -> None:
    """Never returns: it is killed."""
    header = {"rank": 0, "world_size": 1, "start_unix_ns": 1, "start_host_mono_ns": 1}
    writer = RankWriter(
        run_dir, 0, header=header, mapped=mapped, max_bytes=MAX_BYTES, grace_seconds=0.02
    )
    threading.Thread(target=_thin, args=(writer,), daemon=True).start()
    step = 0
    while True:
        end_ns = START_NS + (step + 1) * STEP_NS
        for index in range(OPERATIONS_PER_STEP):
            number = step * OPERATIONS_PER_STEP + index
            writer.table("collectives").put(*operation_words(number))
            if mapped:
                acknowledged.set(0, 1, number + 1)
        stamps = (end_ns - 9, end_ns - 8, end_ns - 7, end_ns - 6, end_ns - 5, end_ns - 4)
        writer.table("phases").put(*stamps, 1 << 32 | 1)
        writer.table("steps").put(step, end_ns - STEP_NS, end_ns, 1, -1, 0, 0)
        step += 1
        if mapped:
            acknowledged.set(0, 0, step)
        elif step % 16 == 0:
            writer.flush()
            acknowledged.set(0, 1, step * OPERATIONS_PER_STEP)
            acknowledged.set(0, 0, step)
        time.sleep(0.0001)


def _thin(writer: RankWriter) -> None:
    assert writer.thinner is not None
    while True:
        if not writer.thinner.is_due():
            time.sleep(0.001)
            continue
        for rest_s in writer.thinner.work():
            time.sleep(rest_s)


def compare(recording: Recording, acknowledged: Counts) -> Compared:
    """What was lost although the files promise it, what is wrong."""
    num_steps, num_operations = acknowledged.get(0, 0), acknowledged.get(0, 1)
    num_wrong = count_wrong_operations(recording)
    number = int64_column(recording.read("collectives"), "sequence")
    steps = int64_column(recording.read("steps"), "step")
    of_step = np.arange(num_operations) // OPERATIONS_PER_STEP
    is_promised = ~recording.find_thinned(of_step)
    num_lost = int((is_promised & ~np.isin(np.arange(num_operations), number)).sum())
    thinnings = read_thinnings(recording.directory)
    sums, kept = recording.read("aggregates"), recording.read_raw("kept_windows")
    for name, own in (("steps", steps), ("phases", _phase_steps(recording))):
        thinned = thinnings.get(name)
        is_gone = mark_thinned(
            np.arange(num_steps),
            [] if thinned is None else [thinned],
            int64_column(kept, "first_step"),
            int64_column(kept, "ordinal"),
        )
        num_lost += int((~is_gone & ~np.isin(np.arange(num_steps), own)).sum())
        num_wrong += len(own) - len(np.unique(own))
        num_summed = int64_column(sums, "num_records")[sums["source"] == _source(name)].sum()
        per_step = 4 if name == "phases" else 1
        bound = 0 if thinned is None else thinned.first_undecided_step
        num_wrong += int(num_summed) != bound * per_step
    found = thinnings.get("collectives")
    bound = 0 if found is None else found.first_undecided_step * OPERATIONS_PER_STEP
    is_ours = sums["source"] == _source("collectives")
    summed = [int(int64_column(sums, name)[is_ours].sum()) for name in _SUMMED]
    numbers = np.arange(bound)
    expected = [bound, int((numbers % 977).sum()), int(numbers.sum())]
    return Compared(
        num_acknowledged=num_steps + num_operations,
        num_read=len(steps) + len(number),
        num_lost=num_lost,
        num_wrong=num_wrong + (summed != expected),
        num_rounds=0 if found is None else found.round,
        num_step_rounds=thinnings["steps"].round if thinnings.get("steps") else 0,
    )


_SUMMED = ("num_records", "total_ns", "total_bytes")


def _source(name: str) -> int:
    return THINNED_TABLES.index(name)


def _phase_steps(recording: Recording) -> np.ndarray:
    ends = int64_column(recording.read_raw("phases"), "backward_end_host_mono_ns")
    return (ends + 4 - START_NS) // STEP_NS - 1


def count_wrong_operations(recording: Recording) -> int:
    """Operations that are there twice or not as they were written."""
    columns = recording.read("collectives")
    number = int64_column(columns, "sequence")
    is_wrong = int64_column(columns, "size_bytes") != number
    is_wrong |= int64_column(columns, "step") != number // OPERATIONS_PER_STEP
    duration = int64_column(columns, "end_host_mono_ns") - int64_column(
        columns, "start_host_mono_ns"
    )
    is_wrong |= duration != number % 977
    return int(is_wrong.sum()) + len(number) - len(np.unique(number))


@contextmanager
def serve_storage() -> Iterator[str]:
    """An S3-compatible server on loopback, and a bucket on it."""
    import fsspec

    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    server = subprocess.Popen(
        [Path(sys.executable).parent / "moto_server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="testing",
        AWS_SECRET_ACCESS_KEY="testing",
        AWS_DEFAULT_REGION="us-east-1",
    )
    share_clients()
    try:
        for _ in range(300):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        fsspec.filesystem("s3").mkdir("storm")
        yield "s3://storm"
    finally:
        server.terminate()
        server.wait()


class Shipper:
    """A process that sends the run it is told of, pass after pass. It stays for many kills, as a
    client for object storage takes longer to make than most of these runs last."""

    def __init__(self, run_dir: Path, bucket: str) -> None:
        self._run_dir, self._bucket = run_dir, bucket
        self._shared = memoryview(mmap.mmap(-1, 4096)).cast("q")
        """What to send, from 1, or 0; and what it is sending."""
        self._pid = 0
        self.start()

    def start(self) -> None:
        self._shared[0] = self._shared[1] = 0
        self._pid = os.fork()
        if self._pid:
            return
        try:
            self._follow()
        finally:
            os._exit(1)

    def _follow(self) -> None:
        uploader: Uploader | None = None
        while True:
            number = self._shared[0]
            if number != self._shared[1] or uploader is None:
                uploader = Uploader(self._run_dir, self.url(number)) if number else None
                self._shared[1] = number
            elif (self._run_dir / "rank00000").exists():
                uploader.send(is_final=False)
            time.sleep(0.01)

    def url(self, number: int) -> str:
        return f"{self._bucket}/{number}"

    def send(self, number: int) -> None:
        self._shared[0] = number

    def rest(self) -> None:
        """Returns when its pass is over."""
        self._shared[0] = 0
        while self._shared[1]:
            time.sleep(0.001)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def share_clients() -> None:
    """One client for a process, whatever it opens."""
    open_new = storage._open_system
    made: dict[tuple[int, str], object] = {}

    def open_system(url: str) -> object:
        key = os.getpid(), url.partition("://")[0]
        if key not in made:
            made[key] = open_new(url)
        return made[key]

    storage._open_system = open_system


def open_archive(url: str) -> Recording | None:
    """The archive as its list is now; None where no rank is in it yet."""
    try:
        return read_archive(url)
    except (RunError, StorageError):
        return None


def read_archive(url: str) -> Recording:
    """Raises RunError and StorageError."""
    return open_run(mount(url)).last_attempt.ranks[0]


def send_rest(run_dir: Path, url: str) -> None:
    """As `meshscope archive` does it: by a process that knows nothing of the earlier ones."""
    Uploader(run_dir, url).send(is_final=True)


def empty(url: str) -> None:
    """Removes an archive, in one request."""
    import fsspec

    fsspec.filesystem("s3").rm(url, recursive=True)


def is_incomplete(recording: Recording) -> bool:
    """Whether a pass met a segment that was being renamed."""
    return any(lacks_segment(recording.directory, name) for name in THINNED_TABLES)
