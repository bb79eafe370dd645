"""What a query reads of each table, so that only that is read of a run.

DuckDB plans the query on empty tables with the names and columns of the real ones. Its plan says of
every scan which columns are used, and which conditions a row must meet: those that it moved there
from wherever the query, its joins and the views state them. A condition that cannot be taken back
as SQL, or might mean something else there, is left out: then more is read than is needed, never
less.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_OPTIONAL = re.compile(r"^optional: *", re.IGNORECASE)
_INEXACT = re.compile(r"['\".]|\d[eE]")
"""Texts and fractions: what is printed of them need not be what they are."""
_WORD = re.compile(r"\w+")
_OPTIMIZERS = {
    "cte_filter_pusher",
    "expression_rewriter",
    "filter_pullup",
    "filter_pushdown",
    "in_clause",
    "unused_columns",
}
"""Those that move conditions and columns to the scans. Others may conclude from tables without rows
that nothing needs to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """One place of a query that reads a table."""

    words: frozenset[str]
    """The names of the columns that it uses are among them."""
    conditions: tuple[str, ...]
    """SQL over the table's columns; rows that meet them all are used."""


@dataclass(frozen=True, slots=True)
class TableScans:
    """Everything that a query reads of one table."""

    scans: tuple[Scan, ...]

    def uses(self, column: str) -> bool:
        return any(column in scan.words for scan in self.scans)

    def where(self, con: Any, columns: Iterable[tuple[str, str]]) -> str:
        """A condition over some columns (name, type) that all rows meet which are used."""
        listed = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns)
        parts = []
        for scan in self.scans:
            usable = [one for one in scan.conditions if _is_valid(con, one, f"(SELECT {listed})")]
            if not usable:
                return "true"
            parts.append("(" + " AND ".join(f"({one})" for one in usable) + ")")
        return " OR ".join(parts) or "false"


def limit_optimizers(con: Any) -> None:
    """Prepares a connection for `plan_scans`."""
    names = {name for (name,) in con.execute("SELECT name FROM duckdb_optimizers()").fetchall()}
    con.execute(f"SET disabled_optimizers = '{','.join(sorted(names - _OPTIMIZERS))}'")


def plan_scans(con: Any, query: str) -> dict[str, TableScans]:
    """By table, as a connection with empty tables and limited optimizers plans it.

    Raises DuckDB's error where the query is wrong.
    """
    volatile = _list_volatile(con)
    found: dict[str, list[Scan]] = {}
    for statement in con.extract_statements(query):
        for _, text in con.execute(f"EXPLAIN (FORMAT json) {statement.query}").fetchall():
            for info in _walk(json.loads(text)):
                table = str(info["Table"]).rpartition(".")[2].strip('"').removeprefix("_")
                found.setdefault(table, []).append(_read_scan(info, volatile))
    return {table: TableScans(tuple(scans)) for table, scans in found.items()}


def _list_volatile(con: Any) -> frozenset[str]:
    """Functions whose value differs from call to call."""
    rows = con.execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE stability IS NOT NULL AND stability != 'CONSISTENT'"
    ).fetchall()
    return frozenset(name for (name,) in rows)


def _walk(nodes: list[dict[str, Any]], above: str = "") -> Iterator[dict[str, Any]]:
    """What the plan says of each scan of a table, with the filter that stands right above it."""
    for node in nodes:
        info = node.get("extra_info")
        info = info if isinstance(info, dict) else {}
        if "Table" in info:
            stated = info.get("Filters", [])
            own = [stated] if isinstance(stated, str) else stated
            yield info | {"Filters": [*own, above] if above else own}
        is_filter = str(node["name"]).strip() == "FILTER"
        below = info.get("Expression") if is_filter else None
        yield from _walk(node.get("children", []), below if isinstance(below, str) else "")


def _read_scan(info: dict[str, Any], volatile: frozenset[str]) -> Scan:
    return Scan(
        words=frozenset(_WORD.findall(json.dumps(info))),
        conditions=tuple(
            one
            for one in (_OPTIONAL.sub("", stated) for stated in info["Filters"])
            if not _INEXACT.search(one) and not volatile & set(_WORD.findall(one.lower()))
        ),
    )


def _is_valid(con: Any, condition: str, source: str) -> bool:
    import duckdb

    try:
        con.execute(f"EXPLAIN SELECT 1 FROM {source} WHERE {condition}")
    except duckdb.Error:
        return False
    return True
