"""The two parts of `now.bin`, or, of runs of schema version 1, the two files that held them."""

from pathlib import Path

from meshscope.store.read.files import read_file
from meshscope.store.write.now_file import (
    FIXED_BYTES,
    IN_FLIGHT_BYTES,
    NOW_NAME,
    OPEN_STEP_BYTES,
    part_of,
)

_OLD_OPEN_STEP_NAME = "open_step.bin"
_OLD_IN_FLIGHT_NAME = "in_flight.bin"
_MAX_OLD_BYTES = 1 << 20


def read_open_step_part(directory: Path) -> tuple[Path, bytes | None]:
    """The stamps of the unfinished step, and which file has them; None: there are none.

    Raises OSError, and ValueError where the file was cut.
    """
    return _read(directory, _OLD_OPEN_STEP_NAME, 0, OPEN_STEP_BYTES)


def read_in_flight_part(directory: Path) -> tuple[Path, bytes | None]:
    """The same of the operations under way."""
    return _read(directory, _OLD_IN_FLIGHT_NAME, OPEN_STEP_BYTES, IN_FLIGHT_BYTES)


def _read(directory: Path, old_name: str, begin: int, num_bytes: int) -> tuple[Path, bytes | None]:
    path = directory / NOW_NAME
    try:
        return path, part_of(read_file(path, FIXED_BYTES), begin, num_bytes)
    except FileNotFoundError:
        old = directory / old_name
    try:
        return old, read_file(old, _MAX_OLD_BYTES)
    except FileNotFoundError:
        return path, None
