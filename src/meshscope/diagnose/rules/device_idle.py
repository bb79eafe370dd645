"""Rules about devices that wait for copies and for a host that waits for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.rank.kernel_sample import KernelSample, read_samples
from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.rank.stacks import NO_LINES, SampledLines, StackSamples
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.device_parts import COPY, DeviceParts
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import need
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.device_view import has_enough_steps, measure_common, state_confidence
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.wording import duration, ratio
from meshscope.simulate.what_if import Edit
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.trace_windows import disturbing_windows, mark_profiled

_MIN_SYNCHRONISING_RATIO = Threshold(
    name="synchronising_min_ratio",
    default=0.03,
    meaning="share of the wall clock in which devices idled while their host waited for them",
)
_MIN_COPY_RATIO = Threshold(
    name="exposed_copy_min_ratio",
    default=0.03,
    meaning="share of the wall clock in which devices did nothing but copy",
)
_COPY_PHASE = "copy"
_IN_BACKWARD = "which calls backward"


class HostSynchronises(Rule):
    """Devices idle because the host waited for them before it launched more.

    What it finds: idle time of devices that ran dry while their host waited for them, of
    `synchronising_min_ratio` of the wall clock or more, by kernel samples or profiler traces.

    Why it matters: a host that waits for its device has nothing queued when the wait is over: the
    device then idles until new work is launched.

    How it is measured: gaps that began while the host was in a call such as
    `cudaStreamSynchronize`, up to the call that launched the next work, and copies with no kernel
    beside them for which the host waits; of a rank that has more of it than its peers, as much as
    they have. Without these waits a host gets ahead of its device as far as its own work allows,
    so other idle time that is the host's goes with them, down to what the host needs: its time in
    sampled steps outside of waits, less by as much as a sample makes its steps longer. The gain is
    a replay with steps shorter by that, rank by rank. Stacks sampled while the host was in such a
    call name the line of the program, and what that line calls.

    What to change: take `.item()`, `.cpu()`, `print` of tensors, `nonzero` and data-dependent
    shapes out of the loop, read losses some steps later, copy from pinned memory with
    `non_blocking=True`.

    When it is wrong: a profiler slows launches, so gaps are longer than without it. A host that is
    too slow anyway does not get ahead without the wait either: CP004 shows what remains then.
    """

    code = "CP005"
    name = "host-synchronises"
    thresholds = (_MIN_SYNCHRONISING_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        budget, timeline = need(context.study.budget), need(context.study.timeline)
        parts = need(context.study.device_parts)
        if not has_enough_steps(context, timeline, parts):
            return
        waits = find_waits(parts, _measure_slowdown(context.study, parts))
        common = measure_common(context, parts, "synchronising")
        lost_ns = waits.lost_ns * common.ratio[:, None]
        share = float(lost_ns.sum()) / max(int(budget.wall_ns.sum()), 1)
        if share < context.thresholds[_MIN_SYNCHRONISING_RATIO]:
            return
        work_ns = parts.shorten(timeline, lost_ns)
        edit = Edit(name="no waiting of hosts for devices", work_ns=work_ns)
        gain = context.price_edit(edit)
        mean = float(lost_ns.mean())
        samples = need(context.study.get(_read_samples))
        lines = find_waiting_lines(context.study, samples)
        yield Finding(
            code=self.code,
            title="hosts wait for their devices in the loop",
            severity=severity_of(gain, otherwise=share),
            summary=f"a device loses {duration(mean)} per step, {ratio(share)} of the wall clock, "
            f"{waits.describe()}.{write_lines(lines)}",
            evidence=(
                Evidence(name="lost to synchronising calls", value=mean, unit="ns"),
                Evidence(name="share of the wall clock", value=share, unit="ratio"),
                *_count_waits(samples),
                *list_evidence(lines),
            ),
            confidence=state_confidence(context),
            change="Take `.item()`, `.cpu()` and other reads of tensors out of the loop, or read "
            "them some steps later.",
            gain=gain,
            edit=edit,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostWaits:
    """What devices lose because their hosts wait for them."""

    lost_ns: Floats
    """[rank, step]"""
    is_ahead: bool
    """Without the waits all hosts would launch faster than devices work."""
    has_copies: bool
    """Hosts wait for copies most of all."""

    def describe(self) -> str:
        doing = "while and after its host waits for copies"
        if not self.has_copies:
            doing = "after calls in which its host waited for it"
        return doing + (
            "; without them the host would be ahead of the device" if self.is_ahead else ""
        )


def find_waits(parts: DeviceParts, slowdown: float) -> HostWaits:
    """From kernel samples; of traces only what idles behind a wait is known.

    `slowdown` is how many times as long the host takes in a sampled step.
    """
    lost_ns = parts.time_of("synchronising").astype(np.float64)
    steps = [step for sampled in parts.sampled.values() for step in sampled.steps]
    if not steps or not lost_ns.any():
        return HostWaits(lost_ns=lost_ns, is_ahead=False, has_copies=False)
    waited_ns = sum(step.waited_copy_ns for step in steps)
    copied_ns = waited_ns / max(sum(step.training_copy_ns for step in steps), 1)
    behind_ns = lost_ns.sum()
    lost_ns = lost_ns + min(copied_ns, 1.0) * parts.time_of(COPY)
    host_ns = sum(step.length_ns - step.waiting_ns for step in steps) / len(steps) / slowdown
    device_ns = sum(
        step.training_compute_ns + step.training_copy_ns - step.waited_copy_ns for step in steps
    ) / len(steps)
    other_ns = parts.time_of("host", "launch").astype(np.float64)
    # A step without the waits takes as long as the device or the host needs, whichever is longer.
    needed_ns = max(host_ns, device_ns)
    left_ns = device_ns + float(lost_ns.mean()) + float(other_ns.mean()) - needed_ns
    follows = np.clip((left_ns - lost_ns.mean()) / max(float(other_ns.mean()), 1.0), 0.0, 1.0)
    return HostWaits(
        lost_ns=lost_ns + follows * other_ns,
        is_ahead=host_ns < device_ns,
        has_copies=float(lost_ns.sum()) > 2 * float(behind_ns),
    )


def _measure_slowdown(study: Study, parts: DeviceParts) -> float:
    """How many times as long hosts take in sampled steps as in others; at least 1."""
    ratios = []
    for rank, sampled in parts.sampled.items():
        steps = order_steps(study.attempt.ranks[rank].read("steps"))
        is_sampled = np.isin(steps.step, sampled.step_numbers)
        is_other = ~mark_profiled(steps.step, disturbing_windows(study.attempt))
        is_other[: study.steps.num_warmup] = False
        if is_sampled.any() and is_other.any():
            own_ns = steps.duration_ns
            ratios.append(float(np.median(own_ns[is_sampled]) / np.median(own_ns[is_other])))
    return max(1.0, float(np.median(ratios))) if ratios else 1.0


def _read_samples(study: Study) -> Mapping[int, tuple[KernelSample, ...]]:
    read = {rank: read_samples(recording) for rank, recording in study.attempt.ranks.items()}
    return {rank: samples for rank, samples in read.items() if samples}


def find_waiting_lines(
    study: Study, samples: Mapping[int, tuple[KernelSample, ...]]
) -> SampledLines:
    """The lines of the program that stacks show which were sampled while the host waited."""

    def choose(stacks: StackSamples) -> Bools:
        found = np.zeros(len(stacks), dtype=np.bool_)
        for sample in samples[stacks.rank]:
            waits = sample.synchronising
            found |= stacks.find_in_intervals(waits.start_ns, waits.end_ns)
        return found

    found = find_lines(study, tuple(samples), choose) if samples else NO_LINES
    # In a backward a thread of autograd may be the one that waits: what it does is not seen.
    lines = sorted(found.lines, key=lambda line: line.text.endswith(_IN_BACKWARD))
    return replace(found, lines=tuple(lines))


def _count_waits(samples: Mapping[int, tuple[KernelSample, ...]]) -> Iterable[Evidence]:
    every = [sample for of_rank in samples.values() for sample in of_rank]
    if every:
        num_steps = sum(sample.last_step - sample.first_step + 1 for sample in every)
        number = sum(len(sample.synchronising) for sample in every) / num_steps
        yield Evidence(name="times a host waits per step", value=number)


class ExposedCopies(Rule):
    """Devices do nothing but copy.

    What it finds: copies between memories with no kernel beside them, of `exposed_copy_min_ratio`
    of the wall clock or more, by kernel samples or profiler traces.

    Why it matters: copies run on separate engines and cost nothing while kernels run.

    How it is measured: time in which a device had copies and neither computed nor was held up by
    communication; of a rank that copies longer than its peers, as long as they do. The gain is a
    replay without it.

    What to change: pin host memory, copy with `non_blocking=True` on a separate stream, fetch the
    next batch during the step, keep on the device what is copied back and forth.

    When it is wrong: offloading that was chosen to save memory pays this on purpose.
    """

    code = "CP006"
    name = "exposed-copies"
    thresholds = (_MIN_COPY_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        budget, timeline = need(context.study.budget), need(context.study.timeline)
        share, work_ns = _remove_copies(context, timeline)
        if share < context.thresholds[_MIN_COPY_RATIO] or not has_enough_steps(context, timeline):
            return
        edit = Edit(name="copies hidden behind kernels", work_ns=work_ns)
        gain = context.price_edit(edit)
        mean = share * budget.mean_wall_ns
        yield Finding(
            code=self.code,
            title="devices wait for copies",
            severity=severity_of(gain, otherwise=share),
            summary=f"a device does nothing but copy for {duration(mean)} per step, {ratio(share)} "
            "of the wall clock.",
            evidence=(
                Evidence(name="exposed copies per rank and step", value=mean, unit="ns"),
                Evidence(name="share of the wall clock", value=share, unit="ratio"),
            ),
            change="Pin host memory and copy ahead, on a separate stream.",
            gain=gain,
            edit=edit,
        )


def _remove_copies(context: Context, timeline: Timeline) -> tuple[float, Int64s]:
    """Their share of the wall clock, and the work without them."""
    budget, pieces = need(context.study.budget), timeline.pieces
    if _COPY_PHASE in timeline.phases:  # traces have them as pieces
        is_copy = pieces.phase == timeline.phases.index(_COPY_PHASE)
        work_ns = np.where(is_copy & (pieces.kind == PieceKind.WORK), 0, pieces.duration_ns)
        return budget.share_of(Share.COPY), work_ns
    parts = need(context.study.device_parts)
    common = measure_common(context, parts, COPY)
    share = common.total_ns / max(int(budget.wall_ns.sum()), 1)
    return share, parts.remove(timeline, COPY, ratio=common.ratio)
