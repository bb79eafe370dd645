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
    limit: int | None
    """So many of them are enough, the first ones; None: all are wanted."""


@dataclass(frozen=True, slots=True)
class TableScans:
    """Everything that a query reads of one table."""

    scans: tuple[Scan, ...]

    def uses(self, column: str) -> bool:
        return any(column in scan.words for scan in self.scans)

    def find_limit(self, con: Any, columns: Iterable[tuple[str, str]]) -> int | None:
        """How many rows are enough that meet `where`; None: all."""
        if len(self.scans) != 1 or self.scans[0].limit is None:
            return None
        source = _make_source(columns)
        is_known = all(_is_valid(con, one, source) for one in self.scans[0].conditions)
        return self.scans[0].limit if is_known else None

    def where(self, con: Any, columns: Iterable[tuple[str, str]]) -> str:
        """A condition over some columns (name, type) that all rows meet which are used."""
        source = _make_source(columns)
        parts = []
        for scan in self.scans:
            usable = [one for one in scan.conditions if _is_valid(con, one, source)]
            if not usable:
                return "true"
            parts.append("(" + " AND ".join(f"({one})" for one in usable) + ")")
        return " OR ".join(parts) or "false"


@dataclass(frozen=True, slots=True)
class _Above:
    """What stands above a node of a plan, as far as it says which rows of a scan are enough."""

    filter: str = ""
    """Of a filter right above it."""
    limit: int | None = None


_NOTHING = _Above()
_Node = dict[str, Any]


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
            for node, above in _walk(json.loads(text)):
                table = str(_info(node)["Table"]).rpartition(".")[2].strip('"').removeprefix("_")
                found.setdefault(table, []).append(_read_scan(node, above, volatile))
    return {table: TableScans(tuple(scans)) for table, scans in found.items()}


def _list_volatile(con: Any) -> frozenset[str]:
    """Functions whose value differs from call to call."""
    rows = con.execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE stability IS NOT NULL AND stability != 'CONSISTENT'"
    ).fetchall()
    return frozenset(name for (name,) in rows)


def _walk(nodes: list[dict[str, Any]], above: _Above = _NOTHING) -> Iterator[tuple[_Node, _Above]]:
    """Each scan of a table."""
    for node in nodes:
        if "Table" in _info(node):
            yield node, above
        below = _look_below(node, above)
        for place, child in enumerate(node.get("children", [])):
            # Every row of a left join's left side stays, once or more often.
            yield from _walk([child], below if place == 0 else _NOTHING)


def _look_below(node: _Node, above: _Above) -> _Above:
    name, info = str(node["name"]).strip(), _info(node)
    if name in ("LIMIT", "STREAMING_LIMIT"):
        limit, offset = str(info.get("Limit")), str(info.get("Offset", "0"))
        is_known = limit.isdecimal() and offset.isdecimal()
        return _Above(limit=int(limit) + int(offset) if is_known else None)
    if name == "PROJECTION" or (name == "HASH_JOIN" and info.get("Join Type") == "LEFT"):
        return _Above(limit=above.limit)
    stated = info.get("Expression")
    return _Above(filter=stated) if name == "FILTER" and isinstance(stated, str) else _NOTHING


def _info(node: _Node) -> dict[str, Any]:
    found = node.get("extra_info")
    return found if isinstance(found, dict) else {}


def _read_scan(node: _Node, above: _Above, volatile: frozenset[str]) -> Scan:
    info = _info(node)
    stated = info.get("Filters", [])
    stated = [*([stated] if isinstance(stated, str) else stated), above.filter]
    texts = [_OPTIONAL.sub("", one) for one in stated if one]
    used = [
        one
        for one in texts
        if not _INEXACT.search(one) and not volatile & set(_WORD.findall(one.lower()))
    ]
    return Scan(
        words=frozenset(_WORD.findall(json.dumps([info, above.filter]))),
        conditions=tuple(used),
        limit=above.limit if len(used) == len(texts) else None,
    )


def _make_source(columns: Iterable[tuple[str, str]]) -> str:
    """A relation of one row with these columns."""
    listed = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns)
    return f"(SELECT {listed})"


def _is_valid(con: Any, condition: str, source: str) -> bool:
    import duckdb

    try:
        con.execute(f"EXPLAIN SELECT 1 FROM {source} WHERE {condition}")
    except duckdb.Error:
        return False
    return True
