"""A run as SQL tables in memory: one view per table, and `ranks`, `names` and `groups`.

    con = connect(open_run("runs/a"))
    con.execute("select rank, avg(duration_ns) from spans group by rank").fetchall()

Every row carries `rank` and `attempt`. Ids have their text beside them (`name`), and a value that
the schema calls missing is NULL. The tables are copies: nothing in SQL can change the run through
them. `spans` holds the packed phases of steps too, as `Recording.read` gives them.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshscope.core.operations import DTYPES, EndSource, Kind, Outcome
from meshscope.errors import UsageError
from meshscope.store.read.columns import Columns
from meshscope.store.read.parquet import select_stored, sql_type, to_duckdb
from meshscope.store.read.query_plan import TableScans, limit_optimizers
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import Attempt, Run
from meshscope.store.schema import ACTION_KINDS, MISSING, TABLES, Column, Table

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
_KEYS = (("attempt", "INTEGER"), ("rank", "INTEGER"))
_MAX_SEARCHED_STEPS = 50_000_000
_NAMED_IDS = ("name_id", "phase_id", "kind_id", "detail_id")
"""Columns that hold a name id and have its text beside them, without the `_id`."""


def open_planner() -> Any:
    """A connection with all tables and no rows, for `plan_scans`."""
    import duckdb

    con = duckdb.connect()
    limit_optimizers(con)
    for make in (_make_ranks, _make_names, _make_groups):
        make(con, ())
    for name in QUERY_TABLES:
        if name in TABLES:
            _make_empty(con, TABLES[name], TABLES[name].columns)
    return con


def connect(
    run: Run,
    attempt: int | None = None,
    *,
    tables: Collection[str] | None = None,
    scans: Mapping[str, TableScans] | None = None,
    max_bytes: int | None = None,
    work_file: Path | None = None,
) -> Any:
    """A DuckDB connection with the run's tables, of one attempt or of all.

    `tables` loads only those (a large run is quicker that way); by default all are. With `scans`,
    only what a query reads of them is there: other ranks, rows and columns are not. With
    `max_bytes`, tables and queries take no more memory than that and none of the disk, or what
    does not fit goes to `work_file`.
    """
    import duckdb

    recordings = [(one, rank) for one in _pick_attempts(run, attempt) for rank in one]
    wanted = QUERY_TABLES if tables is None else [name for name in QUERY_TABLES if name in tables]
    limits: dict[str, str | bool | int | float | list[str]] = {}
    if max_bytes is not None:
        limits = {"memory_limit": f"{max_bytes}B", "temp_directory": ""}
    con = duckdb.connect(":memory:" if work_file is None else str(work_file), config=limits)
    _make_ranks(con, recordings)
    parts = [
        _choose_part(con, TABLES[name], recordings, scans) for name in wanted if name in TABLES
    ]
    named = recordings
    if tables is not None and not {"names", "groups"} & set(tables):  # asked for by views only
        used = {id(one) for part in parts for _, one in part.recordings}
        named = [one for one in recordings if id(one[1]) in used]
    _make_names(con, named)
    _make_groups(con, named)
    for part in parts:
        _make_empty(con, part.table, part.columns)
        _load(con, part)
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


_Recordings = Sequence[tuple[Attempt, Recording]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is loaded of one table."""

    table: Table
    columns: tuple[Column, ...]
    recordings: _Recordings
    where: str
    """What rows have to meet, over the table's columns."""
    steps: tuple[int, int] | None
    """First and last step that are used, of `steps`; None: all."""
    limit: int | None
    """So many rows are enough."""


def _choose_part(
    con: Any, table: Table, recordings: _Recordings, scans: Mapping[str, TableScans] | None
) -> _Part:
    if scans is None:
        return _Part(
            table=table,
            columns=table.columns,
            recordings=recordings,
            where="true",
            steps=None,
            limit=None,
        )
    used = scans.get(table.name, TableScans(()))
    keys_only = "SELECT attempt, rank FROM ranks"
    asked = con.execute(f"SELECT * FROM ({keys_only}) WHERE {used.where(con, _KEYS)}")
    keys = set(asked.fetchall())
    chosen = [one for one in recordings if (one[0].index, one[1].rank) in keys]
    steps = _choose_steps(con, chosen, used) if table.name == "steps" else None
    typed = [(column.name, sql_type(column)) for column in table.columns]
    return _Part(
        table=table,
        columns=tuple(column for column in table.columns if used.uses(column.name)),
        recordings=chosen,
        where=used.where(con, [*_KEYS, *typed]),
        steps=steps,
        limit=used.find_limit(con, [*_KEYS, *typed]),
    )


