"""Rules about ranks that pause occasionally."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from meshscope.analyze.stragglers.pauses import PausedRank, Pauses
from meshscope.analyze.timeline.gc_collections import Collections
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.collected import MAX_MORE_RATIO, remove_collections
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.relief import remove_pauses
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import duration, name_ranks, plural, ratio
from meshscope.store.read.arrays import Floats

_MIN_COLLECTED_RATIO = Threshold(
    name="gc_min_lost_ratio",
    default=0.02,
    meaning="share of all time that the collector must have taken on one rank or another",
)
_MIN_PAUSES_RATIO = Threshold(
    name="pauses_min_lost_ratio",
    default=0.05,
    meaning="share of all time that unexplained pauses must cost",
)
_MIN_PAUSES_COUNT = Threshold(
    name="pauses_min_count", default=5, meaning="pauses below which nothing is reported"
)
_EXPLAINED_RATIO = 1 / (1 + MAX_MORE_RATIO)
"""A collection that takes this share of a pause explains all of it."""
_MAIN_RANK_RATIO = 0.2
"""Share of the largest loss from which another rank is named too."""
_MAIN_PHASE_RATIO = 0.5
"""Share of its pauses from which a phase is named."""


_ONCE = Confidence(
    level=ConfidenceLevel.LOW, text="one step has most of it: how often it comes is not known"
)


class GarbageCollectionRule(Rule):
    """Python's garbage collector stops ranks at different moments.

    What it finds: collections in steps or between them that cost `gc_min_lost_ratio` of the time or
    more.

    Why it matters: each rank collects when its own counters say so; all others wait, so the job
    pays for the pauses of every rank.

    How it is measured: the recorder writes collections of 0.2 ms and more. Their part in pieces of
    work is removed and the run is replayed, with what other work of these steps and the next ones
    takes beyond its usual in steps without collections, up to twice as much as the collections: to
    make the garbage, cold caches, ranks that collect at once and wait for a core; and transfers
    that are as much longer, where the threads that move data wait for one.

    What to change: `gc.disable()` (or `gc.freeze()` after start-up) and `gc.collect()` on all ranks
    at the same step, every few hundred steps; make less garbage in the loop.

    When it is wrong: if collections run while the device still has work queued; on ranks with
    device marks only idle time of the stream counts. Where the collections of a single step are
    what costs, nobody knows how often they come: the finding is low.
    """

    code = "PA001"
    name = "garbage-collection"
    thresholds = (_MIN_COLLECTED_RATIO,)

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all ranks together."""
        timeline, collections = need(context.study.timeline), need(context.study.collections)
        if not collections.has_any:
            return
        collected = collections.sum_by_step(timeline)
        step_ns = float(np.mean(timeline.period_end_ns - timeline.period_start_ns))
        by_step_ns = collected.max(axis=1)
        lost_ratio = float(by_step_ns.mean()) / step_ns
        if lost_ratio < context.thresholds[_MIN_COLLECTED_RATIO]:
            return
        found = _describe_collections(
            self.code, collections, collected, timeline, context, lost_ratio
        )
        rest_ratio = lost_ratio - float(by_step_ns.max()) / len(by_step_ns) / step_ns
        is_repeated = rest_ratio >= context.thresholds[_MIN_COLLECTED_RATIO]
        yield found if is_repeated else replace(found, severity=Severity.LOW, confidence=_ONCE)


class HostPauseRule(Rule):
    """A rank pauses occasionally, and nothing recorded says why.

    What it finds: steps in which a rank works far longer than it usually does, sporadically, and
    which no recorded collection explains.

    Why it matters: all others wait for the rank that pauses; with many ranks nearly every step has
    one that does.

    How it is measured: work of the rank and step beyond its median by a quarter of a step and by 8
    robust deviations, in at most a third of its steps; `pauses_min_count` of them or more, and
    `pauses_min_lost_ratio` of the time by the longest of each step. The gain is replayed without
    them.

    What to change: look for what runs beside training on the host: logging and checkpoint threads,
    data workers on the same cores, memory that is reclaimed, the accelerator's allocator.

    When it is wrong: on machines that share their cores with other programs, which cause such
    pauses.
    """

    code = "PA002"
    name = "host-pauses"
    thresholds = (_MIN_PAUSES_RATIO, _MIN_PAUSES_COUNT)
    is_pattern = True

    def find(self, context: Context) -> Iterable[Finding]:
        """At most one, for all ranks together."""
        timeline, pauses = need(context.study.timeline), need(context.study.pauses)
        collected, excess = known(context.study.collected_ns), pauses.excess_ns
        if collected is not None:
            excess = np.where(_is_explained(excess, collected), 0.0, excess)
        cost_ratio = float(excess.max(axis=1).mean()) / pauses.step_ns if excess.size else 0.0
        counts = (excess > 0).sum(axis=0)
        if int(counts.sum()) < context.thresholds[_MIN_PAUSES_COUNT]:
            return
        if cost_ratio >= context.thresholds[_MIN_PAUSES_RATIO]:
            yield _describe_pauses(self.code, pauses, excess, timeline, context, cost_ratio)


