"""Does a pipeline of stated times cost what the replay of its schedule says?

    python benchmarks/timed_bubble.py --output benchmarks/results/timed_bubble.json   # 7 minutes
    python benchmarks/timed_bubble.py --ranks 4 --steps 2

Forked gloo ranks run every schedule on the engine's timed model, whose layers sleep: each F, each I
and each W of a stage takes `--action-ms`. Measured is what the ranks
recorded; replayed is `replay_schedule` with the stated times, nothing measured goes into it, and
transfers take no time. So the difference holds everything: wake-ups, transfers, the executor, and
as many processes as there are ranks on the cores of one machine.

Ranks sleep nearly all the time, but when one wakes up late because someone else has the cores, all
wait. So twice as many steps are run as asked for, and those count during which the machine's cores
were least busy, as the kernel counts it: whether a step counts does not depend on what it measured.
On a machine that others use, have sleepers woken at once as well: `chrt -f 1 python …`.

Balanced stages are judged by the bubble: the longest span of a rank, first begin to last end, over
the busy time of the busiest, as a share of the span. The uneven case (the second pipeline rank has
twice the layers) is judged by the idle share of all ranks' time too, where its idle time is.
"""

import argparse
import json
import os
import pickle
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "distributed"))

import torch
import torch.distributed as dist
from fork_ranks import import_everything, run_ranks

from meshscope.core.config.timed_model_config import TimedModelConfig
from meshscope.core.schedule import Schedule
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.schedule_replay import replay_schedule
from meshscope.engine.model.timed_model import build_timed_stage
from meshscope.engine.pipeline.pipeline import ActionLog, ActionSpan, PipelineExecutor

GOAL_POINTS = 3.0
MICROBATCH_SIZE = 2
UNEVEN_SCHEDULES = ("1f1b", "zb_h1")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule on some ranks."""

    name: str
    num_ranks: int
    is_even: bool = True
    action_ms: float

    @property
    def schedule(self) -> Schedule:
        return build_schedule(self.name, self.num_ranks, 2 * self.num_ranks)

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """Two layers in every stage; uneven: four in those of the second rank."""
        placement = self.schedule.stage_ranks
        return tuple(4 if not self.is_even and rank == 1 else 2 for rank in placement)

    @property
    def config(self) -> TimedModelConfig:
        layer_ms = self.action_ms / 2
        return TimedModelConfig(
            num_layers=sum(self.stage_sizes),
            forward_ms=layer_ms,
            input_grad_ms=layer_ms,
            weight_grad_ms=layer_ms,
        )


def make_job(case: Case, num_steps: int, folder: Path) -> Callable[[int, int], None]:
    def job(rank: int, num_ranks: int) -> None:
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(run_case(case, num_steps)))

    return job


Step = tuple[float, list[ActionSpan]]
"""How busy the machine's cores were, 0..1, and what a rank ran."""


def run_case(case: Case, num_steps: int) -> list[Step]:
    """This rank's part in each step but the first, which warms up."""
    schedule, config, rank = case.schedule, case.config, dist.get_rank()
    stages = {
        index: build_timed_stage(config, index, schedule.num_stages, stage_sizes=case.stage_sizes)
        for index in schedule.stages_of(rank)
    }
    log = ActionLog()
    executor = PipelineExecutor(
        schedule,
        stages,
        dist.group.WORLD,
        hidden_shape=next(iter(stages.values())).hidden_shape(MICROBATCH_SIZE),
        record=log,
        put_off={index: stage.put_off_weight_gradients() for index, stage in stages.items()},
    )
    tokens = torch.ones(MICROBATCH_SIZE, config.sequence_length, dtype=torch.long)
    steps: list[Step] = []
    for _ in range(2 * num_steps + 1):
        dist.barrier()
        log.runs.clear()
        before = read_cpu_ticks()
        executor.run_step([(tokens, tokens)] * schedule.num_microbatches)
        steps.append((measure_busy(before, read_cpu_ticks()), list(log.runs)))
    return steps[1:]


def read_cpu_ticks() -> tuple[int, int]:
    """Ticks of all cores so far, and those of them that were idle."""
    words = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    ticks = [int(word) for word in words]
    return sum(ticks), ticks[3] + ticks[4]


