"""In which order pipeline ranks send each other what they make, and how much of it they keep.

All transfers of a step stand in one order, which every rank keeps: it issues its sends and
receives as they come there. The order is that of a replay in which every action takes its time
(F = I = W), by when the thing sent is made. So everything a rank needs for an action stands behind
nothing but sends it has made and receives it can issue at once, and, going along the order, every
transfer completes. That holds where operations of a pair, or of a whole group, run one after the
other (NCCL's streams), and where they run side by side (gloo).
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from meshscope.core.schedule import Action, ActionKind, Output, Product, Schedule, output_of
from meshscope.core.schedule_replay import ActionCosts, replay_schedule


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor on its way from a pipeline rank to another."""

    order: int
    """Its index among all transfers of the step."""
    output: Output
    """What is sent: product, the stage that made it, microbatch."""
    source: int
    target: int


@lru_cache(maxsize=16)
def order_transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """All transfers of a step, in the order that all ranks keep."""
    equal_ns = {
        (kind, stage): 1
        for kind in (ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
        for stage in range(schedule.num_stages)
    }
    replay = replay_schedule(schedule, ActionCosts(by_stage=equal_ns))
    made_ns = {output_of(time.action): time.end_ns for rank in replay.ranks for time in rank.times}
    targets = {
        output: rank
        for rank, row in enumerate(schedule.actions)
        for action in row
        for output in schedule.needs(action)
        if schedule.stage_ranks[output[1]] != rank
    }

    def key(output: Output) -> tuple[float, int, int]:
        product, stage, _ = output
        # Equal times: along the way data goes, so that a rank's receive comes before its send.
        return made_ns[output], product, stage if product is Product.ACTIVATION else -stage

    return tuple(
        Transfer(order, output, schedule.stage_ranks[output[1]], targets[output])
        for order, output in enumerate(sorted(targets, key=key))
    )


def count_kept_messages(schedule: Schedule, rank: int, *, max_ahead: int) -> int:
    """The most messages that a rank holds while it computes, where sends do not report that they
    are done (gloo): those that wait to be used, and those sent after all that the receiver's last
    message told of (`engine.pipeline.transfers`)."""
    kept = _KeptMessages(order_transfers(schedule), rank, max_ahead)
    return max(kept.count_beside(schedule, action) for action in schedule.actions[rank])


class _KeptMessages:
    """One rank's messages, action by action."""

    def __init__(self, transfers: tuple[Transfer, ...], rank: int, max_ahead: int) -> None:
        self.rank, self.max_ahead = rank, max_ahead
        self.to_issue = deque(one for one in transfers if rank in (one.source, one.target))
        self.arriving: dict[Output, Transfer] = {}
        self.sent: list[Transfer] = []

    def count_beside(self, schedule: Schedule, action: Action) -> int:
        """While the action computes; then what it made has been sent."""
        for output in schedule.needs(action):
            if schedule.stage_ranks[output[1]] != self.rank:
                self._receive(output)
        while self.to_issue and len(self.arriving) < self.max_ahead:
            if self.to_issue[0].source == self.rank:
                break
            self._issue()
        found = len(self.arriving) + len(self.sent)
        made = output_of(action)
        if any(one.output == made and one.source == self.rank for one in self.to_issue):
            while self.to_issue[0].output != made:
                self._issue()
            self.sent.append(self.to_issue.popleft())
        return found

    def _receive(self, output: Output) -> None:
        while output not in self.arriving:
            self._issue()
        told = self.arriving.pop(output)
        self.sent = [
            one for one in self.sent if one.target != told.source or one.order > told.order
        ]

    def _issue(self) -> None:
        transfer = self.to_issue.popleft()
        self.arriving[transfer.output] = transfer
