"""All-reduce algorithms: one value, several ways for its bytes to go.

| strategy | steps for n ranks | a rank sends, of S bytes | good for |
|---|---|---|---|
| flat | the backend's own | 2(n-1)/n S | the default |
| ring | 2(n-1) messages to the next rank | 2(n-1)/n S | large sizes |
| tree | log2 n exchanges of everything (recursive doubling) | S log2 n | small sizes |
| hierarchical | inside a node, across nodes, inside | 2(l-1)/l S inside, 2(m-1)/m S/l across | slow links between m nodes of l ranks |
| adaptive | those of the strategy that was fastest for the size | | where it has been measured |

All of them sum in place, and every rank ends with the same bits: an element is either summed on one
rank and copied, or by additions that are the same on both sides. Summing 2 + 2 ranks in another
order than 1 + 1 + 1 + 1 rounds differently, so strategies agree with each other to rounding only.

For n that is no power of two, the tree lets some ranks hand their values to a neighbour first and
get the sum back last (Thakur, Rabenseifner and Gropp 2005, 4.1).
"""  # noqa: E501 - a table

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshscope.engine.data_parallel.channel import GradientChannel, LastWorks, Steps, Transfer
from meshscope.errors import UsageError

STRATEGIES = ("flat", "ring", "tree", "hierarchical", "adaptive")

_DEFAULT_SIZES = tuple(1 << exponent for exponent in (10, 14, 17, 20, 23))
"""Bytes, 1 KiB to 8 MiB: the sizes that are measured by default."""


class Strategy(Protocol):
    """A way to sum a flat tensor over a group."""

    @property
    def name(self) -> str:
        """Key in STRATEGIES."""

    def steps(self, x: Tensor, channel: GradientChannel) -> Steps:
        """Sums contiguous `x` in place; see `channel` for what a step is."""


@dataclass(frozen=True, slots=True)
class FlatAllReduce:
    """The backend's all-reduce."""

    name: str = "flat"

    def steps(self, x: Tensor, channel: GradientChannel) -> Steps:
        yield LastWorks(channel.all_reduce(x))


@dataclass(frozen=True, slots=True)
class _RingAllReduce:
    """Chunks go once around to be summed, and once more to be copied."""

    name: str = "ring"

    def steps(self, x: Tensor, channel: GradientChannel) -> Steps:
        """Messages of a chunk to the next rank."""
        num_ranks, rank = channel.size, channel.rank
        following, preceding = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        chunks = torch.tensor_split(x, num_ranks)
        incoming = torch.empty_like(chunks[0])  # the first chunk is the largest
        for step in range(num_ranks - 1):
            chunk = chunks[(rank - step - 1) % num_ranks]
            arriving = incoming[: chunk.numel()]
            yield channel.exchange(
                (chunks[(rank - step) % num_ranks], following), received=[(arriving, preceding)]
            )
            chunk += arriving
        for step in range(num_ranks - 1):
            works = channel.exchange(
                (chunks[(rank - step + 1) % num_ranks], following),
                received=[(chunks[(rank - step) % num_ranks], preceding)],
            )
            yield works if step < num_ranks - 2 else LastWorks(works)


@dataclass(frozen=True, slots=True)
class _TreeAllReduce:
    """Recursive doubling: after round i every rank has the sum over 2^(i+1) of them."""

    name: str = "tree"

    def steps(self, x: Tensor, channel: GradientChannel) -> Steps:
        """Exchanges of all of `x` with one other rank."""
        num_ranks, rank = channel.size, channel.rank
        num_doubling = 1 << (num_ranks.bit_length() - 1)
        # Of the first 2 * num_extra ranks the even ones give to the odd one above.
        num_extra = num_ranks - num_doubling
        gives = rank < 2 * num_extra and rank % 2 == 0
        takes = rank < 2 * num_extra and rank % 2 == 1
        incoming = torch.empty_like(x)
        if num_extra:
            if gives:
                yield channel.exchange((x, rank + 1), received=[])
            elif takes:
                yield channel.exchange(received=[(incoming, rank - 1)])
                x += incoming
            else:
                yield ()
        position = rank // 2 if rank < 2 * num_extra else rank - num_extra
        distance = 1
        while distance < num_doubling:
            if gives:
                yield ()
            else:
                other = position ^ distance
                peer = 2 * other + 1 if other < num_extra else other + num_extra
                works = channel.exchange((x, peer), received=[(incoming, peer)])
                is_last = 2 * distance == num_doubling and not num_extra
                yield LastWorks(works) if is_last else works
                x += incoming
            distance *= 2
        if num_extra:
            if gives:
                yield LastWorks(channel.exchange(received=[(x, rank + 1)]))
            elif takes:
                yield LastWorks(channel.exchange((x, rank - 1), received=[]))
            else:
                yield LastWorks()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroups:
    """A group cut into nodes, as one rank sees it."""

    inside: dist.ProcessGroup | None
    """The ranks on this rank's node; None when it is alone there."""
    across: dist.ProcessGroup | None
    """The ranks of the same index on the other nodes, this one among them; None without others.

    Where nodes are not equally large, only the first ranks of the nodes have one.
    """
    is_even: bool
    """Whether every node has equally many ranks."""


