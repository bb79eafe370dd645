"""Where a table is: in a rank's packs, one or, where they are thinned while they are written, up to
three. Standard library only.

A table is what the thinned pack, the sealed one and the one being written have of it, in this
order; docs/store.md has the rule. In runs of schema version 1 each of these is a file of its own.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from meshscope.store.read.files import (
    ByteFile,
    exists,
    identify,
    list_names,
    list_tables,
    pack_of,
)
from meshscope.store.retention_tables import SEGMENTED_TABLES, THINNED_TABLES
from meshscope.store.write.pack import OLD_PACK, PACK_MAGIC, PACK_NAME, SEALED_PACK
from meshscope.store.write.table_file import HEADER_BYTES, unpack_header

TABLE_SUFFIX = ".tbl"
_OLD_SUFFIX = ".old.tbl"
_SEALED_SUFFIX = ".sealed.tbl"
_MAX_LEVEL = 62
_SUFFIXES = (_OLD_SUFFIX, _SEALED_SUFFIX, TABLE_SUFFIX)
_PACKS = (OLD_PACK, SEALED_PACK, PACK_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinning:
    """What the header of a thinned table says."""

    through: int
    round: int
    window_steps: int
    first_undecided_step: int
    level: int
    noteworthy_level: int


def table_files(directory: Path, name: str, names: Collection[str] | None = None) -> list[Path]:
    """The files of a table that are there and count, oldest records first.

    `names`: all that is in the directory and in its packs, of a rank that has ended; else the
    storage is asked.
    """
    found = _list_files(directory, name, names)
    if len(found) > 1 and _is_covered(_whole(found[0]), _whole(found[1])):
        del found[1]
    if len(found) > 1 and _is_same_segment(*found[-2:]):
        del found[-1]
    return found


def list_all_files(directory: Path, name: str) -> list[Path]:
    """All files of a table, also those that count no more."""
    return _list_files(directory, name, None)


def _list_files(directory: Path, name: str, names: Collection[str] | None) -> list[Path]:
    found = _find(directory, [f"{pack}/{name}{TABLE_SUFFIX}" for pack in _PACKS], names)
    if found:
        return found
    suffixes = _SUFFIXES if name in SEGMENTED_TABLES else _SUFFIXES[-1:]
    return _find(directory, [f"{name}{suffix}" for suffix in suffixes], names)


def _find(directory: Path, wanted: list[str], names: Collection[str] | None) -> list[Path]:
    """Those that are there; a path is joined only where it must be: joining is slow."""
    if names is not None:
        return [directory / one for one in wanted if one in names]
    return [path for one in wanted if identify(path := directory / one) is not None]


def _whole(path: Path) -> Path:
    return pack_of(path) or path


def list_packs(directory: Path) -> list[Path]:
    """A rank's packs, oldest records first."""
    return _find(directory, list(_PACKS), None)


def list_names_within(directory: Path) -> frozenset[str]:
    """Names of everything in a rank's folder, and of the tables in its packs. Raises OSError."""
    names = list_names(directory)
    within = (
        f"{pack}/{name}{TABLE_SUFFIX}"
        for pack in _PACKS
        if pack in names
        for name in list_tables(directory / pack)
    )
    return frozenset(names).union(within)


def live_file(directory: Path, name: str) -> Path:
    """The file that a rank writes a table into, or will."""
    own = directory / f"{name}{TABLE_SUFFIX}"
    packed = directory / PACK_NAME / own.name
    if exists(directory / PACK_NAME):
        return packed
    try:
        has_files = any(one.endswith(TABLE_SUFFIX) for one in list_names(directory))
    except OSError:
        has_files = False
    return own if has_files else packed


def sealed_path(live: Path) -> Path:
    """What a table's file is called once the table goes on in a new one, until it is thinned."""
    if pack_of(live) is not None:
        return live.parent.with_name(SEALED_PACK) / live.name
    return live.with_name(f"{live.name.removesuffix(TABLE_SUFFIX)}{_SEALED_SUFFIX}")


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
    if list_packs(directory):
        old, sealed, live = (directory / pack for pack in _PACKS)
    else:
        old, sealed, live = (directory / f"{name}{suffix}" for suffix in _SUFFIXES)
    through = _read_header(old).get("through")
    next_segment = through + 1 if isinstance(through, int) else 0
    for path in (sealed, live):
        segment = _read_header(path).get("segment")
        if isinstance(segment, int):
            if segment > next_segment:
                return True
            next_segment = max(next_segment, segment + 1)
    return False


def sign_files(directory: Path, name: str) -> tuple[object, ...]:
    """Another value where the table has other files than before; equal while one only grows."""
    wanted = (*_PACKS, *(f"{name}{suffix}" for suffix in _SUFFIXES))
    return tuple(identify(directory / one) for one in wanted)


def _is_covered(old: Path, sealed: Path) -> bool:
    through, segment = _read_header(old).get("through"), _read_header(sealed).get("segment")
    return isinstance(through, int) and isinstance(segment, int) and segment <= through


def _is_same_segment(before: Path, live: Path) -> bool:
    """Whether a copy has a pack twice, as it was before it was sealed and after."""
    sealed = _whole(before)
    if sealed.name != SEALED_PACK:
        return False
    first, second = (_read_header(path).get("segment") for path in (sealed, _whole(live)))
    return isinstance(first, int) and first == second


def _read_header(path: Path) -> dict[str, object]:
    try:
        with ByteFile(path) as file:
            page = file.read(0, HEADER_BYTES)
        return unpack_header(page, PACK_MAGIC) if path.name in _PACKS else unpack_header(page)
    except (OSError, ValueError):
        return {}


def read_thinning(path: Path) -> Thinning | None:
    """What a thinned table says of itself; None where it cannot be read."""
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
    """Of every table that was thinned; None where its header is damaged."""
    packed = [f"{OLD_PACK}/{name}{TABLE_SUFFIX}" for name in THINNED_TABLES]
    found = {
        path.stem: read_thinning(path)
        for path in _find(directory, packed, names)
        if "round" in (fields := _read_header(path)) or not fields
    }
    own = _find(directory, [f"{name}{_OLD_SUFFIX}" for name in THINNED_TABLES], names)
    return found | {path.name.removesuffix(_OLD_SUFFIX): read_thinning(path) for path in own}
