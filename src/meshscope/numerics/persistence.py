"""Which of a group of peers are persistently slow: exact tail, corrected, and an effect size.

Peers do the same work in every step. If they were alike, each would be the last of N in a step
with probability 1/N, and the count over S independent steps would be Binomial(S, 1/N). Two slow
ranks share being last, so k ranks that stand out are taken out together: each is compared with
the N - k others. A rank slower than all but m - 1 of these is among the k + m - 1 slowest of the
step, so by chance its count is at most Binomial(S, (k + m - 1)/N), whichever k ranks were picked.
The tail is exact; up to four levels m are tried and corrected for, sizes k share the error as
1/k^2, ranks and phases by Holm's step-down.

Steps that repeat each other count as fewer (`paired_excess`); how far they do is learnt from peers
that do not stand out, or, where these are few, from the rank's own steps around a clear rise. Many
peers that each differ a little for the whole run have one that differs most, step after step: its
effect must also be beyond what the spread of the others' effects makes of so many ranks. A rank is
slow if it passes both and works at least MIN_EFFECT_RATIO more than the others in the median step,
with the lower end of the interval above half of that, in at least MIN_STEPS steps.

Wrong where more than half of the peers are slow: then the others look fast and no rank is named.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.numerics.chance import (
    MIN_STEPS,
    SIGNIFICANCE_RATIO,
    binomial_tail,
    student_tail,
)
from meshscope.numerics.change_point import clip_spikes
from meshscope.numerics.paired_excess import (
    MAD_TO_DEVIATION,
    Effect,
    Indices,
    measure_correlation_time,
    measure_effect,
    measure_excess,
    measure_scatter,
    take_median,
)
from meshscope.store.read.arrays import Floats

MIN_EFFECT_RATIO = 0.05
"""Least excess over its peers of a slow rank."""
_CLEAR_DEVIATIONS = 45.0
"""Over the root of the steps: an effect so many times the scatter over steps is no disturbance
that wanders, which would have been seen to move within the run. Of AR(1) noise with correlation
0.95 one series in a thousand reaches 50 at 10 steps, 42 at 20, 37 at 30 and more."""
_CLEAR_GROWTH = 0.15
"""Its power of half the number of peers: a tenth of the chance is reached by 1.4 times as much."""
_CLEAR_RISE_ERRORS = 6.0
"""Of a line over the run, in standard errors of it that take in how far steps repeat each other.
One in a hundred series of AR(1) noise with correlation 0.95 makes 2 at 200 steps and more."""
_MORE_RISE_ERRORS = 60.0
"""Over the number of steps: the same makes 4 at 50 steps and 8 at 20."""
_MIN_POOLED_PEERS = 8
"""With this many the autocorrelation is known well enough to be used on a clear effect too."""
_MIN_REFERENCE_PEERS = 3
"""With this many the autocorrelation is theirs alone."""
_MIN_SPREAD_PEERS = 32
"""With this many their effects show how far apart ranks are that nothing slows down."""
_LEVELS = (0.1, 0.25, 0.5)
"""Shares of the peers that may be slower in a step, besides none."""
_MAX_ROUNDS = 8
_SIZE_SHARE = 6 / math.pi**2
"""The sum over k of 1/k^2 is pi^2/6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rank of one group that stands out by its effect, with its chance."""

    index: int
    """Column in the group's matrix."""
    num_steps: int
    """Steps compared."""
    num_effective_steps: int
    """Independent steps they are worth."""
    num_steps_last: int
    """Steps in which it was slower than every peer that does not stand out."""
    num_peers: int
    """Peers that do not stand out: those it is compared with."""
    p_value: float
    """Chance of so many, were all alike; the share of its size taken in, ranks not yet."""
    effect: Effect
    excess_ns: float
    """Median over steps of its work less the median of the others."""


def correct_holm(p_values: Sequence[float], *, num_tests: int | None = None) -> list[float]:
    """Adjusted p-values of Holm's step-down, in the order given.

    `num_tests` is the number of tests there were, where only the smallest are passed.
    """
    count = max(num_tests or 0, len(p_values))
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[index] * (count - done)))
        adjusted[index] = highest
    return adjusted


