"""Tables as files: CSV, Parquet or JSON, written by DuckDB."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshscope.errors import UsageError

FORMATS = ("csv", "parquet", "json")
_OPTIONS = {
    "csv": "FORMAT csv, HEADER",
    "parquet": "FORMAT parquet, COMPRESSION zstd",
    "json": "FORMAT json, ARRAY true",
}
_FORMULA = "'^[=+\\-@\\t\\r]'"
"""What a spreadsheet would run, at the begin of a cell."""


def pick_format(path: Path | None, asked: str | None) -> str:
    """What was asked for, else by the suffix."""
    suffix = "" if path is None else path.suffix.lower().lstrip(".")
    found = asked or (suffix if suffix in FORMATS else None)
    if found is None:
        what = "standard output" if path is None else str(path)
        raise UsageError(f"the format of {what} is not known; give --format {'|'.join(FORMATS)}")
    return found


def write_relation(con: Any, source: str, path: Path, format_: str) -> int:
    """Writes what `source` (a table or query of the connection) has; returns the rows.

    The file is whole or not there.
    """
    import duckdb

    columns = con.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()
    shown = ", ".join(_show_column(str(name), str(kind), format_) for name, kind, *_ in columns)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    target = str(part).replace("'", "''")
    try:
        copied = con.execute(
            f"COPY (SELECT {shown} FROM {source}) TO '{target}' ({_OPTIONS[format_]})"
        ).fetchall()
        part.replace(path)
    except (OSError, duckdb.IOException) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UsageError(f"{path} cannot be written: {reason}") from error
    finally:
        with suppress(OSError):
            part.unlink()
    return int(copied[0][0])


def _show_column(name: str, kind: str, format_: str) -> str:
    quoted = '"' + name.replace('"', '""') + '"'
    if kind in ("DOUBLE", "FLOAT") and format_ != "parquet":
        # JSON has no NaN, and an empty cell says that a value is missing.
        return f"CASE WHEN isfinite({quoted}) THEN {quoted} END AS {quoted}"
    if kind == "VARCHAR" and format_ == "csv":
        formula = f"regexp_matches({quoted}, {_FORMULA})"
        return f"CASE WHEN {formula} THEN '''' || {quoted} ELSE {quoted} END AS {quoted}"
    return quoted
