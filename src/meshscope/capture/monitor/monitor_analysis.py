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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from meshscope.capture.monitor.monitor_bottlenecks import Shares, find_bottlenecks
from meshscope.capture.monitor.monitor_records import HoldUp, PhaseTime, Snapshot, Step
from meshscope.capture.monitor.monitor_results import (
    WINDOWS,
    MonitorAnalysis,
    MonitorStats,
    MonitorThresholds,
    WindowRate,
)
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.store.schema import BUILTIN_NAMES

DATA, FORWARD, BACKWARD, OPTIMIZER, CLIP = (
    BUILTIN_NAMES[name] for name in ("data", "forward", "backward", "optimizer", "clip")
)
NO_STEPS = Unavailable("no step has finished since the monitor was reset")


@dataclass(frozen=True, slots=True)
class Period:
    """A step with the gap before it."""

    step: Step
    begin_ns: int

    @property
    def wall_ns(self) -> int:
        """How long it took."""
        return self.step.end_ns - self.begin_ns


def find_periods(steps: Sequence[Step]) -> list[Period]:
    """Of all steps; the first one has no gap."""
    begins = [steps[0].begin_ns, *(one.end_ns for one in steps)] if steps else []
    return [
        Period(one, min(begin, one.begin_ns)) for one, begin in zip(steps, begins, strict=False)
    ]


# --- statistics ----------------------------------------------------------------------------------


def make_stats(snapshot: Snapshot) -> MonitorStats:
    """Counts and sums over everything that was read."""
    periods = find_periods(snapshot.steps)
    on_device = has_device_times(snapshot.phases)
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
        wall_ns=snapshot.steps[-1].end_ns - snapshot.steps[0].begin_ns if periods else 0,
        num_tokens=sum(known) if known else Unavailable("no tokens were counted or logged"),
        windows={size: rate for size in WINDOWS if (rate := measure_rate(snapshot, periods, size))},
        rss_bytes=_bytes(memory.rss_bytes if memory else -1, "no reading of memory yet"),
        allocated_bytes=_bytes(memory.allocated_bytes if memory else -1, "no accelerator in use"),
        peak_allocated_bytes=_bytes(
            max((one.peak_allocated_bytes for one in snapshot.memory), default=-1),
            "no accelerator in use",
        ),
    )


def _bytes(value: int, reason: str) -> int | Unavailable:
    return value if value >= 0 else Unavailable(reason)


def has_device_times(phases: Sequence[PhaseTime]) -> bool:
    """Whether the accelerator's stream was marked."""
    return any(phase.on_device for phase in phases)


def _count_phase(phases: Iterable[PhaseTime], name_id: int) -> int:
    return sum(1 for phase in phases if phase.name_id == name_id and not phase.on_device)


def _sum_phase(phases: Iterable[PhaseTime], name_id: int, on_device: bool) -> int:  # noqa: FBT001
    return sum(p.self_ns for p in phases if p.name_id == name_id and p.on_device == on_device)


def _sum_hold_ups(snapshot: Snapshot) -> int | Unavailable:
    if not snapshot.has_communication:
        return Unavailable("communication is not watched")
    return sum(one.end_ns - one.begin_ns for one in snapshot.hold_ups)


def measure_rate(
    snapshot: Snapshot, periods: Sequence[Period], num_steps: int
) -> WindowRate | None:
    """Over the newest steps; None without any."""
    chosen = periods[-num_steps:]
    if not chosen:
        return None
    wall_ns = chosen[-1].step.end_ns - chosen[0].begin_ns
    tokens = _job_tokens(snapshot, chosen)
    rate = tokens if isinstance(tokens, Unavailable) else tokens * 1e9 / max(wall_ns, 1)
    devices = max(snapshot.world_size, 1)
    return WindowRate(
        num_steps=len(chosen),
        step_ns=wall_ns / len(chosen),
        tokens_per_s=rate,
        device_tokens_per_s=rate if isinstance(rate, Unavailable) else rate / devices,
    )


def _job_tokens(snapshot: Snapshot, periods: Sequence[Period]) -> float | Unavailable:
    """Of all ranks, taking it that every data-parallel rank has as many tokens as this one."""
    if any(period.step.num_tokens < 0 for period in periods):
        return Unavailable("no tokens were counted or logged on this rank")
    own = sum(period.step.num_tokens for period in periods)
    if snapshot.world_size <= 1:
        return own
    layout = snapshot.layout
    if layout is None:
        return Unavailable("which ranks share tokens is not known: call set_layout")
    return own * layout.world_size / (layout.tp * layout.pp)


# --- analysis ------------------------------------------------------------------------------------


