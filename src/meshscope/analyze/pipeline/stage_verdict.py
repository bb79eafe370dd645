"""Why one pipeline rank, or several, takes longer than the others: more layers, extras, or slow.

The pipeline rank with the most work holds the others up by its excess over them. If its layers, at
the others' time per layer, explain at least half of that, stages are uneven. If not, it takes
longer for no more work; at the ends of the pipeline the reason may be embedding, head or loss,
which cost time in forward and in backward: an excess in only one of them has another cause. If it
is not known what stages hold, the cause is unknown.

On a busy machine actions take longer by chance. So the excess is the smaller of two, of medians and
of lower quartiles, and `longest_ratio` is the share of steps in which the rank worked longest.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from meshscope.analyze.pipeline.stage_work import StageWork, lower_median
from meshscope.core.schedule import ActionKind
from meshscope.core.unavailable import Unavailable

_EXPLAINED_RATIO = 0.5
_SAME_SET_RATIO = 0.5
"""Of the worst one's excess, for another to be as slow."""
_MIN_KIND_RATIO = 0.25
"""Extras take at least this share of their time in forward, and in backward."""


class StageCause(StrEnum):
    UNEVEN = "uneven"
    """It holds more layers."""
    EXTRAS = "extras"
    """It holds the same layers and something else, which costs in forward and in backward."""
    SLOW = "slow"
    """It takes longer for the same layers."""
    UNKNOWN = "unknown"
    """What it holds was not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageVerdict:
    """The pipeline rank with the most work, and why."""

    position: int
    positions: tuple[int, ...]
    """It, and others that are as slow."""
    stages: tuple[int, ...]
    """Of all of them, as are `ranks`."""
    ranks: tuple[int, ...]
    cause: StageCause
    work_ns: float
    """Work of one microbatch."""
    others_ns: float
    """Lower median of the other pipeline ranks."""
    quiet_excess_ratio: float
    """Excess over the others when undisturbed: of lower quartiles."""
    longest_ratio: float
    """The share of steps in which one of them worked longest."""
    num_layers: int | Unavailable
    others_layers: float | Unavailable
    """Lower median of the other pipeline ranks."""
    extras: tuple[str, ...]

    @property
    def excess_ratio(self) -> float:
        """Excess over the others, at least."""
        more = self.work_ns / self.others_ns - 1 if self.others_ns > 0 else 0.0
        return min(more, self.quiet_excess_ratio)


def judge_stages(work: StageWork) -> StageVerdict:
    """The verdict on the pipeline rank with the most work, however small its excess, and on those
    that are as slow as it."""
    load = work.position_work_ns
    worst = int(np.argmax(load))
    cause = _find_cause(
        work, worst, _list_others(work, (worst,)), has_extras=_has_extras(work, worst)
    )
    positions = _find_equally_slow(work, worst) if cause is StageCause.SLOW else (worst,)
    others = _list_others(work, positions)
    here = [stage for stage in work.stages if stage.position in positions]
    counts, layers, quiet = work.position_layers(), work.layers, work.position_quiet_ns
    usual_quiet = lower_median(quiet[others].tolist())
    extras: set[str] = set()
    if not isinstance(layers, Unavailable):
        extras = {extra for stage in here for extra in layers.extras[stage.stage]}
    return StageVerdict(
        position=worst,
        positions=positions,
        stages=tuple(stage.stage for stage in here),
        ranks=tuple(sorted({rank for stage in here for rank in stage.ranks})),
        cause=cause,
        work_ns=float(load[worst]),
        others_ns=lower_median(load[others].tolist()),
        quiet_excess_ratio=float(quiet[worst]) / usual_quiet - 1 if usual_quiet > 0 else 0.0,
        longest_ratio=float(work.longest_ratio[list(positions)].sum()),
        num_layers=counts if isinstance(counts, Unavailable) else counts[worst],
        others_layers=counts
        if isinstance(counts, Unavailable)
        else lower_median(counts[index] for index in others),
        extras=tuple(sorted(extras)),
    )


def _list_others(work: StageWork, positions: tuple[int, ...]) -> list[int]:
    return [index for index in range(work.num_positions) if index not in positions]


def _has_extras(work: StageWork, position: int) -> bool:
    layers = work.layers
    if isinstance(layers, Unavailable):
        return False
    return any(layers.extras[one.stage] for one in work.stages if one.position == position)


def _find_equally_slow(work: StageWork, worst: int) -> tuple[int, ...]:
    """The slowest and all that exceed the others by half as much or more, at most half of all, two
    of three."""
    load = work.position_work_ns
    usual_ns = float(np.median(np.sort(load)[: max(1, work.num_positions // 2)]))
    least_ns = usual_ns + _SAME_SET_RATIO * (float(load[worst]) - usual_ns)
    order = [int(index) for index in np.argsort(-load, kind="stable")]
    found: tuple[int, ...] = (worst,)
    for position in order[1 : (work.num_positions + 1) // 2]:
        others = [index for index in _list_others(work, (*found, position)) if index != worst]
        is_extra = _has_extras(work, position)
        if load[position] < least_ns or not others:
            break
        if _find_cause(work, position, others, has_extras=is_extra) is not StageCause.SLOW:
            break
        found = (*found, position)
    return tuple(sorted(found))


def _find_cause(
    work: StageWork, position: int, others: list[int], *, has_extras: bool
) -> StageCause:
    counts = work.position_layers()
    if isinstance(counts, Unavailable) or not all(counts):
        return StageCause.UNKNOWN
    load = work.position_work_ns
    usual_ns = lower_median(load[others].tolist())
    layer_ns = lower_median(load[index] / counts[index] for index in others)
    usual_layers = lower_median(counts[index] for index in others)
    explained_ns = (counts[position] - usual_layers) * layer_ns
    excess_ns = float(load[position]) - usual_ns
    if counts[position] > usual_layers and explained_ns >= _EXPLAINED_RATIO * excess_ns:
        return StageCause.UNEVEN
    if has_extras and _is_in_both_directions(work, position, others):
        return StageCause.EXTRAS
    return StageCause.SLOW


def _is_in_both_directions(work: StageWork, position: int, others: list[int]) -> bool:
    forward = work.position_kind_ns(ActionKind.FORWARD)
    total = work.position_work_ns
    more_forward = float(forward[position]) - lower_median(forward[others].tolist())
    backward = total - forward
    more_backward = float(backward[position]) - lower_median(backward[others].tolist())
    more = more_forward + more_backward
    return min(more_forward, more_backward) >= _MIN_KIND_RATIO * more