def find_candidates(work_ns: Floats) -> list[Candidate]:
    """Peers that stand out in work [step, peer] by effect and chance; uncorrected for ranks and
    phases: those that no correction can make slow are left out."""
    work_ns = work_ns[np.isfinite(work_ns).all(axis=1)]
    num_steps, num_peers = work_ns.shape
    if num_steps < MIN_STEPS or num_peers < 2:
        return []
    chosen, excess = _choose_outstanding(work_ns)
    if not len(chosen) or len(excess) < MIN_STEPS:
        return []
    return _judge(work_ns, excess, chosen)


def is_slow(candidate: Candidate, adjusted_p: float) -> bool:
    """Both conditions, after correction for ranks and phases."""
    effect = candidate.effect
    return (
        adjusted_p < SIGNIFICANCE_RATIO
        and effect.ratio >= MIN_EFFECT_RATIO
        and effect.low_ratio >= MIN_EFFECT_RATIO / 2
    )


def find_persistent(work_ns: Floats) -> list[Candidate]:
    """The slow ranks of a single group and phase: work [step, peer]."""
    candidates = find_candidates(work_ns)
    adjusted = correct_holm([c.p_value for c in candidates], num_tests=work_ns.shape[1])
    return [c for c, p in zip(candidates, adjusted, strict=True) if is_slow(c, p)]


def _choose_outstanding(work_ns: Floats) -> tuple[Indices, Floats]:
    """Columns whose effect over the others reaches MIN_EFFECT_RATIO, at most half of all.

    Also the excess over those others. The first reference is the faster half, so that several
    slow ranks do not hide each other.
    """
    num_peers = work_ns.shape[1]
    most = num_peers // 2
    typical = take_median(work_ns, axis=0)
    order = np.argsort(typical, kind="stable")
    reference = np.sort(order[: num_peers - most])
    previous: Indices | None = None
    for _ in range(_MAX_ROUNDS):
        excess = measure_excess(work_ns, reference)
        if not len(excess):
            break
        effect = take_median(excess, axis=0)
        above = np.flatnonzero(effect >= MIN_EFFECT_RATIO)
        chosen = np.sort(above[np.argsort(-effect[above], kind="stable")][:most])
        if previous is not None and np.array_equal(chosen, previous):
            return chosen, excess
        reference = np.setdiff1d(np.arange(num_peers), chosen)
        previous = chosen
        if not len(chosen):
            break
    # Ranks that come and go between rounds stand at the threshold: none of them stands out.
    return np.empty(0, dtype=np.intp), np.empty((0, num_peers))


def _judge(work_ns: Floats, excess: Floats, chosen: Indices) -> list[Candidate]:
    """Those of the chosen whose chance is small enough for any correction to leave it so."""
    num_steps, num_peers = excess.shape
    others = np.setdiff1d(np.arange(num_peers), chosen)
    times = _measure_times(excess, chosen, others)
    limits = _find_limits(excess[:, others], len(chosen), num_peers)
    counts = [np.count_nonzero(excess[:, chosen] > limit[:, None], axis=0) for limit, _ in limits]
    base_ns = take_median(work_ns[:, others], axis=1)
    chances = [chance for _, chance in limits]
    effects = take_median(excess, axis=0)
    spread_chances = _find_spread_chances(effects[chosen], effects[others])
    known: dict[tuple[int, ...], float] = {}
    candidates = []
    for column, index in enumerate(chosen.tolist()):
        num_effective = max(int(num_steps / times[column]), 1)
        own_counts = [int(count[column]) for count in counts]
        key = (num_effective, *own_counts)
        if key not in known:  # ranks in the middle of many share theirs
            known[key] = _find_chance(
                own_counts, chances, num_steps=num_steps, num_effective=num_effective
            )
        chance = known[key]
        p_value = min(1.0, chance * len(chosen) ** 2 / _SIZE_SHARE)
        p_value = max(p_value, spread_chances[column])
        if p_value >= SIGNIFICANCE_RATIO:
            continue
        own = excess[:, index]
        candidates.append(
            Candidate(
                index=index,
                num_steps=num_steps,
                num_effective_steps=num_effective,
                num_steps_last=int(counts[0][column]),
                num_peers=len(others),
                p_value=p_value,
                effect=measure_effect(own, block_steps=math.ceil(2 * times[column])),
                excess_ns=float(np.median(work_ns[:, index] - base_ns)),
            )
        )
    return candidates


