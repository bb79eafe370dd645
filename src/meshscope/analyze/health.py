"""How well the recording itself went: errors caught, records lost, ranks missing, own cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from meshscope.analyze.rank.caught_errors import CaughtErrors, as_int, list_errors
from meshscope.analyze.rank.not_in_traces import NO_COST, NO_DROPPED
from meshscope.analyze.rank.overhead import Overhead
from meshscope.analyze.rank.phases import order_steps
from meshscope.analyze.rank.rank_summary import to_unix
from meshscope.core.operations import POINT_TO_POINT
from meshscope.core.unavailable import Unavailable, known
from meshscope.store.read.columns import Problem, ProblemKind
from meshscope.store.read.rank_ranges import RankRanges, abbreviate_ranks
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.read.trace_windows import KERNEL_LINE
from meshscope.store.write.attempts import CLOCK_SKEW_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something the recorder could not watch."""

    where: str
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingHealth:
    """What a reader must know before trusting the numbers."""

    errors: tuple[CaughtErrors, ...]
    notes: tuple[Note, ...]
    problems: tuple[Problem, ...]
    """Damage, torn tails, lost records, missing and short ranks, in rank order."""
    num_dropped: int | Unavailable
    """Records that found no space."""
    num_rank_steps: int
    """Steps of all ranks together."""
    missing_ranks: RankRanges
    short_ranks: tuple[int, ...]
    """Ranks with at least two steps fewer than the longest, which left before it. A rank without
    any that ended in order and with the longest is none: it evaluates, serves or waits, or where
    its steps end cannot be seen."""
    unfinished_ranks: tuple[int, ...]
    """Ranks without a closing line: still running, or killed."""
    num_pauses: int
    num_device_steps_given_up: int
    overhead: Overhead | Unavailable
    opening_cost_ns: int | Unavailable
    """Longest time a rank took to open its files, once."""
    sampling_cost_ns: int | Unavailable
    """Longest time a rank took for all its kernel samples: starting, stopping and reading them."""

    @property
    def num_missing_ranks(self) -> int:
        return len(self.missing_ranks)

    @property
    def num_errors(self) -> int:
        return sum(error.count for error in self.errors)

    @property
    def is_complete(self) -> bool:
        """Every rank is there, finished and undamaged, and no error was caught."""
        num_dropped = known(self.num_dropped)
        return not (self.errors or self.problems or self.unfinished_ranks or num_dropped)


def assess_recording(
    attempt: Attempt,
    num_steps: Mapping[int, int],
    extra_problems: Iterable[Problem],
    overhead: Overhead | Unavailable,
) -> RecordingHealth:
    """Health of an attempt whose tables have been read: reading finds damage."""
    num_steps = {
        rank: _count_finished(attempt.ranks[rank], count) for rank, count in num_steps.items()
    }
    most = max(num_steps.values(), default=0)
    longest = next((rank for rank, count in num_steps.items() if count == most), -1)
    short = tuple(
        rank
        for rank, count in num_steps.items()
        if count < most - 1
        and not _stays_to_the_end(attempt.ranks[rank], attempt.ranks[longest])
        and (count or not _ends_with(attempt.ranks[rank], attempt.ranks[longest]))
    )
    problems = [*attempt.problems, *(p for rank in attempt for p in rank.problems), *extra_problems]
    if short:
        problems.append(_short_problem(short, num_steps, most))
    no_cost = Unavailable(NO_COST)
    return RecordingHealth(
        errors=_collect_errors(attempt),
        notes=_collect_notes(attempt),
        problems=tuple(problems),
        num_dropped=Unavailable(NO_DROPPED)
        if attempt.is_from_traces
        else sum(p.num_records or 0 for p in problems if p.kind is ProblemKind.DROPPED),
        num_rank_steps=sum(num_steps.values()),
        missing_ranks=attempt.missing_ranks,
        short_ranks=short,
        unfinished_ranks=tuple(rank.rank for rank in attempt if rank.closing is None),
        num_pauses=sum("paused_host_mono_ns" in update for r in attempt for update in r.updates),
        num_device_steps_given_up=sum(
            as_int(rank.closing.get("num_device_steps_given_up")) or 0
            for rank in attempt
            if rank.closing
        ),
        overhead=overhead,
        opening_cost_ns=no_cost if attempt.is_from_traces else _find_opening_cost(attempt),
        sampling_cost_ns=no_cost if attempt.is_from_traces else _find_sampling_cost(attempt),
    )


def _find_opening_cost(attempt: Attempt) -> int | Unavailable:
    said = [as_int(rank.closing.get("opening_cost_ns")) for rank in attempt if rank.closing]
    costs = [cost for cost in said if cost is not None]
    if costs:
        return max(costs)
    return Unavailable("no rank's closing line says" if said else "no rank wrote its closing line")


def _count_finished(recording: Recording, num_kept: int) -> int:
    """With steps of a long run that were thinned away: each rank keeps others."""
    if "max_bytes" not in recording.header:
        return num_kept
    return order_steps(recording.read("steps")).num_finished


def _find_sampling_cost(attempt: Attempt) -> int | Unavailable:
    """A sample's line has what all samples of its rank have cost so far."""
    lines = (update.get(KERNEL_LINE) for rank in attempt for update in rank.updates)
    costs = [as_int(line.get("cost_ns")) for line in lines if isinstance(line, dict)]
    known = [cost for cost in costs if cost is not None]
    return max(known) if known else Unavailable("no kernel sample ended")


def _stays_to_the_end(recording: Recording, longest: Recording) -> bool:
    """Whether it ended in order and with the last operations that it shares with the longest one:
    its batches ran out, and it went on taking part, as within `DistributedDataParallel.join`."""
    if recording.closing is None or longest.closing is None:
        return False
    own, others = _find_last_operations(recording), _find_last_operations(longest)
    shared = own.keys() & others.keys()
    return bool(shared) and all(own[group] == others[group] for group in shared)


def _ends_with(recording: Recording, longest: Recording) -> bool:
    """Whether it ended in order, and no sooner than the longest one's last step."""
    if recording.closing is None:
        return False
    end_mono_ns = as_int(recording.closing.get("end_host_mono_ns"))
    end_ns = None if end_mono_ns is None else known(to_unix(recording, end_mono_ns))
    last_ns = known(to_unix(longest, int(longest.read("steps")["end_host_mono_ns"].max())))
    if end_ns is None or last_ns is None:
        return False
    return end_ns >= last_ns - CLOCK_SKEW_NS


def _find_last_operations(recording: Recording) -> dict[tuple[str, tuple[int, ...]], int]:
    """The number of the last collective of each group of several ranks, by its name."""
    operations = recording.read("collectives")
    is_shared = ~np.isin(operations["kind"], [int(kind) for kind in POINT_TO_POINT])
    found = {}
    for group_id, group in recording.groups.items():
        numbers = operations["sequence"][is_shared & (operations["group_id"] == group_id)]
        if len(group.ranks) > 1 and len(numbers):
            found[group.name, group.ranks] = int(numbers.max())
    return found


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
        for found in list_errors(recording):
            seen = sites.get(found.site)
            sites[found.site] = found if seen is None else seen.join(found)
    return tuple(sorted(sites.values(), key=lambda error: (-error.count, error.site)))


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
