"""Rules about the course of step times over a run, on all ranks together."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from meshscope.analyze.budget.budget import measure_host_lead
from meshscope.analyze.rank.stacks import SampledLines, StackSamples
from meshscope.analyze.stragglers.slow_steps import (
    BETWEEN_STEPS,
    UNATTRIBUTED,
    PhaseExcess,
    find_excess,
)
from meshscope.analyze.stragglers.step_pattern import (
    MAX_CHANCE,
    Recurrence,
    StepPeriods,
    find_recurrences,
    measure_drift,
    pick_ranks,
    read_periods,
)
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import (
    Confidence,
    ConfidenceLevel,
    Estimate,
    Evidence,
    Finding,
    StepLoss,
)
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.rules.compute import find_recompilations
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.wording import count, duration, name_ranks, p_value, plural, ratio
from meshscope.store.read.arrays import Bools, Int64s

_MIN_DRIFT_RATIO = Threshold(
    name="drift_min_change_ratio",
    default=0.15,
    meaning="growth of the step time from the first to the last quarter of the run",
)
_MAX_DRIFT_CHANCE = Threshold(
    name="drift_max_chance_ratio",
    default=0.01,
    meaning="chance of such a trend without a drift",
)
_MIN_DRIFT_SECONDS = Threshold(
    name="drift_min_seconds",
    default=10,
    meaning="time that the steps must cover, or it is LOW: other programs come and go in seconds",
)
_MIN_RECURRING_LOST_RATIO = Threshold(
    name="periodic_min_lost_ratio",
    default=0.02,
    meaning="share of all time that slow steps at an interval must cost",
)
_MIN_SPIKES_LOST_RATIO = Threshold(
    name="spikes_min_lost_ratio",
    default=0.05,
    meaning="share of all time that single slow steps must cost",
)
MIN_SPIKES = Threshold(
    name="spikes_min_count", default=3, meaning="single slow steps below which nothing is reported"
)
_MIN_WARMUP_STEPS = Threshold(
    name="warmup_min_lost_steps",
    default=20,
    meaning="usual steps that the slow first steps must have cost",
)
_WARMUP_FACTOR = Threshold(
    name="warmup_slow_factor",
    default=1.5,
    minimum=1.0,
    meaning="a first step this many times the median still warms up",
)
_MIN_SAME_RATIO = 0.5
"""Of what a slow step takes longer on the host, for the device to show the same steps."""
_MAX_OTHERS_RATIO = 0.5
"""A rank is alone if no other has half as much extra work in the slow steps."""
_MIN_BESIDE_RATIO = 0.1
"""Share of the extra time from which another phase is named."""
_MIN_WARMUP_ALARM_NS = 1_000_000_000
"""What every process takes to load and allocate; nobody's restarts are felt by less."""
_MIN_STEPS_FOR_WARMUP_ALARM = 200
"""In shorter runs a long warm-up is normal."""

ADVICE = {
    "checkpoint": "Save asynchronously (torch.distributed.checkpoint.async_save), from a copy, or "
    "less often.",
    "eval": "Evaluate less often, on fewer batches, or on other machines.",
    "": "Take what happens in these steps off the critical path: save asynchronously or less "
    "often, evaluate elsewhere, log without waiting.",
}
"""What to change, by the phase that is longer."""
_MAX_HOST_LEAD_RATIO = 0.05


def _job_periods(study: Study) -> StepPeriods:
    return _read_periods(study)


def _read_periods(study: Study, rank: int | None = None) -> StepPeriods:
    """Steps in which a rank compiled again are not slow here: CP007 reports them."""
    num_warmup = study.steps.num_warmup
    periods = need(read_periods(study.attempt, num_warmup=num_warmup, rank=rank))
    again = need(study.get(find_recompilations))
    compiled = {one.step for compilations in again.values() for one in compilations}
    if not compiled:
        return periods
    is_known = np.isin(periods.step, sorted(compiled))
    return replace(periods, is_slow=periods.is_slow & ~is_known)


