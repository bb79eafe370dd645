"""Real jobs are hurt at random moments, and `meshscope hang` is asked who is to blame.

    python benchmarks/hang_trials.py                # 100 trials and 70 more, writes its results
    python benchmarks/hang_trials.py --trials 10 --no-save
    python benchmarks/hang_trials.py --only 17      # one trial again, with its answer

Every trial forks 4 or 8 gloo ranks that record themselves and run a random mix of collectives on
all ranks and on subgroups, of sends and receives, blocking and not. At a random time a random fault
hits a random rank. A moment later `meshscope hang RUN --json` runs as a process of its own, and its
answer is compared with what the parent did and with what the ranks logged by themselves, a line
before and a line after each call: the rank, the operation in which others meet it (kind, group,
number), and for every other rank the operation it is in or failed in.

    kill      SIGKILL                              stop     SIGSTOP
    sleep     the rank sleeps in its own code      timeout  it sleeps until the others time out
    raise     an exception of its own              leave    its program ends early, without an error
    healthy   nothing happens: nothing must be found
    ddp-…     the same to a DistributedDataParallel model; its operations are torch's own, so only
              the rank and the kind are compared
"""

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

MAIN_FAULTS = ("kill", "stop", "sleep")
MORE_FAULTS = ("timeout", "raise", "leave", "healthy", "ddp-kill", "ddp-stop", "ddp-sleep")
EXPECTED_KINDS = {
    "kill": {"dead"},
    "stop": {"stopped"},
    "sleep": {"missing"},
    "timeout": {"missing"},
    "raise": {"dead"},
    "leave": {"missing"},
    "healthy": {"moving"},
    "ddp-kill": {"dead"},
    "ddp-stop": {"stopped"},
    "ddp-sleep": {"missing"},
}
AFTER_SECONDS = 0.1
"""Trials ask early, so waits count early."""
START_SECONDS = 60.0
NEVER_SECONDS = 120.0
SHORT_TIMEOUT_SECONDS = 1.5
GO, SLEEP, LEAVE, RAISE = 0, 1, 2, 3
PR_SET_PDEATHSIG = 1
VOID = ("an operation failed before the fault", "the job did not start")
"""Not the question's fault: such a trial is run again."""
RESULTS = Path(__file__).parent / "results" / "hang_trials.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One trial, known before it begins."""

    number: int
    seed: int
    world_size: int
    fault: str
    victim: int
    run_seconds: float
    ask_seconds: float
    """From the fault to the question."""
    survivor: str
    """What a rank does when an operation fails: `close` its recording, `exit` at once, `stay`."""


def make_plan(number: int, seed: int, faults: tuple[str, ...]) -> Plan:
    rng = random.Random(seed * 100_003 + number)
    world_size = rng.choice((4, 8))
    fault = faults[number % len(faults)]
    is_late = fault == "timeout"
    return Plan(
        number=number,
        seed=rng.randrange(1 << 30),
        world_size=world_size,
        fault=fault,
        victim=rng.randrange(world_size),
        run_seconds=rng.uniform(0.1, 0.8),
        ask_seconds=rng.uniform(2.5, 3.5) if is_late else rng.uniform(0.3, 1.5),
        survivor=rng.choice(("close", "exit", "stay")),
    )


# --- the job --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of the script; the same on all ranks."""

    name: str
    axis: str
    is_async: bool = False
    root: int = 0
    pair: tuple[int, int] = (0, 0)


def make_script(seed: int, world_size: int) -> Iterator[Call]:
    """What all ranks do, without end."""
    rng = random.Random(seed)
    axes = ("world", "tp", "dp") if world_size == 4 else ("world", "tp", "dp", "pp")
    while True:
        name = rng.choice(
            ("all_reduce", "all_reduce", "all_gather", "broadcast", "barrier", "pair", "reduce")
        )
        axis = "world" if name in ("barrier", "pair") else rng.choice(axes)
        first, second = rng.sample(range(world_size), 2)
        is_async = name in ("all_reduce", "all_gather", "pair") and rng.random() < 0.3
        yield Call(name, axis, is_async, rng.randrange(world_size), (first, second))


