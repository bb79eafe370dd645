"""Is the bubble of a real pipeline the one that the replay of its schedule gives?

    python benchmarks/pipeline_bubble.py            # about three minutes, writes its results
    python benchmarks/pipeline_bubble.py --steps 3 --no-save

Gloo ranks run every schedule with equal stages and record each action. The measured bubble is what
the records say: the longest span of a rank, first begin to last end, over the busy time of the
busiest rank, as a share of the span. The replayed one comes from `replay_schedule` with the
durations of the same step's actions, once with transfers that take no time and once with the median
time that they took (from a sender's end to the end of the wait for it, where a rank was waiting).

    timed     4 ranks; stages sleep for F, I and W, so that 4 ranks need no 4 cores
    matmul    2 ranks, or as many as there are cores; the engine's linear layers, one core each

The same on torch's runtime (`torch …`) for comparison: its bubble has everything that torch does
between actions in it, and its rows are replayed in the order in which it ran them.
"""

import argparse
import json
import os
import pickle
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

import torch
import torch.distributed as dist
from fork_ranks import import_everything, run_ranks
from torch import Tensor, nn

from meshscope.core.schedule import Schedule, output_of
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import ActionCosts, replay_schedule
from meshscope.engine import ColumnParallelLinear, initialize_parameters
from meshscope.engine.model.put_off_gradients import PutOffGradients
from meshscope.engine.pipeline.pipeline import ActionLog, ActionSpan, PipelineExecutor
from meshscope.engine.pipeline.torch_schedule import TORCH_SCHEDULES, TorchScheduleExecutor

NUM_MICROBATCHES = 8
TIMED_SECONDS = 0.030
"""Of F, of I and of W of one microbatch on one rank, over all its chunks."""
WIDTH = 512
NUM_ROWS = 256
NUM_LAYERS = 16
"""On one rank, over all its chunks."""
GOAL_POINTS = 3.0
RESULTS = Path(__file__).parent / "results" / "pipeline_bubble.json"

StepSpans = tuple[list[ActionSpan], list[ActionSpan]]
"""Runs and waits of one rank in one step."""


# --- stages ---------------------------------------------------------------------------------------


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: "TimedStage") -> Tensor:
        time.sleep(stage.seconds)
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        stage: TimedStage = ctx.stage
        time.sleep(stage.seconds)
        if stage.put_off.later is None:
            time.sleep(stage.seconds)
        else:
            stage.put_off.later.add((), stage.sleep)
        return grad, None


class TimedStage(nn.Module):
    """Forward, input gradient and weight gradient take a stated time and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))
        self.put_off = PutOffGradients()

    def sleep(self) -> tuple[()]:
        time.sleep(self.seconds)
        return ()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y: Tensor = _Timed.apply(x * self.weight, self)
        return y if targets is None else (y - targets).square().mean()


class MatmulStage(nn.Module):
    """Linear layers: F, I and W are one product each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(ColumnParallelLinear(WIDTH, WIDTH, init_std=WIDTH**-0.5) for _ in range(num_layers))
        )
        initialize_parameters(self, seed=0)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y: Tensor = self.layers(x)
        return y if targets is None else (y - targets).square().mean()


