"""From a snapshot of records to statistics, ratios and bottlenecks. Pure functions.

A step's period runs from the end of the step before it to its own end: it owns the gap in which its
data is fetched. Throughput is tokens over periods, never over forward time alone. Communication is
what held the rank up, each moment once and with waiting for late ranks in it: one rank cannot tell
the two apart (`meshscope report` can). Pipeline utilisation is time inside F, B and W actions over
the step without its update.

Wrong on an accelerator where phases are not marked: host times are then times to issue work, and
`clock` says `host`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from meshscope.capture.monitor.monitor_bottlenecks import find_bottlenecks
from meshscope.capture.monitor.monitor_records import PhaseTime, Snapshot, Step
from meshscope.capture.monitor.monitor_results import (
    WINDOWS,
    MonitorAnalysis,
    MonitorStats,
    MonitorThresholds,
    WindowRate,
)
from meshscope.core.hardware import find_peak
from meshscope.core.unavailable import Missing, Unavailable, known, need, or_unavailable
from meshscope.store.schema import BUILTIN_NAMES

DATA, FORWARD, BACKWARD, OPTIMIZER, CLIP = (
    BUILTIN_NAMES[name] for name in ("data", "forward", "backward", "optimizer", "clip")
)
_UNWATCHED = Unavailable("communication is not watched")
_NO_STEPS = Unavailable("no step has finished since the monitor was reset")


@dataclass(frozen=True, slots=True)
class _Period:
    """A step with the gap before it."""

    step: Step
    start_ns: int

    @property
    def wall_ns(self) -> int:
        return self.step.end_ns - self.start_ns


def _find_periods(steps: Sequence[Step]) -> list[_Period]:
    """Periods of all steps; the first one has no gap."""
    begins = [steps[0].start_ns, *(one.end_ns for one in steps)] if steps else []
    return [
        _Period(one, min(begin, one.start_ns)) for one, begin in zip(steps, begins, strict=False)
    ]


# --- statistics ----------------------------------------------------------------------------------


def make_stats(snapshot: Snapshot) -> MonitorStats:
    """Counts and sums over everything that was read."""
    periods = _find_periods(snapshot.steps)
    on_device = _has_device_times(snapshot.phases)
    sums = {name: _sum_phase(snapshot.phases, name, on_device) for name in (FORWARD, BACKWARD)}
    memory = snapshot.memory[-1] if snapshot.memory else None
    known = [step.num_tokens for step in snapshot.steps if step.num_tokens >= 0]
    return MonitorStats(
        num_steps=len(periods),
        num_forwards=_count_phase(snapshot.phases, FORWARD),
        num_backwards=_count_phase(snapshot.phases, BACKWARD),
        forward_ns=sums[FORWARD],
        backward_ns=sums[BACKWARD],
        optimizer_ns=_sum_phase(snapshot.phases, OPTIMIZER, on_device),
        data_ns=_sum_phase(snapshot.phases, DATA, on_device=False),
        clock="device" if on_device else "host",
        exposed_communication_ns=_sum_hold_ups(snapshot),
        wall_ns=snapshot.steps[-1].end_ns - snapshot.steps[0].start_ns if periods else 0,
        num_tokens=sum(known) if known else Unavailable("no tokens were counted or logged"),
        windows={
            size: rate for size in WINDOWS if (rate := _measure_rate(snapshot, periods, size))
        },
        rss_bytes=_bytes(memory.rss_bytes if memory else -1, "no reading of memory yet"),
        allocated_bytes=_bytes(memory.allocated_bytes if memory else -1, "no accelerator in use"),
        peak_allocated_bytes=_bytes(
            max((one.peak_allocated_bytes for one in snapshot.memory), default=-1),
            "no accelerator in use",
        ),
    )


def _bytes(value: int, reason: str) -> int | Unavailable:
    return value if value >= 0 else Unavailable(reason)


def _has_device_times(phases: Sequence[PhaseTime]) -> bool:
    """Whether the accelerator's stream was marked."""
    return any(phase.on_device for phase in phases)