class Log:
    """A rank's own account, a line at a time, apart from the recorder."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **fields: object) -> None:
        line = {"event": event, "t": time.monotonic_ns(), **fields}
        os.write(self._fd, (json.dumps(line) + "\n").encode())


class Rank:
    """One process of the job."""

    def __init__(self, plan: Plan, rank: int, folder: Path, orders: memoryview) -> None:
        self.plan = plan
        self.rank = rank
        self.folder = folder
        self.orders = orders
        self.log = Log(folder / f"log{rank}.jsonl")
        self.numbers: Counter[tuple[object, ...]] = Counter()
        self.jitter = random.Random(plan.seed * 31 + rank)

    def run(self) -> None:
        import torch
        import torch.distributed as dist

        import meshscope

        plan = self.plan
        timeout_s = SHORT_TIMEOUT_SECONDS if plan.fault == "timeout" else NEVER_SECONDS
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=plan.world_size,
            timeout=timedelta(seconds=START_SECONDS),
        )
        layout = _layout(plan.world_size)
        self.groups: dict[str, Any] = {"world": None}
        self.members: dict[str, tuple[int, ...]] = {"world": tuple(range(plan.world_size))}
        for axis in ("tp", "dp", "pp"):
            if layout.degree(axis) < 2:
                continue
            for ranks in layout.groups(axis):
                group = dist.new_group(list(ranks), group_desc=f"mesh_{axis}")
                if self.rank in ranks:
                    self.groups[axis], self.members[axis] = group, ranks
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        for group in self.groups.values():
            if group is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
        self.recorder = meshscope.start(self.folder / "run", layout=layout, provenance=False)
        self.tensor = torch.ones(64)
        self.dist = dist
        if plan.fault.startswith("ddp-"):
            self.train()
        self._say_ready()
        script = make_script(plan.seed, plan.world_size)
        for step, call in enumerate(script):
            if step % 8 == 0:
                self.recorder.begin_step()
            if self._obey():
                return
            self._do(call)
            if self.jitter.random() < 0.5:
                time.sleep(self.jitter.random() * 0.002)

    def _say_ready(self) -> None:
        self.orders[self.plan.world_size + self.rank] = 1

    def train(self) -> None:
        """A model whose gradients torch reduces by itself, in backward."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        class Model(torch.nn.Module):
            def __init__(self, obey: Callable[[], bool]) -> None:
                super().__init__()
                self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
                self.obey = obey

            def forward(self, batch: Any) -> Any:
                self.obey()
                return self.layers(batch)

        model = DistributedDataParallel(Model(self._obey), bucket_cap_mb=0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.recorder.attach(model, optimizer)
        while True:
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.log.write("step")
            self._say_ready()

    def _obey(self) -> bool:
        order = self.orders[self.rank]
        if order == SLEEP:
            self.log.write("sleep")
            time.sleep(NEVER_SECONDS)
        elif order == RAISE:
            self.log.write("raise")
            raise ArithmeticError("the loss is not a number")
        return order == LEAVE

    def _do(self, call: Call) -> None:
        dist = self.dist
        if call.name == "pair":
            self._do_pair(call)
            return
        members = self.members[call.axis]
        group = self.groups[call.axis]
        root = members[call.root % len(members)]
        outputs = [self.tensor.clone() for _ in members] if call.name == "all_gather" else []
        calls = {
            "all_reduce": lambda: dist.all_reduce(
                self.tensor.clone(), group=group, async_op=call.is_async
            ),
            "all_gather": lambda: dist.all_gather(
                outputs, self.tensor, group=group, async_op=call.is_async
            ),
            "broadcast": lambda: dist.broadcast(self.tensor, root, group=group),
            "reduce": lambda: dist.reduce(self.tensor.clone(), root, group=group),
            "barrier": lambda: dist.barrier(group=group),
        }
        number = self._number(call.axis)
        about = {"kind": call.name, "axis": call.axis, "sequence": number, "peer": None}
        self._perform(call, about, calls[call.name])

    def _do_pair(self, call: Call) -> None:
        dist, (source, destination) = self.dist, call.pair
        if self.rank not in call.pair:
            return
        is_sender = self.rank == source
        peer = destination if is_sender else source
        kind = "send" if is_sender else "recv"
        about = {
            "kind": kind, "axis": "world", "sequence": self._number(kind, peer), "peer": peer,
        }  # fmt: skip
        tensor = self.tensor.clone()
        functions = {
            ("send", False): dist.send,
            ("recv", False): dist.recv,
            ("send", True): dist.isend,
            ("recv", True): dist.irecv,
        }
        self._perform(call, about, lambda: functions[kind, call.is_async](tensor, peer))

    def _number(self, *channel: object) -> int:
        number = self.numbers[channel]
        self.numbers[channel] += 1
        return number

    def _perform(self, call: Call, about: dict[str, object], function: Any) -> None:
        self.log.write("issue" if call.is_async else "call", **about)
        try:
            work = function()
            if call.is_async:
                if self.jitter.random() < 0.5:
                    time.sleep(self.jitter.random() * 0.004)
                if self._obey():
                    raise SystemExit
                self.log.write("wait", **about)
                work.wait()
        except RuntimeError as error:
            self.log.write("error", **about, text=str(error)[:200])
            raise
        self.log.write("done", **about)


def _layout(world_size: int) -> Any:
    from meshscope import Layout

    return Layout(dp=2, tp=2) if world_size == 4 else Layout(dp=2, tp=2, pp=2)


def run_child(plan: Plan, rank: int, folder: Path, orders: memoryview) -> None:
    """The whole life of a rank; never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sink = os.open(folder / f"stderr{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(sink, 2)
    job = Rank(plan, rank, folder, orders)
    code = 0
    try:
        job.run()
    except SystemExit:
        pass
    except ArithmeticError as error:
        code = 1
        from meshscope.capture import default

        sys.last_value = error  # where the interpreter leaves it at a program's end
        default._write_exception(job.recorder)
    except RuntimeError:
        code = 1
        if plan.survivor == "stay":
            time.sleep(NEVER_SECONDS)
        if plan.survivor == "exit":
            os._exit(1)
    except BaseException as error:  # noqa: BLE001 - a rank that fails by itself fails the trial
        job.log.write("broken", text=f"{type(error).__name__}: {error}")
        os._exit(3)
    job.recorder.close()
    job.log.write("closed")
    if code == 0:
        time.sleep(0.05)
    os._exit(code)


# --- the question ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    """What a trial came to."""

    plan: Plan
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    control_seconds: float = 0.0
    """What a Python that only imports click and numpy took right afterwards."""
    kind: str = ""
    named: list[int] = field(default_factory=list)
    operation: str = ""
    is_rank_right: bool = False
    is_kind_right: bool = False
    is_operation_right: bool = False
    asked_ns: int = 0
    num_ranks_compared: int = 0
    """Other ranks that were in an operation, or had failed in one, and did not move meanwhile."""
    num_ranks_right: int = 0
    wrong_ranks: list[str] = field(default_factory=list)
    age_ms: float | None = None
    num_entries: int = 0
    """Calls the ranks logged."""
    has_stack: bool = False
    problem: str = ""


def run_trial(plan: Plan, *, is_shown: bool = False) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="hang-trial-"))
    orders = memoryview(mmap.mmap(-1, 4096)).cast("q")
    result = Result(plan=plan)
    pids = []
    try:
        for rank in range(plan.world_size):
            pid = os.fork()
            if pid == 0:
                run_child(plan, rank, folder, orders)
            pids.append(pid)
        if not _wait_for_start(plan, orders):
            result.problem = "the job did not start"
            return result
        time.sleep(plan.run_seconds)
        hurt_ns = time.monotonic_ns()
        _hurt(plan, pids, orders)
        time.sleep(plan.ask_seconds)
        if _has_failed_before(plan, folder, hurt_ns):
            result.problem = "an operation failed before the fault"
            return result
        answer = _ask(folder / "run", result, is_shown=is_shown)
        _compare(plan, folder, answer, result)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if is_shown:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return result


def _has_failed_before(plan: Plan, folder: Path, time_ns: int) -> bool:
    """On a busy machine an operation may time out by itself: no trial."""
    return any(
        line["event"] == "error" and line["t"] < time_ns
        for lines in read_logs(plan, folder).values()
        for line in lines
    )


def _wait_for_start(plan: Plan, orders: memoryview) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if all(orders[plan.world_size + rank] for rank in range(plan.world_size)):
            return True
        time.sleep(0.01)
    return False


def _hurt(plan: Plan, pids: list[int], orders: memoryview) -> None:
    if plan.fault.endswith("kill"):
        os.kill(pids[plan.victim], signal.SIGKILL)
    elif plan.fault.endswith("stop"):
        os.kill(pids[plan.victim], signal.SIGSTOP)
    elif plan.fault != "healthy":
        orders[plan.victim] = {"leave": LEAVE, "raise": RAISE}.get(plan.fault, SLEEP)


def _children_cpu_seconds() -> float:
    """Of processes that have been waited for: the ranks of a trial are not among them yet."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _ask(run: Path, result: Result, *, is_shown: bool) -> dict[str, Any]:
    after = [] if result.plan.fault == "healthy" else ["--after", str(AFTER_SECONDS)]
    command = [sys.executable, "-m", "meshscope", "hang", str(run), "--all-ranks", *after]
    result.asked_ns, used = time.monotonic_ns(), _children_cpu_seconds()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    result.wall_seconds = (time.monotonic_ns() - result.asked_ns) / 1e9
    result.cpu_seconds = _children_cpu_seconds() - used
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import click, numpy"], check=False)
    result.control_seconds = time.monotonic() - begin
    if is_shown:
        subprocess.run(command, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        result.problem = f"exit {done.returncode}: {done.stderr[-500:]}"
        return {}
    if done.returncode not in (0, 5):
        result.problem = f"exit {done.returncode}"
    return found


# --- the comparison -------------------------------------------------------------------------------


def read_logs(plan: Plan, folder: Path) -> dict[int, list[dict[str, Any]]]:
    logs = {}
    for rank in range(plan.world_size):
        path = folder / f"log{rank}.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""  # it never got that far
        logs[rank] = [json.loads(line) for line in text.splitlines()]
    return logs


def find_position(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The operation a rank is blocked in, or the one that failed; None when it is in neither."""
    at = None
    for line in lines:
        if line["event"] in ("call", "wait"):
            at = line
        elif line["event"] == "done":
            at = None
        elif line["event"] == "error":
            return line
    return at


def _key(line: dict[str, Any]) -> tuple[object, ...]:
    return (line["kind"], line["axis"], line["sequence"], line["peer"])


def _key_of_answer(operation: dict[str, Any]) -> tuple[object, ...]:
    is_message = operation["kind"] in ("send", "recv")
    peer = operation["peer"] if is_message else None
    return (operation["kind"], operation["axis"], operation["sequence"], peer)


def _has_member(plan: Plan, line: dict[str, Any], rank: int, member: int) -> bool:
    if line["peer"] is not None:
        return member in (rank, line["peer"])
    if line["axis"] == "world":
        return True
    return member in _layout(plan.world_size).group_ranks(line["axis"], rank)


def _compare(plan: Plan, folder: Path, answer: dict[str, Any], result: Result) -> None:
    logs = read_logs(plan, folder)
    result.num_entries = sum(
        line["event"] in ("call", "issue") for ls in logs.values() for line in ls
    )
    broken = [line["text"] for ls in logs.values() for line in ls if line["event"] == "broken"]
    if broken:
        result.problem = f"a rank broke by itself: {broken[0]}"
    if not answer:
        return
    result.kind = answer["kind"]
    result.named = [culprit["rank"] for culprit in answer["culprits"]]
    result.age_ms = answer["age_ns"] / 1e6 if answer["age_ns"] is not None else None
    result.has_stack = any(culprit["stack"] for culprit in answer["culprits"])
    result.is_kind_right = result.kind in EXPECTED_KINDS[plan.fault]
    if plan.fault == "healthy":
        result.is_rank_right = result.named == []
        result.is_operation_right = True
        return
    result.is_rank_right = result.named == [plan.victim]
    if plan.fault.startswith("ddp-"):
        result.is_operation_right = answer["operation"] is not None
        return
    positions = {
        rank: find_position(lines)
        for rank, lines in logs.items()
        if rank != plan.victim and all(line["t"] < result.asked_ns for line in lines)
    }
    direct = [
        (rank, line)
        for rank, line in positions.items()
        if line is not None and _has_member(plan, line, rank, plan.victim)
    ]
    found = answer["operation"]
    if found is None:
        result.operation = "none"
        result.is_operation_right = not direct
    else:
        result.operation = f"{found['kind']} #{found['sequence']} {found['axis']}"
        result.is_operation_right = any(_is_same(found, rank, line) for rank, line in direct)
    held = {entry["rank"]: entry for entry in (*answer["cascade"], *answer["waiting"])}
    for rank, line in positions.items():
        if line is None:
            continue
        result.num_ranks_compared += 1
        entry = held.get(rank)
        answered = _key_of_answer(entry["operation"]) if entry is not None else None
        if answered == _key(line):
            result.num_ranks_right += 1
        else:
            result.wrong_ranks.append(f"rank {rank}: {line['event']} {_key(line)}, not {answered}")


def _is_same(found: dict[str, Any], rank: int, line: dict[str, Any]) -> bool:
    """Whether the named operation is the one this rank is in."""
    if line["peer"] is not None:
        ends = (rank, line["peer"]) if line["kind"] == "send" else (line["peer"], rank)
        return (found["source"], found["destination"], found["sequence"]) == (
            *ends,
            line["sequence"],
        )
    return (
        found["destination"] is None
        and (found["kind"], found["sequence"]) == (line["kind"], line["sequence"])
        and found["axis"] == line["axis"]
        and rank in found["ranks"]
    )


# --- the table ------------------------------------------------------------------------------------


def summarize(results: list[Result]) -> dict[str, object]:
    walls = sorted(result.wall_seconds for result in results)
    cpus = sorted(result.cpu_seconds for result in results)
    controls = sorted(result.control_seconds for result in results)
    rows = {}
    for fault in dict.fromkeys(result.plan.fault for result in results):
        of_fault = [result for result in results if result.plan.fault == fault]
        rows[fault] = {
            "trials": len(of_fault),
            "rank_right": sum(result.is_rank_right for result in of_fault),
            "kind_right": sum(result.is_kind_right for result in of_fault),
            "operation_right": sum(result.is_operation_right for result in of_fault),
            "ranks_compared": sum(result.num_ranks_compared for result in of_fault),
            "ranks_right": sum(result.num_ranks_right for result in of_fault),
            "with_stack": sum(result.has_stack for result in of_fault),
            "slowest_answer_s": round(max(result.wall_seconds for result in of_fault), 3),
        }
    return {
        "faults": rows,
        "answer_s": {
            "median": round(walls[len(walls) // 2], 3),
            "p95": round(walls[int(len(walls) * 0.95)], 3),
            "max": round(walls[-1], 3),
        },
        "control_s": {
            "median": round(controls[len(controls) // 2], 3),
            "max": round(controls[-1], 3),
        },
        "num_answers_within_1_s": sum(wall <= 1.0 for wall in walls),
        "answer_cpu_s": {
            "median": round(cpus[len(cpus) // 2], 3),
            "max": round(cpus[-1], 3),
        },
        "operations_logged": sum(result.num_entries for result in results),
    }


def print_table(summary: dict[str, Any]) -> None:
    print(f"{'fault':9} {'trials':>6} {'rank':>5} {'kind':>5} {'operation':>9} "
          f"{'other ranks':>12} {'stack':>5} {'slowest':>8}")  # fmt: skip
    for fault, row in summary["faults"].items():
        others = f"{row['ranks_right']}/{row['ranks_compared']}"
        print(
            f"{fault:9} {row['trials']:6} {row['rank_right']:5} {row['kind_right']:5} "
            f"{row['operation_right']:9} {others:>12} {row['with_stack']:5} "
            f"{row['slowest_answer_s']:6.2f} s"
        )
    answer, control = summary["answer_s"], summary["control_s"]
    print(
        f"answers: median {answer['median']:.2f} s, 95 % {answer['p95']:.2f} s, slowest "
        f"{answer['max']:.2f} s, process start included; {summary['answer_cpu_s']['median']:.2f} s "
        f"of CPU. Importing click and numpy alone: median {control['median']:.2f} s, slowest "
        f"{control['max']:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100, help="of kill, stop and sleep together")
    parser.add_argument("--more", type=int, default=70, help="of the other faults and of none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this trial alone and show the answer")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    import torch

    for name in (
        "torch._dynamo",
        "torch.nn.parallel",
        "torch.optim",
        "meshscope.capture.boot_hook",
    ):
        import_module(name)  # once, in the parent: ranks find it all there
    torch.set_num_threads(1)

    plans = [make_plan(number, options.seed, MAIN_FAULTS) for number in range(options.trials)]
    plans += [
        make_plan(options.trials + number, options.seed, MORE_FAULTS)
        for number in range(options.more)
    ]
    if options.only is not None:
        print(run_trial(plans[options.only], is_shown=True))
        return
    results = []
    for plan in plans:
        result = run_trial(plan)
        while result.problem in VOID:
            print(f"trial {plan.number} is repeated: {result.problem}", flush=True)
            result = run_trial(plan)
        results.append(result)
        is_right = result.is_rank_right and result.is_kind_right and result.is_operation_right
        is_right = is_right and result.num_ranks_right == result.num_ranks_compared
        if not is_right or result.problem:
            print(f"trial {plan.number} {plan.fault} of rank {plan.victim}/{plan.world_size}: "
                  f"{result.kind} {result.named} {result.operation}, others "
                  f"{result.num_ranks_right}/{result.num_ranks_compared} {result.problem} "
                  f"{'; '.join(result.wrong_ranks)}",
                  flush=True)  # fmt: skip
    summary = summarize(results)
    print_table(summary)
    if not options.no_save:
        document = {
            "summary": describe(summary),
            **summary,
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release().split("-")[0],
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            "seed": options.seed,
            "trials": [asdict(result) for result in results],
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def describe(summary: dict[str, Any]) -> str:
    """The line that texts quote."""
    rows = [summary["faults"][fault] for fault in MAIN_FAULTS if fault in summary["faults"]]
    total = sum(row["trials"] for row in rows)
    rank = sum(row["rank_right"] for row in rows)
    operation = sum(row["operation_right"] for row in rows)
    return (
        f"{total} faults, {rank} ranks named rightly, {operation} operations named rightly, "
        f"slowest answer {summary['answer_s']['max']:.2f} s"
    )


if __name__ == "__main__":
    main()
