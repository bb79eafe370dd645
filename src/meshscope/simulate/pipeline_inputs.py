"""Inputs of pipeline actions whose transfer was not recorded: their makers and arrivals.

An F of stage s needs the F of stage s-1 of the same microbatch, a B or I the B or I of stage s+1,
on the rank that differs only along pp. Used only for waits that no recorded operation explains.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import ACTION_KINDS, Actions, Timeline
from meshscope.core.layout import Layout
from meshscope.simulate.rank_events import EventKind, RankEvents, join_events, make_events
from meshscope.store.read.arrays import Int64s

_FORWARD = ACTION_KINDS.index("F")
_BACKWARDS = (ACTION_KINDS.index("B"), ACTION_KINDS.index("I"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineInputs:
    """Waits for inputs, and the actions that made them."""

    events: RankEvents
    maker: Int64s
    """[action]: the action that makes its input; -1."""
    num_actions: int


def find_pipeline_inputs(timeline: Timeline) -> PipelineInputs | None:
    """None if actions wait for recorded operations only."""
    actions = timeline.actions
    if actions is None or not isinstance(timeline.layout, Layout):
        return None
    pieces = timeline.pieces
    is_input = (pieces.kind == PieceKind.WAIT) & (pieces.row < 0) & (pieces.action >= 0)
    waiting = np.unique(pieces.action[is_input])
    if not len(waiting):
        return None
    maker = _find_makers(actions, timeline.layout)
    began, over = actions.wait_start_ns, actions.wait_start_ns + actions.wait_ns
    maker_end = np.where(maker >= 0, actions.end_ns[maker], np.iinfo(np.int64).max)
    waiting = waiting[(began[waiting] >= 0) & (maker_end[waiting] <= over[waiting])]
    if not len(waiting):
        return None
    ranks = np.array(timeline.ranks)
    made = np.unique(maker[waiting])
    needs = make_events(
        timeline,
        EventKind.INPUT,
        np.searchsorted(ranks, actions.rank[waiting]),
        over[waiting],
        waiting,
        held_since_ns=began[waiting],
    )
    makes = make_events(
        timeline,
        EventKind.MADE,
        np.searchsorted(ranks, actions.rank[made]),
        actions.end_ns[made],
        made,
    )
    return PipelineInputs(events=join_events([needs, makes]), maker=maker, num_actions=len(actions))


def _find_makers(actions: Actions, layout: Layout) -> Int64s:
    """The action that makes the input of each action; -1 if there is none."""
    line = np.array([_line_of(rank, layout) for rank in actions.rank.tolist()], dtype=np.int64)
    is_forward = actions.kind == _FORWARD
    needs_input = is_forward | np.isin(actions.kind, _BACKWARDS)
    # A B and an I make the same output; both are keyed alike.
    way = np.where(is_forward, 0, 1)
    key = _pack(line, actions.step, way, actions.microbatch, actions.stage)
    source = actions.stage + np.where(is_forward, -1, 1)
    wanted = _pack(line, actions.step, way, actions.microbatch, source)
    makers = np.flatnonzero(needs_input)
    order = makers[np.argsort(key[makers], kind="stable")]
    maker = np.full(len(actions), -1, dtype=np.int64)
    if len(order):
        at = np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)
        is_found = (key[order][at] == wanted) & needs_input & (source >= 0)
        maker = np.where(is_found, order[at], -1)
    return maker


def _line_of(rank: int, layout: Layout) -> int:
    """A number that ranks of one pipeline share."""
    if not 0 <= rank < layout.world_size:
        return -1
    stride, degree = layout.stride("pp"), layout.degree("pp")
    return rank - (rank // stride % degree) * stride


def _pack(
    line: Int64s, step: np.ndarray, way: np.ndarray, microbatch: np.ndarray, stage: np.ndarray
) -> Int64s:
    packed = line.astype(np.int64)
    for column, size in ((step, 1 << 20), (way, 2), (microbatch, 1 << 12), (stage + 1, 1 << 10)):
        packed = packed * size + column.astype(np.int64) % size
    return packed
