"""Where the wall clock of every rank and step went, in lines that add up exactly.

    wall = useful compute + kernel inefficiency + exposed transfer, wait or communication by axis
         + pipeline bubble + exposed copies + idle by cause + input stall + checkpoint + eval
         + logging + compilation + other + residual

Lines are sums of the timeline's pieces; a device's work is divided as `device_parts` says, with an
interval where that is an estimate. The wall clock of a step is its period on the host or on
the device's stream, like the pieces, from the end of the previous step to its own. The residual is
the part of a period without a piece: 0 unless pieces are damaged. A host that runs ahead of its
device has shorter periods until its queue is full (`host_ahead_ratio`).

Useful compute is the model's FLOPs at the peak of the rank's device (the rank's own FLOPs, which
differ between stages). If either is unknown, compute is one line and says why. An inefficiency
below zero means that FLOPs or peak are wrong; it is shown and flagged, never clipped.

Sums are of the whole run. Where not all of its steps were looked at, its wall clock is exact (but
where a profiler disturbed it) and the lines are those of the steps that were, each counted as often
as `run_weights` says; of thinned runs communication is then brought to the exact sums in table
`aggregates`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget_lines import (
    SHARE_OF_PART,
    SHARE_OF_PHASE,
    Line,
    Share,
    sort_pieces,
)
from meshscope.analyze.budget.exact_sums import ExactSums
from meshscope.analyze.budget.model_flops import RankFlops
from meshscope.analyze.budget.run_budget import RunBudget, measure_run
from meshscope.analyze.timeline.device_parts import DeviceParts, describe_evidence
from meshscope.analyze.timeline.run_weights import weigh_steps
from meshscope.analyze.timeline.step_kinds import RARE_PHASES
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Missing, Unavailable, need, or_unavailable
from meshscope.store.read.arrays import Floats, Int64s

_MFU_FORMULA = "model FLOPs of a step / (peak FLOP/s x period), summed over ranks"
_NOT_SPLIT = "what devices computed is not known: no kernel sample was taken"
_COUNTED = "nothing is estimated"
_HFU_FORMULA = "model FLOPs of a step with what is computed again / (peak FLOP/s x period)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Model or hardware FLOPs utilisation."""

    ratio: float
    """Over 1 if FLOPs or peak are wrong."""
    formula: str
    flops_per_step: float
    """Of all ranks."""
    peak_flops_per_s: float
    """Of all ranks: the denominator."""
    peak_source: str
    flops_source: str
    """Where the FLOPs come from."""

    @property
    def is_impossible(self) -> bool:
        return self.ratio > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Budget:
    """The lines of every rank and step."""

    ranks: tuple[int, ...]
    steps: Int64s
    lines: tuple[Line, ...]
    time_ns: Int64s
    """[rank, step, line]"""
    spread_ns: Floats
    """[rank, line]: a line's time in a step may be off by so much; 0 where it was counted."""
    evidence: str | Unavailable
    """What devices' lines are estimated from."""
    wall_ns: Int64s
    """[rank, step]: the period, on the clock of the pieces."""
    run: RunBudget
    """The lines of the whole run."""
    host_ahead_ratio: float
    """How much shorter the hosts' periods are than these; 0 if pieces are hosts'."""
    mfu: Utilisation | Unavailable
    hfu: Utilisation | Unavailable

    @property
    def residual_ns(self) -> Int64s:
        """[rank, step]: what no line explains; negative if lines explain too much."""
        return np.asarray(self.wall_ns - self.time_ns.sum(axis=2), dtype=np.int64)

    @property
    def total_wall_ns(self) -> int:
        """All ranks and steps of the run together."""
        return int(self.run.wall_ns.sum())

    @property
    def num_rank_steps(self) -> int:
        """Ranks times steps of the run."""
        return len(self.ranks) * self.run.num_steps

    @property
    def mean_wall_ns(self) -> float:
        """Per rank and step of the run."""
        return self.total_wall_ns / max(self.num_rank_steps, 1)

    @property
    def residual_ratio(self) -> float:
        """Of the whole, by size."""
        wall = self.total_wall_ns
        return abs(self.total_residual_ns) / wall if wall else 0.0

    @property
    def total_residual_ns(self) -> int:
        return self.total_wall_ns - int(self.run.time_ns.sum())

    def total_ns(self) -> Int64s:
        """Per line, all ranks and steps of the run together."""
        return np.asarray(self.run.time_ns.sum(axis=0), dtype=np.int64)

    def of_ranks_ns(self) -> Int64s:
        """[rank, line], all steps of the run together."""
        return self.run.time_ns

    def share_of(self, share: Share, axis: str | None = None) -> float:
        """A line's share of the wall clock, over all axes if none is named."""
        is_wanted = np.array(
            [line.share is share and axis in (None, line.axis) for line in self.lines]
        )
        wall = self.total_wall_ns
        return float(self.total_ns()[is_wanted].sum()) / wall if wall else 0.0


