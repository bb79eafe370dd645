"""Whether uneven work comes from the data: forward and backward of a batch are long together.

A longer sequence lengthens forward and backward of the same microbatch by the same factor; a slow
host or a pause lengthens one of them. So their correlation over microbatches (if pipeline actions
were recorded) or steps separates the two (OSDI'25: Pearson r of 0.9 and more over the microbatches
of a stage). Each rank and stage is divided by its own median first, so that a rank that is slow in
both does not look like long sequences.

If tokens were counted per step, their correlation with work is reported too. Equal counts do not
contradict it: attention grows with the square of single sequences, not with their sum.

What all ranks of a step share is removed first: it makes no rank wait. Wrong where something else
varies both on one rank alike from step to step, such as another program on its host.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.job.operations import find_rows
from meshscope.analyze.timeline.actions import ACTION_KINDS
from meshscope.analyze.timeline.peer_work import PeerWork
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.arrays import Floats, Int64s
from meshscope.store.read.columns import int64_column
from meshscope.store.read.run import Attempt

SAMPLES, TOKENS = "input_samples", "input_tokens"
"""Columns of `steps`."""
MIN_CORRELATION = 0.8
"""Of forward and backward that vary by `_CLEAR_VARIATION_RATIO`: ranks that compute on cores of one
host lengthen each other's phases now and then, by chance."""
_STRICT_CORRELATION = 0.9
"""Of those that vary less (OSDI'25, §5)."""
_CLEAR_VARIATION_RATIO = 0.2
_MIN_PAIRS = 20
_MIN_VARIATION_RATIO = 0.10
"""Least standard deviation over the mean of forward and backward: less is noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceImbalance:
    """How forward and backward of the same data vary together."""

    correlation: float
    """Pearson's r of forward and backward."""
    variation_ratio: float
    """The smaller of the two variations, relative to the rank's usual time."""
    num_pairs: int
    unit: str
    """`microbatch` or `step`."""
    token_correlation: float | Unavailable
    """Of tokens with forward plus backward, over ranks and steps."""

    @property
    def is_found(self) -> bool:
        is_clear = self.variation_ratio >= _CLEAR_VARIATION_RATIO
        return (
            self.num_pairs >= _MIN_PAIRS
            and self.correlation >= (MIN_CORRELATION if is_clear else _STRICT_CORRELATION)
            and self.variation_ratio >= _MIN_VARIATION_RATIO
        )


def read_counts(attempt: Attempt, work: PeerWork) -> dict[str, Floats]:
    """By column of `steps`, [step, rank]: samples and tokens; NaN where they were not counted."""
    counts = {name: np.full(work.total_ns.shape, np.nan) for name in (SAMPLES, TOKENS)}
    numbers = _join_numbers(work.steps)
    for index, rank in enumerate(work.ranks):
        recording = attempt.ranks[rank]
        is_kept = recording.kept is not None or recording.windows is not None
        columns = recording.read("steps") if is_kept else recording.read_steps(numbers)
        row = find_rows(work.steps, int64_column(columns, "step"))
        for name, of_ranks in counts.items():
            counted = int64_column(columns, name)
            known = (row >= 0) & (counted >= 0)
            of_ranks[row[known], index] = counted[known]
    return counts


def _join_numbers(steps: Int64s) -> list[tuple[int, int]]:
    """Sorted step numbers as ranges, both ends included."""
    ends = np.flatnonzero(np.diff(steps) > 1)
    first = np.concatenate([steps[:1], steps[ends + 1]]).tolist()
    last = np.concatenate([steps[ends], steps[-1:]]).tolist()
    return list(zip(first, last, strict=True))


