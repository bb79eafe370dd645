"""A rank's journal: one line of JSON per event that is not a number, each with its CRC-32.

It holds the header (who, where, when, provenance), the name list, configuration changes, health
notes and the closing line. A line is one `write` on an O_APPEND descriptor, so what was written
survives SIGKILL and a torn last line is recognised by its checksum.
"""

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

JOURNAL_NAME = "journal.jsonl"


class JournalWriter:
    """Appends lines; an OSError is the caller's to count."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)

    def write(self, kind: str, **fields: object) -> None:
        """Appends one line. Values that JSON cannot hold are written as their `repr`."""
        if self._fd < 0:
            return
        text = json.dumps({"kind": kind, **fields}, default=repr, separators=(",", ":")).encode()
        os.write(self._fd, b"%08x %s\n" % (zlib.crc32(text), text))

    def close(self) -> None:
        """Releases the descriptor; later writes are ignored."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class JournalDamage:
    """A stretch of a journal that does not read."""

    offset: int
    is_tail: bool
    """The last line, as a killed writer leaves it, rather than one in the middle."""


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
            else:
                lines.append(fields)
        elif 0 < offset < len(data):
            damage.append(JournalDamage(offset, is_tail=False))  # no writer leaves a line empty
        offset += len(raw) + 1
    return lines, damage


def _parse_line(raw: bytes) -> dict[str, object] | None:
    if len(raw) < 10 or raw[8:9] != b" ":
        return None
    text = raw[9:]
    if b"%08x" % zlib.crc32(text) != raw[:8]:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("kind"), str) else None
