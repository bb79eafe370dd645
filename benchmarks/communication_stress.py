"""100,000 operations on four ranks beside a busy Python thread: no deadlock, no record lost.

    python benchmarks/communication_stress.py                      # writes benchmarks/results/
    python benchmarks/communication_stress.py --operations 4000 --no-save

Four forked gloo ranks call blocking and non-blocking collectives, sends and receives and functional
collectives in several groups, recorded by meshscope, while a thread of each rank computes in Python
without pause: the worst case for whatever needs the interpreter lock, as every end that torch calls
back does. The operations are counted by the program itself, per kind and group; each count must be
that of the recording, each record must have ended well, and each sequence must be without a gap. A
parent without torch threads of its own watches that the ranks get on. The interpreter's switch
interval is left as it is; `--operations` is the total of all ranks.
"""

import argparse
import faulthandler
import json
import mmap
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import meshscope
from meshscope.core.operations import Kind, Outcome
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import open_run
from meshscope.store.write.writer import file_system_type

NUM_RANKS = 4
STUCK_SECONDS = 120.0
"""Ranks that call no operation for this long have deadlocked."""
GLOO_TIMEOUT = timedelta(seconds=300)

Counts = Counter[tuple[str, str]]
"""By description of the group and kind."""


class Progress:
    """Operations each rank has called, in memory the parent sees."""

    def __init__(self) -> None:
        self.counts = memoryview(mmap.mmap(-1, 4096)).cast("q")

    def total(self) -> int:
        return sum(self.counts[:NUM_RANKS])


