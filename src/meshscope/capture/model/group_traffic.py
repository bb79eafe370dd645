"""What process groups without a name are for, from what they carry: the last resort.

Gradients are summed outside of forward, along dp. Sums inside forward are partial results, along
tp. Two layouts are told from that: dp over all ranks where nothing is summed in forward, and
dp × tp where groups of both kinds fill the world. Messages between two ranks may be a pipeline's or
a ring's: then nothing is said.

Wrong for a program whose ranks share nothing but numbers for a log, which then is called dp (its
ranks do have other data).
"""

from collections import defaultdict

from meshscope.capture.operations.operation_log import OperationLog
from meshscope.core.layout import Axis, Layout
from meshscope.core.mesh_layout import AxisGroup, layout_from_groups
from meshscope.core.operations import POINT_TO_POINT, Kind
from meshscope.store.schema import BUILTIN_NAMES

_MIN_LOOKS = 2
"""Looks at the end of different steps: the first one may be unlike the others."""
_FORWARD = BUILTIN_NAMES["forward"]
_SUMS = frozenset((Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE))
_IN_FORWARD = _SUMS | {Kind.ALL_TO_ALL}


class GroupTraffic:
    """Collects the kinds of operations of each group, from those that ended lately."""

    def __init__(self) -> None:
        self._seen: defaultdict[int, set[tuple[int, bool]]] = defaultdict(set)
        """By group: kinds, and whether in forward."""
        self._num_looks = 0

    def guess(self, log: OperationLog, rank: int, world_size: int) -> tuple[Layout, str] | None:
        """The layout and how it is known, if it can be told."""
        ended = [words[0] for words in list(log.observed)]
        for a in ended:
            self._seen[a >> 32 & 0xFFFF].add((a & 0xFF, a >> 48 & 0x7FFF == _FORWARD))
        self._num_looks += bool(ended)
        if self._num_looks < _MIN_LOOKS or log.groups is None:
            return None
        if any(kind in POINT_TO_POINT for found in self._seen.values() for kind, _ in found):
            return None
        groups = []
        for entry in list(log.groups.entries.values()):
            axis = _read_axis(self._seen.get(entry.group_id, set()))
            if axis is not None and len(entry.ranks) > 1:
                ranks = tuple(sorted(entry.ranks))
                groups.append(AxisGroup(axis=axis, description=f"{axis} by traffic", ranks=ranks))
        return _combine(groups, rank, world_size)


def _read_axis(seen: set[tuple[int, bool]]) -> Axis | None:
    if any(kind in _IN_FORWARD and in_forward for kind, in_forward in seen):
        return Axis.TP
    return Axis.DP if any(kind in _SUMS for kind, _ in seen) else None


def _combine(groups: list[AxisGroup], rank: int, world_size: int) -> tuple[Layout, str] | None:
    partial = [group for group in groups if group.axis == Axis.TP]
    if not partial:
        if any(len(group.ranks) == world_size for group in groups):
            return Layout(dp=world_size), "guessed: sums over all ranks, none inside forward"
        return None
    # All ranks may also share a number for a log.
    smaller = [group for group in groups if len(group.ranks) < world_size]
    if len(smaller) < len(partial) + 1 or any(len(g.ranks) == world_size for g in partial):
        return None
    layout = layout_from_groups(smaller, rank, world_size)
    if not isinstance(layout, Layout):
        return None
    return layout, "guessed: groups that sum inside forward are tp, the others dp"
