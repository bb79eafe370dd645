"""The compiled scanner behind the protocol of `scan`.

Batches are copies, made before the next call. Columns of complete events grow in the library's
memory, are put in order there, and stay: arrays over them keep the scanner.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.scan import (
    EMPTY_BATCH,
    FIRST_KEPT_KEY,
    KEPT_PHASES,
    KEYS,
    ScanBatch,
    ScanColumns,
    ScanCounts,
    ScanError,
    ScanState,
)
from meshscope.ingest.kineto.trace_columns import (
    CATEGORIES,
    Category,
    TraceArguments,
    TraceEvents,
)
from meshscope.ingest.native import NUM_LOOKED

(
    _STATE,
    _ERROR,
    _SKIPPED,
    _EVENT_LISTS,
    _COMPLETE,
    _INCOMPLETE,
    _NUM_FIELDS,
    _FIELDS,
    _NUM_SYMBOLS,
    _ARENA,
    _ARENA_SIZE,
    _NUM_TRACKS,
    _TRACKS,
    _NUM_EVENTS,
    _PHASE,
    _CATEGORY,
    _NAME,
    _PID,
    _TID,
    _TS,
    _DUR,
    _NUM_BATCH_ARGUMENTS,
    _BATCH_EVENT,
    _BATCH_KEY,
    _BATCH_TYPE,
    _BATCH_VALUE_WIDE,
    _BATCH_VALUE,
    _NUM_COLUMNS,
    _COLUMN_CATEGORY,
    _COLUMN_NAME,
    _COLUMN_TRACK,
    _COLUMN_BEGIN,
    _COLUMN_DURATION_WIDE,
    _COLUMN_DURATION,
    _COLUMN_EXTERNAL_WIDE,
    _COLUMN_EXTERNAL,
    _COLUMN_CORRELATION_WIDE,
    _COLUMN_CORRELATION,
    _COLUMN_STREAM,
    _COLUMN_DEVICE,
    _NUM_ARGUMENTS,
    _ARGUMENT_EVENT,
    _ARGUMENT_KEY,
    _ARGUMENT_TYPE,
    _ARGUMENT_VALUE_WIDE,
    _ARGUMENT_VALUE,
) = range(NUM_LOOKED)


def _texts(texts: Sequence[bytes]) -> "ctypes.Array[ctypes.c_char_p]":
    return (ctypes.c_char_p * (len(texts) + 1))(*texts, None)


_KEY_TEXTS = _texts([key.encode() for key in KEYS])
_CATEGORY_TEXTS = _texts(list(CATEGORIES))
_CATEGORY_CODES = bytes(CATEGORIES.values())


class NativeScanner:
    """With `is_raw` complete events come in batches like all others, as their text has them."""

    def __init__(
        self, library: ctypes.CDLL, *, with_python: bool = False, is_raw: bool = False
    ) -> None:
        self._library = library
        self._handle = library.scanner_new(
            _KEY_TEXTS,
            FIRST_KEPT_KEY,
            KEPT_PHASES.encode(),
            _CATEGORY_TEXTS,
            _CATEGORY_CODES,
            Category.PYTHON,
            Category.MODULE,
            with_python,
            is_raw,
        )
        if not self._handle:
            raise MemoryError("no memory for a scanner")
        self._symbols: list[bytes] = []
        self._found = np.zeros(NUM_LOOKED, dtype=np.int64)
        self._read_state()

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._library.scanner_free(handle)

    @property
    def state(self) -> ScanState:
        return ScanState(int(self._found[_STATE]))

    @property
    def error(self) -> ScanError:
        return ScanError(int(self._found[_ERROR]))

    @property
    def counts(self) -> ScanCounts:
        found = self._found
        return ScanCounts(
            num_skipped=int(found[_SKIPPED]),
            num_event_lists=int(found[_EVENT_LISTS]),
            num_complete=int(found[_COMPLETE]),
            num_incomplete=int(found[_INCOMPLETE]),
        )

    def feed(self, data: bytes | memoryview) -> int:
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        num_done = int(self._library.scanner_feed(self._handle, address, len(data)))
        self._read_state()
        return num_done

    def take(self) -> ScanBatch:
        found = self._found
        num, num_arguments = int(found[_NUM_EVENTS]), int(found[_NUM_BATCH_ARGUMENTS])
        if not num:
            return EMPTY_BATCH
        value = self._keep_numbers(_BATCH_VALUE_WIDE, num_arguments)
        batch = ScanBatch(
            phase=_look_at(found[_PHASE], num, np.uint8).copy(),
            category=_look_at(found[_CATEGORY], num, np.int32).copy(),
            name=_look_at(found[_NAME], num, np.int32).copy(),
            pid=_look_at(found[_PID], num, np.int64).copy(),
            tid=_look_at(found[_TID], num, np.int64).copy(),
            ts_ns=_look_at(found[_TS], num, np.int64).copy(),
            dur_ns=_look_at(found[_DUR], num, np.int64).copy(),
            argument_event=_look_at(found[_BATCH_EVENT], num_arguments, np.int32).copy(),
            argument_key=_look_at(found[_BATCH_KEY], num_arguments, np.uint8).copy(),
            argument_type=_look_at(found[_BATCH_TYPE], num_arguments, np.uint8).copy(),
            argument_value=value.astype(np.int64),
        )
        self._library.scanner_clear_events(self._handle)
        self._read_state()
        return batch

    def columns(self) -> ScanColumns:
        found = self._found
        num, num_arguments = int(found[_NUM_COLUMNS]), int(found[_NUM_ARGUMENTS])
        tracks = _look_at(found[_TRACKS], 2 * int(found[_NUM_TRACKS]), np.int64).tolist()
        return ScanColumns(
            events=TraceEvents(
                category=self._keep(found[_COLUMN_CATEGORY], num, np.uint8),
                name=self._keep(found[_COLUMN_NAME], num, np.int32),
                track=self._keep(found[_COLUMN_TRACK], num, np.int32),
                begin_ns=self._keep(found[_COLUMN_BEGIN], num, np.int64),
                duration_ns=self._keep_numbers(_COLUMN_DURATION_WIDE, num),
                external_id=self._keep_numbers(_COLUMN_EXTERNAL_WIDE, num),
                correlation=self._keep_numbers(_COLUMN_CORRELATION_WIDE, num),
                stream=self._keep(found[_COLUMN_STREAM], num, np.int32),
                device=self._keep(found[_COLUMN_DEVICE], num, np.int16),
            ),
            arguments=TraceArguments(
                event=self._keep(found[_ARGUMENT_EVENT], num_arguments, np.int32),
                key=self._keep(found[_ARGUMENT_KEY], num_arguments, np.uint8),
                kind=self._keep(found[_ARGUMENT_TYPE], num_arguments, np.uint8),
                value=self._keep_numbers(_ARGUMENT_VALUE_WIDE, num_arguments),
            ),
            tracks=list(zip(tracks[::2], tracks[1::2], strict=True)),
        )

    def put_in_order(self) -> ScanColumns:
        """All else is freed, with what `columns` gave before: it can neither be fed nor asked for
        symbols any more."""
        found = self._found
        begin_ns = self._keep(found[_COLUMN_BEGIN], int(found[_NUM_COLUMNS]), np.int64)
        order = begin_ns.argsort(kind="stable")
        if self._library.scanner_order(self._handle, order.ctypes.data):
            raise MemoryError("no memory to sort a trace's events")
        self._read_state()
        return self.columns()

    def _keep(self, address: np.int64, num: int, dtype: type[Any]) -> npt.NDArray[Any]:
        return _look_at(address, num, dtype, owner=self)

    def _keep_numbers(self, is_wide: int, num: int) -> npt.NDArray[Any]:
        """Numbers of four bytes, or of eight where one of them did not fit."""
        found = self._found
        return self._keep(found[is_wide + 1], num, np.int64 if found[is_wide] else np.int32)

    def symbols(self) -> list[bytes]:
        found = self._found
        first, num = len(self._symbols), int(found[_NUM_SYMBOLS])
        if num > first:
            offset = np.empty(num - first, dtype=np.int64)
            length = np.empty(num - first, dtype=np.int64)
            self._library.scanner_symbols(
                self._handle, first, offset.ctypes.data, length.ctypes.data
            )
            begin = int(offset[0])
            arena = ctypes.string_at(int(found[_ARENA]) + begin, int(found[_ARENA_SIZE]) - begin)
            starts = (offset - begin).tolist()
            self._symbols += [
                arena[start : start + size]
                for start, size in zip(starts, length.tolist(), strict=True)
            ]
        return self._symbols

    def fields(self) -> list[tuple[bytes, bytes]]:
        found = self._found
        pairs = _look_at(found[_FIELDS], 2 * int(found[_NUM_FIELDS]), np.int64).tolist()
        symbols = self.symbols()
        return [
            (symbols[key], symbols[value])
            for key, value in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    def _read_state(self) -> None:
        self._library.scanner_look(self._handle, self._found.ctypes.data)


def _look_at(
    address: np.int64, num: int, dtype: type[Any], owner: NativeScanner | None = None
) -> npt.NDArray[Any]:
    """A view of memory that the library owns, which keeps its owner, if it has one."""
    if not num:
        return np.empty(0, dtype=dtype)
    size = num * np.dtype(dtype).itemsize
    buffer: Any = (ctypes.c_char * size).from_address(int(address))
    buffer.owner = owner
    return np.frombuffer(buffer, dtype=dtype)
