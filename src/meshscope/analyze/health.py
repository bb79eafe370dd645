"""How well the recording itself went: errors caught, records lost, ranks missing, own cost.

The recorder's cost is what it measured of itself on every 16th step: the time inside its hooks
and calls, without warm-up steps, because the first one also opens the files. It is not the whole
effect on training (caches, memory bandwidth), which only a comparison with an unrecorded run shows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.numerics.distribution import interpolate_percentile
from meshscope.store.read.arrays import Int64s
from meshscope.store.read.columns import Columns, Problem, ProblemKind, int64_column
from meshscope.store.read.rank_ranges import RankRanges, abbreviate_ranks
from meshscope.store.read.run import Attempt, JsonFields, RankRecording


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtErrors:
    """Errors of the recorder at one place, which training did not notice."""

    site: str
    """Where in the recorder, such as `scalar` or `open`."""
    count: int
    is_at_least: bool
    """The rank was killed before it wrote its final count."""
    ranks: tuple[int, ...]
    first_message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something the recorder says it could not watch."""

    where: str
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time inside the recorder per step, over the steps in which it was measured."""

    num_steps: int
    """Steps measured, all ranks together."""
    is_warmup_only: bool
    """Only warm-up steps were measured; the first one also opened the files."""
    median_ns: float
    p95_ns: float
    max_ns: int
    median_ratio: float | Unavailable
    """Of the step's duration; the median of the steps' ratios."""
    p95_ratio: float | Unavailable
    max_ratio: float | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHealth:
    """What a reader must know before trusting the numbers."""

    errors: tuple[CaughtErrors, ...]
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]
    """Damage, torn tails, lost records, missing and short ranks, in rank order."""
    num_dropped: int
    """Records that found no space."""
    missing_ranks: RankRanges
    short_ranks: tuple[int, ...]
    """Ranks with at least two steps fewer than the one with the most."""
    unfinished_ranks: tuple[int, ...]
    """Ranks without a closing line: still running, or killed."""
    num_pauses: int
    num_device_steps_given_up: int
    overhead: Overhead | Unavailable
    opening_cost_ns: int | Unavailable
    """Longest time a rank took to open its files, once."""

    @property
    def num_errors(self) -> int:
        """Errors caught, all sites and ranks together."""
        return sum(error.count for error in self.errors)

    @property
    def is_complete(self) -> bool:
        """Every rank is there, finished and undamaged, and no error was caught."""
        return not (self.errors or self.problems or self.unfinished_ranks or self.num_dropped)


class OverheadSamples:
    """Collects the steps on which the recorder timed itself."""

    def __init__(self) -> None:
        self._steady: list[tuple[Int64s, Int64s]] = []
        self._warmup: list[tuple[Int64s, Int64s]] = []

    def add(self, steps: Columns, num_warmup: int) -> None:
        """Takes in one rank's step table."""
        cost = int64_column(steps, "recorder_ns")
        measured = np.flatnonzero(cost >= 0)
        start = int64_column(steps, "start_host_mono_ns")[measured]
        duration = int64_column(steps, "end_host_mono_ns")[measured] - start
        cost = cost[measured]
        first = int(np.searchsorted(measured, num_warmup))
        self._warmup.append((cost[:first], duration[:first]))
        self._steady.append((cost[first:], duration[first:]))

    def measure(self) -> Overhead | Unavailable:
        """The overhead over all ranks taken in: after warm-up, where any step there is measured."""
        samples = [sample for sample in self._steady if len(sample[0])]
        is_warmup_only = not samples
        samples = samples or [sample for sample in self._warmup if len(sample[0])]
        if not samples:
            return Unavailable("the recorder timed itself in no step")
        cost = np.concatenate([sample[0] for sample in samples])
        ordered = np.sort(cost)
        duration = np.concatenate([sample[1] for sample in samples])
        is_timed = duration > 0
        ratios = np.sort(cost[is_timed] / duration[is_timed])
        none = Unavailable("the measured steps have no duration")
        return Overhead(
            num_steps=len(cost),
            is_warmup_only=is_warmup_only,
            median_ns=interpolate_percentile(ordered, 0.5),
            p95_ns=interpolate_percentile(ordered, 0.95),
            max_ns=int(ordered[-1]),
            median_ratio=interpolate_percentile(ratios, 0.5) if len(ratios) else none,
            p95_ratio=interpolate_percentile(ratios, 0.95) if len(ratios) else none,
            max_ratio=float(ratios[-1]) if len(ratios) else none,
        )


