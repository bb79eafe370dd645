"""What slow ranks are slow at, by kernel samples: at their kernels, or at launching them.

A rank's own time in a sampled step is what its device computed or copied, and how long it idled
because the host was at something else than fetching data, saving, evaluating or logging. A rank
stands out if its own time is longer in all sampled steps than that of all peers that do not; by
chance that happens to k of N ranks in S steps with a probability of C(N, k) / C(NS, kS). That is
enough to say what a rank is slow at that other evidence names. It `is_clear` by itself if the
chance is below 1 %, or if it is further from the others than these are apart ten times over.

`waiting_ns` is how much longer than the rank its peers wait for communication: where ranks wait for
each other, the others cannot have lost more.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.rank.kernel_steps import NO_PHASE, DeviceStep
from meshscope.analyze.timeline.device_parts import EXPOSED, DeviceParts
from meshscope.analyze.timeline.peer_work import PeerGroup, PeerWork
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.work import WorkTable
from meshscope.numerics.chance import SIGNIFICANCE_RATIO
from meshscope.store.read.arrays import Floats

_MIN_EXCESS_SHARE = 0.01
"""Least excess, as a share of a step's period, that is named."""
_CLEAR_RANGES = 10.0
_HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledExcess:
    """One rank that stands out; times per step, over the median of its peers."""

    rank: int
    axis: str
    """Along which its peers lie; "" where no layout is known."""
    reference: tuple[int, ...]
    """Peers that do not stand out."""
    kernels_ns: Mapping[str, float]
    """By phase that launched them, where it is 1 % of a step or more, largest first."""
    host_ns: Mapping[str, float]
    """Idle because of the host, by the phase the host was in; in steps without a sample."""
    waiting_ns: float
    """How much longer than the rank its peers wait for communication, at least 0."""
    peers_own_ns: float
    """Own time of its peers in a sampled step: median."""
    num_steps: int
    p_value: float
    """Corrected for all peers."""
    is_clear: bool
    """Samples alone show that it is slow."""

    @property
    def own_ns(self) -> float:
        return sum(self.kernels_ns.values()) + sum(self.host_ns.values())

    @property
    def by_phase_ns(self) -> Mapping[str, float]:
        """Kernels and host together, largest first."""
        names = {*self.kernels_ns, *self.host_ns}
        sums = {one: self.kernels_ns.get(one, 0.0) + self.host_ns.get(one, 0.0) for one in names}
        return _order(sums)

    @property
    def is_host(self) -> bool:
        """More of it is the host's than the kernels'."""
        return sum(self.host_ns.values()) > sum(self.kernels_ns.values())


def find_sampled_excess(
    parts: DeviceParts, work: PeerWork, table: WorkTable
) -> Mapping[int, SampledExcess]:
    """By rank; only those that stand out."""
    found: dict[int, SampledExcess] = {}
    waiting = _measure_waiting(parts, table)
    for group in work.groups:
        steps = _find_common_steps(parts, group)
        if not steps:
            continue
        by_rank = {index: _pick(parts, index, steps) for index in group.indices}
        own = np.array([[_measure_own(one) for one in by_rank[i]] for i in group.indices]).T
        slow = _choose(own)
        if not slow:
            continue
        p = math.comb(own.shape[1], len(slow)) / math.comb(own.size, len(slow) * own.shape[0])
        is_clear = p < SIGNIFICANCE_RATIO or _is_far(own, slow)
        others = [index for column, index in enumerate(group.indices) if column not in slow]
        for column in slow:
            index = group.indices[column]
            one = _describe(parts, group, index, others, by_rank, waiting)
            least_ns = _MIN_EXCESS_SHARE * work.step_ns
            one = replace(
                one,
                p_value=p,
                is_clear=is_clear,
                kernels_ns={name: ns for name, ns in one.kernels_ns.items() if ns >= least_ns},
                host_ns={name: ns for name, ns in one.host_ns.items() if ns >= least_ns},
            )
            if one.own_ns:
                found[one.rank] = one
    return found


def _find_common_steps(parts: DeviceParts, group: PeerGroup) -> tuple[int, ...]:
    """Steps that were sampled on all ranks of a group."""
    sampled = [parts.sampled.get(parts.ranks[index]) for index in group.indices]
    if any(one is None for one in sampled):
        return ()
    common = set.intersection(*(set(one.step_numbers) for one in sampled if one is not None))
    return tuple(sorted(common))


