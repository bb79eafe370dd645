"""Communication as readers see it: sums with means per step and rank, lists of bounded size.

Imported only for runs that communicate, as the analysis is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from meshscope.analyze.communication.bandwidth import MessageFlow
from meshscope.analyze.communication.communication import (
    Communication,
    CommunicationHealth,
    PartialGroup,
)
from meshscope.analyze.communication.communication_sums import CommunicationSum
from meshscope.analyze.communication.last_arrivers import LastArriver
from meshscope.analyze.job.clocks import Clock
from meshscope.analyze.job.matching import SequenceShift
from meshscope.analyze.job.operations import Failure
from meshscope.analyze.study import Study
from meshscope.core.operations import Kind
from meshscope.core.unavailable import Unavailable, known

MAX_MESSAGE_PAIRS = 4096
MAX_LAST_ARRIVERS = 4096
MAX_LISTED_GROUPS = 64
"""Partial groups, and groups in which a rank's numbers are shifted, listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTimes:
    """Means per step and rank, over all ranks and steps after warm-up."""

    wait_ns: float
    transfer_ns: float
    queued_ns: float
    unsplit_ns: float
    exposed_ns: float
    exposed_wait_ns: float
    exposed_transfer_ns: float
    exposed_unsplit_ns: float
    exposed_late_ns: float
    overlapped_ns: float
    exposed_ratio: float | Unavailable
    """Exposed time, of the steps' wall clock; operations after a step count to it, so it may be
    above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Operations of an axis, a kind or a rank: sums over ranks, and means per step and rank."""

    total: CommunicationSum
    per_rank_step: RankStepTimes | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisTimes(Timed):
    """All operations along one axis."""

    axis: str
    """`dp`, `dp+cp`, a name of a mesh's dim, `world` (all ranks) or `other`."""
    num_groups: int
    """Process groups with more than one rank that lie along it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisKindTimes(Timed):
    """Operations of one kind along one axis."""

    axis: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes(Timed):
    """All operations of one rank; each counts in full, size included."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationHealthFacts:
    """How much of the recording the numbers are based on."""

    found: CommunicationHealth
    num_partial_groups: int
    partial_groups: tuple[PartialGroup, ...]
    """At most the first 64."""
    num_shifts: int
    shifts: tuple[SequenceShift, ...]
    """At most the first 64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CommunicationFacts(Timed):
    """Communication of the attempt."""

    found: Communication
    first_step: int | Unavailable
    """Statistics are over the operations of this step and later ones."""
    num_rank_steps: int
    """Finished steps after warm-up, counted on every rank: what `per_rank_step` divides by."""
    num_steps_left_out: int
    """Steps after warm-up that were not read, because the run has too many operations; the section
    is about windows of steps spread over the run."""
    axes: tuple[AxisTimes, ...]
    """Longest exposed first."""
    kinds: tuple[AxisKindTimes, ...]
    """Longest exposed first."""
    ranks: tuple[RankTimes, ...]
    last_arrivers: tuple[LastArriver, ...]
    """Those beyond chance first, then the costliest; at most 4096."""
    num_last_arrivers: int
    messages: tuple[MessageFlow, ...]
    """Most bytes first; at most 4096 pairs of ranks."""
    num_message_pairs: int
    reference_rank: int
    """The rank whose clock the others are compared with."""
    reference_host_mono_ns: int
    """The moment of the clocks' offsets, on that clock."""
    clocks: tuple[Clock, ...]
    """Empty when all ranks share one clock."""
    clock_problems: tuple[str, ...]
    failures: tuple[Failure, ...]
    """At most the first 20; `health` has their number."""
    health: CommunicationHealthFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """What sums are divided by: finished steps after warm-up, counted on every rank."""

    num_rank_steps: int
    wall_ns: int
    reason: str
    """Why there is none."""


