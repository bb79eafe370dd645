"""Any table of a run as a file: those of `meshscope sql`, and those of the report."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunError, UsageError
from meshscope.export.table_files import write_relation
from meshscope.report.run_study import RunStudy
from meshscope.report.tables import REPORT_TABLES, build_table
from meshscope.store.read.query import OTHER_MEANINGS, QUERY_TABLES, connect, open_planner
from meshscope.store.read.query_plan import plan_scans
from meshscope.store.schema import TABLES

_MAX_ROWS_IN_MEMORY = 20_000_000
_WORK_BYTES = 1 << 30
"""Memory that a larger table may take; the rest is in a file beside the result until that is
written."""


def list_tables() -> list[tuple[str, str]]:
    """Names and meanings."""
    return [
        *((name, table.meaning) for name, table in REPORT_TABLES.items()),
        *(
            (name, TABLES[name].meaning if name in TABLES else OTHER_MEANINGS[name])
            for name in QUERY_TABLES
        ),
    ]


def write_table(
    study: RunStudy,
    name: str,
    path: Path,
    format_: str,
    *,
    ranks: Sequence[int] | None = None,
    steps: tuple[int, int | None] | None = None,
) -> int:
    """Writes one table of an attempt, or its rows of some ranks and steps; returns the rows."""
    if name in REPORT_TABLES:
        table = build_table(name, study.study, lambda: study.findings)
        if isinstance(table, Unavailable):
            raise RunError(f"this run has no table {name}: {table.reason}")
        con, relation = table.connect()
        return write_relation(con, _choose_rows(con, name, relation, ranks, steps), path, format_)
    if name not in QUERY_TABLES:
        there = ", ".join(one for one, _ in list_tables())
        raise UsageError(f"there is no table {name}; there are {there}")
    return _write_recorded(study, name, path, format_, ranks, steps)


def _write_recorded(
    study: RunStudy,
    name: str,
    path: Path,
    format_: str,
    ranks: Sequence[int] | None,
    steps: tuple[int, int | None] | None,
) -> int:
    """Only what is chosen is read; what is too large for memory goes through a file."""
    with open_planner() as planner:
        source = _choose_rows(planner, name, name, ranks, steps)
        scans = plan_scans(planner, f"SELECT * FROM {source}")
    attempt = study.study.attempt
    asked = attempt.ranks.values() if ranks is None else [attempt.ranks[rank] for rank in ranks]
    num_rows = sum(one.count_rows(name) for one in asked) if name in TABLES else 0
    with contextlib.ExitStack() as stack:
        work_file, max_bytes = None, None
        if num_rows > _MAX_ROWS_IN_MEMORY:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".meshscope-export-", dir=path.parent)
            )
            work_file, max_bytes = Path(folder) / "work.duckdb", _WORK_BYTES
        con = stack.enter_context(
            connect(
                study.run,
                attempt.index,
                tables={name},
                scans=scans,
                max_bytes=max_bytes,
                work_file=work_file,
            )
        )
        return write_relation(con, source, path, format_)


def _choose_rows(
    con: Any,
    name: str,
    relation: str,
    ranks: Sequence[int] | None,
    steps: tuple[int, int | None] | None,
) -> str:
    """The relation, or a query for some of its rows."""
    there = {str(column) for column, *_ in con.execute(f"DESCRIBE {relation}").fetchall()}
    for option, column, asked in (("--ranks", "rank", ranks), ("--steps", "step", steps)):
        if asked is not None and column not in there:
            raise UsageError(f"table {name} has no column {column}, which {option} needs")
    conditions = []
    if ranks is not None:
        conditions.append(f"rank IN ({', '.join(map(str, ranks))})")
    if steps is not None:
        first, last = steps
        conditions.append(f"step >= {first}" + ("" if last is None else f" AND step <= {last}"))
    return (
        f"(SELECT * FROM {relation} WHERE {' AND '.join(conditions)})" if conditions else relation
    )