def _job_recurrences(study: Study) -> tuple[Recurrence, ...]:
    """Shared: recurring slow steps are not single slow steps."""
    return find_recurrences(need(study.get(_job_periods)))


def _recurring(study: Study) -> tuple[StepPeriods, tuple[Recurrence, ...], int | None]:
    """What recurs in the job's periods. Where hosts run ahead of their devices, others notice a
    late rank in other steps than its own: then what recurs in a rank's own, the surest, and whose.
    """
    periods, found = need(study.get(_job_periods)), need(study.get(_job_recurrences))
    timeline = known(study.timeline)
    if found or timeline is None or len(timeline.ranks) < 2 or not timeline.on_device.all():
        return periods, found, None
    picked = pick_ranks(study.attempt)
    by_rank = {rank: _read_periods(study, rank) for rank in picked}
    recurrences = {rank: find_recurrences(own) for rank, own in by_rank.items()}
    sure = [(one.chance * len(picked), rank) for rank in picked for one in recurrences[rank]]
    if not sure or min(sure)[0] >= MAX_CHANCE:
        return periods, found, None
    rank = min(sure)[1]
    return by_rank[rank], recurrences[rank], rank


def _runs_ahead(context: Context) -> bool:
    """Whether hosts fill their devices' queues; their own steps then say nothing about the pace."""
    timeline = known(context.study.timeline)
    return timeline is not None and abs(measure_host_lead(timeline)) > _MAX_HOST_LEAD_RATIO


class StepTimeDrift(Rule):
    """Steps become longer over the run.

    What it finds: a step time that grows over the run by `drift_min_change_ratio` or more, slowly
    or at one step.

    Why it matters: the run takes longer than the first steps suggest, and the cause usually
    continues: memory that is swapped, a cache that fills, a host that heats up.

    How it is measured: the medians of the first and the last quarter of the steps, and two tests:
    that of Mann and Kendall for a trend in the medians of 24 blocks, and one that allows for steps
    that resemble their neighbours, as noise with memory wanders. It is a jump if two levels fit the
    blocks better than a line. The gain is what steps take beyond the first quarter's median.

    What to change: compare what the report's phases take early and late; look for a growing data
    structure, memory pressure, thermal limits, other jobs on the host.

    When it is wrong: it is silent if hosts run ahead of their devices, because their steps become
    longer when the queue is full. It is wrong if the work itself grows: longer sequences, a
    curriculum, more parameters unfrozen. Machines that share their processors drift with their
    neighbours: over less than `drift_min_seconds` it is LOW. A slow rise over fewer than some 60
    steps in noise with a long memory is not told from the noise.
    """

    code = "TI001"
    name = "step-time-drift"
    thresholds = (_MIN_DRIFT_RATIO, _MAX_DRIFT_CHANCE, _MIN_DRIFT_SECONDS)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        periods = need(context.study.get(_job_periods))
        if _runs_ahead(context):
            return
        drift = measure_drift(periods)
        if drift.change_ratio < context.thresholds[_MIN_DRIFT_RATIO]:
            return
        if drift.p_value > context.thresholds[_MAX_DRIFT_CHANCE]:
            return
        gain = Estimate(
            saved_ns=max(0.0, drift.mean_ns - drift.first_ns),
            step_ns=drift.mean_ns,
            basis="mean period minus the median of the first quarter",
        )
        covered_s = float(periods.period_ns.sum()) / 1e9
        is_short = covered_s < context.thresholds[_MIN_DRIFT_SECONDS]
        level = ConfidenceLevel.LOW if is_short else ConfidenceLevel.MEDIUM
        onset = known(drift.onset_step)
        since = "" if onset is None else f", most of it from step {onset} on"
        yield Finding(
            code=self.code,
            title="steps become longer over the run",
            severity=Severity.LOW if is_short else severity_of(gain),
            summary=f"steps took {duration(drift.first_ns)} in the first quarter of the run and "
            f"{duration(drift.last_ns)} in the last{since}.",
            first_step=onset,
            evidence=(
                Evidence(name="median period, first quarter", value=drift.first_ns, unit="ns"),
                Evidence(name="median period, last quarter", value=drift.last_ns, unit="ns"),
                Evidence(name="change over the run", value=drift.change_ratio, unit="ratio"),
            ),
            confidence=Confidence(
                level=level,
                text=f"{p_value(drift.p_value)} for a trend over {plural(len(periods), 'step')}"
                f"{', a few seconds' if is_short else ''}",
                p_value=drift.p_value,
            ),
            change="Compare an early with a late window of the run, and look for what grows: "
            "memory, caches, sequence lengths, other jobs on the hosts.",
            gain=gain,
            lost_steps=StepLoss(
                step=periods.step, lost_ns=np.maximum(periods.period_ns - drift.first_ns, 0.0)
            ),
        )