def describe_communication(found: Communication, study: Study) -> CommunicationFacts:
    of_rank = _count_steps(found, study)
    steps = _add_steps(of_rank.values())
    axes = [group.axis for group in found.groups if len(group.ranks) > 1]
    messages = sorted(found.messages, key=lambda flow: (-flow.size_bytes, flow.source, flow.target))
    arrivers = sorted(found.last_arrivers, key=lambda entry: not entry.is_beyond_chance)
    all_steps = Unavailable("all operations count")
    clocks, health = found.clocks, found.health
    return CommunicationFacts(
        found=found,
        first_step=found.first_step if found.first_step >= 0 else all_steps,
        num_rank_steps=steps.num_rank_steps,
        num_steps_left_out=0 if found.part is None else found.part.num_left_out,
        total=found.total,
        per_rank_step=_average(found.total, steps),
        axes=tuple(
            AxisTimes(
                axis=one.axis,
                num_groups=axes.count(one.axis),
                total=one.total,
                per_rank_step=_average(one.total, steps),
            )
            for one in found.by_axis
        ),
        kinds=tuple(
            AxisKindTimes(
                axis=one.axis,
                kind=one.kind,
                total=one.total,
                per_rank_step=_average(one.total, steps),
            )
            for one in found.by_axis_and_kind
        ),
        ranks=tuple(
            RankTimes(
                rank=one.rank,
                total=one.total,
                per_rank_step=_average(one.total, of_rank[one.rank]),
            )
            for one in found.by_rank
        ),
        last_arrivers=tuple(arrivers[:MAX_LAST_ARRIVERS]),
        num_last_arrivers=len(arrivers),
        messages=tuple(messages[:MAX_MESSAGE_PAIRS]),
        num_message_pairs=len(messages),
        reference_rank=clocks.reference_rank,
        reference_host_mono_ns=clocks.reference_host_mono_ns,
        clocks=clocks.clocks if len(clocks.clocks) > 1 else (),
        clock_problems=clocks.problems,
        failures=health.failures,
        health=CommunicationHealthFacts(
            found=health,
            num_partial_groups=len(health.partial_groups),
            partial_groups=health.partial_groups[:MAX_LISTED_GROUPS],
            num_shifts=len(found.shifts),
            shifts=found.shifts[:MAX_LISTED_GROUPS],
        ),
    )


def _count_steps(found: Communication, study: Study) -> dict[int, _Steps]:
    step_time, part = study.steps.time, found.part
    reason = step_time.reason if isinstance(step_time, Unavailable) else "no step finished"
    periods = _sum_device_periods(study)
    return {
        rank.rank: _Steps(
            num_rank_steps=rank.num_steady_steps
            if part is None
            else part.num_steps.get(rank.rank, 0),
            wall_ns=periods.get(
                rank.rank,
                rank.time.steady_steps.wall_ns if part is None else part.wall_ns.get(rank.rank, 0),
            ),
            reason=reason,
        )
        for rank in study.ranks
    }


def _sum_device_periods(study: Study) -> dict[int, int]:
    """By rank of a trace: its steps on the device, which runs behind the host that launched them,
    as its communication does."""
    timeline = known(study.timeline) if study.attempt.is_from_traces else None
    if timeline is None or not timeline.on_device.all():
        return {}
    periods = (timeline.period_end_ns - timeline.period_start_ns).sum(axis=1)
    return dict(zip(timeline.ranks, periods.tolist(), strict=True))


def _add_steps(steps: Iterable[_Steps]) -> _Steps:
    listed = list(steps)
    return _Steps(
        num_rank_steps=sum(one.num_rank_steps for one in listed),
        wall_ns=sum(one.wall_ns for one in listed),
        reason=listed[0].reason if listed else "no step finished",
    )


def _average(total: CommunicationSum, steps: _Steps) -> RankStepTimes | Unavailable:
    if not steps.num_rank_steps:
        return Unavailable(steps.reason)
    means = {
        one.name: getattr(total, one.name) / steps.num_rank_steps
        for one in fields(RankStepTimes)
        if one.name != "exposed_ratio"
    }
    no_time = Unavailable("the steps took no time")
    ratio = total.exposed_ns / steps.wall_ns if steps.wall_ns > 0 else no_time
    return RankStepTimes(**means, exposed_ratio=ratio)
