"""Whether ranks do alone what they take longer for: a part of training that is theirs.

A rank that updates weights for all, or draws numbers for all, is slower than its peers there by
plan. In a phase in which the others do nothing there is nobody to compare it with. Only phases with
a name that training may need say so: what one rank logs, saves or evaluates is lost to the others.
"""

from collections.abc import Sequence

import numpy as np

from meshscope.analyze.timeline.pieces import PieceKind
from meshscope.analyze.timeline.timeline import Timeline
from meshscope.simulate.ledger.peer_cells import ASIDE_PHASES, Place

MAX_OWN_PART_RATIO = 0.1
"""Of the step: what takes more is worth a look, whoever's part it is."""
_MAX_OTHERS_RATIO = 0.05
"""Of what the ranks take there, on any other rank: it does nothing there."""
OWN_PART = "no other rank does anything there: it may be its part of training"


def is_own_part(timeline: Timeline, ranks: Sequence[int], places: Sequence[Place]) -> bool:
    """Whether no other rank does anything in any of these places."""
    return bool(places) and all(_is_alone(timeline, ranks, place) for place in places)


def _is_alone(timeline: Timeline, ranks: Sequence[int], place: Place) -> bool:
    if not place.phase or place.phase in ASIDE_PHASES:
        return False
    pieces = timeline.pieces
    row = np.flatnonzero(
        (pieces.phase == timeline.phases.index(place.phase))
        & (pieces.is_between == place.is_between)
        & (pieces.kind == PieceKind.WORK)
    )
    index = np.searchsorted(np.array(timeline.ranks), pieces.rank[row])
    total_ns = np.bincount(index, pieces.duration_ns[row], minlength=len(timeline.ranks))
    is_theirs = np.isin(timeline.ranks, ranks)
    others_ns = float(total_ns[~is_theirs].max(initial=0.0))
    return others_ns < _MAX_OTHERS_RATIO * float(total_ns[is_theirs].min(initial=np.inf))