def _measure_times(excess: Floats, chosen: Indices, others: Indices) -> list[float]:
    """Steps of each chosen rank that are worth one independent step."""
    num_peers = excess.shape[1]
    # One of two peers is the other's reference: its own excess is zero, and says nothing.
    plain, raised = measure_correlation_time(excess if len(others) > 1 else excess[:, chosen])
    clear_time = plain if num_peers >= _MIN_POOLED_PEERS else 1.0
    # What changes on the rank itself must not make its steps count less.
    has_reference = len(others) >= _MIN_REFERENCE_PEERS
    of_others = measure_correlation_time(excess[:, others])[1] if has_reference else raised
    times = []
    for index, is_clear in zip(
        chosen.tolist(), _are_clear(excess[:, chosen], num_peers), strict=True
    ):
        if is_clear:
            times.append(clear_time)
        elif has_reference:
            times.append(of_others)
        else:
            whole = max(measure_correlation_time(excess[:, [index]])[0], raised)
            times.append(min(whole, _measure_time_around_rise(excess[:, index])))
    return times


def _measure_time_around_rise(own: Floats) -> float:
    """Steps of a rank without peers to learn from that are worth one, if it grows slower.

    A rise over the run is no noise if it is far beyond what steps, repeating each other as they do
    around it, would make by chance; infinite where it is not. Noise that wanders repeats itself
    around any line, too.
    """
    num_steps = len(own)
    own = clip_spikes(own[:, None])[:, 0]
    time = np.linspace(-0.5, 0.5, num_steps)
    slope = float(time @ own / (time @ time))
    residual = own - own.mean() - slope * time
    _, raised = measure_correlation_time(residual[:, None])
    error = float(residual.std()) * math.sqrt(12 * raised / num_steps)
    needed = _CLEAR_RISE_ERRORS + _MORE_RISE_ERRORS / num_steps
    return raised if slope >= needed * error else math.inf


def _find_limits(others: Floats, num_chosen: int, num_peers: int) -> list[tuple[Floats, float]]:
    """Per level: the value [step] to exceed, and the chance to exceed it in a step.

    With many peers somebody always pauses, so being slower than all of them is not asked for: also
    than nine tenths, three quarters and half of them.
    """
    count = others.shape[1]
    turns = sorted({1, *(max(1, round(share * count)) for share in _LEVELS)})
    ordered = np.partition(others, [count - turn for turn in turns], axis=1)
    return [
        (ordered[:, count - turn], (num_chosen + turn - 1) / num_peers)
        for turn in turns
        if num_chosen + turn - 1 < num_peers
    ]


def _find_chance(
    counts: Sequence[int], chances: Sequence[float], *, num_steps: int, num_effective: int
) -> float:
    """The least chance of so many steps over the levels, corrected for their number."""
    tails = [
        binomial_tail(count * num_effective // num_steps, num_effective, chance)
        for count, chance in zip(counts, chances, strict=True)
    ]
    return min(1.0, min(tails, default=1.0) * len(tails))


def _find_spread_chances(effects: Floats, of_others: Floats) -> list[float]:
    """The chance of each effect, were it one of the others'; none is known where these are few."""
    if len(of_others) < _MIN_SPREAD_PEERS:
        return [0.0] * len(effects)
    middle = float(np.median(of_others))
    spread = MAD_TO_DEVIATION * float(np.median(np.abs(of_others - middle)))
    if spread == 0:
        return [0.0] * len(effects)
    freedom = len(of_others) - 1
    return [student_tail((one - middle) / spread, freedom) for one in effects.tolist()]


def _are_clear(own: Floats, num_peers: int) -> list[bool]:
    """[series] of [step, series], in logarithms: of a large ratio the scatter is that of the peers'
    work, which it is over."""
    needed = _CLEAR_DEVIATIONS / math.sqrt(len(own)) * (num_peers / 2) ** _CLEAR_GROWTH
    # No work at all in a step is as far below its peers as a float can say.
    own = np.log1p(np.maximum(own, -1 + np.finfo(np.float64).eps))
    found: list[bool] = (np.median(own, axis=0) >= needed * measure_scatter(own)).tolist()
    return found