def measure_budget(
    timeline: Timeline,
    flops: Mapping[int, RankFlops] | Unavailable,
    parts: DeviceParts | None = None,
    exact: ExactSums | None = None,
) -> Budget:
    """`flops` come from `model_flops.read_flops`, `parts` from `divide_device_time`, `exact` from
    `exact_sums.read_exact_sums`."""
    lines, line = sort_pieces(timeline)
    pieces = timeline.pieces
    shape = (len(timeline.ranks), len(timeline.steps), len(lines))
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank).astype(np.int64)
    cell = (index * shape[1] + pieces.step) * shape[2] + line
    # Exact: a sum of periods stays far below 2^53 ns.
    left = (
        pieces.duration_ns if parts is None else np.where(parts.is_divided, 0, pieces.duration_ns)
    )
    sums = np.bincount(cell, left, minlength=int(np.prod(shape)))
    time_ns = np.rint(sums).astype(np.int64).reshape(shape)
    wall_ns = timeline.period_end_ns - timeline.period_start_ns
    weight = weigh_steps(timeline)
    spread_ns = np.zeros((shape[0], shape[2]))
    if parts is not None:
        lines, time_ns, spread_ns = _add_parts(lines, time_ns, parts)
    is_split = all(one.share is not Share.SPAN for one in lines)
    useful = _useful_ns(timeline, flops) if is_split else Unavailable(_NOT_SPLIT)
    lines, time_ns, spread_ns = _split_compute(lines, time_ns, spread_ns, useful)
    if parts is not None:
        lines, time_ns, spread_ns = _drop_empty(lines, time_ns, spread_ns, is_split=is_split)
    lines, time_ns, spread_ns = _add_unseen(timeline, lines, time_ns, spread_ns)
    return Budget(
        ranks=timeline.ranks,
        steps=timeline.steps,
        lines=tuple(lines),
        time_ns=time_ns,
        spread_ns=spread_ns,
        evidence=Unavailable(_COUNTED) if parts is None else describe_evidence(parts),
        wall_ns=wall_ns,
        run=measure_run(timeline, tuple(lines), time_ns, weight, exact),
        host_ahead_ratio=measure_host_lead(timeline),
        mfu=_measure_mfu(timeline, flops, weight),
        hfu=_measure_hfu(timeline, flops, weight),
    )


def measure_host_lead(timeline: Timeline) -> float:
    """How much shorter the hosts' periods are than the timeline's, as a ratio."""
    period_ns = int((timeline.period_end_ns - timeline.period_start_ns).sum())
    return 1 - int(timeline.host_period_ns.sum()) / period_ns if period_ns > 0 else 0.0


@or_unavailable
def _useful_ns(timeline: Timeline, flops: Mapping[int, RankFlops] | Unavailable) -> Int64s:
    """Per rank the time its FLOPs would take at peak; all ranks must be known."""
    by_rank, found = need(flops), []
    for rank in timeline.ranks:
        if rank not in by_rank:
            raise Missing(f"FLOPs of rank {rank} are not known")
        own = by_rank[rank]
        found.append(min(own.model_flops / need(own.peak_flops_per_s) * 1e9, 2.0**53))
    return np.rint(found).astype(np.int64)


def _add_parts(
    lines: list[Line], time_ns: Int64s, parts: DeviceParts
) -> tuple[list[Line], Int64s, Floats]:
    """The budget with what devices did, in the order of `Share`."""
    wanted = [Line(share=SHARE_OF_PART[name], axis=axis) for name, axis in parts.parts]
    order = list(Share)
    merged = sorted({*lines, *wanted}, key=lambda line: (order.index(line.share), line.axis))
    total = np.zeros((*time_ns.shape[:2], len(merged)), dtype=np.int64)
    spread = np.zeros((time_ns.shape[0], len(merged)))
    for index, line in enumerate(lines):
        total[:, :, merged.index(line)] += time_ns[:, :, index]
    for index, line in enumerate(wanted):
        at = merged.index(line)
        total[:, :, at] += parts.time_ns[:, :, index]
        spread[:, at] = np.maximum(spread[:, at], parts.spread_ns[:, index])
    return merged, total, spread


