"""Rules about computing: phases out of proportion, utilisation, gaps in a device's work, code that
is compiled again."""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from meshscope.analyze.rank.compilations import Compilation, read_compilations
from meshscope.analyze.rank.steps import JobStepSummary
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.device_parts import BETWEEN
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Estimate, Evidence, Finding, StepLoss
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.device_view import (
    has_enough_steps,
    list_causes,
    measure_common,
    state_confidence,
)
from meshscope.diagnose.views.launching import (
    GRAPH_GAP_NS,
    LaunchRelief,
    cap_at_usual,
    find_relief,
)
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.wording import be, capitalize, duration, name_ranks, plural, ratio
from meshscope.numerics.chance import MIN_STEPS
from meshscope.simulate.what_if import Edit
from meshscope.store.read.arrays import Int64s

_MIN_BACKWARD_FACTOR = Threshold(
    name="backward_min_factor",
    default=4.0,
    meaning="work of backward over that of forward; 2 by arithmetic, 3 with full recomputation",
)
_MIN_OPTIMIZER_RATIO = Threshold(
    name="optimizer_min_ratio",
    default=0.15,
    meaning="share of the wall clock in the optimizer's own work",
)
_MAX_LOW_MFU_RATIO = Threshold(
    name="mfu_low_ratio",
    default=0.25,
    meaning="model FLOPs utilisation below which it is reported",
)
_IDLE_PARTS = ("host", "launch")
_MIN_GAP_RATIO = Threshold(
    name="host_gap_min_ratio",
    default=0.05,
    meaning="share of the wall clock in which devices had nothing to do between phases",
)


_MIN_RECOMPILE_RATIO = Threshold(
    name="recompile_min_ratio",
    default=0.02,
    meaning="share of all steps' time that compiling again must cost",
)
_MIN_RECOMPILATIONS = Threshold(
    name="recompile_min_count",
    default=2,
    meaning="compilations again on a rank below which nothing is reported",
)
_ADVICE_OUTSIDE = (
    "Take Python out of the loop between forward, backward and the optimizer's step, or do it "
    "while the device has work; or give the device more to do, with a larger batch."
)
_SHOWN_REASONS = 3
_MIN_WAITED_RATIO = 0.25
"""Of the time compiled in, for another rank to have waited for it."""


class BackwardHeavy(Rule):
    """Backward takes far longer than its arithmetic.

    What it finds: a backward whose own work is `backward_min_factor` times that of forward or more.

    Why it matters: backward has twice the arithmetic of forward, three times with full
    recomputation. If it takes longer, it does something else.

    How it is measured: WORK in the phases `backward` and `forward`, all ranks and steps, without
    the waits and transfers in them.

    What to change: look for hooks, copies of gradients, synchronisation, and recomputation of what
    is cheap to keep.

    When it is wrong: if forward is partly frozen or cached. Always LOW: nothing is priced.
    """

    code = "CP001"
    name = "backward-heavy"
    severities = (Severity.LOW, Severity.LOW)
    thresholds = (_MIN_BACKWARD_FACTOR,)

    def find(self, context: Context) -> Iterable[Finding]:
        work = need(context.study.work)
        if len(work.steps) < MIN_STEPS:
            return
        forward, backward = (work.of_phases((name,)).mean() for name in ("forward", "backward"))
        if forward <= 0 or backward < context.thresholds[_MIN_BACKWARD_FACTOR] * forward:
            return
        yield Finding(
            code=self.code,
            title="backward takes long compared with forward",
            severity=Severity.LOW,
            summary=f"ranks work {duration(float(backward))} in backward and "
            f"{duration(float(forward))} in forward per step, {backward / forward:.1f} times as "
            "long.",
            evidence=(
                Evidence(
                    name="work in backward per rank and step", value=float(backward), unit="ns"
                ),
                Evidence(name="work in forward per rank and step", value=float(forward), unit="ns"),
            ),
            change="Look for hooks, copies and synchronisation in backward, and at what is "
            "recomputed.",
            gain=Unavailable("how long backward should take is not known"),
        )


