"""Real ranks on which things are made to go wrong; each writes down what it saw.

    python -m tests.distributed.engine_faults FOLDER

Leaves `FOLDER/<case>_<rank>.jsonl`, a line for each thing recorded, and `FOLDER/exits.json`, how
the ranks of each case ended.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.distributed.fork_ranks import import_everything, run_ranks

from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import build_schedule
from meshscope.engine.data_parallel.data_parallel import GradientReducer
from meshscope.engine.faults import FaultInjector, parse_fault
from meshscope.engine.model.timed_model import build_timed_stage
from meshscope.engine.pipeline.pipeline import ActionLog, PipelineExecutor

Job = Callable[[int, int], None]

CRASHES = {"SIGKILL": -9, "SIGSEGV": -11, "SIGABRT": -6, "exit exit_code=7": 1}
"""What `fork_ranks` hands back: 1 for whatever Python raises."""
HANG_SECONDS = 2
"""After which an alarm ends a rank that hangs, and peers give up waiting."""
DELAY_MS = 30
CONFIG = TimedModelConfig(num_layers=2, forward_ms=4.0, input_grad_ms=4.0, weight_grad_ms=4.0)


class FileLog:
    """Writes each fault to a file at once, so that it is there whatever comes next."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def fault(self, kind: str, **values: object) -> None:
        self.note(kind=kind, **values)

    def note(self, **values: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def make_injector(
    folder: Path, case: str, layout: Layout, *texts: str, attempt: int = 0
) -> tuple[FaultInjector, FileLog]:
    rank = dist.get_rank()
    log = FileLog(folder / f"{case}_{rank}.jsonl")
    log.note(kind="started")
    faults = [parse_fault(text) for text in texts]
    return FaultInjector(faults, rank, layout.coordinates(rank), attempt, log), log


def wait_until_started(folder: Path, case: str, num_ranks: int) -> None:
    """A rank still connecting its process group fails if its peer dies meanwhile. Files, not a
    collective: a rank may leave the last collective while its peer is still in it."""
    logs = [folder / f"{case}_{rank}.jsonl" for rank in range(num_ranks)]
    while not all(log.exists() for log in logs):
        time.sleep(0.005)


def run_crash(folder: Path, case: str, text: str, attempt: int = 0) -> Job:
    """Rank 1 is to die at step 2 of 4; ranks do not talk, so that the other one lives."""

    def job(rank: int, num_ranks: int) -> None:
        layout = Layout(dp=num_ranks)
        injector, log = make_injector(folder, case, layout, text, attempt=attempt)
        wait_until_started(folder, case, num_ranks)
        for step in range(4):
            injector.begin_step(step)
            with injector.phase("forward"):
                log.note(kind="forward", step=step)
        sys.stderr.flush()
        os._exit(0)  # there may be nobody left to meet

    return job


def run_hang(folder: Path, case: str, text: str) -> Job:
    """All-reduces in every step; an alarm ends who hangs, a timeout who waits for it."""

    def job(rank: int, num_ranks: int) -> None:
        injector, log = make_injector(folder, case, Layout(dp=num_ranks), text)
        group = dist.new_group(timeout=timedelta(seconds=HANG_SECONDS))
        injector.watch_groups({"dp": group})
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for step in range(4):
            if rank == 1 and step == 2:
                signal.alarm(HANG_SECONDS + 1)
            injector.begin_step(step)
            with injector.phase("forward"):
                log.note(kind="forward", step=step)
            try:
                dist.all_reduce(torch.ones(4), group=group)
            except RuntimeError:
                log.note(kind="timeout", step=step)
                os._exit(0)
        signal.alarm(0)

    return job


def run_slow_link(folder: Path) -> Job:
    """Messages between all neighbours and sums in pairs; the link between 0 and 1 is slow."""

    def job(rank: int, num_ranks: int) -> None:
        text = f"slow_link link=0-1 ms={DELAY_MS} steps=1"
        injector, log = make_injector(folder, "link", Layout(dp=2, pp=2), text)
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        injector.watch_groups({"dp": pairs[rank // 2]})
        for step in range(3):
            injector.begin_step(step)
            for source in range(num_ranks - 1):
                dist.barrier()
                if rank == source:
                    dist.send(torch.tensor([time.monotonic_ns()]), rank + 1)
                elif rank == source + 1:
                    sent_ns = torch.zeros(1, dtype=torch.int64)
                    dist.recv(sent_ns, source)
                    took_ns = time.monotonic_ns() - int(sent_ns)
                    log.note(kind="message", step=step, took_ns=took_ns)
            summed = torch.tensor([float(rank)])
            begin_ns = time.monotonic_ns()
            dist.all_reduce(summed, group=pairs[rank // 2])
            log.note(
                kind="sum", step=step, took_ns=time.monotonic_ns() - begin_ns, value=summed.item()
            )
        injector.close()
        injector.begin_step(1)
        begin = len((folder / f"link_{rank}.jsonl").read_text(encoding="utf-8"))
        dist.all_reduce(summed, group=pairs[rank // 2])
        text = (folder / f"link_{rank}.jsonl").read_text(encoding="utf-8")[begin:]
        log.note(kind="after close", text=text)

    return job


def run_slow_axis(folder: Path) -> Job:
    """dp 2 × tp 2: only what goes along dp is slow, and by the byte."""

    def job(rank: int, num_ranks: int) -> None:
        text = "slow_link axis=dp operation=collective mb_per_s=0.1 rank=0,2"
        injector, log = make_injector(folder, "axis", Layout(dp=2, tp=2), text)
        # tp neighbours are consecutive ranks.
        groups = {
            "tp": [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2],
            "dp": [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2],
        }
        injector.watch_groups(groups)
        injector.begin_step(0)
        for axis, size in (("tp", 1000), ("dp", 250), ("dp", 500)):
            dist.all_reduce(torch.ones(size), group=groups[axis])
            log.note(kind="sum", axis=axis)

    return job


def run_training(folder: Path, case: str, *texts: str) -> Job:
    """dp 2 × pp 2, two steps of the timed model, with everything an engine calls."""

    def job(rank: int, num_ranks: int) -> None:
        layout = Layout(dp=2, pp=2)
        injector, log = make_injector(folder, case, layout, *texts)
        pp_group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        dp_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        pp = layout.coordinates(rank).pp
        stages = {pp: build_timed_stage(CONFIG, pp, 2)}
        injector.attach(stages)
        injector.watch_groups({"dp": dp_group, "pp": pp_group})
        record = ActionLog()
        executor = PipelineExecutor(
            build_schedule("1f1b", 2, 3),
            stages,
            pp_group,
            hidden_shape=stages[pp].hidden_shape(1),
            record=injector.wrap_recorder(record),
        )
        reducer = GradientReducer(stages[pp].parameters(), dp_group)
        tokens = torch.ones(1, CONFIG.sequence_length, dtype=torch.long)
        for step in range(2):
            stages[pp].zero_grad()
            record.runs.clear()
            injector.begin_step(step)
            with reducer.accumulating():
                executor.run_step([(tokens, tokens)] * 3)
            is_nan_before = has_nan(stages[pp])
            reducer.finish()
            injector.on_gradients(stages.values())
            log.note(
                kind="step",
                step=step,
                is_nan_before=is_nan_before,
                is_nan_after=has_nan(stages[pp]),
                runs={
                    str(r.action): r.end_host_mono_ns - r.begin_host_mono_ns for r in record.runs
                },
            )
        injector.close()

    return job


def has_nan(module: torch.nn.Module) -> bool:
    return any(bool(p.grad.isnan().any()) for p in module.parameters() if p.grad is not None)


def main(folder: Path) -> None:
    import_everything()
    cases: dict[str, tuple[Job, int]] = {}
    for how in CRASHES:
        name = how.split()[0]
        text = f"crash rank=1 steps=2 phase=forward how={how}"
        cases[f"crash {name}"] = run_crash(folder, f"crash {name}", text), 2
    text = "crash rank=1 steps=2 phase=forward"
    cases["crash restarted"] = run_crash(folder, "crash restarted", text, attempt=1), 2
    for point in ("forward", "collective axis=dp"):
        name = f"hang {point.split()[0]}"
        cases[name] = run_hang(folder, name, f"hang rank=1 steps=2 phase={point}"), 2
    text = "hang rank=1 steps=2 phase=collective axis=pp"
    cases["hang elsewhere"] = run_hang(folder, "hang elsewhere", text), 2
    cases["link"] = run_slow_link(folder), 4
    cases["axis"] = run_slow_axis(folder), 4
    for name, fault in {
        "healthy": "slow pp=1 phase=forward ms=30 steps=7",
        "slow stage": f"slow pp=1 phase=forward ms={DELAY_MS} steps=1",
        "nan loss": "nan dp=1 target=loss steps=1",
        "nan gradient": "nan rank=2 target=gradient steps=1",
    }.items():
        cases[name] = run_training(folder, name, fault), 4
    exits = {name: run_ranks(job, num_ranks) for name, (job, num_ranks) in cases.items()}
    (folder / "exits.json").write_text(json.dumps(exits), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
