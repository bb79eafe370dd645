"""The books of the communication profiler: statistics, a ring of events, and what was left out.

Records come in batches, as tuples of the `NUM_FIELDS` numbers of `CommunicationProfiler.observe`,
with `Details` as one more item where a program timed them itself. Nothing is made of a record that
is never read: an event is built when it is read. Not locked: the profiler's lock is held.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

from meshscope.capture.communication.config import CommunicationConfig
from meshscope.capture.communication.events import (
    FAILED,
    NUM_FIELDS,
    CommunicationEvent,
    Details,
    known_bus_factor,
    make_event,
    operation_label,
    resolve_kind,
)
from meshscope.capture.communication.groups import OTHER, Groups
from meshscope.capture.communication.stats import Cell, CellKey, OperationStats, combine
from meshscope.core.operations import Kind, size_bucket

MAX_FAILED_EVENTS = 1_000
"""Failures kept beside the ring, which may forget them."""
MAX_NAMES = 1_024
"""Names of custom operations counted separately; later ones are counted together."""

K = TypeVar("K", bound=Hashable)
Entry = tuple[int, tuple[Any, ...]]
"""Event id and record."""
DURATION, OUTCOME, PEER = 5, 6, 10
"""Indices into a record."""
_NUMBERS_ALIKE = itemgetter(0, 1, 3, OUTCOME)
"""Kind, group, size and outcome."""


class Ledger:
    """Everything recorded since the start or since it was cleared."""

    def __init__(self, config: CommunicationConfig, groups: Groups | None = None) -> None:
        self.config = config
        self.groups = groups or Groups()
        self.clear()

    def clear(self) -> None:
        """Forgets all records. Groups and their numbering stay: other ranks go on counting."""
        self._cells: dict[CellKey, Cell] = {}
        self._names: set[str] = set()
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=self.config.max_events)
        self._failed: deque[Entry] = deque(maxlen=MAX_FAILED_EVENTS)
        self._last_event_id = 0
        self.num_sampled_out = 0
        self.num_below_minimum = 0

    def configure(self, config: CommunicationConfig) -> None:
        """From now on; the ring keeps the newest events that fit."""
        self.config = config
        self._ring = deque(self._ring, maxlen=config.max_events)

    # --- writing --------------------------------------------------------------------------

    def fold(self, batch: list[tuple[Any, ...]]) -> None:
        """Takes in records, in the order in which the operations ended."""
        batch = [record if len(record) == NUM_FIELDS else self._adopt(record) for record in batch]
        if self.config.sampling_rate < 1:
            num_seen = len(batch)
            batch = [record for record in batch if self._is_kept(record)]
            self.num_sampled_out += num_seen - len(batch)
        self._add_to_cells(batch)
        self._keep_events(batch)

    def _add_to_cells(self, batch: list[tuple[Any, ...]]) -> None:
        """Durations of operations that are alike go into their cell together: that is cheaper."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for record in batch:
            key = _NUMBERS_ALIKE(record)
            if len(record) > NUM_FIELDS:
                details: Details = record[NUM_FIELDS]
                key = (*key, self._cell_name(details), details.rank)
            if key in alike:
                alike[key].append(record[DURATION])
            else:
                alike[key] = [record[DURATION]]
        for key, durations_ns in alike.items():
            self._count_alike(durations_ns, *key)

    def _count_alike(
        self,
        durations_ns: list[int],
        kind: int,
        group_id: int,
        size_bytes: int,
        outcome: int,
        name: str = "",
        rank: int | None = None,
    ) -> None:
        config = self.config
        key = CellKey(
            kind=kind,
            name=name if config.per_operation else "",
            rank=rank if config.per_rank else None,
            group_id=group_id,
            size_bucket=size_bucket(size_bytes) if config.per_size else None,
        )
        # At a rate of 1 the weight is an int, and sums stay exact. Failures are kept at any
        # rate, so each has weight 1.
        is_one_of_many = config.sampling_rate < 1 and outcome not in FAILED
        weight = 1 / config.sampling_rate if is_one_of_many else 1
        self._cell(key).add(durations_ns, max(size_bytes, 0), outcome, weight)

    def _keep_events(self, batch: list[tuple[Any, ...]]) -> None:
        minimum_ns = self.config.min_duration_ns
        events = batch
        if minimum_ns:
            events = [
                record
                for record in batch
                if not 0 <= record[DURATION] < minimum_ns or record[OUTCOME] in FAILED
            ]
            self.num_below_minimum += len(batch) - len(events)
        first_id = self._last_event_id + 1
        self._failed.extend(
            (event_id, record)
            for event_id, record in enumerate(events, first_id)
            if record[OUTCOME] in FAILED
        )
        self._ring.extend(events)
        self._last_event_id += len(events)

    def _cell(self, key: CellKey) -> Cell:
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell()
        return cell

    def _adopt(self, record: tuple[Any, ...]) -> tuple[Any, ...]:
        """A record of the program's, with its group and its index in it."""
        kind, _, sequence, *rest = record
        details: Details = record[NUM_FIELDS]
        group_id = self.groups.find(details.group, details.axis, details.group_size)
        if sequence < 0:
            name = self._cell_name(details)
            sequence = self.groups.next_sequence(kind, group_id, name, record[PEER])
        return (kind, group_id, sequence, *rest)

    def _cell_name(self, details: Details) -> str:
        return self._told_apart(details.name) if details.kind is Kind.CUSTOM else ""

    def _told_apart(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= MAX_NAMES:
                return OTHER
            self._names.add(name)
        return name

    def _is_kept(self, record: tuple[Any, ...]) -> bool:
        kind, group_id, sequence = record[:3]
        if sequence < 0:  # a failed one takes its number, too
            sequence = self.groups.next_sequence(kind, group_id, "", record[PEER])
        if record[OUTCOME] in FAILED:
            return True
        return self.groups.is_kept(kind, group_id, sequence, self.config.sampling_rate)

    # --- reading --------------------------------------------------------------------------

    @property
    def num_failed(self) -> int:
        """Operations that ended in an error or a timeout."""
        return sum(cell.num_failed for cell in self._cells.values())

    @property
    def num_observed(self) -> int:
        """Operations in the statistics."""
        return sum(cell.num_observed for cell in self._cells.values())

    @property
    def num_evicted(self) -> int:
        """Events that the ring had to forget; ids count up in it, so the next is its first."""
        return self._last_event_id - len(self._ring)

    def events(
        self, own_rank: int | None, unix_offset_ns: int, newest: int | None = None
    ) -> list[CommunicationEvent]:
        """The newest events of the ring, or all, oldest first."""
        entries = list(enumerate(self._ring, self.num_evicted + 1))
        if newest is not None:
            entries = entries[-newest:] if newest > 0 else []
        return self._make_events(entries, own_rank, unix_offset_ns)

    def failed_events(self, own_rank: int | None, unix_offset_ns: int) -> list[CommunicationEvent]:
        """The last failures, oldest first."""
        return self._make_events(self._failed, own_rank, unix_offset_ns)

    def _make_events(
        self, entries: Iterable[Entry], own_rank: int | None, unix_offset_ns: int
    ) -> list[CommunicationEvent]:
        return [
            make_event(event_id, record, self.groups.get(record[1]), own_rank, unix_offset_ns)
            for event_id, record in entries
        ]

    def total(self) -> OperationStats:
        return combine((cell, self._factor(key)) for key, cell in self._cells.items())

    def by_operation(self) -> dict[str, OperationStats]:
        """Per operation, the one with the most time first."""
        return self._by(_label) if self.config.per_operation else {}

    def by_rank(self, own_rank: int | None) -> dict[int | None, dict[str, OperationStats]]:
        """Per rank, ascending, and operation."""
        if not self.config.per_rank:
            return {}
        found = self._by(lambda key: (own_rank if key.rank is None else key.rank, _label(key)))
        ranks = sorted({rank for rank, _ in found}, key=lambda rank: (rank is None, rank or 0))
        return {
            rank: {label: stats for (its_rank, label), stats in found.items() if its_rank == rank}
            for rank in ranks
        }

    def by_axis(self) -> dict[str, OperationStats]:
        """Per axis, the one with the most time first."""
        if not self.config.per_axis:
            return {}
        return self._by(lambda key: self.groups.get(key.group_id).axis)

    def by_size(self) -> dict[str, dict[int, OperationStats]]:
        """Per operation and lower end of the size bucket, ascending."""
        if not self.config.per_size:
            return {}
        found = self._by(lambda key: (_label(key), key.size_bucket))
        by_label: dict[str, dict[int, OperationStats]] = {}
        for (label, bucket), stats in sorted(found.items(), key=lambda item: item[0][1] or 0):
            if bucket is not None:
                by_label.setdefault(label, {})[bucket] = stats
        return by_label

    def _by(self, part_of: Callable[[CellKey], K]) -> dict[K, OperationStats]:
        parts: dict[K, list[tuple[Cell, float | None]]] = {}
        for key, cell in self._cells.items():
            parts.setdefault(part_of(key), []).append((cell, self._factor(key)))
        found = {part: combine(cells) for part, cells in parts.items()}
        by_time = sorted(found, key=lambda part: (-found[part].total_duration_ns, str(part)))
        return {part: found[part] for part in by_time}

    def _factor(self, key: CellKey) -> float | None:
        return known_bus_factor(resolve_kind(key.kind)[0], self.groups.get(key.group_id).size)

    # --- exchange -------------------------------------------------------------------------

    def cells_to_list(self, own_rank: int | None) -> list[dict[str, Any]]:
        """The statistics in their finest division, from which others can be put together."""
        found = []
        for key, cell in self._cells.items():
            group = self.groups.get(key.group_id)
            kind, name = resolve_kind(key.kind, key.name)
            labels = {
                "kind": kind.label,
                "name": name,
                "rank": own_rank if key.rank is None else key.rank,
                "group": group.name,
                "axis": group.axis,
                "group_size": group.size,
                "size_bucket": key.size_bucket,
            }
            found.append(labels | cell.to_dict())
        return found

    def merge(
        self, cells: Iterable[Mapping[str, Any]], num_sampled_out: int, num_below_minimum: int
    ) -> None:
        """Adds what `cells_to_list` gave, and counts; a cell that is wrong leaves all as it was."""
        read = [(fields, Cell.from_dict(fields)) for fields in cells]
        described = [
            (
                resolve_kind(str(fields["kind"]), str(fields["name"])),
                (str(fields["group"]), str(fields["axis"]), _optional(fields["group_size"])),
                _optional(fields["rank"]),
                _optional(fields["size_bucket"]),
                cell,
            )
            for fields, cell in read
        ]
        for (kind, name), group, rank, bucket, cell in described:
            key = CellKey(
                kind=int(kind),
                name=self._told_apart(name) if name and self.config.per_operation else "",
                rank=rank if self.config.per_rank else None,
                group_id=self.groups.find(*group),
                size_bucket=bucket if self.config.per_size else None,
            )
            self._cell(key).merge(cell)
        self.num_sampled_out += num_sampled_out
        self.num_below_minimum += num_below_minimum


def _label(key: CellKey) -> str:
    return operation_label(*resolve_kind(key.kind, key.name))


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