def _is_explained(excess: Floats, collected: Floats) -> np.typing.NDArray[np.bool_]:
    return np.asarray((excess > 0) & (collected >= _EXPLAINED_RATIO * excess))


def _choose_ranks(ranks: tuple[int, ...], lost_ns: Floats) -> tuple[int, ...]:
    most = float(lost_ns.max(initial=0.0))
    kept = np.flatnonzero((lost_ns > 0) & (lost_ns >= _MAIN_RANK_RATIO * most))
    return tuple(ranks[index] for index in kept.tolist())


def _describe_collections(
    code: str,
    collections: Collections,
    collected: Floats,
    timeline: Timeline,
    context: Context,
    lost_ratio: float,
) -> Finding:
    edit, more_ns = remove_collections(timeline, collections)
    gain = context.price_edit(edit)
    ranks = _choose_ranks(timeline.ranks, collected.sum(axis=0))
    number = sum(collections.num_collections.get(rank, 0) for rank in ranks)
    between_ns = float(collections.lost_ns[timeline.pieces.is_between].sum())
    is_between = 2 * between_ns > float(collections.lost_ns.sum())
    longest_ns = float(collected.max())
    return Finding(
        code=code,
        title=f"garbage collection stops {name_ranks(ranks)}",
        severity=severity_of(gain, otherwise=lost_ratio),
        summary=f"Python's garbage collector ran {plural(number, 'time')} on {name_ranks(ranks)} "
        f"and took up to {duration(longest_ns)} of a step, {ratio(lost_ratio)} of all time"
        f"{', mostly between steps' if is_between else ''}.",
        ranks=ranks if len(ranks) < len(timeline.ranks) else (),
        evidence=(
            Evidence(name="collections", value=number),
            Evidence(name="most in one step", value=longest_ns, unit="ns"),
            Evidence(
                name="other work that is longer with them, per step", value=more_ns, unit="ns"
            ),
            Evidence(name="share of time, worst rank of each step", value=lost_ratio, unit="ratio"),
        ),
        change="Call gc.disable() after start-up, and gc.collect() on all ranks at the same step; "
        "make less garbage in the training loop.",
        gain=gain,
        edit=edit,
    )


def _describe_pauses(
    code: str,
    pauses: Pauses,
    excess: Floats,
    timeline: Timeline,
    context: Context,
    cost_ratio: float,
) -> Finding:
    edit = remove_pauses(timeline, excess, name="without pauses")
    gain = context.price_edit(edit)
    ranks = _choose_ranks(timeline.ranks, excess.sum(axis=0))
    number = int((excess > 0).sum())
    typical_ns = float(np.median(excess[excess > 0]))
    worst = next((one for one in pauses.ranks if one.rank in ranks), None)
    return Finding(
        code=code,
        title=f"{name_ranks(ranks)} {'pauses' if len(ranks) == 1 else 'pause'} occasionally",
        severity=severity_of(gain, otherwise=cost_ratio),
        summary=f"{plural(number, 'pause')} of {duration(typical_ns)} (median) on "
        f"{name_ranks(ranks)}, which no recorded collection explains, cost {ratio(cost_ratio)} of "
        f"all time{_name_places(worst)}.",
        ranks=ranks if len(ranks) < len(timeline.ranks) else (),
        evidence=(
            Evidence(name="pauses", value=number),
            Evidence(name="median pause", value=typical_ns, unit="ns"),
            Evidence(name="longest pause", value=float(excess.max()), unit="ns"),
            Evidence(name="share of time", value=cost_ratio, unit="ratio"),
        ),
        confidence=Confidence(
            level=ConfidenceLevel.MEDIUM,
            text=f"{plural(number, 'step')} more than 8 deviations above the rank's usual work",
        ),
        change=f"Look for what stops {name_ranks(ranks)}: logging and checkpoint threads, data "
        "workers on the same cores, the garbage collector, other programs.",
        gain=gain,
        edit=edit,
    )


def _name_places(worst: PausedRank | None) -> str:
    """A longer forward with a normal backward points to the host."""
    if worst is None or not worst.share_of:
        return ""
    phase = max(worst.share_of, key=lambda phase: worst.share_of[phase])
    if worst.share_of.get("forward", 0.0) >= 0.6 and worst.share_of.get("backward", 0.0) <= 0.2:
        return "; they are in forward and not in backward, which points to the host"
    is_main = worst.share_of[phase] >= _MAIN_PHASE_RATIO
    return f"; they are mostly in {phase}" if phase and is_main else ""
