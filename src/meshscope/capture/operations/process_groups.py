"""The process groups a rank communicates in, numbered as they are met and written down once."""

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from meshscope.core.operations import STEP_SHIFT, Kind
from meshscope.store.write.groups import GROUP_KIND, pack_ranks
from meshscope.store.write.in_flight import InFlightWriter, channel_code, row_salt

MAX_GROUPS = 0xFFFE
_HOST_BACKENDS = frozenset(("gloo", "mpi", "ucc", "fake", "threaded"))
"""Back ends whose operations run on host threads even when the tensors are on a device."""


class Channel:
    """Operations that follow each other: a group's collectives, or those with one peer."""

    __slots__ = ("first_number", "numbers", "row")

    def __init__(self, row: int, first_number: int) -> None:
        self.first_number = first_number
        self.numbers = itertools.count(first_number)
        """Drawing from it is atomic: several threads may communicate."""
        self.row = row
        """Number of the channel in `now.bin`; 0 when that is full."""


class GroupEntry(Channel):
    """A process group and its channels."""

    __slots__ = (
        "channels", "code", "description", "group_id", "is_host", "is_plain", "name", "open_word",
        "ranks", "ref", "row_offset", "row_salt", "size",
    )  # fmt: skip

    def __init__(
        self, group_id: int, name: str, ranks: tuple[int, ...], size: int, row: int, first: int
    ) -> None:
        super().__init__(row, first)
        self.group_id = group_id
        self.code = group_id << 32
        """The form in a record's first word."""
        self.name = name
        self.description = ""
        """What its maker calls it."""
        self.ranks = ranks
        self.size = size
        self.is_host = True
        """Its operations run on host threads."""
        self.is_plain = True
        """It has a row, and no batch is being put together: the short way through the kernel."""
        self.row_offset = 8 * (row + 1)
        """Offset of word 1 of its row, in bytes."""
        self.row_salt = row_salt(row)
        self.open_word = row + 7
        """Says whether a blocking operation is under way."""
        self.channels: dict[tuple[int, int, int], Channel] = {}
        self.ref: Callable[[], Any] = _no_group
        """Gives torch's group while it exists: its name may be used again afterwards."""

    def global_rank(self, group_rank: int) -> int:
        """The global rank of a member; -1 when it is not known."""
        return self.ranks[group_rank] if 0 <= group_rank < len(self.ranks) else -1


def _no_group() -> None:
    """The reference of a group that torch does not know."""


