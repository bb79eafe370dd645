"""Turns the tables of a run into one Parquet file each, and can then remove the ranks' own files.

Only what was read and checked is written; what was wrong with a file is kept in the manifest, so
that a compacted run reports the same problems. Files appear whole, the manifest last: a compaction
that is interrupted leaves the run as it was. Journals are kept: they are small and say who wrote.
"""

import os
import shutil
import socket
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.errors import RunError, UsageError
from meshscope.store.read.columns import Columns, Problem, ProblemKind
from meshscope.store.read.files import (
    change_time_ns,
    exists,
    file_size,
    find_files,
    list_tables,
    pack_of,
)
from meshscope.store.read.parquet import (
    COMPACT_DIR,
    COMPACT_FORMAT,
    COMPACT_MANIFEST,
    crc32_of_file,
    open_compacted,
    problem_to_json,
    select_stored,
    stored_columns,
    to_duckdb,
)
from meshscope.store.read.recording import Recording, last_sign_of_life_ns
from meshscope.store.read.run import Run, open_run
from meshscope.store.read.table_files import list_all_files, list_packs
from meshscope.store.schema import SCHEMA_VERSION, TABLES, Table
from meshscope.store.write.access import FOLDER_MODE, make_folder
from meshscope.store.write.manifest import replace_whole, seal

QUIET_SECONDS = 600.0
"""A recording without a closing line and with records younger than this may still be written."""
_ROW_GROUP_ROWS = 122_880
_BATCH_ROWS = 1 << 19
_KEEPS_RAW = {ProblemKind.DAMAGED, ProblemKind.CUT, ProblemKind.UNREADABLE, ProblemKind.MISPLACED}
"""Damage that may still be repaired, or inspected by hand, in the original file."""


@dataclass(slots=True, kw_only=True)
class Compaction:
    num_recordings: int = 0
    num_rows: dict[str, int] = field(default_factory=dict)
    compact_bytes: int = 0
    removed_bytes: int = 0
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """Rank and attempt folder of recordings that may still be written."""
    kept_raw: list[Path] = field(default_factory=list)
    """Damaged files that were not removed."""


def compact_run(
    run_dir: Path, *, remove_raw: bool = False, include_unfinished: bool = False
) -> Compaction:
    """Writes `RUN/compact/`. Attempts that may still be written are left out unless asked for."""
    run = open_run(run_dir)
    done = Compaction()
    recordings = []
    for attempt in run.attempts:
        for recording in attempt:
            if include_unfinished or not _may_be_written(recording):
                recordings.append(recording)
            else:
                done.skipped.append((recording.rank, recording.attempt))
    if not recordings:
        raise UsageError(
            f"{run_dir} may still be recorded: it is not closed, and its process lives or its last "
            f"record is younger than {QUIET_SECONDS:.0f} s; wait, or pass --include-unfinished"
        )
    # By attempt and rank: `parquet` relies on it when it reads ranks in blocks.
    recordings.sort(key=lambda recording: (recording.attempt, recording.rank))
    done.num_recordings = len(recordings)
    import duckdb

    try:
        _write_all(run, recordings, done)
    except (OSError, duckdb.Error) as error:
        raise RunError(
            f"{run_dir / COMPACT_DIR} cannot be written: {error}; the run is unchanged"
        ) from error
    if remove_raw:
        _remove_raw(run_dir, recordings, done)
    return done


def _may_be_written(recording: Recording) -> bool:
    if recording.closing is not None:
        return False
    pid = recording.header.get("pid")
    is_here = recording.header.get("host") == socket.gethostname()
    if is_here and isinstance(pid, int) and Path(f"/proc/{pid}").exists():
        return True
    # A mapped file's time of change may lag behind its records, so these are asked.
    newest_s = last_sign_of_life_ns(recording) / 1e9
    return time.time() - max(newest_s, change_time_ns(recording.directory) / 1e9) < QUIET_SECONDS


def _write_all(run: Run, recordings: list[Recording], done: Compaction) -> None:
    directory = run.path / COMPACT_DIR
    work = run.path / f".{COMPACT_DIR}.{os.getpid()}"
    work.mkdir(FOLDER_MODE)
    try:
        tables = {
            name: _write_table(run, table, recordings, work, done) for name, table in TABLES.items()
        }
        make_folder(directory)
        for name, table in tables.items():
            # Under a new name: until the manifest is replaced, the files of an earlier compaction
            # are the ones that count, and the raw files they came from may be gone.
            table["file"] = _free_name(directory, name)
            os.replace(work / f"{name}.parquet", directory / str(table["file"]))
            done.compact_bytes += file_size(directory / str(table["file"]))
        document = {
            "format": COMPACT_FORMAT,
            "schema_version": SCHEMA_VERSION,
            "created_unix_ns": time.time_ns(),
            "tables": tables,
        }
        replace_whole(directory / COMPACT_MANIFEST, seal(document))
        for path in find_files(directory, "*.parquet"):
            if path.name not in {table["file"] for table in tables.values()}:
                path.unlink()
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _free_name(directory: Path, table: str) -> str:
    names = (f"{table}.{number}.parquet" if number else f"{table}.parquet" for number in count())
    return next(name for name in names if not exists(directory / name))


