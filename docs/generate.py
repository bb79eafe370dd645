"""Writes the reference pages that come from the code.

python docs/generate.py            # writes api.md, columns.md, glossary.md, rules and schemas
python docs/generate.py --check    # exits with 1 when a page is not current, or is one too many
"""

import sys
from enum import IntEnum
from pathlib import Path

from api_page import render_api

from meshscope.core.operations import EndSource, Kind, Outcome
from meshscope.diagnose.counterparts import COUNTERPARTS
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.rule import SUBJECTS, describe
from meshscope.diagnose.rule_page import describe_severities, render_page
from meshscope.page.document import render_schema
from meshscope.report.documents import render_schemas
from meshscope.report.glossary import GLOSSARY, INTRODUCTION
from meshscope.serve.openapi import render_openapi_file
from meshscope.serve.openapi import render_schema as render_runs_schema
from meshscope.store.read.query import GROUP_COLUMNS, NAME_COLUMNS, RANK_COLUMNS
from meshscope.store.schema import (
    ACTION_KINDS,
    BUILTIN_NAMES,
    FIRST_CUSTOM_NAME_ID,
    ROLES,
    SCHEMA_VERSION,
    TABLES,
    ActionFlag,
    ClockLimit,
    Column,
    NoteCode,
    OperationFlag,
    ScalarFlag,
    SpanFlag,
    StepFlag,
    Table,
    WaitSource,
)

DOCS = Path(__file__).parent
FLAG_MEANINGS = {
    "StepFlag": {
        "ABORTED": "the step's block was left by an exception",
        "EXPLICIT": "the boundaries were given by the program",
        "SKIPPED": "the gradient scaler skipped the update",
    },
    "SpanFlag": {
        "ABORTED": "left by an exception, or closed by the recorder because its end never came",
        "DETAIL": "a named span inside a phase: not part of the partition of the time line",
        "GIVEN": "measured by the program itself and put where it told of it; with `DETAIL` it is "
        "a phase only where it overlaps none that was measured",
    },
    "ScalarFlag": {
        "RETURNED": "times its divisor it is the loss that the model returned under that name",
        "NORMALIZED": "the model was told the tokens of the whole step: losses add up over "
        "microbatches",
        "UNSCALED": "what a gradient scaler was given, not what it made of it",
        "GRADIENT": "torch.autograd.grad was called on it",
        "COUNT": "to be added to others of its name: a counter",
        "FURTHER": "a further backward of the same forward: it adds to that one's loss",
    },
    "OperationFlag": {
        "ASYNC": "returned a handle at once; the others held the caller, or the stream, up",
        "ENGINE": "issued by torch itself inside backward: no handle reaches the program",
        "DEVICE": "ran on an accelerator's stream",
        "COALESCED": "one of a batch that was launched as a whole; its end is the batch's",
        "MANUAL": "timed by the program itself",
    },
    "WaitSource": {
        "WORK": "`Work.wait`",
        "TENSOR": "`wait_tensor` of the functional collectives",
        "CALL": "the call itself, of one that gives a handle: torch returned late (over 100 µs)",
        "UNQUEUED": "no wait: the operation ran with nothing beside it and nothing queued behind "
        "it; only traces of a profiler tell",
    },
    "ActionFlag": {"ABORTED": "left by an exception"},
    "ClockLimit": {
        "IDLE": "nothing runs on it",
        "CLOCKS_SET": "someone set its clocks",
        "POWER_CAP": "its power limit",
        "HARDWARE_SLOWDOWN": "heat or power, by its hardware",
        "SYNC_BOOST": "the slowest of devices whose clocks are tied to each other",
        "SOFTWARE_THERMAL": "heat, by its driver",
        "HARDWARE_THERMAL": "heat, by its hardware",
        "POWER_BRAKE": "the machine's power supply asked for it",
        "DISPLAY": "a display's clock",
    },
    "NoteCode": {
        "ERROR": "the message of an operation that failed",
        "NAME": "the name of a custom operation, or torch's for one that is not known here",
        "METADATA": "a JSON object the program gave",
    },
}


def describe_position(column: Column) -> str:
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
    lines += ["| column | unit | type | position | meaning |", "|---|---|---|---|---|"]
    for column in table.columns:
        missing = " −1 is missing (NULL in SQL)." if column.can_be_missing else ""
        if column.is_stored_plus_one:
            missing = " Stored plus one; missing (−1, NULL in SQL) is stored as 0."
        lines.append(
            f"| `{column.name}` | {column.unit} | {describe_type(column)} | "
            f"{describe_position(column)} | {column.meaning}.{missing} |"
        )
    return [*lines, ""]


def describe_codes(codes: type[IntEnum]) -> list[str]:
    """The numbers of a coded column."""
    listed = ", ".join(f"{code.value} `{code.name}`" for code in codes)
    return [f"### {codes.__name__}", "", listed + ".", ""]


