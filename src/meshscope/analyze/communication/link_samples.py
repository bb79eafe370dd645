"""How long operations took over each link: the input of the search for slow links.

A link is a process group, for collectives, or two ranks, for messages. The time of an operation is
that of the transfer alone (`RowTimes.pure_transfer_ns`), the shortest among its members whose end
is exact: no rank ends before the operation does. For a message it is the receiver's. Waiting
mistaken for transfer only makes times longer, hence the low percentile: the floor of a link is the
time that nine in ten operations exceed.

Links are compared within a class: same axis, kind, size within a factor of four, number of ranks,
and whether they cross hosts (ranks with different clocks). Operations of unknown size are left out.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.job import Job
from meshscope.analyze.job.operations import code_pairs, find_rows, number_values
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.layout import Layout
from meshscope.core.operations import POINT_TO_POINT, Kind, size_bucket
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s

FLOOR_QUANTILE = 0.1
_MIN_OPERATIONS = 10
"""Least operations of a link in a class."""
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    axis: str
    ranks: tuple[int, ...]
    """A group's members, or the two ends of messages."""
    is_across_hosts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Operations that should take equally long over every link."""

    axis: str
    kind: Kind
    size_bucket_bytes: int
    num_ranks: int
    is_across_hosts: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTimes:
    """Operations of one class over one link."""

    link: Link
    link_class: LinkClass
    match: Int64s
    """Indices in `Matches`, of those whose time is known."""
    every_match: Int64s
    """Of all in the kept steps, whether or not their time is known."""
    step: Int64s
    """Indices in `Timeline.steps`."""
    time_ns: Int64s
    size_bytes: float
    """Median."""

    @property
    def floor_ns(self) -> float:
        """Nine in ten take longer."""
        return float(np.quantile(self.time_ns, FLOOR_QUANTILE))

    @property
    def median_ns(self) -> float:
        """Half take longer."""
        return float(np.median(self.time_ns))


def collect_link_times(timeline: Timeline) -> list[LinkTimes]:
    """All links with enough operations in the kept steps, by class."""
    communication = timeline.communication
    if communication is None or not len(communication.matches):
        return []
    match, step, time_ns = _measure_matches(timeline, communication)
    rows = communication.operations.rows
    first_row = communication.matches.member[communication.matches.first[match]]
    links, link = _name_links(timeline, communication, match)
    size = np.maximum(_known_sizes(communication)[match], 0)
    sizes, size_index = np.unique(size, return_inverse=True)
    of_size = np.array([size_bucket(one) for one in sizes.tolist()], dtype=np.int64)
    buckets = of_size[size_index]
    kind = np.where(rows.kind[first_row] == Kind.SEND, Kind.RECV, rows.kind[first_row])
    _, bucket_index = number_values(buckets)
    key = (link * 64 + kind) * (int(bucket_index.max(initial=0)) + 1) + bucket_index
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    found = []
    for part in np.split(order, cuts):
        every_match, part = match[part], part[time_ns[part] < _NEVER]
        if len(part) < _MIN_OPERATIONS:
            continue
        own = links[int(link[part[0]])]
        found.append(
            LinkTimes(
                link=own,
                link_class=LinkClass(
                    axis=own.axis,
                    kind=Kind(int(kind[part[0]])),
                    size_bucket_bytes=int(buckets[part[0]]),
                    num_ranks=len(own.ranks),
                    is_across_hosts=own.is_across_hosts,
                ),
                match=match[part],
                every_match=every_match,
                step=step[part],
                time_ns=time_ns[part],
                size_bytes=float(np.median(size[part])),
            )
        )
    return found


def _measure_matches(timeline: Timeline, communication: Job) -> tuple[Int64s, Int64s, Int64s]:
    """Operations of kept steps: index, step and time of the transfer, `_NEVER` if not known."""
    matches, rows = communication.matches, communication.operations.rows
    member, row_times = matches.member, communication.row_times
    is_known = rows.has_exact_end[member] & row_times.is_split[member]
    is_known &= rows.kind[member] != Kind.SEND
    own = np.where(is_known, row_times.pure_transfer_ns[member], _NEVER)
    time_ns = np.minimum.reduceat(own, matches.first)
    step = find_rows(timeline.steps, rows.step[member[matches.first]].astype(np.int64))
    is_sized = _known_sizes(communication) >= 0
    is_sized |= rows.kind[member[matches.first]] == Kind.BARRIER
    match = np.flatnonzero((step >= 0) & matches.is_usable & is_sized)
    return match, step[match], np.maximum(time_ns[match], 0)


def _known_sizes(communication: Job) -> Int64s:
    """Per operation what any of its ranks knows; -1 where none does, as of what was launched before
    a trace began."""
    matches, rows = communication.matches, communication.operations.rows
    size: Int64s = np.maximum.reduceat(rows.size_bytes[matches.member], matches.first)
    return size


def _name_links(timeline: Timeline, communication: Job, match: Int64s) -> tuple[list[Link], Int64s]:
    """The links, and the link index of each operation."""
    operations, matches = communication.operations, communication.matches
    rows = operations.rows
    row = matches.member[matches.first[match]]
    world = operations.world_size
    pair = code_pairs(rows.rank[row], rows.peer[row], world)
    is_pair = np.isin(rows.kind[row], [int(kind) for kind in POINT_TO_POINT])
    group = matches.group[match].astype(np.int64)
    code = np.where(is_pair, (group + 1) * world * world + pair, -group - 1)
    codes, index = np.unique(code, return_inverse=True)
    clock = communication.alignment.of_rank
    links = []
    for one in codes.tolist():
        found = operations.groups[-one - 1 if one < 0 else one // (world * world) - 1]
        ranks, axis = found.ranks, found.axis
        if one >= 0:
            ranks = divmod(one % (world * world), world)
            axis = _pair_axis(ranks, timeline.layout, found.axis)
        clocks = set(clock[list(ranks)].tolist()) if max(ranks) < len(clock) else set()
        links.append(Link(axis=axis, ranks=ranks, is_across_hosts=len(clocks) > 1))
    return links, index.astype(np.int64)


def _pair_axis(ranks: tuple[int, ...], layout: Layout | Unavailable, group_axis: str) -> str:
    """The one axis along which two ranks differ; else the name of their group."""
    if isinstance(layout, Unavailable) or max(ranks) >= layout.world_size:
        return group_axis
    one, two = (layout.coordinates(rank) for rank in ranks)
    differing = [str(axis) for axis in layout.named_axes if one.along(axis) != two.along(axis)]
    return differing[0] if len(differing) == 1 else group_axis
