"""Rules about waiting for data, and about what else happens between steps.

A loop over torch's loader, or over `recorder.data(…)`, has a phase `data`; what feeds an evaluation
is a part of that (`analyze.rank.evaluation`). Only this phase is called waiting for data. A loop
over any other iterator fetches between steps, where nothing names it, and other programs do other
things there: TI005 says how long, and guesses nothing. Programs sometimes also save and evaluate
there: a step counts at most `_USUAL` times the rank's median. If stacks were sampled there, TI005
names the line.

One wait that is longer than all others of its rank together is a start, of workers or of a stream:
it counts as the next longest.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.stacks import SampledLines
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.peer_work import group_true_peers, has_messages
from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.analyze.timeline.work import WorkTable
from meshscope.core.unavailable import Missing, Unavailable, known, need
from meshscope.core.verdict.advice import FEED_FASTER, MIN_STALL_RATIO
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.hardware_view import warn_shared
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.wording import be, duration, name_ranks, p_value, plural, ratio
from meshscope.numerics.chance import MIN_STEPS, SIGNIFICANCE_RATIO, binomial_tail
from meshscope.simulate.what_if import Edit
from meshscope.store.read.arrays import Bools, Floats, Int64s

DATA = "data"
MIN_EXCESS_RATIO = Threshold(
    name="input_min_excess_ratio",
    default=0.02,
    meaning="share of the step by which a rank must wait longer for data than its peers",
)
_MIN_BETWEEN_RATIO = Threshold(
    name="between_steps_min_ratio",
    default=0.08,
    meaning="share of the step that ranks usually spend between steps, in no phase",
)
_UNNAMED_MIN_RATIO = 0.08
"""Of the step, for time between steps that nothing names."""
_USUAL = 3.0
_CLEARLY_LONGER = 1.25
"""Times the peers' median, for a step to count against a rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputStalls:
    """Waiting for data by rank: the part shared with its peers, and the rest."""

    ranks: tuple[int, ...]
    is_named: bool
    """Whether it is the phase `data`; otherwise what nothing names between steps."""
    is_stall: Bools
    """Which of the timeline's pieces these are."""
    times_ns: Floats
    """[rank, step], without what the garbage collector took (PA001)."""
    mean_ns: Floats
    """Per rank and step."""
    common_ns: Floats
    """The lower quartile of its peers' means, its own included."""
    p_value: Floats
    """That it waits longer than its peers by chance, corrected for all ranks; 1 without peers."""
    step_ns: float
    are_stages: bool = False
    """No rank has peers: all that fetch were compared."""

    @property
    def excess_ns(self) -> Floats:
        return self.mean_ns - self.common_ns


def _measure_stalls(study: Study) -> InputStalls:
    timeline = need(study.timeline)
    if DATA not in timeline.phases:
        raise Missing("no loader was seen")
    pieces = timeline.pieces
    is_here = pieces.phase == timeline.phases.index(DATA)
    return _measure(study, is_here & (pieces.kind == PieceKind.WORK), is_named=True)


def _measure_between(study: Study) -> InputStalls:
    return _measure(study, _find_between(need(study.timeline)), is_named=False)


def _measure(study: Study, is_stall: Bools, *, is_named: bool) -> InputStalls:
    work, timeline = need(study.work), need(study.timeline)
    collections = known(study.collections)
    own_ns = timeline.pieces.duration_ns - (0 if collections is None else collections.lost_ns)
    times = _sum_by_step(timeline, is_stall, own_ns)
    if is_named:
        times = _shorten_single(times)
    else:
        times = np.minimum(times, _USUAL * np.median(times, axis=1, keepdims=True))
    mean = times.mean(axis=1)
    common, chance = mean.copy(), np.ones(len(mean))
    is_compared = mean > 0 if is_named else np.ones(len(mean), dtype=np.bool_)
    groups = _group_waiting(work, timeline, is_compared)
    everyone = np.flatnonzero(is_compared).tolist()
    are_stages = is_named and not groups and len(everyone) > 1
    for own in [everyone] if are_stages else groups:
        common[own] = np.quantile(mean[own], 0.25, method="lower")
        chance[own] = _test_ranks(times[own], len(mean))
    return InputStalls(
        ranks=work.ranks,
        is_named=is_named,
        is_stall=is_stall,
        times_ns=times,
        mean_ns=mean,
        common_ns=common,
        p_value=chance,
        step_ns=float(work.period_ns.mean()),
        are_stages=are_stages,
    )


