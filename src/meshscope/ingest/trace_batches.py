"""Keeps what is wanted of each batch a scanner gives, narrow, and joins the batches at the end.

Device work, operators, calls of the runtime, annotations and modules stay; other Python functions
only when asked for. A begin and an end that belong together become one event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.ingest.scan import KEYS, MISSING, Int64s, ScanBatch, ValueType
from meshscope.store.trace_columns import NO_VALUE, Category, TraceArguments, TraceEvents

CATEGORIES: dict[bytes, Category] = {
    b"kernel": Category.KERNEL,
    b"Kernel": Category.KERNEL,
    b"gpu_memcpy": Category.MEMCPY,
    b"Memcpy": Category.MEMCPY,
    b"gpu_memset": Category.MEMSET,
    b"Memset": Category.MEMSET,
    b"concurrent_kernel": Category.KERNEL,
    b"cpu_op": Category.CPU_OP,
    b"Operator": Category.CPU_OP,
    b"cuda_runtime": Category.RUNTIME,
    b"cuda_driver": Category.RUNTIME,
    b"hip_runtime": Category.RUNTIME,
    b"hip_driver": Category.RUNTIME,
    b"xpu_runtime": Category.RUNTIME,
    b"xpu_driver": Category.RUNTIME,
    b"mtia_runtime": Category.RUNTIME,
    b"privateuse1_runtime": Category.RUNTIME,
    b"privateuse1_driver": Category.RUNTIME,
    b"Runtime": Category.RUNTIME,
    b"mtia_ccp_events": Category.KERNEL,
    b"mtia_insight": Category.KERNEL,
    b"user_annotation": Category.ANNOTATION,
    b"gpu_user_annotation": Category.DEVICE_ANNOTATION,
    b"python_function": Category.PYTHON,
    b"overhead": Category.OVERHEAD,
}
MODULE_PREFIX = b"nn.Module: "
_DENSE = ("External id", "correlation", "stream", "device")
_DROPPED_KEYS = frozenset((*_DENSE, "name", "labels"))
_PHASE_X, _PHASE_M, _PHASE_B, _PHASE_E = b"XMBE"

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class Metadata:
    """Names of processes and threads, by identity."""

    process_name: dict[int, int] = field(default_factory=dict)
    process_labels: dict[int, int] = field(default_factory=dict)
    thread_name: dict[tuple[int, int], int] = field(default_factory=dict)


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
        self._open: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.metadata = Metadata()
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
        is_metadata = batch.phase == _PHASE_M
        if is_metadata.any():
            self._take_metadata(batch, is_metadata, symbols)
        is_pair = (batch.phase == _PHASE_B) | (batch.phase == _PHASE_E)
        if is_pair.any():
            self._take_pairs(batch, np.flatnonzero(is_pair))
        self._take_complete(batch)

    def _learn(self, symbols: list[bytes]) -> None:
        for text in symbols[len(self._category_of) :]:
            self._category_of.append(CATEGORIES.get(text, Category.OTHER))
            self._is_module.append(text.startswith(MODULE_PREFIX))

    def _take_complete(self, batch: ScanBatch) -> None:
        is_complete = batch.phase == _PHASE_X
        is_timed = (batch.ts_ns != MISSING) & (batch.dur_ns != MISSING) & (batch.dur_ns >= 0)
        self.num_incomplete += int(np.count_nonzero(is_complete & ~is_timed))
        category = self._categorise(batch)
        is_kept = is_complete & is_timed
        if not self._with_python:
            is_python = category == Category.PYTHON
            self.num_skipped += int(np.count_nonzero(is_kept & is_python))
            is_kept &= ~is_python
        rows = np.flatnonzero(is_kept)
        dense = _dense_arguments(batch)
        self._parts.append(
            {
                "category": category[rows],
                "name": batch.name[rows],
                "track": self._number_tracks(batch.pid[rows], batch.tid[rows]),
                "begin_ns": batch.ts_ns[rows],
                "duration_ns": batch.dur_ns[rows],
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
        category[(category == Category.PYTHON) & is_module] = Category.MODULE
        return category

    def _number_tracks(self, pid: Int64s, tid: Int64s) -> npt.NDArray[np.int32]:
        if not len(pid):
            return np.empty(0, dtype=np.int32)
        order = np.lexsort((tid, pid))
        is_new = np.ones(len(pid), dtype=np.bool_)
        is_new[1:] = (np.diff(pid[order]) != 0) | (np.diff(tid[order]) != 0)
        firsts = order[is_new]
        places = [
            self._tracks.setdefault((process, thread), len(self._tracks))
            for process, thread in zip(pid[firsts].tolist(), tid[firsts].tolist(), strict=True)
        ]
        numbered = np.empty(len(pid), dtype=np.int32)
        numbered[order] = np.array(places, dtype=np.int32)[np.cumsum(is_new) - 1]
        return numbered

    def _take_arguments(self, batch: ScanBatch, is_kept: npt.NDArray[np.bool_]) -> None:
        place_of = np.cumsum(is_kept) - 1 + self._num_events
        is_wanted = np.array([key not in _DROPPED_KEYS for key in KEYS])[batch.argument_key]
        rows = np.flatnonzero(is_wanted & is_kept[batch.argument_event])
        if not len(rows):
            return
        self._argument_parts.append(
            {
                "event": place_of[batch.argument_event[rows]].astype(np.int32),
                "key": batch.argument_key[rows],
                "kind": batch.argument_type[rows],
                "value": _narrow(batch.argument_value[rows]),
            }
        )

    def _take_metadata(
        self, batch: ScanBatch, is_metadata: npt.NDArray[np.bool_], symbols: list[bytes]
    ) -> None:
        text_of: dict[tuple[int, int], int] = {}
        for row in np.flatnonzero(is_metadata[batch.argument_event]):
            if batch.argument_type[row] == ValueType.STRING:
                key = (int(batch.argument_event[row]), int(batch.argument_key[row]))
                text_of[key] = int(batch.argument_value[row])
        name_key, labels_key = KEYS.index("name"), KEYS.index("labels")
        for event in np.flatnonzero(is_metadata).tolist():
            kind = symbols[batch.name[event]] if batch.name[event] >= 0 else b""
            process, thread = int(batch.pid[event]), int(batch.tid[event])
            name = text_of.get((event, name_key))
            labels = text_of.get((event, labels_key))
            if kind == b"process_name" and name is not None:
                self.metadata.process_name[process] = name
            elif kind == b"process_labels" and labels is not None:
                self.metadata.process_labels[process] = labels
            elif kind == b"thread_name" and name is not None:
                self.metadata.thread_name[process, thread] = name

    def _take_pairs(self, batch: ScanBatch, rows: Int64s) -> None:
        """Begins wait on a stack for their ends; arguments of either are not kept."""
        found: list[tuple[int, int, int, int, int, int]] = []
        for row in rows.tolist():
            key = (int(batch.pid[row]), int(batch.tid[row]))
            stack = self._open.setdefault(key, [])
            moment = int(batch.ts_ns[row])
            if moment == MISSING:
                self.num_incomplete += 1
            elif batch.phase[row] == _PHASE_B:
                stack.append((moment, int(batch.name[row]), int(batch.category[row])))
            elif stack and stack[-1][0] <= moment:
                begin, name, category = stack.pop()
                found.append((begin, moment - begin, name, category, *key))
            else:
                self.num_incomplete += 1
        if found:
            self._put_pairs(np.array(found, dtype=np.int64))

    def _put_pairs(self, found: Int64s) -> None:
        absent = np.full(len(found), NO_VALUE, dtype=np.int64)
        category_of = np.array([*self._category_of, Category.OTHER], dtype=np.uint8)
        self._parts.append(
            {
                "category": category_of[found[:, 3]],
                "name": found[:, 2].astype(np.int32),
                "track": self._number_tracks(found[:, 4], found[:, 5]),
                "begin_ns": found[:, 0],
                "duration_ns": found[:, 1],
                "external_id": absent.astype(np.int32),
                "correlation": absent.astype(np.int32),
                "stream": absent.astype(np.int32),
                "device": absent.astype(np.int16),
            }
        )
        self._num_events += len(found)

    def join(self) -> tuple[TraceEvents, TraceArguments]:
        """All columns in order of begin."""
        self.num_incomplete += sum(len(stack) for stack in self._open.values())
        order = np.argsort(_peek(self._parts, "begin_ns", np.int64), kind="stable")
        place_of = np.empty(len(order), dtype=np.int32)
        place_of[order] = np.arange(len(order), dtype=np.int32)
        pop = _popper(self._parts)
        events = TraceEvents(
            category=pop("category", np.uint8)[order],
            name=pop("name", np.int32)[order],
            track=pop("track", np.int32)[order],
            begin_ns=pop("begin_ns", np.int64)[order],
            duration_ns=pop("duration_ns", np.int64)[order],
            external_id=pop("external_id", np.int64)[order],
            correlation=pop("correlation", np.int64)[order],
            stream=pop("stream", np.int32)[order],
            device=pop("device", np.int16)[order],
        )
        return events, self._join_arguments(place_of)

    def _join_arguments(self, place_of: npt.NDArray[np.int32]) -> TraceArguments:
        pop = _popper(self._argument_parts)
        event = place_of[pop("event", np.int32)]
        order = np.argsort(event, kind="stable")
        return TraceArguments(
            event=event[order],
            key=pop("key", np.uint8)[order],
            kind=pop("kind", np.uint8)[order],
            value=pop("value", np.int64)[order],
        )


def _dense_arguments(batch: ScanBatch) -> dict[str, Int64s]:
    """One value per event for what nearly every event has."""
    found = {}
    is_int = batch.argument_type == ValueType.INT
    for name in _DENSE:
        values = np.full(len(batch), NO_VALUE, dtype=np.int64)
        rows = np.flatnonzero(is_int & (batch.argument_key == KEYS.index(name)))
        limit = {"stream": 1 << 31, "device": 1 << 15}.get(name, 1 << 62)
        number = batch.argument_value[rows]
        is_fitting = (number >= -limit) & (number < limit)
        values[batch.argument_event[rows[is_fitting]]] = number[is_fitting]
        found[name] = values
    return found


def _narrow(values: Int64s) -> npt.NDArray[Any]:
    """In four bytes where they fit."""
    if len(values) and (values.max() >= 1 << 31 or values.min() < -(1 << 31)):
        return values
    return values.astype(np.int32)


def _peek(parts: list[Columns], name: str, dtype: type[Any]) -> npt.NDArray[Any]:
    if not parts:
        return np.empty(0, dtype=dtype)
    return np.concatenate([part[name] for part in parts])


def _popper(parts: list[Columns]) -> Callable[[str, type[Any]], npt.NDArray[Any]]:
    """Joins one column at a time and lets go of its pieces, so that nothing is there twice."""

    def pop(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
        if not parts:
            return np.empty(0, dtype=dtype)
        pieces = [part.pop(name) for part in parts]
        joined = np.concatenate(pieces)
        # Ids stay in four bytes where all of them fit.
        return joined if joined.dtype == np.int32 else joined.astype(dtype, copy=False)

    return pop