class Program:
    """What one rank does. Every call of an operation is counted here, by hand."""

    def __init__(self, rank: int, progress: Progress) -> None:
        self.rank = rank
        self.counts: Counts = Counter()
        self._progress = progress
        self._num_called = 0
        self.world = dist.group.WORLD
        pairs = [dist.new_group([first, first + 1], group_desc="pair") for first in (0, 2)]
        crossing = [dist.new_group([first, first + 2], group_desc="cross") for first in (0, 1)]
        self.pair = pairs[rank // 2]
        self.cross = crossing[rank % 2]

    def count(self, group: Any, kind: str, num: int = 1) -> None:
        self.counts[group.group_desc, kind] += num
        self._num_called += num
        self._progress.counts[self.rank] = self._num_called

    def round(self, number: int) -> None:
        """The same on all ranks; each part is one way of calling an operation."""
        self._blocking(number)
        self._in_flight(number)
        self._messages(number)
        self._functional(number)
        self._other_ends(number)

    def _blocking(self, number: int) -> None:
        size = 1 + number % 64
        dist.all_reduce(torch.ones(size), group=self.pair)
        self.count(self.pair, "all_reduce")
        dist.broadcast(torch.ones(size), self.rank % 2, group=self.cross)
        self.count(self.cross, "broadcast")
        dist.all_gather_single(torch.empty(2 * size), torch.ones(size), group=self.pair)
        self.count(self.pair, "all_gather")
        if number % 8 == 0:
            dist.barrier()
            self.count(self.world, "barrier")

    def _in_flight(self, number: int) -> None:
        """Several at once, waited for in another order than they were called."""
        works = []
        for index in range(12):
            group = (self.pair, self.cross, self.world)[index % 3]
            works.append(dist.all_reduce(torch.ones(8 + index), group=group, async_op=True))
            self.count(group, "all_reduce")
        for index in range(4):
            group = (self.pair, self.cross)[index % 2]
            output, whole = torch.empty(4), torch.ones(8)
            works.append(dist.reduce_scatter_single(output, whole, group=group, async_op=True))
            self.count(group, "reduce_scatter")
        for work in works[::-1] if number % 2 else works:
            work.wait()

    def _messages(self, number: int) -> None:
        """Around a ring, with two tags at once, and a batch across."""
        right, left = (self.rank + 1) % NUM_RANKS, (self.rank - 1) % NUM_RANKS
        works = []
        for tag in (1, 2):
            works.append(dist.isend(torch.ones(16), right, tag=tag))
            works.append(dist.irecv(torch.empty(16), left, tag=tag))
        across = self.rank ^ 2
        batch = [
            dist.P2POp(dist.isend, torch.ones(4), across, self.cross),
            dist.P2POp(dist.irecv, torch.empty(4), across, self.cross),
        ]
        works += dist.batch_isend_irecv(batch)
        for kind in ("send", "recv"):
            self.count(self.world, kind, 2)
            self.count(self.cross, kind)
        for work in works:
            work.wait()

    def _functional(self, number: int) -> None:
        results = []
        for index in range(6):
            group = (self.pair, self.cross)[index % 2]
            results.append(functional.all_reduce(torch.ones(4 + index), "sum", group))
            self.count(group, "all_reduce")
        results.append(functional.all_gather_tensor(torch.ones(4), 0, self.pair))
        self.count(self.pair, "all_gather")
        for result in results[::-1] if number % 2 else results:
            assert float(result.sum()) > 0

    def _other_ends(self, number: int) -> None:
        """Handles that are asked, or exchanged for a future."""
        work = dist.all_reduce(torch.ones(3), group=self.pair, async_op=True)
        self.count(self.pair, "all_reduce")
        work.get_future().wait()
        work = dist.all_reduce(torch.ones(3), group=self.cross, async_op=True)
        self.count(self.cross, "all_reduce")
        while not work.is_completed():
            time.sleep(0.001)


def compute(stop: threading.Event) -> None:
    """Holds the interpreter lock as much as one thread can."""
    number = 0
    while not stop.is_set():
        for _ in range(10_000):
            number += 1


def run_rank(rank: int, folder: Path, progress: Progress, num_operations: int) -> None:
    """One forked process."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_RANK=str(rank))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=GLOO_TIMEOUT,
    )
    recorder = meshscope.start(folder / "run")
    program = Program(rank, progress)
    stop = threading.Event()
    busy = threading.Thread(target=compute, args=(stop,))
    busy.start()
    begin = time.monotonic()
    number = 0
    while sum(program.counts.values()) < num_operations // NUM_RANKS:
        program.round(number)
        number += 1
    wall_s = time.monotonic() - begin
    recorder.close()  # beside the busy thread, too
    stop.set()
    busy.join()
    counts = [[group, kind, count] for (group, kind), count in program.counts.items()]
    document = {"wall_s": wall_s, "counts": counts}
    (folder / f"rank{rank}.json").write_text(json.dumps(document), encoding="utf-8")
    dist.barrier()
    time.sleep(0.1)  # gloo of torch 2.13 may abort when a peer leaves at once


def fork_ranks(folder: Path, progress: Progress, num_operations: int) -> list[int]:
    """Process ids."""
    pids = []
    for rank in range(NUM_RANKS):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(rank, folder, progress, num_operations)
                code = 0
            except BaseException:  # noqa: BLE001 - the exit code tells, the parent goes on
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    return pids


def watch(pids: list[int], progress: Progress, num_operations: int) -> list[int]:
    """Exit codes; ranks that do not get on for long show their stacks and are killed."""
    exit_codes: dict[int, int] = {}
    last_total, last_time = 0, time.monotonic()
    next_line = last_time + 30
    while len(exit_codes) < len(pids):
        time.sleep(0.2)
        for pid in pids:
            if pid not in exit_codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    exit_codes[pid] = os.waitstatus_to_exitcode(status)
        total, now = progress.total(), time.monotonic()
        if total != last_total:
            last_total, last_time = total, now
        if now > next_line:
            next_line = now + 30
            print(f"  {total:,} of {num_operations:,} operations", flush=True)
        if now - last_time > STUCK_SECONDS:
            print(f"no operation for {STUCK_SECONDS:.0f} s after {total:,}: deadlock", flush=True)
            for pid in set(pids) - set(exit_codes):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(2)
            for pid in set(pids) - set(exit_codes):
                os.kill(pid, signal.SIGKILL)
            last_time = now
    return [exit_codes[pid] for pid in pids]


def compare(recording: Recording, counted: Counts) -> dict[str, Any]:
    """What one rank recorded beside what it counted; `problems` should be empty."""
    table = recording.read("collectives")
    kinds, groups, outcomes = (table[name].tolist() for name in ("kind", "group_id", "outcome"))
    found: Counts = Counter(
        (recording.groups[group].description, Kind(kind).label)
        for kind, group in zip(kinds, groups, strict=True)
    )
    problems = [
        f"{group} {kind}: called {counted[group, kind]}, recorded {found[group, kind]}"
        for group, kind in sorted(counted.keys() | found.keys())
        if counted[group, kind] != found[group, kind]
    ]
    by_outcome = Counter(Outcome(outcome).label for outcome in outcomes)
    if set(by_outcome) != {"ok"}:
        problems.append(f"outcomes: {dict(by_outcome)}")
    if (table["end_host_mono_ns"] < table["enqueue_host_mono_ns"]).any():
        problems.append("an operation ended before it was called")
    if len(np.unique(table["enqueue_host_mono_ns"])) != len(kinds):
        problems.append("two operations have the same key")
    problems += find_gaps(table)
    problems += [f"{problem.kind}: {problem.text}" for problem in recording.problems]
    closing = recording.closing or {}
    if closing.get("num_errors") != 0:
        problems.append(f"the recorder caught errors: {closing.get('errors')}")
    return {
        "num_counted": counted.total(),
        "num_recorded": len(kinds),
        "num_ended": by_outcome["ok"],
        "num_waits": len(recording.read("waits")["source"]),
        "problems": problems,
    }


def find_gaps(table: dict[str, Any]) -> list[str]:
    """Channels whose sequence numbers are not 0, 1, 2 …"""
    is_message = np.isin(table["kind"], (Kind.SEND, Kind.RECV))
    kind = np.where(is_message, table["kind"], 0)
    columns = [table["group_id"], kind, np.where(is_message, table["peer"], -1), table["tag"]]
    keys, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    problems = []
    for index, key in enumerate(keys.tolist()):
        numbers = np.sort(table["sequence"][inverse.ravel() == index])
        if not np.array_equal(numbers, np.arange(len(numbers))):
            problems.append(f"channel {key}: sequence numbers have gaps or repeats")
    return problems


def describe_machine(directory: Path) -> dict[str, object]:
    """What the numbers depend on; nothing that names the machine."""
    return {
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system_type(directory),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "meshscope": meshscope.__version__,
    }


def main() -> int:
    """Runs the ranks, compares, prints and saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=100_000, help="total of all ranks")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child of a process that used more hangs in its first product
    progress = Progress()
    ranks = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = describe_machine(folder)
        exit_codes = watch(
            fork_ranks(folder, progress, options.operations), progress, options.operations
        )
        if any(exit_codes):
            print(f"ranks ended with {exit_codes}")
            return 1
        attempt = open_run(folder / "run").last_attempt
        for rank in range(NUM_RANKS):
            document = json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
            counted: Counts = Counter({(g, k): count for g, k, count in document["counts"]})
            kinds: Counter[str] = Counter()
            for (_, kind), count in counted.items():
                kinds[kind] += count
            found = compare(attempt.ranks[rank], counted)
            ranks.append({"wall_s": round(document["wall_s"], 1), **found, "kinds": dict(kinds)})
    return report(ranks, machine, is_saved=not options.no_save)


