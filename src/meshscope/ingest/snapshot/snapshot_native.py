"""The compiled reader of snapshot pickles; there is none where there was no compiler."""

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.ingest.native import open_beside
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, STATES
from meshscope.ingest.snapshot.snapshot_words import (
    KNOWN_TEXTS,
    RawColumns,
    explain,
    limit_memo,
    limit_stack,
)

LIBRARY_NAME = "_snapshot_native.so"
_RUNNING, _DONE, _BROKEN = range(3)
_STATE, _ERROR, _ERROR_VALUE, _NEEDED, _NUM_ODD, _HAS_ROOT, _FIRST_COLUMN = range(7)
_DTYPES: tuple[type[np.generic], ...] = (
    *[np.int64] * 4,  # segments
    *[np.int64] * 6,  # blocks
    *(np.int16, np.int8, np.int64, np.int64, np.int64, np.int32),  # events
    *(np.int64, np.int32),  # stacks
    *(np.int32, np.int32, np.int64),  # frames
    *(np.int64, np.uint8),  # texts
)
_NUM_LOOKED = _FIRST_COLUMN + 2 * len(_DTYPES)


@cache
def load_library() -> ctypes.CDLL | None:
    """The machine with its signatures set, or None."""
    library = open_beside(LIBRARY_NAME, _set_signatures)
    # One of another version would write beyond the columns that are looked at here.
    is_current = library is not None and library.snapshot_num_looked() == _NUM_LOOKED
    return library if is_current else None


def _set_signatures(library: ctypes.CDLL) -> None:
    pointer, number, seed = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
    library.snapshot_new.restype = pointer
    library.snapshot_new.argtypes = [pointer, number, number, number, number, seed, seed]
    library.snapshot_feed.restype = number
    library.snapshot_feed.argtypes = [pointer, pointer, number]
    for name in ("snapshot_free", "snapshot_cut", "snapshot_finish"):
        getattr(library, name).restype = None
        getattr(library, name).argtypes = [pointer]
    library.snapshot_num_looked.restype = number
    library.snapshot_num_looked.argtypes = []
    library.snapshot_look.restype = None
    library.snapshot_look.argtypes = [pointer, pointer]


class _Machine:
    """Owns the compiled machine's memory; columns keep it."""

    def __init__(self, library: ctypes.CDLL, size_bytes: int) -> None:
        self.library = library
        texts = (ctypes.c_char_p * (len(KNOWN_TEXTS) + 1))(*map(str.encode, KNOWN_TEXTS), None)
        seed = int.from_bytes(os.urandom(16), "little")
        self.handle = library.snapshot_new(
            ctypes.cast(texts, ctypes.c_void_p),
            len(STATES),
            len(ACTIONS),
            limit_memo(size_bytes),
            limit_stack(size_bytes),
            seed & 0xFFFF_FFFF_FFFF_FFFF,
            seed >> 64,
        )
        if not self.handle:
            raise MemoryError("no memory for a reader")

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self.library.snapshot_free(handle)


class NativePickle:
    def __init__(self, library: ctypes.CDLL, size_bytes: int) -> None:
        self._library = library
        self._machine = _Machine(library, size_bytes)
        self._looked = np.zeros(_NUM_LOOKED, dtype=np.int64)

    @property
    def is_done(self) -> bool:
        return int(self._looked[_STATE]) == _DONE

    @property
    def needed(self) -> int:
        return int(self._looked[_NEEDED])

    def feed(self, data: bytearray, size: int) -> int:
        if not 0 <= size <= len(data):
            raise ValueError(f"{size} of {len(data)} bytes")
        address = (ctypes.c_char * len(data)).from_buffer(data)
        taken = int(self._library.snapshot_feed(self._machine.handle, address, size))
        self._read_state()
        if int(self._looked[_STATE]) == _BROKEN:
            raise explain(int(self._looked[_ERROR]), int(self._looked[_ERROR_VALUE]))
        return taken

    def finish(self, *, is_cut: bool) -> RawColumns:
        """All that was found, where the machine has it: no copy is made of events."""
        if is_cut:
            self._library.snapshot_cut(self._machine.handle)
        self._library.snapshot_finish(self._machine.handle)
        self._read_state()
        columns = [self._view_column(number) for number in range(len(_DTYPES))]
        return RawColumns(
            segments=tuple(columns[:4]),
            blocks=tuple(columns[4:10]),
            event_device=columns[10],
            event_action=columns[11],
            event_address=columns[12],
            event_bytes=columns[13],
            event_time_us=columns[14],
            event_stack=columns[15],
            stack_begin=columns[16],
            stack_frames=columns[17],
            frames=_make_frames(columns[18:]),
            num_odd=int(self._looked[_NUM_ODD]),
            has_root=bool(self._looked[_HAS_ROOT]),
        )

    def _read_state(self) -> None:
        self._library.snapshot_look(self._machine.handle, self._looked.ctypes.data)

    def _view_column(self, number: int) -> npt.NDArray[Any]:
        index = _FIRST_COLUMN + 2 * number
        num, address = self._looked[index : index + 2].tolist()
        dtype = np.dtype(_DTYPES[number])
        if not num:
            return np.empty(0, dtype=dtype)
        memory = (ctypes.c_char * (num * dtype.itemsize)).from_address(address)
        memory.owner = self._machine  # as long as the column is there
        return np.frombuffer(memory, dtype=dtype)


def _make_frames(columns: list[npt.NDArray[Any]]) -> list[tuple[bytes, bytes, int]]:
    names, files, lines, begin, arena = (columns[0], columns[1], columns[2], columns[3], columns[4])
    used = np.union1d(names, files)
    arena_bytes = memoryview(arena.data)
    starts, ends = begin[used].tolist(), begin[used + 1].tolist()
    texts = {
        number: bytes(arena_bytes[start:end])
        for number, start, end in zip(used.tolist(), starts, ends, strict=True)
    }
    return [
        (texts[name], texts[file], line)
        for name, file, line in zip(names.tolist(), files.tolist(), lines.tolist(), strict=True)
    ]
