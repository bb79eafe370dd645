"""Where each rank is: its coordinates as numbers, its host, and how many peers it has."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.analyze.rank.rank_summary import RankState
from meshscope.analyze.study import Study
from meshscope.core.layout import Axis
from meshscope.core.unavailable import Unavailable, known


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRank:
    """One rank that recorded."""

    rank: int
    coordinates: Mapping[str, int] | Unavailable
    """By axis, those of degree 1 too; the reason where the layout is not known."""
    label: str | Unavailable
    """`dp0.tp1.pp1`: axes in use."""
    host: str | Unavailable
    num_peers: int
    """Other ranks whose work it is compared with."""
    state: RankState | Unavailable
    num_steps: int


def place_ranks(study: Study) -> tuple[MeshRank, ...]:
    """Ascending."""
    layout, num_peers = study.layout, _count_peers(study)

    def find_coordinates(rank: int) -> Mapping[str, int] | Unavailable:
        if isinstance(layout, Unavailable):
            return layout
        if rank >= layout.world_size:
            return Unavailable(f"the layout {layout.describe()} has no rank {rank}")
        at = layout.coordinates(rank)
        return {str(axis): at.along(axis) for axis in Axis}

    return tuple(
        MeshRank(
            rank=one.rank,
            coordinates=find_coordinates(one.rank),
            label=one.label,
            host=one.host,
            num_peers=num_peers.get(one.rank, 0),
            state=one.state,
            num_steps=one.num_steps,
        )
        for one in study.ranks
    )


def _count_peers(study: Study) -> dict[int, int]:
    work = known(study.compared_work)
    if work is None:
        return {}
    return {
        work.ranks[index]: len(group.indices) - 1
        for group in work.groups
        for index in group.indices
    }