def _count_phase(phases: Iterable[PhaseTime], name_id: int) -> int:
    return sum(1 for phase in phases if phase.name_id == name_id and not phase.on_device)


def _sum_phase(phases: Iterable[PhaseTime], name_id: int, on_device: bool) -> int:  # noqa: FBT001
    return sum(p.self_ns for p in phases if p.name_id == name_id and p.on_device == on_device)


def _sum_hold_ups(snapshot: Snapshot) -> int | Unavailable:
    if not snapshot.around.has_communication:
        return _UNWATCHED
    num_watched = sum(step.is_watched for step in snapshot.steps)
    if num_watched < len(snapshot.steps):
        return Unavailable(
            f"communication was recorded in {num_watched} of {len(snapshot.steps)} steps"
        )
    return sum(one.end_ns - one.start_ns for one in snapshot.hold_ups)


def _measure_rate(
    snapshot: Snapshot, periods: Sequence[_Period], num_steps: int
) -> WindowRate | None:
    """Rates over the newest steps; None without any."""
    chosen = periods[-num_steps:]
    if not chosen:
        return None
    wall_ns = chosen[-1].step.end_ns - chosen[0].start_ns
    per_s = _measure_token_rate(snapshot, chosen, wall_ns)
    devices = max(snapshot.around.world_size, 1)
    return WindowRate(
        num_steps=len(chosen),
        step_ns=wall_ns / len(chosen),
        tokens_per_s=per_s,
        device_tokens_per_s=per_s if isinstance(per_s, Unavailable) else per_s / devices,
    )


@or_unavailable
def _measure_token_rate(snapshot: Snapshot, periods: Sequence[_Period], wall_ns: int) -> float:
    """Rate of all ranks, assuming that every data-parallel rank has as many tokens as this one."""
    if any(period.step.num_tokens < 0 for period in periods):
        raise Missing("no tokens were counted or logged on this rank")
    num_tokens: float = sum(period.step.num_tokens for period in periods)
    layout = snapshot.around.layout
    if snapshot.around.world_size > 1:
        if layout is None:
            raise Missing("which ranks share tokens is not known: call set_layout")
        num_tokens = num_tokens * layout.world_size / (layout.tp * layout.pp)
    return num_tokens * 1e9 / max(wall_ns, 1)


# --- analysis ------------------------------------------------------------------------------------


def make_analysis(snapshot: Snapshot, thresholds: MonitorThresholds) -> MonitorAnalysis:
    """Ratios over the widest window, and what is wrong."""
    periods = _choose(snapshot)
    rate = _measure_rate(snapshot, periods, len(periods) or 1)
    data = [_interval(phase) for phase in snapshot.phases if _is(phase, DATA)]
    by_axis = _measure_axes(snapshot, periods)
    analysis = MonitorAnalysis(
        num_steps=len(periods),
        step_ns=rate.step_ns if rate else _NO_STEPS,
        tokens_per_s=rate.tokens_per_s if rate else _NO_STEPS,
        device_tokens_per_s=rate.device_tokens_per_s if rate else _NO_STEPS,
        forward_ns=_mean_phase(snapshot, periods, FORWARD),
        backward_ns=_mean_phase(snapshot, periods, BACKWARD),
        clock="device" if _has_device_times(snapshot.phases) else "host",
        communication_ratio=_measure_communication(snapshot, periods),
        communication_ratio_by_axis=by_axis,
        input_ratio=_measure_share(periods, data) if periods else _NO_STEPS,
        memory_efficiency_ratio=_measure_memory_efficiency(snapshot),
        memory_used_ratio=_measure_memory_used(snapshot),
        pipeline_utilization_ratio=_measure_pipeline(snapshot, periods),
        pipeline_plain_ratio=_measure_plain_pipeline(snapshot, periods),
        tp_efficiency_ratio=_measure_efficiency(snapshot, periods, by_axis, "tp"),
        dp_efficiency_ratio=_measure_efficiency(snapshot, periods, by_axis, "dp"),
        mfu_ratio=_measure_mfu(snapshot, rate),
        bottlenecks=(),
        has_verdict=len(periods) >= thresholds.min_steps,
    )
    if not analysis.has_verdict:
        return analysis
    step_ns = median(period.wall_ns for period in periods)
    return replace(analysis, bottlenecks=find_bottlenecks(analysis, step_ns, thresholds))