def assess_recording(
    attempt: Attempt,
    num_steps: Mapping[int, int],
    extra_problems: Iterable[Problem],
    overhead: OverheadSamples,
) -> RecordingHealth:
    """Health of an attempt whose tables have been read (reading is what finds damage)."""
    most = max(num_steps.values(), default=0)
    short = tuple(rank for rank, count in num_steps.items() if count < most - 1)
    problems = [*attempt.problems, *(p for rank in attempt for p in rank.problems), *extra_problems]
    if short:
        problems.append(_short_problem(short, num_steps, most))
    opening = [as_int(rank.closing.get("opening_cost_ns")) for rank in attempt if rank.closing]
    known = [cost for cost in opening if cost is not None]
    return RecordingHealth(
        errors=_collect_errors(attempt),
        notes=_collect_notes(attempt),
        problems=tuple(problems),
        num_dropped=sum(p.num_records or 0 for p in problems if p.kind is ProblemKind.DROPPED),
        missing_ranks=attempt.missing_ranks,
        short_ranks=short,
        unfinished_ranks=tuple(rank.rank for rank in attempt if rank.closing is None),
        num_pauses=sum("paused_host_mono_ns" in update for r in attempt for update in r.updates),
        num_device_steps_given_up=sum(
            as_int(rank.closing.get("num_device_steps_given_up")) or 0
            for rank in attempt
            if rank.closing
        ),
        overhead=overhead.measure(),
        opening_cost_ns=max(known)
        if known
        else Unavailable(
            "no rank's closing line says" if opening else "no rank wrote its closing line"
        ),
    )


def count_errors(recording: RankRecording) -> int:
    """Errors the recorder caught on one rank; at least that many if it was killed."""
    return sum(count for _, count, _, _ in _rank_errors(recording))


def as_int(value: object) -> int | None:
    """A JSON number that is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _short_problem(short: tuple[int, ...], num_steps: Mapping[int, int], most: int) -> Problem:
    fewest = min(num_steps[rank] for rank in short)
    text = f"recorded {fewest} of {most} steps"
    if len(short) > 1:
        text = f"ranks {abbreviate_ranks(short)} recorded as few as {fewest} of {most} steps"
    return Problem(
        kind=ProblemKind.SHORT_RANK,
        rank=short[0] if len(short) == 1 else None,
        text=text,
    )


def _collect_errors(attempt: Attempt) -> tuple[CaughtErrors, ...]:
    sites: dict[str, CaughtErrors] = {}
    for recording in attempt:
        for site, count, message, is_at_least in _rank_errors(recording):
            seen = sites.get(site)
            sites[site] = CaughtErrors(
                site=site,
                count=count + (seen.count if seen else 0),
                is_at_least=is_at_least or bool(seen and seen.is_at_least),
                ranks=(*(seen.ranks if seen else ()), recording.rank),
                first_message=seen.first_message if seen else message,
            )
    return tuple(sorted(sites.values(), key=lambda error: (-error.count, error.site)))


def _rank_errors(recording: RankRecording) -> Iterable[tuple[str, int, str, bool]]:
    """Site, count, first message, and whether the count is only a lower bound."""
    closed = recording.closing.get("errors") if recording.closing is not None else None
    if isinstance(closed, dict):
        for site, found in closed.items():
            fields: JsonFields = found if isinstance(found, dict) else {}
            yield str(site), as_int(fields.get("count")) or 1, str(fields.get("first", "")), False
        return
    counts: dict[str, tuple[int, str]] = {}
    for line in recording.health:
        if line.get("cause") == "recorder":
            site = str(line.get("where"))
            count, message = counts.get(site, (0, str(line.get("text", ""))))
            counts[site] = (count + (as_int(line.get("count")) or 1), message)
    for site, (count, message) in counts.items():
        yield site, count, message, True


def _collect_notes(attempt: Attempt) -> tuple[Note, ...]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for recording in attempt:
        for line in recording.health:
            if line.get("cause") == "gap":
                key = (str(line.get("where")), str(line.get("text", "")))
                ranks.setdefault(key, []).append(recording.rank)
    return tuple(
        Note(where=where, text=text, ranks=tuple(dict.fromkeys(found)))
        for (where, text), found in ranks.items()
    )