class PeriodicSlowSteps(Rule):
    """Steps at a fixed interval are slow: a checkpoint, an evaluation, logging.

    What it finds: slow steps that recur at a fixed interval and cost `periodic_min_lost_ratio` of
    the time or more.

    Why it matters: every rank waits while one writes a file or evaluates.

    How it is measured: a step is slow if its period is a quarter above the median of the 24 steps
    around it and far outside their spread. An interval counts if at least four fifths of its steps
    are slow and chance does not explain that, over all intervals tried. Periods are the median over
    ranks; on devices, where nothing recurs in it, a rank's own. The gain is the median of what
    these steps take beyond the others, on the device if it was marked, else less the lead that
    a host makes up until the next one, once in each interval.

    What to change: save asynchronously, less often, or from a copy; evaluate on other machines; log
    without waiting for the device.

    When it is wrong: if every second step is slow, the interval is not seen. The finding names the
    phase that grows on the rank that works most in these steps; work in another thread or process
    has no phase.
    """

    code = "TI002"
    name = "periodic-slow-steps"
    thresholds = (_MIN_RECURRING_LOST_RATIO,)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        """One per interval."""
        periods, recurrences, rank = need(context.study.get(_recurring))
        for recurrence in recurrences:
            if periods.share_of(recurrence.rows) >= context.thresholds[_MIN_RECURRING_LOST_RATIO]:
                yield self._report(context, periods, recurrence, rank)

    def _report(
        self, context: Context, periods: StepPeriods, found: Recurrence, rank: int | None
    ) -> Finding:
        extra_ns, usual_ns = _measure_extra(context, periods, found.rows, found.interval)
        gain = _price_recurring(found, extra_ns, usual_ns)
        slow = periods.step[found.rows]
        where, ranks, beside = _find_contents(context, slow, rank)
        doing = "" if where is None else f", mostly in {where.phase}"
        doing += f" on {name_ranks(ranks)}" if ranks else ""
        lines = _find_lines(context, where, slow, ranks)
        return Finding(
            code=self.code,
            title=f"every {found.interval} steps one is slow{doing}",
            severity=severity_of(gain),
            summary=f"every {found.interval} steps one takes {duration(extra_ns)} longer{doing}: "
            f"{count(found.num_slow)} of {plural(found.num_expected, 'step')} at that interval, "
            f"{ratio(gain.saved_ratio)} of all time."
            f"{_write_beside(beside)}{write_lines(lines)}",
            ranks=ranks,
            first_step=int(slow[0]),
            last_step=int(slow[-1]),
            evidence=(
                Evidence(name="interval", value=found.interval, unit="steps"),
                Evidence(name="extra time of a slow step", value=extra_ns, unit="ns"),
                Evidence(name="slow steps at the interval", value=found.num_slow, unit="steps"),
                *_contents_evidence(where),
                *list_evidence(lines),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH,
                text=f"{p_value(found.chance)} over all intervals tried",
                p_value=found.chance,
            ),
            change=ADVICE.get("" if where is None else where.phase, ADVICE[""]),
            gain=gain,
            lost_steps=_list_lost(periods, found.rows),
        )


