"""Traces of several ranks together: clock offsets, late ranks, exposed time.

It is what `analyze.job` and `analyze.communication` find in the run that the traces make:
operations matched by group and number, clocks aligned by their ends, waits apart from transfers.
"""

from dataclasses import dataclass

from meshscope.analyze.communication.communication import Communication
from meshscope.analyze.communication.communication_sums import StepSums
from meshscope.analyze.communication.last_arrivers import ALL_AXES
from meshscope.analyze.job.clock_pairs import ClockMethod
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """How far a rank's clock is ahead of the first rank's."""

    rank: int
    offset_ns: int
    uncertainty_ns: int
    num_operations: int
    """Operations and messages it rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank that others waited for."""

    rank: int
    num_last: int
    caused_wait_ns: int
    """The waits of all others together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSplit:
    """Exposed communication: wait + transfer + unmatched == exposed."""

    exposed_ns: int
    wait_ns: int
    """For others that an operation needed."""
    transfer_ns: int
    unmatched_ns: int
    """In operations that were not found on all ranks of their group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExposed:
    """Exposed communication of one rank, in its steps."""

    rank: int
    split: ExposedSplit
    steps: dict[int, ExposedSplit]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    ranks: tuple[int, ...]
    clocks: tuple[RankClock, ...] | Unavailable
    unaligned: tuple[int, ...]
    """Ranks whose clocks nothing ties to the others'."""
    num_matched: int
    num_unmatched: int
    num_undecided: int
    """Of these, in which no rank is known to have come last: arrivals are closer together than the
    clocks are known."""
    late: tuple[LateRank, ...]
    exposed: tuple[RankExposed, ...]


def compare_ranks(found: Communication | Unavailable) -> RankComparison | Unavailable:
    if isinstance(found, Unavailable):
        return found
    if len(found.ranks) < 2:
        return Unavailable("it takes traces of two ranks or more, of the same steps")
    clocks = _list_clocks(found)
    aligned = {clock.rank for clock in clocks}
    return RankComparison(
        ranks=found.ranks,
        clocks=clocks if len(clocks) > 1 else _explain_no_clocks(found),
        unaligned=tuple(rank for rank in found.ranks if rank not in aligned),
        num_matched=found.health.num_matched,
        num_unmatched=found.health.num_unmatched + found.health.num_unknown_group,
        num_undecided=found.num_undecided,
        late=_list_late(found),
        exposed=tuple(
            RankExposed(
                rank=one.rank,
                split=ExposedSplit(
                    exposed_ns=one.total.exposed_ns,
                    wait_ns=one.total.exposed_wait_ns,
                    transfer_ns=one.total.exposed_transfer_ns,
                    unmatched_ns=one.total.exposed_unsplit_ns + one.total.exposed_late_ns,
                ),
                steps=_split_steps(found.by_step, one.rank),
            )
            for one in found.by_rank
        ),
    )


def _explain_no_clocks(found: Communication) -> Unavailable:
    if found.health.num_unknown_group and not found.health.num_matched:
        return Unavailable(
            "these traces name no group, and the job may have several: which operations belong "
            "together is not known"
        )
    return Unavailable("; ".join(found.clocks.problems) or "no operations to align clocks by")


def _list_clocks(found: Communication) -> tuple[RankClock, ...]:
    return tuple(
        RankClock(
            rank=rank,
            offset_ns=clock.offset_ns,
            uncertainty_ns=clock.uncertainty_ns
            + (round(found.clocks.shared_ns) if rank != clock.ranks[0] else 0),
            num_operations=clock.num_operations,
        )
        for clock in found.clocks.clocks
        for rank in clock.ranks
        if clock.method is not ClockMethod.WALL_CLOCK  # says nothing that the traces do not
        and isinstance(clock.offset_ns, int)
        and isinstance(clock.uncertainty_ns, int)
    )


def _list_late(found: Communication) -> tuple[LateRank, ...]:
    late = (
        LateRank(rank=one.rank, num_last=one.num_last, caused_wait_ns=one.caused_wait_ns)
        for one in found.last_arrivers
        if one.axis == ALL_AXES and one.caused_wait_ns
    )
    return tuple(sorted(late, key=lambda one: -one.caused_wait_ns))


def _split_steps(sums: StepSums, rank: int) -> dict[int, ExposedSplit]:
    at = sums.ranks.index(rank)
    tables = (sums.exposed_wait_ns, sums.exposed_transfer_ns)
    others = sums.exposed_unsplit_ns[at] + sums.exposed_late_ns[at]
    columns = (sums.step, *(table[at] for table in tables), others)
    return {
        step: ExposedSplit(
            exposed_ns=wait + transfer + other,
            wait_ns=wait,
            transfer_ns=transfer,
            unmatched_ns=other,
        )
        for step, wait, transfer, other in zip(*(c.tolist() for c in columns), strict=True)
    }