class OptimizerHeavy(Rule):
    """The optimizer takes a large part of the step.

    What it finds: own work of the optimizer that takes `optimizer_min_ratio` of the wall clock or
    more.

    Why it matters: an update does little more than read and write memory; fused kernels and
    sharding over dp make it small.

    How it is measured: WORK in the phase `optimizer`, without waits for gradients.

    What to change: use a fused or foreach optimizer, shard its state over dp (ZeRO-1), run more
    microbatches per update.

    When it is wrong: for optimizers that compute, such as those with matrix roots. Always LOW.
    """

    code = "CP002"
    name = "optimizer-heavy"
    severities = (Severity.LOW, Severity.LOW)
    thresholds = (_MIN_OPTIMIZER_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        work = need(context.study.work)
        if len(work.steps) < MIN_STEPS:
            return
        mean = float(work.of_phases(("optimizer",)).mean())
        share = mean / max(float(work.period_ns.mean()), 1.0)
        if share < context.thresholds[_MIN_OPTIMIZER_RATIO]:
            return
        yield Finding(
            code=self.code,
            title="the optimizer is a large part of the step",
            severity=Severity.LOW,
            summary=f"the optimizer works {duration(mean)} per rank and step, {ratio(share)} of "
            "the wall clock.",
            evidence=(
                Evidence(name="work in optimizer per rank and step", value=mean, unit="ns"),
                Evidence(name="share of the wall clock", value=share, unit="ratio"),
            ),
            change="Use a fused optimizer, shard its state over dp, or update less often.",
            gain=Unavailable("how long a fused optimizer would take is not known"),
        )


class LowUtilisation(Rule):
    """Model FLOPs utilisation is low, or impossible.

    What it finds: an MFU below `mfu_low_ratio`, or above 1.

    Why it matters: if it is low, the hardware could do several times as much. If it is above 1, the
    FLOPs, the peak or the time is wrong, and so is every figure that rests on them.

    How it is measured: FLOPs of the model per step over peak times period, summed over ranks, if
    FLOPs and peak are known. The budget shows where the rest of the time goes.

    What to change: follow the budget's largest lines; for kernel inefficiency use larger matrices,
    compilation, lower precision.

    When it is wrong: small models cannot fill large devices. Always LOW: other rules price causes.
    """

    code = "CP003"
    name = "low-utilisation"
    severities = (Severity.LOW, Severity.LOW)
    thresholds = (_MAX_LOW_MFU_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        budget = need(context.study.budget)
        mfu = need(budget.mfu)
        if context.thresholds[_MAX_LOW_MFU_RATIO] <= mfu.ratio <= 1:
            return
        title = "MFU is over 1: FLOPs or peak are wrong" if mfu.is_impossible else "MFU is low"
        yield Finding(
            code=self.code,
            title=title,
            severity=Severity.LOW,
            summary=f"MFU is {ratio(mfu.ratio)}: {mfu.flops_per_step:.3g} FLOPs per step, peak "
            f"{mfu.peak_flops_per_s:.3g} FLOP/s ({mfu.peak_source}).",
            evidence=(
                Evidence(name="MFU", value=mfu.ratio, unit="ratio"),
                Evidence(name="formula", value=mfu.formula),
                Evidence(name="FLOPs per step, all ranks", value=mfu.flops_per_step),
                Evidence(name="peak FLOP/s, all ranks", value=mfu.peak_flops_per_s),
            ),
            change="Check the FLOPs and the declared peak."
            if mfu.is_impossible
            else "Follow the largest lines of the budget.",
            gain=Unavailable("the findings about its causes say what they save"),
        )


class HostGap(Rule):
    """Devices idle because the host issues work too late.

    What it finds: idle time of devices of `host_gap_min_ratio` of the wall clock or more, because
    the host was at something else than fetching data, saving, evaluating or logging, or the launch
    was on its way.

    Why it matters: the device is the expensive part; a host that cannot keep up wastes it.

    How it is measured: kernel samples and profiler traces show when a device had nothing to do, and
    when the host launched what came next. Of a rank that has more of it than its peers as much
    counts as they have: the rest is named by ST001 or IN001. Except in traces a step counts with at
    most 1.5 times the median of all steps, and by kernel samples without what the recorder takes,
    so that a checkpoint's wait, which TI002 names, is not in it. If most of it is
    in forward and backward, the gain is a replay with what compilation and CUDA graphs save there:
    the gaps, less 1.5 µs for each kernel. Otherwise it is a replay without the gaps. Without
    samples or traces, the time between phases on the device's stream is named, at low severity.

    What to change: use fewer and larger kernels, compilation, CUDA graphs, no `.item()` and no
    synchronisation in the loop, less Python between phases; or a larger batch.

    When it is wrong: if work on the device happens outside any recorded phase, the device looks
    idle. Calling a compiled function takes the host some time too, which is not taken off.
    """

    code = "CP004"
    name = "host-gap"
    is_pattern = True
    thresholds = (_MIN_GAP_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        study, budget = context.study, need(context.study.budget)
        timeline, parts = need(study.timeline), need(study.device_parts)
        names = _IDLE_PARTS if parts.total_ns(*_IDLE_PARTS) else (BETWEEN,)
        is_known = BETWEEN not in names
        # What one rank has beyond its peers is that rank's: others name it.
        common = measure_common(context, parts, *names)
        idle_ns = parts.time_of(*names) * common.ratio[:, None]
        relief = find_relief(study, idle_ns) if is_known and parts.sampled else None
        if relief is not None:
            idle_ns = relief.idle_ns
        elif not study.attempt.is_from_traces:
            idle_ns = cap_at_usual(idle_ns)  # TI002 has what comes once in some steps
        share = float(idle_ns.sum()) / max(int(budget.wall_ns.sum()), 1)
        if share < context.thresholds[_MIN_GAP_RATIO] or not has_enough_steps(context, timeline):
            return
        removed_ns = idle_ns if relief is None else idle_ns * relief.saved_ratio
        edit = Edit(name="no gaps on devices", work_ns=parts.shorten(timeline, removed_ns))
        gain = context.price_edit(edit)
        mean = float(idle_ns.mean())
        between = "" if is_known else " between phases"
        severity = severity_of(gain, otherwise=share)
        lines = find_lines(study, (), lambda one: one.find_in_phase(""))
        yield Finding(
            code=self.code,
            title=f"devices wait for the host{between}",
            # Without a kernel sample nothing says that the device did nothing there.
            severity=severity if is_known else Severity.LOW,
            summary=f"a device has nothing to do for {duration(mean)} per step{between}, "
            f"{ratio(share)} of the wall clock.{_describe_relief(relief)}{write_lines(lines)}",
            evidence=(
                Evidence(name="gap per rank and step", value=mean, unit="ns"),
                Evidence(name="share of the wall clock", value=share, unit="ratio"),
                *_list_relief(relief),
                *list_causes(context, budget.wall_ns.size),
                *list_evidence(lines),
            ),
            confidence=state_confidence(context),
            change=_ADVICE_OUTSIDE
            if relief is not None and not relief.is_captured
            else "Issue work earlier: compile, capture graphs, and take synchronisation and "
            "Python out of the loop; or give the device more to do, with a larger batch.",
            gain=gain,
            edit=edit,
        )


def _describe_relief(relief: LaunchRelief | None) -> str:
    if relief is None:
        return ""
    saved_ns, outside_ns = (
        share * relief.mean_ns for share in (relief.captured_ratio, relief.outside_ratio)
    )
    fill = f"{relief.fill_factor:.1f}" if relief.fill_factor < 10 else f"{relief.fill_factor:.0f}"
    graphs = (
        "Most kernels are in CUDA graphs already"
        if relief.has_graphs
        else f"Compilation with CUDA graphs would save {duration(saved_ns)} of it, if kernels then "
        f"follow each other after {duration(GRAPH_GAP_NS)}"
    )
    return (
        f" {graphs}; {duration(outside_ns)} are outside of forward and backward. The device could "
        f"compute {fill} times as much in the same time with a larger batch."
    )


def _list_relief(relief: LaunchRelief | None) -> Iterable[Evidence]:
    if relief is None:
        return
    mean_ns = relief.mean_ns
    yield Evidence(
        name="saved by compilation with CUDA graphs",
        value=relief.captured_ratio * mean_ns,
        unit="ns",
    )
    yield Evidence(
        name="outside of forward and backward", value=relief.outside_ratio * mean_ns, unit="ns"
    )
    yield Evidence(name="times as much as a device could compute", value=relief.fill_factor)


def find_recompilations(study: Study) -> Mapping[int, tuple[Compilation, ...]]:
    """Per rank what was compiled again, with the backward that belongs to it."""
    found = {}
    for rank, recording in study.attempt.ranks.items():
        again = tuple(one for one in read_compilations(recording) if one.reason)
        if again:
            found[rank] = again
    return found


class Recompilation(Rule):
    """A compiled function is compiled again and again.

    What it finds: functions that torch.compile had to compile again, `recompile_min_count` times on
    a rank or more, for `recompile_min_ratio` of all steps' time or more together.

    Why it matters: a compilation takes seconds to minutes. The rank that compiles holds up all
    others, and their steps look slow without a cause.

    How it is measured: the phase `compile`, and torch's own account of which guard had failed. A
    first compilation does not count. The gain is what steps with such a compilation take beyond the
    median step, and at least what the rank took that compiled longest in it, spread over all steps.

    What to change: let the size that changes be dynamic (`torch._dynamo.mark_dynamic`,
    `torch.compile(dynamic=True)`), pad batches to a few sizes, and keep numbers that change in
    every step in tensors. `TORCH_LOGS=recompiles` lists every reason.

    When it is wrong: in a short run, where it may be over after a few more shapes. Functions that
    were compiled more often than torch's limit run without compilation from then on; that time is
    not in here. The journal keeps the reasons of the first 200 compilations of a rank.
    """

    code = "CP007"
    name = "recompilation"
    thresholds = (_MIN_RECOMPILE_RATIO, _MIN_RECOMPILATIONS)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one: what takes most of the time is named."""
        steps = context.study.steps
        by_rank = need(context.study.get(find_recompilations))
        if not by_rank or not steps.num_steps:
            return
        lost = _find_lost(by_rank)
        beyond = _find_beyond(steps, lost)
        gain = Estimate(
            saved_ns=sum(beyond.values()) / steps.num_steps,
            step_ns=float(steps.duration_ns.mean()),
            basis="what steps with a compilation take beyond the median step, spread over all",
        )
        number = max(len({one.compile_id for one in again}) for again in by_rank.values())
        if number < context.thresholds[_MIN_RECOMPILATIONS]:
            return
        if gain.saved_ratio < context.thresholds[_MIN_RECOMPILE_RATIO]:
            return
        what, again = _find_worst(by_rank)
        ranks = tuple(sorted(by_rank))
        waiting = _find_waiting(context, ranks, lost)
        reasons = list(dict.fromkeys(one.reason for one in again))
        held = f" {capitalize(name_ranks(waiting))} {be(waiting)} held up by it." if waiting else ""
        yield Finding(
            code=self.code,
            title=f"code is compiled again {plural(number, 'time')}: {what}",
            severity=severity_of(gain),
            summary=f"{name_ranks(ranks)} compile{'s' if len(ranks) == 1 else ''} again, "
            f"{plural(number, 'time')}: {what}; {duration(sum(lost.values()))} of compiling "
            f"together, and steps with it are {duration(sum(beyond.values()))} longer, "
            f"{ratio(gain.saved_ratio)} of all steps' time: {reasons[0]}.{held}",
            ranks=() if len(ranks) == len(context.study.attempt.ranks) else ranks,
            first_step=min(lost),
            last_step=max(lost),
            evidence=(
                Evidence(name="compiled again, on the rank with most", value=number),
                Evidence(name="steps with a compilation", value=len(lost), unit="steps"),
                *(Evidence(name="failed guard", value=one) for one in reasons[:_SHOWN_REASONS]),
            ),
            change="Let the size that changes be dynamic (torch._dynamo.mark_dynamic, "
            "torch.compile(dynamic=True)), or pad to a few sizes; keep numbers that change in "
            "tensors.",
            gain=gain,
            lost_steps=_list_lost(context.study.steps.step, beyond),
        )


def _find_lost(by_rank: Mapping[int, tuple[Compilation, ...]]) -> dict[int, int]:
    """Per step the time of the rank that compiled longest."""
    by_step: dict[int, dict[int, int]] = {}
    for rank, again in by_rank.items():
        for one in again:
            of_rank = by_step.setdefault(one.step, {})
            of_rank[rank] = of_rank.get(rank, 0) + one.duration_ns
    return {step: max(of_rank.values()) for step, of_rank in by_step.items()}


def _find_beyond(steps: JobStepSummary, lost: Mapping[int, int]) -> dict[int, float]:
    """Per step what it took beyond the median, at least the compilation itself: new code is also
    loaded and tried out, and garbage of the compiler collected, when it is first called."""
    median_ns = float(np.median(steps.duration_ns))
    took = dict(zip(steps.step.tolist(), steps.duration_ns.tolist(), strict=True))
    return {
        step: max(float(time_ns), took.get(step, 0) - median_ns) for step, time_ns in lost.items()
    }


def _list_lost(steps: Int64s, beyond: Mapping[int, float]) -> StepLoss:
    lost = [beyond.get(step, 0.0) for step in steps.tolist()]
    return StepLoss(step=steps, lost_ns=np.array(lost))


def _find_worst(
    by_rank: Mapping[int, tuple[Compilation, ...]],
) -> tuple[str, list[Compilation]]:
    """The function that took most time, in words, and its compilations."""
    total: Counter[str] = Counter()
    for again in by_rank.values():
        for one in again:
            total[one.function] += one.duration_ns
    worst = total.most_common(1)[0][0]
    chosen = [one for again in by_rank.values() for one in again if one.function == worst]
    where = next((one.where for one in chosen if one.where), "")
    return _name_compiled(worst, where), chosen


def _name_compiled(function: str, where: str) -> str:
    """`forward (model.py:40), called at train.py:88`, or `model, called at train.py:88`."""
    place, _, name = function.partition(" ")
    caller, _, called = where.partition(" < ")[0].partition(" > ")
    # torch calls a module through a function of its own: what the program calls says more.
    is_own = bool(name) and not place.startswith("_dynamo/")
    what = f"{name} ({place})" if is_own else called or "a function"
    return f"{what}, called at {caller.partition(' ')[0]}" if caller else what


def _find_waiting(
    context: Context, ranks: tuple[int, ...], lost: Mapping[int, int]
) -> tuple[int, ...]:
    """Ranks that did not compile and waited in these steps."""
    timeline = known(context.study.timeline)
    if timeline is None:
        return ()
    pieces = timeline.pieces
    steps = [step for step in lost if step in timeline.steps]
    is_then = np.isin(timeline.steps, steps)[pieces.step] & (pieces.kind == PieceKind.WAIT)
    waited = np.bincount(
        np.searchsorted(np.array(timeline.ranks), pieces.rank[is_then]),
        pieces.duration_ns[is_then],
        minlength=len(timeline.ranks),
    )
    least = _MIN_WAITED_RATIO * sum(lost[step] for step in steps)
    return tuple(
        rank
        for rank, wait_ns in zip(timeline.ranks, waited.tolist(), strict=True)
        if steps and wait_ns >= least and rank not in ranks
    )