def measure_sequence_imbalance(
    work: PeerWork, timeline: Timeline, tokens: Floats | None = None
) -> SequenceImbalance | Unavailable:
    """`tokens` is [step, rank], NaN where not counted."""
    pairs = _pair_actions(timeline)
    unit = "microbatch"
    if pairs is None:
        pairs, unit = _pair_phases(work), "step"
    if pairs is None:
        return Unavailable("forward and backward were not recorded apart")
    forward, backward = pairs
    if len(forward) < _MIN_PAIRS:
        return Unavailable(f"{len(forward)} pairs of forward and backward; it takes {_MIN_PAIRS}")
    return SequenceImbalance(
        correlation=correlate(forward, backward),
        variation_ratio=min(_vary(forward), _vary(backward)),
        num_pairs=len(forward),
        unit=unit,
        token_correlation=_correlate_tokens(work, tokens),
    )


def correlate(first: Floats, second: Floats) -> float:
    """Pearson's r; 0 if one of them is constant."""
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale > 0 else 0.0


def _vary(values: Floats) -> float:
    mean = float(values.mean())
    return float(values.std()) / mean if mean > 0 else 0.0


def _pair_phases(work: PeerWork) -> tuple[Floats, Floats] | None:
    """Forward and backward of each rank and step, relative to the rank's usual and the step's."""
    if "forward" not in work.phases or "backward" not in work.phases or not work.groups:
        return None
    both = []
    for name in ("forward", "backward"):
        matrix = work.work_ns[work.phases.index(name)]
        parts = []
        for group in work.groups:
            own = matrix[:, list(group.indices)]
            usual = np.median(own, axis=0)
            if not bool((usual > 0).all()):
                return None
            relative = own / usual
            mean = relative.mean(axis=1, keepdims=True)
            # In a step in which no peer has any work of the phase all are alike.
            shares = np.divide(relative, mean, out=np.ones_like(relative), where=mean > 0)
            parts.append(shares.ravel())
        both.append(np.concatenate(parts))
    return both[0], both[1]


def _pair_actions(timeline: Timeline) -> tuple[Floats, Floats] | None:
    """Forward and backward of each microbatch, relative to its rank, stage and step."""
    actions = timeline.actions
    if actions is None:
        return None
    duration = (actions.end_ns - actions.start_ns).astype(np.float64)
    key = _number(actions.rank, actions.step, actions.stage, actions.chunk, actions.microbatch)
    index = _number(actions.rank, actions.stage, actions.chunk)
    is_forward = actions.kind == ACTION_KINDS.index("F")
    size = int(key.max(initial=-1)) + 1
    forward, backward = (
        np.bincount(key[own], duration[own], minlength=size).astype(np.float64)
        for own in (is_forward, ~is_forward)
    )
    owner, step = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    owner[key], step[key] = index, actions.step
    whole = (forward > 0) & (backward > 0)
    if not bool(whole.any()):
        return None
    owner, step = owner[whole], step[whole]
    return (
        _relate(forward[whole], owner, step),
        _relate(backward[whole], owner, step),
    )


def _relate(values: Floats, owner: Int64s, step: Int64s) -> Floats:
    """Divides by what each owner usually takes, then by the mean of the step."""
    related = values.copy()
    for number in np.unique(owner).tolist():
        own = owner == number
        related[own] /= np.median(related[own])
    mean = np.bincount(step, related) / np.maximum(np.bincount(step), 1)
    return np.asarray(related / mean[step])


def _number(*columns: np.typing.NDArray[np.integer]) -> Int64s:
    """Equal rows get equal numbers, from 0."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, index = np.unique(column, return_inverse=True)
        number = number * (int(index.max(initial=0)) + 1) + index
        _, number = np.unique(number, return_inverse=True)
    return number.astype(np.int64)


def _correlate_tokens(work: PeerWork, tokens: Floats | None) -> float | Unavailable:
    if tokens is None:
        return Unavailable("tokens were not counted per step")
    usual = np.median(work.total_ns, axis=0)
    known = np.isfinite(tokens) & (tokens > 0) & (usual > 0)
    if int(known.sum()) < _MIN_PAIRS:
        return Unavailable("tokens were not counted in enough steps")
    if float(tokens[known].std()) == 0:
        return Unavailable("every step of every rank had equally many tokens")
    relative = work.total_ns / np.where(usual > 0, usual, 1.0)
    return correlate(tokens[known], relative[known])
