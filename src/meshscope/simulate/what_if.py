"""What a step would take with other durations: the types of edits and gains, and their pricing.

An edit is a new duration for pieces of work or for transfers of operations. The run's dependency
graph (`simulate.recorded_graph`) is evaluated with measured and with edited durations. The gain is
the difference of the two replays, so that whatever the graph does not model cancels out.

Wrong if an edit changes the dependencies, or how operations share a link. `Fidelity` is the error
of a replay of only what the graph explains: work, transfers, the usual time to notice that an
operation is over. From 5 % on no answer is given.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.run_weights import weigh_steps
from meshscope.analyze.timeline.start_up import count_start_up
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Missing, Unavailable, known, need, or_unavailable
from meshscope.simulate.rank_events import EventKind, find_window_ends, number_windows
from meshscope.simulate.recorded_graph import RecordedGraph, build_graph
from meshscope.simulate.waiting_beside import WaitingBeside, find_waiting_beside
from meshscope.store.read.arrays import Bools, Floats, Int64s

MAX_FIDELITY_ERROR_RATIO = 0.05
"""From here on a replay is not accurate enough (OSDI'25)."""
MAX_REPLAY_BYTES = 100_000_000
"""What the edits that are evaluated at once may take."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edit:
    """New durations; None stays as measured."""

    name: str
    work_ns: Int64s | None = None
    """New duration of every piece, indexed like `Timeline.pieces`; only WORK pieces are read."""
    transfer_ns: Int64s | None = None
    """New transfer of every row of `Timeline.communication.operations.rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What an edit saves; negative if steps become longer."""

    saved_ns: float
    """Per step: mean over the run, by the steps replayed."""
    saved_ratio: float
    """Of `step_ns`."""
    step_ns: float
    """Replayed with measured durations, per step."""
    fidelity_ratio: float
    """`Fidelity.error_ratio`: by how much the replay misses the measured time."""

    @property
    def basis(self) -> str:
        """How it was computed."""
        return "replayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Error of a replay of explained time against the clock."""

    error_ratio: float
    """|measured - explained| / measured of the whole time replayed."""
    measured_ns: float
    """Per step: mean over the steps replayed, each from the last rank's end to the last rank's."""
    replayed_ns: float
    """With every duration as measured; gains are against this."""
    num_steps: int
    unexplained_ratio: float = 0.0
    """The share of all ranks' time in which something that is not modelled held them up (operations
    not found on all ranks, or timed by the program); a replay keeps it as it was."""

    @property
    def is_enough(self) -> bool:
        """Whether answers may be given."""
        return self.error_ratio < MAX_FIDELITY_ERROR_RATIO

    @property
    def problem(self) -> Unavailable | None:
        """Why no answer may be given; None if it is accurate enough."""
        if self.is_enough:
            return None
        return Unavailable(
            f"the replay of what is explained misses the measured step time by "
            f"{self.error_ratio:.1%}, and from {MAX_FIDELITY_ERROR_RATIO:.0%} on it does not speak "
            f"for the run: something that takes time is not in what was recorded"
        )

    def price(self, edited_ns: float, step_ns: float | None = None) -> Gain | Unavailable:
        """The saving of a step: of the replayed one, or of `step_ns`."""
        if self.problem is not None:
            return self.problem
        step_ns = self.replayed_ns if step_ns is None else step_ns
        saved_ns = step_ns - edited_ns
        return Gain(
            saved_ns=saved_ns,
            saved_ratio=saved_ns / step_ns if step_ns else 0.0,
            step_ns=step_ns,
            fidelity_ratio=self.error_ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    timeline: Timeline
    recorded: RecordedGraph
    fidelity: Fidelity
    num_start_up: int = 0
    """First steps that no mean counts: they take far longer on all ranks, and do not come again."""
    beside: WaitingBeside | None = None
    """Work of devices that ran beside waits; None where none is known to."""

    @property
    def num_at_once(self) -> int:
        """How many edits are evaluated at once, within `MAX_REPLAY_BYTES`."""
        # Of an edit: a weight per edge, a time per node (twice: sorted back), an end per step.
        numbers = len(self.recorded.source) + 2 * self.recorded.graph.num_nodes
        numbers += self.timeline.period_end_ns.size
        return max(1, MAX_REPLAY_BYTES // (8 * max(1, numbers)))

    def step_ends_ns(self, edits: Iterable[Edit]) -> Iterator[Int64s]:
        """Of one edit after another [rank index, step index]: ends on the reference clock; 0 for
        steps not replayed. An edit is taken when its turn comes and not kept. It has a number for
        every piece and row of the timeline: where there are many, give a generator."""
        weights = (self._weigh_edit(edit) for edit in edits)
        while batch := list(islice(weights, self.num_at_once)):
            weight = np.stack(batch, axis=1)
            batch.clear()
            ends = _replay_weights(self.timeline, self.recorded, weight)
            yield from np.moveaxis(ends, 2, 0)

    def _weigh_edit(self, edit: Edit) -> Int64s:
        """[edge]: the weights under an edit."""
        return _weigh_edit(self.timeline, self.recorded, edit, self.beside)

    def step_times_ns(self, edits: Iterable[Edit]) -> list[float]:
        """Mean step time of each edit."""
        skipped = self.num_start_up
        return [_mean_step_ns(self.timeline, ends, skipped) for ends in self.step_ends_ns(edits)]

    def save_by_step_ns(self, edit: Edit, *, of_ranks: bool = False) -> tuple[Floats, Bools]:
        """[step]: what an edit saves of a step's period, by the last rank's end as in its price, or
        of the median over the ranks' own periods; and which steps were replayed.

        They differ where ranks do not meet in every step.
        """
        window = number_windows(self.timeline)
        ends = self.step_ends_ns([Edit(name="as measured"), edit])
        measured, edited = (one if of_ranks else one.max(axis=0, keepdims=True) for one in ends)
        ahead = (measured - edited).astype(np.float64)
        follows = np.append(-1, window[:-1]) == window
        before = np.where(follows, np.roll(ahead, 1, axis=1), 0.0)
        is_replayed = window >= 0
        saved = np.median(ahead - before, axis=0)
        return np.where(is_replayed, saved, 0.0), is_replayed

    def price(self, edits: Iterable[Edit]) -> list[Gain | Unavailable]:
        """What each edit saves, or why the replay cannot say."""
        if self.fidelity.problem is not None:
            return [self.fidelity.problem for _ in edits]
        problems: list[Unavailable | None] = []
        times = iter(self.step_times_ns(self._take_good(edits, problems)))
        return [self.fidelity.price(next(times)) if one is None else one for one in problems]

    def _take_good(
        self, edits: Iterable[Edit], problems: list[Unavailable | None]
    ) -> Iterator[Edit]:
        """Those that can be priced; fills in `problems`, one for each edit."""
        for edit in edits:
            problems.append(_find_problem(self.timeline, edit))
            if problems[-1] is None:
                yield edit


@or_unavailable
def build_replay(timeline: Timeline) -> Replay:
    if not len(timeline.steps) or not timeline.ranks:
        raise Missing("no step was kept that could be replayed")
    recorded = need(build_graph(timeline))
    ends = _replay_weights(timeline, recorded, recorded.weight_ns[:, None])[:, :, 0]
    explained = _replay_weights(timeline, recorded, recorded.weigh_explained()[:, None])[:, :, 0]
    num_start_up = count_start_up(timeline)
    measured_ns, replayed_ns, explained_ns = (
        _mean_step_ns(timeline, one, num_start_up)
        for one in (timeline.period_end_ns, ends, explained)
    )
    if measured_ns <= 0:
        raise Missing("the steps that were kept took no time")
    fidelity = Fidelity(
        error_ratio=abs(measured_ns - explained_ns) / measured_ns,
        measured_ns=measured_ns,
        replayed_ns=replayed_ns,
        num_steps=int(np.count_nonzero(number_windows(timeline) >= 0)),
        unexplained_ratio=_measure_unexplained(timeline, recorded),
    )
    return Replay(
        timeline=timeline,
        recorded=recorded,
        fidelity=fidelity,
        num_start_up=num_start_up,
        beside=known(find_waiting_beside(timeline)),
    )


def _find_problem(timeline: Timeline, edit: Edit) -> Unavailable | None:
    """Why an edit cannot be priced."""
    if edit.work_ns is not None and len(edit.work_ns) != len(timeline.pieces):
        return Unavailable(
            f"edit {edit.name!r} has {len(edit.work_ns)} durations of work for "
            f"{len(timeline.pieces)} pieces"
        )
    if edit.transfer_ns is None:
        return None
    if timeline.communication is None:
        return Unavailable("the run has no recorded communication whose transfers could change")
    num_rows = len(timeline.communication.operations)
    if len(edit.transfer_ns) != num_rows:
        return Unavailable(
            f"edit {edit.name!r} has {len(edit.transfer_ns)} transfers for {num_rows} operations"
        )
    return None


def _weigh_edit(
    timeline: Timeline,
    recorded: RecordedGraph,
    edit: Edit,
    beside: WaitingBeside | None,
) -> Int64s:
    """[edge]: the weights under an edit."""
    weight = recorded.weight_ns.copy()
    if edit.work_ns is not None:
        is_work = timeline.pieces.kind == PieceKind.WORK
        work = np.where(is_work, np.maximum(edit.work_ns, 0), 0).astype(np.int64)
        if beside is not None:
            work = beside.ease(work)
        weight[recorded.chain] = recorded.weigh_chain(work)
    if edit.transfer_ns is not None and timeline.communication is not None:
        row = recorded.transfer_row
        measured = timeline.communication.row_times.transfer_ns[row]
        wanted = np.maximum(edit.transfer_ns[row], 0)
        own = weight[recorded.transfer]
        scaled = np.rint(own * (wanted / np.maximum(measured, 1))).astype(np.int64)
        weight[recorded.transfer] = np.where(measured > 0, scaled, own + wanted)
    return weight


def _replay_weights(timeline: Timeline, recorded: RecordedGraph, weight: Int64s) -> Int64s:
    """[rank index, step index, column of weights]: the end of each step."""
    times = recorded.graph.evaluate(weight, recorded.release_ns)
    events = recorded.events
    ends = np.flatnonzero(events.kind == EventKind.STEP_END)
    found = np.zeros((*timeline.period_end_ns.shape, weight.shape[1]), dtype=np.int64)
    found[events.rank_index[ends], events.row[ends]] = times[ends]
    return found


def _mean_step_ns(timeline: Timeline, end_ns: Int64s, num_start_up: int) -> float:
    """From the last rank's end of one step to that of the next, each step counted for as many of
    the run as it stands for; those of the start-up for none."""
    window = number_windows(timeline)
    first, _ = find_window_ends(window)
    end_ns = end_ns.max(axis=0)
    begin_ns = np.roll(end_ns, 1)
    begin_ns[first] = timeline.period_start_ns[:, first].max(axis=0)
    weight = np.where(window >= 0, weigh_steps(timeline), 0.0)
    weight[:num_start_up] = 0.0
    return float((weight * (end_ns - begin_ns)).sum() / max(1.0, float(weight.sum())))


def _measure_unexplained(timeline: Timeline, recorded: RecordedGraph) -> float:
    """The share of all ranks' time that is neither work nor a modelled operation."""
    is_replayed = number_windows(timeline) >= 0
    total = int((timeline.period_end_ns - timeline.period_start_ns)[:, is_replayed].sum())
    events = recorded.events
    is_held = events.kind == EventKind.HELD
    return float(recorded.fixed_ns[is_held].sum()) / total if total else 0.0
