"""Records training runs in which one thing is wrong, and the same runs without it.

    python -m tests.distributed.fault_matrix FOLDER [CASE …]

torch is imported once and ranks are forked. Each case leaves `FOLDER/<case>/faulty` and `clean`,
two recordings made close after each other; what the fault cost is the difference of their steps.
`fault_cases` has the cases, `fault_verdict` judges.
"""

import hashlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed.fault_verdict import Truth
from tests.distributed.fork_ranks import freeze_imports, import_everything, run_ranks
from tests.distributed.plain_torch_faults import LOOPS, Program
from tests.distributed.plain_torch_meshes import run_loop

from meshscope.core.config.train_config import RecordingConfig, TrainConfig
from meshscope.core.layout import Layout
from meshscope.engine.faults.links import COLLECTIVE_METHODS
from meshscope.engine.worker import run_worker


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link that takes longer: what is sent along `axis`, or between the ranks of `pair` only."""

    axis: str
    ms: float
    pair: tuple[int, ...] | None = None

    def is_slow(self, axis: str | None, ranks: Sequence[int]) -> bool:
        return axis == self.axis and (self.pair is None or set(self.pair) <= set(ranks))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run of the engine."""

    config: TrainConfig
    link: Link | None = None
    is_fair = False

    @property
    def num_ranks(self) -> int:
        return self.config.layout.world_size

    def record(self, run_dir: Path, rank: int) -> None:
        config = replace(self.config, recording=RecordingConfig(run_dir=run_dir))
        if self.link is not None:
            slow_down(self.link, config.layout)
        run_worker(config, device="cpu", stream=StringIO())


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A run of a program in plain torch."""

    program: Program
    link: Link | None = None

    @property
    def num_ranks(self) -> int:
        return self.program.num_ranks

    @property
    def is_fair(self) -> bool:
        """Whether ranks take turns on the cores: at real-time priority some would spin for ever."""
        return bool({"fair", "threads"} & set(self.program.options))

    def record(self, run_dir: Path, rank: int) -> None:
        if self.link is not None:
            assert self.program.layout is not None
            slow_down(self.link, self.program.layout)
        LOOPS.get(self.program.loop, run_loop)(self.program, run_dir, rank)


Recipe = Trained | Scripted


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, the run that has it and the run that has not."""

    name: str
    truth: Truth
    faulty: Recipe
    clean: Recipe | None
    """None where there is nothing to take away: the case is a healthy run."""
    is_timed: bool = True
    """Whether what it cost is compared: not of leaks and NaN."""
    also: tuple[Truth, ...] = ()
    """Of several faults: all but the first."""

    @property
    def truths(self) -> tuple[Truth, ...]:
        return (self.truth, *self.also)

    @property
    def is_held_out(self) -> bool:
        """Half of all cases, by their names; rules are not made by what is said of these."""
        return hashlib.sha256(self.name.encode()).digest()[0] < 137


# --- slow links ----------------------------------------------------------------------------------


