"""Starts jobs of real NCCL ranks, also where there are fewer GPUs than ranks, for `nccl_*.py`.

A script calls `run_jobs` with tasks; for each number of ranks one job is started, whose processes
are the same script again and call `serve_rank`. A job does its tasks one after the other in the
same processes, because starting one costs 12 seconds. What rank 0 returns for a task is written to
the output at once, so that a time limit loses one task at most; a task that fails is written as
failed, and a new job does the rest. `--resume FILE` takes over what FILE has.

On a machine with fewer GPUs than ranks the ranks share a GPU: MPS runs their kernels side by side,
and each has another NCCL_HOSTID, without which NCCL refuses two ranks on one device. Each rank has
its part of the multiprocessors to itself, as if it had a smaller GPU of its own: otherwise a rank
computes faster while another is late, and a fault costs less than it would on a cluster. (Memory
and its bandwidth stay shared; `--whole-device` lets all ranks use all multiprocessors.) Each rank
also has cores of its own. On a machine with enough GPUs each rank has one, and none of this is
set. `--device cpu` runs tiny models on gloo, to try the scripts where there is no GPU.
"""

import argparse
import gc
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshscope

FOLDER_VARIABLE = "NCCL_BENCH_FOLDER"
TASKS_VARIABLE = "NCCL_BENCH_TASKS"
CURRENT_FILE = "current"
MACHINE_FILE = "machine.json"
FAILED_KEY = "failed"
POLL_S = 0.1
MEET_POLL_S = 5e-5
LEAVE_S = 20.0
"""How long ranks may take to end after the first has ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something that ranks do together; its name is the key of its result."""

    name: str
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among the ranks of its job."""

    rank: int
    num_ranks: int
    device: torch.device
    folder: Path
    """The job's own, the same on all ranks."""
    store: Any
    """None for one rank."""
    turns: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of meetings."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """All ranks and their devices are here at about the same time. Not by torch.distributed:
        a recorder would see it, and so would a trace of kernels."""
        self.synchronize()
        if self.num_ranks > 1:
            key = f"meet{next(self.turns)}"
            self.store.add(key, 1)
            while self.store.add(key, 0) < self.num_ranks:
                time.sleep(MEET_POLL_S)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank; it goes through JSON."""
        if self.num_ranks == 1:
            return [value]
        turn = next(self.turns)
        self.store.set(f"gather{turn}-{self.rank}", json.dumps(value))
        keys = [f"gather{turn}-{rank}" for rank in range(self.num_ranks)]
        return [json.loads(self.store.get(key)) for key in keys]

    def clean_up(self) -> None:
        """Gives back what the last task held."""
        gc.collect()
        if "torch._inductor.compile_fx" in sys.modules:  # something was compiled
            torch._dynamo.reset()
        if self.is_cuda:
            torch.cuda.empty_cache()
        self.meet()


Serve = Callable[[Place, str], Mapping[str, Any]]
"""Does a task by its name on every rank; rank 0's result is kept."""
Show = Callable[[str, dict[str, Any]], None]
"""Prints a task's result, and may add to it before it is written."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all scripts have."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=(), help="names, or how they begin")
    parser.add_argument("--output", type=Path, help="results, written after every program")
    parser.add_argument("--resume", type=Path, help="results; what they have is not done again")
    parser.add_argument(
        "--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS; 0: not set"
    )
    parser.add_argument(
        "--whole-device", action="store_true", help="ranks that share a GPU share all of it"
    )
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all jobs together")
    parser.add_argument("--task-limit-s", type=float, default=150.0, help="of one program")


def choose(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The names that were asked for, or begin with what was asked for; all if nothing was."""
    wanted = [part for part in only if part not in names]
    return [
        name
        for name in names
        if not only or name in only or any(name.startswith(part) for part in wanted)
    ]


# --- launcher --------------------------------------------------------------------------------


def run_jobs(tasks: Sequence[Task], options: argparse.Namespace, show: Show) -> dict[str, Any]:
    """Runs all tasks and returns the results by name; each is shown as it comes."""
    results = Results(options)
    deadline = time.monotonic() + options.limit_s
    for num_ranks in sorted({task.num_ranks for task in tasks}):
        names = [task.name for task in tasks if task.num_ranks == num_ranks]
        while left := [name for name in names if name not in results.tasks]:
            if time.monotonic() >= deadline:
                print(f"no time left for {', '.join(left)}", flush=True)
                break
            job = Job(num_ranks, left, options, results, show)
            job.run(deadline)
    return results.tasks


