"""Any table of a run as a file: those of `meshscope sql`, and those of the report."""

from pathlib import Path

from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunError, UsageError
from meshscope.export.table_files import write_relation
from meshscope.report.run_study import RunStudy
from meshscope.report.tables import REPORT_TABLES, build_table
from meshscope.store.read.query import OTHER_MEANINGS, QUERY_TABLES, connect
from meshscope.store.schema import TABLES


def list_tables() -> list[tuple[str, str]]:
    """Names and meanings."""
    return [
        *((name, table.meaning) for name, table in REPORT_TABLES.items()),
        *(
            (name, TABLES[name].meaning if name in TABLES else OTHER_MEANINGS[name])
            for name in QUERY_TABLES
        ),
    ]


def write_table(study: RunStudy, name: str, path: Path, format_: str) -> int:
    """Writes one table of an attempt; returns its rows."""
    if name in REPORT_TABLES:
        table = build_table(name, study.study, lambda: study.findings)
        if isinstance(table, Unavailable):
            raise RunError(f"this run has no table {name}: {table.reason}")
        con, relation = table.connect()
        return write_relation(con, relation, path, format_)
    if name not in QUERY_TABLES:
        there = ", ".join(one for one, _ in list_tables())
        raise UsageError(f"there is no table {name}; there are {there}")
    attempt = study.study.attempt.index
    con = connect(study.run, attempt, tables={name})
    return write_relation(con, name, path, format_)
