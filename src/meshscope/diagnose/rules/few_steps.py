"""A rule for recordings of a few steps, in which the other rules' tests have no power."""

from collections.abc import Iterable

import numpy as np

from meshscope.analyze.timeline.peer_work import PeerGroup, PeerWork
from meshscope.core.unavailable import known, need
from meshscope.core.verdict.severity import Severity
from meshscope.core.verdict.thresholds import Threshold
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Confidence, ConfidenceLevel, Evidence, Finding
from meshscope.diagnose.pricing import severity_of
from meshscope.diagnose.rule import Rule
from meshscope.diagnose.wording import duration, p_value, ratio
from meshscope.numerics.chance import MIN_STEPS
from meshscope.numerics.persistence import MIN_EFFECT_RATIO
from meshscope.simulate.edits import equalise

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
    slowest in all of S steps is N·N^-S, times the number of peer groups; it must be below
    `few_steps_max_chance`. The gain is replayed with the peers' median work instead of its own.

    What to change: record or trace more steps, then see ST001.

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
            size = len(group.indices)
            chance = len(work.groups) * size * float(size) ** -len(work.steps)
            if chance < context.thresholds[MAX_CHANCE]:
                yield from self._judge(context, work, group, chance)

    def _judge(
        self, context: Context, work: PeerWork, group: PeerGroup, chance: float
    ) -> Iterable[Finding]:
        total = work.total_ns[:, list(group.indices)]
        slowest = int(total.sum(axis=0).argmax())
        others = np.delete(total, slowest, axis=1)
        usual = np.median(others, axis=1)
        lead = (total[:, slowest] - others.max(axis=1)) / np.maximum(usual, 1)
        if float(lead.min()) < context.thresholds[MIN_EXCESS_RATIO]:
            return
        rank = work.ranks[group.indices[slowest]]
        peers = tuple(work.ranks[index] for index in group.indices if work.ranks[index] != rank)
        excess = float(np.median(total[:, slowest] - usual))
        edit = equalise(need(context.study.timeline), (rank,), peers=peers)
        gain = context.price_edit(edit)
        yield Finding(
            code=self.code,
            title=f"rank {rank} was the slowest of its peers in every step",
            severity=min(
                severity_of(gain, otherwise=excess / max(work.step_ns, 1)), Severity.MEDIUM
            ),
            summary=f"rank {rank} worked {duration(excess)} longer than its peers' median, "
            f"{ratio(excess / max(float(np.median(usual)), 1))} more, in all {len(work.steps)} "
            "steps.",
            ranks=(rank,),
            evidence=(
                Evidence(name="excess work per step", value=excess, unit="ns"),
                Evidence(name="steps slower than all peers", value=len(work.steps)),
                Evidence(name="peers", value=len(peers)),
            ),
            confidence=Confidence(
                level=ConfidenceLevel.LOW,
                text=f"{p_value(chance)} by chance if steps were independent; few steps",
                p_value=chance,
            ),
            change="Trace or record more steps of all ranks; if it stays, look at the rank's host.",
            gain=gain,
            edit=known(edit),
        )
