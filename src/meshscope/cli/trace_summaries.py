"""Summaries of traces, kept beside them: a trace that did not change is neither read nor analysed
again.

`TRACE.summary.meshscope` holds what `summarize_trace` gave, for which file (`read_stamp`), layout
and code: any other of these makes it worthless. It is read by its types, never unpickled, written
under another name and renamed, and a folder that cannot be written to costs nothing but the time.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

import msgspec

import meshscope
from meshscope.analyze.device.trace_summary import TraceSummary
from meshscope.core.layout import Layout
from meshscope.core.rebuild import make_rebuilder
from meshscope.ingest.kineto.trace_cache import SUFFIX, Stamp
from meshscope.store.read.files import read_file
from meshscope.store.write.manifest import replace_whole

_ROOMS = ("analyze/device", "core", "ingest", "numerics")
"""Where the code is that a summary comes from."""
_MAX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSummary:
    """What is in the file."""

    stamp: Stamp
    code: str
    layout: Layout | None
    """That named the axes."""
    summary: TraceSummary


def summary_path(path: Path) -> Path:
    """Where the summary of a trace is kept."""
    return path.with_name(f"{path.name}.summary{SUFFIX}")


def load_summary(path: Path, stamp: Stamp) -> KeptSummary | None:
    """The summary, if it is there and of this file and code; the caller judges its layout."""
    try:
        data = read_file(summary_path(path), _MAX_BYTES)
        kept: KeptSummary = make_rebuilder(KeptSummary)(msgspec.msgpack.decode(data))
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        # Absent, cut off, or made by something else: the trace itself is read instead.
        return None
    is_current = kept.stamp == stamp and kept.code == code_stamp()
    return kept if is_current else None


def store_summary(path: Path, stamp: Stamp, layout: Layout | None, summary: TraceSummary) -> bool:
    """Whether it could be written; `stamp` is that of before the trace was read."""
    kept = KeptSummary(stamp=stamp, code=code_stamp(), layout=layout, summary=summary)
    try:
        replace_whole(summary_path(path), msgspec.msgpack.encode(kept))
    except OSError:
        return False
    return True


@cache
def code_stamp() -> str:
    """Changes with the version, and with any file of the code that summaries come from."""
    root = Path(meshscope.__file__).parent
    digest = blake2b(meshscope.__version__.encode(), digest_size=16)
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
