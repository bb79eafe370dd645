"""A recorded pipeline that can be run again: other stage times, other transfers, another order.

Actions keep their measured durations, lags and gaps, run by run (`pipeline.action_gaps`); an edit
changes some of them and the step is replayed. The gain is the difference of two replays, from the
start of a step's first pipeline to the end of its last: all pipelines of a step meet at its end,
for gradients or their norm. The time after the pipelines is assumed to stay the same.

Wrong if the rest of a step overlaps with the pipeline (gradients sent in the last backwards), and
by the error of the replay (`fidelity`); from 5 % on no answer is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.pipeline.action_gaps import ActionGaps
from meshscope.analyze.pipeline.action_replay import ReplayPlan
from meshscope.analyze.pipeline.pipeline_times import ActionSource, PipelineTimes
from meshscope.analyze.pipeline.stage_work import StageWork
from meshscope.analyze.timeline.actions import ACTION_KINDS
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.schedule import ActionKind
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.what_if import Edit, Fidelity, Gain
from meshscope.store.read.arrays import Bools, Floats, Int64s

StageFactors = Mapping[tuple[ActionKind, int], float]
"""By kind and stage: how many times as long its work takes; 1 if not given."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineReplay:
    """All runs of a recording's pipelines, as recorded."""

    times: PipelineTimes
    work: StageWork
    action_gaps: ActionGaps
    step_ns: float
    """Mean period of the steps that are replayed."""

    @property
    def plan(self) -> ReplayPlan:
        return self.action_gaps.plan

    @property
    def duration_ns(self) -> Floats:
        """[action, run]: as measured."""
        return self.times.duration_ns.astype(np.float64)

    @property
    def fidelity(self) -> Fidelity:
        """Error of the replay with measured times against the clock."""
        action_gaps = self.action_gaps
        return Fidelity(
            error_ratio=action_gaps.fidelity_ratio,
            measured_ns=float(self._step_ends(action_gaps.measured_ns).mean()),
            replayed_ns=float(self._step_ends(action_gaps.replayed_ns).mean()),
            num_steps=len(np.unique(self.times.step)),
        )

    def price(
        self,
        *,
        duration_ns: Floats | None = None,
        lag_ns: Floats | None = None,
        gap_ns: Floats | None = None,
    ) -> Gain | Unavailable:
        """The saving of other durations, lags or gaps, [action, run], in the recorded order."""
        action_gaps = self.action_gaps
        duration = self.duration_ns if duration_ns is None else duration_ns
        _, end = self.plan.replay(
            duration,
            lag_ns=action_gaps.lag_ns if lag_ns is None else lag_ns,
            gap_ns=action_gaps.gap_ns if gap_ns is None else gap_ns,
            ready_ns=action_gaps.ready_ns,
        )
        return self.compare(end.max(axis=0))

    def compare(self, end_ns: Floats, *, num_steps_each: float = 1.0) -> Gain | Unavailable:
        """The gain if runs end at `end_ns`. `num_steps_each`: how many recorded steps' samples one
        such step has."""
        fidelity = self.fidelity
        pipeline_ns = float(self._step_ends(end_ns).mean())
        rest_ns = self.step_ns - fidelity.replayed_ns
        return fidelity.price((pipeline_ns + rest_ns) / num_steps_each, self.step_ns)

    def typical_end_ns(self, duration_ns: Floats) -> float:
        """Last end with [action, 1] durations and median lags and gaps; cheap, for searching."""
        lag, gap = self.action_gaps.typical_lag_ns, self.action_gaps.typical_gap_ns
        _, end = self.plan.replay(duration_ns, lag_ns=lag, gap_ns=gap)
        return float(end.max())

    def scale_work(self, factors: StageFactors) -> Floats:
        """[action, run]: durations with the work of stages multiplied by their factors."""
        factor = np.array([factors.get((a.kind, a.stage), 1.0) for a in self.plan.actions])
        changed: Floats = self.duration_ns + self.times.work_ns * (factor[:, None] - 1)
        return changed

    def _step_ends(self, end_ns: Floats) -> Floats:
        """The last end of the pipelines of each step."""
        _, index = np.unique(self.times.step, return_inverse=True)
        last = np.zeros(int(index.max(initial=-1)) + 1)
        np.maximum.at(last, index, end_ns)
        return last


def build_pipeline_replay(
    timeline: Timeline, times: PipelineTimes, work: StageWork, action_gaps: ActionGaps
) -> PipelineReplay | Unavailable:
    step_indices = np.unique(times.step)
    period_ns = _step_periods(timeline)[step_indices]
    is_usable: Bools = period_ns > 0
    if not is_usable.any():
        return Unavailable("no step with a pipeline has a duration")
    return PipelineReplay(
        times=times, work=work, action_gaps=action_gaps, step_ns=float(period_ns[is_usable].mean())
    )


def edit_stages(timeline: Timeline, times: PipelineTimes, factors: StageFactors, name: str) -> Edit:
    """The same change of stages' work as an edit of the whole run."""
    pieces = timeline.pieces
    factor = np.ones(len(pieces))
    actions = timeline.actions
    if times.source is ActionSource.RECORDED and actions is not None:
        by_action = np.array(
            [
                factors.get((ActionKind(ACTION_KINDS[kind]), stage), 1.0)
                for kind, stage in zip(actions.kind.tolist(), actions.stage.tolist(), strict=True)
            ]
        )
        is_inside = pieces.action >= 0
        factor[is_inside] = by_action[pieces.action[is_inside]]
    else:
        for (kind, stage), value in factors.items():
            phase = "forward" if kind is ActionKind.FORWARD else "backward"
            is_there = np.isin(pieces.rank, times.ranks_of(times.schedule.stage_ranks[stage]))
            is_phase = np.array([known == phase for known in timeline.phases])
            factor[is_there & is_phase[pieces.phase]] = value
    factor[pieces.kind != PieceKind.WORK] = 1.0
    return Edit(name=name, work_ns=np.rint(pieces.duration_ns * factor).astype(np.int64))


def _step_periods(timeline: Timeline) -> Int64s:
    """Period of each step, from the last rank's end of the step before to the last rank's end."""
    periods: Int64s = timeline.period_end_ns.max(axis=0) - timeline.period_start_ns.max(axis=0)
    return periods