def _group_waiting(work: WorkTable, timeline: Timeline, is_compared: Bools) -> list[list[int]]:
    """Peers as for slow ranks (`peer_work`), without those that never fetch: one rank of a group
    may do it for all of them."""
    if isinstance(timeline.layout, Unavailable):
        groups = work.peer_groups()
    else:
        is_piped = has_messages(timeline)
        peers = group_true_peers(timeline.layout, timeline.ranks, is_piped=is_piped)
        groups = tuple(group.indices for group in peers)
    waiting = ([index for index in indices if is_compared[index]] for indices in groups)
    return [own for own in waiting if len(own) > 1]


def _find_between(timeline: Timeline) -> Bools:
    """The pieces between steps that no phase names."""
    pieces = timeline.pieces
    return np.asarray(pieces.is_between & (pieces.phase == 0) & (pieces.kind == PieceKind.WORK))


def _sum_by_step(timeline: Timeline, chosen: Bools, duration_ns: Int64s) -> Floats:
    """[rank, step]"""
    pieces = timeline.pieces
    shape = (len(timeline.ranks), len(timeline.steps))
    rank_index = np.searchsorted(np.array(timeline.ranks), pieces.rank[chosen])
    cell = rank_index.astype(np.int64) * shape[1] + pieces.step[chosen]
    sums = np.bincount(cell, duration_ns[chosen], minlength=shape[0] * shape[1])
    return np.asarray(sums.reshape(shape), dtype=np.float64)


def _shorten_single(times: Floats) -> Floats:
    """[rank, step]: a step with more than half of a rank's time has what the next longest has."""
    if times.shape[1] < MIN_STEPS:
        return times
    next_longest = np.partition(times, -2, axis=1)[:, [-2]]
    is_single = times > times.sum(axis=1, keepdims=True) / 2
    return np.where(is_single, next_longest, times)


def _test_ranks(times: Floats, num_tests: int) -> Floats:
    """The chance that a rank waits clearly longer than the fast half of its peers this often.

    If ranks were alike they would do so equally often: the chance is that of all of them together,
    so that neither ranks that take turns nor a loader that all share make one stand out.
    """
    ordered = np.sort(times, axis=0)
    middle = (len(times) - 2) // 2
    # Without oneself the middle is one further up for those at or below it.
    usual = np.where(times <= ordered[middle], ordered[middle + 1], ordered[middle])
    is_longer = times > _CLEARLY_LONGER * usual
    num_steps = times.shape[1]
    if num_steps < MIN_STEPS:
        return np.ones(len(times))
    rate = float(is_longer.mean())
    counts = np.count_nonzero(is_longer, axis=1).tolist()
    tails = [binomial_tail(count, num_steps, rate) * num_tests for count in counts]
    return np.asarray(np.minimum(tails, 1.0), dtype=np.float64)


def _shorten(timeline: Timeline, stalls: InputStalls, target_ns: Floats) -> Int64s:
    """Durations of all pieces, with each rank's waiting for data cut to a mean per step.

    Each step loses the same share of its usual wait for data.
    """
    pieces = timeline.pieces
    mean = stalls.mean_ns
    lost = np.divide(mean - target_ns, mean, out=np.zeros_like(mean), where=mean > target_ns)
    whole_ns = _sum_by_step(timeline, stalls.is_stall, pieces.duration_ns)
    usual = np.divide(stalls.times_ns, whole_ns, out=np.ones_like(whole_ns), where=whole_ns > 0)
    rank_index = np.searchsorted(np.array(timeline.ranks), pieces.rank)
    duration_ns = pieces.duration_ns
    keep = 1.0 - lost[rank_index] * usual[rank_index, pieces.step]
    shorter = np.rint(duration_ns * keep).astype(np.int64)
    return np.where(stalls.is_stall, shorter, duration_ns)


def _least_ns(context: Context, stalls: InputStalls, threshold: Threshold) -> float:
    """The loss per step from which a finding is made."""
    least = context.thresholds[threshold]
    return stalls.step_ns * (least if stalls.is_named else max(least, _UNNAMED_MIN_RATIO))


def _find_slow(context: Context, stalls: InputStalls) -> Bools:
    # A first stage may have more to fetch than the others by plan: that must be a stall by itself.
    least = MIN_STALL_RATIO if stalls.are_stages else MIN_EXCESS_RATIO
    is_long = stalls.excess_ns >= _least_ns(context, stalls, least)
    return np.asarray(is_long & (stalls.p_value < SIGNIFICANCE_RATIO))


def _find_lines(study: Study, ranks: tuple[int, ...], stalls: InputStalls) -> SampledLines:
    phase, is_between = (DATA, None) if stalls.is_named else ("", True)
    return find_lines(study, ranks, lambda one: one.find_in_phase(phase, is_between=is_between))