class GroupBook:
    """Groups by torch's name for them."""

    def __init__(self, dist: Any, journal: Callable[..., None]) -> None:
        self._dist = dist
        self._journal = journal
        self.in_flight: InFlightWriter | None = None
        self.entries: dict[str, GroupEntry] = {}
        self.on_group: Callable[[GroupEntry], None] | None = None
        """Called with every new group of torch."""
        self.has_device_group = False
        """Whether there is a group whose operations run on a device."""
        self._next_number = 0
        """Of the first operation of a channel that is met now."""
        self._is_batching = False
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._met: dict[tuple[str, tuple[int, ...]], GroupEntry] = {}
        """All groups so far, those that were given up included."""

    def set_batching(self, *, is_batching: bool) -> None:
        """While a batch is put together, no operation goes the short way."""
        self._is_batching = is_batching
        for entry in list(self._met.values()):  # another thread may meet one meanwhile
            entry.is_plain = bool(entry.row) and not is_batching

    def find(self, group: Any) -> GroupEntry:
        """The entry of a group, which is made when it is met for the first time."""
        entry = self.entries.get(group.group_name)
        if entry is not None and entry.ref() is group:
            return entry
        with self._lock:  # two threads may meet it at once
            name, ranks = str(group.group_name), self._ranks_of(group)
            # A group that is made again goes on counting: its members all make it again.
            entry = self._met.get((name, ranks)) or self._meet(group, name, ranks)
            entry.ref = weakref.ref(group)
            self.entries[name] = entry
            return entry

    def forget(self) -> None:
        """A new attempt begins: groups are numbered again."""
        self.entries.clear()
        self._met.clear()
        self._ids = itertools.count()
        self._next_number = 0

    def number_by_step(self, step: int) -> None:
        """From here on operations count from `step` × 2^14 in every channel: ranks that record
        different steps agree on their numbers. A step that is gone on with goes on counting."""
        number = max(step, 0) << STEP_SHIFT
        if number <= self._next_number:
            return
        self._next_number = number
        for entry in [*self.entries.values(), *self._met.values()]:
            entry.numbers = itertools.count(number)
            for channel in list(entry.channels.values()):
                channel.numbers = itertools.count(number)

    def is_first(self, group_id: int, kind: int, peer: int, tag: int, sequence: int) -> bool:
        """Whether it is the first operation of its channel that was seen."""
        for entry in list(self._met.values()):
            if entry.group_id == group_id:
                channel: Channel = entry.channels.get((kind, peer, tag), entry)
                return channel.first_number & 0xFFFFFFFF == sequence
        return False

    def _meet(self, group: Any, name: str, ranks: tuple[int, ...]) -> GroupEntry:
        """Numbers a group that was not seen before and writes it into the journal."""
        group_id = min(next(self._ids), MAX_GROUPS)
        row = self._open_row(channel_code(group_id, -1, 0))
        entry = GroupEntry(group_id, name, ranks, int(group.size()), row, self._next_number)
        backend = self._backend_of(group)
        entry.is_host = all(
            part.rpartition(":")[2] in _HOST_BACKENDS for part in backend.split(",")
        )
        self.has_device_group |= not entry.is_host
        entry.is_plain = bool(row) and not self._is_batching
        self._met[name, ranks] = entry
        entry.description = str(getattr(group, "group_desc", "") or "")
        self._journal(
            GROUP_KIND,
            id=group_id,
            name=name,
            description=entry.description,
            backend=backend,
            ranks=pack_ranks(ranks),
        )
        if self.on_group is not None:
            self.on_group(entry)
        return entry

    def named(self, name: str, axis: str, size: int) -> GroupEntry:
        """A group that only the program knows, by the name and axis it gives."""
        key = f"timed:{axis}:{name}"
        found = self.entries.get(key)
        if found is None:
            group_id = min(next(self._ids), MAX_GROUPS)
            row = self._open_row(channel_code(group_id, -1, 0))
            found = self.entries[key] = GroupEntry(group_id, key, (), size, row, self._next_number)
            self._journal(
                GROUP_KIND, id=group_id, name=name, description=axis and f"mesh_{axis}",
                backend="", ranks=[],
            )  # fmt: skip
        return found

    def channel(self, group: GroupEntry, kind: int, peer: int, tag: int) -> Channel:
        """The channel of sends to, or receives from, one peer."""
        found = group.channels.get((kind, peer, tag))
        if found is None:
            direction = 1 if kind == Kind.SEND else 2
            # Tags share a row: it says how far a rank has got, not in which message.
            row = next(
                (c.row for (k, p, _), c in group.channels.items() if (k, p) == (kind, peer)), 0
            )
            row = row or self._open_row(channel_code(group.group_id, peer, direction))
            found = group.channels[kind, peer, tag] = Channel(row, self._next_number)
        return found

    def _open_row(self, code: int) -> int:
        return self.in_flight.open_channel(code) if self.in_flight is not None else 0

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        try:
            return tuple(int(rank) for rank in self._dist.get_process_group_ranks(group))
        except (KeyError, ValueError, RuntimeError):  # a group made below torch.distributed
            return ()

    def _backend_of(self, group: Any) -> str:
        try:
            return str(self._dist.get_backend(group))
        except (KeyError, ValueError, RuntimeError, AssertionError):
            return str(group.name())