class LongWarmup(Rule):
    """The first steps take a noticeable part of the run.

    What it finds: first steps that together cost `warmup_min_lost_steps` usual steps or more.

    Why it matters: compilation, autotuning and first allocations are paid at every restart.

    How it is measured: steps from the first one on that are `warmup_slow_factor` times the median
    or longer, and the time they take beyond the median.

    What to change: keep compiled code in a cache between launches; fix shapes before the loop; warm
    communicators up together.

    When it is wrong: below 200 steps, and where all of it took less than a second, it is always
    LOW: a short run does not show how often the job restarts.
    """

    code = "TI003"
    name = "long-warmup"
    severities = (Severity.LOW, Severity.CRITICAL)
    thresholds = (_MIN_WARMUP_STEPS, _WARMUP_FACTOR)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        steps, usual = context.study.steps, need(context.study.steps.time)
        if usual.median_ns <= 0:
            return
        median_ns = usual.median_ns
        is_long = steps.duration_ns >= context.thresholds[_WARMUP_FACTOR] * median_ns
        is_long &= ~steps.is_profiled
        num_slow = int(np.argmin(is_long)) if not is_long.all() else 0
        extra_ns = float((steps.duration_ns[:num_slow] - median_ns).sum())
        if extra_ns < context.thresholds[_MIN_WARMUP_STEPS] * median_ns:
            return
        gain = Estimate(
            saved_ns=extra_ns / steps.num_steps,
            step_ns=float(steps.duration_ns.mean()),
            basis="what the first steps take beyond the median, spread over all steps",
        )
        is_short = steps.num_steps < _MIN_STEPS_FOR_WARMUP_ALARM or extra_ns < _MIN_WARMUP_ALARM_NS
        first = "the first step" if num_slow == 1 else f"the first {plural(num_slow, 'step')}"
        yield Finding(
            code=self.code,
            title=f"{first} cost {duration(extra_ns)}",
            severity=Severity.LOW if is_short else severity_of(gain),
            summary=f"{first} took {duration(extra_ns)} beyond the median of "
            f"{duration(median_ns)}, {ratio(gain.saved_ratio)} of all steps' time.",
            first_step=int(steps.step[0]),
            last_step=int(steps.step[num_slow - 1]),
            evidence=(
                Evidence(name="slow first steps", value=num_slow, unit="steps"),
                Evidence(name="time beyond the median", value=extra_ns, unit="ns"),
                Evidence(name="median step", value=median_ns, unit="ns"),
            ),
            change="Cache compiled code between launches, and fix shapes before the loop.",
            gain=gain,
            lost_steps=StepLoss(
                step=steps.step[:num_slow],
                lost_ns=(steps.duration_ns[:num_slow] - median_ns).astype(np.float64),
            ),
        )


