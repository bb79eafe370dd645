"""The pipeline bubble: measured, the minimum of the order of actions, and the rest by cause.

cost = the longest time of any pipeline rank from its own first start to its own last end. A rank's
bubble is the part of the cost in which it ran no action, the pipeline's the mean of its ranks':
`bubble_ratio` = 1 - busy / cost, the rate of Zero Bubble (arXiv 2401.10241) when stages are equal.
Utilisation is 1 - bubble. Waits before a rank's first and after its last action of a step count as
far as the cost reaches; waits between steps do not.

The measured bubble is compared with replays of the same order (stage times are medians over steps):

    work  →  + inherent       equal stages, outputs there at once: too few microbatches
          →  + imbalance      each stage its own time
          →  + communication  outputs travel and are received
          →  + gaps           what ranks do between actions
          →  + stragglers     each action and transfer its own time, ranks ready when they were
          →  + unexplained    measured

Each part is the difference of two neighbours in bubble time (cost minus mean busy time), so the
parts sum to the measured bubble exactly. A part may be negative: unequal stages can hide each
other's bubble.
"""

from dataclasses import dataclass, fields

import numpy as np

from meshscope.analyze.pipeline.action_gaps import ActionGaps, measure_action_gaps
from meshscope.analyze.pipeline.action_replay import ReplayPlan
from meshscope.analyze.pipeline.executed_schedule import ExecutedSchedule
from meshscope.analyze.pipeline.pipeline_times import PipelineTimes
from meshscope.core.schedule import ActionKind
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.arrays import Floats

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class _BubbleParts:
    """Bubble time per step by cause: mean over runs. The parts sum to the bubble."""

    inherent_ns: float
    imbalance_ns: float
    communication_ns: float
    gaps_ns: float
    stragglers_ns: float
    unexplained_ns: float

    @property
    def total_ns(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineBubble:
    """The bubble of all pipelines of a run."""

    executed: ExecutedSchedule
    num_pipelines: int
    num_runs: int
    cost_ns: float
    """Mean over runs."""
    busy_ns: float
    """Mean over runs and pipeline ranks."""
    bubble_ratio: float
    """1 - busy / cost: median over runs."""
    rank_bubble_ratio: tuple[float, ...]
    """Per pipeline rank: 1 - its busy time / cost, median over runs."""
    run_bubble_ratio: Floats
    """Per run."""
    executed_ratio: float
    """The bubble of this order with these stage times and transfers."""
    balanced_ratio: float
    """The bubble with equal stages and no transfer times: the order's minimum."""
    closed_form_ratio: float | Unavailable
    """The textbook's, for equal stages and no transfer times."""
    closed_form: str
    """Its formula; empty where there is none."""
    parts: _BubbleParts
    action_gaps: ActionGaps

    @property
    def utilisation_ratio(self) -> float:
        """Share of the pipelines' time in which their ranks ran actions."""
        return 1 - self.bubble_ratio

    def part_ratio(self, part_ns: float) -> float:
        """A part's share of the cost."""
        return part_ns / self.cost_ns if self.cost_ns > 0 else 0.0


@or_unavailable
def measure_bubble(times: PipelineTimes) -> PipelineBubble:
    """The bubble and its parts."""
    action_gaps = need(measure_action_gaps(times))
    plan = action_gaps.plan
    duration = times.duration_ns.astype(np.float64)
    busy = plan.busy_ns(duration)
    end = times.end_ns - action_gaps.origin_ns
    cost = plan.cost_ns(end - duration, end)
    if not (cost > 0).all():
        raise Missing("a pipeline's actions take no time")
    stage_ns = _stage_medians(times, plan)
    bubbles = _replay_chain(plan, stage_ns, action_gaps, duration)
    steps = np.diff([0.0, *bubbles, float(np.mean(cost - busy.mean(axis=0)))])
    closed = find_closed_form(times.executed, stage_ns)
    typical = plan.spread(stage_ns)
    run_ratio = 1 - busy.mean(axis=0) / cost
    return PipelineBubble(
        executed=times.executed,
        num_pipelines=len(np.unique(times.chain)),
        num_runs=times.num_runs,
        cost_ns=float(cost.mean()),
        busy_ns=float(busy.mean()),
        bubble_ratio=float(np.median(run_ratio)),
        rank_bubble_ratio=tuple(np.median(1 - busy / cost, axis=1).tolist()),
        run_bubble_ratio=run_ratio,
        executed_ratio=_as_ratio(bubbles[3], plan, typical),
        balanced_ratio=_as_ratio(bubbles[0], plan, typical),
        closed_form_ratio=closed if isinstance(closed, Unavailable) else closed[0],
        closed_form="" if isinstance(closed, Unavailable) else closed[1],
        parts=_name_parts(steps),
        action_gaps=action_gaps,
    )


def _name_parts(values: Floats) -> _BubbleParts:
    names = [field.name for field in fields(_BubbleParts)]
    return _BubbleParts(**dict(zip(names, values.tolist(), strict=True)))


def _as_ratio(bubble_ns: float, plan: ReplayPlan, duration: Floats) -> float:
    work_ns = float(plan.busy_ns(duration).mean())
    return bubble_ns / (bubble_ns + work_ns)


def _replay_chain(
    plan: ReplayPlan,
    stage_ns: dict[tuple[ActionKind, int], float],
    action_gaps: ActionGaps,
    duration: Floats,
) -> list[float]:
    """Bubble times of ever more faithful replays, as in the module's docstring."""
    typical = plan.spread(stage_ns)
    lag, gap = action_gaps.typical_lag_ns, action_gaps.typical_gap_ns
    receive = np.minimum(gap, np.median(action_gaps.receive_ns, axis=1, keepdims=True))
    own = {"lag_ns": action_gaps.lag_ns, "gap_ns": action_gaps.gap_ns}

    def bubble(duration: Floats, **between: Floats) -> float:
        cost = plan.cost_ns(*plan.replay(duration, **between))
        return float(np.mean(cost - plan.busy_ns(duration).mean(axis=0)))

    return [
        bubble(plan.spread(_balance(stage_ns))),
        bubble(typical),
        bubble(typical, lag_ns=lag, gap_ns=receive),
        bubble(typical, lag_ns=lag, gap_ns=gap),
        bubble(duration, ready_ns=action_gaps.ready_ns, **own),
    ]


def _stage_medians(times: PipelineTimes, plan: ReplayPlan) -> dict[tuple[ActionKind, int], float]:
    """Durations including waits inside actions.

    The median per pipeline, then the lower median, so that a straggler does not set the time.
    """
    rows: dict[tuple[ActionKind, int], list[int]] = {}
    for index, action in enumerate(plan.actions):
        rows.setdefault((action.kind, action.stage), []).append(index)
    chains = np.unique(times.chain)
    duration = times.duration_ns
    medians = {}
    for key, indices in rows.items():
        stage = duration[indices]
        own = [np.median(stage[:, times.chain == chain]) for chain in chains]
        medians[key] = float(np.sort(own)[(len(own) - 1) // 2])
    return medians


def _balance(
    stage_ns: dict[tuple[ActionKind, int], float],
) -> dict[tuple[ActionKind, int], float]:
    """Every stage gets the mean of all, by kind."""
    return {
        (kind, stage): float(np.mean([ns for (other, _), ns in stage_ns.items() if other is kind]))
        for kind, stage in stage_ns
    }


def find_closed_form(
    executed: ExecutedSchedule, stage_ns: dict[tuple[ActionKind, int], float]
) -> tuple[float, str] | Unavailable:
    """Bubble ratio of the textbook formula at mean stage times, and the formula.

    p ranks, m microbatches, v chunks; F, I and W of a rank, B = I + W.
    """
    if not executed.is_known:
        return Unavailable("the order of actions is no schedule with a formula")
    p, m = executed.schedule.num_ranks, executed.schedule.num_microbatches
    v = executed.num_chunks
    mean = {
        kind: v * float(np.mean([ns for (other, _), ns in stage_ns.items() if other is kind]))
        for kind in {kind for kind, _ in stage_ns}
    }
    whole_ns = sum(mean.values())
    name = executed.name
    if name in ("gpipe", "1f1b"):
        bubble_ns, formula = (p - 1) * whole_ns, "(p−1)(F+B)"
    elif name in ("interleaved_1f1b", "round_robin", "looped_bfs"):
        if m < p or (name == "interleaved_1f1b" and m % p):
            return Unavailable(f"the formula of {name} does not hold for {m} microbatches")
        bubble_ns, formula = (p - 1) * whole_ns / v, "(p−1)(F+B)/v"
    elif name == "zb_h1":
        if m < p:
            return Unavailable(f"the formula of {name} holds from {p} microbatches on")
        bubble_ns, formula = (p - 1) * (mean[_F] + mean[_I] - mean[_W]), "(p−1)(F+I−W)"
    elif name == "zb_h2":
        bubble_ns, formula = (p - 1) * (mean[_F] + mean[_I] - 2 * mean[_W]), "(p−1)(F+I−2W)"
        if m < 2 * p - 1 or bubble_ns < 0:
            return Unavailable(f"the formula of {name} holds for m ≥ 2p−1 and F+I ≥ 2W")
    else:
        return Unavailable(f"{name} has a formula for F = I = W only")
    return bubble_ns / (bubble_ns + m * whole_ns), formula
