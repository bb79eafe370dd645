"""SIGKILL at a random moment, again and again: what had been recorded must be there afterwards.

    python benchmarks/kill_storm.py                 # 500 kills, writes benchmarks/results/
    python benchmarks/kill_storm.py --kills 20 --no-save
    .venv-cluster/bin/python benchmarks/kill_storm.py --kills 1000 --result kill_shipping \
        --modes shipping,shipping-append

A forked child records steps, spans and scalars through the real writer as fast as it can; in memory
shared with the parent it counts the records whose `put` had returned (for the append sink: whose
flush had returned). The parent kills it after a random time, opens the run, and compares every
acknowledged record with what it must be. Damage of any kind is a failure; an unfinished record
behind the last acknowledged one is not. In mode `recorder` the child is a whole recorder, and every
phase of the step that was not finished is compared too: see kill_recorder.py. In the modes
`thinning` old records are thinned meanwhile, in the modes `shipping` the run is also sent to an
S3-compatible server (moto's, which `make .venv-cluster/.installed` installs): see kill_thinning.py.
"""

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import kill_recorder
import kill_thinning
import numpy as np

from meshscope.errors import RunError, StorageError
from meshscope.store.read.columns import Columns, ProblemKind
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.write.writer import RankWriter, file_system_type

NUM_THREADS = 4
RECORDER_MODE = "recorder"
THINNING_MODES = ("thinning", "thinning-append")
SHIPPING_MODES = ("shipping", "shipping-append")
_LONGEST_SECONDS = {"opening": 0.008, "closing": 0.008} | dict.fromkeys(
    THINNING_MODES + SHIPPING_MODES, 1.0
)
"""Until the kill; 0.15 in other modes."""
MODES = (
    "mapped", "append", "mapped-threads", "append-threads", "opening", "closing", RECORDER_MODE,
    *THINNING_MODES
)  # fmt: skip
"""`opening` and `closing` kill within the first and the last millisecond of a recording."""
HARMLESS = {ProblemKind.TORN_TAIL}
TABLES = ("steps", "spans", "scalars")


@dataclass(slots=True)
class ModeResult:
    """What the kills of one mode came to."""

    mode: str
    num_kills: int = 0
    num_opened: int = 0
    num_acknowledged: int = 0
    num_read: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    num_damaged_runs: int = 0
    num_unacknowledged: int = 0
    """Read, but killed before they were acknowledged."""
    num_miscounted: int = 0
    """Kills after which more records were unacknowledged than threads can have in hand: the
    acknowledgements, not the store, would be wrong."""
    num_open_step_phases: int = 0
    """Acknowledged phases of steps that were not finished; mode `recorder` only."""
    num_rounds: int = 0
    """Of thinning that were finished before a kill; modes `thinning` and `shipping` only."""
    num_step_rounds: int = 0
    """The last of them that thinned steps, too."""
    num_archives: int = 0
    """With a list when the rank was killed, before the rest was sent; modes `shipping` only, like
    the next three."""
    num_shipper_kills: int = 0
    num_incomplete_archives: int = 0
    """Of these, lists of a pass that met a segment while it was renamed: the next pass has it."""
    num_archived_lost: int = 0
    """Records that the folder promises and the archive does not have after the last pass."""
    num_unopened_archives: int = 0
    """After the last pass, at first or for good: `problems` says why."""
    problems: list[str] = field(default_factory=list)


class Acknowledged:
    """Counters in memory that outlives the child: one per thread and table.

    Stored by a memoryview: one 8-byte store. `struct.pack_into` would zero the place first, and a
    kill in between would read as "nothing acknowledged" and hide a loss.
    """

    def __init__(self) -> None:
        self._counts = memoryview(mmap.mmap(-1, 4096)).cast("q")

    def set(self, thread: int, table: int, count: int) -> None:
        self._counts[thread * len(TABLES) + table] = count

    def get(self, thread: int, table: int) -> int:
        return self._counts[thread * len(TABLES) + table]


def record_words(table: str, thread: int, number: int) -> tuple[int, ...]:
    """What the n-th record of a thread must be: every word depends on both."""
    mixed = (number * 0x5851F42D4C957F2D + thread) & 0x7FFFFFFFFFFFFFFF
    if table == "steps":
        return (number * NUM_THREADS + thread, number, mixed, 1, mixed >> 7, -number, thread)
    if table == "spans":
        return (1 | thread << 32, number, mixed, mixed >> 3, number, 0, 0)
    return (64 + thread, number, mixed, mixed >> 5, thread, 0, 0)


