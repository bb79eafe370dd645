"""Process groups as a rank's journal names them: one line each, before their first operation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

GROUP_KIND = "group"
_MAX_GROUP_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    group_id: int
    """The rank's own number for it; other ranks number the same group differently."""
    name: str
    description: str
    """What its maker calls it: `mesh_tp`, `default_pg`; may be empty."""
    backend: str
    ranks: tuple[int, ...]
    """Global ranks in the group's own order; empty when it could not be learned."""


def pack_ranks(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks as a journal line holds them: evenly spaced ones as three numbers."""
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        if stride and list(ranks) == list(range(ranks[0], ranks[-1] + stride, stride)):
            return {"first": ranks[0], "count": len(ranks), "stride": stride}
    return list(ranks)


def _unpack_ranks(value: object) -> tuple[int, ...]:
    """The inverse of `pack_ranks`; no ranks when it is not what that would have written."""
    if isinstance(value, list) and all(_is_rank(rank) for rank in value):
        return tuple(value)
    if isinstance(value, dict):
        first, count, stride = (value.get(name) for name in ("first", "count", "stride"))
        if (
            isinstance(first, int)
            and isinstance(count, int)
            and isinstance(stride, int)
            and 0 <= count <= _MAX_GROUP_RANKS
            and _is_rank(first)
            and _is_rank(first + (count - 1) * stride)
        ):
            return _space_ranks(first, count, stride)
    return ()


@lru_cache(maxsize=256)
def _space_ranks(first: int, count: int, stride: int) -> tuple[int, ...]:
    """One tuple for all members of a group: a copy in each of ten thousand would be ranks²."""
    return tuple(range(first, first + count * stride, stride)) if stride else (first,) * count


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def groups_from_journal(lines: Iterable[Mapping[str, object]]) -> dict[int, Group]:
    """Groups by id; a later line with the same id replaces an earlier one."""
    groups = {}
    for line in lines:
        group_id = line.get("id")
        if line.get("kind") != GROUP_KIND or not isinstance(group_id, int):
            continue
        groups[group_id] = Group(
            group_id=group_id,
            name=str(line.get("name", ""))[:200],
            description=str(line.get("description", ""))[:200],
            backend=str(line.get("backend", ""))[:40],
            ranks=_unpack_ranks(line.get("ranks")),
        )
    return groups
