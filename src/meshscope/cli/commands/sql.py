"""`meshscope sql`: asks a run questions in SQL, or lists what can be asked."""

import csv
import io
import math
import re
from pathlib import Path
from typing import Any

import click

from meshscope.cli.locate import open_located
from meshscope.cli.terminal_screen import show_document
from meshscope.errors import UsageError
from meshscope.report.format import align, clean_text
from meshscope.report.listings import ROWS, RowsDocument
from meshscope.store.read.query import (
    GROUP_COLUMNS,
    LABELS,
    NAME_COLUMNS,
    QUERY_TABLES,
    RANK_COLUMNS,
    connect,
)
from meshscope.store.schema import TABLES

_READING_STATEMENTS = {"SELECT"}
"""Other statements are refused: copies and exports could write over the run's own files, and
EXPLAIN ANALYZE runs what it explains."""
_MAX_SHOWN_ROWS = 1000


@click.command("sql", short_help="Run a SQL query on a run.")
@click.argument("run", type=click.Path(path_type=Path))
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
def command(
    *, run: Path, query: str | None, as_json: bool, as_csv: bool, attempt_index: int | None
) -> None:
    """Runs a SQL QUERY (DuckDB's dialect) over the tables of RUN; without one, lists them.

    Only queries run, on copies of the tables: RUN does not change.
    """
    if as_json and as_csv:
        raise UsageError("--json and --csv cannot be combined; give one")
    if query is None:
        click.echo(_describe_tables(), nl=False)
        return
    opened = open_located(run)
    words = set(re.findall(r"[a-z_]+", query.lower()))
    tables = None if words & {"show", "information_schema"} else words & set(QUERY_TABLES)
    con = connect(opened, attempt_index, tables=tables)
    names, rows = _run_query(con, query)
    if as_json:
        plain = (dict(zip(names, map(_as_json, row), strict=True)) for row in rows)
        show_document(ROWS, RowsDocument(rows=tuple(plain)))
    elif as_csv:
        click.echo(_to_csv(names, rows), nl=False)
    else:
        click.echo(_to_table(names, rows), nl=False)


def _run_query(con: Any, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    import duckdb

    try:
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
        result = con.execute(query)
        return [column[0] for column in result.description], result.fetchall()
    except duckdb.Error as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "unknown")
        raise UsageError(f"the query failed: {clean_text(first)}") from error


_OTHER_TABLES = {
    "ranks": ("One row per recording.", RANK_COLUMNS),
    "names": ("What name ids stand for.", NAME_COLUMNS),
    "groups": ("Process groups, as each of their ranks numbers them.", GROUP_COLUMNS),
}


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
            about, columns = _OTHER_TABLES[name]
            lines.append(f"{name}: {about}")
            rows = [(column, "", meaning) for column, _, meaning in columns]
        lines += [f"  {column:<26} {unit:<6} {meaning}" for column, unit, meaning in rows]
        lines.append("")
    return "\n".join(lines)


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
    return buffer.getvalue()


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
