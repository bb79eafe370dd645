"""Rules about ranks that are slower than others that do the same work."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from meshscope.analyze.rank.stacks import NO_LINES, SampledLines
from meshscope.analyze.stragglers.change_date import Dated, date_change
from meshscope.analyze.stragglers.load_imbalance import LoadImbalance, measure_load_imbalance
from meshscope.analyze.stragglers.stragglers import (
    FailSlowRank,
    FailSlowSet,
    SlowRank,
    SlowSet,
)
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.peer_work import PeerWork
from meshscope.analyze.timeline.run_weights import weigh_steps
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.core.verdict.severity import Severity, grade
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.relief import even_load, relieve_fail_slow, relieve_slow
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.views.batches import MoreData, find_more_data
from meshscope.diagnose.views.hardware_view import (
    describe_samples,
    describe_slow_device,
    list_sampled,
    name_cause,
    price_slow,
)
from meshscope.diagnose.views.own_parts import MAX_OWN_PART_RATIO, OWN_PART, is_own_part
from meshscope.diagnose.views.sampled_stacks import find_lines, list_evidence, write_lines
from meshscope.diagnose.views.shared_cores import is_queueing, may_be_queueing
from meshscope.diagnose.wording import be, capitalize, duration, name_ranks, p_value, plural, ratio
from meshscope.numerics.chance import SIGNIFICANCE_RATIO, bound_share
from meshscope.numerics.paired_excess import Effect
from meshscope.numerics.persistence import MIN_EFFECT_RATIO
from meshscope.simulate.edits import equalise
from meshscope.simulate.ledger.peer_cells import Place

MIN_SLOW_RATIO = Threshold(
    name="slow_rank_min_effect_ratio",
    default=MIN_EFFECT_RATIO,
    minimum=MIN_EFFECT_RATIO,
    meaning="more work than its peers, median over steps, from which a rank is called slow",
)
_MIN_FAIL_SLOW_RATIO = Threshold(
    name="fail_slow_min_shift_ratio",
    default=0.10,
    minimum=0.10,
    meaning="rise of a rank's work between two levels, from which it is called fail-slow",
)
_MIN_IMBALANCE_VARIATION_RATIO = Threshold(
    name="imbalance_min_variation_ratio",
    default=0.15,
    meaning="variation of work over peers, median over steps, from which load is called uneven",
)
_MIN_IMBALANCE_LOST_RATIO = Threshold(
    name="imbalance_min_lost_ratio",
    default=0.05,
    meaning="share of the step that even work of peers would save at most",
)


class SlowRankRule(Rule):
    """A rank works persistently longer than its peers.

    What it finds: ranks that do the same work as others and take longer for it, step after step.

    Why it matters: all others wait for them at the next operation, so the job runs at their speed,
    and all other ranks show it as waiting.

    How it is measured: work is time in steps in which no operation holds the rank up. Peers share
    all coordinates except dp, cp and ep, and except tp if these are fewer than four. The rank must
    be slower than all, or most, peers that are not slow in more steps than chance allows (exact
    binomial tail, steps that repeat each other counted as fewer, Holm's correction for ranks and
    phases, 1 % per run), and its median work must exceed theirs by `slow_rank_min_effect_ratio`
    with the bootstrap interval above half of that. The gain is replayed with the peers' median work
    instead of its own. If the driver was read (table `hardware`) and the clocks of its device are
    behind those of the other devices, they are named. Kernel samples say what a rank on a device is
    slow at: its kernels take longer, or the device idles because its host launches late. They also
    name ranks whose peers wait unseen. If the rank is given larger batches or longer sequences than
    its peers, that is named, with what to do about it. What the rank has more of that than its
    peers, but no more than these wait longer, is the gain where no replay can tell it: if it misses
    the measured step, and for kernels of ranks that share a device, since they slow each other
    down.

    What to change: look at the host of the rank: clocks and temperature, other processes, cores it
    is bound to, memory it swaps, its links; compare with a run on another host.

    When it is wrong: if peers are given different work on purpose. It is LOW if the upper end of
    the interval is more than ten times the lower one, as another program on the host makes it,
    unless the rank is known not to have waited for its cores more than others; and, below a tenth
    of a step, in phases in which no other rank does anything, which may be its part of training.
    It does not see more than half of the peers being slow, nor a rank without peers. Ranks that
    share a device are faster while one of them idles: a late host then costs less than the replay
    says.
    """

    code = "ST001"
    name = "slow-rank"
    thresholds = (MIN_SLOW_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per set of ranks that lose about as much and share nothing."""
        for slow_set in _slow_sets(context):
            if not slow_set.shared:
                phases = _name_phases(slow_set.slow[0].main_phases)
                why = name_cause(context, slow_set.ranks)
                title = f"{name_ranks(slow_set.ranks)} {be(slow_set.ranks)} slow{phases}{why}"
                yield _describe_slow(self.code, title, slow_set, context, _FIX_RANK)


