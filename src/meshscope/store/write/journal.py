"""A rank's journal: one line of JSON per event that is not a number, each with its CRC-32.

It holds the header (who, where, when, provenance), the name list, configuration changes, health
notes and the closing line. A line is in the file when `write` returns, so it survives SIGKILL; a
torn last line is recognised by its checksum. The first line has a fixed length and says how long
the journal is, after every line anew: a journal that was cut between two lines shows. The one after
the header keeps room for the closing line: on a full disk it is written there, in place.
"""

import contextlib
import json
import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

from meshscope.store.write.access import create_file

JOURNAL_NAME = "journal.jsonl"
EXIT_LINE = "exit"
"""Kind of the line that says with which exception a rank's program ended."""
_EXTENT_KIND = "extent"
_ROOM_KIND = "room"
_ROOM_BYTES = 1024
"""Of the line that keeps room; a closing line has about 400."""


def pack_line(text: bytes) -> bytes:
    """One line of a journal: CRC-32 in hexadecimal, a blank, the text."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def pack_extent(size: int) -> bytes:
    """The first line, for a journal of `size` bytes."""
    return pack_line(b'{"kind":"%s","bytes":"%020d"}' % (_EXTENT_KIND.encode(), size))


_EXTENT_BYTES = len(pack_extent(0))


def _pad_line(text: bytes) -> bytes:
    """A line as long as the one that keeps room; ValueError if it is longer."""
    line = pack_line(text.ljust(_ROOM_BYTES - len(pack_line(b""))))
    if len(line) > _ROOM_BYTES:
        raise ValueError(f"a line of {len(line)} bytes, there is room for {_ROOM_BYTES}")
    return line


class JournalWriter:
    """Appends lines; an OSError is the caller's to count. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._fd = create_file(path)
        self._size = 0
        self._room = 0
        """Where the line begins that keeps room."""
        self._lock = threading.Lock()

    def write(self, kind: str, **fields: object) -> None:
        """Appends one line. Values that JSON cannot hold are written as their `repr`."""
        line = pack_line(_encode({"kind": kind, **fields}))
        with self._lock:
            if self._fd < 0:
                return
            begin = self._size
            if begin == 0:
                self._room = _EXTENT_BYTES + len(line)
                line += _pad_line(_encode({"kind": _ROOM_KIND}))
                line = pack_extent(_EXTENT_BYTES + len(line)) + line
            try:
                self._write_at(line, begin)
            except OSError:
                with contextlib.suppress(OSError):  # the next line must not follow half of this
                    os.ftruncate(self._fd, begin)
                raise
            self._size = begin + len(line)
            if begin:
                self._write_at(pack_extent(self._size), 0)

    def write_last(self, kind: str, **fields: object) -> None:
        """Appends the last line; where there is no space, into the room that was kept for it. Of a
        line too long for that, what is neither a list nor a mapping."""
        try:
            self.write(kind, **fields)
        except OSError:
            text = _encode({"kind": kind, **fields})
            if len(pack_line(text)) > _ROOM_BYTES:
                plain = {k: v for k, v in fields.items() if not isinstance(v, (dict, list))}
                text = _encode({"kind": kind, **plain})
            with self._lock:
                if self._fd < 0 or not self._room:
                    raise
                self._write_at(_pad_line(text), self._room)

    def _write_at(self, data: bytes, offset: int) -> None:
        while data:
            written = os.pwrite(self._fd, data, offset)
            data = data[written:]
            offset += written

    def is_deleted(self) -> bool:
        """Whether the file has no name any more: what is written then, nobody can read."""
        with self._lock:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Releases the descriptor; later writes are ignored."""
        with self._lock:
            self._release()

    def disarm(self) -> None:
        """In a forked child, where the lock may be held by a thread that is not there."""
        self._lock = threading.Lock()
        self._release()

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _encode(fields: dict[str, object]) -> bytes:
    try:
        return json.dumps(fields, default=repr, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError):  # keys of other types, cycles
        plain = {str(key): _short_repr(value) for key, value in fields.items()}
        plain["kind"] = fields["kind"]  # type: ignore[assignment]  # a string: `write` takes no other
        return json.dumps(plain, separators=(",", ":")).encode()


def _short_repr(value: object) -> str:
    try:
        return repr(value)[:10_000]
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"


@dataclass(frozen=True, slots=True)
class JournalDamage:
    """A damaged range of a journal."""

    offset: int
    is_tail: bool
    """The last line, as a killed writer leaves it, rather than one in the middle."""
    is_cut: bool = False
    """The journal ends here and was longer."""


def read_journal(data: bytes) -> tuple[list[dict[str, object]], list[JournalDamage]]:
    """The lines that match their checksums, in order, and where others stand."""
    lines: list[dict[str, object]] = []
    damage: list[JournalDamage] = []
    offset = 0
    for raw in data.split(b"\n"):
        if raw:
            is_last = offset + len(raw) >= len(data)
            fields = None if is_last else _parse_line(raw)  # a whole line ends in a newline
            if fields is None:
                damage.append(JournalDamage(offset, is_tail=is_last))
            elif fields["kind"] == _ROOM_KIND:
                pass
            elif fields["kind"] == _EXTENT_KIND:
                if offset == 0 and len(data) < _extent_of(fields):
                    damage.append(JournalDamage(len(data), is_tail=True, is_cut=True))
            else:
                lines.append(fields)
        elif offset < len(data):
            damage.append(JournalDamage(offset, is_tail=False))  # no writer leaves a line empty
        offset += len(raw) + 1
    return lines, damage


def _extent_of(fields: dict[str, object]) -> int:
    size = fields.get("bytes")
    return int(size) if isinstance(size, str) and len(size) == 20 and size.isdecimal() else 0


def _parse_line(raw: bytes) -> dict[str, object] | None:
    if len(raw) < 10 or raw[8:9] != b" ":
        return None
    text = raw[9:]
    if b"%08x" % zlib.crc32(text) != raw[:8]:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("kind"), str) else None