def _choose(snapshot: Snapshot) -> list[_Period]:
    """The newest steps, as far as everything about them was read."""
    periods = _find_periods(snapshot.steps)[-max(WINDOWS) :]
    return [period for period in periods if period.start_ns >= snapshot.complete_since_ns]


def _keep_watched(periods: Sequence[_Period]) -> list[_Period]:
    return [period for period in periods if period.step.is_watched]


@or_unavailable
def _measure_communication(snapshot: Snapshot, periods: Sequence[_Period]) -> float:
    if not snapshot.around.has_communication:
        raise Missing(_UNWATCHED)
    periods = _keep_watched(periods)
    if not periods:
        raise Missing(_NO_STEPS)
    return _measure_share(periods, [one[:2] for one in snapshot.hold_ups])


def _measure_axes(snapshot: Snapshot, periods: Sequence[_Period]) -> dict[str, float]:
    """The same, by the axis of the group."""
    periods = _keep_watched(periods)
    held: dict[str, list[tuple[int, int]]] = {}
    for one in snapshot.hold_ups if periods and snapshot.around.has_communication else ():
        axis = snapshot.around.axes.get(one.group_id, "") or "other"
        held.setdefault(axis, []).append(one[:2])
    return {axis: _measure_share(periods, held[axis]) for axis in sorted(held)}


def _interval(phase: PhaseTime) -> tuple[int, int]:
    return phase.start_ns, phase.start_ns + phase.self_ns


def _is(phase: PhaseTime, name_id: int) -> bool:
    return phase.name_id == name_id and not phase.on_device


