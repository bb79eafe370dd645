"""The compiled scanner behind the protocol of `scan`. Copies are made before the next call."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.ingest.kineto.scan import (
    KEPT_PHASES,
    KEYS,
    ScanBatch,
    ScanCounts,
    ScanError,
    ScanState,
)
from meshscope.ingest.native import NUM_LOOKED

(
    _STATE,
    _ERROR,
    _SKIPPED,
    _EVENT_LISTS,
    _NUM_EVENTS,
    _PHASE,
    _CATEGORY,
    _NAME,
    _PID,
    _TID,
    _TS,
    _DUR,
    _NUM_ARGUMENTS,
    _ARGUMENT_EVENT,
    _ARGUMENT_KEY,
    _ARGUMENT_TYPE,
    _ARGUMENT_VALUE,
    _NUM_FIELDS,
    _FIELDS,
    _NUM_SYMBOLS,
    _ARENA,
    _ARENA_SIZE,
) = range(NUM_LOOKED)


class NativeScanner:
    def __init__(self, library: ctypes.CDLL, skipped_categories: Sequence[str] = ()) -> None:
        self._library = library
        keys = _texts(KEYS)
        self._handle = library.scanner_new(keys, KEPT_PHASES.encode(), _texts(skipped_categories))
        if not self._handle:
            raise MemoryError("no memory for a scanner")
        self._symbols: list[bytes] = []

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._library.scanner_free(handle)

    @property
    def state(self) -> ScanState:
        return ScanState(int(self._read_state()[_STATE]))

    @property
    def error(self) -> ScanError:
        return ScanError(int(self._read_state()[_ERROR]))

    @property
    def counts(self) -> ScanCounts:
        found = self._read_state()
        return ScanCounts(
            num_skipped=int(found[_SKIPPED]),
            num_event_lists=int(found[_EVENT_LISTS]),
        )

    def feed(self, data: bytes) -> int:
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
        return int(self._library.scanner_feed(self._handle, address, len(data)))

    def take(self) -> ScanBatch:
        found = self._read_state()
        num, num_arguments = int(found[_NUM_EVENTS]), int(found[_NUM_ARGUMENTS])
        batch = ScanBatch(
            phase=_copy(found[_PHASE], num, np.uint8),
            category=_copy(found[_CATEGORY], num, np.int32),
            name=_copy(found[_NAME], num, np.int32),
            pid=_copy(found[_PID], num, np.int64),
            tid=_copy(found[_TID], num, np.int64),
            ts_ns=_copy(found[_TS], num, np.int64),
            dur_ns=_copy(found[_DUR], num, np.int64),
            argument_event=_copy(found[_ARGUMENT_EVENT], num_arguments, np.int32),
            argument_key=_copy(found[_ARGUMENT_KEY], num_arguments, np.uint8),
            argument_type=_copy(found[_ARGUMENT_TYPE], num_arguments, np.uint8),
            argument_value=_copy(found[_ARGUMENT_VALUE], num_arguments, np.int64),
        )
        self._library.scanner_clear_events(self._handle)
        return batch

    def symbols(self) -> list[bytes]:
        found = self._read_state()
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
        found = self._read_state()
        pairs = _copy(found[_FIELDS], 2 * int(found[_NUM_FIELDS]), np.int64).tolist()
        symbols = self.symbols()
        return [
            (symbols[key], symbols[value])
            for key, value in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    def _read_state(self) -> npt.NDArray[np.int64]:
        found = np.zeros(NUM_LOOKED, dtype=np.int64)
        self._library.scanner_look(self._handle, found.ctypes.data)
        return found


def _texts(texts: Sequence[str]) -> "ctypes.Array[ctypes.c_char_p]":
    return (ctypes.c_char_p * (len(texts) + 1))(*(text.encode() for text in texts), None)


def _copy(address: np.int64, num: int, dtype: type[Any]) -> npt.NDArray[Any]:
    if not num:
        return np.empty(0, dtype=dtype)
    size = num * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(int(address), size), dtype=dtype)