def measure_busy(before: tuple[int, int], after: tuple[int, int]) -> float:
    total, idle = (now - then for now, then in zip(after, before, strict=True))
    return 1 - idle / max(total, 1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over steps; shares of the longest span (bubble) or of all ranks' time (idle)."""

    schedule: str
    is_even: bool
    num_ranks: int
    num_microbatches: int
    num_steps: int
    """That count."""
    busy_ratio: float
    """Of the cores' time, in the busiest of them, by whomever."""
    replayed_bubble_ratio: float
    measured_bubble_ratio: float
    difference_points: float
    worst_difference_points: float
    replayed_idle_ratio: float
    measured_idle_ratio: float
    idle_difference_points: float
    makespan_ratio: float
    """Measured over replayed."""


def evaluate(case: Case, chosen: Sequence[Sequence[Step]]) -> Row:
    """`chosen`: of each step what all ranks saw."""
    steps = [[runs for _, runs in ranks] for ranks in chosen]
    costs = case.config.costs.for_schedule(case.schedule, case.stage_sizes)
    replay = replay_schedule(case.schedule, costs)
    bubbles = [measure_bubble(ranks) for ranks in steps]
    makespans_ns = [measure_makespan_ns(ranks) for ranks in steps]
    idle = statistics.median(measure_idle(ranks) for ranks in steps)
    bubble = statistics.median(bubbles)
    worst = max(abs(one - replay.bubble_of_total_ratio) for one in bubbles)
    return Row(
        schedule=case.name,
        is_even=case.is_even,
        num_ranks=case.num_ranks,
        num_microbatches=case.schedule.num_microbatches,
        num_steps=len(steps),
        busy_ratio=round(max(ranks[0][0] for ranks in chosen), 2),
        replayed_bubble_ratio=round(replay.bubble_of_total_ratio, 4),
        measured_bubble_ratio=round(bubble, 4),
        difference_points=round(100 * abs(bubble - replay.bubble_of_total_ratio), 2),
        worst_difference_points=round(100 * worst, 2),
        replayed_idle_ratio=round(replay.idle_of_makespan_ratio, 4),
        measured_idle_ratio=round(idle, 4),
        idle_difference_points=round(100 * abs(idle - replay.idle_of_makespan_ratio), 2),
        makespan_ratio=round(statistics.median(makespans_ns) / replay.makespan_ns, 4),
    )


def busy_ns(runs: Sequence[ActionSpan]) -> int:
    return sum(span.end_host_mono_ns - span.begin_host_mono_ns for span in runs)


def measure_bubble(ranks: Sequence[Sequence[ActionSpan]]) -> float:
    spans_ns = [runs[-1].end_host_mono_ns - runs[0].begin_host_mono_ns for runs in ranks]
    return 1 - max(map(busy_ns, ranks)) / max(spans_ns)


def measure_makespan_ns(ranks: Sequence[Sequence[ActionSpan]]) -> int:
    begin_ns = min(runs[0].begin_host_mono_ns for runs in ranks)
    return max(runs[-1].end_host_mono_ns for runs in ranks) - begin_ns


def measure_idle(ranks: Sequence[Sequence[ActionSpan]]) -> float:
    return 1 - sum(map(busy_ns, ranks)) / (measure_makespan_ns(ranks) * len(ranks))


def list_cases(names: Sequence[str], num_ranks: int, options: argparse.Namespace) -> list[Case]:
    evenness = [(name, True) for name in names]
    evenness += [(name, False) for name in names if name in UNEVEN_SCHEDULES]
    return [
        Case(
            name=name,
            num_ranks=num_ranks,
            is_even=is_even,
            action_ms=options.action_ms,
        )
        for name, is_even in evenness
    ]


def measure_case(case: Case, num_steps: int) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_job(case, num_steps, folder)
        exit_codes = run_ranks(job, case.num_ranks, rank_timeout_s=600)
        if any(exit_codes):
            sys.exit(f"ranks of {case} ended with {exit_codes}")
        ranks = [pickle.loads((folder / f"{i}.pickle").read_bytes()) for i in range(case.num_ranks)]
    steps = sorted(zip(*ranks, strict=True), key=lambda step: step[0][0])[:num_steps]
    row = evaluate(case, steps)
    print(render_row(row), file=sys.stderr, flush=True)
    return row


def render(rows: Sequence[Row]) -> str:
    lines = [
        "| schedule | stages | p | m | busy | replayed bubble % | measured % | points | worst | "
        "replayed idle % | measured % | points | makespan measured / replayed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [render_row(row) for row in rows])


def render_row(row: Row) -> str:
    return (
        f"| {row.schedule} | {'even' if row.is_even else 'uneven'} | {row.num_ranks} | "
        f"{row.num_microbatches} | {row.busy_ratio:.2f} | {100 * row.replayed_bubble_ratio:.1f} | "
        f"{100 * row.measured_bubble_ratio:.1f} | {row.difference_points:.1f} | "
        f"{row.worst_difference_points:.1f} | {100 * row.replayed_idle_ratio:.1f} | "
        f"{100 * row.measured_idle_ratio:.1f} | {row.idle_difference_points:.1f} | "
        f"{row.makespan_ratio:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--action-ms", type=float, default=30.0, help="of F, of I and of W")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    import_everything()
    rows: list[Row] = []
    for num_ranks in options.ranks:
        cases = list_cases(options.schedules, num_ranks, options)
        rows += [measure_case(case, options.steps) for case in cases]
    print(render(rows))
    worst_points = max(row.difference_points for row in rows if row.is_even)
    worst_uneven_points = max(
        (row.idle_difference_points for row in rows if not row.is_even), default=0.0
    )
    print(f"even stages: bubble at most {worst_points:.1f} points apart, goal {GOAL_POINTS:.0f}")
    print(f"uneven stages: idle share at most {worst_uneven_points:.1f} points apart")
    if options.output is not None:
        document = {
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release().split("-")[0],
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            "steps": options.steps,
            "load_average": round(os.getloadavg()[0], 1),
            "is_real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
            "action_ms": options.action_ms,
            "goal_points": GOAL_POINTS,
            "worst_points": worst_points,
            "worst_uneven_idle_points": worst_uneven_points,
            "rows": [asdict(row) for row in rows],
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if worst_points > GOAL_POINTS:
        sys.exit(1)


if __name__ == "__main__":
    main()