def _explain_unnamed(lines: SampledLines) -> str:
    return "" if lines.lines else " Nothing names what happens there."


class SlowLoader(Rule):
    """Some ranks wait for their data, and the others wait for them.

    What it finds: ranks that spend more time in the phase `data` than their peers (ranks that share
    all coordinates except dp, cp and ep; where these are few, the ranks of their tp groups as well;
    where no rank has such peers, all ranks; only those that fetch any), by `input_min_excess_ratio`
    of the step or more, between stages of a pipeline by `input_min_stall_ratio`.

    Why it matters: the slowest loader sets the pace of all ranks.

    How it is measured: time in `data`, gaps between steps included, without what communication held
    up; mean per step minus the lower quartile of the peers' means. A test over steps compares how
    often a rank waits clearly longer than its peers' median with how often all of them do,
    corrected for all ranks. The gain is a replay in which these ranks wait for data as long as
    their peers.

    What to change: look at these ranks' storage, host and share of the data (larger files, longer
    samples); give their loaders more workers.

    When it is wrong: if samples differ in size by design and ranks take turns. It is silent where
    no rank has the phase `data`: TI005 has what passes between steps there. Ranks that share a
    device are faster while one of them idles: less is saved there than the replay says.
    """

    code = "IN001"
    name = "slow-loader"
    thresholds = (MIN_EXCESS_RATIO, MIN_STALL_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all slow ranks together."""
        stalls = need(context.study.get(_measure_stalls))
        timeline = need(context.study.timeline)
        is_slow = _find_slow(context, stalls)
        if not is_slow.any():
            return
        target = np.where(is_slow, stalls.common_ns, stalls.mean_ns)
        ranks = tuple(rank for rank, slow in zip(stalls.ranks, is_slow, strict=True) if slow)
        edit = Edit(
            name=f"data of {name_ranks(ranks)} as fast as their peers'",
            work_ns=_shorten(timeline, stalls, target),
        )
        gain = context.price_edit(edit)
        worst = int(np.argmax(np.where(is_slow, stalls.excess_ns, -1.0)))
        chance = float(stalls.p_value[is_slow].max())
        share = float(stalls.excess_ns[worst]) / stalls.step_ns
        lines = _find_lines(context.study, ranks, stalls)
        names = f"{name_ranks(ranks)} {be(ranks)}"
        own, peers = (float(times[worst]) for times in (stalls.mean_ns, stalls.common_ns))
        yield Finding(
            code=self.code,
            title=f"{names} slow to get data",
            severity=severity_of(gain, otherwise=share),
            summary=f"{names} held up by data: rank {stalls.ranks[worst]} waits {duration(own)} "
            f"for it per step, its peers {duration(peers)}."
            f"{warn_shared(context, stalls.ranks[worst])}{write_lines(lines)}",
            ranks=ranks,
            evidence=(
                Evidence(name=f"data of rank {stalls.ranks[worst]}", value=own, unit="ns"),
                Evidence(name="data of its peers", value=peers, unit="ns"),
                Evidence(name="excess, of the step", value=share, unit="ratio"),
                *list_evidence(lines),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.HIGH,
                text=f"{p_value(chance)} over {plural(len(timeline.steps), 'step')}, corrected for "
                f"{plural(len(stalls.ranks), 'rank')}",
                p_value=chance,
            ),
            change="Look at these ranks' storage and share of the data; give their loaders more "
            "workers or a deeper queue.",
            gain=gain,
            edit=edit,
        )


class InputBound(Rule):
    """All ranks wait for data.

    What it finds: waiting for data that takes `input_min_stall_ratio` of the step or more on most
    ranks that load any.

    Why it matters: devices idle while the loader works; it is often the cheapest thing to fix.

    How it is measured: time in the phase `data` as for IN001; most ranks wait if the part that they
    share with their peers is that long. The gain is a replay in which no rank waits for data: what
    perfect prefetching would save.

    What to change: use more loader workers, a deeper prefetch queue, data in larger files or on
    faster storage, decoding outside the training process, pinned memory.

    When it is wrong: if data comes at the pace of another program on purpose. It is silent where no
    rank has the phase `data`: TI005 has what passes between steps there.
    """

    code = "IN002"
    name = "input-bound"
    thresholds = (MIN_STALL_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        stalls = need(context.study.get(_measure_stalls))
        timeline = need(context.study.timeline)
        limit_ns = _least_ns(context, stalls, MIN_STALL_RATIO)
        is_stalled = stalls.common_ns >= limit_ns
        # Whether all wait is judged by what peers share: one that waits longer is IN001's.
        if not is_stalled.any() or len(timeline.steps) < MIN_STEPS:
            return
        target = np.where(is_stalled, 0.0, stalls.mean_ns)
        ranks = tuple(rank for rank, one in zip(stalls.ranks, is_stalled, strict=True) if one)
        edit = Edit(name="no rank waits for data", work_ns=_shorten(timeline, stalls, target))
        gain = context.price_edit(edit)
        typical = float(np.mean(stalls.mean_ns[is_stalled]))
        share = typical / stalls.step_ns
        lines = _find_lines(context.study, ranks, stalls)
        ending = "s" if len(ranks) == 1 else ""
        yield Finding(
            code=self.code,
            title="training waits for data",
            severity=severity_of(gain, otherwise=share),
            summary=f"{name_ranks(ranks)} wait{ending} {duration(typical)} for data per step, "
            f"{ratio(share)} of it.{write_lines(lines)}",
            ranks=ranks,
            evidence=(
                Evidence(name="data, mean of these ranks", value=typical, unit="ns"),
                Evidence(name="share of the step", value=share, unit="ratio"),
                Evidence(name="ranks that wait", value=len(ranks)),
                *list_evidence(lines),
            ),
            change=FEED_FASTER,
            gain=gain,
            edit=edit,
        )


class WorkBetweenSteps(Rule):
    """Ranks do something else between steps, and training waits.

    What it finds: time between steps in no phase, in most steps, of `between_steps_min_ratio` of
    the step or more. Ranks that spend longer there than their peers are named, with what they spend
    beyond them. If no rank has the phase `data`, a plain iterator may fetch there, or an
    environment act: what all ranks do then is low, with its price.

    Why it matters: nothing trains in that time; if one rank does it, all others wait for it.

    How it is measured: time between the end of a step and the begin of the next, outside of all
    phases and without what communication held up; a step counts at most three times the rank's
    median. Ranks are compared as for IN001. Where stacks were sampled, the finding names the line
    of the program; otherwise nothing says what happens there, and the finding says that. The gain
    is a replay without that time, or with that of the peers.

    What to change: log less often or from another thread, read tensors some steps later, take the
    named line out of the loop; or give it a name with `recorder.phase(…)`.

    When it is wrong: if the time is needed there, as for an environment of reinforcement learning.
    It is silent on ranks with device marks: CP004 looks at what their devices miss.
    """

    code = "TI005"
    name = "work-between-steps"
    thresholds = (_MIN_BETWEEN_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all ranks together."""
        timeline = need(context.study.timeline)
        if len(timeline.steps) < MIN_STEPS:
            return
        between = need(context.study.get(_measure_between))
        has_loader = DATA in timeline.phases
        is_long = between.mean_ns >= between.step_ns * context.thresholds[_MIN_BETWEEN_RATIO]
        is_long &= ~timeline.on_device
        if not is_long.any():
            return
        is_slow = is_long & _find_slow(context, between)
        is_meant = is_slow if is_slow.any() else is_long
        ranks = tuple(rank for rank, one in zip(between.ranks, is_meant, strict=True) if one)
        rest = between.common_ns if is_slow.any() else np.zeros_like(between.mean_ns)
        edit = Edit(
            name=f"{name_ranks(ranks)} without time between steps",
            work_ns=_shorten(timeline, between, np.where(is_meant, rest, between.mean_ns)),
        )
        gain = context.price_edit(edit)
        typical = float(np.median(between.mean_ns[is_meant]))
        share = float(np.median((between.mean_ns - rest)[is_meant])) / between.step_ns
        lines = _find_lines(context.study, ranks, between)
        is_all = len(ranks) == len(between.ranks)
        spend = "spends" if len(ranks) == 1 else "spend"
        peers = float(np.median(rest[is_meant]))
        beside = f", peers {duration(peers)}" if is_slow.any() else ""
        severity = severity_of(gain, otherwise=share)
        if is_all and not has_loader:
            severity = min(severity, Severity.LOW)
        yield Finding(
            code=self.code,
            title=f"{name_ranks(ranks)} {spend} time between steps",
            severity=severity,
            summary=f"{name_ranks(ranks)} {spend} {duration(typical)} between steps in no phase"
            f"{beside}: {ratio(share)} of a step.{_explain_unnamed(lines)}{write_lines(lines)}",
            ranks=() if is_all else ranks,
            evidence=(
                Evidence(name="time between steps", value=typical, unit="ns"),
                Evidence(name="share of the step", value=share, unit="ratio"),
                *list_evidence(lines),
            ),
            change="Take it out of the loop, do it less often or in another thread; give it a name "
            "with recorder.phase(…) if it has to be there.",
            gain=gain,
            edit=edit,
        )
