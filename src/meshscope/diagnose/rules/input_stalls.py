"""Rules about waiting for data."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.chance import MIN_STEPS, SIGNIFICANCE_RATIO, binomial_tail
from meshscope.analyze.phases import Int64s
from meshscope.analyze.pieces import PieceKind
from meshscope.analyze.timeline import Timeline
from meshscope.analyze.work import Floats, WorkTable
from meshscope.core.unavailable import Unavailable
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.thresholds import Threshold
from meshscope.diagnose.wording import be, duration, name_ranks, p_value, plural, ratio
from meshscope.simulate.what_if import Edit

DATA = "data"
MIN_EXCESS_RATIO = Threshold(
    name="input_min_excess_ratio",
    default=0.02,
    meaning="share of the step by which a rank must wait longer for data than its peers",
)
MIN_STALL_RATIO = Threshold(
    name="input_min_stall_ratio",
    default=0.05,
    meaning="share of the step that waiting for data must take where all ranks wait alike",
)
_CLEARLY_LONGER = 1.25
"""Times the peers' median, for a step to count against a rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputStalls:
    """Waiting for data by rank: what it shares with its peers, and what is its own."""

    ranks: tuple[int, ...]
    mean_ns: Floats
    """Per rank and step."""
    common_ns: Floats
    """The lower quartile of its peers' means, its own included."""
    p_value: Floats
    """That it waits longer than its peers by chance, corrected for all ranks; 1 without peers."""
    step_ns: float

    @property
    def excess_ns(self) -> Floats:
        """Beyond the peers."""
        return self.mean_ns - self.common_ns


def measure_stalls(context: Context) -> InputStalls | Unavailable:
    """Waiting for data of every rank."""
    work = context.work
    if isinstance(work, Unavailable):
        return work
    if DATA not in work.phases:
        return Unavailable("no rank recorded that it waited for data")
    times = work.of_phases((DATA,))
    mean = times.mean(axis=1)
    common, chance = mean.copy(), np.ones(len(mean))
    for places in work.peer_groups():
        own = list(places)
        common[own] = np.quantile(mean[own], 0.25, method="lower")
        if len(own) > 1:
            chance[own] = _test_ranks(times[own], len(mean))
    return InputStalls(
        ranks=work.ranks,
        mean_ns=mean,
        common_ns=common,
        p_value=chance,
        step_ns=float(work.period_ns.mean()),
    )