class SlowSetRule(Rule):
    """Slow ranks share a host, a pipeline stage, a tp group or a replica.

    What it finds: several ranks that are slow by about the same amount and have one thing in
    common.

    Why it matters: the cause is what they share, and fixing only one of them saves nothing.

    How it is measured: as for a slow rank; ranks whose excess is at least half of the worst one's
    are one set. What they share must distinguish them from other ranks, and they must be at least
    half of those that have it.

    What to change: look at what they share: the host's power limit, cooling, other jobs or network
    card; the stage's layers; the group's placement.

    When it is wrong: if traits coincide, such as a tp group that fills a host: all are named.
    """

    code = "ST002"
    name = "slow-set"
    thresholds = (MIN_SLOW_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        for slow_set in _slow_sets(context):
            if slow_set.shared:
                trait = slow_set.shared[0]
                whole = "all ranks" if trait.is_whole else name_ranks(slow_set.ranks)
                phases = _name_phases(slow_set.slow[0].main_phases)
                title = f"{whole} of {trait.name} are slow{phases}"
                yield _describe_slow(self.code, title, slow_set, context, _FIX_SET)


class FailSlowRule(Rule):
    """A rank became slow during the run.

    What it finds: ranks whose work rose at some step, relative to the others, and whether they
    recovered.

    Why it matters: hardware that throttles, a new neighbour, a memory error that is corrected over
    and over: the run goes on, slower, and nothing fails.

    How it is measured: work relative to the rank's usual and to the lower quartile of its peers in
    the step (of all ranks if it has no peers); the interval of steps that stands out most in a
    regression that allows for lasting noise; a rise of `fail_slow_min_shift_ratio` or more,
    confirmed by shuffling. From 20 steps on. The gain is spread over all steps of the run.

    What to change: look at what happened on the host around the first slow step: clocks, errors in
    the kernel's log, jobs that began; restart without the host.

    When it is wrong: if a rank's own work changes by plan. Changes that come slowly are dated near
    their middle.
    """

    code = "ST003"
    name = "fail-slow"
    thresholds = (_MIN_FAIL_SLOW_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per set of ranks with the same onset."""
        stragglers = need(context.study.stragglers)
        least = context.thresholds[_MIN_FAIL_SLOW_RATIO]
        for fail_set in stragglers.fail_slow_sets:
            if fail_set.slow[0].change.shift_ratio >= least:
                yield _describe_fail_slow(self.code, fail_set, context)


class UnevenLoadRule(Rule):
    """Work is uneven over peers, and no single rank is the cause.

    What it finds: steps in which one peer has much more work than the others, mostly a different
    one each time.

    Why it matters: all ranks wait for the one with most work in each step.

    How it is measured: largest minus mean work of peers, step by step, without what slow ranks and
    pauses account for, and with ranks that are always fast counted like the others; the variation
    must reach `imbalance_min_variation_ratio` and the loss `imbalance_min_lost_ratio`. The gain is
    replayed with the mean for all peers.

    What to change: give ranks batches of equal cost: sort or pack sequences by length, balance
    experts.

    When it is wrong: on machines with shared cores, noise is equally uneven. It is therefore LOW
    where threads waited for their cores about as long, or where that was not recorded, and MEDIUM
    at most.
    """

    code = "ST004"
    name = "uneven-load"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (_MIN_IMBALANCE_VARIATION_RATIO, _MIN_IMBALANCE_LOST_RATIO)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one; none where sequence lengths explain it."""
        work, suspects = need(context.study.peer_work), need(context.study.suspects)
        sequence, timeline = known(context.study.sequence_imbalance), need(context.study.timeline)
        if sequence is not None and sequence.is_found:
            return
        own = _raise_fast(replace(work, total_ns=work.total_ns - suspects.excess_ns))
        load = measure_load_imbalance(own)
        if load is None:
            return
        is_uneven = load.variation_ratio >= context.thresholds[_MIN_IMBALANCE_VARIATION_RATIO]
        if is_uneven and load.lost_ratio >= context.thresholds[_MIN_IMBALANCE_LOST_RATIO]:
            yield _describe_load(self.code, load, own, timeline, context)


def _raise_fast(work: PeerWork) -> PeerWork:
    """Ranks that are always faster than the median of their peers at that: nobody waits for them.

    A mean over peers that counted them would be below what all others need.
    """
    total = work.total_ns.copy()
    for group in work.groups:
        columns = list(group.indices)
        usual = np.median(total[:, columns], axis=0)
        total[:, columns] += np.maximum(np.median(usual) - usual, 0.0)
    return replace(work, total_ns=total)


_MIN_LEADER_RATIO = 0.75
"""Of the steps that a rank has most in, by the lower end: then it is about the rank."""
_MAX_STEADY_FACTOR = 10.0
"""Upper over lower end of the interval of an effect that belongs to a rank."""
_FIX_RANK = (
    "Look at the rank's host: clocks and temperature, other processes, bound cores, swapping; "
    "then run once without it."
)
_FIX_SET = "Look at what these ranks share before looking at any one of them."


_FIX_DEVICE = (
    "Look at the device: its power limit, cooling and set clocks (nvidia-smi -q -d PERFORMANCE); "
    "then run once without it."
)


def _slow_sets(context: Context) -> list[SlowSet]:
    stragglers = need(context.study.stragglers)
    least = context.thresholds[MIN_SLOW_RATIO]
    return [found for found in stragglers.slow_sets if found.slow[0].effect.ratio >= least]


def _name_phases(phases: tuple[str, ...]) -> str:
    """`` in forward``, `` in forward and backward``."""
    named = [name or "code without a phase" for name in phases]
    return f" in {' and '.join(named)}" if named else ""


def _describe_slow(
    code: str, title: str, slow_set: SlowSet, context: Context, change: str
) -> Finding:
    worst = slow_set.slow[0]
    work, timeline = need(context.study.peer_work), need(context.study.timeline)
    share = worst.excess_ns / work.step_ns if work.step_ns else 0.0
    edit = relieve_slow(timeline, slow_set, work)
    gain = price_slow(context, slow_set.ranks, context.price_edit(edit))
    device = describe_slow_device(context, worst.rank)
    is_doubtful = _is_unsteady(worst.effect) and may_be_queueing(context, slow_set.ranks, share)
    is_doubtful |= is_queueing(context, slow_set.ranks, share)
    phases = [Place(phase=name, is_between=False) for name in worst.main_phases]
    is_theirs = share < MAX_OWN_PART_RATIO and is_own_part(timeline, slow_set.ranks, phases)
    more = find_more_data(context.study, worst.rank, worst.reference, worst.effect.ratio)
    lines = _find_lines(context.study, worst)
    return Finding(
        code=code,
        title=title if more is None else f"{title}: {more.what}",
        # Fixing a rank evens out its noise too; it cannot save more than its excess.
        severity=min(
            severity_of(gain, otherwise=share),
            grade(share),
            Severity.LOW if is_doubtful or is_theirs else Severity.CRITICAL,
        ),
        summary=_summarize_slow(slow_set)
        + ("" if more is None else more.text)
        + describe_samples(context, worst.rank)
        + (f" Rank {worst.rank}'s device ran at {device}." if device else "")
        + write_lines(lines),
        ranks=slow_set.ranks,
        evidence=(
            *_list_evidence(slow_set, work.step_ns),
            *list_sampled(context, slow_set.ranks),
            *_list_devices(slow_set.ranks, context),
            *(() if more is None else more.evidence),
            *list_evidence(lines),
        ),
        confidence=_state_confidence(
            worst,
            need(context.study.stragglers).num_tests,
            is_doubtful=is_doubtful,
            is_theirs=is_theirs,
        ),
        change=_choose_change(change, device, more, lines),
        gain=gain,
        edit=known(edit),
    )


def _choose_change(change: str, device: str, more: MoreData | None, lines: SampledLines) -> str:
    if more is not None:
        return more.change
    if lines.lines:
        return "Look at what this line does there, and why its peers do not."
    return _FIX_DEVICE if device else change


def _find_lines(study: Study, slow: SlowRank) -> SampledLines:
    """What a rank does in code without a phase: nothing else names it."""
    if slow.main_phases != ("",):
        return NO_LINES
    return find_lines(
        study, (slow.rank,), lambda samples: samples.find_in_phase("", is_between=False)
    )


def _summarize_slow(slow_set: SlowSet) -> str:
    worst = slow_set.slow[0]
    phase = "" if worst.tested_phase is None else _name_phases((worst.tested_phase,))
    first = capitalize(name_ranks((worst.rank,)))
    traits = " and ".join(trait.name for trait in slow_set.shared)
    others = ""
    if len(slow_set.slow) > 1:
        rest = [slow.rank for slow in slow_set.slow[1:]]
        others = f"; {name_ranks(rest)} likewise"
        others += f", all of {traits}" if traits else ", with nothing in common"
    return (
        f"{first} works {ratio(worst.effect.ratio)} longer than its peers{phase}, "
        f"{duration(worst.excess_ns)} per step{_split_phases(worst.phase_excess_ns)}{others}."
    )


def _split_phases(by_phase: Mapping[str, float]) -> str:
    if len(by_phase) < 2:
        return ""
    parts = [f"{duration(ns)} in {name or 'no phase'}" for name, ns in by_phase.items()]
    return f" ({', '.join(parts)})"


def _list_evidence(slow_set: SlowSet, step_ns: float) -> tuple[Evidence, ...]:
    worst = slow_set.slow[0]
    evidence = [
        Evidence(name=f"excess work of rank {slow.rank} per step", value=slow.excess_ns, unit="ns")
        for slow in slow_set.slow[:8]
    ]
    evidence += [
        Evidence(name="effect, lower end", value=worst.effect.low_ratio, unit="ratio"),
        Evidence(name="effect", value=worst.effect.ratio, unit="ratio"),
        Evidence(name="effect, upper end", value=worst.effect.high_ratio, unit="ratio"),
        Evidence(name="steps slower than all peers", value=worst.candidate.num_steps_last),
        Evidence(name="steps compared", value=worst.candidate.num_steps),
        Evidence(name="median step", value=step_ns, unit="ns"),
    ]
    evidence += [
        Evidence(name=f"excess in {name or 'no phase'}", value=ns, unit="ns")
        for name, ns in worst.phase_excess_ns.items()
    ]
    evidence += [Evidence(name="shared", value=trait.name) for trait in slow_set.shared]
    return tuple(evidence)


def _list_devices(ranks: Iterable[int], context: Context) -> Iterable[Evidence]:
    """Devices whose clocks are behind their peers'."""
    for rank in list(ranks)[:8]:
        device = describe_slow_device(context, rank)
        if device:
            yield Evidence(name=f"clock of rank {rank}'s device", value=device)


def _is_unsteady(effect: Effect) -> bool:
    return effect.high_ratio > _MAX_STEADY_FACTOR * max(effect.low_ratio, 0.0)


def _state_confidence(
    worst: SlowRank, num_tests: int, *, is_doubtful: bool, is_theirs: bool
) -> Confidence:
    found, effect = worst.candidate, worst.effect
    text = (
        f"{p_value(worst.adjusted_p)} over {found.num_steps} steps (counted as "
        f"{found.num_effective_steps} independent ones), corrected for {num_tests} tests; "
        f"effect {ratio(effect.low_ratio)} to {ratio(effect.high_ratio)}"
    )
    if is_doubtful:
        why = "it varies so much" if _is_unsteady(effect) else "it waited so long for a core"
        text += f"; {why} that another program on the host would look the same"
        return Confidence(level=ConfidenceLevel.LOW, text=text, p_value=worst.adjusted_p)
    if is_theirs:
        text += f"; {OWN_PART}"
        return Confidence(level=ConfidenceLevel.LOW, text=text, p_value=worst.adjusted_p)
    # A rank that few sampled steps show stands out by its distance, not by a count of steps.
    is_counted = worst.adjusted_p < SIGNIFICANCE_RATIO and not _is_unsteady(effect)
    level = ConfidenceLevel.HIGH if is_counted else ConfidenceLevel.MEDIUM
    return Confidence(level=level, text=text, p_value=worst.adjusted_p)


def _describe_fail_slow(code: str, fail_set: FailSlowSet, context: Context) -> Finding:
    worst = fail_set.slow[0]
    work, timeline = need(context.study.peer_work), need(context.study.timeline)
    edit = relieve_fail_slow(timeline, fail_set, work)
    onset, recovery = _date(worst, context)
    first_step, last_step = onset.step, None if recovery is None else recovery.step - 1
    weight = weigh_steps(timeline)
    inside = weight[worst.change.onset : worst.change.recovery]
    share = worst.excess_ns * float(inside.sum() / weight.sum()) / work.step_ns
    gain = context.price_edit(edit)
    phases = _name_phases(worst.main_phases)
    when = f"from step {first_step} on" if last_step is None else f"until step {last_step}"
    if worst.change.onset and last_step is not None:
        when = f"from step {first_step} {when}"
    happened = f"became slow at step {first_step}"
    if not worst.change.onset:
        happened = f"{'was' if len(fail_set.ranks) == 1 else 'were'} slow {when}"
    return Finding(
        code=code,
        title=f"{name_ranks(fail_set.ranks)} {happened}{phases}",
        severity=severity_of(gain, otherwise=share),
        summary=f"{capitalize(name_ranks((worst.rank,)))} works "
        f"{ratio(worst.change.shift_ratio)} longer {when}, "
        f"{duration(worst.excess_ns)} per step{_split_phases(worst.phase_excess_ns)}"
        f"{_name_traits(fail_set)}.{_describe_dates(onset, recovery)}",
        ranks=fail_set.ranks,
        first_step=first_step,
        last_step=last_step,
        evidence=(
            Evidence(name="rise of work", value=worst.change.shift_ratio, unit="ratio"),
            Evidence(name="rise of work per slow step", value=worst.excess_ns, unit="ns"),
            *_list_dates(onset),
            *(Evidence(name="shared", value=trait.name) for trait in fail_set.shared),
            *_list_devices(fail_set.ranks, context),
        ),
        confidence=Confidence(
            level=ConfidenceLevel.HIGH,
            text=f"{p_value(worst.adjusted_p)} for a change of level, corrected for all ranks",
            p_value=worst.adjusted_p,
        ),
        change="Find out what happened on the host at that step: clocks, kernel log, other jobs.",
        gain=gain,
        edit=known(edit),
    )


def _date(worst: FailSlowRank, context: Context) -> tuple[Dated, Dated | None]:
    """When it became slow, and when it was no longer, if it recovered."""
    timeline, change = need(context.study.timeline), worst.change
    recording = context.study.attempt.ranks[worst.rank]
    is_over = change.recovery < len(timeline.steps)
    onset = date_change(recording, timeline, change.onset)
    return onset, date_change(recording, timeline, change.recovery) if is_over else None


def _describe_dates(onset: Dated, recovery: Dated | None) -> str:
    """How certain dates are that lie between two windows that were looked at."""
    parts = [
        f"{what} between steps {found.low_step} and {found.high_step}"
        for what, found in (("became slow", onset), ("recovered", recovery))
        if found is not None and found.is_between_windows
    ]
    if not parts:
        return ""
    return f" It {' and '.join(parts)}, by the lengths of steps that were not looked at in full."


def _list_dates(onset: Dated) -> tuple[Evidence, ...]:
    if not onset.is_between_windows:
        return ()
    return (
        Evidence(name="first slow step, earliest", value=onset.low_step, unit="step"),
        Evidence(name="first slow step, latest", value=onset.high_step, unit="step"),
    )


def _name_traits(fail_set: FailSlowSet) -> str:
    if len(fail_set.slow) < 2:
        return ""
    rest = name_ranks([slow.rank for slow in fail_set.slow[1:]])
    traits = " and ".join(trait.name for trait in fail_set.shared)
    return f"; {rest} likewise" + (f", all of {traits}" if traits else "")


def _find_peers(work: PeerWork, rank: int) -> tuple[int, ...]:
    index = work.ranks.index(rank)
    groups = (group.indices for group in work.groups if index in group.indices)
    return tuple(work.ranks[one] for one in next(groups, ()) if one != index)


def _describe_load(
    code: str, load: LoadImbalance, work: PeerWork, timeline: Timeline, context: Context
) -> Finding:
    # One rank that nearly always has most is slow, or given more: its peers' work is the price.
    share = 0.0 if load.takes_turns else bound_share(load.leader_ratio, load.num_steps)[0]
    peers = _find_peers(work, load.leader) if share >= _MIN_LEADER_RATIO else ()
    relieved = known(equalise(timeline, (load.leader,), peers=peers)) if peers else None
    edit = even_load(timeline, work) if relieved is None else relieved
    gain = context.price_edit(edit)
    if load.takes_turns:
        who = "ranks take turns"
    else:
        low, high = bound_share(load.leader_ratio, load.num_steps)
        who = (
            f"rank {load.leader} has most in {ratio(load.leader_ratio)} of "
            f"{plural(load.num_steps, 'step')} ({ratio(low)} to {ratio(high)})"
        )
    cost = load.lost_ratio if isinstance(gain, Unavailable) else gain.saved_ratio
    # Of threads that waited for no core, work itself is uneven.
    is_doubtful = may_be_queueing(context, (), cost)
    most = Severity.LOW if is_doubtful else Severity.MEDIUM
    return Finding(
        code=code,
        title=f"rank {load.leader} has more work than its peers"
        if peers
        else "work is uneven between peers",
        severity=min(most, severity_of(gain, otherwise=load.lost_ratio)),
        summary=f"Work varies by {ratio(load.variation_ratio)} between peers, and {who}: the "
        f"busiest has {duration(load.lost_ns)} more than the mean.",
        ranks=(load.leader,) if peers else (),
        evidence=(
            Evidence(name="variation between peers", value=load.variation_ratio, unit="ratio"),
            Evidence(name="largest minus mean work", value=load.lost_ns, unit="ns"),
            Evidence(name="steps led by the same rank", value=load.leader_ratio, unit="ratio"),
        ),
        confidence=Confidence(
            level=ConfidenceLevel.LOW if is_doubtful else ConfidenceLevel.MEDIUM,
            text="threads that wait for cores would look the same"
            if is_doubtful
            else f"in {plural(load.num_steps, 'step')}, in which threads hardly waited for cores",
        ),
        change=f"Compare rank {load.leader}'s batches and host with its peers'."
        if peers
        else "Give ranks batches of equal cost: sort or pack sequences by length.",
        gain=gain,
        edit=edit,
    )
