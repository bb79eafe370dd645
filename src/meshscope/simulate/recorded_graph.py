"""The dependency graph of a recorded run: what each rank did, and what it waited for.

Nodes: the events of every rank (`rank_events`), the last arrival at each collective, and the end of
each operation on each rank. Edges: along a rank from event to event, weighted by the work in
between; arrival → last arrival → end, a transfer later; end of the previous operation of the group
→ end; end → the rank continues, after the time to notice. If no recorded send and recv say so, the
input of a pipeline action depends on the action that makes it.

Every duration is measured, so the replay repeats the run, unexplained time included.
`weigh_explained` leaves unexplained time out: `what_if.Fidelity` is what is then missing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.analyze.job.job import Job
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable
from meshscope.simulate.dependency_graph import NEVER, DependencyGraph, arrange_graph
from meshscope.simulate.operation_times import OperationTimes, find_operation_times
from meshscope.simulate.pipeline_inputs import PipelineInputs, find_pipeline_inputs
from meshscope.simulate.rank_events import (
    EventKind,
    RankEvents,
    collect_events,
    find_asked,
    find_equal,
    find_hold_ups,
)
from meshscope.store.read.arrays import Bools, Int64s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedGraph:
    """A run's events with measured durations."""

    events: RankEvents
    """The first nodes."""
    operations: OperationTimes | None
    graph: DependencyGraph
    source: Int64s
    target: Int64s
    weight_ns: Int64s
    """[edge] as measured."""
    release_ns: Int64s
    """[node]."""
    chain: Int64s
    """Edges along ranks."""
    transfer: Int64s
    """Edges whose weight is a transfer."""
    transfer_row: Int64s
    """[transfer edge]: the operation's row."""
    end_row: Int64s
    """[node]: the row whose end it is; -1."""
    piece: Int64s
    """[event]: the piece that contains it or ends at it."""
    piece_part: npt.NDArray[np.float64]
    """[event]: the part of that piece before it, 0..1; 0 if the piece is not work."""
    fixed_ns: Int64s
    """[event]: unexplained time since the previous event."""
    notice: Int64s
    """Edges whose weight is the time a rank took to notice that it may continue."""

    def weigh_explained(self) -> Int64s:
        """[edge]: weights without unexplained time, and with the usual time to notice."""
        weight = self.weight_ns.copy()
        weight[self.chain] -= self.fixed_ns[self.target[self.chain]]
        if len(self.notice):
            weight[self.notice] = int(np.median(weight[self.notice]))
        return weight

    def weigh_chain(self, work_ns: Int64s) -> Int64s:
        """[chain edge]: weights for these durations of pieces."""
        at = _sum_work_before(work_ns, self.piece, self.piece_part)
        target = self.target[self.chain]
        return at[target] - at[self.source[self.chain]] + self.fixed_ns[target]


def build_graph(timeline: Timeline) -> RecordedGraph | Unavailable:
    communication = timeline.communication
    operations, holds, inputs = None, None, None
    row_window = np.empty(0, dtype=np.int64)
    if communication is not None:
        holds = find_hold_ups(communication)
        asked = find_asked(communication.operations.rows, holds, communication.times.end_ns)
        operations = find_operation_times(timeline, communication, asked)
        row_window = operations.window
    if operations is None or not _has_messages(communication, operations):
        inputs = find_pipeline_inputs(timeline)
    input_events = None if inputs is None else inputs.events
    events = collect_events(timeline, holds, row_window, input_events)
    return _Assembly(timeline, events, operations, inputs).finish()


def _has_messages(communication: Job | None, operations: OperationTimes) -> bool:
    """Whether recorded sends and recvs show what pipeline actions wait for."""
    if communication is None:
        return False
    kind = communication.operations.rows.kind[operations.is_modelled]
    return bool((kind == Kind.RECV).any())


