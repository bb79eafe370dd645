"""The work of ranks that can be compared, as matrices: [cell, rank], one per group of peers.

A cell is one step, one place and, where all peers communicate in the same order, one segment
(`work_parts`). A place is a phase, inside steps or in the gap before them. What ranks do in places
that are not training (fetching data, saving, evaluating, logging, and between steps whatever has no
name or one of the program's own) does not depend on their layers, so there all ranks are peers.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.timeline.peer_work import PeerGroup
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.simulate.work_parts import WorkParts
from meshscope.store.read.arrays import Bools, Floats, Int64s

BETWEEN_STEPS = "between steps"
OUTSIDE_OF_PHASES = "outside of phases"
ASIDE_PHASES = frozenset(("data", "compile", "checkpoint", "eval", "logging"))
"""Phases a step does without at best."""
_TRAINING_PHASES = frozenset((
    "forward", "backward", "optimizer", "gradient sync", "gradient norm", "weight gradient",
    "comm", "pipeline wait", "compute", "copy", "rest", "earlier",
))  # fmt: skip
"""Phases that stay training where they are between steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A phase inside steps, or in the gap before them."""

    phase: str
    is_between: bool

    @property
    def is_aside(self) -> bool:
        """Not training: the best step has nothing of it."""
        return self.phase in ASIDE_PHASES or (
            self.is_between and self.phase not in _TRAINING_PHASES
        )

    @property
    def is_own(self) -> bool:
        """Between steps, in a phase of the program's own name: training may need it."""
        return self.is_aside and bool(self.phase) and self.phase not in ASIDE_PHASES

    @property
    def name(self) -> str:
        if self.phase:
            return f"{self.phase}, {BETWEEN_STEPS}" if self.is_between else self.phase
        return BETWEEN_STEPS if self.is_between else OUTSIDE_OF_PHASES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerCells:
    """What one group of peers did, cell by cell."""

    members: tuple[int, ...]
    """Indices in `Timeline.ranks`."""
    is_compared: bool
    """Whether members are compared with each other, or each with its own other steps."""
    step: Int64s
    """[cell]: index in `Timeline.steps`."""
    place: Int64s
    """[cell]: index in `list_places`."""
    slot: Int64s
    """[cell]: equal in all steps for the same place and segment."""
    work_ns: Floats
    """[cell, member]."""
    part: Int64s
    """Indices of the parts they are made of."""
    part_cell: Int64s
    part_member: Int64s


def list_places(timeline: Timeline) -> tuple[Place, ...]:
    """Two for each phase, in the order of `find_places`."""
    return tuple(
        Place(phase=name, is_between=between)
        for name in timeline.phases
        for between in (False, True)
    )


def find_places(timeline: Timeline, parts: WorkParts) -> Int64s:
    """[part]: the index of its place."""
    places: Int64s = parts.phase.astype(np.int64) * 2 + timeline.pieces.is_between[parts.piece]
    return places


def collect_cells(
    timeline: Timeline, parts: WorkParts, groups: tuple[PeerGroup, ...]
) -> list[PeerCells]:
    places, place = list_places(timeline), find_places(timeline, parts)
    is_aside = np.array([one.is_aside for one in places])[place]
    everybody = tuple(range(len(timeline.ranks)))
    found = [_collect(timeline, parts, place, everybody, is_aside, is_segmented=False)]
    grouped = {index for group in groups for index in group.indices}
    alone = [(index,) for index in everybody if index not in grouped]
    found += [
        _collect(timeline, parts, place, members, ~is_aside, is_segmented=True)
        for members in [*(group.indices for group in groups), *alone]
    ]
    return [one for one in found if len(one.step)]


def _collect(
    timeline: Timeline,
    parts: WorkParts,
    place: Int64s,
    members: tuple[int, ...],
    is_wanted: Bools,
    *,
    is_segmented: bool,
) -> PeerCells:
    member_of = np.full(len(timeline.ranks), -1, dtype=np.int64)
    member_of[list(members)] = np.arange(len(members))
    part = np.flatnonzero(is_wanted & (member_of[parts.rank_index] >= 0))
    own = parts.signature[list(members)]
    is_alike = (own == own[:1]).all(axis=0) & is_segmented
    step = parts.step[part].astype(np.int64)
    segment = np.where(is_alike[step], parts.segment[part], 0)
    # Steps that communicate in another order have other segments.
    signature = np.unique(np.where(is_alike, own[0], 0), return_inverse=True)[1][step]
    num_signatures, num_segments = (int(one.max(initial=0)) + 1 for one in (signature, segment))
    slots, slot = np.unique(
        (place[part] * num_signatures + signature) * num_segments + segment, return_inverse=True
    )
    width = max(len(slots), 1)
    cells, cell = np.unique(step * width + slot, return_inverse=True)
    member = member_of[parts.rank_index[part]]
    work = np.bincount(
        cell * len(members) + member, parts.work_ns[part], minlength=len(cells) * len(members)
    )
    return PeerCells(
        members=members,
        is_compared=len(members) > 1,
        step=cells // width,
        place=slots[cells % width] // (num_signatures * num_segments) if len(cells) else cells,
        slot=cells % width,
        work_ns=np.asarray(work.reshape(len(cells), len(members)), dtype=np.float64),
        part=part,
        part_cell=cell,
        part_member=member,
    )
