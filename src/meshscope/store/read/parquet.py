"""Reads the tables of a compacted run back, exactly as the ranks' own files gave them.

    RUN/compact/manifest.json     which recordings are in which file, and what was wrong with them
    RUN/compact/<table>.parquet   all ranks and attempts of one table, written by DuckDB; from the
                                  second compaction on with a number, as the manifest says

Rows of a recording keep their order. Ranks are read in blocks, since reports ask for one rank after
another and a query per rank would cost more than the rows.
"""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshscope.errors import SchemaTooNew
from meshscope.store.read.columns import (
    Columns,
    Problem,
    ProblemKind,
    empty_columns,
    schema_too_new_text,
    select_rows,
)
from meshscope.store.read.files import ByteFile, fetched, read_file
from meshscope.store.read.table_window import TIME_SQL, TimeWindows
from meshscope.store.schema import SCHEMA_VERSION, TABLES, Column, Table
from meshscope.store.write.manifest import unseal

COMPACT_DIR = "compact"
COMPACT_MANIFEST = "manifest.json"
COMPACT_FORMAT = "meshscope-compact"
_NAN_BITS = "_nan_bits"
_BLOCK_RANKS = 64

_RecordingKey = tuple[int, int]
"""Rank and ordinal of the attempt's folder."""


def sql_type(column: Column) -> str:
    """The column's type in DuckDB and Parquet."""
    if column.is_float:
        return "DOUBLE"
    return {8: "UTINYINT", 16: "USMALLINT", 32: "UINTEGER", 64: "BIGINT"}[_stored_width(column)]


def _stored_width(column: Column) -> int:
    if column.is_stored_plus_one:
        return 64
    return next(width for width in (8, 16, 32, 64) if column.width <= width)


def to_duckdb(table: Table, columns: Columns) -> dict[str, npt.NDArray[np.generic]]:
    """Columns as DuckDB may scan them: it takes NaN for NULL, so a second column marks NaN."""
    scanned = dict(columns)
    for column in table.columns:
        if column.is_float:
            values = columns[column.name]
            is_nan = np.isnan(values)
            scanned[f"{column.name}_is_nan"] = is_nan
            scanned[f"{column.name}_bits"] = np.where(is_nan, values.view(np.int64), 0)
    return scanned


def select_stored(table: Table) -> str:
    """SQL that takes what `to_duckdb` gave to the columns of the Parquet file.

    `…_nan_bits` is the exact bit pattern of a NaN, NULL for every other number.
    """
    parts = []
    for column in table.columns:
        name = column.name
        if column.is_float:
            parts.append(f"CASE WHEN {name}_is_nan THEN 'NaN'::DOUBLE ELSE {name} END AS {name}")
            parts.append(f"CASE WHEN {name}_is_nan THEN {name}_bits END AS {name}{_NAN_BITS}")
        else:
            parts.append(name)
    return ", ".join(parts)


def stored_columns(table: Table) -> list[tuple[str, str]]:
    """Name and SQL type of the columns `select_stored` gives."""
    found = []
    for column in table.columns:
        found.append((column.name, sql_type(column)))
        if column.is_float:
            found.append((f"{column.name}{_NAN_BITS}", "BIGINT"))
    return found


def _absent(name: str) -> str:
    """What a column holds that a file is too old to have."""
    return "NULL" if name.endswith(_NAN_BITS) else "0"


def _from_stored(table: Table, rows: Columns) -> Columns:
    """What was fetched of `stored_columns`, as the table's columns again."""
    found: Columns = {}
    for column in table.columns:
        values = np.ma.getdata(rows[column.name])
        if column.is_float:
            bits = rows[f"{column.name}{_NAN_BITS}"]
            is_nan = ~np.ma.getmaskarray(bits)
            values = values.copy()
            values.view(np.int64)[is_nan] = np.ma.getdata(bits)[is_nan]
        found[column.name] = values
    return found


def problem_to_json(problem: Problem, run_dir: Path) -> dict[str, object]:
    """A problem as the manifest keeps it; the path is relative to the run."""
    path = problem.path
    if path is not None and path.is_relative_to(run_dir):
        path = path.relative_to(run_dir)
    return {
        "kind": str(problem.kind),
        "text": problem.text,
        "rank": problem.rank,
        "path": str(path) if path is not None else None,
        "offset": problem.offset,
        "num_records": problem.num_records,
    }