def make_analysis(snapshot: Snapshot, thresholds: MonitorThresholds) -> MonitorAnalysis:
    """Ratios over the widest window, and what is wrong."""
    periods = _choose(snapshot)
    rate = measure_rate(snapshot, periods, len(periods) or 1)
    on_device = has_device_times(snapshot.phases)
    shares = _measure_shares(snapshot, periods)
    mean = _mean_phases(snapshot.phases, periods, on_device)
    has_verdict = len(periods) >= thresholds.min_steps
    return MonitorAnalysis(
        num_steps=len(periods),
        step_ns=rate.step_ns if rate else NO_STEPS,
        tokens_per_s=rate.tokens_per_s if rate else NO_STEPS,
        device_tokens_per_s=rate.device_tokens_per_s if rate else NO_STEPS,
        forward_ns=mean(FORWARD),
        backward_ns=mean(BACKWARD),
        clock="device" if on_device else "host",
        communication_ratio=shares.communication,
        communication_ratio_by_axis=shares.by_axis,
        input_ratio=shares.input,
        memory_efficiency_ratio=_measure_memory_efficiency(snapshot),
        memory_used_ratio=shares.memory_used,
        pipeline_utilization_ratio=shares.pipeline,
        pipeline_plain_ratio=shares.plain_pipeline,
        tp_efficiency_ratio=_measure_efficiency(snapshot, shares, "tp"),
        dp_efficiency_ratio=_measure_efficiency(snapshot, shares, "dp"),
        mfu_ratio=_measure_mfu(snapshot, rate),
        bottlenecks=find_bottlenecks(shares, thresholds) if has_verdict else (),
        has_verdict=has_verdict,
    )


def _choose(snapshot: Snapshot) -> list[Period]:
    """The newest steps, as far as everything about them was read."""
    since_ns = max(snapshot.operations_since_ns, snapshot.phases_since_ns)
    periods = find_periods(snapshot.steps)[-max(WINDOWS) :]
    return [period for period in periods if period.begin_ns >= since_ns]


def _measure_shares(snapshot: Snapshot, periods: Sequence[Period]) -> Shares:
    """Of the median step."""
    walls = [period.wall_ns for period in periods]
    by_axis: dict[str, float] = {}
    communication: float | Unavailable = NO_STEPS
    if not snapshot.has_communication:
        communication = Unavailable("communication is not watched")
    elif periods:
        held = assign(periods, [(one.begin_ns, one.end_ns) for one in snapshot.hold_ups])
        communication = _median_share(held, walls)
        for axis in sorted({_axis_of(snapshot, one) for one in snapshot.hold_ups}):
            own = [one for one in snapshot.hold_ups if _axis_of(snapshot, one) == axis]
            times = assign(periods, [(one.begin_ns, one.end_ns) for one in own])
            by_axis[axis] = _median_share(times, walls)
    data = [(p.begin_ns, p.begin_ns + p.self_ns) for p in snapshot.phases if _is(p, DATA)]
    return Shares(
        step_ns=median(walls) if walls else 0.0,
        communication=communication,
        by_axis=by_axis,
        input=_median_share(assign(periods, data), walls) if periods else NO_STEPS,
        pipeline=_measure_pipeline(snapshot, periods),
        plain_pipeline=_measure_plain_pipeline(snapshot, periods),
        memory_used=_measure_memory_used(snapshot),
        is_device_memory=any(one.device_total_bytes > 0 for one in snapshot.memory),
    )


def _axis_of(snapshot: Snapshot, one: HoldUp) -> str:
    return snapshot.axes.get(one.group_id, "") or "other"


def _is(phase: PhaseTime, name_id: int) -> bool:
    return phase.name_id == name_id and not phase.on_device