def build_stages(kind: str, indices: Sequence[int]) -> dict[int, nn.Module]:
    if kind == "timed":
        return {index: TimedStage(TIMED_SECONDS / len(indices)) for index in indices}
    return {index: MatmulStage(NUM_LAYERS // len(indices)) for index in indices}


# --- ranks ----------------------------------------------------------------------------------------


def build_executor(kind: str, name: str, log: ActionLog) -> PipelineExecutor | Any:
    group = dist.group.WORLD
    rank, num_ranks = group.rank(), group.size()
    hidden_shape = (8, 64) if kind == "timed" else (NUM_ROWS, WIDTH)
    if name.startswith("torch "):
        described = TORCH_SCHEDULES[name.removeprefix("torch ")]
        stages = build_stages(kind, described.stages_of(rank, num_ranks))
        return TorchScheduleExecutor(
            name.removeprefix("torch "),
            stages,
            group,
            num_microbatches=NUM_MICROBATCHES,
            hidden_shape=hidden_shape,
            record=log,
            put_off=find_put_off(stages),
        )
    schedule = build_schedule(name, num_ranks, NUM_MICROBATCHES)
    stages = build_stages(kind, schedule.stages_of(rank))
    return PipelineExecutor(
        schedule,
        stages,
        group,
        hidden_shape=hidden_shape,
        record=log,
        put_off=find_put_off(stages),
    )


def find_put_off(stages: Mapping[int, nn.Module]) -> dict[int, PutOffGradients]:
    return {i: stage.put_off for i, stage in stages.items() if isinstance(stage, TimedStage)}


def make_job(
    kind: str, names: Sequence[str], num_steps: int, folder: Path
) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        shape = (8, 64) if kind == "timed" else (NUM_ROWS, WIDTH)
        microbatches = [(torch.ones(shape), torch.zeros(shape))] * NUM_MICROBATCHES
        found: dict[str, list[StepSpans]] = {}
        for name in names:
            log = ActionLog()
            executor = build_executor(kind, name, log)
            for step in range(num_steps + 1):
                dist.barrier()
                log.runs.clear()
                log.waits.clear()
                executor.run_step(microbatches)
                if step > 0:  # the first one warms up
                    found.setdefault(name, []).append((list(log.runs), list(log.waits)))
        (folder / f"{kind}_{rank}.pickle").write_bytes(pickle.dumps(found))

    return job


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One schedule: medians over its steps. Bubbles are shares of the longest rank's span."""

    kind: str
    name: str
    num_ranks: int
    num_microbatches: int
    ideal_ratio: float
    """Equal actions and transfers in no time, by the schedule alone."""
    measured_ratio: float
    replayed_ratio: float
    """With the step's own durations."""
    difference_points: float
    worst_difference_points: float
    communication_us: float
    replayed_with_communication_ratio: float
    difference_with_communication_points: float


def evaluate(kind: str, name: str, steps: Sequence[Sequence[StepSpans]]) -> Row:
    """`steps`: for each step the spans of all ranks."""
    measured, replayed, with_communication, latencies = [], [], [], []
    for ranks in steps:
        schedule = find_schedule(name, ranks)
        measured.append(measure_bubble(ranks))
        latency_ns = measure_latency_ns(schedule, ranks)
        latencies.append(latency_ns)
        replayed.append(replay_bubble(schedule, ranks, 0))
        with_communication.append(replay_bubble(schedule, ranks, latency_ns))
    differences = [100 * abs(a - b) for a, b in zip(measured, replayed, strict=True)]
    closer = [100 * abs(a - b) for a, b in zip(measured, with_communication, strict=True)]
    equal = ActionCosts.uniform(schedule, forward_ns=1.0, input_grad_ns=1.0, weight_grad_ns=1.0)
    return Row(
        kind=kind,
        name=name,
        num_ranks=len(steps[0]),
        num_microbatches=NUM_MICROBATCHES,
        ideal_ratio=round(replay_schedule(schedule, equal).bubble_of_total_ratio, 4),
        measured_ratio=round(statistics.median(measured), 4),
        replayed_ratio=round(statistics.median(replayed), 4),
        difference_points=round(statistics.median(differences), 2),
        worst_difference_points=round(max(differences), 2),
        communication_us=round(statistics.median(latencies) / 1e3, 1),
        replayed_with_communication_ratio=round(statistics.median(with_communication), 4),
        difference_with_communication_points=round(statistics.median(closer), 2),
    )


def find_schedule(name: str, ranks: Sequence[StepSpans]) -> Schedule:
    """The schedule that ran: for torch's, the rows that were recorded."""
    if not name.startswith("torch "):
        return build_schedule(name, len(ranks), NUM_MICROBATCHES)
    rows = tuple(tuple(span.action for span in runs) for runs, _ in ranks)
    placement = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    return Schedule(
        name=name,
        num_microbatches=NUM_MICROBATCHES,
        stage_ranks=tuple(placement[stage] for stage in range(len(placement))),
        actions=rows,
    )


def measure_bubble(ranks: Sequence[StepSpans]) -> float:
    spans_ns = [runs[-1].end_host_mono_ns - runs[0].begin_host_mono_ns for runs, _ in ranks]
    busy_ns = [sum(duration_ns(span) for span in runs) for runs, _ in ranks]
    return 1 - max(busy_ns) / max(spans_ns)


def replay_bubble(schedule: Schedule, ranks: Sequence[StepSpans], communication_ns: float) -> float:
    costs = ActionCosts(
        by_stage={},
        by_microbatch={
            (span.action.kind, span.action.stage, span.action.microbatch): duration_ns(span)
            for runs, _ in ranks
            for span in runs
        },
        communication_ns=communication_ns,
    )
    return replay_schedule(schedule, costs).bubble_of_total_ratio


def measure_latency_ns(schedule: Schedule, ranks: Sequence[StepSpans]) -> float:
    """The median from a sender's end to the receiver's, over receivers that were there first."""
    made_ns = {output_of(span.action): span.end_host_mono_ns for runs, _ in ranks for span in runs}
    late_ns = [
        wait.end_host_mono_ns - made_ns[output]
        for _, waits in ranks
        for wait in waits
        for output in schedule.needs(wait.action)
        if output[1] != wait.action.stage and made_ns[output] > wait.begin_host_mono_ns
    ]
    return max(statistics.median(late_ns), 0) if late_ns else 0


def duration_ns(span: ActionSpan) -> int:
    return span.end_host_mono_ns - span.begin_host_mono_ns


def render(rows: Sequence[Row]) -> str:
    lines = [
        "| stages | schedule | p | ideal % | measured % | replayed % | points | worst | "
        "transfer us | replayed with transfers % | points |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.kind} | {row.name} | {row.num_ranks} | {100 * row.ideal_ratio:.1f} | "
        f"{100 * row.measured_ratio:.1f} | {100 * row.replayed_ratio:.1f} | "
        f"{row.difference_points:.1f} | {row.worst_difference_points:.1f} | "
        f"{row.communication_us:.0f} | {100 * row.replayed_with_communication_ratio:.1f} | "
        f"{row.difference_with_communication_points:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def run_kind(kind: str, names: Sequence[str], num_ranks: int, num_steps: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        exit_codes = run_ranks(make_job(kind, names, num_steps, Path(folder)), num_ranks)
        if any(exit_codes):
            sys.exit(f"ranks of {kind} ended with {exit_codes}")
        ranks = [
            pickle.loads((Path(folder) / f"{kind}_{rank}.pickle").read_bytes())
            for rank in range(num_ranks)
        ]
    return [
        evaluate(kind, name, list(zip(*(rank[name] for rank in ranks), strict=True)))
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--matmul-ranks", type=int, default=2, help="no more than cores")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    import_everything()
    own = list(BUILDERS)
    torchs = ["torch gpipe", "torch 1f1b", "torch interleaved_1f1b", "torch interleaved_zb"]
    rows = run_kind("timed", [*own, *torchs], 4, options.steps)
    rows += run_kind("matmul", own, options.matmul_ranks, options.steps)
    print(render(rows))
    ours = [row for row in rows if row.kind == "timed" and not row.name.startswith("torch")]
    worst = max(row.difference_points for row in ours)
    print(f"timed stages: at most {worst:.1f} points apart, goal {GOAL_POINTS:.0f}")
    if not options.no_save:
        document = {
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release().split("-")[0],
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            "steps": options.steps,
            "goal_points": GOAL_POINTS,
            "worst_timed_points": worst,
            "rows": [asdict(row) for row in rows],
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
