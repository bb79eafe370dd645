"""The chain of work and transfers across ranks that a run's time consists of.

The path is walked backwards from the last end of each window: from every event to the one that it
waited for. A rank that continued after an operation is reached from the operation's end, and the
operation from its last arriver. The parts of the path sum to the replayed time. Shares are by rank,
kind, phase (of work) and axis with kind of operation (of transfers).

Slack of an event: how much later it could have come without any window ending later. If two chains
are about equally long, the path shows only one of them: the what-if gain beside a share says what
removing it really saves.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.group_axis import OTHER
from meshscope.core.operations import Kind
from meshscope.simulate.rank_events import EventKind
from meshscope.simulate.recorded_graph import RecordedGraph, measured_work
from meshscope.simulate.what_if import Replay
from meshscope.store.read.arrays import Int32s, Int64s

_FAR = 1 << 60


class PathKind(StrEnum):
    WORK = "work"
    TRANSFER = "transfer"
    NOTICE = "notice"
    """From the end of an operation or input until the rank continued."""
    HELD = "held"
    """Held up by something that is not modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathShare:
    """All parts of the path that are alike."""

    rank: int
    kind: PathKind
    phase: str
    """Of work; empty: in no phase."""
    axis: str
    """Of transfers; empty for others."""
    operation: str
    """Kind of operation of transfers; empty for others."""
    total_ns: int
    ratio: float
    """Of the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlack:
    """How late a rank could be."""

    rank: int
    slack_ns: float
    """Median over steps of the smallest slack of the rank's events in a step."""
    path_ratio: float
    """Share of the path that lies on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The path of all windows together."""

    total_ns: int
    num_steps: int
    shares: tuple[PathShare, ...]
    """The largest first; they sum to `total_ns`."""
    ranks: tuple[RankSlack, ...]
    """In order of rank."""
    num_rank_changes: int
    """How often the path goes from one rank to another."""


def find_critical_path(replay: Replay) -> CriticalPath:
    timeline, recorded = replay.timeline, replay.recorded
    weight = recorded.weight_ns
    times = recorded.graph.evaluate(weight[:, None], recorded.release_ns)[:, 0]
    path = _walk(timeline, recorded, times)
    table = _sum_parts(timeline, recorded, path)
    total = sum(table.values())
    shares = [
        PathShare(
            rank=rank, kind=PathKind(kind), phase=phase, axis=axis, operation=operation,
            total_ns=value, ratio=value / total if total else 0.0,
        )
        for (rank, kind, phase, axis, operation), value in table.items()
        if value
    ]  # fmt: skip
    shares.sort(key=lambda share: (-share.total_ns, share.rank, share.phase))
    owner = _find_owners(timeline, recorded)[recorded.target[path]]
    return CriticalPath(
        total_ns=total,
        num_steps=replay.fidelity.num_steps,
        shares=tuple(shares),
        ranks=_measure_slack(timeline, recorded, times, shares),
        num_rank_changes=int(np.count_nonzero(np.diff(owner[owner >= 0]))),
    )


def _find_slack_ns(timeline: Timeline, recorded: RecordedGraph, times: Int64s) -> Int64s:
    """[node]: how much later each event could come."""
    last = _find_last(timeline, recorded, times)
    deadline = np.full(len(times), _FAR, dtype=np.int64)
    events = recorded.events
    is_end = np.flatnonzero(events.kind == EventKind.STEP_END)
    of_window = np.zeros(int(events.window.max(initial=0)) + 1, dtype=np.int64)
    of_window[events.window[last]] = times[last]
    deadline[is_end] = of_window[events.window[is_end]]
    return recorded.graph.find_latest(recorded.weight_ns, deadline) - times


def _find_last(timeline: Timeline, recorded: RecordedGraph, times: Int64s) -> Int64s:
    """The event that ends each window."""
    events = recorded.events
    ends = np.flatnonzero(events.kind == EventKind.STEP_END)
    order = ends[np.lexsort((-events.rank_index[ends], times[ends], events.window[ends]))]
    window = events.window[order]
    is_last = np.append(window[1:] != window[:-1], True)
    found: Int64s = order[is_last]
    return found


def _walk(timeline: Timeline, recorded: RecordedGraph, times: Int64s) -> Int64s:
    """The edges of the path in every window."""
    graph = recorded.graph
    arrival = times[recorded.source] + recorded.weight_ns
    is_tight = arrival == times[recorded.target]
    # The last of several tight edges is taken: the chain along the rank.
    chosen = np.full(graph.num_nodes, -1, dtype=np.int64)
    tight = np.flatnonzero(is_tight)
    chosen[recorded.target[tight]] = tight
    into, source = chosen.tolist(), recorded.source.tolist()
    found = []
    for node in _find_last(timeline, recorded, times).tolist():
        while into[node] >= 0:
            found.append(into[node])
            node = source[into[node]]
    return np.array(found, dtype=np.int64)


