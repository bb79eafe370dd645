"""How many steps of the run each step of a timeline stands for.

A run that is too long to be read, or that was thinned, is looked at in windows of steps. What lies
between two windows is taken for some steps like those before it and some like those after it: as
many of each as make up its length, which is known exactly, because windows border on it. Where the
steps of both windows take equally long, it is half of each. Of a window, the half that is nearer
stands for what is beyond its border: something may have changed in the middle.

Where all steps were read, those that a timeline has stand for those of their kind (`step_kinds`).

Wrong for what began and ended between two windows: its time counts, but as that of its neighbours.
"""

import numpy as np

from meshscope.analyze.timeline.timeline import Timeline
from meshscope.numerics.paired_excess import MAD_TO_DEVIATION
from meshscope.store.read.arrays import Floats, Int64s

_MIN_DIFFERENCE = 4.0
"""Between the steps of two windows, in standard errors, from which lengths tell them apart."""


def weigh_steps(timeline: Timeline) -> Floats:
    """[step]: 1 where all steps of the run were looked at."""
    if not timeline.num_left_out:
        return timeline.kinds.weigh()
    weight = np.ones(len(timeline.steps))
    if len(weight) < 2:
        return weight
    border = np.append(np.flatnonzero(timeline.starts_window), len(weight))
    half = np.maximum(np.diff(border) // 2, 1)
    # Steps [low, border) stand for what follows them, steps [border, high) for what was before.
    low, high, border = border[1:-1] - half[:-1], border[1:-1] + half[1:], border[1:-1]
    num_between = timeline.steps[border] - timeline.steps[border - 1] - 1
    period_ns = (timeline.period_end_ns - timeline.period_start_ns).mean(axis=0)
    share = _measure_share_before(
        *_measure_levels(period_ns, low, border),
        *_measure_levels(period_ns, border, high),
        measure_between(timeline).mean(axis=0) / np.maximum(num_between, 1),
    )
    parts = zip(low.tolist(), border.tolist(), high.tolist(), share, num_between, strict=True)
    for begin, middle, end, before, count in parts:
        weight[begin:middle] += before * count / (middle - begin)
        weight[middle:end] += (1 - before) * count / (end - middle)
    return weight


def measure_between(timeline: Timeline) -> Int64s:
    """[rank, border]: time between each two windows."""
    first = np.flatnonzero(timeline.starts_window)[1:]
    return timeline.period_start_ns[:, first] - timeline.period_end_ns[:, first - 1]


def measure_missing(timeline: Timeline) -> Int64s:
    """[rank]: how long the steps take that were read and are not in the timeline. Exact between two
    of its steps with no other between them than undisturbed ones."""
    kinds = timeline.kinds
    period_ns = timeline.period_end_ns - timeline.period_start_ns
    predicted_ns = kinds.predict(period_ns)
    predicted_ns[:, kinds.place] = 0
    gap_ns = timeline.period_start_ns[:, 1:] - timeline.period_end_ns[:, :-1]
    num_between = np.diff(kinds.place) - 1
    disturbed = np.append(0, np.cumsum(kinds.is_disturbed))[kinds.place]
    is_known = (np.diff(timeline.steps) - 1 == num_between) & (np.diff(disturbed) == 0)
    if not len(gap_ns[0]):
        return np.zeros(len(gap_ns), dtype=np.int64)
    estimated_ns = np.add.reduceat(predicted_ns, kinds.place, axis=1)[:, :-1]
    found = np.where(is_known, gap_ns, np.where(num_between > 0, estimated_ns, 0))
    missing_ns: Int64s = np.rint(found.sum(axis=1)).astype(np.int64)
    return missing_ns


def _measure_levels(period_ns: Floats, first: Int64s, ends: Int64s) -> tuple[Floats, Floats]:
    """Per stretch of steps the usual length of one, and the standard error of that. Single long
    steps are left out by the median."""
    level, error = np.empty(len(first)), np.empty(len(first))
    for index, (begin, end) in enumerate(zip(first.tolist(), ends.tolist(), strict=True)):
        own = period_ns[begin:end]
        level[index] = np.median(own)
        error[index] = MAD_TO_DEVIATION * np.median(np.abs(own - level[index])) / np.sqrt(len(own))
    return level, error


def _measure_share_before(
    before_ns: Floats,
    error_ns: Floats,
    after_ns: Floats,
    other_error_ns: Floats,
    between_ns: Floats,
) -> Floats:
    """Per border, which part of the steps between the windows is like those before."""
    rise = after_ns - before_ns
    is_told = np.abs(rise) > _MIN_DIFFERENCE * np.hypot(error_ns, other_error_ns)
    share = (after_ns - between_ns) / np.where(is_told, rise, 1.0)
    return np.where(is_told, np.clip(share, 0.0, 1.0), 0.5)