def record(writer: RankWriter, acknowledged: Acknowledged, thread: int, *, flushes: bool) -> None:
    """Records without end."""
    tables = [writer.table(name) for name in TABLES]
    counts = [0] * len(TABLES)
    while True:
        for _ in range(8):
            for index, table in enumerate(tables):
                table.put(*record_words(TABLES[index], thread, counts[index]))
                counts[index] += 1
                if not flushes:
                    acknowledged.set(thread, index, counts[index])
        if flushes:
            before = list(counts)
            writer.flush()
            for index, count in enumerate(before):
                acknowledged.set(thread, index, count)


def child(run_dir: Path, mode: str, acknowledged: Acknowledged) -> None:
    """Never returns: it is killed, or ends by itself in mode `closing`."""
    header = {"rank": 0, "world_size": 1, "start_unix_ns": time.time_ns(), "start_host_mono_ns": 1}
    flushes = mode.startswith("append")
    writer = RankWriter(run_dir, 0, header=header, mapped=not flushes)
    num_threads = NUM_THREADS if mode.endswith("threads") else 1
    for thread in range(1, num_threads):
        threading.Thread(
            target=record,
            args=(writer, acknowledged, thread),
            kwargs={"flushes": flushes},
            daemon=True,
        ).start()
    if mode != "closing":
        record(writer, acknowledged, 0, flushes=flushes)
    for number in range(500):
        for index, table in enumerate(TABLES):
            writer.table(table).put(*record_words(table, 0, number))
            acknowledged.set(0, index, number + 1)
    writer.close(end_host_mono_ns=2)
    time.sleep(1)


def kill_once(
    directory: Path,
    mode: str,
    rng: random.Random,
    result: ModeResult,
    shipper: kill_thinning.Shipper | None = None,
    number: int = 1,
) -> None:
    """One child, one SIGKILL, one look at what is left. The n-th one of a storm."""
    run_dir = directory / "run"
    acknowledged = Acknowledged()
    script_seed = rng.randrange(1 << 30)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            if mode == RECORDER_MODE:
                sys.modules.pop("torch", None)  # the parent may be a test runner that has it
                kill_recorder.follow(run_dir, script_seed, acknowledged)
            if mode in THINNING_MODES + SHIPPING_MODES:
                kill_thinning.follow(run_dir, acknowledged, mapped=not mode.endswith("append"))
            child(run_dir, mode, acknowledged)
        finally:
            os._exit(1)
    if shipper is not None:
        shipper.send(number)
    time.sleep(rng.uniform(0.0, _LONGEST_SECONDS.get(mode, 0.15)))
    os.kill(pid, signal.SIGKILL)
    if shipper is not None and number % 5 == 0:
        shipper.kill()
        result.num_shipper_kills += 1
        shipper.start()
    elif shipper is not None:
        shipper.rest()
    os.waitpid(pid, 0)
    result.num_kills += 1
    total = sum(acknowledged.get(t, i) for t in range(NUM_THREADS) for i in range(len(TABLES)))
    has_begun = (run_dir / "rank00000" / "attempt000").exists()
    if not has_begun and total == 0:
        result.num_opened += 1  # nothing had been made: nothing to open, nothing lost
    elif mode in THINNING_MODES + SHIPPING_MODES:
        check_thinning(run_dir, acknowledged, result)
        if shipper is not None:
            check_archive(run_dir, shipper.url(number), acknowledged, result)
    elif mode == RECORDER_MODE:
        check_recorder(run_dir, script_seed, acknowledged, result)
    else:
        check_run(run_dir, acknowledged, result)
    shutil.rmtree(run_dir, ignore_errors=True)


