"""Builds the communication part of the JSON document from the analysis.

Imported only for runs that communicate, as the analysis is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshscope.analyze.communication.bandwidth import (
    BandwidthRow,
    FitRefused,
    LatencyFit,
    MessageFlow,
)
from meshscope.analyze.communication.communication import Communication, SlowOperation, StepPart
from meshscope.analyze.communication.communication_sums import CommunicationSum
from meshscope.analyze.communication.last_arrivers import LastArriver
from meshscope.analyze.job.clocks import Clock
from meshscope.analyze.job.group_axes import JobGroup
from meshscope.analyze.job.matching import Desynchronisation, OperationSide
from meshscope.analyze.job.operations import NO_PHASE, Failure
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable
from meshscope.report.communication_facts import (
    AxisKindTimes,
    AxisTimes,
    BandwidthFacts,
    ClockFacts,
    CommunicationFacts,
    CommunicationHealthFacts,
    DesynchronisationFacts,
    FailureFacts,
    FitFacts,
    GroupFacts,
    LastArriverFacts,
    MessageFacts,
    PartialGroupFacts,
    RankStepTimes,
    RankTimes,
    ShiftFacts,
    SideFacts,
    SlowOperationFacts,
    TimeSums,
)
from meshscope.report.values import Absent, as_number, as_ranges, as_string, as_text, as_value

MAX_MESSAGE_PAIRS = 4096
MAX_LAST_ARRIVERS = 4096
MAX_LISTED_GROUPS = 64
"""Groups that are partial, or of which a rank's numbers are shifted, listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """What sums are divided by: finished steps after warm-up, counted on every rank."""

    num_rank_steps: int
    wall_ns: int
    reason: str
    """Why there is none."""


def build_communication(found: Communication, summary: Study) -> CommunicationFacts:
    """Everything the analysis says, as values that JSON can hold."""
    step_time = summary.steps.time
    reason = step_time.reason if isinstance(step_time, Unavailable) else "no step finished"
    of_rank = {rank.rank: _steps_of(rank, found.part, reason) for rank in summary.ranks}
    steps = _Steps(
        num_rank_steps=sum(one.num_rank_steps for one in of_rank.values()),
        wall_ns=sum(one.wall_ns for one in of_rank.values()),
        reason=reason,
    )
    sizes = [group.axis for group in found.groups if len(group.ranks) > 1]
    messages = sorted(found.messages, key=lambda flow: (-flow.size_bytes, flow.source, flow.target))
    arrivers = sorted(found.last_arrivers, key=lambda entry: not entry.is_beyond_chance)
    first_step = found.first_step
    return CommunicationFacts(
        first_step=first_step if first_step >= 0 else Absent("all operations count"),
        num_rank_steps=steps.num_rank_steps,
        num_steps_left_out=0 if found.part is None else found.part.num_left_out,
        total=_sums(found.total),
        per_rank_step=_means(found.total, steps),
        axes=[
            AxisTimes(
                axis=as_text(one.axis),
                num_groups=sizes.count(one.axis),
                total=_sums(one.total),
                per_rank_step=_means(one.total, steps),
            )
            for one in found.by_axis
        ],
        kinds=[
            AxisKindTimes(
                axis=as_text(one.axis),
                kind=one.kind.label,
                total=_sums(one.total),
                per_rank_step=_means(one.total, steps),
            )
            for one in found.by_axis_and_kind
        ],
        ranks=[
            RankTimes(
                rank=one.rank,
                total=_sums(one.total),
                per_rank_step=_means(one.total, of_rank[one.rank]),
            )
            for one in found.by_rank
        ],
        last_arrivers=[_last_arriver(entry) for entry in arrivers[:MAX_LAST_ARRIVERS]],
        num_last_arrivers=len(arrivers),
        num_undecided=found.num_undecided,
        bandwidth=[_bandwidth(row) for row in found.bandwidth],
        fits=[_fit(fit) for fit in found.fits],
        messages=[_message(flow) for flow in messages[:MAX_MESSAGE_PAIRS]],
        num_message_pairs=len(messages),
        slowest=[_slow_operation(one) for one in found.slowest],
        reference_rank=found.clocks.reference_rank,
        reference_host_mono_ns=found.clocks.reference_host_mono_ns,
        clocks=_clocks(found.clocks.clocks),
        clock_problems=[as_text(problem) for problem in found.clocks.problems],
        desynchronisations=[_desynchronisation(one) for one in found.desynchronisations],
        num_desynchronised=found.num_desynchronised,
        failures=[_failure(failure) for failure in found.health.failures],
        health=_health(found),
    )


