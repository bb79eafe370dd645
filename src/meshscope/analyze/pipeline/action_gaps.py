"""What lies between pipeline actions: how long outputs travel, and what a rank does in between.

Lag: from the end of the action that makes an output to the start of the action on another rank that
uses it, if that one was waiting; it includes the transfer and everything around it. It is seen only
where a rank waited; elsewhere it is the median seen for the stage and kind. Gap: from the end of an
action to the start of the next on the same rank, or to the start of its wait, if nothing held it
up; elsewhere the median for the rank and kind. If a rank waits for an output made long before,
receiving it is part of the gap.

With the durations these replay a step; fidelity is how far the replay is from the recorded times.

Sends wait for their receivers if the recording shows it: most senders whose receiver came clearly
later than the output was made went on only then. If two ways of waiting fit, the one whose replay
with medians is closer is taken. A rank that waits for its input and its send at once does not show
what held it up; sends then wait if that replay is clearly closer.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.pipeline.action_replay import ReplayPlan, SendMode, plan_replay
from meshscope.analyze.pipeline.pipeline_times import PipelineTimes
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Bools, Floats, Int64s

_CLEARLY_BETTER = 0.7
"""Sends are taken to wait, even if not seen, if that leaves less than this share of the error."""
_LATE_NS = 300_000
"""A receiver this late after its input was made shows whether the sender waits for it: a rank needs
less from one action to the next."""
_MIN_LATE = 10
"""Late receivers needed to decide."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionGaps:
    """A pipeline's timing except the durations of actions."""

    plan: ReplayPlan
    typical_lag_ns: Floats
    """[action, 1]: medians; 0 where the input is made by this rank."""
    typical_gap_ns: Floats
    """[action, 1]: medians; 0 for the first of a row."""
    lag_ns: Floats
    """[action, run]: as seen, where it was seen."""
    gap_ns: Floats
    """[action, run]: as seen, where it was seen."""
    receive_ns: Floats
    """[action, run]: the part of the gap spent receiving an output made before."""
    is_lag_seen: bool
    """Whether a rank waited for an input; otherwise lags are 0."""
    typical_error_ratio: float
    """Mean distance of the ends replayed with medians from the recorded ones, as a share of the
    time from first to last."""
    ready_ns: Floats
    """[rank, run]: when ranks could start, from the run's origin."""
    origin_ns: Floats
    """Per run: the first moment a rank of the step was ready, on the reference clock."""
    replayed_ns: Floats
    """Per run: last end from the origin, replayed."""
    measured_ns: Floats
    """Per run: last end from the origin, recorded."""

    @property
    def fidelity_ratio(self) -> float:
        """|measured - replayed| / measured, over all runs together."""
        measured = float(self.measured_ns.sum())
        return abs(measured - float(self.replayed_ns.sum())) / measured if measured > 0 else 1.0


def measure_action_gaps(times: PipelineTimes) -> ActionGaps | Unavailable:
    best = _fit_gaps(times, SendMode.FREE)
    assert best is not None, "a schedule that was executed has no deadlock"
    if not best.typical_error_ratio < 1:
        return Unavailable("the recorded actions do not follow from each other on one clock")
    fits = [_fit_gaps(times, mode) for mode in (SendMode.BATCHED, SendMode.BLOCKING)]
    waiting = [fit for fit in fits if fit is not None]
    seen = [fit for fit in waiting if _do_senders_wait(times, fit.plan)]
    if seen:
        return min(seen, key=lambda fit: fit.typical_error_ratio)
    for other in waiting:
        if other.typical_error_ratio < _CLEARLY_BETTER * best.typical_error_ratio:
            best = other
    return best


def _do_senders_wait(times: PipelineTimes, plan: ReplayPlan) -> bool:
    """Whether most senders with a late receiver went on only when it had come."""
    before_end, came = _find_arrivals(times, plan)
    waited = times.wait_start_ns >= 0
    remote_end = times.end_ns[plan.remote]
    # An action's start without its wait says nothing if its input was late as well.
    is_seen = waited | (plan.remote < 0)[:, None] | (remote_end <= before_end)
    went_on = np.where(waited, times.wait_start_ns, times.start_ns)
    receiver_came = (came if plan.mode is SendMode.BLOCKING else before_end)[plan.receiver]
    is_late: Bools = (plan.receiver >= 0)[:, None] & (receiver_came - before_end > _LATE_NS)
    is_late &= is_seen
    num_late = int(is_late.sum())
    num_held = int((is_late & (went_on >= receiver_came)).sum())
    return num_late >= _MIN_LATE and 2 * num_held > num_late