def _find_owners(timeline: Timeline, recorded: RecordedGraph) -> Int32s:
    """[node]: the rank whose event, or end of an operation, it is; -1 for none."""
    owner = np.full(recorded.graph.num_nodes, -1, dtype=np.int32)
    ranks = np.array(timeline.ranks, dtype=np.int32)
    owner[: len(recorded.events)] = ranks[recorded.events.rank_index]
    if timeline.communication is not None:
        is_end = recorded.end_row >= 0
        rows = timeline.communication.operations.rows
        owner[is_end] = rows.rank[recorded.end_row[is_end]]
    return owner


Table = dict[tuple[int, str, str, str, str], int]


def _sum_parts(timeline: Timeline, recorded: RecordedGraph, path: Int64s) -> Table:
    table: Table = {}
    is_chain = path >= recorded.chain[0] if len(recorded.chain) else path < 0
    is_transfer = path < len(recorded.transfer)
    _add_chain(table, timeline, recorded, path[is_chain])
    _add_transfers(table, timeline, recorded, path[is_transfer])
    rest = path[~is_chain & ~is_transfer]
    owner = _find_owners(timeline, recorded)[recorded.target[rest]]
    for rank, value in zip(owner.tolist(), recorded.weight_ns[rest].tolist(), strict=True):
        if value:
            _add(table, (rank, PathKind.NOTICE, "", "", ""), value)
    return table


def _add(table: Table, key: tuple[int, str, str, str, str], value: int) -> None:
    table[key] = table.get(key, 0) + value


def _add_chain(table: Table, timeline: Timeline, recorded: RecordedGraph, path: Int64s) -> None:
    """Work between two events of a rank, by phase, and the unexplained rest."""
    pieces, work = timeline.pieces, measured_work(timeline)
    first, last = recorded.source[path], recorded.target[path]
    fixed = recorded.fixed_ns
    for start, end in zip(first.tolist(), last.tolist(), strict=True):
        rank = timeline.ranks[int(recorded.events.rank_index[end])]
        if fixed[end]:
            _add(table, (rank, PathKind.HELD, "", "", ""), int(fixed[end]))
        low, high = int(recorded.piece[start]), int(recorded.piece[end])
        inside = work[low : high + 1].copy()
        inside[-1] = round(work[high] * float(recorded.piece_part[end]))
        inside[0] -= round(work[low] * float(recorded.piece_part[start]))
        for offset in np.flatnonzero(inside).tolist():
            phase = timeline.phases[pieces.phase[low + offset]]
            _add(table, (rank, PathKind.WORK, phase, "", ""), int(inside[offset]))


def _add_transfers(table: Table, timeline: Timeline, recorded: RecordedGraph, path: Int64s) -> None:
    if timeline.communication is None:
        return
    operations = timeline.communication.operations
    rows = operations.rows
    path_rows = recorded.transfer_row[path].tolist()
    for row, value in zip(path_rows, recorded.weight_ns[path].tolist(), strict=True):
        group = int(rows.group[row])
        axis = operations.groups[group].axis if group >= 0 else OTHER
        kind = Kind(int(rows.kind[row])).label
        _add(table, (int(rows.rank[row]), PathKind.TRANSFER, "", axis, kind), value)


def _measure_slack(
    timeline: Timeline, recorded: RecordedGraph, times: Int64s, shares: list[PathShare]
) -> tuple[RankSlack, ...]:
    slack = _find_slack_ns(timeline, recorded, times)
    events = recorded.events
    step = timeline.pieces.step[recorded.piece]
    smallest = np.full((len(timeline.ranks), len(timeline.steps)), _FAR, dtype=np.int64)
    np.minimum.at(smallest, (events.rank_index, step), slack[: len(events)])
    is_replayed = (smallest < _FAR).any(axis=0)
    median = np.median(smallest[:, is_replayed], axis=1)
    on_path = {rank: sum(s.ratio for s in shares if s.rank == rank) for rank in timeline.ranks}
    return tuple(
        RankSlack(rank=rank, slack_ns=float(median[rank_index]), path_ratio=on_path[rank])
        for rank_index, rank in enumerate(timeline.ranks)
    )