def _steps_of(rank: RankSummary, part: StepPart | None, reason: str) -> _Steps:
    if part is not None:
        return _Steps(
            num_rank_steps=part.num_steps.get(rank.rank, 0),
            wall_ns=part.wall_ns.get(rank.rank, 0),
            reason=reason,
        )
    return _Steps(
        num_rank_steps=rank.num_steady_steps,
        wall_ns=rank.time.steady_steps.wall_ns,
        reason=reason,
    )


# --- values ---------------------------------------------------------------------------------------


def _sums(total: CommunicationSum) -> TimeSums:
    return TimeSums(**{name: getattr(total, name) for name in TimeSums.__struct_fields__})


def _means(total: CommunicationSum, steps: _Steps) -> RankStepTimes:
    names = [name for name in RankStepTimes.__struct_fields__ if name != "exposed_ratio"]
    if not steps.num_rank_steps:
        none = Absent(as_text(steps.reason))
        return RankStepTimes(**dict.fromkeys(names, none), exposed_ratio=none)
    ratio = (
        total.exposed_ns / steps.wall_ns if steps.wall_ns > 0 else Absent("the steps took no time")
    )
    means = {name: getattr(total, name) / steps.num_rank_steps for name in names}
    return RankStepTimes(**means, exposed_ratio=ratio)


def _uncertainty(value_ns: float) -> float | Absent:
    is_known = math.isfinite(value_ns)
    return value_ns if is_known else Absent("nothing ties the clocks of these ranks together")


def _size(size_bytes: int) -> int | Absent:
    return size_bytes if size_bytes >= 0 else Absent("the recorded size is damaged")


def _step(step: int) -> int | Absent:
    return step if step >= 0 else Absent("outside of any step")


def _phase(phase: str) -> str | Absent:
    return Absent("outside of any phase") if phase == NO_PHASE else as_text(phase)


def _dtype(label: str) -> str | Absent:
    return label or Absent("the number format is not known")


def _group(group: JobGroup) -> GroupFacts:
    return GroupFacts(
        axis=as_text(group.axis),
        axis_source=str(group.axis_source),
        ranks=as_ranges(group.ranks),
        name=as_text(group.name),
        description=as_text(group.description),
        backend=as_text(group.backend),
    )


# --- tables ---------------------------------------------------------------------------------------


def _last_arriver(entry: LastArriver) -> LastArriverFacts:
    return LastArriverFacts(
        axis=as_text(entry.axis),
        rank=entry.rank,
        num_last=entry.num_last,
        num_operations=entry.num_operations,
        expected_last=entry.expected_last,
        num_steps_worst=entry.num_steps_worst,
        num_steps=entry.num_steps,
        p_value=as_number(entry.p_value),
        is_beyond_chance=entry.is_beyond_chance,
        cost_ns=entry.cost_ns,
        caused_wait_ns=entry.caused_wait_ns,
        phase=as_string(entry.phase),
    )


def _bandwidth(row: BandwidthRow) -> BandwidthFacts:
    return BandwidthFacts(
        axis=as_text(row.axis),
        kind=row.kind.label,
        num_ranks=row.num_ranks,
        is_across_hosts=row.is_across_hosts,
        size_bucket_bytes=row.size_bucket_bytes,
        num_operations=row.num_operations,
        num_samples=row.num_samples,
        median_size_bytes=row.median_size_bytes,
        median_transfer_ns=row.median_transfer_ns,
        algorithm_bytes_per_s=as_number(row.algorithm_bytes_per_s),
        bus_bytes_per_s=as_number(row.bus_bytes_per_s),
        uncertainty_ns=_uncertainty(row.uncertainty_ns),
    )


def _fit(fit: LatencyFit | FitRefused) -> FitFacts:
    if isinstance(fit, FitRefused):
        none = Absent(as_text(fit.reason.reason))
        return FitFacts(
            axis=as_text(fit.axis),
            kind=fit.kind.label,
            num_ranks=fit.num_ranks,
            is_across_hosts=fit.is_across_hosts,
            num_sizes=none,
            min_size_bytes=none,
            max_size_bytes=none,
            num_samples=none,
            latency_ns=none,
            latency_low_ns=none,
            latency_high_ns=none,
            ns_per_byte=none,
            ns_per_byte_low=none,
            ns_per_byte_high=none,
            bus_bytes_per_s=none,
        )
    return FitFacts(
        axis=as_text(fit.axis),
        kind=fit.kind.label,
        num_ranks=fit.num_ranks,
        is_across_hosts=fit.is_across_hosts,
        num_sizes=fit.num_sizes,
        min_size_bytes=fit.min_size_bytes,
        max_size_bytes=fit.max_size_bytes,
        num_samples=fit.num_samples,
        latency_ns=as_number(fit.latency_ns),
        latency_low_ns=as_number(fit.latency_interval_ns[0]),
        latency_high_ns=as_number(fit.latency_interval_ns[1]),
        ns_per_byte=as_number(fit.ns_per_byte),
        ns_per_byte_low=as_number(fit.ns_per_byte_interval[0]),
        ns_per_byte_high=as_number(fit.ns_per_byte_interval[1]),
        bus_bytes_per_s=as_number(fit.bus_bytes_per_s),
    )