def make_node_groups(group: dist.ProcessGroup, local_world_size: int) -> NodeGroups:
    """Cuts a group by node: global ranks 0 … local_world_size - 1 are on the first, and so on.

    Collective over `group`, not over the world. Its ranks must be in equally many groups already.
    """
    if local_world_size < 1:
        raise UsageError(f"local_world_size is {local_world_size}; expected at least 1")
    _check_equal_numbers_of_groups(group)
    nodes: dict[int, list[int]] = {}
    for rank in dist.get_process_group_ranks(group):
        nodes.setdefault(rank // local_world_size, []).append(rank)
    is_even = len({len(ranks) for ranks in nodes.values()}) == 1
    own = nodes[dist.get_rank() // local_world_size]
    index = own.index(dist.get_rank())
    peers = [ranks[index] for ranks in nodes.values()] if is_even or index == 0 else [own[index]]
    # Every rank makes equally many, where nodes are uneven also such of one rank.
    inside, across = (
        _make_group(ranks) if len(ranks) > 1 or not is_even else None for ranks in (own, peers)
    )
    return NodeGroups(
        inside=inside if len(own) > 1 else None,
        across=across if len(peers) > 1 else None,
        is_even=is_even,
    )


def _make_group(ranks: list[int]) -> dist.ProcessGroup:
    # Local: ranks in other groups do not take part.
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made


def _check_equal_numbers_of_groups(group: dist.ProcessGroup) -> None:
    """torch names a locally made group by its ranks and by how many groups this rank is in.

    Where the numbers differ the members wait for each other under different names, forever.
    """
    known = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", None)
    if known is None:
        return
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, len(known), group=group)
    if len(set(everyone)) > 1:
        raise UsageError(
            f"the ranks of the group are in {everyone} process groups each, and torch can make "
            "groups locally only where the numbers are equal; make them yourself and give nodes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalAllReduce:
    """Fewer bytes between nodes: only sums over a node leave it."""

    nodes: NodeGroups
    by_parts: bool | None = None
    """Whether each rank of a node sends its own part of the sum; else the first one sends all.

    By default where nodes are equally large, which it needs.
    """
    name: str = "hierarchical"

    def __post_init__(self) -> None:
        """Raises UsageError when nodes are too uneven for what is asked."""
        if self.by_parts and not self.nodes.is_even:
            raise UsageError(
                "by_parts needs equally many ranks on every node; leave it out or set it to False"
            )

    def steps(self, x: Tensor, channel: GradientChannel) -> Steps:
        """Inside the node, across nodes, inside again."""
        inside = GradientChannel(self.nodes.inside, channel.traffic) if self.nodes.inside else None
        across = GradientChannel(self.nodes.across, channel.traffic) if self.nodes.across else None
        by_parts = self.nodes.is_even if self.by_parts is None else self.by_parts
        if inside is None:
            # Where other nodes are larger they have steps before and after this one.
            if not self.nodes.is_even:
                yield ()
            yield across.all_reduce(x) if across else ()
            if not self.nodes.is_even:
                yield LastWorks()
        elif by_parts:
            yield from _reduce_by_parts(x, inside, across)
        else:
            yield inside.reduce(x, root=0)
            yield across.all_reduce(x) if across and inside.rank == 0 else ()
            yield LastWorks(inside.broadcast(x, root=0))


def _reduce_by_parts(x: Tensor, inside: GradientChannel, across: GradientChannel | None) -> Steps:
    part_size = -(-x.numel() // inside.size)
    whole = x
    if part_size * inside.size != x.numel():
        whole = x.new_zeros(part_size * inside.size)
        whole[: x.numel()] = x
    part = x.new_empty(part_size)
    yield inside.reduce_scatter(part, whole)
    yield across.all_reduce(part) if across else ()
    yield LastWorks(inside.all_gather(whole, part))
    if whole is not x:
        x.copy_(whole[: x.numel()])


# --- which one is fastest ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTimes:
    """Times of all strategies at one size."""

    size_bytes: int
    duration_ns: Mapping[str, int]
    """By strategy: the slowest rank's time, best of the repeats."""


@dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """Measured times of strategies on one group."""

    num_ranks: int
    rows: tuple[StrategyTimes, ...]
    """By ascending size."""

    def __post_init__(self) -> None:
        """Raises UsageError for a table that says nothing."""
        if not self.rows or not all(row.duration_ns for row in self.rows):
            raise UsageError("a table of strategies needs at least one size and one strategy")

    @cached_property
    def _logarithms(self) -> list[float]:
        return [log(max(1, row.size_bytes)) for row in self.rows]

    def choose(self, size_bytes: int, available: Sequence[str] = STRATEGIES) -> str:
        """The fastest at the measured size that is nearest, by ratio."""
        wanted = log(max(1, size_bytes))
        distances = [abs(wanted - known) for known in self._logarithms]
        row = self.rows[distances.index(min(distances))]
        known = {name: spent for name, spent in row.duration_ns.items() if name in available}
        if not known:
            raise UsageError(
                f"the table has times of {', '.join(row.duration_ns)}, and none of what is "
                f"available here: {', '.join(available)}; measure again"
            )
        return min(known, key=lambda name: (known[name], name))

    def to_document(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "rows": [
                {"size_bytes": row.size_bytes, "duration_ns": dict(row.duration_ns)}
                for row in self.rows
            ],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "StrategyTable":
        rows = [StrategyTimes(**row) for row in document["rows"]]
        return cls(
            num_ranks=document["num_ranks"],
            rows=tuple(sorted(rows, key=lambda row: row.size_bytes)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveAllReduce:
    """The strategy that was fastest for the size. The table must be the same on every rank."""

    table: StrategyTable
    candidates: Mapping[str, Strategy]
    name: str = "adaptive"

    def choose(self, size_bytes: int) -> Strategy:
        """What is used for that many bytes."""
        return self.candidates[self.table.choose(size_bytes, tuple(self.candidates))]

    def steps(self, x: Tensor, channel: GradientChannel) -> Steps:
        return self.choose(x.nbytes).steps(x, channel)


def share_table(table: StrategyTable | None, group: dist.ProcessGroup) -> StrategyTable:
    """Every rank gets the table that the group's first rank has, so that all choose alike."""
    found: list[Any] = [None if table is None else table.to_document()]
    dist.broadcast_object_list(found, group_src=0, group=group)
    if found[0] is None:
        raise UsageError("the first rank of the group has no table of strategies; give it one")
    shared = StrategyTable.from_document(found[0])
    if shared.num_ranks != group.size():
        raise UsageError(
            f"the table was measured on {shared.num_ranks} ranks, but the group has "
            f"{group.size()}; measure again"
        )
    return shared


def measure_strategies(
    group: dist.ProcessGroup,
    sizes_bytes: Sequence[int] = _DEFAULT_SIZES,
    *,
    candidates: Mapping[str, Strategy] | None = None,
    num_repeats: int = 5,
    device: torch.device | str = "cpu",
) -> StrategyTable:
    """Times strategies on a group, by default flat, ring and tree. Collective; the same table
    on every rank.
    """
    candidates = candidates or make_candidates()
    rows = []
    for size_bytes in sorted(sizes_bytes):
        x = torch.zeros(max(1, size_bytes // 4), device=device)
        spent = torch.tensor(
            [
                [_time_once(x, strategy, group) for _ in range(num_repeats)]
                for strategy in candidates.values()
            ],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
        best = spent.amin(1).tolist()
        times = {name: int(ns) for name, ns in zip(candidates, best, strict=True)}
        rows.append(StrategyTimes(size_bytes=size_bytes, duration_ns=times))
    return share_table(StrategyTable(num_ranks=group.size(), rows=tuple(rows)), group)


def _time_once(x: Tensor, strategy: Strategy, group: dist.ProcessGroup) -> int:
    ready = torch.zeros(1, device=x.device)
    dist.all_reduce(ready, group=group)  # all ranks are here; NCCL has no cheap barrier
    ready.item()
    began_ns = time.perf_counter_ns()
    Transfer(strategy.steps(x, GradientChannel(group))).wait()
    x[:1].item()  # an accelerator is done when a value can be read
    return time.perf_counter_ns() - began_ns


def make_candidates(nodes: NodeGroups | None = None) -> dict[str, Strategy]:
    """The strategies an adaptive one can choose from; hierarchical where nodes are known."""
    plain: list[Strategy] = [FlatAllReduce(), _RingAllReduce(), _TreeAllReduce()]
    if nodes is not None:
        plain.append(HierarchicalAllReduce(nodes=nodes))
    return {strategy.name: strategy for strategy in plain}


def make_strategy(
    name: str,
    group: dist.ProcessGroup,
    *,
    local_world_size: int | None = None,
    nodes: NodeGroups | None = None,
    table: StrategyTable | None = None,
    device: torch.device | str = "cpu",
) -> Strategy:
    """A strategy by its name. Collective over the group for hierarchical and adaptive.

    Hierarchical needs `nodes` or `local_world_size`. Adaptive uses the first rank's `table`, or
    measures; all ranks must give one, or none.
    """
    if nodes is None and local_world_size is not None and name in ("hierarchical", "adaptive"):
        nodes = make_node_groups(group, local_world_size)
    if name == "hierarchical":
        if nodes is None:
            raise UsageError(
                "strategy 'hierarchical' needs to know the nodes; give local_world_size (ranks "
                "per node; communication.ranks_per_node in a configuration) or nodes"
            )
        return HierarchicalAllReduce(nodes=nodes)
    candidates = make_candidates(nodes)
    if name == "adaptive":
        table = (
            measure_strategies(group, candidates=candidates, device=device)
            if table is None
            else share_table(table, group)
        )
        return AdaptiveAllReduce(table=table, candidates=candidates)
    if name not in candidates:
        raise UsageError(f"{name!r} is no strategy; expected one of {', '.join(STRATEGIES)}")
    return candidates[name]
