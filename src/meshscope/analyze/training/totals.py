"""Sums over a run: steps, passes and tokens; and what the program counted and timed itself.

Counters (`Recorder.count`) are added up over steps and ranks. Times are of detail spans (`span`,
`timer`) and of durations that were given (`add_duration`). None of these is a part of a step's
split, except a given duration that lies where nothing was measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Sums:
    """What is added up over ranks."""

    num_rank_steps: int = 0
    num_backwards: int = 0
    num_tokens: int = 0
    ranks_without_tokens: list[int] = field(default_factory=list)
    counters: dict[str, list[Floats]] = field(default_factory=dict)
    times: dict[tuple[str, bool], list[Int64s]] = field(default_factory=dict)


def sum_totals(attempt: Attempt, phase_ns: Mapping[str, int]) -> JobTotals:
    """`phase_ns`: host self time in steps by phase, of all ranks."""
    sums = _Sums()
    for recording in attempt:
        _add_steps(sums, recording, has_own_tokens=_has_own_tokens(attempt, recording.rank))
        _add_scalars(sums, recording)
        _add_times(sums, recording)
    counters = [
        Counter(name=name, total=float(sum(map(np.sum, parts))), **_count(parts))
        for name, parts in sums.counters.items()
    ]
    times = [
        TimedName(
            name=name,
            is_given=is_given,
            total_ns=int(sum(map(np.sum, parts))),
            num_times=sum(map(len, parts)),
            num_ranks=len(parts),
        )
        for (name, is_given), parts in sums.times.items()
    ]
    return JobTotals(
        num_rank_steps=sums.num_rank_steps,
        num_backwards=sums.num_backwards,
        num_tokens=_name_tokens(sums, attempt),
        phase_ns=phase_ns,
        counters=tuple(sorted(counters, key=lambda one: one.name)[:MAX_NAMES]),
        times=tuple(sorted(times, key=lambda one: (-one.total_ns, one.name))[:MAX_NAMES]),
        num_names_left_out=sum(max(len(found) - MAX_NAMES, 0) for found in (counters, times)),
    )


def _count(parts: list[Floats]) -> dict[str, int]:
    return {"num_values": sum(map(len, parts)), "num_ranks": len(parts)}


def _has_own_tokens(attempt: Attempt, rank: int) -> bool:
    """Whether no other rank counts the same tokens; of tp and pp groups the first does."""
    layout = known(attempt.layout)
    if layout is None or rank >= layout.world_size:
        return True
    here = layout.coordinates(rank)
    return here.tp == here.pp == 0


def _name_tokens(sums: _Sums, attempt: Attempt) -> int | Unavailable:
    lacking = sums.ranks_without_tokens
    if lacking:
        return Unavailable(f"not known of ranks {abbreviate_ranks(lacking)}")
    if attempt.world_size > 1 and isinstance(attempt.layout, Unavailable):
        return Unavailable(f"which ranks share tokens is not known: {attempt.layout.reason}")
    return sums.num_tokens


def _add_steps(sums: _Sums, recording: Recording, *, has_own_tokens: bool) -> None:
    steps = recording.read("steps")
    sums.num_rank_steps += len(steps["step"])
    sums.num_backwards += int(int64_column(steps, "num_microbatches").sum())
    if not has_own_tokens:
        return
    counted = int64_column(steps, "input_tokens")
    logged = [part for name, part in _select(recording, is_count=False) if name == _TOKENS]
    if logged:
        values = np.concatenate(logged)
        sums.num_tokens += int(values[np.isfinite(values) & (np.abs(values) < 1e15)].sum())
    elif (counted >= 0).any():
        sums.num_tokens += int(counted[counted >= 0].sum())
    else:
        sums.ranks_without_tokens.append(recording.rank)


def _add_scalars(sums: _Sums, recording: Recording) -> None:
    of_rank: dict[str, list[Floats]] = {}
    for name, values in _select(recording, is_count=True):
        of_rank.setdefault(name, []).append(values)
    for name, parts in of_rank.items():
        sums.counters.setdefault(name, []).append(np.concatenate(parts))


def _select(recording: Recording, *, is_count: bool) -> Iterable[tuple[str, Floats]]:
    """Logged values by name; two ids may have one name."""
    if not recording.has_table("scalars"):
        return
    columns = recording.read("scalars")
    is_wanted: Bools = (columns["flags"].astype(np.int64) & ScalarFlag.COUNT != 0) == is_count
    value: Floats = columns["value"][is_wanted].astype(np.float64, copy=False)
    for one, rows in _group(columns["name_id"][is_wanted].astype(np.int64)):
        yield recording.name_of(one), value[rows]


def _add_times(sums: _Sums, recording: Recording) -> None:
    spans = recording.read("spans")
    flags = spans["flags"].astype(np.int64)
    kept = np.flatnonzero(flags & (SpanFlag.DETAIL | SpanFlag.GIVEN))
    if not len(kept):
        return
    duration = int64_column(spans, "duration_ns")[kept]
    is_given = flags[kept] & SpanFlag.GIVEN != 0
    of_rank: dict[tuple[str, bool], list[Int64s]] = {}
    for code, rows in _group(2 * spans["name_id"][kept].astype(np.int64) + is_given):
        name = recording.name_of(code // 2)
        if not name.startswith(_COLLECTIONS):
            of_rank.setdefault((name, bool(code % 2)), []).append(duration[rows])
    for key, parts in of_rank.items():
        sums.times.setdefault(key, []).append(np.concatenate(parts))


def _group(codes: Int64s) -> Iterable[tuple[int, Int64s]]:
    """Rows by code, in their order; one pass, however many codes there are."""
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    return zip(found.tolist(), np.split(order, starts[1:]), strict=True) if len(codes) else ()