def slow_down(link: Link, layout: Layout) -> None:
    """Lets what goes over a link end late, and nobody's call take longer: as a slow network would.

    The methods of `ProcessGroup` are replaced before the recorder looks at them. Operations on one
    link end one after the other, `ms` each; a message is late at its receiver. What C++ starts
    (DDP, FSDP2) is not seen.
    """
    queues: dict[object, ThreadPoolExecutor] = {}

    def delay(work: Any, tensors: Any, key: object) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()

        def finish() -> None:
            work.wait()
            time.sleep(link.ms / 1e3)
            future.set_result(tensors)

        queues.setdefault(key, ThreadPoolExecutor(1)).submit(finish)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def wrap(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        def wrapped(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            ranks = tuple(dist.get_process_group_ranks(group))
            if name == "recv":
                ranks = (ranks[args[1]], dist.get_rank())
            if not link.is_slow(find_axis(layout, ranks), ranks):
                return work
            return delay(work, args[0], ranks)

        return wrapped

    for name in list_delayed(link):
        setattr(dist.ProcessGroup, name, wrap(name))


def find_axis(layout: Layout, ranks: Sequence[int]) -> str | None:
    """Along which axis these ranks lie."""
    for axis in ("tp", "dp", "pp", "cp", "ep"):
        if layout.degree(axis) > 1 and set(ranks) <= set(layout.group_ranks(axis, ranks[0])):
            return axis
    return None


def list_delayed(link: Link) -> list[str]:
    """Messages along pp, collectives along the other axes."""
    names = ("recv",) if link.axis == "pp" else COLLECTIVE_METHODS
    return [name for name in names if name in vars(dist.ProcessGroup) and "barrier" not in name]


# --- recording -----------------------------------------------------------------------------------


def record_cases(cases: Sequence[Case], folder: Path, *, deadline_s: float = math.inf) -> None:
    """`FOLDER/<case>/faulty` and `clean` of each, without what the folder has already.

    Cases that differ from one clean run share it; it is recorded in the midst of theirs, so that
    what the machine does slowly is the same for all. Nothing is begun after `deadline_s` of
    `time.monotonic`: another call with the same folder goes on from there.
    """
    for clean, members in group_by_clean(cases):
        runs = [(case.faulty, folder / case.name / "faulty") for case in members]
        twin = find_twin(clean, members, folder)
        if clean is not None:
            runs.insert((len(runs) + 1) // 2, (clean, twin))
        for recipe, run_dir in runs:
            if time.monotonic() > deadline_s:
                return
            if not run_dir.exists():
                record(recipe, run_dir)
        for case in members if clean is not None else ():
            link = folder / case.name / "clean"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(Path("..", TWINS, twin.name))


def find_twin(clean: Recipe | None, members: Sequence[Case], folder: Path) -> Path:
    """Where the clean run of these cases is, or is to be: one recipe, one folder."""
    for case in members:
        if (folder / case.name / "clean").exists():
            return (folder / case.name / "clean").resolve()
    return folder / TWINS / hashlib.sha256(repr(clean).encode()).hexdigest()[:12]


def group_by_clean(cases: Sequence[Case]) -> list[tuple[Recipe | None, list[Case]]]:
    """In the order in which they come; healthy cases each for themselves."""
    groups: list[tuple[Recipe | None, list[Case]]] = []
    for case in cases:
        for clean, members in groups:
            if clean is not None and clean == case.clean:
                members.append(case)
                break
        else:
            groups.append((case.clean, [case]))
    return groups


def record(recipe: Recipe, run_dir: Path) -> None:
    """A run in which a rank failed is put aside: it counts as not recorded."""
    unfinished, failed = (run_dir.with_name(f"{run_dir.name}_{how}") for how in ("part", "failed"))
    for left in (unfinished, failed):
        shutil.rmtree(left, ignore_errors=True)

    def work(rank: int, num_ranks: int) -> None:
        recipe.record(unfinished, rank)

    begin_s = time.monotonic()
    with take_turns() if recipe.is_fair else nullcontext():
        codes = run_ranks(work, recipe.num_ranks, timeout_s=20.0, rank_timeout_s=30.0)
    name = "/".join(run_dir.parts[-2:])
    print(f"{name} {time.monotonic() - begin_s:.1f} s {codes}", file=sys.stderr, flush=True)
    if unfinished.exists():
        unfinished.rename(failed if any(codes) else run_dir)


TWINS = "twins"
"""The folder of clean runs, each once."""
ROUGH_MARK = "rough"
"""A file in FOLDER: ranks had to wait for their cores, so steps say less about faults."""


_FAIR_NICE = -15
"""Of ranks that take turns: others on the machine get a thirtieth of a core that a rank wants."""


def take_precedence() -> bool:
    """Ranks that sleep are woken at once, whoever else has the cores; whether this is allowed.

    In turns among themselves: gloo's threads spin now and then until another one has run. Ranks
    are one below this program (`fork_ranks`), which ends those that do not end.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    return os.sched_getscheduler(0) == os.SCHED_RR


@contextmanager
def take_turns() -> Iterator[None]:
    """Without real-time priority, for a while; before other programs where that is allowed."""
    policy, priority, nice = os.sched_getscheduler(0), os.sched_getparam(0), os.nice(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _FAIR_NICE)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.sched_setscheduler(0, policy, priority)


def main(folder: Path, names: Sequence[str]) -> None:
    """All cases, or those named."""
    from tests.distributed.fault_cases import list_cases

    import_everything()
    freeze_imports()
    if not take_precedence():
        (folder / ROUGH_MARK).touch()
    cases = list_cases()
    record_cases([cases[name] for name in names or cases], folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
