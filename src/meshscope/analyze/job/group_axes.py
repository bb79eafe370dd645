"""The process groups of all ranks, and the axis of the mesh each one lies along.

Ranks number their groups as they meet them; a group is identified by its members and by torch's
name for it, which is the same on all ranks. If names differ or are missing (another launcher), the
k-th group with these members on one rank is matched with the k-th on the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshscope.core.group_axis import AxisSource, name_axis
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt
from meshscope.store.write.groups import Group

UNKNOWN_GROUP = -1


_Key = tuple[tuple[int, ...], str, int]
"""Members in order, name, and how many earlier groups of the rank have the same two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGroup:
    """A process group of the job."""

    ranks: tuple[int, ...]
    """Members in ascending order."""
    name: str
    description: str
    backend: str
    axis: str
    """`dp`, `dp+cp`, a name of a mesh's dim, `world` or `other`."""
    axis_source: AxisSource
    num_hosts: int | Unavailable
    """Hosts its members run on."""
    recorded_ranks: tuple[int, ...]
    """Members that recorded this group."""

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        recorded = set(self.recorded_ranks)
        return tuple(rank for rank in self.ranks if rank not in recorded)

    @property
    def is_across_hosts(self) -> bool:
        """Known to run on more than one host."""
        return not isinstance(self.num_hosts, Unavailable) and self.num_hosts > 1


def merge_groups(
    attempt: Attempt,
) -> tuple[tuple[JobGroup, ...], dict[int, dict[int, int]]]:
    """The job's groups, and per rank the index of each of its own group numbers in that list.

    A group with unknown members, or without the rank that names it, has no index.
    """
    hosts = {recording.rank: _host_of(recording) for recording in attempt}
    is_named = _find_shared_names(attempt)
    members: dict[_Key, list[tuple[int, Group]]] = {}
    keys: dict[int, dict[int, _Key]] = {}
    for recording in attempt:
        own = keys[recording.rank] = _key_groups(recording, is_named)
        for group_id, key in own.items():
            members.setdefault(key, []).append((recording.rank, recording.groups[group_id]))
    groups = tuple(
        _make_group(key[0], found, attempt, {hosts.get(rank) for rank in key[0]})
        for key, found in members.items()
    )
    position = {key: index for index, key in enumerate(members)}
    return groups, {
        rank: {group_id: position[key] for group_id, key in own.items()}
        for rank, own in keys.items()
    }


def _host_of(recording: Recording) -> str | None:
    """The name of the rank's host, as its header has it."""
    host = recording.header.get("host")
    return host if isinstance(host, str) else None


def _usable_groups(recording: Recording) -> Mapping[int, tuple[tuple[int, ...], str]]:
    found = {}
    for group_id, group in sorted(recording.groups.items()):
        ranks = tuple(sorted(set(group.ranks)))
        if recording.rank in ranks:
            found[group_id] = ranks, group.name
    return found


def _find_shared_names(attempt: Attempt) -> dict[tuple[int, ...], bool]:
    """For each set of members, whether two of them use one name for a group."""
    seen: dict[tuple[int, ...], dict[str, int]] = {}
    is_named: dict[tuple[int, ...], bool] = {}
    for recording in attempt:
        for ranks, name in _usable_groups(recording).values():
            first = seen.setdefault(ranks, {}).setdefault(name, recording.rank)
            is_named[ranks] = is_named.get(ranks, False) or (bool(name) and first != recording.rank)
    return is_named


def _key_groups(recording: Recording, is_named: Mapping[tuple[int, ...], bool]) -> dict[int, _Key]:
    keys: dict[int, _Key] = {}
    count: dict[tuple[tuple[int, ...], str], int] = {}
    for group_id, (ranks, name) in _usable_groups(recording).items():
        kind = (ranks, name if is_named[ranks] else "")
        keys[group_id] = (*kind, count.get(kind, 0))
        count[kind] = count.get(kind, 0) + 1
    return keys


def _make_group(
    ranks: tuple[int, ...],
    found: list[tuple[int, Group]],
    attempt: Attempt,
    hosts: set[str | None],
) -> JobGroup:
    described = next((group.description for _, group in found if group.description), "")
    layout = None if isinstance(attempt.layout, Unavailable) else attempt.layout
    axis, source = name_axis(ranks, described, layout=layout, world_size=attempt.world_size)
    return JobGroup(
        ranks=ranks,
        name=found[0][1].name,
        description=described,
        backend=next((group.backend for _, group in found if group.backend), ""),
        axis=axis,
        axis_source=source,
        num_hosts=Unavailable("the host of a member is not known") if None in hosts else len(hosts),
        recorded_ranks=tuple(rank for rank, _ in found),
    )
