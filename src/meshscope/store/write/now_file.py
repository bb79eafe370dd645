"""What a process is in right now, in one small file that outlives it.

    bytes 0-127         stamps of the step that is not finished (`open_step`)
    bytes 128-49343     operations under way, and what was entered last (`in_flight`)
    from byte 49344 on  Python stacks as text, each time `meshscope hang` asks

Each of the first two parts is zeros until somebody begins it. Standard library only.
"""

import mmap
import os
from pathlib import Path

from meshscope.store.write.access import create_file
from meshscope.store.write.cut_guard import guard

NOW_NAME = "now.bin"
OPEN_STEP_BYTES = 128
IN_FLIGHT_BYTES = 64 * (1 + 256 + 512)
FIXED_BYTES = OPEN_STEP_BYTES + IN_FLIGHT_BYTES


class NowFile:
    """Made when a rank begins to record; the writers of its parts share the mapping."""

    def __init__(self, path: Path, *, mapped: bool) -> None:
        """Raises OSError when the file cannot be made."""
        # Under its name only when it is whole: a killed process leaves no shorter one behind.
        draft = path.with_name(f".{path.name}")
        fd = create_file(draft, os.O_RDWR)
        try:
            if os.write(fd, bytes(FIXED_BYTES)) != FIXED_BYTES:
                raise OSError(28, os.strerror(28), str(path))
            found: mmap.mmap | bytearray = (
                guard(mmap.mmap(fd, FIXED_BYTES)) if mapped else bytearray(FIXED_BYTES)
            )
            os.rename(draft, path)
        except (OSError, ValueError):
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        if mapped:
            os.close(fd)
            fd = -1
        self._fd = fd
        """Open only where the file cannot be mapped and has to be written by `flush`."""
        self._bytes = memoryview(found)

    @property
    def open_step(self) -> memoryview:
        return self._bytes[:OPEN_STEP_BYTES]

    @property
    def in_flight(self) -> memoryview:
        return self._bytes[OPEN_STEP_BYTES:]

    def flush(self) -> None:
        """Writes the file where it is not mapped."""
        if self._fd >= 0:
            os.pwrite(self._fd, self._bytes, 0)

    def disarm(self) -> None:
        """After the end, and in a forked child, whose parent's file it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def part_of(data: bytes, begin: int, num_bytes: int) -> bytes | None:
    """A part of the file; None where nobody has begun it. ValueError when the file is cut."""
    if len(data) < FIXED_BYTES:
        raise ValueError(f"{len(data)} bytes, expected at least {FIXED_BYTES}")
    part = data[begin : begin + num_bytes]
    return part if any(part) else None
