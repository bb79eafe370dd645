"""A rule for recordings of a few steps, in which the other rules' tests have no power."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.stragglers.few_steps_lead import measure_lead
from meshscope.analyze.timeline.peer_work import PeerGroup, PeerWork, split_idle
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import duration, p_value, ratio
from meshscope.numerics.chance import MIN_STEPS, SIGNIFICANCE_RATIO
from meshscope.numerics.persistence import MIN_EFFECT_RATIO
from meshscope.simulate.edits import equalise
from meshscope.store.read.arrays import Floats

MAX_CHANCE = Threshold(
    name="few_steps_max_chance",
    default=0.05,
    meaning="probability that some rank of equal ones is the slowest of its peers in all steps",
)
MIN_EXCESS_RATIO = Threshold(
    name="few_steps_min_excess_ratio",
    default=MIN_EFFECT_RATIO,
    minimum=0.0,
    meaning="more work than the slowest other peer's, in every step, over the peers' median",
)


class SlowInFewSteps(Rule):
    """In the few recorded steps, one rank was always the slowest of its peers.

    What it finds: in recordings of 2 to 9 steps, such as traces, a rank whose work exceeded that of
    every peer in every step, by `few_steps_min_excess_ratio` of the peers' median.

    Why it matters: all other ranks wait for it; but a few steps may have been unlucky.

    How it is measured: work as in ST001. With N equal ranks the chance that one of them is the
    slowest in all of S steps is N·N^-S, times the number of peer groups; times, for each step, the
    chance of so large a lead over peers so close together if noise were exponential (at least
    10 %). It must be below `few_steps_max_chance`. It is LOW unless noise that lasts for many steps
    would make as much in less than 1 % of runs: what moves from step to step shows how much. Where
    kernels of the rank's device show the cause it needs no such support. The cause is where most of
    the excess is: in a phase's kernels, or in idle time of the device before them, because its host
    had launched nothing or for another reason. The gain is replayed with the peers' median work
    instead of its own.

    What to change: for slow kernels look at the device's clocks, and at what else runs on it; for a
    slow host at what its process does there. Then trace more steps.

    When it is wrong: disturbances last longer than a few steps. MEDIUM at most, and a hint.
    """

    code = "ST005"
    name = "slow-in-few-steps"
    severities = (Severity.LOW, Severity.MEDIUM)
    thresholds = (MAX_CHANCE, MIN_EXCESS_RATIO)

    def find(self, context: Context) -> Iterable[Finding]:
        """One per peer group at most."""
        work = need(context.study.peer_work)
        if not 2 <= len(work.steps) < MIN_STEPS:
            return
        for group in work.groups:
            yield from self._judge(context, work, group)

    def _judge(self, context: Context, work: PeerWork, group: PeerGroup) -> Iterable[Finding]:
        lead = measure_lead(work.total_ns[:, list(group.indices)])
        if lead.least_ratio < context.thresholds[MIN_EXCESS_RATIO]:
            return
        chance = len(work.groups) * lead.chance
        if chance >= context.thresholds[MAX_CHANCE]:
            return
        lasting_chance = len(work.groups) * lead.lasting_chance
        is_lasting = lasting_chance < SIGNIFICANCE_RATIO
        rank = work.ranks[group.indices[lead.index]]
        peers = tuple(work.ranks[index] for index in group.indices if work.ranks[index] != rank)
        excess = lead.excess_ns
        timeline = need(context.study.timeline)
        edit = equalise(timeline, (rank,), peers=peers)
        gain = context.price_edit(edit)
        cause = _find_cause(context, work, timeline, rank, peers)
        yield Finding(
            code=self.code,
            title=f"rank {rank} is the slowest in every step{cause.title}",
            severity=min(
                severity_of(gain, otherwise=excess / max(work.step_ns, 1)),
                Severity.MEDIUM if is_lasting or cause.is_traced else Severity.LOW,
            ),
            summary=f"rank {rank} worked {duration(excess)} longer than its peers' median, "
            f"{ratio(lead.excess_ratio)} more, in all {len(work.steps)} steps.",
            ranks=(rank,),
            evidence=(
                Evidence(name="excess work per step", value=excess, unit="ns"),
                *cause.evidence,
                Evidence(name="steps slower than all peers", value=len(work.steps)),
                Evidence(name="peers", value=len(peers)),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.LOW,
                text=f"{p_value(chance)} by chance if steps were independent, "
                f"{p_value(min(1.0, lasting_chance))} if noise lasts; few steps",
                p_value=chance,
            ),
            change=cause.change,
            gain=gain,
            edit=known(edit),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """Where a rank loses its time."""

    title: str
    change: str
    evidence: tuple[Evidence, ...] = ()
    is_traced: bool = False
    """Whether its kernels, or the gaps between them, show it: what is said is about these steps."""


def _find_cause(
    context: Context, work: PeerWork, timeline: Timeline, rank: int, peers: tuple[int, ...]
) -> _Cause:
    """What most of the excess is: work in a phase, or idle time before one."""
    columns = [work.ranks.index(peer) for peer in peers]
    own = work.ranks.index(rank)

    def exceed(matrix: Floats) -> float:
        return float(np.median(matrix[:, own] - np.median(matrix[:, columns], axis=1)))

    on_device = bool(timeline.on_device[timeline.ranks.index(rank)])
    worked = {
        name: exceed(matrix)
        for name, matrix in zip(work.phases, work.work_ns, strict=True)
        if name or not on_device
    }
    idle = {name: exceed(matrix) for name, matrix in split_idle(timeline).items()}
    phase = max(worked, key=lambda name: worked[name], default="")
    before = max(idle, key=lambda name: idle[name], default="")
    most_work, most_idle = worked.get(phase, 0.0), idle.get(before, 0.0)
    if max(most_work, most_idle) <= 0:
        return _Cause(title="", change=_LOOK_CLOSER)
    if most_work >= most_idle:
        what = "its kernels take longer" if on_device else "it works longer"
        return _Cause(
            title=f": {what} in {phase or 'no phase'}",
            change=_LOOK_AT_DEVICE if on_device else _LOOK_CLOSER,
            evidence=(
                Evidence(name=f"excess in {phase or 'no phase'}", value=most_work, unit="ns"),
            ),
            is_traced=on_device,
        )
    parts = known(context.study.device_parts)
    wanted = [] if parts is None else [name in _HOST_CAUSES for name, _ in parts.parts]
    host = 0.0 if parts is None else exceed(parts.time_ns[:, :, wanted].sum(axis=2).T)
    is_host = 2 * host >= most_idle
    what = "its host launches late" if is_host else "its device idles"
    return _Cause(
        title=f": {what} before {before or 'work'}",
        change=_LOOK_AT_HOST if is_host else _LOOK_CLOSER,
        evidence=(
            Evidence(name=f"excess idle before {before or 'work'}", value=most_idle, unit="ns"),
            Evidence(name="excess idle because of the host", value=host, unit="ns"),
        ),
        is_traced=on_device,
    )


_HOST_CAUSES = ("host", "synchronising", "communicating", "launch")
"""Of `device_parts.CAUSES`; in the others the work was launched, or nobody knows."""
_LOOK_CLOSER = "Trace or record more steps of all ranks; if it stays, look at the rank's host."
_LOOK_AT_DEVICE = (
    "Compare the rank's kernels with a peer's (`meshscope trace --against`): more of them, or "
    "slower ones; then look at its device's clocks and at what else runs on it."
)
_LOOK_AT_HOST = (
    "Look at what the rank's process does there: loading, Python, a synchronising call, other "
    "processes on its cores."
)