def check_run(run_dir: Path, acknowledged: Acknowledged, result: ModeResult) -> None:
    """Compares what is read with what was acknowledged."""
    recording = open_run(run_dir).last_attempt.ranks[0]
    result.num_opened += 1
    is_mapped = not result.mode.startswith("append")
    for index, table in enumerate(TABLES):
        rows = split_by_thread(table, recording.read(table))
        for thread in range(NUM_THREADS):
            count = acknowledged.get(thread, index)
            numbers, words = rows.get(thread, (np.empty(0, dtype=np.int64), []))
            result.num_acknowledged += count
            result.num_read += len(numbers)
            result.num_unacknowledged += max(0, len(numbers) - count)
            result.num_miscounted += is_mapped and len(numbers) - count > 1
            result.num_lost += count - int(np.isin(np.arange(count), numbers).sum())
            if len(numbers):
                result.num_wrong += count_wrong(table, thread, numbers, words)
    note_damage(recording, result)


def check_recorder(
    run_dir: Path, script_seed: int, acknowledged: Acknowledged, result: ModeResult
) -> None:
    """The same for a recorder that followed a script."""
    recording = open_run(run_dir).last_attempt.ranks[0]
    result.num_opened += 1
    found = asdict(kill_recorder.compare(recording, script_seed, acknowledged))
    for name, value in found.items():
        setattr(result, name, getattr(result, name) + value)
    note_damage(recording, result)


def check_thinning(run_dir: Path, acknowledged: Acknowledged, result: ModeResult) -> None:
    """The same for a rank that was being thinned."""
    recording = open_run(run_dir).last_attempt.ranks[0]
    result.num_opened += 1
    found = asdict(kill_thinning.compare(recording, acknowledged))
    for name, value in found.items():
        setattr(result, name, getattr(result, name) + value)
    note_damage(recording, result)


def check_archive(run_dir: Path, url: str, acknowledged: Acknowledged, result: ModeResult) -> None:
    """What was in the archive when its shipper was killed, and what a new one made of it."""
    found = kill_thinning.open_archive(url)
    if found is not None:
        result.num_archives += 1
        # It has what its own list says, of an earlier moment: nothing was acknowledged for it.
        is_incomplete = kill_thinning.is_incomplete(found)
        result.num_incomplete_archives += is_incomplete
        result.num_wrong += kill_thinning.count_wrong_operations(found)
        if not is_incomplete:
            note_damage(found, result)
    kill_thinning.send_rest(run_dir, url)
    found = open_last_archive(url, result)
    if found is None:  # no loss where the rank was killed before it had anything to keep
        result.num_archived_lost += bool(acknowledged.get(0, 0) + acknowledged.get(0, 1))
        return
    compared = kill_thinning.compare(found, acknowledged)
    result.num_archived_lost += compared.num_lost
    if compared.num_lost:
        result.problems.append(f"{url}: {compared.num_lost} records lost")
    result.num_wrong += compared.num_wrong
    note_damage(found, result)
    kill_thinning.empty(url)


def open_last_archive(url: str, result: ModeResult) -> Recording | None:
    """The archive after its last pass. A storage that does not answer is asked once more, as a
    reader would do: that is not what the archive lacks."""
    for _ in range(2):
        try:
            return kill_thinning.read_archive(url)
        except (RunError, StorageError) as error:
            result.num_unopened_archives += 1
            result.problems.append(f"{url}, after its last pass: {error}")
    return None


def note_damage(recording: Recording, result: ModeResult) -> None:
    """Problems that a kill alone must not cause."""
    found = [problem for problem in recording.problems if problem.kind not in HARMLESS]
    result.num_damaged_runs += bool(found)
    result.problems += [f"{problem.kind}: {problem.text}" for problem in found]


def split_by_thread(table: str, columns: Columns) -> dict[int, tuple[np.ndarray, list[np.ndarray]]]:
    """Record numbers and the other columns, per thread that wrote them."""
    if table == "steps":
        step = columns["step"].astype(np.int64)
        threads, numbers = step % NUM_THREADS, columns["start_host_mono_ns"]
        others = [step, columns["end_host_mono_ns"], columns["recorder_ns"]]
    elif table == "spans":
        threads, numbers = columns["thread"].astype(np.int64), columns["start_host_mono_ns"]
        others = [columns["duration_ns"], columns["self_ns"], columns["microbatch"]]
    else:
        threads, numbers = columns["name_id"].astype(np.int64) - 64, columns["step"]
        others = [columns["time_host_mono_ns"], columns["value"].view(np.int64)]
    return {
        int(thread): (
            numbers[threads == thread].astype(np.int64),
            [other[threads == thread].astype(np.int64) for other in others],
        )
        for thread in np.unique(threads)
    }