def _choose_steps(con: Any, recordings: _Recordings, used: TableScans) -> tuple[int, int] | None:
    """Of the recorded steps, from the first to the last that a query may want."""
    where = used.where(con, (("step", "BIGINT"),))
    if where == "true":
        return None
    found = [extent for _, one in recordings if (extent := one.find_step_extent()) is not None]
    low, high = min((one[0] for one in found), default=0), max((one[1] for one in found), default=0)
    if high - low > _MAX_SEARCHED_STEPS:
        return None
    query = f"SELECT min(step), max(step) FROM (SELECT unnest(range({low}, {high + 1})) AS step)"
    first, last = con.execute(f"{query} WHERE {where}").fetchone()
    return (first, last) if first is not None else (0, -1)


def _make_empty(con: Any, table: Table, columns: Sequence[Column]) -> None:
    """The table with some of its columns, and its view, in which the others are NULL."""
    typed = [f"{column.name} {sql_type(column)}" for column in columns]
    listed = ", ".join(("attempt INTEGER", "rank INTEGER", *typed))
    con.execute(f"CREATE TABLE _{table.name} ({listed})")
    con.execute(f"CREATE VIEW {table.name} AS {_view_sql(table, columns)}")


def _load(con: Any, part: _Part) -> None:
    table = replace(part.table, columns=part.columns)
    names = ", ".join(("attempt", "rank", *(column.name for column in part.columns)))
    stored = ", ".join(("attempt", "rank", *filter(None, (select_stored(table),))))
    num_rows = 0
    for batch in _batches(part, table):
        con.register("_batch", batch)
        (added,) = con.execute(
            f"INSERT INTO _{table.name} SELECT {names} FROM (SELECT {stored} FROM _batch) "
            f"WHERE {part.where}"
        ).fetchone()
        con.unregister("_batch")
        num_rows += added
        if part.limit is not None and num_rows >= part.limit:
            return


def _batches(part: _Part, table: Table) -> Iterator[dict[str, Any]]:
    """The table's rows with attempt and rank, half a million or so at a time."""
    parts: list[Columns] = []
    num_rows = 0
    for attempt, recording in part.recordings:
        columns = (
            recording.read(table.name) if part.steps is None else recording.read_steps([part.steps])
        )
        count = len(columns[part.table.columns[0].name])
        if not count:
            continue
        scanned = to_duckdb(table, {column.name: columns[column.name] for column in part.columns})
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


def _view_sql(table: Table, there: Sequence[Column]) -> str:
    """The table as users see it: names as text beside their ids, missing values as NULL."""
    parts = ["t.rank", "t.attempt"]
    joins = []
    for column in table.columns:
        name = column.name
        own = f"t.{name}" if column in there else f"NULL::{sql_type(column)}"
        if column.can_be_missing:
            parts.append(f"nullif({own}, {MISSING}) AS {name}")
        else:
            parts.append(f"{own} AS {name}")
        labels = LABELS.get((table.name, name))
        if labels is not None:
            listed = ", ".join(f"'{label}'" for label in labels)
            parts.append(f"[{listed}][{own}::INTEGER + 1] AS {name}_name")
        if name in _NAMED_IDS:
            text, source = name.removesuffix("_id"), f"n_{name}"
            unnamed = f"'(unnamed ' || {own} || ')'"
            if name in ("phase_id", "detail_id"):  # 0 is outside of any phase, or no detail
                unnamed = f"CASE WHEN {own} != 0 THEN {unnamed} END"
            parts.append(f"coalesce({source}.name, {unnamed}) AS {text}")
            joins.append(
                f"LEFT JOIN names {source} ON ({source}.attempt = t.attempt AND "
                f"{source}.rank = t.rank AND {source}.name_id = {own})"
            )
        if name == "group_id":
            parts.append("g.description AS group_description")
            joins.append(
                "LEFT JOIN groups g ON (g.attempt = t.attempt AND g.rank = t.rank AND "
                f"g.group_id = {own})"
            )
    return f"SELECT {', '.join(parts)} FROM _{table.name} t {' '.join(joins)}"


def _make_ranks(con: Any, recordings: _Recordings) -> None:
    rows: list[tuple[object, ...]] = []
    for attempt, recording in recordings:
        header = recording.header
        known = (_plain(header.get(name), kind) for name, kind, _ in RANK_COLUMNS[3:-1])
        is_closed = recording.closing is not None
        rows.append((attempt.index, recording.rank, recording.attempt, *known, is_closed))
    _make_table(con, "ranks", RANK_COLUMNS, rows)


def _make_names(con: Any, recordings: _Recordings) -> None:
    rows = [
        (attempt.index, recording.rank, name_id, _plain(text, "VARCHAR"))
        for attempt, recording in recordings
        for name_id, text in recording.names.items()
        if 0 <= name_id < 1 << 16
    ]
    _make_table(con, "names", NAME_COLUMNS, rows)


def _make_groups(con: Any, recordings: _Recordings) -> None:
    rows = [
        (
            attempt.index,
            recording.rank,
            group.group_id,
            *(_plain(text, "VARCHAR") for text in (group.name, group.description, group.backend)),
            len(group.ranks),
            ",".join(map(str, group.ranks)),
        )
        for attempt, recording in recordings
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