class SlowStepsOnAllRanks(Rule):
    """Single steps are slow on all ranks, at no interval.

    What it finds: slow steps that do not recur at an interval and cost `spikes_min_lost_ratio` of
    the time or more.

    Why it matters: the median step then understates the time of the run.

    How it is measured: as for TI002, without the steps it explains.

    What to change: look at the named steps in the report's phases; common causes are a file system
    that stalls, other jobs on the hosts, memory that is reclaimed, longer data.

    When it is wrong: machines that share their processors have such steps without any fault of the
    job, and a recording cannot separate the two. It is therefore LOW, unless most of the extra time
    is in a checkpoint or an evaluation.
    """

    code = "TI004"
    name = "slow-steps-on-all-ranks"
    severities = (Severity.LOW, Severity.CRITICAL)
    thresholds = (_MIN_SPIKES_LOST_RATIO, MIN_SPIKES)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        periods = need(context.study.get(_job_periods))
        recurrences = need(context.study.get(_job_recurrences))
        rows = periods.is_slow.copy()
        for recurrence in recurrences:
            rows &= ~recurrence.rows
        num_slow, share = int(np.count_nonzero(rows)), periods.share_of(rows)
        if num_slow < context.thresholds[MIN_SPIKES]:
            return
        if share < context.thresholds[_MIN_SPIKES_LOST_RATIO]:
            return
        gain = _price_slow(context, periods, rows)
        where, ranks, _ = _find_contents(context, periods.step[rows])
        doing = "" if where is None else f", mostly in {where.phase}"
        is_known = where is not None and where.phase in ADVICE
        worst = int(np.argmax(np.where(rows, periods.excess_ns, -1.0)))
        yield Finding(
            code=self.code,
            title=f"{plural(num_slow, 'step')} are far longer than their neighbours"
            f"{doing if is_known else ''}",
            severity=severity_of(gain) if is_known else Severity.LOW,
            summary=f"{plural(num_slow, 'step')} of {count(len(periods))} are far longer than "
            f"their neighbours{doing}, {ratio(share)} of all time; the worst, step "
            f"{int(periods.step[worst])}, by {duration(float(periods.excess_ns[worst]))}.",
            ranks=ranks,
            first_step=int(periods.step[rows][0]),
            last_step=int(periods.step[rows][-1]),
            evidence=(
                Evidence(name="slow steps", value=num_slow, unit="steps"),
                Evidence(name="share of all time", value=share, unit="ratio"),
                Evidence(name="steps", value=", ".join(map(str, periods.step[rows][:8].tolist()))),
                *_contents_evidence(where),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.MEDIUM, text="by the phase that is longer in these steps"
            )
            if is_known
            else Confidence(
                level=ConfidenceLevel.LOW, text="other programs on the hosts would look the same"
            ),
            change=ADVICE[where.phase]
            if is_known and where is not None
            else "Look at what these steps do differently; if nothing, at what else runs on the "
            "hosts.",
            gain=gain,
            lost_steps=_list_lost(periods, rows),
        )


def _list_lost(periods: StepPeriods, rows: Bools) -> StepLoss:
    return StepLoss(step=periods.step, lost_ns=np.where(rows, periods.excess_ns, 0.0))


def _find_lines(
    context: Context, where: PhaseExcess | None, slow: Int64s, ranks: tuple[int, ...]
) -> SampledLines:
    """The lines sampled in these steps, where their extra time is in no phase."""

    def choose(samples: StackSamples) -> Bools:
        is_unnamed = where is not None and where.phase in (BETWEEN_STEPS, UNATTRIBUTED)
        is_between = where is not None and where.phase == BETWEEN_STEPS
        found = samples.find_in_phase("", is_between=is_between)
        return found & is_unnamed & np.isin(samples.step, slow)

    return find_lines(context.study, ranks, choose)


def _measure_extra(
    context: Context, periods: StepPeriods, rows: Bools, spacing: float
) -> tuple[float, float]:
    """What a slow step usually takes beyond the others, and what those take: on devices, where
    they were marked.

    A host that runs ahead loses its lead in such a step and makes it up in the next ones. On a
    device it may be another step that is longer than the one in which the host was late. Where no
    such step was marked, the lead that the host makes up in the `spacing` steps from one to the
    next is taken off what it lost.
    """
    on_host_ns = float(np.median(periods.excess_ns[rows]))
    on_host = on_host_ns, float((periods.period_ns - np.where(rows, periods.excess_ns, 0)).mean())
    timeline = known(context.study.timeline)
    if timeline is None or not timeline.on_device.all():
        return on_host
    is_slow = np.isin(timeline.steps, periods.step[rows])
    if is_slow.all():
        return on_host
    period_ns = (timeline.period_end_ns - timeline.period_start_ns).mean(axis=0)
    usual_ns = float(np.median(period_ns[~is_slow]))
    if is_slow.any():
        extra_ns = float(np.median(period_ns[is_slow])) - usual_ns
        if _MIN_SAME_RATIO * on_host_ns <= extra_ns <= on_host_ns:
            return extra_ns, usual_ns
    if usual_ns <= on_host[1] * (1 + _MAX_HOST_LEAD_RATIO):
        return on_host
    return max(0.0, on_host_ns - spacing * (usual_ns - on_host[1])), usual_ns


