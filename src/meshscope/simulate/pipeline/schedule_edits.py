"""Another schedule, or another number of microbatches, priced by replay.

Every action of the new order gets the measured times of the recorded action of its stage and kind,
microbatch i those of microbatch i mod m, run by run, so that the replay varies like the recording.
Assumptions:

- Samples per step stay the same by default, so a microbatch has m/m' of the samples, and its
  actions take that share of their time: no part of an action is fixed. Lags and gaps stay as they
  are. With `keeps_microbatch_size` microbatches stay as they are, a step has m'/m as many samples,
  and the gain is per as many samples as before; the rest of the step is then shared by more.
- Where the recording has B and the schedule I and W, each takes half of B; I and W together take B.
- Where a rank holds other numbers of stages, its time is shared evenly among them.

Wrong if a schedule's memory does not fit, or weight gradients cannot be delayed.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.pipeline.action_replay import ReplayPlan, plan_replay
from meshscope.core.schedule import Action, ActionKind, Schedule, count_peak_activations
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.errors import UsageError
from meshscope.simulate.pipeline.pipeline_replay import PipelineReplay
from meshscope.simulate.what_if import Gain
from meshscope.store.read.arrays import Floats

_B, _I, _W = ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleGain:
    """The saving of another order or number of microbatches."""

    name: str
    num_microbatches: int
    keeps_microbatch_size: bool
    peak_activations: int
    """Most stage activations a rank holds at once, in stages times microbatches of its size."""
    gain: Gain | Unavailable


def price_schedule(
    replay: PipelineReplay,
    *,
    name: str | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    keeps_microbatch_size: bool = False,
) -> ScheduleGain | Unavailable:
    """The saving of a schedule of `BUILDERS`; arguments that are None stay as recorded."""
    recorded = replay.times.executed
    m_before = recorded.schedule.num_microbatches
    wanted = recorded.name if name is None else name
    count = m_before if num_microbatches is None else num_microbatches
    if name is None and not recorded.is_known:
        return Unavailable("the recorded order is none that can be built for other microbatches")
    chunks = recorded.num_chunks if num_chunks is None and name is None else num_chunks
    try:
        schedule = build_schedule(wanted, replay.plan.num_ranks, count, chunks)
    except UsageError as error:
        return Unavailable(str(error))
    plan = plan_replay(schedule, replay.plan.mode)
    if plan is None:
        return Unavailable(f"{wanted} cannot run with sends that wait for their receiver")
    scale = 1.0 if keeps_microbatch_size else m_before / count
    end = _replay(replay, plan, scale)
    num_steps_each = count / m_before if keeps_microbatch_size else 1.0
    return ScheduleGain(
        name=schedule.name,
        num_microbatches=count,
        keeps_microbatch_size=keeps_microbatch_size,
        peak_activations=max(count_peak_activations(schedule)),
        gain=replay.compare(end, num_steps_each=num_steps_each),
    )


def rank_schedules(replay: PipelineReplay) -> list[ScheduleGain]:
    """Every schedule that fits this pipeline, the best first."""
    found = []
    for name in BUILDERS:
        priced = price_schedule(replay, name=name)
        if not isinstance(priced, Unavailable) and not isinstance(priced.gain, Unavailable):
            found.append(priced)
    return sorted(found, key=lambda one: -_saved(one.gain))


def _saved(gain: Gain | Unavailable) -> float:
    return 0.0 if isinstance(gain, Unavailable) else gain.saved_ns


def _replay(replay: PipelineReplay, plan: ReplayPlan, scale: float) -> Floats:
    """Last end per run."""
    recorded = _RecordedTimes(replay)
    schedule = plan.schedule
    duration = np.stack([recorded.duration_ns(schedule, a) for a in plan.actions]) * scale
    lag = np.stack([recorded.lag_ns(schedule, action) for action in plan.actions])
    gap = np.stack([recorded.gap_ns(schedule, action) for action in plan.actions])
    ready = replay.action_gaps.ready_ns
    _, end = plan.replay(duration, lag_ns=lag, gap_ns=gap, ready_ns=ready)
    last: Floats = end.max(axis=0)
    return last


class _RecordedTimes:
    """Recorded times for the actions of another schedule; vectors over runs."""

    def __init__(self, replay: PipelineReplay) -> None:
        plan = replay.plan
        self._schedule = plan.schedule
        self._index_of = {action: index for index, action in enumerate(plan.actions)}
        self._duration = replay.duration_ns
        self._lag = replay.action_gaps.lag_ns
        self._gap = replay.action_gaps.gap_ns
        self._is_remote = plan.remote >= 0
        self._has_before = plan.before >= 0
        remote = self._lag[self._is_remote]
        self._any_lag = np.median(remote, axis=0) if len(remote) else np.zeros(self._lag.shape[1])
        self._any_gap = np.median(self._gap[self._has_before], axis=0)

    def duration_ns(self, schedule: Schedule, action: Action) -> Floats:
        """The rank's time for this kind, shared evenly among its stages."""
        rank = schedule.stage_ranks[action.stage]
        if schedule.stage_ranks == self._schedule.stage_ranks:
            return self._of_stage(action.kind, action.stage, action.microbatch)
        parts = [
            self._of_stage(action.kind, stage, action.microbatch)
            for stage in self._schedule.stages_of(rank)
        ]
        shared: Floats = np.sum(parts, axis=0) / len(schedule.stages_of(rank))
        return shared

    def _of_stage(self, kind: ActionKind, stage: int, microbatch: int) -> Floats:
        microbatch %= self._schedule.num_microbatches
        index = self._index_of.get(Action(kind, stage, microbatch))
        if index is not None:
            own: Floats = self._duration[index]
            return own
        if kind is _B:
            parts = [self._index_of[Action(part, stage, microbatch)] for part in (_I, _W)]
            whole: Floats = self._duration[parts].sum(axis=0)
            return whole
        half: Floats = self._duration[self._index_of[Action(_B, stage, microbatch)]] / 2
        return half

    def lag_ns(self, schedule: Schedule, action: Action) -> Floats:
        """The lag of the recorded action of the same rank and direction, if its input travelled."""
        index = self._find(schedule, action)
        if index is None or not self._is_remote[index]:
            return self._any_lag
        lag: Floats = self._lag[index]
        return lag

    def gap_ns(self, schedule: Schedule, action: Action) -> Floats:
        """The gap of the recorded action of the same rank and kind."""
        index = self._find(schedule, action)
        if index is None or not self._has_before[index]:
            return self._any_gap
        gap: Floats = self._gap[index]
        return gap

    def _find(self, schedule: Schedule, action: Action) -> int | None:
        rank = schedule.stage_ranks[action.stage]
        stage = action.stage
        if schedule.stage_ranks != self._schedule.stage_ranks:
            stage = self._schedule.stages_of(rank)[0]
        microbatch = action.microbatch % self._schedule.num_microbatches
        for kind in {_B: (_B, _I), _I: (_I, _B), _W: (_W,)}.get(action.kind, (action.kind,)):
            index = self._index_of.get(Action(kind, stage, microbatch))
            if index is not None:
                return index
        return None
