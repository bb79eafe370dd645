"""Who is late of its own: the analyses that the rules about stragglers, pauses and imbalance share.

Each function is for `context.obtain`, which makes it once. Rules of other subjects read
`obtain_suspects`: waits that suspects account for are not to be reported a second time.

What the garbage collector took is taken off before ranks are compared: a rank that collects in
every step is not slow, it pauses.
"""

from dataclasses import replace

import numpy as np

from meshscope.analyze.job.operations import find_rows
from meshscope.analyze.stragglers.pauses import Pauses, find_pauses
from meshscope.analyze.stragglers.sequence_imbalance import (
    SequenceImbalance,
    measure_sequence_imbalance,
)
from meshscope.analyze.stragglers.stragglers import Stragglers, find_stragglers
from meshscope.analyze.stragglers.suspects import Suspects, list_suspects
from meshscope.analyze.timeline.gc_collections import Collections, measure_collections
from meshscope.analyze.timeline.peer_work import PeerWork, find_compared, measure_peer_work
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.context import Context
from meshscope.store.read.arrays import Floats
from meshscope.store.read.columns import int64_column


def obtain_peer_work(context: Context) -> PeerWork | Unavailable:
    """Work by phase, step and rank."""
    timeline = context.timeline
    return timeline if isinstance(timeline, Unavailable) else measure_peer_work(timeline)


def obtain_collections(context: Context) -> Collections | Unavailable:
    """What the garbage collector took."""
    timeline = context.timeline
    if isinstance(timeline, Unavailable):
        return timeline
    return measure_collections(context.attempt, timeline)


def obtain_collected(context: Context) -> Floats | Unavailable:
    """[step, rank place]: compared work that the garbage collector took."""
    collections = context.obtain(obtain_collections)
    timeline = context.timeline
    if isinstance(collections, Unavailable):
        return collections
    if isinstance(timeline, Unavailable):
        return timeline
    return _sum_cells(timeline, collections.lost_ns)


def _sum_cells(timeline: Timeline, values: np.typing.NDArray[np.int64]) -> Floats:
    rows = find_compared(timeline)
    shape = (len(timeline.steps), len(timeline.ranks))
    place = np.searchsorted(np.array(timeline.ranks), timeline.pieces.rank[rows])
    cell = timeline.pieces.step[rows].astype(np.int64) * shape[1] + place
    sums = np.bincount(cell, values[rows], minlength=shape[0] * shape[1])
    return np.asarray(sums.reshape(shape), dtype=np.float64)


def obtain_stragglers(context: Context) -> Stragglers | Unavailable:
    """Slow ranks, with what the garbage collector took left out."""
    work, timeline = context.obtain(obtain_peer_work), context.timeline
    if isinstance(work, Unavailable):
        return work
    if isinstance(timeline, Unavailable):
        return timeline
    collections = context.obtain(obtain_collections)
    if not isinstance(collections, Unavailable) and collections.has_any:
        work = _without_collections(work, timeline, collections)
    hosts = {
        rank: host
        for rank, recording in context.attempt.ranks.items()
        if isinstance(host := recording.header.get("host"), str)
    }
    return find_stragglers(work, timeline.layout, hosts)


def _without_collections(work: PeerWork, timeline: Timeline, collections: Collections) -> PeerWork:
    by_phase = [
        _sum_cells(timeline, np.where(timeline.pieces.phase == place, collections.lost_ns, 0))
        for place in work.phase_places
    ]
    lost = _sum_cells(timeline, collections.lost_ns)
    return replace(
        work,
        work_ns=work.work_ns - np.array(by_phase).reshape(work.work_ns.shape),
        total_ns=work.total_ns - lost,
    )


def obtain_pauses(context: Context) -> Pauses | Unavailable:
    """Sporadic pauses of ranks that are not slow otherwise, whatever they come from."""
    work = context.obtain(obtain_peer_work)
    if isinstance(work, Unavailable):
        return work
    stragglers = context.obtain(obtain_stragglers)
    named = frozenset() if isinstance(stragglers, Unavailable) else stragglers.ranks
    return find_pauses(work, without=named)


def obtain_suspects(context: Context) -> Suspects | Unavailable:
    """Who is late of its own, for rules that read waits."""
    work, pauses = context.obtain(obtain_peer_work), context.obtain(obtain_pauses)
    stragglers = context.obtain(obtain_stragglers)
    if isinstance(work, Unavailable):
        return work
    if isinstance(stragglers, Unavailable):
        return stragglers
    return pauses if isinstance(pauses, Unavailable) else list_suspects(work, stragglers, pauses)


def obtain_sequence_imbalance(context: Context) -> SequenceImbalance | Unavailable:
    """How forward and backward of the same data vary together."""
    work, timeline = context.obtain(obtain_peer_work), context.timeline
    if isinstance(work, Unavailable):
        return work
    if isinstance(timeline, Unavailable):
        return timeline
    return measure_sequence_imbalance(work, timeline, _read_tokens(context, work))


def _read_tokens(context: Context, work: PeerWork) -> Floats:
    """[step, rank]: tokens the recorder counted; not a number where it did not."""
    tokens = np.full(work.total_ns.shape, np.nan)
    for place, rank in enumerate(work.ranks):
        columns = context.attempt.ranks[rank].read("steps")
        row = find_rows(work.steps, int64_column(columns, "step"))
        counted = int64_column(columns, "input_tokens")
        known = (row >= 0) & (counted >= 0)
        tokens[row[known], place] = counted[known]
    return tokens
