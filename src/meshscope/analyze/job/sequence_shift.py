"""By how much a rank's sequence numbers are off if its recorder started in the middle.

A recorder counts a group's operations from the first one it sees. If one rank's recorder was
attached later, its operation 0 is another rank's operation n. A constant shift is accepted if every
signature then agrees and the times do: an operation ends on no rank before every rank has entered
it. Among shifts that pass, the one that brings ends closest together must be clearly better than
the next; otherwise there is no shift.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.operations import find_rows
from meshscope.numerics.theil_sen import fit_line
from meshscope.store.read.arrays import Bools, Int64s

MIN_OVERLAP = 8
"""Operations that two ranks must have in common under a shift."""
_MAX_CHECKED = 512
"""Operations sampled per rank, spread over all of them."""
_MAX_VIOLATIONS = 0.01
"""Share of operations whose times may contradict a correct shift."""
_NUM_NEIGHBOURS = 64
"""Shifts tried on each side of the one that times suggest."""
_CLEARLY_BETTER = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelRows:
    """The operations of one rank in one group, by ascending sequence, times roughly aligned."""

    sequence: Int64s
    start_ns: Int64s
    end_ns: Int64s
    """-1 when it is not known."""
    signature: Int64s
    """Some numbers per row; all equal if two ranks' operations can be the same."""
    is_symmetric: Bools

    def select(self, rows: Int64s) -> "ChannelRows":
        return ChannelRows(
            sequence=self.sequence[rows],
            start_ns=self.start_ns[rows],
            end_ns=self.end_ns[rows],
            signature=self.signature[rows],
            is_symmetric=self.is_symmetric[rows],
        )


def find_shift(reference: ChannelRows, other: ChannelRows, *, tolerance_ns: int) -> int | None:
    """What to add to the other's sequence numbers; None if no shift fits."""
    if not len(reference.sequence) or not len(other.sequence):
        return None
    count = len(other.sequence)
    checked = other.select(np.unique(np.linspace(0, count - 1, _MAX_CHECKED).astype(np.int64)))
    middle = _guess_shift(reference, checked)
    scores: list[tuple[float, int]] = []
    for shift in {0, *range(middle - _NUM_NEIGHBOURS, middle + _NUM_NEIGHBOURS + 1)}:
        spread = _measure_spread(reference, checked, shift, tolerance_ns)
        if spread is not None:
            scores.append((spread, shift))
    scores.sort()
    if not scores:
        return None
    if len(scores) > 1 and scores[0][0] > _CLEARLY_BETTER * scores[1][0]:
        return None
    return scores[0][1]


def _guess_shift(reference: ChannelRows, other: ChannelRows) -> int:
    """The shift that brings starts together."""
    starts = np.maximum.accumulate(reference.start_ns)
    index = np.minimum(np.searchsorted(starts, other.start_ns), len(starts) - 1)
    return int(np.median(reference.sequence[index] - other.sequence))


def _measure_spread(
    reference: ChannelRows, other: ChannelRows, shift: int, tolerance_ns: int
) -> float | None:
    """How far apart ends lie, without offset and drift; None if the shift is impossible."""
    index = find_rows(reference.sequence, other.sequence + shift)
    found = np.flatnonzero(index >= 0)
    if len(found) < MIN_OVERLAP:
        return None
    left, right = reference.select(index[found]), other.select(found)
    if not np.array_equal(left.signature, right.signature):
        return None
    timed = np.flatnonzero((left.end_ns >= 0) & (right.end_ns >= 0) & left.is_symmetric)
    if len(timed) < MIN_OVERLAP:
        return None
    left, right = left.select(timed), right.select(timed)
    early = np.minimum(left.end_ns, right.end_ns) + tolerance_ns
    is_violated = early < np.maximum(left.start_ns, right.start_ns)
    if np.count_nonzero(is_violated) > _MAX_VIOLATIONS * len(timed):
        return None
    line = fit_line(
        (left.end_ns - left.end_ns[0]).astype(np.float64),
        (right.end_ns - left.end_ns).astype(np.float64),
    )
    return None if line is None else line.spread