def _problem_from_json(fields: dict[str, Any], run_dir: Path) -> Problem:
    return Problem(
        kind=ProblemKind(fields["kind"]),
        text=str(fields["text"]),
        rank=fields["rank"],
        path=run_dir / fields["path"] if fields["path"] else None,
        offset=fields["offset"],
        num_records=fields["num_records"],
    )


@dataclass(slots=True, kw_only=True)
class _CompactedTable:
    path: Path
    crc32: str
    num_rows: dict[_RecordingKey, int]
    problems: dict[_RecordingKey, tuple[Problem, ...]]
    verdict: Problem | None = None
    """Why the file cannot be used; found when it is first read."""
    is_checked: bool = False
    block: dict[_RecordingKey, Columns] = field(default_factory=dict)
    window_block: dict[_RecordingKey, Columns] = field(default_factory=dict)


class CompactedRun:
    """The compacted tables of one run."""

    def __init__(self, tables: dict[str, _CompactedTable]) -> None:
        self._tables = tables
        self._connection: Any = None
        self._windows: dict[_RecordingKey, TimeWindows] = {}

    def covers(self, table: str, rank: int, attempt: int) -> bool:
        """Whether the rows of this recording are here."""
        return table in self._tables and (rank, attempt) in self._tables[table].num_rows

    def count_rows(self, table: str, rank: int, attempt: int) -> int:
        """Rows of one recording that is covered."""
        return self._tables[table].num_rows[rank, attempt]

    def note_windows(self, rank: int, attempt: int, windows: TimeWindows) -> None:
        """Announces the windows that will be asked for: those known are read together."""
        self._windows[rank, attempt] = windows
        for table in self._tables.values():
            table.window_block.pop((rank, attempt), None)

    def read_windows(self, table: str, rank: int, attempt: int, windows: TimeWindows) -> Columns:
        """The rows of one recording inside the windows; none when the file cannot be used."""
        found = self._tables[table]
        if not found.is_checked:
            found.is_checked = True
            found.verdict = _find_fault(found)
        if found.verdict is not None or not len(windows):
            return empty_columns(TABLES[table])
        if self._windows.get((rank, attempt)) is not windows:
            self.note_windows(rank, attempt, windows)
        if (rank, attempt) not in found.window_block:
            found.window_block = self._read_window_block(table, found, rank, attempt)
        return found.window_block.pop((rank, attempt))

    def _read_window_block(
        self, name: str, found: _CompactedTable, rank: int, attempt: int
    ) -> dict[_RecordingKey, Columns]:
        """The recordings from this one on whose windows are known, as many as a block takes."""
        order = sorted(r for r in found.num_rows if r[1] == attempt and r[0] >= rank)
        wanted = [r for r in order[:_BLOCK_RANKS] if r in self._windows]
        bounds = ", ".join(
            f"({own}, {begin}, {end})"
            for own, _ in wanted
            for begin, end in zip(
                self._windows[own, attempt].start_ns.tolist(),
                self._windows[own, attempt].end_ns.tolist(),
                strict=True,
            )
        )
        columns = self._select_columns(found.path, TABLES[name])
        query = (
            f"SELECT rank AS _rank, {columns} FROM read_parquet(?, file_row_number = true) "
            f"JOIN (VALUES {bounds}) AS wanted(own, low, high) "
            f"ON rank = own AND {TIME_SQL[name]} BETWEEN low AND high "
            "WHERE attempt_dir = ? AND rank BETWEEN ? AND ? ORDER BY file_row_number"
        )
        given = [str(found.path), attempt, rank, wanted[-1][0]]
        rows: Columns = self._connect().execute(query, given).fetchnumpy()
        return self._split_by_rank(TABLES[name], rows, wanted)

    @staticmethod
    def _split_by_rank(
        table: Table, rows: Columns, wanted: list[_RecordingKey]
    ) -> dict[_RecordingKey, Columns]:
        """Rows in the file's order, which is by attempt and rank, as those of each recording."""
        ranks = np.asarray(rows.pop("_rank"))
        starts = np.searchsorted(ranks, [r[0] for r in wanted], side="left")
        ends = np.searchsorted(ranks, [r[0] for r in wanted], side="right")
        plain = _from_stored(table, rows)
        return {
            recording: select_rows(plain, np.arange(start, end))
            for recording, start, end in zip(wanted, starts, ends, strict=True)
        }

    def _select_columns(self, path: Path, table: Table) -> str:
        """The table's columns for SELECT; those added since the file was written are zeros."""
        fetched(path)
        described = self._connect().execute("DESCRIBE FROM read_parquet(?)", [str(path)]).fetchall()
        present = {row[0] for row in described}
        return ", ".join(
            name if name in present else f"{_absent(name)}::{kind} AS {name}"
            for name, kind in stored_columns(table)
        )

    def _connect(self) -> Any:
        if self._connection is None:
            import duckdb

            self._connection = duckdb.connect()
        return self._connection

    def read(self, table: str, rank: int, attempt: int) -> tuple[Columns, tuple[Problem, ...]]:
        """The rows of one recording, and what was wrong with its file when it was compacted."""
        found = self._tables[table]
        if not found.is_checked:
            found.is_checked = True
            found.verdict = _find_fault(found)
        known = found.problems.get((rank, attempt), ())
        if found.verdict is not None:
            return empty_columns(TABLES[table]), (*known, found.verdict)
        if (rank, attempt) not in found.block:
            found.block = self._read_block(table, found, rank, attempt)
        return found.block.pop((rank, attempt)), known

    def _read_block(
        self, name: str, found: _CompactedTable, rank: int, attempt: int
    ) -> dict[_RecordingKey, Columns]:
        """The recordings from this one on, as many as a block takes."""
        order = sorted(found.num_rows, key=lambda recording: (recording[1], recording[0]))
        first = order.index((rank, attempt))
        wanted = [r for r in order[first : first + _BLOCK_RANKS] if r[1] == attempt]
        columns = self._select_columns(found.path, TABLES[name])
        rows: Columns = (
            self._connect()
            .execute(
                f"SELECT rank AS _rank, {columns} FROM read_parquet(?) "
                "WHERE attempt_dir = ? AND rank BETWEEN ? AND ?",
                [str(found.path), attempt, rank, wanted[-1][0]],
            )
            .fetchnumpy()
        )
        return self._split_by_rank(TABLES[name], rows, wanted)