class Results:
    """The output file: the machine, the settings, and what each task gave."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path | None = options.output
        self.tasks: dict[str, Any] = {}
        self.machine: dict[str, Any] = {}
        self.settings = {
            name: value if isinstance(value, int | float) else str(value)
            for name, value in vars(options).items()
            if name not in ("output", "resume", "only") and value is not None
        }
        if options.resume is not None and options.resume.exists():
            earlier = json.loads(options.resume.read_text(encoding="utf-8"))["programs"]
            self.tasks = {name: one for name, one in earlier.items() if FAILED_KEY not in one}

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.tasks[name] = result
        if self.path is not None:
            self.path.write_text(self._to_text(), encoding="utf-8")

    def _to_text(self) -> str:
        """A line for each task."""
        lines = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in self.tasks.items()]
        head = f'{{\n "machine": {json.dumps(self.machine)},\n'
        head += f' "settings": {json.dumps(self.settings)},\n "programs": {{\n'
        return head + ",\n".join(lines) + "\n }\n}\n"


class Job:
    """Processes that do tasks one after the other."""

    def __init__(
        self,
        num_ranks: int,
        names: Sequence[str],
        options: argparse.Namespace,
        results: Results,
        show: Show,
    ) -> None:
        self.num_ranks, self.names, self.options = num_ranks, names, options
        self.results, self.show = results, show
        self.folder = Path(tempfile.mkdtemp(prefix="nccl-bench-"))

    def run(self, deadline: float) -> None:
        begin = time.monotonic()
        print(f"a job of {self.num_ranks} ranks: {', '.join(self.names)}", flush=True)
        environment = self._make_environment()
        with running_mps(environment, self._is_shared()):
            # The script's own arguments: a rank has the options of the job.
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", *sys.argv],
                    env={**environment, **self._name_rank(rank)},
                )
                for rank in range(self.num_ranks)
            ]
            try:
                reason = self._watch(ranks, deadline)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        self._collect()
        if reason:
            self._note_failure(reason)
        print(f"the job took {time.monotonic() - begin:.0f} s", flush=True)

    def _watch(self, ranks: Sequence[subprocess.Popen], deadline: float) -> str:
        """Until all ranks have ended; why they did not end well, or nothing."""
        ended = None
        while True:
            codes = [rank.poll() for rank in ranks]
            if any(codes):
                return f"ranks ended with {codes}"
            now = time.monotonic()
            if None not in codes or (ended is not None and now > ended + LEAVE_S):
                return ""
            if 0 in codes and ended is None:
                ended = now
            if now >= deadline:
                return "no time left"
            if self._age_of_task() > self.options.task_limit_s:
                return f"took longer than {self.options.task_limit_s:.0f} s"
            self._collect()
            time.sleep(POLL_S)

    def _age_of_task(self) -> float:
        current = self.folder / CURRENT_FILE
        return time.time() - current.stat().st_mtime if current.exists() else 0.0

    def _collect(self) -> None:
        for name in self.names:
            path = self.folder / f"{name}.json"
            if name not in self.results.tasks and path.exists():
                machine = self.folder / MACHINE_FILE
                self.results.machine = json.loads(machine.read_text(encoding="utf-8"))
                result = json.loads(path.read_text(encoding="utf-8"))
                self.show(name, result)
                self.results.add(name, result)

    def _note_failure(self, reason: str) -> None:
        current = self.folder / CURRENT_FILE
        name = current.read_text(encoding="utf-8") if current.exists() else self.names[0]
        if name not in self.results.tasks:
            print(f"{name} failed: {reason}", flush=True)
            self.results.add(name, {FAILED_KEY: reason})

    def _is_shared(self) -> bool:
        return self.options.device == "cuda" and torch.cuda.device_count() < self.num_ranks

    def _make_environment(self) -> dict[str, str]:
        environment = dict(os.environ, WORLD_SIZE=str(self.num_ranks), MASTER_ADDR="127.0.0.1")
        environment["LOCAL_WORLD_SIZE"] = environment["WORLD_SIZE"]
        environment["MASTER_PORT"] = str(random.randint(20000, 40000))
        environment |= {FOLDER_VARIABLE: str(self.folder), TASKS_VARIABLE: ",".join(self.names)}
        sources = str(Path(__file__).parent.parent / "src")
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [sources, os.environ.get("PYTHONPATH")])
        )
        environment.setdefault("KINETO_LOG_LEVEL", "5")  # it prints a line for each window
        if self.num_ranks > 1 or self.options.device == "cpu":
            environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        if self._is_shared():
            environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            if not self.options.whole_device:
                percentage = str(100 * torch.cuda.device_count() // self.num_ranks)
                environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = percentage
        if self.options.connections:
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(self.options.connections)
        return environment

    def _name_rank(self, rank: int) -> dict[str, str]:
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return names | ({"NCCL_HOSTID": f"h{rank}"} if self._is_shared() else {})


@contextmanager
def running_mps(environment: dict[str, str], is_wanted: bool) -> Iterator[None]:  # noqa: FBT001
    """MPS for the processes started with `environment`, which is changed."""
    if not is_wanted:
        yield
        return
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        environment[name] = tempfile.mkdtemp(prefix="mps-")
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    try:
        yield
    finally:
        stop = ["nvidia-cuda-mps-control"]
        subprocess.run(stop, input=b"quit\n", env=environment, check=False)


# --- ranks -----------------------------------------------------------------------------------


def is_rank() -> bool:
    """Whether this process was started by `run_jobs`."""
    return FOLDER_VARIABLE in os.environ


def serve_rank(device: str, serve: Serve) -> None:
    """Does the job's tasks in this process, then ends it."""
    place = join(device)
    if place.is_cuda and torch.cuda.device_count() < place.num_ranks:
        take_cores(place)
    if place.rank == 0:
        write_whole(place.folder / MACHINE_FILE, json.dumps(describe_machine(place)))
    for name in os.environ[TASKS_VARIABLE].split(","):
        if place.rank == 0:
            (place.folder / CURRENT_FILE).write_text(name, encoding="utf-8")
        try:
            result = serve(place, name)
        except Exception:  # noqa: BLE001 - printed, and it ends the rank
            traceback.print_exc()
            # The others wait for this rank: the launcher must see at once that it is gone.
            sys.stderr.flush()
            os._exit(1)
        place.clean_up()
        if place.rank == 0:
            write_whole(place.folder / f"{name}.json", json.dumps(result))
    leave(place)


