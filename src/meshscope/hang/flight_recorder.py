"""Reads dumps of torch's flight recorder, as further evidence of who entered what.

A dump is a pickle or JSON, one file per rank, with the rank at the end of its name. Pickles can
run code, so nothing but plain values is accepted: every name a pickle asks for is refused, and
memory is bounded while it is read. What is not as expected is left out.

torch numbers a group's collectives from 1. For gloo a dump has no states and no sends; an entry
that is `retired` is over.
"""

import contextlib
import io
import json
import os
import pickle
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshscope.store.read.files import ByteFile, is_folder, list_names

DUMPS_NAME = "flight_recorder"
_MAX_DUMP_BYTES = 64 << 20
MAX_DUMPS = 4096
_SPARE_BYTES = 1 << 30
"""Address space a pickle may take while it is read."""
_MAX_ENTRIES = 20_000
_MAX_FRAMES = 64
_RANK_AT_END = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|bin))?$")
_NOT_THE_PROGRAM = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/")
_BAD_PICKLE = (
    pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError, TypeError,
    AttributeError, MemoryError, RecursionError, OverflowError, ImportError,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What a rank's flight recorder says about one process group."""

    rank: int
    group: str
    """torch's name for it."""
    sequence: int
    """Of the last collective, from 0."""
    name: str
    """`nccl:all_reduce`."""
    state: str
    """`scheduled`, `started` or `completed`, as torch saw it."""
    is_over: bool
    place: str
    """Where the program called it: `train.py:88 in step`; empty when not known."""


def find_dumps(path: Path) -> list[tuple[int, Path]]:
    """(rank, file) of the dumps in a folder, or of the one file; the rank is in the name."""
    files = [path]
    if is_folder(path):
        files = sorted(path / name for name in list_names(path)[:MAX_DUMPS])
    return [(int(match[1]), file) for file in files if (match := _RANK_AT_END.search(file.name))]


def read_dumps(path: Path) -> tuple[list[GroupRecord], list[str]]:
    """The last collective of every rank and group, and the problems of files left out."""
    records: list[GroupRecord] = []
    problems: list[str] = []
    for rank, file in find_dumps(path):
        try:
            records += summarize_dump(rank, _read_dump(file))
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
        except ValueError as error:
            problems.append(f"{file.name} is no dump of the flight recorder: {error}")
    return records, problems


def _read_dump(path: Path) -> object:
    with ByteFile(path) as file:
        if file.size_bytes > _MAX_DUMP_BYTES:
            raise ValueError(f"it has {file.size_bytes} bytes, at most {_MAX_DUMP_BYTES} are read")
        return decode_dump(file.read_all())


def decode_dump(data: bytes) -> object:
    """Plain values out of a dump; ValueError for anything else."""
    if data[:1] == b"{":
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    try:
        with _bounded_memory():
            return _PlainUnpickler(io.BytesIO(data)).load()
    except _BAD_PICKLE as error:
        raise ValueError(str(error)[:200] or type(error).__name__) from None


class _PlainUnpickler(pickle.Unpickler):
    """Accepts numbers, texts, lists and dictionaries, and nothing that has a name."""

    def find_class(self, module: str, name: str) -> object:
        """Refuses every name."""
        raise pickle.UnpicklingError(f"it asks for {module[:50]}.{name[:50]}")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it asks for an object from outside")


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """A few bytes can make the unpickler take gigabytes: it fails instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + _SPARE_BYTES
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (OSError, ValueError):  # no /proc: then without
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def summarize_dump(rank: int, dump: object) -> list[GroupRecord]:
    """The last collective of every group in a dump."""
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ValueError("it has no list of entries")
    last: dict[str, GroupRecord] = {}
    for entry in dump["entries"][-_MAX_ENTRIES:]:
        record = _read_entry(rank, entry)
        if record is not None and record.sequence >= last.get(record.group, record).sequence:
            last[record.group] = record
    return list(last.values())


def _read_entry(rank: int, entry: object) -> GroupRecord | None:
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    group = entry.get("process_group")
    sequence = entry.get("collective_seq_id")
    if (
        not isinstance(group, (list, tuple))
        or not group
        or not isinstance(sequence, int)
        or sequence < 1
    ):
        return None
    state = str(entry.get("state", ""))[:40]
    return GroupRecord(
        rank=rank,
        group=str(group[0])[:200],
        sequence=sequence - 1,
        name=str(entry.get("profiling_name", ""))[:100],
        state=state,
        is_over=state == "completed" or entry.get("retired") is True,
        place=_find_call(entry.get("frames")),
    )


def _find_call(frames: object) -> str:
    """The innermost frame outside libraries."""
    if not isinstance(frames, list):
        return ""
    for frame in frames[:_MAX_FRAMES]:
        if not isinstance(frame, dict):
            continue
        file = str(frame.get("filename", ""))
        if file and not _NOT_THE_PROGRAM.search(file):
            name = file.rpartition("/")[2]
            return f"{name}:{frame.get('line')} in {frame.get('name')}"[:200]
    return ""
