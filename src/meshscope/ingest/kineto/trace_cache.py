"""Keeps a trace's columns beside it, so that it is parsed once.

`TRACE.meshscope` is numpy's own archive with a JSON head; it is used only while the file is the one
that was read (`read_stamp`) and versions agree, is written under another name and renamed, and a
folder that cannot be written to costs nothing but the time. Nothing in it is ever unpickled.
"""

import json
import os
import time
import zipfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.core.unavailable import Unavailable
from meshscope.ingest.kineto.trace_columns import (
    Trace,
    TraceArguments,
    TraceCounts,
    TraceEvents,
    TraceGroup,
    TraceMemory,
    Track,
)
from meshscope.store.read.files import KEPT_SUFFIX, file_stamp, open_bytes

_CACHE_VERSION = 4
SUFFIX = KEPT_SUFFIX
_ENCODING = "utf-8"


_TICK_NS = 20_000_000
"""File systems' clocks go in steps shorter than this; what changes within one looks unchanged."""

Stamp = tuple[int, ...]


def read_stamp(path: Path) -> Stamp:
    """What tells a file from any other, and from itself once it is changed; to be had before it is
    read. A file that was changed just now is waited for. Raises OSError."""
    stamp = file_stamp(path)
    age_ns = time.time_ns() - max(stamp[1:3])
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / 1e9)
        stamp = file_stamp(path)
    return (_CACHE_VERSION, *stamp)


def cache_path(path: Path) -> Path:
    """Where the columns of a trace are kept."""
    return path.with_name(path.name + SUFFIX)


def store_trace(path: Path, trace: Trace, stamp: Stamp) -> bool:
    """Whether it could be written; `stamp` is that of before it was read."""
    target = cache_path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        head = json.dumps(_head(stamp, trace)).encode(_ENCODING)
        arrays = {
            **_columns("event", trace.events),
            **_columns("argument", trace.arguments),
            **_columns("memory", trace.memory),
            "head": np.frombuffer(head, dtype=np.uint8),
        }
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        return False
    return True


def load_trace(path: Path, stamp: Stamp) -> Trace | None:
    """The columns, if they are there and of this file."""
    try:
        with (
            open_bytes(cache_path(path)) as file,
            np.load(file, allow_pickle=False) as archive,
        ):
            head = json.loads(archive["head"].tobytes().decode(_ENCODING))
            if head.get("stamp") != list(stamp):
                return None
            return _restore(path, head, archive)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
        # Absent, cut off, or made by something else: the trace itself is read instead.
        return None


def _columns(prefix: str, table: TraceEvents | TraceArguments | TraceMemory) -> dict[str, Any]:
    return {f"{prefix}_{field.name}": getattr(table, field.name) for field in fields(table)}


def _head(stamp: Stamp, trace: Trace) -> dict[str, object]:
    def known(value: object) -> object:
        return {"reason": value.reason} if isinstance(value, Unavailable) else value

    return {
        "stamp": stamp,
        "rank": known(trace.rank),
        "world_size": known(trace.world_size),
        "backend": known(trace.backend),
        "groups": [asdict(group) for group in trace.groups],
        "device_names": list(trace.device_names.items()),
        "base_ns": trace.base_ns,
        "strings": trace.strings,
        "keys": trace.keys,
        "tracks": [asdict(track) for track in trace.tracks],
        "counts": asdict(trace.counts),
        "warnings": trace.warnings,
    }


def _restore(path: Path, head: dict[str, Any], archive: Any) -> Trace:
    def known(value: Any) -> Any:
        return Unavailable(value["reason"]) if isinstance(value, dict) else value

    events = {field.name: archive[f"event_{field.name}"] for field in fields(TraceEvents)}
    arguments = {field.name: archive[f"argument_{field.name}"] for field in fields(TraceArguments)}
    memory = {field.name: archive[f"memory_{field.name}"] for field in fields(TraceMemory)}
    return Trace(
        source=str(path),
        rank=known(head["rank"]),
        world_size=known(head["world_size"]),
        backend=known(head["backend"]),
        groups=tuple(
            TraceGroup(**{**group, "ranks": tuple(group["ranks"])}) for group in head["groups"]
        ),
        device_names=dict(head["device_names"]),
        base_ns=head["base_ns"],
        strings=tuple(head["strings"]),
        keys=tuple(head["keys"]),
        tracks=tuple(Track(**track) for track in head["tracks"]),
        events=TraceEvents(**events),
        arguments=TraceArguments(**arguments),
        counts=TraceCounts(**head["counts"]),
        warnings=tuple(head["warnings"]),
        memory=TraceMemory(**memory),
    )