def count_wrong(table: str, thread: int, numbers: np.ndarray, others: list[np.ndarray]) -> int:
    """Records that are there twice or not as they were written."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x5851F42D4C957F2D) + np.uint64(thread)
    mixed = (mixed & np.uint64(0x7FFFFFFFFFFFFFFF)).astype(np.int64)
    expected = {
        "steps": [numbers * NUM_THREADS + thread, mixed, mixed >> 7],
        "spans": [mixed, mixed >> 3, numbers],
        "scalars": [mixed, mixed >> 5],
    }[table]
    is_wrong = np.zeros(len(numbers), dtype=np.bool_)
    for found, wanted in zip(others, expected, strict=True):
        is_wrong |= found != wanted
    return int(is_wrong.sum()) + len(numbers) - len(np.unique(numbers))


def storm(
    directory: Path,
    num_kills: int,
    seed: int,
    modes: tuple[str, ...] = MODES,
    seconds: float = 1e9,
) -> list[ModeResult]:
    """Kills in all modes, in turn, until the time is up."""
    end = time.monotonic() + seconds
    rng = random.Random(seed)
    results = {mode: ModeResult(mode=mode) for mode in modes}
    with ExitStack() as stack:
        shipper = None
        if set(modes) & set(SHIPPING_MODES):
            bucket = stack.enter_context(kill_thinning.serve_storage())
            os.environ["MESHSCOPE_CACHE"] = str(directory / "cache")
            shipper = kill_thinning.Shipper(directory / "run", bucket)
            stack.callback(shipper.kill)
        for number in range(num_kills):
            if time.monotonic() > end:
                break
            mode = modes[number % len(modes)]
            own = shipper if mode in SHIPPING_MODES else None
            kill_once(directory, mode, rng, results[mode], own, number + 1)
            shutil.rmtree(directory / "cache", ignore_errors=True)
    return list(results.values())


def describe_machine(directory: Path) -> dict[str, object]:
    """What the numbers depend on; nothing that names the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "num_cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release().split("-")[0],
        "file_system": file_system_type(directory),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> int:
    """Runs the storm, prints a table, saves the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1e9, help="the most it may take")
    parser.add_argument("--seed", type=int, default=20261115)
    parser.add_argument("--modes", default=",".join(MODES), help="with commas")
    parser.add_argument("--result", default="kill_storm", help="name of the file of results")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        machine = describe_machine(Path(name))
        modes = tuple(options.modes.split(","))
        results = storm(Path(name), options.kills, options.seed, modes, options.seconds)
    columns = ("kills", "opened", "acknowledged", "read", "lost", "wrong", "damaged runs")
    print(f"{'mode':16}" + "".join(f"{column:>14}" for column in columns))
    for result in results:
        values = (
            result.num_kills, result.num_opened, result.num_acknowledged, result.num_read,
            result.num_lost, result.num_wrong, result.num_damaged_runs,
        )  # fmt: skip
        print(f"{result.mode:16}" + "".join(f"{value:>14,}" for value in values))
    failed = any(
        r.num_lost
        or r.num_archived_lost
        or r.num_wrong
        or r.num_damaged_runs
        or r.num_miscounted
        or r.num_opened != r.num_kills
        for r in results
    )
    kills = sum(result.num_kills for result in results)
    acknowledged = sum(result.num_acknowledged for result in results)
    line = (
        f"{kills} kills, {sum(r.num_opened for r in results)} runs opened, "
        f"{acknowledged:,} records acknowledged, {sum(r.num_lost for r in results)} lost, "
        f"{sum(r.num_archived_lost for r in results)} lost in archives, "
        f"{sum(r.num_wrong for r in results)} wrong, "
        f"{sum(r.num_damaged_runs for r in results)} runs with damage"
    )
    print(line)
    for problem in [text for result in results for text in result.problems][:10]:
        print("  " + problem)
    if not options.no_save:
        target = Path(__file__).parent / "results" / f"{options.result}.json"
        target.parent.mkdir(exist_ok=True)
        document = {
            "summary": line,
            "machine": machine,
            "seed": options.seed,
            "wall_s": round(time.monotonic() - begin, 1),
            "modes": [asdict(result) for result in results],
        }
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
