"""`meshscope sql`: asks a run questions in SQL, or lists what can be asked."""

import csv
import io
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from meshscope.cli.locate import has_traces, open_located
from meshscope.cli.places import READ
from meshscope.cli.terminal_screen import show_document
from meshscope.core.unavailable import Unavailable
from meshscope.errors import UsageError
from meshscope.report.format import align, clean_text
from meshscope.report.listings import ROWS, RowsDocument
from meshscope.store.read.query import (
    GROUP_COLUMNS,
    LABELS,
    NAME_COLUMNS,
    OTHER_MEANINGS,
    QUERY_TABLES,
    RANK_COLUMNS,
    connect,
    open_planner,
    shut_in,
)
from meshscope.store.read.query_plan import TableScans, plan_scans
from meshscope.store.schema import TABLES

_READING_STATEMENTS = {"SELECT"}
"""Other statements are refused: copies and exports could write over the run's own files, and
EXPLAIN ANALYZE runs what it explains."""
_MAX_SHOWN_ROWS = 1000
_TIME_LIMIT_SECONDS = 60.0
_MAX_DEFAULT_BYTES = 8 << 30
_FETCH_ROWS = 10_000
_CELL_BYTES = 64
"""What a value of a result takes in this process, at least."""


@click.command("sql", short_help="Run a SQL query on a run.")
@click.argument("run", type=READ)
@click.argument("query", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Write one JSON document with an object per row."
)
@click.option("--csv", "as_csv", is_flag=True, help="Write comma-separated values.")
@click.option(
    "--attempt",
    "attempt_index",
    type=click.IntRange(min=0),
    help="Which launch of the job, counted from 0.  [default: all]",
)
@click.option(
    "--time-limit",
    "limit_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=_TIME_LIMIT_SECONDS,
    show_default=True,
    help="Seconds after which the query ends without a result.",
)
@click.option(
    "--memory-limit",
    "limit_gib",
    type=click.FloatRange(min=0, min_open=True),
    help="GiB that tables and query may take.  [default: 8, or half of the memory]",
)
@click.option(
    "--allow-files",
    is_flag=True,
    help="Let the query read other files and load extensions that are installed.",
)
def command(
    *,
    run: Path,
    query: str | None,
    as_json: bool,
    as_csv: bool,
    attempt_index: int | None,
    limit_seconds: float,
    limit_gib: float | None,
    allow_files: bool,
) -> None:
    """Runs a SQL QUERY (DuckDB's dialect) over the tables of RUN; without one, lists them.

    Only queries run, on copies of the tables: RUN does not change. A query sees these tables and
    nothing else of the machine or the network, unless --allow-files is given.
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv cannot be combined; give one")
    if query is None:
        click.echo(_describe_tables(), nl=False)
        return
    opened = open_located(run)
    words = set(re.findall(r"[a-z_]+", query.lower()))
    tables = None if words & {"show", "information_schema"} else words & set(QUERY_TABLES)
    max_bytes = _default_bytes() if limit_gib is None else math.ceil(limit_gib * (1 << 30))
    limits = _Limits(seconds=limit_seconds, max_bytes=max_bytes)
    with limits.explain():
        is_of_traces = any(word.startswith("trace_") for word in words)
        scans = None if is_of_traces else _plan_query(query, limits, may_read_files=allow_files)
        con = connect(opened, attempt_index, tables=tables, scans=scans, max_bytes=max_bytes)
        _add_trace_tables(con, run, words)
        _confine(con, may_read_files=allow_files)
        names, rows = _run_query(con, query, limits)
    if as_json:
        plain = (dict(zip(names, map(_as_json, row), strict=True)) for row in rows)
        show_document(ROWS, RowsDocument(rows=tuple(plain)))
    elif as_csv:
        click.echo(_to_csv(names, rows), nl=False)
    else:
        click.echo(_to_table(names, rows), nl=False)


def _add_trace_tables(con: Any, path: Path, words: set[str]) -> None:
    """Those that the query names: what each trace says for itself."""
    asked = {word for word in words if word.startswith("trace_")}
    if not asked:
        return
    from meshscope.report.trace_tables import TRACE_TABLES, build_trace_table

    for name in sorted(asked & set(TRACE_TABLES)):
        if not has_traces(path):
            raise UsageError(f"{path} is a run; {name} is a table of traces: name these instead")
        from meshscope.cli.trace_loading import summarize_traces

        table = build_trace_table(name, summarize_traces([path]))
        if isinstance(table, Unavailable):
            raise UsageError(f"{path}: {table.reason}")
        con.register("columns_", dict(table))
        con.execute(f"CREATE TABLE {name} AS SELECT * FROM columns_")
        con.unregister("columns_")


def _default_bytes() -> int:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MAX_DEFAULT_BYTES, memory_bytes // 2)


@dataclass(slots=True, kw_only=True)
class _Limits:
    """What a query may take, and whether its time is up."""

    seconds: float
    max_bytes: int
    is_over: bool = False

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Turns DuckDB's errors into one sentence, with what to do."""
        import duckdb

        try:
            yield
        except duckdb.Error as error:
            if self.is_over:
                raise self.time_error() from error
            if isinstance(error, duckdb.OutOfMemoryException):
                raise self.memory_error() from error
            first = next((line for line in str(error).splitlines() if line.strip()), "unknown")
            hint = ""
            if isinstance(error, duckdb.PermissionException):
                hint = " (--allow-files lets a query read other files)"
            raise UsageError(f"the query failed: {clean_text(first)}{hint}") from error

    @contextmanager
    def watch(self, con: Any) -> Iterator[None]:
        """Interrupts what the connection does when the time is up."""

        def end() -> None:
            self.is_over = True
            con.interrupt()

        timer = threading.Timer(self.seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # a thread that still has the connection would be killed with it

    def time_error(self) -> UsageError:
        return UsageError(
            f"the query took longer than {self.seconds:g} s; ask for less, or give --time-limit"
        )

    def memory_error(self) -> UsageError:
        return UsageError(
            f"tables and query need more than {self.max_bytes / (1 << 30):.3g} GiB; ask for less, "
            "or give --memory-limit"
        )


def _confine(con: Any, *, may_read_files: bool) -> None:
    if may_read_files:
        con.execute("SET autoinstall_known_extensions = false")
    else:
        shut_in(con)


def _plan_query(query: str, limits: _Limits, *, may_read_files: bool) -> dict[str, TableScans]:
    """What is to be read of the run; a query that is wrong is refused before anything is."""
    with open_planner() as con:
        _confine(con, may_read_files=may_read_files)
        _check_reads_only(con, query)
        with limits.watch(con):
            return plan_scans(con, query)


def _check_reads_only(con: Any, query: str) -> None:
    statements = con.extract_statements(query)
    kinds = {statement.type.name for statement in statements}
    if not kinds:
        raise UsageError("the query is empty; give one, or none to list the tables")
    if kinds - _READING_STATEMENTS:
        others = ", ".join(sorted(kinds - _READING_STATEMENTS))
        raise UsageError(
            f"{others} is not a query, and meshscope sql only reads; use --csv or --json to "
            "save a result"
        )


def _run_query(con: Any, query: str, limits: _Limits) -> tuple[list[str], list[tuple[Any, ...]]]:
    _check_reads_only(con, query)
    rows: list[tuple[Any, ...]] = []
    with limits.watch(con):
        result = con.execute(query)
        names = [column[0] for column in result.description]
        while fetched := result.fetchmany(_FETCH_ROWS):
            rows += fetched
            if limits.is_over:
                raise limits.time_error()
            if len(rows) * len(names) * _CELL_BYTES > limits.max_bytes:
                raise limits.memory_error()
    return names, rows


_OTHER_COLUMNS = {"ranks": RANK_COLUMNS, "names": NAME_COLUMNS, "groups": GROUP_COLUMNS}


def _describe_tables() -> str:
    lines = []
    for name in QUERY_TABLES:
        if name in TABLES:
            table = TABLES[name]
            lines.append(f"{name}: {table.meaning}")
            rows = [("rank, attempt", "", "global rank; launch of the job, from 0")]
            for column in table.columns:
                missing = "; NULL when missing" if column.can_be_missing else ""
                rows.append((column.name, column.unit, column.meaning + missing))
                if column.name in ("name_id", "phase_id"):
                    rows.append((column.name.removesuffix("_id"), "", "its text"))
                if column.name == "group_id":
                    rows.append(("group_description", "", "what the group's maker calls it"))
                if (name, column.name) in LABELS:
                    rows.append((f"{column.name}_name", "", "its text"))
        else:
            lines.append(f"{name}: {OTHER_MEANINGS[name]}")
            rows = [(column, "", meaning) for column, _, meaning in _OTHER_COLUMNS[name]]
        lines += [f"  {column:<26} {unit:<6} {meaning}" for column, unit, meaning in rows]
        lines.append("")
    from meshscope.report.trace_tables import TRACE_TABLES

    lines.append("Of traces of torch.profiler, if RUN is one or a folder of them:")
    lines += [f"  {name:<26} {table.meaning}" for name, table in TRACE_TABLES.items()]
    return "\n".join([*lines, ""])


def _as_json(value: Any) -> Any:
    """Values without a JSON type (dates, decimals, infinite numbers) as text."""
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _as_json(one) for key, one in value.items()}
    is_plain = value is None or isinstance(value, (bool, int, str))
    if isinstance(value, float):
        is_plain = math.isfinite(value)
    return value if is_plain else str(value)


def _to_csv(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    text = buffer.getvalue()
    if not sys.stdout.isatty():
        return text
    return "\n".join(map(clean_text, text.split("\n")))  # a terminal would obey its escapes


def _to_table(names: list[str], rows: list[tuple[Any, ...]]) -> str:
    numbers = {
        index
        for index in range(len(names))
        if all(isinstance(row[index], (int, float)) or row[index] is None for row in rows)
    }
    shown = [
        ["NULL" if value is None else clean_text(str(value)) for value in row]
        for row in rows[:_MAX_SHOWN_ROWS]
    ]
    text = align([[clean_text(name) for name in names], *shown], right=numbers)
    if len(rows) > _MAX_SHOWN_ROWS:
        text += f"… {len(rows) - _MAX_SHOWN_ROWS} more rows; use --csv or --json for all\n"
    return text