def report(ranks: list[dict[str, Any]], machine: dict[str, object], *, is_saved: bool) -> int:
    """Prints the totals; 1 when anything is missing."""
    totals = {
        key: sum(rank[key] for rank in ranks)
        for key in ("num_counted", "num_recorded", "num_ended", "num_waits")
    }
    wall_s = max(rank["wall_s"] for rank in ranks)
    problems = [f"rank {n}: {text}" for n, rank in enumerate(ranks) for text in rank["problems"]]
    line = (
        f"{totals['num_counted']:,} operations on {NUM_RANKS} ranks beside a busy thread in each, "
        f"{totals['num_recorded']:,} recorded, {totals['num_ended']:,} with their end, "
        f"{len(problems)} problems; {wall_s:.0f} s, "
        f"{totals['num_counted'] / wall_s:.0f} operations a second"
    )
    print(line)
    for problem in problems[:20]:
        print("  " + problem)
    if is_saved:
        target = Path(__file__).parent / "results" / "communication_stress.json"
        document = {
            "summary": line,
            "machine": machine,
            "switch_interval_s": sys.getswitchinterval(),
            "num_ranks": NUM_RANKS,
            "wall_s": wall_s,
            **totals,
            "problems": problems,
            "ranks": ranks,
        }
        target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    is_whole = totals["num_counted"] == totals["num_recorded"] == totals["num_ended"]
    return int(bool(problems) or not is_whole)


if __name__ == "__main__":
    sys.exit(main())