def _write_table(
    run: Run, table: Table, recordings: list[Recording], work: Path, done: Compaction
) -> dict[str, object]:
    """One Parquet file; what the manifest says about it."""
    import duckdb

    listed: list[dict[str, object]] = []
    with duckdb.connect(str(work / "work.duckdb")) as con:
        con.execute("SET preserve_insertion_order = true")
        columns = ", ".join(f"{name} {kind}" for name, kind in stored_columns(table))
        con.execute(f"CREATE TABLE t (attempt_dir INTEGER, rank INTEGER, {columns})")
        pending: list[dict[str, Any]] = []
        for recording in recordings:
            if not recording.has_table(table.name):
                continue
            rows, problems = _read_with_problems(recording, table)
            num_rows = len(rows[table.columns[0].name])
            listed.append(
                {
                    "rank": recording.rank,
                    "attempt_dir": recording.attempt,
                    "num_rows": num_rows,
                    "problems": [problem_to_json(problem, run.path) for problem in problems],
                }
            )
            if num_rows:
                scanned = to_duckdb(table, rows)
                scanned["attempt_dir"] = np.full(num_rows, recording.attempt, dtype=np.int32)
                scanned["rank"] = np.full(num_rows, recording.rank, dtype=np.int32)
                pending.append(scanned)
            if sum(len(part["rank"]) for part in pending) >= _BATCH_ROWS:
                _insert(con, table, pending)
                pending = []
        _insert(con, table, pending)
        target = work / f"{table.name}.parquet"
        con.execute(
            f"COPY t TO '{_quoted(target)}' (FORMAT parquet, COMPRESSION zstd, "
            f"ROW_GROUP_SIZE {_ROW_GROUP_ROWS}, KV_METADATA {{{_metadata(table)}}})"
        )
    (work / "work.duckdb").unlink()
    done.num_rows[table.name] = sum(int(str(entry["num_rows"])) for entry in listed)
    return {"crc32": f"{crc32_of_file(target):08x}", "recordings": listed}


def _read_with_problems(recording: Recording, table: Table) -> tuple[Columns, list[Problem]]:
    """The rows as stored, and what is wrong with this table's files."""
    rows = recording.read_raw(table.name)
    paths = list_all_files(recording.directory, table.name)
    own = {*paths, *map(pack_of, paths)}
    return rows, [problem for problem in recording.problems if problem.path in own]


def _insert(con: Any, table: Table, parts: list[dict[str, Any]]) -> None:
    if not parts:
        return
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    con.register("_batch", joined)
    con.execute(f"INSERT INTO t SELECT attempt_dir, rank, {select_stored(table)} FROM _batch")
    con.unregister("_batch")


def _metadata(table: Table) -> str:
    """Schema version, units and meanings, for readers without this package."""
    entries = {"meshscope_schema_version": str(SCHEMA_VERSION), "meshscope_table": table.name}
    for column in table.columns:
        unit = f" [{column.unit}]" if column.unit else ""
        missing = "; -1 is missing" if column.can_be_missing else ""
        entries[column.name] = f"{column.meaning}{unit}{missing}"
    return ", ".join(f"'{_quoted(key)}': '{_quoted(value)}'" for key, value in entries.items())


def _quoted(text: object) -> str:
    return str(text).replace("'", "''")


def _remove_raw(run_dir: Path, recordings: list[Recording], done: Compaction) -> None:
    """Removes files of tables that are in the Parquet files, checked by reading those again. A file
    with something that is not there, or that is damaged, stays."""
    compacted = open_compacted(run_dir, [])
    if compacted is None:
        raise RunError(f"{run_dir}: the compacted files do not open; nothing was removed")
    removed: dict[Path, None] = {}
    kept: dict[Path, None] = {}
    for recording in recordings:
        for pack in list_packs(recording.directory):
            if not set(list_tables(pack)) <= TABLES.keys():
                kept[pack] = None
        for table in TABLES.values():
            paths = list_all_files(recording.directory, table.name)
            if not paths:
                continue
            files = dict.fromkeys(pack_of(path) or path for path in paths)
            own = {*paths, *files}
            if any(p.path in own and p.kind in _KEEPS_RAW for p in recording.problems):
                done.kept_raw += [file for file in files if file not in kept]
                kept |= files
                continue
            if not compacted.covers(table.name, recording.rank, recording.attempt):
                kept |= files
                continue
            stored, _ = compacted.read(table.name, recording.rank, recording.attempt)
            if not _are_equal(recording.read_raw(table.name), stored):
                raise RunError(f"{paths[-1]}: the compacted rows differ; all files are kept")
            removed |= files
    for path in removed:  # at the end: what is thinned is read by what other files say
        if path not in kept:
            done.removed_bytes += file_size(path)
            path.unlink()


def _are_equal(left: Columns, right: Columns) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes()
        for name in left
    )
