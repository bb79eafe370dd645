"""What slow ranks have in common: a host, a pipeline stage, a tp group, a replica of the model.

A set that is all ranks of one host points to the host, one that is all of a tp group to what they
share, and so on. A trait counts only where it tells ranks apart: with one host for all ranks,
being on it says nothing. Of several traits that fit, all are named, hosts first.

Wrong where placement makes traits equal (a tp group that fills a host): then both are named, and
the numbers cannot tell which it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshscope.core.layout import Axis, Layout
from meshscope.core.unavailable import Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTrait:
    """Something all ranks of a set have in common and not all ranks of the job have."""

    kind: str
    """`host`, `stage`, `tp group` or `replica`."""
    name: str
    """`host node1`, `stage 2`, `tp group of ranks 4-5`, `dp index 1`."""
    num_members: int
    """Ranks of the job that have it."""
    is_whole: bool
    """All of them are in the set."""


def find_shared(
    ranks: Iterable[int],
    all_ranks: Iterable[int],
    layout: Layout | Unavailable,
    hosts: Mapping[int, str],
) -> tuple[SharedTrait, ...]:
    """Traits of all these ranks, whole ones first; none of a single rank.

    A trait that only part of its members show (two of eight on a host) must hold for most of
    them, or chance would name it.
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
