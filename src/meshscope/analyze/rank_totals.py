"""All ranks of one attempt, merged: what each pass over a rank's tables gave, in order of rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshscope.analyze.rank.not_in_traces import NO_COST
from meshscope.analyze.rank.overhead import Overhead, OverheadSamples, measure_overhead
from meshscope.analyze.rank.phases import StepTimes
from meshscope.analyze.rank.rank_summary import RankSummary
from meshscope.analyze.rank.steps import JobSteps, JobStepSummary, summarize_job_steps
from meshscope.analyze.rank.throughput import RankRates, stepping_ns
from meshscope.analyze.rank_parts import RankParts, RankPass, join_unwatched
from meshscope.analyze.timeline.peers import PeerPhases, PhaseClue, group_peers
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Problem, ProblemKind
from meshscope.store.read.run import Attempt
from meshscope.store.read.trace_windows import disturbing_windows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTotals:
    """All ranks, merged."""

    ranks: tuple[RankSummary, ...]
    steps: JobStepSummary
    clues: tuple[PhaseClue, ...]
    rates: Mapping[int, RankRates]
    overhead: Overhead | Unavailable
    longest: tuple[int, int]
    """Most steps of a rank, and the longest time from its first to its last."""
    problems: tuple[Problem, ...]
    unwatched: Int64s
    """Steps whose communication some rank did not record."""
    parts: tuple[RankParts, ...]
    """In order of the attempt's ranks."""

    @property
    def steady(self) -> list[RankSummary]:
        """Ranks that statistics are over."""
        return [rank for rank in self.ranks if rank.num_phased]


def merge_ranks(
    passes: Iterable[RankPass], attempt: Attempt, *, warmup_steps: int | None
) -> RankTotals:
    """Merges results in order of rank and drops them one by one: memory holds one rank's tables,
    and one number per rank and step only in here."""
    durations, intervals, peers = JobSteps(), JobSteps(), PeerPhases(num_ranks=len(attempt.ranks))
    ranks: list[RankSummary] = []
    rates: dict[int, RankRates] = {}
    overhead: list[OverheadSamples] = []
    problems: list[Problem] = []
    longest = (0, 0)
    unwatched: list[Int64s] = []
    parts: list[RankParts] = []
    for one in passes:
        result = one.result
        unwatched.append(one.unwatched)
        parts.append(_keep_first_logged(one.parts, parts))
        rank, steps = result.summary.rank, result.steps
        ranks.append(result.summary)
        durations.add(rank, steps.step, steps.duration_ns)
        follows = steps.is_followed
        intervals.add(rank, steps.step[:-1][follows], np.diff(steps.start_ns)[follows])
        peers.add(rank, steps.step, result.phases, is_steady=result.is_phased)
        rates[rank] = result.rates
        overhead.append(result.overhead)
        longest = max(longest, (steps.num_finished, stepping_ns(steps)))
        problems += _describe_left_out(rank, steps)
    steps_of_job = summarize_job_steps(
        durations,
        intervals,
        num_ranks=len(ranks),
        asked_warmup=warmup_steps,
        windows=disturbing_windows(attempt),
    )
    time, peer_groups = steps_of_job.time, group_peers(attempt.layout, attempt.ranks)
    step_ns = time if isinstance(time, Unavailable) else time.median_ns
    return RankTotals(
        ranks=tuple(ranks),
        steps=steps_of_job,
        clues=peers.find_clues(peer_groups, step_ns),
        rates=rates,
        overhead=Unavailable(NO_COST)
        if attempt.is_from_traces
        else measure_overhead(overhead, has_device=any(rank.has_accelerator for rank in ranks)),
        longest=longest,
        problems=tuple(problems),
        unwatched=join_unwatched(unwatched),
        parts=tuple(parts),
    )


def _keep_first_logged(own: RankParts, before: Sequence[RankParts]) -> RankParts:
    """Without the numbers that were logged where an earlier rank has some: one rank's are shown."""
    is_first = not before or before[-1].logged.value == ()
    return own if is_first else replace(own, logged=before[-1].logged)


def _describe_left_out(rank: int, steps: StepTimes) -> Iterator[Problem]:
    """Steps of a rank that have no place on its time line."""
    if steps.num_overlapping:
        text = (
            f"{steps.num_overlapping} step(s) of rank {rank} overlap an earlier one in time and "
            "are left out, as where two threads train at once"
        )
        yield Problem(kind=ProblemKind.OVERLAPPING_STEPS, rank=rank, text=text)
    if steps.num_reversed:
        text = f"{steps.num_reversed} step(s) end before they start and are left out"
        yield Problem(kind=ProblemKind.DAMAGED, rank=rank, text=text)
