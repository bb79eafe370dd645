"""Finds compiled readers; there are none where meshscope was installed without a compiler."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

LIBRARY_NAME = "_scanner_native.so"
NUM_LOOKED = 46
"""Numbers that `scanner_look` writes."""


@cache
def load_library() -> ctypes.CDLL | None:
    """The scanner with its signatures set, or None."""
    library = open_beside(LIBRARY_NAME, _set_signatures)
    is_current = library is not None and library.scanner_num_looked() == NUM_LOOKED
    return library if is_current else None


def open_beside(name: str, set_signatures: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    """A library that stands beside this file; None where there is none that fits."""
    path = Path(__file__).with_name(name)
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        set_signatures(library)
    except (OSError, AttributeError):
        # Built for another machine, or by an older version: the reader in Python does the same.
        return None
    return library


def _set_signatures(library: ctypes.CDLL) -> None:
    pointer, texts = ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)
    library.scanner_new.restype = pointer
    library.scanner_new.argtypes = [
        *(texts, ctypes.c_int32),
        *(ctypes.c_char_p, texts, ctypes.c_char_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ]
    library.scanner_free.restype = None
    library.scanner_free.argtypes = [pointer]
    library.scanner_feed.restype = ctypes.c_int64
    library.scanner_feed.argtypes = [pointer, pointer, ctypes.c_int64]
    library.scanner_num_looked.restype = ctypes.c_int64
    library.scanner_num_looked.argtypes = []
    library.scanner_look.restype = None
    library.scanner_look.argtypes = [pointer, pointer]
    library.scanner_symbols.restype = None
    library.scanner_symbols.argtypes = [pointer, ctypes.c_int64, pointer, pointer]
    library.scanner_order.restype = ctypes.c_int
    library.scanner_order.argtypes = [pointer, pointer]
    library.scanner_unite.restype = ctypes.c_int64
    library.scanner_unite.argtypes = [
        *(pointer, pointer, ctypes.c_int, pointer, ctypes.c_int64),
        *(pointer, pointer),
    ]
    library.scanner_clear_events.restype = None
    library.scanner_clear_events.argtypes = [pointer]