def _find_fault(table: _CompactedTable) -> Problem | None:
    try:
        checksum = f"{crc32_of_file(table.path):08x}"
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
        return Problem(kind=ProblemKind.UNREADABLE, path=table.path, text=text)
    if checksum == table.crc32:
        return None
    text = "the compacted file does not match its checksum; its rows are not used"
    return Problem(kind=ProblemKind.DAMAGED, path=table.path, offset=0, text=text)


def crc32_of_file(path: Path) -> int:
    checksum = 0
    with ByteFile(path) as file:
        for offset in range(0, file.size_bytes, 1 << 20):
            checksum = zlib.crc32(file.read(offset, 1 << 20), checksum)
    return checksum


def open_compacted(run_dir: Path, problems: list[Problem]) -> CompactedRun | None:
    """What was compacted of a run; None when nothing was. A bad manifest goes to `problems`."""
    path = run_dir / COMPACT_DIR / COMPACT_MANIFEST
    try:
        manifest, is_intact = unseal(read_file(path))
        version = manifest.get("schema_version")
        if is_intact and isinstance(version, int) and version > SCHEMA_VERSION:
            raise SchemaTooNew(schema_too_new_text(path, version))
        if not is_intact or manifest.get("format") != COMPACT_FORMAT:
            raise ValueError("its checksum does not match")
        return CompactedRun(_read_tables(manifest, run_dir))
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"cannot be read: {error.strerror}"
        problems.append(Problem(kind=ProblemKind.UNREADABLE, path=path, text=text))
    except (ValueError, KeyError, TypeError) as error:
        text = f"the manifest of the compacted tables is not used: {error}"
        problems.append(Problem(kind=ProblemKind.DAMAGED, path=path, offset=0, text=text))
    return None


def _read_tables(manifest: dict[str, Any], run_dir: Path) -> dict[str, _CompactedTable]:
    return {
        name: _CompactedTable(
            path=run_dir / COMPACT_DIR / Path(table["file"]).name,
            crc32=table["crc32"],
            num_rows={(r["rank"], r["attempt_dir"]): r["num_rows"] for r in table["recordings"]},
            problems={
                (r["rank"], r["attempt_dir"]): tuple(
                    _problem_from_json(problem, run_dir) for problem in r["problems"]
                )
                for r in table["recordings"]
                if r["problems"]
            },
        )
        for name, table in manifest["tables"].items()
        if name in TABLES
    }
