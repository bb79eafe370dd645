"""What slow ranks have in common: a host, a pipeline stage, a tp group, a replica of the model.

A set of all ranks of one host points to the host, a whole tp group to what its ranks share, and so
on. A trait counts only if it distinguishes ranks: with one host for all ranks, it says nothing. All
traits that fit are named, hosts first.

Wrong where placement makes traits equal (a tp group that fills a host): then both are named.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTrait:
    """Something that all ranks of a set share and not all ranks of the job."""

    kind: str
    """`host`, `stage`, `tp group` or `replica`."""
    name: str
    """`host node1`, `stage 2`, `tp group of ranks 4-5`, `dp index 1`."""
    num_members: int
    """Ranks of the job that have it."""
    is_whole: bool
    """All its members are in the set."""


def find_shared(
    ranks: Iterable[int],
    all_ranks: Iterable[int],
    layout: Layout | Unavailable,
    hosts: Mapping[int, str],
) -> tuple[SharedTrait, ...]:
    """Traits that all these ranks share, whole ones first; none for a single rank.

    Most members of a trait must be in the set (not two of eight on a host): chance names others.
    """
    wanted = frozenset(ranks)
    if len(wanted) < 2:
        return ()
    everyone = frozenset(all_ranks) | wanted
    found = []
    for kind, name, members in _list_traits(everyone, layout, hosts):
        if not wanted <= members or len(members) == len(everyone):
            continue
        if 2 * len(wanted) >= len(members):
            whole = wanted == members
            found.append(
                SharedTrait(kind=kind, name=name, num_members=len(members), is_whole=whole)
            )
    return tuple(sorted(found, key=lambda trait: not trait.is_whole))


def _list_traits(
    everyone: frozenset[int], layout: Layout | Unavailable, hosts: Mapping[int, str]
) -> list[tuple[str, str, frozenset[int]]]:
    keys: dict[tuple[str, str], set[int]] = {}
    for rank in sorted(everyone):
        if hosts.get(rank):
            keys.setdefault(("host", f"host {hosts[rank]}"), set()).add(rank)
        if isinstance(layout, Unavailable) or not 0 <= rank < layout.world_size:
            continue
        at = layout.coordinates(rank)
        if layout.pp > 1:
            keys.setdefault(("stage", f"stage {at.pp}"), set()).add(rank)
        if layout.tp > 1:
            group = layout.group_ranks(Axis.TP, rank)
            name = f"tp group of ranks {group[0]}-{group[-1]}"
            keys.setdefault(("tp group", name), set()).add(rank)
        if layout.dp > 1:
            keys.setdefault(("replica", f"dp index {at.dp}"), set()).add(rank)
    return [(kind, name, frozenset(members)) for (kind, name), members in keys.items()]