def _price_recurring(found: Recurrence, extra_ns: float, usual_ns: float) -> Estimate:
    """The first of them may have taken far longer than all others, and a short recording may have
    one more or less of them than its length allows for."""
    saved_ns = extra_ns * found.num_slow / max(found.num_expected * found.interval, 1)
    return Estimate(
        saved_ns=saved_ns,
        step_ns=usual_ns + saved_ns,
        basis="the median of what these steps take beyond their neighbours, once in each interval",
    )


def _price_slow(context: Context, periods: StepPeriods, rows: Bools) -> Estimate:
    spacing = len(periods) / int(np.count_nonzero(rows))
    extra_ns, _ = _measure_extra(context, periods, rows, spacing)
    ratio_of_host = extra_ns / max(float(np.median(periods.excess_ns[rows])), 1.0)
    return Estimate(
        saved_ns=float(periods.excess_ns[rows].sum() / len(periods)) * min(1.0, ratio_of_host),
        step_ns=float(periods.period_ns.mean()),
        basis="what these steps take beyond their neighbours' median, spread over all steps",
    )


def _find_contents(
    context: Context, slow: Int64s, own: int | None = None
) -> tuple[PhaseExcess | None, tuple[int, ...], list[PhaseExcess]]:
    """The extra phase of the rank whose own steps these are, or that works most in them; that rank,
    if no other works more; and other phases with a name that have a good part of the extra time."""
    rank, is_alone = (own, True) if own is not None else _find_busiest(context, slow)
    found = find_excess(context.study.attempt.ranks[rank], slow)
    first = found[0] if found and found[0].excess_ns > 0 else None
    least_ns = _MIN_BESIDE_RATIO * sum(max(0.0, one.excess_ns) for one in found)
    unnamed = (BETWEEN_STEPS, UNATTRIBUTED)
    beside = [one for one in found[1:] if one.excess_ns > least_ns and one.phase not in unnamed]
    return first, (rank,) if is_alone else (), beside if first is not None else []


def _write_beside(beside: Sequence[PhaseExcess]) -> str:
    parts = [f"{duration(one.excess_ns)} in {one.phase}" for one in beside]
    return f" Of it {', '.join(parts)}." if parts else ""


def _find_busiest(context: Context, slow: Int64s) -> tuple[int, bool]:
    """The rank with most work beyond its other steps, else the lowest; and whether it is alone."""
    lowest = min(context.study.attempt.ranks)
    timeline, work = context.study.timeline, context.study.work
    if isinstance(timeline, Unavailable) or isinstance(work, Unavailable):
        return lowest, False
    is_slow = np.isin(timeline.steps, slow)
    if not is_slow.any() or is_slow.all():
        return lowest, False
    total = work.work_ns.sum(axis=2)
    excess = total[:, is_slow].mean(axis=1) - np.median(total[:, ~is_slow], axis=1)
    first, *others = np.argsort(-excess, kind="stable").tolist()
    is_alone = bool(others) and excess[others[0]] < _MAX_OTHERS_RATIO * excess[first]
    return timeline.ranks[first], is_alone


def _contents_evidence(where: PhaseExcess | None) -> tuple[Evidence, ...]:
    if where is None:
        return ()
    return (Evidence(name=f"extra time in {where.phase}", value=where.excess_ns, unit="ns"),)