def take_cores(place: Place) -> None:
    """Ranks of one machine keep off each other's cores, as launchers bind them. A rank has more
    than two busy threads."""
    cores = sorted(os.sched_getaffinity(0))
    count = len(cores) // place.num_ranks
    if count >= 4:
        own = cores[place.rank * count : (place.rank + 1) * count]
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), own)


def join(device: str) -> Place:
    """Makes the process group; one rank has none."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cpu":
        torch.set_num_threads(1)
        found = torch.device("cpu")
    else:
        found = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(found)
        torch.zeros(1, device=found)  # a device mesh would choose a device that is not open yet
    store = None
    if num_ranks > 1:
        is_cuda = found.type == "cuda"
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=num_ranks,
            device_id=found if is_cuda else None,
        )
    folder = Path(os.environ[FOLDER_VARIABLE])
    return Place(rank=rank, num_ranks=num_ranks, device=found, folder=folder, store=store)


def leave(place: Place) -> None:
    """Ends without a word from NCCL about groups that tasks made."""
    place.meet()
    time.sleep(0.2)
    sys.stdout.flush()
    os._exit(0)


def write_whole(path: Path, text: str) -> None:
    """Readers see all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def describe_machine(place: Place) -> dict[str, Any]:
    """What the numbers were measured on; no names of machines. Asked in a rank, because it opens
    the device, which the launcher must not beside MPS."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "meshscope": meshscope.__version__,
        "cores": os.cpu_count(),
        "device": "cpu",
    }
    if place.is_cuda:
        facts["device"] = torch.cuda.get_device_name()
        facts["num_devices"] = torch.cuda.device_count()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts
