"""A run as SQL tables in memory: one view per table, and `ranks`, `names` and `groups`.

    con = connect(open_run("runs/a"))
    con.execute("select rank, avg(duration_ns) from spans group by rank").fetchall()

Every row carries `rank` and `attempt`. Ids have their text beside them (`name`), and a value that
the schema calls missing is NULL. The tables are copies: nothing in SQL can change the run through
them. `spans` holds the packed phases of steps too, as `Recording.read` gives them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.errors import UsageError
from meshscope.store.read.columns import Columns
from meshscope.store.read.parquet import select_stored, sql_type, to_duckdb
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt, Run
from meshscope.store.schema import ACTION_KINDS, MISSING, TABLES, Table

_BATCH_ROWS = 1 << 19
"""Rows handed to DuckDB at a time."""

RANK_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("attempt", "INTEGER", "which launch of the job, from 0"),
    ("rank", "INTEGER", "global rank"),
    ("attempt_dir", "INTEGER", "number of the attempt's folder below the rank's"),
    ("host", "VARCHAR", "host name"),
    ("pid", "BIGINT", "process id"),
    ("node_rank", "BIGINT", "node, as the launcher numbers them"),
    ("local_rank", "BIGINT", "rank on the node"),
    ("world_size", "BIGINT", "ranks of the launch, as this rank saw it"),
    ("launch_id", "VARCHAR", "the launcher's name for the launch"),
    ("restart_count", "BIGINT", "restarts by the launcher before this one"),
    ("start_unix_ns", "BIGINT", "wall clock at the start of the recording (ns)"),
    ("start_host_mono_ns", "BIGINT", "monotonic clock at the same moment (ns)"),
    ("is_closed", "BOOLEAN", "whether the recording was completed"),
)
NAME_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("attempt", "INTEGER", "which launch of the job, from 0"),
    ("rank", "INTEGER", "global rank"),
    ("name_id", "USMALLINT", "id in the rank's tables"),
    ("name", "VARCHAR", "what it stands for"),
)
GROUP_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("attempt", "INTEGER", "which launch of the job, from 0"),
    ("rank", "INTEGER", "global rank"),
    ("group_id", "USMALLINT", "id in the rank's tables; other ranks number groups differently"),
    ("name", "VARCHAR", "torch's name of the process group, the same on its ranks"),
    ("description", "VARCHAR", "what its maker calls it, such as mesh_tp"),
    ("backend", "VARCHAR", "gloo, nccl, …"),
    ("size", "BIGINT", "number of its ranks"),
    ("ranks", "VARCHAR", "its global ranks, separated by commas"),
)
QUERY_TABLES = (*(name for name in TABLES if name != "phases"), "ranks", "names", "groups")
"""Tables a query can name. Packed `phases` are shown as `spans`."""
OTHER_MEANINGS = {
    "ranks": "One row per recording.",
    "names": "What name ids stand for.",
    "groups": "Process groups, as each of their ranks numbers them.",
}
"""Of the tables that no schema describes."""
LABELS: dict[tuple[str, str], tuple[str, ...]] = {
    ("collectives", "kind"): tuple(kind.label for kind in Kind),
    ("collectives", "outcome"): tuple(outcome.label for outcome in Outcome),
    ("collectives", "end_source"): tuple(source.name.lower() for source in EndSource),
    ("collectives", "dtype"): DTYPES,
    ("actions", "kind"): ACTION_KINDS,
}
"""Coded columns that have their text beside them, as `…_name`."""
_NAMED_IDS = ("name_id", "phase_id", "kind_id", "detail_id")
"""Columns that hold a name id and have its text beside them, without the `_id`."""


def connect(
    run: Run,
    attempt: int | None = None,
    *,
    tables: Collection[str] | None = None,
    max_bytes: int | None = None,
) -> Any:
    """A DuckDB connection with the run's tables, of one attempt or of all.

    `tables` loads only those (a large run is quicker that way); by default all are. With
    `max_bytes`, tables and queries take no more memory than that and none of the disk.
    """
    import duckdb

    attempts = _pick_attempts(run, attempt)
    wanted = QUERY_TABLES if tables is None else [name for name in QUERY_TABLES if name in tables]
    limits: dict[str, str | bool | int | float | list[str]] = {}
    if max_bytes is not None:
        limits = {"memory_limit": f"{max_bytes}B", "temp_directory": ""}
    con = duckdb.connect(config=limits)
    _make_ranks(con, attempts)
    _make_names(con, attempts)
    _make_groups(con, attempts)
    for name in wanted:
        if name in TABLES:
            _load_table(con, TABLES[name], attempts)
            con.execute(f"CREATE VIEW {name} AS {_view_sql(TABLES[name])}")
    return con


def shut_in(con: Any) -> None:
    """From here on the connection sees its own tables only: no file, network, extension or
    variable of this process, and no way back.
    """
    for setting in (
        "autoinstall_known_extensions",
        "autoload_known_extensions",
        "enable_external_access",
    ):
        con.execute(f"SET {setting} = false")
    con.execute("SET lock_configuration = true")


def _pick_attempts(run: Run, attempt: int | None) -> tuple[Attempt, ...]:
    if attempt is None:
        return run.attempts
    if not 0 <= attempt < len(run.attempts):
        raise UsageError(
            f"{run.path} has no attempt {attempt}; it has 0 to {len(run.attempts) - 1}"
        )
    return (run.attempts[attempt],)


def _load_table(con: Any, table: Table, attempts: Iterable[Attempt]) -> None:
    columns = ", ".join(f"{column.name} {sql_type(column)}" for column in table.columns)
    con.execute(f"CREATE TABLE _{table.name} (attempt INTEGER, rank INTEGER, {columns})")
    names = ", ".join(column.name for column in table.columns)
    for batch in _batches(table, attempts):
        con.register("_batch", batch)
        con.execute(
            f"INSERT INTO _{table.name} SELECT attempt, rank, {names} FROM "
            f"(SELECT attempt, rank, {select_stored(table)} FROM _batch)"
        )
        con.unregister("_batch")


def _batches(table: Table, attempts: Iterable[Attempt]) -> Iterator[dict[str, Any]]:
    """The table's rows with attempt and rank, half a million or so at a time."""
    parts: list[Columns] = []
    num_rows = 0
    for attempt, recording in _recordings(attempts):
        columns = recording.read(table.name)
        count = len(columns[table.columns[0].name])
        if not count:
            continue
        scanned = to_duckdb(table, columns)
        scanned["attempt"] = np.full(count, attempt.index, dtype=np.int32)
        scanned["rank"] = np.full(count, recording.rank, dtype=np.int32)
        parts.append(scanned)
        num_rows += count
        if num_rows >= _BATCH_ROWS:
            yield _join(parts)
            parts, num_rows = [], 0
    if parts:
        yield _join(parts)


def _join(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _recordings(attempts: Iterable[Attempt]) -> Iterator[tuple[Attempt, Recording]]:
    return chain.from_iterable(((attempt, rank) for rank in attempt) for attempt in attempts)


def _view_sql(table: Table) -> str:
    """The table as users see it: names as text beside their ids, missing values as NULL."""
    parts = ["t.rank", "t.attempt"]
    joins = []
    for column in table.columns:
        name = column.name
        if column.can_be_missing:
            parts.append(f"nullif(t.{name}, {MISSING}) AS {name}")
        else:
            parts.append(f"t.{name}")
        labels = LABELS.get((table.name, name))
        if labels is not None:
            listed = ", ".join(f"'{label}'" for label in labels)
            parts.append(f"[{listed}][t.{name}::INTEGER + 1] AS {name}_name")
        if name in _NAMED_IDS:
            text, source = name.removesuffix("_id"), f"n_{name}"
            unnamed = f"'(unnamed ' || t.{name} || ')'"
            if name in ("phase_id", "detail_id"):  # 0 is outside of any phase, or no detail
                unnamed = f"CASE WHEN t.{name} != 0 THEN {unnamed} END"
            parts.append(f"coalesce({source}.name, {unnamed}) AS {text}")
            joins.append(
                f"LEFT JOIN names {source} ON ({source}.attempt = t.attempt AND "
                f"{source}.rank = t.rank AND {source}.name_id = t.{name})"
            )
        if name == "group_id":
            parts.append("g.description AS group_description")
            joins.append(
                "LEFT JOIN groups g ON (g.attempt = t.attempt AND g.rank = t.rank AND "
                "g.group_id = t.group_id)"
            )
    return f"SELECT {', '.join(parts)} FROM _{table.name} t {' '.join(joins)}"


def _make_ranks(con: Any, attempts: Iterable[Attempt]) -> None:
    rows: list[tuple[object, ...]] = []
    for attempt, recording in _recordings(attempts):
        header = recording.header
        known = (_plain(header.get(name), kind) for name, kind, _ in RANK_COLUMNS[3:-1])
        is_closed = recording.closing is not None
        rows.append((attempt.index, recording.rank, recording.attempt, *known, is_closed))
    _make_table(con, "ranks", RANK_COLUMNS, rows)


def _make_names(con: Any, attempts: Iterable[Attempt]) -> None:
    rows = [
        (attempt.index, recording.rank, name_id, _plain(text, "VARCHAR"))
        for attempt, recording in _recordings(attempts)
        for name_id, text in recording.names.items()
        if 0 <= name_id < 1 << 16
    ]
    _make_table(con, "names", NAME_COLUMNS, rows)


def _make_groups(con: Any, attempts: Iterable[Attempt]) -> None:
    rows = [
        (
            attempt.index,
            recording.rank,
            group.group_id,
            *(_plain(text, "VARCHAR") for text in (group.name, group.description, group.backend)),
            len(group.ranks),
            ",".join(map(str, group.ranks)),
        )
        for attempt, recording in _recordings(attempts)
        for group in recording.groups.values()
        if 0 <= group.group_id < 1 << 16
    ]
    _make_table(con, "groups", GROUP_COLUMNS, rows)


def _plain(value: object, kind: str) -> object:
    """A header's value as SQL can hold it; NULL when it is not what it should be."""
    if kind == "VARCHAR":
        # A lone surrogate is not text to a database; it stays visible as an escape.
        return (
            value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None
        )
    is_int64 = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return value if is_int64 else None


def _make_table(
    con: Any,
    name: str,
    columns: tuple[tuple[str, str, str], ...],
    rows: Sequence[tuple[object, ...]],
) -> None:
    definitions = ", ".join(f"{column} {kind}" for column, kind, _ in columns)
    con.execute(f"CREATE TABLE {name} ({definitions})")
    if rows:
        lists = [list(values) for values in zip(*rows, strict=True)]
        unnested = ", ".join(f"unnest(?::{kind}[])" for _, kind, _ in columns)
        con.execute(f"INSERT INTO {name} SELECT {unnested}", lists)