def _pick(parts: DeviceParts, index: int, steps: Sequence[int]) -> tuple[DeviceStep, ...]:
    by_step = {one.step: one for one in parts.sampled[parts.ranks[index]].steps}
    return tuple(by_step[step] for step in steps)


def _measure_own(step: DeviceStep) -> float:
    return float(step.compute_ns + step.copy_ns + step.idle_ns.get(_HOST, 0))


def _choose(own_ns: Floats) -> tuple[int, ...]:
    """Columns above all others in all steps; at most half of them."""
    num_ranks = own_ns.shape[1]
    order = np.argsort(-np.median(own_ns, axis=0), kind="stable").tolist()
    for count in range(num_ranks // 2, 0, -1):
        slow, others = order[:count], order[count:]
        if own_ns[:, slow].min() > own_ns[:, others].max():
            return tuple(slow)
    return ()


def _is_far(own_ns: Floats, slow: Sequence[int]) -> bool:
    """From two sampled steps on: of one nothing says how much they vary."""
    others = np.delete(own_ns, list(slow), axis=1)
    distance = own_ns[:, list(slow)].min() - others.max()
    return len(own_ns) > 1 and bool(distance > _CLEAR_RANGES * (others.max() - others.min()))


def _measure_waiting(parts: DeviceParts, table: WorkTable) -> Floats:
    """[rank]: communication that held it up or that samples show exposed, per step."""
    held = table.period_ns - table.held_ns[:, :, PieceKind.WORK]
    unseen = parts.ns_by_rank(EXPOSED) / max(len(table.steps), 1)
    return np.asarray(held.mean(axis=1) + unseen, dtype=np.float64)


def _describe(
    parts: DeviceParts,
    group: PeerGroup,
    index: int,
    others: Sequence[int],
    by_rank: Mapping[int, tuple[DeviceStep, ...]],
    waiting_ns: Floats,
) -> SampledExcess:
    kernels = _compare([_sum_kernels(by_rank[one]) for one in (index, *others)])
    host = _compare([_sum_host(by_rank[one]) for one in (index, *others)])
    # A sampled step has a slower host than the others.
    sampled = float(np.mean([step.idle_ns.get(_HOST, 0) for step in by_rank[index]]))
    usual = float(parts.ns_by_rank(_HOST)[index]) / max(parts.time_ns.shape[1], 1)
    scale = min(usual / sampled, 1.0) if sampled else 0.0
    peers = [_measure_own(step) for one in others for step in by_rank[one]]
    return SampledExcess(
        rank=parts.ranks[index],
        axis=group.axis,
        reference=tuple(parts.ranks[one] for one in others),
        kernels_ns=_order(kernels),
        host_ns=_order({name: ns * scale for name, ns in host.items()}),
        waiting_ns=max(float(np.median(waiting_ns[list(others)]) - waiting_ns[index]), 0.0),
        peers_own_ns=float(np.median(peers)),
        num_steps=len(by_rank[index]),
        p_value=1.0,
        is_clear=False,
    )


def _sum_kernels(steps: Sequence[DeviceStep]) -> dict[str, float]:
    compute = _average([step.compute_by_phase_ns for step in steps])
    copies = _average([step.copy_by_phase_ns for step in steps])
    names = {*compute, *copies}
    return {name: compute.get(name, 0.0) + copies.get(name, 0.0) for name in names}


def _sum_host(steps: Sequence[DeviceStep]) -> dict[str, float]:
    return _average([step.host_by_phase_ns for step in steps])


def _average(steps: Sequence[Mapping[str, int]]) -> dict[str, float]:
    names = {name for step in steps for name in step}
    return {name: float(np.mean([step.get(name, 0) for step in steps])) for name in names}


def _compare(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What the first has more than the median of the others."""
    own, *others = ranks
    excess = {
        name: value - float(np.median([other.get(name, 0.0) for other in others]))
        for name, value in own.items()
    }
    return {name: value for name, value in excess.items() if value > 0}


def _order(by_phase_ns: Mapping[str, float]) -> dict[str, float]:
    """Largest first; no phase is an empty name, as in `PeerWork`."""
    named = ((name if name != NO_PHASE else "", value) for name, value in by_phase_ns.items())
    return dict(sorted(named, key=lambda item: (-item[1], item[0])))