def _find_arrivals(times: PipelineTimes, plan: ReplayPlan) -> tuple[Int64s, Int64s]:
    """[action, run]: end of the action before, and when the rank came to its input."""
    has_before = (plan.before >= 0)[:, None]
    before_end = np.where(has_before, times.end_ns[plan.before], times.ready_ns[plan.rank])
    return before_end, np.where(times.wait_start_ns >= 0, times.wait_start_ns, before_end)


def _fit_gaps(times: PipelineTimes, mode: SendMode) -> ActionGaps | None:
    plan = plan_replay(times.schedule, mode)
    if plan is None:
        return None
    origin = _step_origin(times)
    start, end = times.start_ns - origin, times.end_ns - origin
    ready = (times.ready_ns - origin).astype(np.float64)
    has_before = plan.before >= 0
    waited = times.wait_start_ns >= 0
    before_end, came = (moment - origin for moment in _find_arrivals(times, plan))
    remote_end = end[plan.remote]
    is_held: Bools = (plan.remote >= 0)[:, None] & (remote_end > came)
    receiver_came = came if mode is SendMode.BLOCKING else before_end
    is_blocked = (plan.receiver >= 0)[:, None] & (receiver_came[plan.receiver] > before_end)
    lag = np.where(is_held, np.maximum(start - remote_end, 0), np.nan)
    until = np.where(is_held, came, start)
    is_gap = has_before[:, None] & ~is_blocked & (~is_held | waited)
    gap = np.where(is_gap, np.maximum(until - before_end, 0), np.nan)
    typical_lag, is_lag_seen = _median_by(lag, _keys(plan, by_rank=False), plan.remote >= 0)
    typical_gap, _ = _median_by(gap, _keys(plan, by_rank=True), has_before)
    # An input that no rank waited for was there before it was used.
    room = np.where((plan.remote >= 0)[:, None], np.maximum(start - remote_end, 0), 0.0)
    own_lag = np.where(np.isnan(lag), np.minimum(typical_lag, room), lag)
    own_gap = np.where(np.isnan(gap), typical_gap, gap)
    is_receiving = waited & ~is_held & ~np.isnan(gap)
    receive = np.where(is_receiving, np.clip(start - came, 0, own_gap), 0.0)
    duration = (end - start).astype(np.float64)
    _, rough = plan.replay(duration, lag_ns=typical_lag, gap_ns=typical_gap, ready_ns=ready)
    _, replayed = plan.replay(duration, lag_ns=own_lag, gap_ns=own_gap, ready_ns=ready)
    measured_ns = end.max(axis=0).astype(np.float64)
    return ActionGaps(
        plan=plan,
        typical_lag_ns=typical_lag,
        typical_gap_ns=typical_gap,
        lag_ns=own_lag,
        gap_ns=own_gap,
        receive_ns=receive,
        is_lag_seen=is_lag_seen,
        typical_error_ratio=float(np.abs(rough - end).mean() / max(measured_ns.mean(), 1.0)),
        ready_ns=ready,
        origin_ns=origin.astype(np.float64),
        replayed_ns=replayed.max(axis=0),
        measured_ns=measured_ns,
    )


def _step_origin(times: PipelineTimes) -> Floats:
    """Per run: the first start of any pipeline of its step."""
    first = times.start_ns.min(axis=0)
    _, index = np.unique(times.step, return_inverse=True)
    earliest = np.full(int(index.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(earliest, index, first)
    origin: Floats = earliest[index]
    return origin


def _keys(plan: ReplayPlan, *, by_rank: bool) -> list[tuple[object, int]]:
    return [
        (action.kind, int(plan.rank[index]) if by_rank else action.stage)
        for index, action in enumerate(plan.actions)
    ]


def _median_by(
    values: Floats, keys: list[tuple[object, int]], is_wanted: Bools
) -> tuple[Floats, bool]:
    """[action, 1]: the median of the actions with the same key, else of all; 0 where unwanted."""
    seen = values[is_wanted]
    seen = seen[~np.isnan(seen)]
    overall = float(np.median(seen)) if len(seen) else 0.0
    by_key: dict[tuple[object, int], float] = {}
    for key in set(keys):
        rows = [index for index, other in enumerate(keys) if other == key]
        mine = values[rows]
        mine = mine[~np.isnan(mine)]
        by_key[key] = float(np.median(mine)) if len(mine) else overall
    medians = np.array([by_key[key] for key in keys])
    return np.where(is_wanted, medians, 0.0)[:, None], bool(len(seen))
