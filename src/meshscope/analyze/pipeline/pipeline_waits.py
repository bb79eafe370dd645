"""A pipeline's bubble from waits for messages, if neither actions nor phases were recorded.

Per rank and step this is the time that sends and receives along the pipeline held it up. The mean
over ranks is the bubble plus the time of transfers: the parts due to few microbatches, uneven
stages and slow transfers cannot be separated. Microbatches are counted by the messages that a rank
gets from its predecessor.

`inherent_ns` is the textbook's (p-1) microbatches of work at the mean work of the ranks, and at
most all time ranks were held up: the last stages wait for the end of a step wherever all ranks
meet. It is the part that shrinks in proportion with more microbatches.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.pipeline.message_chains import Chains, find_message_chains, find_periods
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.arrays import Bools, Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineWaits:
    """Waiting along the pipelines, per step."""

    chains: Chains
    num_microbatches: int
    wait_ns: Floats
    """Per rank in the chains' order: mean over steps, held up by messages of the pipeline."""
    held_ns: float
    """Mean over ranks and steps: held up by anything, messages included."""
    step_ns: float
    """Mean period of a step."""

    @property
    def num_stages(self) -> int:
        """Ranks of one pipeline."""
        return len(self.chains[0])

    @property
    def bubble_ns(self) -> float:
        """Mean over ranks."""
        return float(self.wait_ns.mean())

    @property
    def bubble_ratio(self) -> float:
        """Of the whole step: the borders of the pipeline's part are not known."""
        return self.bubble_ns / self.step_ns

    @property
    def inherent_ns(self) -> float:
        """The cost of few microbatches if stages are equal; see the module's docstring."""
        microbatch_ns = (self.step_ns - self.held_ns) / self.num_microbatches
        return min(self.held_ns, (self.num_stages - 1) * microbatch_ns)

    def saved_ns(self, num_microbatches: int) -> float:
        """Per step, with that many microbatches of the same samples together."""
        return self.inherent_ns * (1 - self.num_microbatches / num_microbatches)


@or_unavailable
def measure_pipeline_waits(timeline: Timeline) -> PipelineWaits:
    if timeline.communication is None:
        raise Missing("no communication was recorded")
    layout = timeline.layout
    if isinstance(layout, Unavailable):
        chains = need(find_message_chains(timeline))
    elif layout.pp > 1:
        chains = layout.groups_of("pp", timeline.ranks)
    else:
        raise Missing("there is one stage")
    is_message = _find_pipeline_messages(timeline, chains)
    num_microbatches = _count_microbatches(timeline, chains, is_message)
    if num_microbatches < 1:
        raise Missing("ranks of the pipeline send each other no messages")
    pieces = timeline.pieces
    is_held = (pieces.row >= 0) & (pieces.kind != PieceKind.WORK)
    by_message = is_held & is_message[np.where(is_held, pieces.row, 0)]
    ranks = [rank for chain in chains for rank in chain]
    num_steps = len(timeline.steps)

    def sum_of(rows: Bools) -> Floats:
        time_ns = pieces.duration_ns[rows].astype(np.float64)
        total = np.bincount(pieces.rank[rows], weights=time_ns, minlength=max(ranks) + 1)
        mean: Floats = total[ranks] / num_steps
        return mean

    period_ns = timeline.period_end_ns - timeline.period_start_ns
    return PipelineWaits(
        chains=chains,
        num_microbatches=num_microbatches,
        wait_ns=sum_of(by_message),
        held_ns=float(sum_of(is_held).mean()),
        step_ns=float(period_ns.mean()),
    )


def _find_pipeline_messages(timeline: Timeline, chains: Chains) -> Bools:
    """Rows that are sends or receives between neighbours of a chain."""
    assert timeline.communication is not None, "checked by who asks"
    rows = timeline.communication.operations.rows
    size = 1 + max([*timeline.ranks, *(rank for chain in chains for rank in chain)])
    chain_of = np.full(size, -1)
    for index, chain in enumerate(chains):
        chain_of[list(chain)] = index
    peer = np.where((rows.peer >= 0) & (rows.peer < size), rows.peer, 0)
    is_pair = np.isin(rows.kind, (Kind.SEND, Kind.RECV)) & (rows.peer >= 0) & (rows.peer < size)
    found: Bools = is_pair & (chain_of[rows.rank] >= 0) & (chain_of[rows.rank] == chain_of[peer])
    return found


def _count_microbatches(timeline: Timeline, chains: Chains, is_message: Bools) -> int:
    """Receives per step of the second rank from the first."""
    assert timeline.communication is not None, "checked by who asks"
    rows = timeline.communication.operations.rows
    first, second = chains[0][0], chains[0][1]
    is_forward = is_message & (rows.kind == Kind.RECV) & (rows.rank == second)
    row = np.flatnonzero(is_forward & (rows.peer == first))
    num_received = int((find_periods(timeline, row) >= 0).sum())
    return round(num_received / max(len(timeline.steps), 1))