def merge(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same moments in intervals that do not overlap."""
    merged: list[tuple[int, int]] = []
    for start_ns, end_ns in sorted(intervals):
        if merged and start_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_ns, merged[-1][1]))
        else:
            merged.append((start_ns, end_ns))
    return merged


def _assign(periods: Sequence[_Period], intervals: Iterable[tuple[int, int]]) -> list[int]:
    """How much of the intervals lies in each period."""
    ends = [period.step.end_ns for period in periods]
    total = [0] * len(periods)
    for start_ns, end_ns in intervals:
        index = bisect_right(ends, start_ns)
        while index < len(periods) and periods[index].start_ns < end_ns:
            inside = min(end_ns, ends[index]) - max(start_ns, periods[index].start_ns)
            total[index] += max(inside, 0)
            index += 1
    return total


def _measure_share(periods: Sequence[_Period], intervals: Iterable[tuple[int, int]]) -> float:
    """Share of the median step."""
    inside = _assign(periods, intervals)
    return median(
        part / period.wall_ns if period.wall_ns else 0.0
        for part, period in zip(inside, periods, strict=True)
    )


@or_unavailable
def _mean_phase(snapshot: Snapshot, periods: Sequence[_Period], name_id: int) -> float:
    """Mean per step that has the phase: only some steps are marked on a device."""
    on_device = _has_device_times(snapshot.phases)
    ends = [period.step.end_ns for period in periods]
    sums: dict[int, int] = {}
    for phase in snapshot.phases:
        if phase.name_id == name_id and phase.on_device == on_device:
            index = bisect_right(ends, phase.start_ns)
            if index < len(periods) and phase.start_ns >= periods[index].start_ns:
                sums[index] = sums.get(index, 0) + phase.self_ns
    if not sums:
        raise Missing("no such phase was seen")
    return sum(sums.values()) / len(sums)


@or_unavailable
def _measure_efficiency(
    snapshot: Snapshot, periods: Sequence[_Period], by_axis: Mapping[str, float], axis: str
) -> float:
    """1 − what communication over the axis exposed, of the step."""
    layout = snapshot.around.layout
    if snapshot.around.world_size <= 1 or (layout is not None and layout.degree(axis) == 1):
        raise Missing(f"{axis} is 1: nothing is divided along it")
    need(_measure_communication(snapshot, periods))
    own = [share for name, share in by_axis.items() if axis in name.split("+")]
    if layout is None and not own:
        raise Missing("the layout is not known: call set_layout")
    return 1 - sum(own)


@or_unavailable
def _measure_pipeline(snapshot: Snapshot, periods: Sequence[_Period]) -> float:
    """Time inside actions, of the step without its update."""
    layout = snapshot.around.layout
    if layout is None or layout.pp <= 1:
        raise Missing("pp is 1: there is no pipeline")
    if not snapshot.actions or not periods:
        raise Missing("no pipeline action was recorded (see Recorder.action)")
    steps = [_Period(period.step, period.step.start_ns) for period in periods]
    busy = _assign(steps, merge(one[:2] for one in snapshot.actions))
    updates = [one for one in snapshot.phases if _is(one, OPTIMIZER) or _is(one, CLIP)]
    update = _assign(steps, map(_interval, updates))
    ratios = [
        inside / max(step.wall_ns - after, 1)
        for step, inside, after in zip(steps, busy, update, strict=True)
        if inside
    ]
    if not ratios:
        raise Missing("no pipeline action in the newest steps")
    return median(ratios)


@or_unavailable
def _measure_plain_pipeline(snapshot: Snapshot, periods: Sequence[_Period]) -> float:
    """What GPipe and 1F1B reach with as many stages, chunks and microbatches."""
    layout = snapshot.around.layout
    if layout is None or layout.pp <= 1 or not periods or not snapshot.actions:
        raise Missing("there is no pipeline to compare with")
    last = periods[-1].step
    inside = [one for one in snapshot.actions if last.start_ns <= one.start_ns <= last.end_ns]
    if not inside:
        raise Missing("no pipeline action in the newest step")
    work = len({one.microbatch for one in inside}) * len({one.chunk for one in inside})
    return work / (work + layout.pp - 1)


@or_unavailable
def _measure_memory_efficiency(snapshot: Snapshot) -> float:
    peaks = [one for one in snapshot.memory if one.peak_reserved_bytes > 0]
    if not peaks:
        raise Missing("no accelerator in use: memory is the operating system's")
    return peaks[-1].peak_allocated_bytes / peaks[-1].peak_reserved_bytes


@or_unavailable
def _measure_memory_used(snapshot: Snapshot) -> float:
    """Tensors at their peak and everything else on the device; without a device, the process."""
    on_device = [one for one in snapshot.memory if one.device_total_bytes > 0]
    if on_device:
        last = on_device[-1]
        others = last.device_total_bytes - last.device_free_bytes - last.reserved_bytes
        return (last.peak_allocated_bytes + max(others, 0)) / last.device_total_bytes
    if not snapshot.memory or snapshot.around.host_limit_bytes <= 0:
        raise Missing("no reading of memory yet, or no limit known")
    return snapshot.memory[-1].rss_bytes / snapshot.around.host_limit_bytes


@or_unavailable
def _measure_mfu(snapshot: Snapshot, rate: WindowRate | None) -> float:
    if rate is None:
        raise Missing(_NO_STEPS)
    declared, peak = (snapshot.around.facts.get(line, {}) for line in ("flops", "peak"))
    flops = declared.get("model_flops")
    if not isinstance(flops, float):
        raise Missing("FLOPs are not known: call count_flops or set_flops")
    if declared.get("per") == "microbatch":
        flops *= snapshot.steps[-1].num_microbatches
    return flops / (rate.step_ns / 1e9 * _find_peak(declared, peak))


def _find_peak(flops: Mapping[str, object], peak: Mapping[str, object]) -> float:
    """The measured or declared peak for this dtype, else the device's in the table."""
    dtype, device, rate = flops.get("dtype"), flops.get("device"), peak.get("flops_per_s")
    if isinstance(rate, float) and peak.get("dtype") == dtype:
        return rate
    found = None
    if isinstance(dtype, str) and isinstance(device, str):
        found = known(find_peak(device, dtype))
    if found is None:
        raise Missing("the peak is not known: call measure_peak or set_peak")
    return found
