"""The process groups operations run in, their numbering, and which operations a sample keeps.

A sample is worth something only if all ranks keep the same operations. So it is drawn from what
they have in common: the group's global ranks (or its name, where no ranks are known) and the
operation's index in the group. No clock, no random state and no hash of this process is in it.
"""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

from meshscope.core.operations import POINT_TO_POINT, Kind

MAX_GROUPS = 1_024
"""Groups known by name only that are counted separately; later ones are counted together."""
OTHER = "(other)"
_FIRST_OWN_ID = -(1 << 62)
"""Unregistered groups get ids that automatic capture does not hand out."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A process group, as far as it is known."""

    name: str = ""
    axis: str = ""
    """Axis of the mesh it runs along, such as `tp`; empty when not known."""
    size: int | None = None
    """Number of ranks in it; None when not known."""
    ranks: tuple[int, ...] = ()
    """Its global ranks; empty when not known."""


class Groups:
    """All groups seen, by id. Not locked: the profiler's lock is held."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupInfo] = {}
        self._own_ids: set[int] = set()
        self._found: dict[tuple[str, str, int | None], int] = {}
        self._seeds: dict[tuple[int, bool], int] = {}
        self._next_sequences: dict[Hashable, int] = {}

    def get(self, group_id: int) -> GroupInfo:
        """What is known of a group; nothing if it was never registered."""
        return self._groups.get(group_id, _UNKNOWN)

    def set(self, group_id: int, group: GroupInfo) -> None:
        """Registers a group, or what has become known of it."""
        self._groups[group_id] = group
        self._found.clear()  # a name may mean this group from now on
        self._seeds.clear()

    def find(self, name: str, axis: str, size: int | None) -> int:
        """The registered group of that name unless something contradicts it, else an own one."""
        wanted = (name, axis, size)
        group_id = self._found.get(wanted)
        if group_id is None:
            group_id = self._look_for(GroupInfo(name, axis, size))
            if len(self._found) < 4 * MAX_GROUPS:
                self._found[wanted] = group_id
        return group_id

    def _look_for(self, wanted: GroupInfo) -> int:
        fitting = [
            group_id
            for group_id, group in self._groups.items()
            if group_id not in self._own_ids and _is_described_by(group, wanted)
        ]
        if len(fitting) == 1:
            return fitting[0]
        for group_id in self._own_ids:
            if self._groups[group_id] == wanted:
                return group_id
        if len(self._own_ids) < MAX_GROUPS:
            return self._add_own(wanted)
        return self._add_own(GroupInfo(OTHER), _FIRST_OWN_ID - 1)

    def _add_own(self, group: GroupInfo, group_id: int | None = None) -> int:
        if group_id is None:
            group_id = _FIRST_OWN_ID + len(self._own_ids)
        self._own_ids.add(group_id)
        self._groups[group_id] = group
        return group_id

    def next_sequence(self, kind: int, group_id: int, name: str, peer: int) -> int:
        """Counts from 1: every rank meets the same collectives of a group in the same order.

        Sends and receives count per peer, so that both ends of one agree. Custom operations count
        per name, because not every rank has to have them.
        """
        counted: Hashable = (group_id, name if kind == Kind.CUSTOM else "")
        if kind in POINT_TO_POINT:
            counted = (group_id, kind, peer)
        number = self._next_sequences.get(counted, 0) + 1
        self._next_sequences[counted] = number
        return number

    def is_kept(self, kind: int, group_id: int, sequence: int, rate: float) -> bool:
        """Whether the sample has an operation: the same answer on every rank."""
        is_p2p = kind in POINT_TO_POINT
        seed = self._seeds.get((group_id, is_p2p))
        if seed is None:
            seed = self._seeds[group_id, is_p2p] = _sampling_seed(self.get(group_id), is_p2p=is_p2p)
        return sampling_hash(seed, sequence) < rate * 2**64


_UNKNOWN = GroupInfo()


def _is_described_by(group: GroupInfo, wanted: GroupInfo) -> bool:
    return (
        bool(wanted.name)
        and group.name == wanted.name
        and wanted.axis in ("", group.axis)
        and wanted.size in (None, group.size)
    )


def _sampling_seed(group: GroupInfo, *, is_p2p: bool) -> int:
    """64 bits that are the same in every process.

    torch numbers sends and receives apart from collectives, so they have a separate stream.
    """
    who = f"ranks {','.join(map(str, group.ranks))}" if group.ranks else f"name {group.name}"
    text = f"{'p2p' if is_p2p else 'collective'} {who}"
    encoded = text.encode("utf-8", "surrogatepass")  # a program's name may hold surrogates
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def sampling_hash(seed: int, sequence: int) -> int:
    """splitmix64 (Steele, Lea, Flood 2014): number `sequence` of the stream that `seed` starts."""
    mixed = (seed + (sequence + 1) * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
