"""The files of a table, one or, where it is thinned while it is written, up to three. Standard
library only.

A table is its thinned file, the sealed one and the one being written, in this order; docs/store.md
has the rule. Tables that are never thinned have the last one only.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from meshscope.store.read.files import ByteFile, identify
from meshscope.store.retention_tables import SEGMENTED_TABLES, THINNED_TABLES
from meshscope.store.write.segments import OLD_SUFFIX, SEALED_SUFFIX
from meshscope.store.write.table_file import HEADER_BYTES, unpack_header
from meshscope.store.write.writer import TABLE_SUFFIX

_MAX_LEVEL = 62
_SUFFIXES = (OLD_SUFFIX, SEALED_SUFFIX, TABLE_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """What the header of a thinned file says."""

    through: int
    round: int
    window_steps: int
    first_undecided_step: int
    level: int
    noteworthy_level: int


def table_files(directory: Path, name: str, names: Collection[str] | None = None) -> list[Path]:
    """The files of a table that are there and count, oldest records first.

    `names`: all that is in the directory, of a rank that has ended; else the storage is asked.
    """
    suffixes = _SUFFIXES if name in SEGMENTED_TABLES else _SUFFIXES[-1:]
    found = _find(directory, [f"{name}{suffix}" for suffix in suffixes], names)
    if len(found) > 1:
        old, sealed = directory / f"{name}{OLD_SUFFIX}", directory / f"{name}{SEALED_SUFFIX}"
        if sealed in found and old in found and _is_covered(old, sealed):
            found.remove(sealed)
    return found


def _find(directory: Path, wanted: list[str], names: Collection[str] | None) -> list[Path]:
    """Those that are there; a path is joined only where it must be: joining is slow."""
    if names is not None:
        return [directory / one for one in wanted if one in names]
    return [path for one in wanted if identify(path := directory / one) is not None]


def sealed_path(live: Path) -> Path:
    """What a table's file is called once the table goes on in a new one, until it is thinned."""
    return live.with_name(f"{live.name.removesuffix(TABLE_SUFFIX)}{SEALED_SUFFIX}")


def read_segment(file: ByteFile) -> int:
    """Which segment of its table a file is; 0 where it is the only one."""
    try:
        segment = unpack_header(file.read(0, HEADER_BYTES)).get("segment")
    except ValueError:
        return 0
    return segment if isinstance(segment, int) else 0


def lacks_segment(directory: Path, name: str) -> bool:
    """Whether files of a thinned table do not follow one another: one was deleted, or, in a copy
    that was made while the run was thinned, is not there yet."""
    live, sealed = directory / f"{name}{TABLE_SUFFIX}", directory / f"{name}{SEALED_SUFFIX}"
    thinning = read_thinning(directory / f"{name}{OLD_SUFFIX}")
    next_segment = 0 if thinning is None else thinning.through + 1
    for path in (sealed, live):
        segment = _read_header(path).get("segment")
        if isinstance(segment, int):
            if segment > next_segment:
                return True
            next_segment = max(next_segment, segment + 1)
    return False


def list_all_files(directory: Path, name: str) -> list[Path]:
    """All files of a table, also those that count no more."""
    suffixes = _SUFFIXES if name in SEGMENTED_TABLES else _SUFFIXES[-1:]
    return _find(directory, [f"{name}{suffix}" for suffix in suffixes], None)


def sign_files(directory: Path, name: str) -> tuple[object, ...]:
    """Another value where the table has other files than before; equal while one only grows."""
    paths = [directory / f"{name}{suffix}" for suffix in _SUFFIXES]
    return tuple(identify(path) for path in paths)


def _is_covered(old: Path, sealed: Path) -> bool:
    thinning, segment = read_thinning(old), _read_header(sealed).get("segment")
    return thinning is not None and isinstance(segment, int) and segment <= thinning.through


def _read_header(path: Path) -> dict[str, object]:
    try:
        with ByteFile(path) as file:
            return unpack_header(file.read(0, HEADER_BYTES))
    except (OSError, ValueError):
        return {}


def read_thinning(path: Path) -> Thinning | None:
    """What a thinned file says of itself; None where it cannot be read."""
    fields = _read_header(path)
    values = {name: fields.get(name) for name in Thinning.__slots__}
    if not all(type(value) is int for value in values.values()):
        return None
    found = Thinning(**values)  # type: ignore[arg-type]  # all are integers
    levels = (found.level, found.noteworthy_level)
    return found if found.window_steps > 0 and all(0 <= n <= _MAX_LEVEL for n in levels) else None


def read_thinnings(
    directory: Path, names: Collection[str] | None = None
) -> dict[str, Thinning | None]:
    """Of every table that has a thinned file; None where its header is damaged."""
    found = _find(directory, [f"{name}{OLD_SUFFIX}" for name in THINNED_TABLES], names)
    return {path.name.removesuffix(OLD_SUFFIX): read_thinning(path) for path in found}