def _message(flow: MessageFlow) -> MessageFacts:
    return MessageFacts(
        source=flow.source,
        target=flow.target,
        num_messages=flow.num_messages,
        size_bytes=flow.size_bytes,
        is_across_hosts=as_value(flow.is_across_hosts),
        mean_latency_ns=as_number(flow.mean_latency_ns),
        mean_wait_ns=as_number(flow.mean_wait_ns),
        uncertainty_ns=_uncertainty(flow.uncertainty_ns),
    )


def _slow_operation(one: SlowOperation) -> SlowOperationFacts:
    return SlowOperationFacts(
        kind=one.kind.label,
        group=_group(one.group),
        sequence=one.sequence,
        size_bytes=_size(one.size_bytes),
        dtype=_dtype(one.dtype),
        step=_step(one.step),
        phase=_phase(one.phase),
        total_ns=one.total_ns,
        wait_ns=one.wait_ns,
        max_transfer_ns=one.max_transfer_ns,
        last_rank=as_value(one.last_rank),
        gap_ns=as_value(one.gap_ns),
    )


def _clocks(clocks: Sequence[Clock]) -> list[ClockFacts]:
    if len(clocks) < 2:
        return []
    return [
        ClockFacts(
            host=as_text(clock.host) if clock.host else Absent("the rank's journal does not say"),
            ranks=as_ranges(clock.ranks),
            method=str(clock.method),
            offset_ns=as_value(clock.offset_ns),
            drift_ppm=as_number(clock.drift_ppm),
            uncertainty_ns=as_value(clock.uncertainty_ns),
            unevenness_ns=clock.unevenness_ns,
            num_operations=clock.num_operations,
        )
        for clock in clocks
    ]


def _desynchronisation(found: Desynchronisation) -> DesynchronisationFacts:
    return DesynchronisationFacts(
        group=_group(found.group),
        sequence=found.sequence,
        sides=[_side(side) for side in found.sides],
        num_untrusted=found.num_untrusted,
    )


def _side(side: OperationSide) -> SideFacts:
    return SideFacts(
        ranks=as_ranges(side.ranks),
        kind=side.kind.label,
        size_bytes=_size(side.size_bytes),
        dtype=_dtype(side.dtype),
        root=side.root if side.root >= 0 else None,
        step=_step(side.step),
        phase=_phase(side.phase),
    )


def _failure(failure: Failure) -> FailureFacts:
    return FailureFacts(
        rank=failure.rank,
        kind=failure.kind.label,
        outcome=failure.outcome.label,
        group=None if failure.group is None else _group(failure.group),
        sequence=failure.sequence,
        step=_step(failure.step),
        phase=_phase(failure.phase),
        message=as_text(failure.message) if failure.message else Absent("no message was recorded"),
    )


def _health(found: Communication) -> CommunicationHealthFacts:
    health = found.health
    return CommunicationHealthFacts(
        num_rank_operations=health.num_rank_operations,
        num_recognised=health.num_recognised,
        num_matched=health.num_matched,
        num_unmatched=health.num_unmatched,
        num_stopped=health.num_stopped,
        num_lost=health.num_lost,
        num_untrusted=health.num_untrusted,
        num_ambiguous=health.num_ambiguous,
        num_single_rank=health.num_single_rank,
        num_unknown_group=health.num_unknown_group,
        num_left_out=health.num_warmup,
        num_unfinished=health.num_unfinished,
        num_unseen=health.num_unseen,
        num_failed=health.num_failed,
        num_inexact_ends=health.num_inexact_ends,
        num_engine_outside_steps=health.num_engine_outside_steps,
        num_clock_errors=health.num_clock_errors,
        num_damaged=health.num_damaged,
        num_bad_ends=health.num_bad_ends,
        num_unknown_waits=health.num_unknown_waits,
        unknown_wait_ns=health.unknown_wait_ns,
        num_partial_groups=len(health.partial_groups),
        partial_groups=[
            PartialGroupFacts(
                group=_group(partial.group), missing_ranks=as_ranges(partial.missing_ranks)
            )
            for partial in health.partial_groups[:MAX_LISTED_GROUPS]
        ],
        num_shifts=len(found.shifts),
        shifts=[
            ShiftFacts(group=_group(shift.group), rank=shift.rank, shift=shift.shift)
            for shift in found.shifts[:MAX_LISTED_GROUPS]
        ],
    )