def merge(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same moments in stretches that do not overlap."""
    merged: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted(stretches):
        if merged and begin_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_ns, merged[-1][1]))
        else:
            merged.append((begin_ns, end_ns))
    return merged


def assign(periods: Sequence[Period], stretches: Iterable[tuple[int, int]]) -> list[int]:
    """How much of the stretches lies in each period."""
    ends = [period.step.end_ns for period in periods]
    total = [0] * len(periods)
    for begin_ns, end_ns in stretches:
        place = bisect_right(ends, begin_ns)
        while place < len(periods) and periods[place].begin_ns < end_ns:
            inside = min(end_ns, ends[place]) - max(begin_ns, periods[place].begin_ns)
            total[place] += max(inside, 0)
            place += 1
    return total


def _median_share(parts: Sequence[int], walls: Sequence[int]) -> float:
    return median(part / wall if wall else 0.0 for part, wall in zip(parts, walls, strict=True))


def _mean_phases(
    phases: Sequence[PhaseTime],
    periods: Sequence[Period],
    on_device: bool,  # noqa: FBT001
) -> Callable[[int], float | Unavailable]:
    """Mean per step that has the phase: only some steps are marked on a device."""

    def mean(name_id: int) -> float | Unavailable:
        sums: dict[int, int] = {}
        ends = [period.step.end_ns for period in periods]
        for phase in phases:
            if phase.name_id == name_id and phase.on_device == on_device:
                place = bisect_right(ends, phase.begin_ns)
                if place < len(periods) and phase.begin_ns >= periods[place].begin_ns:
                    sums[place] = sums.get(place, 0) + phase.self_ns
        return sum(sums.values()) / len(sums) if sums else Unavailable("no such phase was seen")

    return mean


def _measure_efficiency(snapshot: Snapshot, shares: Shares, axis: str) -> float | Unavailable:
    """1 − what communication over the axis exposed, of the step."""
    layout = snapshot.layout
    if snapshot.world_size <= 1 or (layout is not None and layout.degree(axis) == 1):
        return Unavailable(f"{axis} is 1: nothing is divided along it")
    if isinstance(shares.communication, Unavailable):
        return shares.communication
    if layout is None and not any(axis in name.split("+") for name in shares.by_axis):
        return Unavailable("the layout is not known: call set_layout")
    return 1 - sum(share for name, share in shares.by_axis.items() if axis in name.split("+"))


def _measure_pipeline(snapshot: Snapshot, periods: Sequence[Period]) -> float | Unavailable:
    if not _has_pipeline(snapshot.layout):
        return Unavailable("pp is 1: there is no pipeline")
    if not snapshot.actions or not periods:
        return Unavailable("no pipeline action was recorded (see Recorder.action)")
    steps = [Period(period.step, period.step.begin_ns) for period in periods]
    busy = assign(steps, merge((one.begin_ns, one.end_ns) for one in snapshot.actions))
    update = assign(
        steps,
        [
            (phase.begin_ns, phase.begin_ns + phase.self_ns)
            for phase in snapshot.phases
            if _is(phase, OPTIMIZER) or _is(phase, CLIP)
        ],
    )
    ratios = [
        inside / max(step.wall_ns - after, 1)
        for step, inside, after in zip(steps, busy, update, strict=True)
        if inside
    ]
    return median(ratios) if ratios else Unavailable("no pipeline action in the newest steps")


def _measure_plain_pipeline(snapshot: Snapshot, periods: Sequence[Period]) -> float | Unavailable:
    layout = snapshot.layout
    if layout is None or not _has_pipeline(layout) or not periods or not snapshot.actions:
        return Unavailable("there is no pipeline to compare with")
    last = periods[-1].step
    inside = [one for one in snapshot.actions if last.begin_ns <= one.begin_ns <= last.end_ns]
    num_microbatches = len({one.microbatch for one in inside})
    num_chunks = len({one.chunk for one in inside})
    if not inside:
        return Unavailable("no pipeline action in the newest step")
    work = num_microbatches * num_chunks
    return work / (work + layout.pp - 1)


def _has_pipeline(layout: Layout | None) -> bool:
    return layout is not None and layout.pp > 1


def _measure_memory_efficiency(snapshot: Snapshot) -> float | Unavailable:
    peaks = [one for one in snapshot.memory if one.peak_reserved_bytes > 0]
    if not peaks:
        return Unavailable("no accelerator in use: memory is the operating system's")
    last = peaks[-1]
    return last.peak_allocated_bytes / last.peak_reserved_bytes


def _measure_memory_used(snapshot: Snapshot) -> float | Unavailable:
    """Tensors at their peak and whatever else is on the device; without one, the process."""
    on_device = [one for one in snapshot.memory if one.device_total_bytes > 0]
    if on_device:
        last = on_device[-1]
        others = last.device_total_bytes - last.device_free_bytes - last.reserved_bytes
        return (last.peak_allocated_bytes + max(others, 0)) / last.device_total_bytes
    if not snapshot.memory or snapshot.host_limit_bytes <= 0:
        return Unavailable("no reading of memory yet, or no limit known")
    return snapshot.memory[-1].rss_bytes / snapshot.host_limit_bytes


def _measure_mfu(snapshot: Snapshot, rate: WindowRate | None) -> float | Unavailable:
    if rate is None:
        return NO_STEPS
    if snapshot.flops_per_step is None:
        return Unavailable("FLOPs are not known: call count_flops or set_flops")
    if snapshot.peak_flops_per_s is None:
        return Unavailable("the peak is not known: call measure_peak or set_peak")
    return snapshot.flops_per_step / (rate.step_ns / 1e9 * snapshot.peak_flops_per_s)
