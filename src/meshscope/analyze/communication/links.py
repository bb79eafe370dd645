"""Links over which operations take longer than over others like them.

Within a class (`link_samples`) a link is slow if its floor is `MIN_RATIO` times the usual one, the
lower quartile of the links' floors, and its operations are slower than the others' in more steps
than chance allows. This finds a slow half of the links as well as a single one.

It cannot find an axis whose links are all slow. Such an axis is compared with the other axes of the
job, separately inside and across hosts: it must exceed what they show possible, scaled by the
number of hops and by bytes beyond `_LATENCY_BYTES`, `_AXIS_RATIO` times. It is also compared with
any network: an operation of up to `_LATENCY_BYTES` takes about `_HOP_NS` per hop, and one that
always takes `_LATENCY_RATIO` times that is slow. Both are coarse because algorithms differ: of an
axis that is slow, operations half as far off are part of it. Large operations without another axis
are not judged.

Wrong where links of a class are meant to differ: other cables, other switches. Wrong for a link
that is slow in a small part of the steps: floors do not show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.communication.link_samples import (
    Link,
    LinkClass,
    LinkTimes,
    collect_link_times,
)
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.operations import Kind, bus_factor
from meshscope.numerics.chance import MIN_STEPS, SIGNIFICANCE_RATIO, binomial_tail
from meshscope.store.read.arrays import Floats, Int64s

MIN_RATIO = 1.5
_AXIS_RATIO = 5.0
_LATENCY_BYTES = 1 << 16
"""A message up to this size is taken to be as fast as an empty one."""
_HOP_NS = 100_000
"""A small message over TCP, inside a host or to one nearby; shared memory and RDMA take less."""
_LATENCY_RATIO = 10.0
_LIKEWISE_SHARE = 0.5
"""Of these ratios, for other operations of an axis that is slow."""
_USUAL_QUANTILE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SlowPart:
    """Operations of one class over one link that take too long."""

    times: LinkTimes
    usual_ns: float
    """The floor elsewhere."""
    usual_median_ns: float
    """The median elsewhere: what these would take if the link were like others. The floor for a
    whole axis, whose own median is not known."""
    num_slow_steps: int
    num_steps: int
    p_value: float
    """Corrected for the links tested; 0 if a whole axis is judged by others."""

    @property
    def excess_ns(self) -> float:
        """Of one operation: floor minus the usual one."""
        return self.times.floor_ns - self.usual_ns

    @property
    def cost_ns(self) -> float:
        """Of all operations in a step, if none was overlapped."""
        num_steps = max(len(np.unique(self.times.step)), 1)
        return self.excess_ns * len(self.times.match) / num_steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlowLink:
    """A slow link, or an axis whose links are all slow."""

    axis: str
    links: tuple[Link, ...]
    parts: tuple[_SlowPart, ...]
    """The costliest first."""
    is_whole_axis: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for link in self.links for rank in link.ranks}))

    @property
    def cost_ns(self) -> float:
        """Per step, of the link that costs most; an upper bound of what it holds up."""
        by_link: dict[Link, float] = {}
        for part in self.parts:
            link = part.times.link
            by_link[link] = by_link.get(link, 0.0) + part.cost_ns
        return max(by_link.values())


def find_slow_links(timeline: Timeline) -> list[SlowLink]:
    """Slow links of all axes, the costliest first."""
    found = collect_link_times(timeline)
    classes: dict[LinkClass, list[LinkTimes]] = {}
    for one in found:
        classes.setdefault(one.link_class, []).append(one)
    parts = [part for links in classes.values() for part in _compare(links, len(found))]
    slow = _join_links(parts)
    judged = {link.axis for link in slow}
    for axis in sorted({one.link.axis for one in found} - judged):
        whole = _judge_axis(axis, found)
        if whole is not None:
            slow.append(whole)
    return sorted(slow, key=lambda link: -link.cost_ns)


def _compare(links: Sequence[LinkTimes], num_tests: int) -> list[_SlowPart]:
    if len(links) < 2:
        return []
    floors = np.array([one.floor_ns for one in links])
    usual = float(np.quantile(floors, _USUAL_QUANTILE, method="lower"))
    found = []
    for one, floor in zip(links, floors.tolist(), strict=True):
        if floor < MIN_RATIO * usual or floor <= 0:
            continue
        others = [other for other in links if other is not one]
        num_slow, num_steps = _count_slow_steps(one, others)
        chance = binomial_tail(num_slow, num_steps, 0.5) * num_tests
        if num_steps >= MIN_STEPS and chance < SIGNIFICANCE_RATIO:
            found.append(
                _SlowPart(
                    times=one,
                    usual_ns=usual,
                    usual_median_ns=_usual_median(others, usual),
                    num_slow_steps=num_slow,
                    num_steps=num_steps,
                    p_value=chance,
                )
            )
    return found


def _usual_median(others: Sequence[LinkTimes], usual_floor_ns: float) -> float:
    """The middle median of the other links with a usual floor."""
    medians = [one.median_ns for one in others if one.floor_ns < MIN_RATIO * usual_floor_ns]
    return float(np.median(medians)) if medians else usual_floor_ns


def _count_slow_steps(one: LinkTimes, others: Sequence[LinkTimes]) -> tuple[int, int]:
    """Steps in which this link's median is above that of the faster half of the others."""
    num_steps = 1 + max(int(links.step.max()) for links in (one, *others))
    own = _step_medians(one, num_steps)
    rest = np.sort(np.array([_step_medians(other, num_steps) for other in others]), axis=0)
    usual = rest[(len(others) - 1) // 2]
    is_known = np.isfinite(own) & np.isfinite(usual)
    return int(np.count_nonzero(is_known & (own > usual))), int(np.count_nonzero(is_known))


def _step_medians(times: LinkTimes, num_steps: int) -> Floats:
    """Per step the median time; infinite without an operation."""
    order = np.lexsort((times.time_ns, times.step))
    step, values = times.step[order], times.time_ns[order]
    first = np.flatnonzero(np.append(True, step[1:] != step[:-1]))
    size = np.diff(np.append(first, len(step)))
    medians = np.full(num_steps, np.inf)
    medians[step[first]] = values[first + size // 2]
    return medians


def _join_links(parts: Sequence[_SlowPart]) -> list[SlowLink]:
    """Joins the parts of each link over its classes."""
    by_link: dict[Link, list[_SlowPart]] = {}
    for part in parts:
        by_link.setdefault(part.times.link, []).append(part)
    return [
        SlowLink(
            axis=link.axis,
            links=(link,),
            parts=tuple(sorted(own, key=lambda part: -part.cost_ns)),
            is_whole_axis=False,
        )
        for link, own in by_link.items()
    ]


def _judge_axis(axis: str, found: Sequence[LinkTimes]) -> SlowLink | None:
    """The whole axis, if all of its links are far slower than other axes show possible."""
    own = [one for one in found if one.link.axis == axis]
    slow = {one.link for one in own if _find_usual(one, found) is not None}
    if not own or len(slow) < len({one.link for one in own}):
        return None
    # Of a link that is slow, other operations are as well that are not quite as far off.
    bounds = [(one, _find_usual(one, found, share=_LIKEWISE_SHARE)) for one in own]
    parts = [_make_whole(one, usual) for one, usual in bounds if usual is not None]
    links = tuple(dict.fromkeys(part.times.link for part in parts))
    parts.sort(key=lambda part: -part.cost_ns)
    return SlowLink(axis=axis, links=links, parts=tuple(parts), is_whole_axis=True)


def _make_whole(one: LinkTimes, usual_ns: float) -> _SlowPart:
    num_steps = len(np.unique(one.step))
    return _SlowPart(
        times=one,
        usual_ns=usual_ns,
        usual_median_ns=usual_ns,
        num_slow_steps=num_steps,
        num_steps=num_steps,
        p_value=0.0,
    )


def _find_usual(one: LinkTimes, found: Sequence[LinkTimes], *, share: float = 1.0) -> float | None:
    """What operations like these usually take, by other axes or any network; None if these do not
    take far longer, or this share of that."""
    floor = one.floor_ns
    others = [
        other
        for other in found
        if other.link.axis != one.link.axis
        and other.link_class.is_across_hosts == one.link_class.is_across_hosts
    ]
    bounds = [bound for other in others if (bound := _scale(other, one)) is not None]
    bounds = [bound for bound in bounds if floor >= share * _AXIS_RATIO * bound]
    latency = _HOP_NS * _count_hops(one.link_class)
    if one.size_bytes <= _LATENCY_BYTES and floor >= share * _LATENCY_RATIO * latency:
        bounds.append(latency)
    return min(bounds) if bounds else None


def _scale(other: LinkTimes, one: LinkTimes) -> float | None:
    """The most `one` may take given the time of `other`; None if not comparable."""
    kinds = (other.link_class.kind, one.link_class.kind)
    is_mixed = (kinds[0] is Kind.RECV) != (kinds[1] is Kind.RECV)
    if is_mixed and max(other.size_bytes, one.size_bytes) > _LATENCY_BYTES:
        return None  # reducing costs time that sending does not
    hops = _count_hops(one.link_class) / _count_hops(other.link_class)
    moved = [
        max(times.size_bytes * bus_factor(times.link_class.kind, times.link_class.num_ranks), 1.0)
        for times in (one, other)
    ]
    data = max(moved[0], _LATENCY_BYTES) / max(moved[1], _LATENCY_BYTES)
    return other.floor_ns * max(hops, 1.0) * max(data, 1.0)


def _count_hops(link_class: LinkClass) -> int:
    """Messages that follow each other in a ring."""
    if link_class.kind is Kind.RECV:
        return 1
    once = max(link_class.num_ranks - 1, 1)
    return 2 * once if link_class.kind in (Kind.ALL_REDUCE, Kind.BARRIER) else once


def shorten_transfers(timeline: Timeline, slow: SlowLink) -> Int64s:
    """Transfers of all rows, with those over the slow link shortened to the usual time.

    The time in the queue behind others of the link shrinks in proportion.
    """
    communication = timeline.communication
    assert communication is not None
    matches, row_times = communication.matches, communication.row_times
    transfer = row_times.transfer_ns.copy()
    for part in slow.parts:
        of_match = np.zeros(len(matches), dtype=np.bool_)
        of_match[part.times.every_match] = True
        row = matches.member[of_match[matches.of_member]]
        queued = row_times.queued_ns[row]
        own = row_times.transfer_ns[row] - queued
        usual = round(part.usual_median_ns)
        share = part.usual_median_ns / max(part.times.median_ns, 1.0)
        transfer[row] = np.minimum(own, usual) + np.rint(queued * min(share, 1.0)).astype(np.int64)
    return transfer
