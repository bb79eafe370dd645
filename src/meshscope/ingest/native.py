"""Finds the compiled scanner; there is none where meshscope was installed without a compiler."""

import ctypes
from functools import cache
from pathlib import Path

LIBRARY_NAME = "_scanner_native.so"
NUM_LOOKED = 22
"""Numbers that `scanner_look` writes."""


@cache
def load_library() -> ctypes.CDLL | None:
    """The library with its signatures set, or None."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        _set_signatures(library)
    except (OSError, AttributeError):
        # Built for another machine, or by an older version: the Python scanner does the same.
        return None
    return library if library.scanner_num_looked() == NUM_LOOKED else None


def _set_signatures(library: ctypes.CDLL) -> None:
    pointer, texts = ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)
    library.scanner_new.restype = pointer
    library.scanner_new.argtypes = [texts, ctypes.c_char_p, texts]
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
    library.scanner_clear_events.restype = None
    library.scanner_clear_events.argtypes = [pointer]
