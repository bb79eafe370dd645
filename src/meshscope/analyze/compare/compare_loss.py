"""The first step in which the losses of two runs differ.

Values are matched by rank, step and index within the step (microbatches in order), on the ranks
that logged a loss in both runs. Two values agree if |a − b| ≤ absolute + relative · max(|a|, |b|);
NaN agrees with NaN, an infinity with itself. Exact comparison uses the bits: −0.0 is not 0.0.

Wrong where the runs number their steps differently, or log another loss under the same name: both
show as a divergence at the first step.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from meshscope.analyze.rank.signals import SIGNAL_NAMES, ScalarSeries, read_scalars
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.run import Attempt

RELATIVE = 1e-4
ABSOLUTE = 1e-6
_WANTED = frozenset(SIGNAL_NAMES["loss"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far two values may be apart."""

    absolute: float = ABSOLUTE
    relative: float = RELATIVE
    is_exact: bool = False
    """Bit by bit; the two others are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first pair of values that do not agree."""

    step: int
    rank: int
    """The lowest with one in that step."""
    a: float
    b: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """Two runs' losses, value by value."""

    name: str
    """The scalar that was compared."""
    tolerance: Tolerance
    num_values: int
    num_ranks: int
    first_step: int
    last_step: int
    divergence: Divergence | None
    """None: all agree."""
    num_beyond: int
    """Values that do not agree."""
    num_infinitely_apart: int
    """Those of them whose difference is no number: one side is infinite or NaN, or both are and
    not alike."""
    largest_difference: float
    """Of finite values; NaN without any."""
    last_a: float
    """The last value on the lowest rank."""
    last_b: float


def compare_loss(a: Attempt, b: Attempt, tolerance: Tolerance) -> LossComparison | Unavailable:
    series_a, series_b = _read(a), _read(b)
    for side, series in (("A", series_a), ("B", series_b)):
        if not series:
            return Unavailable(f"{side} logged no {' or '.join(SIGNAL_NAMES['loss'])}")
    name = next(
        (
            name
            for name in SIGNAL_NAMES["loss"]
            if any(name in series_a[r] and name in series_b.get(r, {}) for r in series_a)
        ),
        None,
    )
    if name is None:
        return Unavailable("no rank logged the same loss in both runs")
    found = _Differences(name=name, tolerance=tolerance)
    for rank in sorted(series_a.keys() & series_b.keys()):
        if name in series_a[rank] and name in series_b[rank]:
            found.add(rank, *_match(series_a[rank][name], series_b[rank][name]))
    return found.finish()


def _read(attempt: Attempt) -> dict[int, dict[str, ScalarSeries]]:
    found = {recording.rank: read_scalars(recording, _WANTED) for recording in attempt}
    return {rank: series for rank, series in found.items() if series}


def _match(a: ScalarSeries, b: ScalarSeries) -> tuple[Int64s, Floats, Floats]:
    """Common steps, and the values of each."""
    if np.array_equal(a.step, b.step):
        return a.step, a.value, b.value
    _, at_a, at_b = np.intersect1d(
        _number(a.step), _number(b.step), assume_unique=True, return_indices=True
    )
    return a.step[at_a], a.value[at_a], b.value[at_b]


def _number(step: Int64s) -> npt.NDArray[np.void]:
    """Keys of step and index within the step."""
    order = np.argsort(step, kind="stable")
    ordered = step[order]
    _, first, counts = np.unique(ordered, return_index=True, return_counts=True)
    index = np.empty(len(step), dtype=np.int64)
    index[order] = np.arange(len(step)) - np.repeat(first, counts)
    keys = np.empty(len(step), dtype=[("step", np.int64), ("index", np.int64)])
    keys["step"], keys["index"] = step, index
    return keys


@dataclass(slots=True, kw_only=True)
class _Differences:
    name: str
    tolerance: Tolerance
    num_values: int = 0
    num_ranks: int = 0
    num_beyond: int = 0
    num_infinitely_apart: int = 0
    largest: float = float("nan")
    steps: list[int] = field(default_factory=list)
    """First and last of every rank."""
    divergence: Divergence | None = None
    last: tuple[float, float] | None = None

    def add(self, rank: int, step: Int64s, a: Floats, b: Floats) -> None:
        """Ranks come in ascending order."""
        if not len(step):
            return
        beyond = np.flatnonzero(~agree(a, b, self.tolerance))
        if len(beyond):
            at = int(beyond[np.argmin(step[beyond])])
            if self.divergence is None or int(step[at]) < self.divergence.step:
                self.divergence = Divergence(
                    step=int(step[at]), rank=rank, a=float(a[at]), b=float(b[at])
                )
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(a - b)
        finite = distance[np.isfinite(distance)]
        if len(finite):
            self.largest = float(np.fmax(self.largest, finite.max()))
        self.num_values += len(step)
        self.num_ranks += 1
        self.num_beyond += len(beyond)
        self.num_infinitely_apart += int(np.count_nonzero(~np.isfinite(distance[beyond])))
        self.steps += [int(step.min()), int(step.max())]
        self.last = self.last or (float(a[-1]), float(b[-1]))

    def finish(self) -> LossComparison | Unavailable:
        if self.last is None:
            return Unavailable("the runs share no step with a loss")
        return LossComparison(
            name=self.name,
            tolerance=self.tolerance,
            num_values=self.num_values,
            num_ranks=self.num_ranks,
            first_step=min(self.steps),
            last_step=max(self.steps),
            divergence=self.divergence,
            num_beyond=self.num_beyond,
            num_infinitely_apart=self.num_infinitely_apart,
            largest_difference=self.largest,
            last_a=self.last[0],
            last_b=self.last[1],
        )


def agree(a: Floats, b: Floats, tolerance: Tolerance) -> npt.NDArray[np.bool_]:
    if tolerance.is_exact:
        return np.asarray(a.view(np.int64) == b.view(np.int64), dtype=np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        reach = tolerance.absolute + tolerance.relative * np.maximum(np.abs(a), np.abs(b))
        is_near = np.abs(a - b) <= np.where(np.isfinite(reach), reach, 0.0)
    return np.asarray((a == b) | is_near | (np.isnan(a) & np.isnan(b)), dtype=np.bool_)
