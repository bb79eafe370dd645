"""Sums over a run: steps, passes and tokens; and what the program counted and timed itself.

Counters (`Recorder.count`) are added up over steps and ranks. Times are of detail spans (`span`,
`timer`) and of durations that were given (`add_duration`). None of these is a part of a step's
split, except a given duration that lies where nothing was measured.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshscope.core.unavailable import Unavailable, known
from meshscope.store.read.arrays import Bools, Floats, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.rank_ranges import abbreviate_ranks
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.schema import ScalarFlag, SpanFlag

MAX_NAMES = 100
"""Names kept of each kind: programs may put numbers into them."""
_COLLECTIONS = "gc gen"
_TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """What the program counted under one name, all ranks together."""

    name: str
    total: float
    num_values: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedName:
    """Times under one name, all ranks together."""

    name: str
    is_given: bool
    """Measured by the program itself, not by the recorder."""
    total_ns: int
    num_times: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    num_rank_steps: int
    """Finished steps, counted on every rank."""
    num_backwards: int
    """Outermost backward passes."""
    num_tokens: int | Unavailable
    """Tokens of the job: logged, else counted from inputs; of ranks that share them, once."""
    phase_ns: Mapping[str, int]
    """Host self time in steps by phase, warm-up included: rank-nanoseconds."""
    counters: tuple[Counter, ...]
    times: tuple[TimedName, ...]
    """The longest first."""
    num_names_left_out: int
    """Beyond the first hundred of a kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums:
    """One rank's part of the totals."""

    rank: int
    num_steps: int
    num_backwards: int
    num_tokens: int | None
    """None where they were neither logged nor counted."""
    counters: Mapping[str, tuple[float, int]]
    """Name to the sum and number of values."""
    times: Mapping[tuple[str, bool], tuple[int, int]]
    """Name, and whether it was given, to the sum in nanoseconds and the number of times."""


def sum_rank(recording: Recording) -> RankSums:
    steps = recording.read("steps")
    return RankSums(
        rank=recording.rank,
        num_steps=len(steps["step"]),
        num_backwards=int(int64_column(steps, "num_microbatches").sum()),
        num_tokens=_sum_tokens(recording, int64_column(steps, "input_tokens")),
        counters=_sum_counters(recording),
        times=_sum_times(recording),
    )


def sum_totals(
    attempt: Attempt, ranks: Sequence[RankSums], phase_ns: Mapping[str, int]
) -> JobTotals:
    """`phase_ns`: host self time in steps by phase, of all ranks."""
    by_counter: dict[str, list[tuple[float, int]]] = {}
    by_time: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for own in ranks:
        for name, counted in own.counters.items():
            by_counter.setdefault(name, []).append(counted)
        for key, timed in own.times.items():
            by_time.setdefault(key, []).append(timed)
    counters = [
        Counter(
            name=name,
            total=float(sum(total for total, _ in parts)),
            num_values=sum(count for _, count in parts),
            num_ranks=len(parts),
        )
        for name, parts in by_counter.items()
    ]
    times = [
        TimedName(
            name=name,
            is_given=is_given,
            total_ns=sum(total for total, _ in parts),
            num_times=sum(count for _, count in parts),
            num_ranks=len(parts),
        )
        for (name, is_given), parts in by_time.items()
    ]
    return JobTotals(
        num_rank_steps=sum(own.num_steps for own in ranks),
        num_backwards=sum(own.num_backwards for own in ranks),
        num_tokens=_name_tokens(attempt, ranks),
        phase_ns=phase_ns,
        counters=tuple(sorted(counters, key=lambda one: one.name)[:MAX_NAMES]),
        times=tuple(sorted(times, key=lambda one: (-one.total_ns, one.name))[:MAX_NAMES]),
        num_names_left_out=sum(max(len(found) - MAX_NAMES, 0) for found in (counters, times)),
    )


def _has_own_tokens(attempt: Attempt, rank: int) -> bool:
    """Whether no other rank counts the same tokens; of tp and pp groups the first does."""
    layout = known(attempt.layout)
    if layout is None or rank >= layout.world_size:
        return True
    here = layout.coordinates(rank)
    return here.tp == here.pp == 0


def _name_tokens(attempt: Attempt, ranks: Sequence[RankSums]) -> int | Unavailable:
    own = [one for one in ranks if _has_own_tokens(attempt, one.rank)]
    lacking = [one.rank for one in own if one.num_tokens is None]
    if lacking:
        return Unavailable(f"not known of ranks {abbreviate_ranks(lacking)}")
    if attempt.world_size > 1 and isinstance(attempt.layout, Unavailable):
        return Unavailable(f"which ranks share tokens is not known: {attempt.layout.reason}")
    return sum(one.num_tokens or 0 for one in own)


def _sum_tokens(recording: Recording, counted: Int64s) -> int | None:
    logged: list[Floats] = []
    if _TOKENS in recording.names.values():
        found = _select(recording, is_count=False)
        logged = [part for name, part in found if name == _TOKENS]
    if logged:
        values = np.concatenate(logged)
        return int(values[np.isfinite(values) & (np.abs(values) < 1e15)].sum())
    return int(counted[counted >= 0].sum()) if (counted >= 0).any() else None


def _sum_counters(recording: Recording) -> dict[str, tuple[float, int]]:
    of_rank: dict[str, list[Floats]] = {}
    for name, values in _select(recording, is_count=True):
        of_rank.setdefault(name, []).append(values)
    joined = {name: np.concatenate(parts) for name, parts in of_rank.items()}
    return {name: (float(values.sum()), len(values)) for name, values in joined.items()}


def _select(recording: Recording, *, is_count: bool) -> Iterable[tuple[str, Floats]]:
    """Logged values by name; two ids may have one name."""
    if not recording.has_table("scalars"):
        return
    columns = recording.read("scalars")
    is_wanted: Bools = (int64_column(columns, "flags") & ScalarFlag.COUNT != 0) == is_count
    value: Floats = columns["value"][is_wanted].astype(np.float64, copy=False)
    for one, rows in _group(columns["name_id"][is_wanted].astype(np.int64)):
        yield recording.name_of(one), value[rows]


def _sum_times(recording: Recording) -> dict[tuple[str, bool], tuple[int, int]]:
    spans = recording.read("spans")
    flags = int64_column(spans, "flags")
    kept = np.flatnonzero(flags & (SpanFlag.DETAIL | SpanFlag.GIVEN))
    if not len(kept):
        return {}
    duration = int64_column(spans, "duration_ns")[kept]
    is_given = flags[kept] & SpanFlag.GIVEN != 0
    of_rank: dict[tuple[str, bool], list[Int64s]] = {}
    for code, rows in _group(2 * spans["name_id"][kept].astype(np.int64) + is_given):
        name = recording.name_of(code // 2)
        if not name.startswith(_COLLECTIONS):
            of_rank.setdefault((name, bool(code % 2)), []).append(duration[rows])
    return {
        key: (sum(int(one.sum()) for one in parts), sum(map(len, parts)))
        for key, parts in of_rank.items()
    }


def _group(codes: Int64s) -> Iterable[tuple[int, Int64s]]:
    """Rows by code, in their order; one pass, however many codes there are."""
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    return zip(found.tolist(), np.split(order, starts[1:]), strict=True) if len(codes) else ()
