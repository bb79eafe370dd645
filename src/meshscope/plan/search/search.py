"""Finds the best layouts: all of them by bounds, those that may be best by replay.

    found = search(job, request, say=print)

Every combination of the request is an index; what is invalid is rejected with its reason, what
cannot fit by its least memory, and the rest is replayed in the order of its shortest possible step
until nothing left can be among the best. So the result is that of replaying everything
(tests/unit/plan/test_search.py), and the same every time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshscope.errors import UsageError
from meshscope.plan.candidate import Candidate
from meshscope.plan.memory.memory import estimate_ranks
from meshscope.plan.memory.memory_parts import RankMemory
from meshscope.plan.search.bounds import bound_memory, bound_steps
from meshscope.plan.search.combinations import Bools, Combinations, list_combinations, list_rules
from meshscope.plan.search.request import Request, find_request_problems
from meshscope.plan.timing.pricing import Job, StepPrice, price_candidates

Floats = npt.NDArray[np.float64]
Say = Callable[[str], None]

_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout that fits, with its price."""

    price: StepPrice
    ranks: tuple[RankMemory, ...]

    @property
    def candidate(self) -> Candidate:
        return self.price.candidate

    @property
    def peak_bytes(self) -> int:
        return max(rank.total_bytes for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Layouts that were not considered further, for one reason."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    num_combinations: int
    num_bounded: int
    """Valid layouts that fit by their least memory."""
    num_replayed: int
    best: tuple[Choice, ...]
    """Fastest first."""
    pareto: tuple[Choice, ...]
    """No other is both faster and smaller; fastest first."""
    rejections: tuple[Rejection, ...]
    least_memory_bytes: int | None
    """Of what did not fit, the least that any needs; None where something fits."""
    least_memory_layout: str = ""


def search(
    job: Job, request: Request, *, say: Say | None = None, is_exhaustive: bool = False
) -> Found:
    """The best layouts; UsageError with all problems of the request.

    `is_exhaustive` replays everything that fits, to compare with.
    """
    problems = find_request_problems(request)
    if problems:
        raise UsageError("; ".join(problems))
    tell = say or (lambda _: None)
    table = list_combinations(job, request)
    tell(f"{len(table.columns):,} combinations")
    rejected, keep = _reject_invalid(job, request, table)
    valid = np.flatnonzero(keep)
    table = table.take(valid)
    capacity = request.memory_ratio * job.cluster.memory_bytes
    bound = bound_memory(job.model, job.recipe, table.columns, table.schedules, table.recomputes)
    fits = bound.total_bytes <= capacity
    rejected += _reject_memory(table, bound.states_bytes, bound.total_bytes, capacity)
    least = _find_least(table, np.where(fits, np.inf, bound.total_bytes))
    fitting = table.take(np.flatnonzero(fits))
    lower = bound_steps(job, fitting.columns, fitting.schedules)
    tell(f"{len(lower):,} may fit and are bounded")
    order = np.argsort(lower, kind="stable")
    best, num_replayed, too_large = _replay_best(
        job, request, fitting, lower, order, capacity, tell, is_exhaustive=is_exhaustive
    )
    if too_large:
        leanest_bytes, leanest = min(too_large)
        short = (leanest_bytes - capacity) / 2**30
        rejected.append(
            Rejection(
                reason="memory: the schedule holds more than the device has",
                count=len(too_large),
                example=f"{leanest}, {short:.1f} GiB short",
            )
        )
        sizes = [(size, name) for size, name in (least,) if size is not None]
        least = min([*sizes, *too_large])
    pareto = _find_pareto(job, fitting, lower, bound.total_bytes[fits], capacity, best)
    slower = len(lower) - num_replayed
    if slower:
        example = fitting.make(int(order[-1])).describe()
        rejected.append(
            Rejection(reason="slower than the best even at best", count=slower, example=example)
        )
    return Found(
        num_combinations=request.num_combinations,
        num_bounded=len(lower),
        num_replayed=num_replayed,
        best=tuple(best[: request.top]),
        pareto=pareto,
        rejections=tuple(sorted(rejected, key=lambda one: -one.count)),
        least_memory_bytes=None if best else least[0],
        least_memory_layout="" if best else least[1],
    )


# --- steps ---------------------------------------------------------------------------------------


def _reject_invalid(
    job: Job, request: Request, table: Combinations
) -> tuple[list[Rejection], Bools]:
    """Each layout goes by the first reason that it meets."""
    keep = np.ones(len(table.columns), dtype=bool)
    rejections = []
    for reason, is_wrong in list_rules(job, request, table):
        hit = keep & is_wrong
        if hit.any():
            example = table.make(int(np.flatnonzero(hit)[0])).describe()
            rejections.append(Rejection(reason=reason, count=int(hit.sum()), example=example))
            keep &= ~hit
    return rejections, keep


def _reject_memory(
    table: Combinations, states: Floats, total: Floats, capacity: float
) -> list[Rejection]:
    found = []
    for reason, hit in (
        ("memory: weights, gradients and states alone are too large", states > capacity),
        (
            "memory: activations do not fit beside the states",
            (states <= capacity) & (total > capacity),
        ),
    ):
        if hit.any():
            index = int(np.flatnonzero(hit)[total[hit].argmin()])
            short = (total[index] - capacity) / 2**30
            example = f"{table.make(index).describe()}, {short:.1f} GiB short"
            found.append(Rejection(reason=reason, count=int(hit.sum()), example=example))
    return found


def _find_least(table: Combinations, total: Floats) -> tuple[int | None, str]:
    if not np.isfinite(total).any():
        return None, ""
    index = int(total.argmin())
    return int(total[index]), table.make(index).describe()


def _replay_best(
    job: Job,
    request: Request,
    table: Combinations,
    lower: Floats,
    order: npt.NDArray[np.int64],
    capacity: float,
    tell: Say,
    *,
    is_exhaustive: bool,
) -> tuple[list[Choice], int, list[tuple[int, str]]]:
    """In the order of the bounds, until no bound left is below the worst of the best."""
    best: list[Choice] = []
    too_large: list[tuple[int, str]] = []
    done = 0
    while done < len(order):
        worst = best[request.top - 1].price.step_s if len(best) >= request.top else np.inf
        if not is_exhaustive and lower[order[done]] > worst:
            break
        picked = order[done : done + _BATCH]
        choices, large = _price(job, [table.make(int(index)) for index in picked], capacity)
        best = sorted([*best, *choices], key=lambda one: (one.price.step_s, one.peak_bytes))
        best = best if is_exhaustive else best[: max(request.top, 64)]
        too_large += large
        done += len(picked)
        tell(f"{done:,} of {len(order):,} replayed")
    return best, done, too_large


def _price(
    job: Job, candidates: Sequence[Candidate], capacity: float
) -> tuple[list[Choice], list[tuple[int, str]]]:
    """Those that fit, and the bytes and names of the others."""
    choices, large = [], []
    fitting = []
    for candidate in candidates:
        ranks = estimate_ranks(job.model, candidate, job.recipe)
        most = max(rank.total_bytes for rank in ranks)
        if most > capacity:
            large.append((most, candidate.describe()))
        else:
            fitting.append((candidate, ranks))
    prices = price_candidates(job, [candidate for candidate, _ in fitting])
    for price, (_, ranks) in zip(prices, fitting, strict=True):
        choices.append(Choice(price=price, ranks=ranks))
    return choices, large


def _find_pareto(
    job: Job,
    table: Combinations,
    lower: Floats,
    memory: Floats,
    capacity: float,
    best: list[Choice],
) -> tuple[Choice, ...]:
    """Of the bounds' front, replayed, and the best."""
    order = np.lexsort((memory, lower))
    running = np.minimum.accumulate(memory[order]) if len(order) else memory
    is_front = np.ones(len(order), dtype=bool)
    is_front[1:] = memory[order][1:] < running[:-1]
    picked = order[is_front][:_BATCH]
    choices, _ = _price(job, [table.make(int(index)) for index in picked], capacity)
    front: list[Choice] = []
    for one in sorted([*best, *choices], key=lambda one: (one.price.step_s, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return tuple(front)
