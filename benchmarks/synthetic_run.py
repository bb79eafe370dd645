"""Runs of many ranks that nobody trained: made up with numpy, in the exact bytes of the writer.

A job of dp × tp8: every step, tensor-parallel groups meet in forward and data-parallel groups at
the end of backward, and each transfer begins when the last rank has come. `Fault`s make ranks slow
from a step on, so what a tool has to find, when and at which price, is known. A rank-step is five
records: step, phases, a loss and two operations.

    job = Job(num_ranks=1024, faults=(Fault(rank=769),))
    write_run(folder, job, num_steps=10_000)          # in pieces: bounded memory, resumable
    LiveRun(folder, job).write_step()                 # through the real writer, one step at a time

`prove_equal` shows that both leave the same bytes.
"""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from store_load import START_MONO_NS, rank_header

from meshscope.core.layout import Layout
from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.files import read_file
from meshscope.store.read.run import open_run
from meshscope.store.schema import BUILTIN_NAMES, RECORD_BYTES, TABLES
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.journal import JOURNAL_NAME, pack_extent, pack_line
from meshscope.store.write.pack import PACK_NAME
from meshscope.store.write.table_file import (
    CHECK_SALT,
    CLOSE_OFFSET,
    HEADER_BYTES,
    pack_header,
    pack_record,
)
from meshscope.store.write.writer import RankWriter, attempt_dir_name, rank_dir_name

TP = 8
SLOW_RATIO = 1.5
DATA_NS, FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 2_000_000, 30_000_000, 60_000_000, 5_000_000
TP_TRANSFER_NS, DP_TRANSFER_NS, TAIL_NS, GAP_NS = 500_000, 4_000_000, 500_000, 1_000_000
NOISE = 0.03
"""Standard deviation of a phase's duration, as a share of it."""
WORDS_PER_STEP = {"steps": 1, "phases": 1, "scalars": 1, "collectives": 2}
_CHUNK_STEPS = 256
_LIVE_CHUNK_STEPS = 64
Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rank that takes longer in a phase, from a step on and until another one."""

    rank: int
    phase: str = "forward"
    """`data`, `forward` or `backward`."""
    ratio: float = SLOW_RATIO
    first_step: int = 0
    end_step: int = 1 << 60

    def slows(self, phase: str, step: int) -> bool:
        return phase == self.phase and self.first_step <= step < self.end_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of all ranks: [rank, step], ns from the start of the job."""

    begin: Times
    data_end: Times
    tp_arrival: Times
    tp_end: Times
    forward_end: Times
    dp_arrival: Times
    dp_end: Times
    end: Times