def describe_flags(holder: type, title: str, what: str = "bit") -> list[str]:
    """The bits of a flags column, or the values of a coded one."""
    lines = [f"### {title}", "", f"| {what} | name | meaning |", "|---|---|---|"]
    for name, meaning in FLAG_MEANINGS[holder.__name__].items():
        lines.append(f"| {getattr(holder, name)} | `{name}` | {meaning} |")
    return [*lines, ""]


def render_columns() -> str:
    """The page on columns."""
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
        if table.name == "scalars":
            lines += describe_flags(ScalarFlag, "scalars.flags")
        if table.name == "collectives":
            lines += describe_flags(OperationFlag, "collectives.flags")
            for codes in (Kind, Outcome, EndSource):
                lines += describe_codes(codes)
        if table.name == "waits":
            lines += describe_flags(WaitSource, "waits.source", "value")
        if table.name == "operation_notes":
            lines += describe_flags(NoteCode, "operation_notes.code", "value")
        if table.name == "actions":
            lines += describe_flags(ActionFlag, "actions.flags")
            kinds = ", ".join(f"{code} `{kind}`" for code, kind in enumerate(ACTION_KINDS))
            lines += ["### ACTION_KINDS", "", kinds + ".", ""]
        if table.name == "hardware":
            lines += describe_flags(ClockLimit, "hardware.clock_limits")
    lines += ["## Built-in names", "", "The same ids in every rank; a program's own names begin at"]
    lines += [f"{FIRST_CUSTOM_NAME_ID}.", "", "| id | name | meaning |", "|---|---|---|"]
    lines += [f"| {BUILTIN_NAMES[role.name]} | `{role.name}` | {role.meaning} |" for role in ROLES]
    for name, columns in (
        ("ranks", RANK_COLUMNS),
        ("names", NAME_COLUMNS),
        ("groups", GROUP_COLUMNS),
    ):
        lines += ["", f"## {name} (SQL only)", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column}` | {kind} | {meaning} |" for column, kind, meaning in columns]
    return "\n".join(lines) + "\n"


def render_rule_index() -> str:
    """The list of all rules, by subject."""
    lines = [
        "# Rules",
        "",
        "Generated from the docstrings in `src/meshscope/diagnose/rules` by `docs/generate.py`; do "
        "not edit. How rules and findings work: [diagnosis.md](../diagnosis.md).",
        "",
    ]
    for letters, subject in SUBJECTS.items():
        codes = sorted(code for code in RULES if code.startswith(letters))
        if not codes:
            continue
        lines += [f"## {letters}: {subject}", "", "| rule | severity | what |", "|---|---|---|"]
        lines += [
            f"| [{code} {RULES[code].name}]({code}.md) | {describe_severities(RULES[code])} | "
            f"{describe(RULES[code])} |"
            for code in codes
        ]
        lines += [""]
    lines += ["## What became of other monitors' rules", ""]
    lines += ["| rule | here | difference |", "|---|---|---|"]
    lines += [
        f"| {one.tool} `{one.rule}` | {', '.join(one.codes) or 'none'} | {one.difference} |"
        for one in COUNTERPARTS
    ]
    return "\n".join(lines) + "\n"


def render_glossary() -> str:
    """The page on words."""
    pages = "[report.md](report.md), [budget.md](budget.md), [pipeline.md](pipeline.md)"
    lines = ["# Glossary", "", f"{INTRODUCTION} Pages with formulas: {pages}."]
    lines += [
        "",
        "Generated from `src/meshscope/report/glossary.py`; `meshscope glossary` shows it.",
    ]
    for title, entries in GLOSSARY.items():
        lines += ["", f"## {title}", "", "| word | meaning | unit and clock |", "|---|---|---|"]
        lines += [f"| {one.word} | {one.meaning} | {one.unit} |" for one in entries]
    return "\n".join(lines) + "\n"


def render_pages() -> dict[Path, str]:
    """Every generated page and its text."""
    pages = {DOCS / "columns.md": render_columns(), DOCS / "glossary.md": render_glossary()}
    pages[DOCS / "api.md"] = render_api()
    pages[DOCS / "rules" / "README.md"] = render_rule_index()
    for code, rule in RULES.items():
        pages[DOCS / "rules" / f"{code}.md"] = render_page(rule)
    schemas = {
        **render_schemas(),
        **render_schema(),
        **render_runs_schema(),
        **render_openapi_file(),
    }
    pages.update({DOCS / "schemas" / name: text for name, text in schemas.items()})
    return pages


def main() -> int:
    """Writes or checks the pages."""
    pages = render_pages()
    found = [*(DOCS / "rules").glob("*.md"), *(DOCS / "schemas").glob("*.json")]
    extra = [page for page in found if page not in pages]
    if "--check" not in sys.argv[1:]:
        for folder in {page.parent for page in pages}:
            folder.mkdir(exist_ok=True)
        for page in extra:
            page.unlink()
        for page, text in pages.items():
            page.write_text(text, encoding="utf-8")
        return 0
    stale = [
        page
        for page, text in pages.items()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    for page in sorted([*stale, *extra]):
        sys.stderr.write(f"{page.name} is not current; run python docs/generate.py\n")
    return 1 if stale or extra else 0


if __name__ == "__main__":
    sys.exit(main())
