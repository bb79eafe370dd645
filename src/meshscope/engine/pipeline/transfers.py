"""What pipeline ranks send each other, in the order of `core.schedule_transfers`.

A send's tensor is kept until its receive is known to be issued: the next thing that the receiver
sent later in the order tells. The rest is waited for at the end of the step.

Wrong where sizes differ between microbatches, or where ranks disagree about the schedule.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from meshscope.core.schedule import Output, Product, Schedule
from meshscope.core.schedule_transfers import Transfer


class StepTransfers:
    """One rank's transfers in one step."""

    def __init__(
        self,
        transfers: Iterable[Transfer],
        group: dist.ProcessGroup,
        make_buffer: Callable[[Output], Tensor],
        *,
        max_ahead: int,
    ) -> None:
        self._rank = group.rank()
        self._to_issue = deque(one for one in transfers if self._rank in (one.source, one.target))
        self._group = group
        self._make_buffer = make_buffer
        self._max_ahead = max_ahead
        self._arriving: dict[Output, tuple[Transfer, dist.Work, Tensor]] = {}
        self._sent: dict[int, deque[tuple[Transfer, dist.Work, Tensor]]] = {}

    def issue_ahead(self) -> None:
        """Issues receives that nothing needs yet, up to the next send and the limit."""
        while self._to_issue and len(self._arriving) < self._max_ahead:
            if self._to_issue[0].source == self._rank:
                return
            self._issue_receive()

    def receive(self, output: Output) -> Tensor:
        while output not in self._arriving:
            self._issue_receive()
        transfer, work, buffer = self._arriving.pop(output)
        work.wait()
        self._release(transfer)
        return buffer

    def send(self, output: Output, tensor: Tensor) -> None:
        while self._to_issue[0].output != output:
            self._issue_receive()
        transfer = self._to_issue.popleft()
        work = dist.isend(tensor, group=self._group, group_dst=transfer.target, tag=transfer.order)
        assert work is not None, "this rank is in its own group"
        sent = self._sent.setdefault(transfer.target, deque())
        sent.append((transfer, work, tensor))
        # gloo reports to a waiter only; NCCL reports at once.
        while sent and sent[0][1].is_completed():
            sent.popleft()

    def finish(self) -> None:
        assert not self._to_issue, "the schedule's end comes after its last transfer"
        for sent in self._sent.values():
            while sent:
                sent.popleft()[1].wait()

    def _issue_receive(self) -> None:
        transfer = self._to_issue.popleft()
        assert transfer.target == self._rank, "a send is made before what comes after it"
        buffer = self._make_buffer(transfer.output)
        work = dist.irecv(buffer, group=self._group, group_src=transfer.source, tag=transfer.order)
        assert work is not None, "this rank is in its own group"
        self._arriving[transfer.output] = transfer, work, buffer

    def _release(self, received: Transfer) -> None:
        """Its sender had issued before it all receives that come before it."""
        sent = self._sent.get(received.source)
        while sent and sent[0][0].order < received.order:
            sent.popleft()[1].wait()


class DirectTransfers:
    """One after the other, as a caller goes along: every receive is waited for at once.

    For steps that are driven by hand, where no order is known beforehand. Ranks must drive the
    same microbatches in the same order.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: dist.ProcessGroup,
        make_buffer: Callable[[Output], Tensor],
    ) -> None:
        self._schedule = schedule
        self._group = group
        self._make_buffer = make_buffer
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def issue_ahead(self) -> None:
        """Nothing: what comes next is not known."""

    def receive(self, output: Output) -> Tensor:
        buffer = self._make_buffer(output)
        source = self._schedule.stage_ranks[output[1]]
        work = dist.irecv(buffer, group=self._group, group_src=source, tag=self._tag(output))
        assert work is not None, "this rank is in its own group"
        work.wait()
        return buffer

    def send(self, output: Output, tensor: Tensor) -> None:
        product, stage, _ = output
        user = stage + 1 if product is Product.ACTIVATION else stage - 1
        target = self._schedule.stage_ranks[user]
        work = dist.isend(tensor, group=self._group, group_dst=target, tag=self._tag(output))
        assert work is not None, "this rank is in its own group"
        self._sent.append((work, tensor))

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _tag(self, output: Output) -> int:
        product, stage, microbatch = output
        row = int(product) * self._schedule.num_stages + stage
        return row * self._schedule.num_microbatches + microbatch