class Job:
    """Draws steps, piece by piece: `step` and `now_ns` are where the next piece begins."""

    def __init__(
        self,
        *,
        num_ranks: int,
        faults: tuple[Fault, ...] = (),
        seed: int = 0,
        time_scale: float = 1,
    ) -> None:
        """With `time_scale` 1 a healthy step takes about 109 ms."""
        self.num_ranks, self.faults = num_ranks, list(faults)
        self.step = 0
        self._scale = time_scale
        self._rng = np.random.default_rng(seed)
        self._now = np.zeros(num_ranks, dtype=np.int64)

    @property
    def layout(self) -> Layout:
        return Layout(dp=self.num_ranks // TP, tp=TP)

    @property
    def end_ns(self) -> int:
        """When the last drawn step ended."""
        return int(self._now.max())

    def draw(self, num_steps: int) -> Moments:
        """The next steps. Every moment follows from drawn durations and from who waits."""
        num_ranks, scale = self.num_ranks, self._scale
        made = {name: np.empty((num_ranks, num_steps), np.int64) for name in Moments.__slots__}
        now = self._now
        for index in range(num_steps):
            noise = self._rng.lognormal(0.0, NOISE, (4, num_ranks))
            slow = {phase: self._slow(phase) for phase in ("data", "forward", "backward")}

            def take(base_ns: float, row: int, phase: str) -> Times:
                return (base_ns * scale * noise[row] * slow[phase]).astype(np.int64)  # noqa: B023

            at = {"begin": now}
            at["data_end"] = now + take(DATA_NS, 0, "data")
            at["tp_arrival"] = at["data_end"] + take(FORWARD_NS / 2, 1, "forward")
            last_tp = at["tp_arrival"].reshape(-1, TP).max(axis=1)
            at["tp_end"] = np.repeat(last_tp + int(TP_TRANSFER_NS * scale), TP)
            at["forward_end"] = at["tp_end"] + take(FORWARD_NS / 2, 2, "forward")
            at["dp_arrival"] = at["forward_end"] + take(BACKWARD_NS, 3, "backward")
            last_dp = at["dp_arrival"].reshape(-1, TP).max(axis=0)
            at["dp_end"] = np.tile(last_dp + int(DP_TRANSFER_NS * scale), num_ranks // TP)
            at["end"] = at["dp_end"] + int((OPTIMIZER_NS + TAIL_NS) * scale)
            for name, values in at.items():
                made[name][:, index] = values
            now = at["end"] + int(GAP_NS * scale)
            self.step += 1
        self._now = now
        return Moments(**made)

    def _slow(self, phase: str) -> npt.NDArray[np.float64]:
        slow = np.ones(self.num_ranks)
        for fault in self.faults:
            if fault.slows(phase, self.step):
                slow[fault.rank] *= fault.ratio
        return slow


def table_words(moments: Moments, rank: int, first_step: int = 0) -> dict[str, Int64s]:
    """Seven payload words per record, per table."""
    at = {name: getattr(moments, name)[rank] + START_MONO_NS for name in Moments.__slots__}
    count = len(at["begin"])
    number = np.arange(first_step, first_step + count)
    steps = np.zeros((count, 7), dtype=np.int64)
    steps[:, 0], steps[:, 1], steps[:, 2], steps[:, 3] = number, at["begin"], at["end"], 1
    steps[:, 4] = np.where(number % 16 == 0, 9_000, -1)
    steps[:, 5] = 4096
    optimizer_ns = np.minimum(at["end"] - at["dp_end"], OPTIMIZER_NS)
    phases = np.stack(
        [
            at["begin"],
            at["data_end"],
            at["data_end"],
            at["forward_end"],
            at["forward_end"],
            at["dp_end"],
            optimizer_ns,
        ],
        axis=1,
    )
    scalars = np.zeros((count, 7), dtype=np.int64)
    scalars[:, 0], scalars[:, 1], scalars[:, 2], scalars[:, 4] = 64, number, at["end"] - 500, -1
    noise = np.random.default_rng((rank, first_step)).normal(0, 0.1, count)
    scalars[:, 3] = (2.0 + 1.0 / (1.0 + number / 2000) + noise).view(np.int64)
    operations = np.stack(
        [
            operation_words(number, 0, "forward", at["tp_arrival"], at["tp_end"], 1 << 20),
            operation_words(number, 1, "backward", at["dp_arrival"], at["dp_end"], 1 << 26),
        ],
        axis=1,
    )
    return {
        "steps": steps,
        "phases": phases.astype(np.int64),
        "scalars": scalars,
        "collectives": operations.reshape(-1, 7),
    }


def operation_words(
    number: Times, group: int, phase: str, arrival: Times, end: Times, size_bytes: int
) -> Int64s:
    """One all-reduce per step that held its caller up."""
    head = Kind.ALL_REDUCE | Outcome.OK << 8 | EndSource.WAIT << 16 | group << 32
    words = np.zeros((len(number), 7), dtype=np.int64)
    words[:, 0] = head | BUILTIN_NAMES[phase] << 48
    words[:, 1] = number
    words[:, 2] = words[:, 3] = arrival
    words[:, 4], words[:, 5] = end, size_bytes
    words[:, 6] = number + 1 | 1 << 32 | DTYPES.index("float32") << 48
    return words


# --- files ----------------------------------------------------------------------------------------


def open_writer(run_dir: Path, job: Job, rank: int, **header: object) -> RankWriter:
    """Manifest, header, names and groups, by the real writer."""
    fields = {**rank_header(rank, job.num_ranks), "layout": job.layout.to_dict(), **header}
    writer = RankWriter(run_dir, rank, header=fields, mapped=True)
    writer.name_id("loss")
    tp_ranks = range(rank - rank % TP, rank - rank % TP + TP)
    groups = (("tp", tp_ranks), ("dp", range(rank % TP, job.num_ranks, TP)))
    for number, (name, ranks) in enumerate(groups):
        writer.journal.write(
            GROUP_KIND,
            id=number,
            name=f"{name}{ranks[0]}",
            description=f"mesh_{name}",
            backend="nccl",
            ranks=pack_ranks(tuple(ranks)),
        )
    return writer


def write_run(
    run_dir: Path, job: Job, num_steps: int, *, chunk_steps: int = _CHUNK_STEPS, **header: object
) -> None:
    """A finished run of that many steps."""
    written = append_steps(run_dir, job, num_steps, chunk_steps=chunk_steps, **header)
    close_run(run_dir, job, max(written))


def append_steps(
    run_dir: Path, job: Job, num_steps: int, *, chunk_steps: int = _CHUNK_STEPS, **header: object
) -> Iterator[int]:
    """Writes a run piece by piece; gives the number of steps that are written."""
    first_of_job = job.step
    if not first_of_job:
        for rank in range(job.num_ranks):
            open_writer(run_dir, job, rank, **header).disarm()
            begin_files(rank_folder(run_dir, rank), rank)
    while (done := job.step - first_of_job) < num_steps:
        first = job.step
        moments = job.draw(min(chunk_steps, num_steps - done))
        for rank in range(job.num_ranks):
            folder = rank_folder(run_dir, rank)
            for name, words in table_words(moments, rank, first).items():
                slot = first * WORDS_PER_STEP[name]
                append_records(folder / f"{name}.tbl", words, slot)
        yield job.step


def begin_files(folder: Path, rank: int) -> None:
    """A file per table, as of schema version 1: many ranks' files grow in turn, one open at a
    time."""
    for name in WORDS_PER_STEP:
        fields = {"schema_version": 1, "rank": rank, "attempt": 0, "sink": "append"}
        (folder / f"{name}.tbl").write_bytes(pack_header(TABLES[name], fields))


def rank_folder(run_dir: Path, rank: int) -> Path:
    return run_dir / rank_dir_name(rank) / attempt_dir_name(0)


def append_records(path: Path, payload: Int64s, first_slot: int) -> None:
    """Records at their place, as the writer puts them there."""
    records = np.empty((len(payload), 8), dtype=np.uint64)
    records[:, 1:] = payload.view(np.uint64)
    slots = np.arange(first_slot + 1, first_slot + len(payload) + 1, dtype=np.uint64)
    records[:, 0] = slots * np.uint64(CHECK_SALT)
    for word in range(1, 8):  # column by column: sums along short rows are slow
        records[:, 0] += records[:, word]
    file = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(file, records.astype("<u8", copy=False), HEADER_BYTES + first_slot * RECORD_BYTES)
    finally:
        os.close(file)


def close_run(run_dir: Path, job: Job, num_steps: int) -> None:
    """Every rank's end: the tables' closing slots and the journal's closing line."""
    for rank in range(job.num_ranks):
        folder = rank_folder(run_dir, rank)
        for name, per_step in WORDS_PER_STEP.items():
            path, count = folder / f"{name}.tbl", num_steps * per_step
            page = bytearray(pack_header(TABLES[name], {"rank": rank, "attempt": 0}))
            slot = (count, 0, time.monotonic_ns(), 0, 0, 0, 0)
            page[CLOSE_OFFSET:] = pack_record(CLOSE_OFFSET, slot)
            with path.open("r+b") as file:
                file.seek(CLOSE_OFFSET)
                file.write(page[CLOSE_OFFSET:])
            os.truncate(path, HEADER_BYTES + count * RECORD_BYTES)
        closing = {"end_host_mono_ns": job.end_ns + START_MONO_NS, "num_errors": 0, "errors": {}}
        line = pack_line(json.dumps({"kind": "close", **closing}).encode())
        with (folder / JOURNAL_NAME).open("r+b") as journal:
            journal.seek(0, os.SEEK_END)
            journal.write(line)
            size = journal.tell()
            journal.seek(0)
            journal.write(pack_extent(size))


class LiveRun:
    """Writers of all ranks: every record goes through `RankWriter`, at its moment."""

    def __init__(self, run_dir: Path, job: Job) -> None:
        self.job = job
        self._words: list[dict[str, list[list[int]]]] = []
        self._at = _LIVE_CHUNK_STEPS
        start_unix_ns = time.time_ns()
        self.writers = [
            open_writer(run_dir, job, rank, start_unix_ns=start_unix_ns)
            for rank in range(job.num_ranks)
        ]
        self.step = 0

    def write_step(self) -> None:
        """One step of all ranks."""
        if self._at == _LIVE_CHUNK_STEPS:
            self._words, self._at = self._draw(), 0
        for writer, words in zip(self.writers, self._words, strict=True):
            for name, per_step in WORDS_PER_STEP.items():
                put = writer.table(name).put
                for record in words[name][self._at * per_step : (self._at + 1) * per_step]:
                    put(*record)
        self._at += 1
        self.step += 1

    def _draw(self) -> list[dict[str, list[list[int]]]]:
        first, moments = self.job.step, self.job.draw(_LIVE_CHUNK_STEPS)
        return [
            {name: words.tolist() for name, words in table_words(moments, rank, first).items()}
            for rank in range(self.job.num_ranks)
        ]

    def close(self) -> None:
        end = self.job.end_ns + START_MONO_NS
        for writer in self.writers:
            writer.close(end_host_mono_ns=end, num_errors=0, errors={})


# --- proof ----------------------------------------------------------------------------------------


def prove_equal(directory: Path) -> None:
    """The fast way and the real writer leave the same bytes (time stamps in the header aside)."""
    num_ranks, num_steps = 2 * TP, _LIVE_CHUNK_STEPS
    live = LiveRun(directory / "real", Job(num_ranks=num_ranks, faults=(Fault(rank=3),)))
    for _ in range(num_steps):
        live.write_step()
    live.close()
    job = Job(num_ranks=num_ranks, faults=(Fault(rank=3),))
    write_run(directory / "fast", job, num_steps)
    for name in WORDS_PER_STEP:
        # The fast way writes files of schema version 1, one per table.
        real = read_file(rank_folder(directory / "real", 3) / PACK_NAME / f"{name}.tbl")
        fast = read_file(rank_folder(directory / "fast", 3) / f"{name}.tbl")
        if real[HEADER_BYTES : len(fast)] != fast[HEADER_BYTES:]:
            raise SystemExit(f"{name}: the generated bytes are not what the writer leaves")
    recording = open_run(directory / "fast").last_attempt.ranks[3]
    for name in WORDS_PER_STEP:
        recording.read(name)
    if recording.problems or recording.closing is None:
        raise SystemExit(f"generated run has problems: {recording.problems}")


def describe_machine() -> dict[str, object]:
    """What the numbers depend on; nothing that names the machine."""
    return {
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("numpy", "meshscope")},
    }
