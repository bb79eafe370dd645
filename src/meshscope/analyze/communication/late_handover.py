"""Operations along one axis that are repeatedly handed to the network late.

A link may be slow before an operation is called: a buffer is copied, a driver is slow, a sender is
held back. That shows as work of the sender right before operations of the axis, and not elsewhere.
It can be found where pipeline actions were recorded, because they show what else there was to do:

- inside actions, by how much longer actions that issue such operations take than others of the
  same rank, stage, kind and step;
- between actions, as the time from the end of an action to the call of a send.

Wrong where an action that issues operations has more to compute, such as gradients that only the
last microbatch makes. The excess must be half of an action, so that copying gradients into buckets
does not count.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.communication.link_samples import FLOOR_QUANTILE
from meshscope.analyze.job.job import Job
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.numerics.chance import MIN_STEPS
from meshscope.store.read.arrays import Bools, Floats, Int32s, Int64s

_MIN_ACTION_RATIO = 0.5
"""Least excess of actions that issue operations, as a share of an action."""
_MIN_SEND_RATIO = 5.0
"""Least ratio of the delay of a rank's sends to that of others."""
_MIN_SEND_NS = 500_000
"""Least excess delay: less is scheduling."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LateHandover:
    """Ranks that hand operations of an axis over late."""

    axis: str
    ranks: tuple[int, ...]
    delay_ns: float
    """Of one operation: exceeded by nine in ten, the median over these ranks."""
    usual_ns: float
    """The same where nothing is late."""
    num_per_step: float
    """Late operations, or actions with late operations, per rank and step."""
    num_steps: int
    new_work_ns: Int64s
    """Durations of all pieces without the delay."""

    @property
    def cost_ns(self) -> float:
        """Of a rank, per step."""
        return self.delay_ns * self.num_per_step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Delay:
    rank: int
    axis: str
    delay_ns: float
    usual_ns: float
    num_per_step: float
    num_steps: int
    piece: Int64s
    """The pieces to shorten, each once per delay."""
    action: Int64s
    """Or the actions whose longest piece of work is to be shortened."""


def find_late_handovers(timeline: Timeline) -> list[LateHandover]:
    """By axis, costliest first; none without recorded actions."""
    communication = timeline.communication
    if timeline.actions is None or communication is None:
        return []
    piece = _locate_calls(timeline, communication)
    found = _find_in_actions(timeline, communication, piece)
    found += _find_late_sends(timeline, communication, piece)
    axes = dict.fromkeys(one.axis for one in found)
    joined = [_join(timeline, [one for one in found if one.axis == axis]) for axis in axes]
    return sorted(joined, key=lambda one: -one.cost_ns)


def _locate_calls(timeline: Timeline, communication: Job) -> Int64s:
    """For each operation row the piece in which, or at whose end, it was called; -1 for none."""
    pieces, rows = timeline.pieces, communication.operations.rows
    called = communication.times.enqueue_ns
    found = np.full(len(rows), -1, dtype=np.int64)
    edges = np.searchsorted(pieces.rank, np.append(timeline.ranks, timeline.ranks[-1] + 1))
    for index, rank in enumerate(timeline.ranks):
        first, last = int(edges[index]), int(edges[index + 1])
        own = np.arange(*np.searchsorted(rows.rank, (rank, rank + 1)))
        at = first + np.searchsorted(pieces.start_ns[first:last], called[own], side="left") - 1
        is_inside = (at >= first) & (called[own] <= pieces.end_ns[np.maximum(at, 0)])
        found[own] = np.where(is_inside, at, -1)
    return found


def _find_in_actions(timeline: Timeline, communication: Job, piece: Int64s) -> list[_Delay]:
    actions, pieces = timeline.actions, timeline.pieces
    assert actions is not None
    is_work = (pieces.kind == PieceKind.WORK) & (pieces.action >= 0)
    work = np.zeros(len(actions))
    np.add.at(work, pieces.action[is_work], pieces.duration_ns[is_work])
    sort = (actions.rank.astype(np.int64) * 4096 + actions.stage % 4096) * 4 + actions.kind
    order = np.argsort(sort, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(sort[order])) + 1)
    found = []
    for axis, issues in _find_issuing(timeline, communication, piece).items():
        for own in groups:
            is_issuing = issues[own]
            if is_issuing.any() and not is_issuing.all():
                delay = _compare_actions(timeline, axis, own[is_issuing], own[~is_issuing], work)
                found += [] if delay is None else [delay]
    return found


def _find_issuing(timeline: Timeline, communication: Job, piece: Int64s) -> dict[str, Bools]:
    """By axis: which actions issue its collectives."""
    actions, rows = timeline.actions, communication.operations.rows
    assert actions is not None
    is_collective = (rows.kind != Kind.SEND) & (rows.kind != Kind.RECV) & (rows.group >= 0)
    row = np.flatnonzero((piece >= 0) & is_collective)
    action = timeline.pieces.action[piece[row]]
    row, action = row[action >= 0], action[action >= 0]
    axes = np.array([group.axis for group in communication.operations.groups] or [""])
    found = {}
    for axis in np.unique(axes[rows.group[row]]).tolist():
        issues = np.zeros(len(actions), dtype=np.bool_)
        issues[action[axes[rows.group[row]] == axis]] = True
        found[axis] = issues
    return found


def _compare_actions(
    timeline: Timeline, axis: str, issuing: Int64s, others: Int64s, work_ns: Floats
) -> _Delay | None:
    """Compares actions of one rank, stage and kind that issue operations with the others."""
    actions, num_steps = timeline.actions, len(timeline.steps)
    assert actions is not None
    usual = _step_minima(actions.step[others], work_ns[others], num_steps)
    excess = work_ns[issuing] - usual[actions.step[issuing]]
    row, excess = issuing[np.isfinite(excess)], excess[np.isfinite(excess)]
    steps = np.unique(actions.step[row])
    if len(steps) < MIN_STEPS:
        return None
    floor = float(np.quantile(excess, FLOOR_QUANTILE))
    level = float(np.median(work_ns[others]))
    if floor < _MIN_ACTION_RATIO * level:
        return None
    return _Delay(
        rank=int(actions.rank[row[0]]),
        axis=axis,
        delay_ns=float(np.median(excess)),
        usual_ns=level,
        num_per_step=len(row) / len(steps),
        num_steps=len(steps),
        piece=np.empty(0, dtype=np.int64),
        action=row,
    )


def _step_minima(step: Int32s, values: Floats, num_steps: int) -> Floats:
    """Per step the smallest value; infinite where there is none."""
    found = np.full(num_steps, np.inf)
    np.minimum.at(found, step, values)
    return found


def _longest_pieces(timeline: Timeline) -> Int64s:
    """For each action its longest piece of work; -1 for none."""
    pieces, actions = timeline.pieces, timeline.actions
    assert actions is not None
    row = np.flatnonzero((pieces.action >= 0) & (pieces.kind == PieceKind.WORK))
    longest = np.full(len(actions), -1, dtype=np.int64)
    # The longest of an action is written last.
    order = row[np.argsort(pieces.duration_ns[row], kind="stable")]
    longest[pieces.action[order]] = order
    return longest


def _find_late_sends(timeline: Timeline, communication: Job, piece: Int64s) -> list[_Delay]:
    """Pairs of ranks whose sends come long after their output was made."""
    rows = communication.operations.rows
    row, at, delay = _measure_send_delays(timeline, communication, piece)
    route = rows.rank[row].astype(np.int64) * communication.operations.world_size + rows.peer[row]
    routes, of_row = np.unique(route, return_inverse=True)
    if len(routes) < 2:
        return []
    order = np.argsort(of_row, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(of_row[order])) + 1)
    floors = [float(np.quantile(delay[own], FLOOR_QUANTILE)) for own in parts]
    usual = float(np.quantile(floors, 0.25, method="lower"))
    found = []
    for own, floor in zip(parts, floors, strict=True):
        num_steps = len(np.unique(timeline.pieces.step[at[own]]))
        if floor < max(_MIN_SEND_RATIO * usual, _MIN_SEND_NS) or num_steps < MIN_STEPS:
            continue
        found.append(
            _Delay(
                rank=int(rows.rank[row[own[0]]]),
                axis=_axis_of(communication, row[own]),
                delay_ns=float(np.median(delay[own])) - usual,
                usual_ns=usual,
                num_per_step=len(own) / num_steps,
                num_steps=num_steps,
                piece=at[own],
                action=np.empty(0, dtype=np.int64),
            )
        )
    return found


def _measure_send_delays(
    timeline: Timeline, communication: Job, piece: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Sends between actions: row, piece, and idle time before the call."""
    pieces, rows = timeline.pieces, communication.operations.rows
    row = np.flatnonzero((piece >= 0) & (rows.kind == Kind.SEND) & (rows.peer >= 0))
    at = piece[row]
    is_between = (pieces.action[at] < 0) & (pieces.kind[at] == PieceKind.WORK)
    row, at = row[is_between], at[is_between]
    called = communication.times.enqueue_ns[row]
    start = pieces.start_ns[at].copy()
    # The second send of a gap counts from the first.
    second = np.flatnonzero(at[1:] == at[:-1]) + 1
    start[second] = called[second - 1]
    return row, at, called - start


def _axis_of(communication: Job, row: Int64s) -> str:
    operations = communication.operations
    group = int(operations.rows.group[row[0]])
    return operations.groups[group].axis if group >= 0 else "other"


def _join(timeline: Timeline, delays: list[_Delay]) -> LateHandover:
    work = timeline.pieces.duration_ns.copy()
    longest = _longest_pieces(timeline)
    for delay in delays:
        piece = np.concatenate([delay.piece, longest[delay.action]])
        np.subtract.at(work, piece[piece >= 0], round(delay.delay_ns))
    return LateHandover(
        axis=delays[0].axis,
        ranks=tuple(sorted({delay.rank for delay in delays})),
        delay_ns=float(np.median([delay.delay_ns for delay in delays])),
        usual_ns=float(np.median([delay.usual_ns for delay in delays])),
        num_per_step=float(np.median([delay.num_per_step for delay in delays])),
        num_steps=min(delay.num_steps for delay in delays),
        new_work_ns=np.maximum(work, 0),
    )
