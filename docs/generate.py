"""Writes the reference pages that come from the code.

python docs/generate.py            # writes docs/columns.md
python docs/generate.py --check    # exits with 1 when it is not current
"""

import sys
from pathlib import Path

from meshscope.store.query import NAME_COLUMNS, RANK_COLUMNS
from meshscope.store.schema import (
    BUILTIN_NAMES,
    FIRST_CUSTOM_NAME_ID,
    ROLES,
    SCHEMA_VERSION,
    TABLES,
    Column,
    SpanFlag,
    StepFlag,
    Table,
)

TARGET = Path(__file__).parent / "columns.md"
FLAG_MEANINGS = {
    "StepFlag": {
        "ABORTED": "the step's block was left by an exception",
        "EXPLICIT": "the boundaries were given by the program",
        "SKIPPED": "the gradient scaler skipped the update",
    },
    "SpanFlag": {
        "ABORTED": "left by an exception, or closed by the recorder because its end never came",
        "DETAIL": "a named span inside a phase: not part of the partition of the time line",
    },
}


def describe_place(column: Column) -> str:
    """Word and bits of a column."""
    if column.width == 64:
        return f"word {column.word}"
    return f"word {column.word}, bits {column.shift}–{column.shift + column.width - 1}"


def describe_type(column: Column) -> str:
    """Type on disk."""
    if column.is_float:
        return "float64"
    return "int64" if column.width == 64 else f"uint{column.width}"


def describe_table(table: Table) -> list[str]:
    """One section of the page."""
    lines = [f"## {table.name}", "", table.meaning, ""]
    if table.is_detail:
        lines += ["A detail table: it stops at a size limit and counts what it leaves out.", ""]
    lines += ["| column | unit | type | place | meaning |", "|---|---|---|---|---|"]
    for column in table.columns:
        missing = " −1 is missing (NULL in SQL)." if column.can_be_missing else ""
        lines.append(
            f"| `{column.name}` | {column.unit} | {describe_type(column)} | "
            f"{describe_place(column)} | {column.meaning}.{missing} |"
        )
    return [*lines, ""]


def describe_flags(holder: type, title: str) -> list[str]:
    """The bits of a flags column."""
    lines = [f"### {title}", "", "| bit | name | meaning |", "|---|---|---|"]
    for name, meaning in FLAG_MEANINGS[holder.__name__].items():
        lines.append(f"| {getattr(holder, name)} | `{name}` | {meaning} |")
    return [*lines, ""]


def render() -> str:
    """The whole page."""
    lines = [
        "# Columns",
        "",
        "Generated from `src/meshscope/store/schema.py` by `docs/generate.py`; do not edit.",
        f"Schema version {SCHEMA_VERSION}. How the bytes lie on disk: [store.md](store.md).",
        "",
    ]
    for table in TABLES.values():
        lines += describe_table(table)
        if table.name == "steps":
            lines += describe_flags(StepFlag, "steps.flags")
        if table.name == "spans":
            lines += describe_flags(SpanFlag, "spans.flags")
    lines += ["## Built-in names", "", "The same ids in every rank; a program's own names begin at"]
    lines += [f"{FIRST_CUSTOM_NAME_ID}.", "", "| id | name | meaning |", "|---|---|---|"]
    lines += [f"| {BUILTIN_NAMES[role.name]} | `{role.name}` | {role.meaning} |" for role in ROLES]
    for name, columns in (("ranks", RANK_COLUMNS), ("names", NAME_COLUMNS)):
        lines += ["", f"## {name} (SQL only)", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column}` | {kind} | {meaning} |" for column, kind, meaning in columns]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks the page."""
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{TARGET.name} is not current; run python docs/generate.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
