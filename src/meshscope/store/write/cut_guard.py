"""Keeps a training alive whose mapped files somebody else cuts short.

A write to a page that is no longer in its file is SIGBUS. The compiled recorder catches it for maps
that are guarded here, and hands every other one on to the handler that was there before. Without
it, or where the program sets a handler of its own later, it is the end of the process, as for every
mapped file. Standard library only.
"""

import mmap

from meshscope.store.write.native import load_native

_NATIVE = "meshscope.store.write._record_slots_native"


def guard(mapped: mmap.mmap) -> mmap.mmap:
    """The same map; guarded, where that is possible, until it is gone."""
    native = load_native(_NATIVE)
    if native is not None and hasattr(native, "guard"):
        native.guard(mapped)
    return mapped


def count_cut_pages() -> int:
    """Pages of this process that were written after their file had lost them."""
    native = load_native(_NATIVE)
    if native is None or not hasattr(native, "count_cut_pages"):
        return 0
    found: int = native.count_cut_pages()
    return found