class _Assembly:
    """Assembles nodes and edges."""

    def __init__(
        self,
        timeline: Timeline,
        events: RankEvents,
        operations: OperationTimes | None,
        inputs: PipelineInputs | None,
    ) -> None:
        self.timeline, self.events, self.operations = timeline, events, operations
        self.num_nodes = len(events)
        self.edges: list[tuple[Int64s, Int64s, Int64s]] = []
        self.noticing: set[int] = set()
        """Which of `edges` are times to notice."""
        self.transfer_row: list[Int64s] = []
        self.piece, self.piece_part = _locate(timeline, events)
        self.source_ns = np.full(len(events), NEVER, dtype=np.int64)
        """[event]: the measured time of what ends its hold-up."""
        self.end_row = np.empty(0, dtype=np.int64)
        self.num_transfers = 0
        if operations is not None:
            self._add_operations(operations)
        if inputs is not None:
            self._add_inputs(inputs)

    def _add(self, source: Int64s, target: Int64s, weight_ns: Int64s) -> None:
        self.edges.append((source, target, weight_ns))

    def _add_operations(self, operations: OperationTimes) -> None:
        events, num_rows = self.events, len(operations.match)
        arrive = _index_rows(events, EventKind.ARRIVE, num_rows)
        row = np.flatnonzero(operations.is_modelled)
        end = np.full(num_rows, -1, dtype=np.int64)
        end[row] = self.num_nodes + np.arange(len(row))
        self.end_row = row
        self.num_nodes += len(row)
        shared = np.unique(operations.match[row[operations.waits_for_all[row]]])
        ready = np.full(int(operations.match.max(initial=-1)) + 1, -1, dtype=np.int64)
        ready[shared] = self.num_nodes + np.arange(len(shared))
        self.num_nodes += len(shared)
        self._add_transfers(operations, arrive, ready, end)
        member = row[ready[operations.match[row]] >= 0]
        self._add(arrive[member], ready[operations.match[member]], np.zeros_like(member))
        self._add_resumptions(operations, end)

    def _add_transfers(
        self, operations: OperationTimes, arrive: Int64s, ready: Int64s, end: Int64s
    ) -> None:
        """Adds the edges into ends first, so that they are easy to find again."""
        row = self.end_row
        to_all = row[operations.waits_for_all[row]]
        alone = row[~operations.waits_for_all[row]]
        paired = row[operations.other[row] >= 0]
        rooted = row[operations.root[row] >= 0]
        before = operations.before[row]
        queued = row[(before >= 0) & (end[before] >= 0)]
        for source, own in (
            (ready[operations.match[to_all]], to_all),
            (arrive[alone], alone),
            (arrive[operations.other[paired]], paired),
            (arrive[operations.root[rooted]], rooted),
            (end[operations.before[queued]], queued),
        ):
            self._add(source, end[own], operations.own_ns[own])
            self.transfer_row.append(own)

    def _add_resumptions(self, operations: OperationTimes, end: Int64s) -> None:
        events = self.events
        resume = np.flatnonzero(events.kind == EventKind.RESUME)
        # A hold-up that ended before the operation had another cause: that of a slow call.
        resume = resume[operations.seen_ns[events.row[resume]] <= events.time_ns[resume]]
        row = events.row[resume]
        over = operations.end_ns[row]
        self.source_ns[resume] = over
        notice = events.time_ns[resume] - np.maximum(over, events.held_since_ns[resume])
        self.noticing.add(len(self.edges))
        self._add(end[row], resume, notice)

    def _add_inputs(self, inputs: PipelineInputs) -> None:
        events = self.events
        made = _index_rows(events, EventKind.MADE, inputs.num_actions)
        needs = np.flatnonzero(events.kind == EventKind.INPUT)
        source = made[inputs.maker[events.row[needs]]]
        needs, source = needs[source >= 0], source[source >= 0]
        over = events.time_ns[source]
        self.source_ns[needs] = over
        notice = events.time_ns[needs] - np.maximum(over, events.held_since_ns[needs])
        self.noticing.add(len(self.edges))
        self._add(source, needs, notice)

    def finish(self) -> RecordedGraph | Unavailable:
        chain, fixed_ns = self._make_chain()
        others = list(self.edges)
        source = np.concatenate([edge[0] for edge in (*others, chain)])
        target = np.concatenate([edge[1] for edge in (*others, chain)])
        weight = np.concatenate([edge[2] for edge in (*others, chain)])
        graph = arrange_graph(self.num_nodes, source, target)
        if not isinstance(graph, DependencyGraph):
            return Unavailable(
                f"what was recorded waits for itself in a circle ({len(graph)} events): clocks of "
                f"ranks contradict each other, or operations were matched wrongly"
            )
        rows = np.concatenate([np.empty(0, dtype=np.int64), *self.transfer_row])
        end_row = np.full(self.num_nodes, -1, dtype=np.int64)
        num_events = len(self.events)
        end_row[num_events : num_events + len(self.end_row)] = self.end_row
        return RecordedGraph(
            events=self.events,
            operations=self.operations,
            graph=graph,
            source=source,
            target=target,
            weight_ns=weight,
            release_ns=self._find_releases(),
            chain=np.arange(len(source) - len(chain[0]), len(source)),
            transfer=np.arange(len(rows)),
            transfer_row=rows,
            end_row=end_row,
            piece=self.piece,
            piece_part=self.piece_part,
            fixed_ns=fixed_ns,
            notice=self._find_noticing(),
        )

    def _find_noticing(self) -> Int64s:
        """Indices of those edges among all."""
        size = [len(edge[0]) for edge in self.edges]
        first = np.cumsum([0, *size])
        parts = [np.arange(first[i], first[i + 1]) for i in sorted(self.noticing)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def _find_releases(self) -> Int64s:
        release = np.full(self.num_nodes, NEVER, dtype=np.int64)
        start = np.flatnonzero(self.events.kind == EventKind.START)
        release[start] = self.events.time_ns[start]
        return release

    def _make_chain(self) -> tuple[tuple[Int64s, Int64s, Int64s], Int64s]:
        events = self.events
        is_next = _follows(events)
        target = np.flatnonzero(is_next)
        at = _sum_work_before(measured_work(self.timeline), self.piece, self.piece_part)
        work = np.zeros(len(events), dtype=np.int64)
        work[target] = at[target] - at[target - 1]
        gap = np.zeros(len(events), dtype=np.int64)
        gap[target] = events.time_ns[target] - events.time_ns[target - 1]
        held = gap - work
        is_explained = (self.source_ns > NEVER) & (self.source_ns >= events.held_since_ns)
        fixed = np.where(is_explained | self._is_covered(held, is_explained), 0, held)
        return (target - 1, target, (work + fixed)[target]), fixed

    def _is_covered(self, held: Int64s, is_explained: Bools) -> Bools:
        """Events at a moment at which another hold-up ends that explains all of the time."""
        events = self.events
        begins = ~_follows(events)
        begins[1:] |= events.time_ns[1:] != events.time_ns[:-1]
        moment = np.cumsum(begins) - 1
        total = np.bincount(moment, weights=held)
        length = events.time_ns - events.held_since_ns
        covers = is_explained & (length >= total[moment])
        found: Bools = (np.bincount(moment, weights=covers) > 0)[moment]
        return found


def _sum_work_before(work_ns: Int64s, piece: Int64s, part: npt.NDArray[np.float64]) -> Int64s:
    """[event]: the work before each event, for these durations of pieces."""
    before = np.cumsum(work_ns) - work_ns
    inside: Int64s = np.rint(work_ns[piece] * part).astype(np.int64)
    return before[piece] + inside


def measured_work(timeline: Timeline) -> Int64s:
    """[piece]: its duration if it is work, else 0."""
    pieces = timeline.pieces
    return np.where(pieces.kind == PieceKind.WORK, pieces.end_ns - pieces.start_ns, 0)


def _follows(events: RankEvents) -> Bools:
    """Whether the previous event is of the same rank and window."""
    is_next = np.zeros(len(events), dtype=np.bool_)
    is_next[1:] = events.rank_index[1:] == events.rank_index[:-1]
    is_next[1:] &= events.window[1:] == events.window[:-1]
    return is_next


def _index_rows(events: RankEvents, kind: EventKind, num_rows: int) -> Int64s:
    """Row to the event of that kind; -1."""
    found = np.full(num_rows, -1, dtype=np.int64)
    event = np.flatnonzero(events.kind == kind)
    found[events.row[event]] = event
    return found


def _locate(timeline: Timeline, events: RankEvents) -> tuple[Int64s, npt.NDArray[np.float64]]:
    """The piece of each event, and the part of it that lies before the event."""
    pieces = timeline.pieces
    piece = np.empty(len(events), dtype=np.int64)
    for index, rank in enumerate(timeline.ranks):
        inside, own = find_equal(pieces.rank, rank), find_equal(events.rank_index, index)
        at = np.searchsorted(pieces.start_ns[inside], events.time_ns[own], side="right") - 1
        piece[own] = inside.start + np.maximum(at, 0)
    length = pieces.end_ns[piece] - pieces.start_ns[piece]
    offset = np.clip(events.time_ns - pieces.start_ns[piece], 0, length)
    is_work = (pieces.kind[piece] == PieceKind.WORK) & (length > 0)
    return piece, np.where(is_work, offset / np.maximum(length, 1), 0.0)