def _drop_empty(
    lines: list[Line], time_ns: Int64s, spread_ns: Floats, *, is_split: bool
) -> tuple[list[Line], Int64s, Floats]:
    """Leaves out lines whose time all went to others; compute is shown where it is known."""
    kept = [
        index
        for index, line in enumerate(lines)
        if time_ns[:, :, index].any() or (is_split and line.share is Share.COMPUTE)
    ]
    return [lines[index] for index in kept], time_ns[:, :, kept], spread_ns[:, kept]


def _add_unseen(
    timeline: Timeline, lines: list[Line], time_ns: Int64s, spread_ns: Floats
) -> tuple[list[Line], Int64s, Floats]:
    """Lines for rare phases that are in no step of the timeline."""
    rare = np.unique(timeline.kinds.kind[timeline.kinds.excess_ns.any(axis=0)])
    wanted = {SHARE_OF_PHASE[RARE_PHASES[kind]] for kind in rare.tolist()}
    more = [Line(share=one) for one in sorted(wanted - {line.share for line in lines})]
    time_ns = np.pad(time_ns, ((0, 0), (0, 0), (0, len(more))))
    return [*lines, *more], time_ns, np.pad(spread_ns, ((0, 0), (0, len(more))))


def _split_compute(
    lines: list[Line], time_ns: Int64s, spread_ns: Floats, useful_ns: Int64s | Unavailable
) -> tuple[list[Line], Int64s, Floats]:
    """Compute as useful and the rest, or as one line with the reason."""
    at = next(index for index, line in enumerate(lines) if line.share is Share.COMPUTE)
    if isinstance(useful_ns, Unavailable):
        lines[at] = Line(share=Share.COMPUTE, reason=useful_ns.reason)
        return lines, time_ns, spread_ns
    useful = np.broadcast_to(useful_ns[:, None], time_ns.shape[:2])
    rest = time_ns[:, :, at] - useful
    new_lines = [Line(share=Share.USEFUL), Line(share=Share.INEFFICIENCY)]
    parts = [time_ns[:, :, :at], np.stack([useful, rest], axis=2), time_ns[:, :, at + 1 :]]
    known_ns = np.zeros((len(spread_ns), 1))
    spreads = [spread_ns[:, :at], known_ns, spread_ns[:, at:]]
    merged = [*lines[:at], *new_lines, *lines[at + 1 :]]
    return merged, np.concatenate(parts, axis=2), np.concatenate(spreads, axis=1)


@or_unavailable
def _measure_mfu(
    timeline: Timeline, flops: Mapping[int, RankFlops] | Unavailable, weight: Floats
) -> Utilisation:
    by_rank = {rank: one.model_flops for rank, one in need(flops).items()}
    return need(_measure_utilisation(timeline, need(flops), by_rank, _MFU_FORMULA, weight))


@or_unavailable
def _measure_hfu(
    timeline: Timeline, flops: Mapping[int, RankFlops] | Unavailable, weight: Floats
) -> Utilisation:
    by_rank = {rank: need(one.hardware_flops) for rank, one in need(flops).items()}
    return need(_measure_utilisation(timeline, need(flops), by_rank, _HFU_FORMULA, weight))


@or_unavailable
def _measure_utilisation(
    timeline: Timeline,
    flops: Mapping[int, RankFlops],
    flops_of_rank: Mapping[int, float],
    formula: str,
    weight: Floats,
) -> Utilisation:
    need(_useful_ns(timeline, flops))
    peaks = [need(flops[rank].peak_flops_per_s) for rank in timeline.ranks]
    period_ns = timeline.period_end_ns - timeline.period_start_ns
    period_ns = np.average(period_ns, axis=1, weights=weight)
    possible = sum(peak * float(ns) * 1e-9 for peak, ns in zip(peaks, period_ns, strict=True))
    if not possible > 0:
        raise Missing("steps have no length")
    total = sum(flops_of_rank[rank] for rank in timeline.ranks)
    sources = dict.fromkeys(flops[rank].peak_source for rank in timeline.ranks)
    return Utilisation(
        ratio=total / possible,
        formula=formula,
        flops_per_step=total,
        peak_flops_per_s=float(sum(peaks)),
        peak_source="; ".join(sources),
        flops_source="; ".join(dict.fromkeys(flops[rank].source for rank in timeline.ranks)),
    )
