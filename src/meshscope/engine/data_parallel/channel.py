"""Collectives that are counted, and transfers that are made of several of them.

An algorithm is a generator: it starts collectives, yields their handles, and goes on once these are
done. `Transfer` drives it, a step at a time, so that what lies between the steps can compute. Every
rank must yield equally often, with nothing in hand where it takes no part: then several transfers,
advanced in the same order on all ranks, meet the same messages on both ends.

Bytes are counted twice: those handed to a collective by this rank, and those it sends when the
collective is done in a ring (`core.operations.bus_factor`). What a backend really sends may differ:
it is free to choose its own algorithm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshscope.core.operations import Kind, bus_factor

Works = Sequence[Any]
"""Handles of started collectives (`torch.distributed.Work`)."""

Steps = Iterator[Works]


class LastWorks(list[Any]):
    """Handles after which an algorithm starts no more: only the user of the result waits."""


# torch 2.13 renamed both and warns about the old names.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes and messages that one rank sent."""

    num_operations: int = 0
    """Collectives, and pairs of send and receive."""
    handed_bytes: int = 0
    """Sizes of the tensors given to them."""
    wire_bytes: float = 0.0
    """What leaves this rank, if every collective is done in a ring."""

    def add(self, kind: Kind, handed: Tensor, size_bytes: int, num_ranks: int) -> None:
        """One operation of a size in the sense of `core.operations`."""
        self.num_operations += 1
        self.handed_bytes += handed.nbytes
        self.wire_bytes += bus_factor(kind, num_ranks) * size_bytes

    def merge(self, other: "Traffic") -> None:
        """Adds the other's counts."""
        self.num_operations += other.num_operations
        self.handed_bytes += other.handed_bytes
        self.wire_bytes += other.wire_bytes


class GradientChannel:
    """A process group and what went over it. Nothing here waits.

    Messages of channels with different tags cannot be taken for each other (on gloo; NCCL has no
    tags and goes by order, which is the same on all ranks).
    """

    def __init__(
        self, group: dist.ProcessGroup, traffic: Traffic | None = None, *, tag: int = 0
    ) -> None:
        self.group = group
        self.tag = tag
        self.traffic = Traffic() if traffic is None else traffic
        self.size: int = group.size()
        self.rank: int = group.rank()

    def all_reduce(self, x: Tensor) -> Works:
        """Sums `x` in place."""
        self._count(Kind.ALL_REDUCE, x, x.nbytes)
        return [dist.all_reduce(x, group=self.group, async_op=True)]

    def all_gather(self, gathered: Tensor, x: Tensor) -> Works:
        """Puts every rank's flat `x` one after the other."""
        self._count(Kind.ALL_GATHER, x, gathered.nbytes)
        return [_all_gather_single(gathered, x, group=self.group, async_op=True)]

    def reduce_scatter(self, kept: Tensor, x: Tensor) -> Works:
        """Sums the flat `x` and keeps this rank's equal part."""
        self._count(Kind.REDUCE_SCATTER, x, x.nbytes)
        return [_reduce_scatter_single(kept, x, group=self.group, async_op=True)]

    def all_to_all(self, received: Tensor, x: Tensor) -> Works:
        """The i-th equal part of the flat `x` goes to rank i."""
        self._count(Kind.ALL_TO_ALL, x, x.nbytes)
        return [dist.all_to_all_single(received, x, group=self.group, async_op=True)]

    def reduce(self, x: Tensor, root: int) -> Works:
        """Sums `x` on one rank; what the others have is lost."""
        self._count(Kind.REDUCE, x, x.nbytes)
        return [dist.reduce(x, group_dst=root, group=self.group, async_op=True)]

    def broadcast(self, x: Tensor, root: int) -> Works:
        """Copies one rank's `x` to all."""
        self._count(Kind.BROADCAST, x, x.nbytes)
        return [dist.broadcast(x, group_src=root, group=self.group, async_op=True)]

    def exchange(self, *sent: tuple[Tensor, int], received: Sequence[tuple[Tensor, int]]) -> Works:
        """Sends tensors to ranks of the group and receives others, all at once.

        Empty tensors are left out, so both ends must know the sizes.
        """
        messages = []
        for x, peer in sent:
            if x.numel():
                self._count(Kind.SEND, x, x.nbytes)
                messages.append(self._make_message(dist.isend, x, peer))
        messages += [self._make_message(dist.irecv, x, peer) for x, peer in received if x.numel()]
        return dist.batch_isend_irecv(messages) if messages else []

    def _make_message(self, operation: Any, x: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, x, group=self.group, tag=self.tag, group_peer=peer)

    def _count(self, kind: Kind, handed: Tensor, size_bytes: int) -> None:
        self.traffic.add(kind, handed, size_bytes, self.size)


class Transfer:
    """An algorithm under way; its first collectives have been started."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pending: Works = ()
        self.is_done = False
        self.advance()

    def advance(self) -> None:
        """Waits for the collectives under way and starts the next ones, if there are any."""
        if not isinstance(self._pending, LastWorks):
            self.go_on()

    @torch.no_grad()
    def go_on(self) -> None:
        """Waits for the collectives under way, and starts the next ones or has the result."""
        if self.is_done:
            return
        for work in self._pending:
            work.wait()
        found = next(self._steps, None)
        self.is_done = found is None
        self._pending = found or ()

    def wait(self) -> None:
        """Returns when the result is there."""
        while not self.is_done:
            self.go_on()
