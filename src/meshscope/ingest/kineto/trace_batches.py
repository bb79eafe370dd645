"""Keeps what is wanted of each batch a scanner gives, narrow, and joins the batches at the end.

Device work, operators, calls of the runtime, annotations and modules stay; other Python functions
only when asked for. A begin and an end that belong together become one event. What the compiled
scanner made columns of itself is ahead of all that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.scan import (
    DENSE_KEYS,
    FIRST_KEPT_KEY,
    KEYS,
    MISSING,
    ScanBatch,
    Scanner,
    ValueType,
)
from meshscope.ingest.kineto.trace_columns import (
    CATEGORIES,
    NO_MEMORY,
    NO_VALUE,
    Category,
    TraceArguments,
    TraceEvents,
    TraceMemory,
)
from meshscope.store.read.arrays import Bools, Int64s, find_true

_MODULE_PREFIX = b"nn.Module: "
_DENSE_KEYS = np.arange(len(DENSE_KEYS))
_METADATA_KEYS = {
    b"process_name": KEYS.index("name"),
    b"process_labels": KEYS.index("labels"),
    b"thread_name": KEYS.index("name"),
}
_PHASE_X, _PHASE_M, _PHASE_B, _PHASE_E, _PHASE_I = b"XMBEi"
_MEMORY_NAME = b"[memory]"
_MEMORY_KEYS = {
    "device_type": "Device Type",
    "device": "Device Id",
    "changed_bytes": "Bytes",
    "allocated_bytes": "Total Allocated",
    "reserved_bytes": "Total Reserved",
}

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class Metadata:
    """Names of processes and threads, by identity."""

    process_name: dict[int, int] = field(default_factory=dict)
    process_labels: dict[int, int] = field(default_factory=dict)
    thread_name: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """An event whose end has not come yet."""

    pid: int
    tid: int
    ts_ns: int
    name: int
    category: int
    arguments: Sequence[tuple[int, ...]]


class TraceBatches:
    """Collects batches; `join` gives the columns in order of begin and empties it."""

    def __init__(self, *, with_python: bool = False) -> None:
        self._with_python = with_python
        self._parts: list[Columns] = []
        self._argument_parts: list[Columns] = []
        self._num_events = 0
        self._category_of: list[int] = []
        self._is_module: list[bool] = []
        self._tracks: dict[tuple[int, int], int] = {}
        self._open: dict[tuple[int, int], list[_Begin]] = {}
        self._pairs: list[ScanBatch] = []
        self._memory: list[dict[str, Int64s]] = []
        self._memory_names: set[int] = set()
        self.metadata = Metadata()
        self.num_events = 0
        """Events of any phase that is kept, complete or not."""
        self.num_other = 0
        """Objects in the list of events that have no phase."""
        self.num_skipped = 0
        self.num_incomplete = 0

    @property
    def tracks(self) -> list[tuple[int, int]]:
        """Process and thread of each track."""
        return list(self._tracks)

    def add(self, batch: ScanBatch, symbols: list[bytes]) -> None:
        """Takes a batch in; `symbols` are all texts so far."""
        self._learn(symbols)
        if not len(batch):
            return
        num_other = int(np.count_nonzero(batch.phase == 0))
        self.num_other += num_other
        self.num_events += len(batch) - num_other
        is_metadata = batch.phase == _PHASE_M
        if is_metadata.any():
            self._take_metadata(batch, is_metadata, symbols)
        is_pair = (batch.phase == _PHASE_B) | (batch.phase == _PHASE_E)
        if is_pair.any():
            self._take_pairs(batch, find_true(is_pair))
        is_moment = batch.phase == _PHASE_I
        if is_moment.any():
            self._take_memory(batch, is_moment)
        if (batch.phase == _PHASE_X).any():  # the compiled scanner has made columns of them
            self._take_complete(batch)

    def _take_memory(self, batch: ScanBatch, is_moment: Bools) -> None:
        """What allocators say; other moments are left out."""
        is_named = np.isin(batch.name, list(self._memory_names))
        is_memory = is_moment & is_named & (batch.ts_ns != MISSING)
        rows = find_true(is_memory)
        self.num_skipped += int(np.count_nonzero(is_moment)) - len(rows)
        if not len(rows):
            return
        place = np.full(len(batch), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        is_said = (batch.argument_type == int(ValueType.INT)) & is_memory[batch.argument_event]
        found = {"time_ns": batch.ts_ns[rows]}
        for column, key in _MEMORY_KEYS.items():
            picked = find_true(is_said & (batch.argument_key == KEYS.index(key)))
            found[column] = np.full(len(rows), NO_VALUE, dtype=np.int64)
            found[column][place[batch.argument_event[picked]]] = batch.argument_value[picked]
        self._memory.append(found)

    def join_memory(self) -> TraceMemory:
        """All that allocators said, in order of time."""
        if not self._memory:
            return NO_MEMORY
        joined = {
            column: np.concatenate([part[column] for part in self._memory])
            for column in self._memory[0]
        }
        order = _find_order(joined["time_ns"])
        return TraceMemory(**{column: values[order] for column, values in joined.items()})

    def _learn(self, symbols: list[bytes]) -> None:
        for text in symbols[len(self._category_of) :]:
            if text == _MEMORY_NAME:
                self._memory_names.add(len(self._category_of))
            self._category_of.append(CATEGORIES.get(text, Category.OTHER))
            self._is_module.append(text.startswith(_MODULE_PREFIX))

    def _take_complete(self, batch: ScanBatch) -> None:
        is_complete = batch.phase == _PHASE_X
        is_timed = (batch.ts_ns != MISSING) & (batch.dur_ns != MISSING) & (batch.dur_ns >= 0)
        self.num_incomplete += int(np.count_nonzero(is_complete & ~is_timed))
        category = self._categorise(batch)
        is_kept = is_complete & is_timed
        if not self._with_python:
            is_python = category == int(Category.PYTHON)
            self.num_skipped += int(np.count_nonzero(is_kept & is_python))
            is_kept &= ~is_python
        rows = find_true(is_kept)
        dense = _dense_arguments(batch)
        self._parts.append(
            {
                "category": category[rows],
                "name": batch.name[rows],
                "track": self._number_tracks(batch.pid[rows], batch.tid[rows]),
                "begin_ns": batch.ts_ns[rows],
                "duration_ns": _narrow(batch.dur_ns[rows]),
                "external_id": _narrow(dense["External id"][rows]),
                "correlation": _narrow(dense["correlation"][rows]),
                "stream": dense["stream"][rows].astype(np.int32),
                "device": dense["device"][rows].astype(np.int16),
            }
        )
        self._take_arguments(batch, is_kept)
        self._num_events += len(rows)

    def _categorise(self, batch: ScanBatch) -> npt.NDArray[np.uint8]:
        category_of = np.array([*self._category_of, Category.OTHER], dtype=np.uint8)
        category = category_of[batch.category]
        is_module = np.array([*self._is_module, False])[batch.name]
        category[(category == int(Category.PYTHON)) & is_module] = Category.MODULE
        return category

    def _number_tracks(self, pid: Int64s, tid: Int64s) -> npt.NDArray[np.int32]:
        if not len(pid):
            return np.empty(0, dtype=np.int32)
        order = np.lexsort((tid, pid))
        is_new = np.ones(len(pid), dtype=np.bool_)
        is_new[1:] = (np.diff(pid[order]) != 0) | (np.diff(tid[order]) != 0)
        firsts = order[is_new]
        numbers = np.empty(len(firsts), dtype=np.int32)
        for place in np.argsort(firsts).tolist():  # in the order in which they appear
            track = (int(pid[firsts[place]]), int(tid[firsts[place]]))
            numbers[place] = self._tracks.setdefault(track, len(self._tracks))
        numbered = np.empty(len(pid), dtype=np.int32)
        numbered[order] = numbers[np.cumsum(is_new) - 1]
        return numbered

    def _take_arguments(self, batch: ScanBatch, is_kept: npt.NDArray[np.bool_]) -> None:
        new_index = np.cumsum(is_kept) - 1 + self._num_events
        is_wanted = batch.argument_key >= FIRST_KEPT_KEY
        rows = find_true(is_wanted & is_kept[batch.argument_event])
        if not len(rows):
            return
        self._argument_parts.append(
            {
                "event": new_index[batch.argument_event[rows]].astype(np.int32),
                "key": batch.argument_key[rows],
                "kind": batch.argument_type[rows],
                "value": _narrow(batch.argument_value[rows]),
            }
        )

    def _take_metadata(
        self, batch: ScanBatch, is_metadata: npt.NDArray[np.bool_], symbols: list[bytes]
    ) -> None:
        """The last name given stands. Some traces name their processes 100,000 times."""
        is_text = batch.argument_type == int(ValueType.STRING)
        for index in np.unique(batch.name[is_metadata]).tolist():
            kind = symbols[index] if index >= 0 else b""
            if kind not in _METADATA_KEYS:
                continue
            rows = find_true(is_text & (batch.argument_key == _METADATA_KEYS[kind]))
            events = batch.argument_event[rows]
            is_own = is_metadata[events] & (batch.name[events] == index)
            texts = batch.argument_value[rows[is_own]].tolist()
            events = events[is_own]
            processes = batch.pid[events].tolist()
            if kind == b"thread_name":
                threads = batch.tid[events].tolist()
                self.metadata.thread_name.update(
                    zip(zip(processes, threads, strict=True), texts, strict=True)
                )
            else:
                target = self.metadata.process_name
                if kind == b"process_labels":
                    target = self.metadata.process_labels
                target.update(zip(processes, texts, strict=True))

    def _take_pairs(self, batch: ScanBatch, rows: Int64s) -> None:
        """Begins wait on a stack for their ends; what the begin says of the event is kept."""
        found: list[tuple[int, ...]] = []
        arguments: list[tuple[int, ...]] = []
        for is_begin, begin in _list_pairs(batch, rows):
            stack = self._open.setdefault((begin.pid, begin.tid), [])
            moment = begin.ts_ns
            if moment == MISSING:
                self.num_incomplete += 1
            elif is_begin:
                stack.append(begin)
            elif stack and stack[-1].ts_ns <= moment:
                begin = stack.pop()
                arguments += [(len(found), *entry) for entry in begin.arguments]
                found.append(
                    (
                        begin.category,
                        begin.name,
                        begin.pid,
                        begin.tid,
                        begin.ts_ns,
                        moment - begin.ts_ns,
                    )
                )
            else:
                self.num_incomplete += 1
        if found:
            self._pairs.append(_complete_batch(found, arguments))

    def join(self, scanner: Scanner) -> tuple[TraceEvents, TraceArguments]:
        """All events in order of begin. Nothing can be asked of the scanner then."""
        self.num_incomplete += sum(len(stack) for stack in self._open.values())
        columns = scanner.columns() if self._pairs else scanner.put_in_order()
        if columns is not None:
            self._tracks = {track: number for number, track in enumerate(columns.tracks)}
            if not self._pairs:
                return columns.events, columns.arguments
            self._num_events = len(columns.events)
            self._parts.append(_as_columns(columns.events))
            self._argument_parts.append(_as_columns(columns.arguments))
        for pairs in self._pairs:
            self._take_complete(pairs)
        pop = _popper(self._parts)
        begin_ns = pop("begin_ns", np.int64)
        order = _find_order(begin_ns)

        def sort(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
            joined = pop(name, dtype)
            return joined[order]

        begin_ns = begin_ns[order]
        events = TraceEvents(
            category=sort("category", np.uint8),
            name=sort("name", np.int32),
            track=sort("track", np.int32),
            begin_ns=begin_ns,
            duration_ns=sort("duration_ns", np.int64),
            external_id=sort("external_id", np.int64),
            correlation=sort("correlation", np.int64),
            stream=sort("stream", np.int32),
            device=sort("device", np.int16),
        )
        return events, self._join_arguments(order)

    def _join_arguments(self, event_order: Int64s) -> TraceArguments:
        new_index = np.empty(len(event_order), dtype=np.int32)
        new_index[event_order] = np.arange(len(event_order), dtype=np.int32)
        pop = _popper(self._argument_parts)
        event = new_index[pop("event", np.int32)]
        order = _find_order(event)
        return TraceArguments(
            event=event[order],
            key=pop("key", np.uint8)[order],
            kind=pop("kind", np.uint8)[order],
            value=pop("value", np.int64)[order],
        )


def _find_order(values: npt.NDArray[Any]) -> Int64s:
    """Where each is to be taken from, so that they are in order."""
    return np.argsort(values, kind="stable")


def _as_columns(table: TraceEvents | TraceArguments) -> Columns:
    return {column.name: getattr(table, column.name) for column in fields(table)}


def _list_pairs(batch: ScanBatch, rows: Int64s) -> Iterator[tuple[bool, _Begin]]:
    """Begins and ends in the order of the file, and whether each is a begin."""
    columns = (batch.argument_key, batch.argument_type, batch.argument_value)
    entries = list(zip(*(column.tolist() for column in columns), strict=True))
    firsts = np.searchsorted(batch.argument_event, rows).tolist()
    lasts = np.searchsorted(batch.argument_event, rows, side="right").tolist()
    values = (batch.pid, batch.tid, batch.ts_ns, batch.name, batch.category)
    fields = zip(*(column[rows].tolist() for column in values), strict=True)
    is_begin = (batch.phase[rows] == _PHASE_B).tolist()
    for index, (pid, tid, ts_ns, name, category) in enumerate(fields):
        yield (
            is_begin[index],
            _Begin(
                pid=pid,
                tid=tid,
                ts_ns=ts_ns,
                name=name,
                category=category,
                arguments=entries[firsts[index] : lasts[index]],
            ),
        )


def _complete_batch(found: list[tuple[int, ...]], arguments: list[tuple[int, ...]]) -> ScanBatch:
    """Complete events, as a scanner would give them."""
    events = np.array(found, dtype=np.int64)
    values = np.array(arguments, dtype=np.int64).reshape(-1, 4)
    return ScanBatch(
        phase=np.full(len(events), _PHASE_X, dtype=np.uint8),
        category=events[:, 0].astype(np.int32),
        name=events[:, 1].astype(np.int32),
        pid=events[:, 2],
        tid=events[:, 3],
        ts_ns=events[:, 4],
        dur_ns=events[:, 5],
        argument_event=values[:, 0].astype(np.int32),
        argument_key=values[:, 1].astype(np.uint8),
        argument_type=values[:, 2].astype(np.uint8),
        argument_value=values[:, 3],
    )


def _dense_arguments(batch: ScanBatch) -> dict[str, Int64s]:
    """One value per event for what nearly every event has."""
    found = {}
    is_int = batch.argument_type == int(ValueType.INT)
    value = _whole_floats(batch, is_int)
    for name in DENSE_KEYS:
        values = np.full(len(batch), NO_VALUE, dtype=np.int64)
        rows = find_true(is_int & (batch.argument_key == KEYS.index(name)))
        limit = {"stream": 1 << 31, "device": 1 << 15}.get(name, 1 << 62)
        number = value[rows]
        is_fitting = (number >= -limit) & (number < limit)
        values[batch.argument_event[rows[is_fitting]]] = number[is_fitting]
        found[name] = values
    return found


def _whole_floats(batch: ScanBatch, is_int: npt.NDArray[np.bool_]) -> Int64s:
    """The values, where `7.0` is 7, as tables write ids again; marks those in `is_int`."""
    rows = find_true(batch.argument_type == int(ValueType.FLOAT))
    rows = rows[np.isin(batch.argument_key[rows], _DENSE_KEYS)]
    if not len(rows):
        return batch.argument_value
    number = batch.argument_value[rows].view(np.float64)
    is_whole = (np.abs(number) < 1 << 53) & (number == np.floor(number))
    value = batch.argument_value.copy()
    value[rows[is_whole]] = number[is_whole].astype(np.int64)
    is_int[rows[is_whole]] = True
    return value


def _narrow(values: Int64s) -> npt.NDArray[Any]:
    """In four bytes where they fit."""
    if len(values) and (values.max() >= 1 << 31 or values.min() < -(1 << 31)):
        return values
    return values.astype(np.int32)


def _popper(parts: list[Columns]) -> Callable[[str, type[Any]], npt.NDArray[Any]]:
    """Joins one column at a time and frees its pieces, so that nothing is held twice."""

    def pop(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
        if not parts:
            return np.empty(0, dtype=dtype)
        pieces = [part.pop(name) for part in parts]
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        # Ids stay in four bytes where all of them fit.
        return joined if joined.dtype == np.int32 else joined.astype(dtype, copy=False)

    return pop