def _test_ranks(times: Floats, num_tests: int) -> Floats:
    """By how often a rank waits clearly longer than the fast half of its peers.

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


def _shorten(timeline: Timeline, work: WorkTable, target_ns: Floats) -> Int64s:
    """Durations of all pieces, with each rank's waiting for data cut to a mean per step.

    Each step loses the same share of its wait for data.
    """
    pieces = timeline.pieces
    mean = work.of_phases((DATA,)).mean(axis=1)
    keep = np.divide(target_ns, mean, out=np.ones_like(mean), where=mean > target_ns)
    place = np.searchsorted(np.array(timeline.ranks), pieces.rank)
    is_data = (pieces.kind == PieceKind.WORK) & (pieces.phase == timeline.phases.index(DATA))
    duration_ns = pieces.duration_ns
    shorter = np.rint(duration_ns * keep[place]).astype(np.int64)
    return np.where(is_data, shorter, duration_ns)


def _find_slow(context: Context, stalls: InputStalls) -> "np.ndarray":
    """Which ranks wait longer than their peers."""
    is_long = stalls.excess_ns >= context.thresholds[MIN_EXCESS_RATIO] * stalls.step_ns
    found: np.ndarray = is_long & (stalls.p_value < SIGNIFICANCE_RATIO)
    return found


class SlowLoader(Rule):
    """Some ranks wait for their data, and the others wait for them.

    What it finds: ranks that spend more time in the phase `data` than their peers (ranks that share
    all coordinates but dp), by `input_min_excess_ratio` of the step or more.

    Why it matters: the slowest loader sets the pace of all ranks.

    How it is measured: time in `data`, gaps between steps included, without what communication held
    up; mean per step less the lower quartile of the peers' means. A test over steps: how often a
    rank waits clearly longer than its peers' median, against how often all of them do, corrected
    for all ranks. The gain is a replay in which these ranks wait for
    data as long as their peers.

    What to change: look at these ranks' storage, host and share of the data (larger files, longer
    samples); give their loaders more workers.

    When it is wrong: where samples differ in size by design and ranks take turns. A loader that is
    timed by nobody has no phase `data`: its wait shows as work in no phase.
    """

    code = "IN001"
    name = "slow-loader"
    thresholds = (MIN_EXCESS_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all slow ranks together."""
        stalls = context.obtain(measure_stalls)
        timeline, work = context.timeline, context.work
        if (
            isinstance(stalls, Unavailable)
            or isinstance(timeline, Unavailable)
            or isinstance(work, Unavailable)
        ):
            return
        is_slow = _find_slow(context, stalls)
        if not is_slow.any():
            return
        target = np.where(is_slow, stalls.common_ns, stalls.mean_ns)
        ranks = tuple(rank for rank, slow in zip(stalls.ranks, is_slow, strict=True) if slow)
        edit = Edit(
            name=f"data of {name_ranks(ranks)} as fast as their peers'",
            work_ns=_shorten(timeline, work, target),
        )
        gain = context.price([edit])[0]
        worst = int(np.argmax(np.where(is_slow, stalls.excess_ns, -1.0)))
        chance = float(stalls.p_value[is_slow].max())
        share = float(stalls.excess_ns[worst]) / stalls.step_ns
        yield Finding(
            code=self.code,
            title=f"{name_ranks(ranks)} {be(ranks)} slow to get data",
            severity=severity_of(gain, otherwise=share),
            summary=f"{name_ranks(ranks)} {be(ranks)} held up by data: rank "
            f"{stalls.ranks[worst]} waits {duration(float(stalls.mean_ns[worst]))} for it per "
            f"step, its peers {duration(float(stalls.common_ns[worst]))}.",
            ranks=ranks,
            evidence=(
                Evidence(
                    name=f"data of rank {stalls.ranks[worst]}",
                    value=float(stalls.mean_ns[worst]),
                    unit="ns",
                ),
                Evidence(name="data of its peers", value=float(stalls.common_ns[worst]), unit="ns"),
                Evidence(name="excess, of the step", value=share, unit="ratio"),
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

    Why it matters: devices idle while the loader works; it is often the cheapest thing to mend.

    How it is measured: time in the phase `data` as for IN001, the part that a rank shares with its
    peers. The gain is a replay in which nobody waits for data: what perfect prefetching would win.

    What to change: more loader workers, a deeper prefetch queue, data in larger files or on faster
    storage, decoding off the training process, pinned memory.

    When it is wrong: where data comes at the pace of another program on purpose, as in
    reinforcement learning.
    """

    code = "IN002"
    name = "input-bound"
    thresholds = (MIN_STALL_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one."""
        stalls = context.obtain(measure_stalls)
        timeline, work = context.timeline, context.work
        if (
            isinstance(stalls, Unavailable)
            or isinstance(timeline, Unavailable)
            or isinstance(work, Unavailable)
        ):
            return
        limit_ns = context.thresholds[MIN_STALL_RATIO] * stalls.step_ns
        is_stalled = stalls.common_ns >= limit_ns
        is_slow = _find_slow(context, stalls)
        # Whoever is slower than its peers is IN001's; here counts what all of them share.
        if not is_stalled.any() or len(timeline.steps) < MIN_STEPS:
            return
        target = np.where(is_stalled, stalls.excess_ns * is_slow, stalls.mean_ns)
        ranks = tuple(rank for rank, one in zip(stalls.ranks, is_stalled, strict=True) if one)
        edit = Edit(name="nobody waits for data", work_ns=_shorten(timeline, work, target))
        gain = context.price([edit])[0]
        typical = float(np.median(stalls.common_ns[is_stalled]))
        share = typical / stalls.step_ns
        yield Finding(
            code=self.code,
            title="training waits for data",
            severity=severity_of(gain, otherwise=share),
            summary=f"{name_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} "
            f"{duration(typical)} for data per step, {ratio(share)} of it.",
            ranks=ranks,
            evidence=(
                Evidence(name="data, median over these ranks", value=typical, unit="ns"),
                Evidence(name="share of the step", value=share, unit="ratio"),
                Evidence(name="ranks that wait", value=len(ranks)),
            ),
            change="Give loaders more workers and a deeper queue, or move decoding out of the "
            "training process.",
            gain=gain,
            edit=edit,
        )
