"""Every name that docs/migration.md sends a user to exists: a name that vanishes fails here."""

import dataclasses
import inspect
import re
import runpy
import shlex
import typing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from meshscope.capture import default
from meshscope.capture.config import RecorderConfig
from meshscope.cli import COMMANDS, main
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.schedule_builders import BUILDERS
from meshscope.diagnose.registry import RULES
from meshscope.report.contents import SECTIONS
from meshscope.store.schema import BUILTIN_NAMES, TABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
NUM_ROWS = {"000": 31, "001": 32, "002": 72, "003": 96, "004": 30}
"""Rows per founding document: none may be dropped."""

NAMED = re.compile(r"(?:\b(key|rule|section|column|phase|variable|file) )?`([^`]+)`")
SOURCE = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]


class Row(NamedTuple):
    document: str
    old: str
    here: str
    status: str


def read_rows() -> list[Row]:
    rows, document = [], ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            document = line[3:6]
        elif line.startswith("| ") and not line.startswith("| old "):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert len(cells) == 4, line
            rows.append(Row(document, cells[0], cells[2], cells[3]))
    return rows


ROWS = read_rows()


def find_missing(text: str) -> list[str]:
    """The names in `text` that do not exist."""
    return [named for kind, named in NAMED.findall(text) if not does_exist(kind, named)]


def does_exist(kind: str, named: str) -> bool:
    if kind == "key":
        return has_key(*(part.strip() for part in named.split("=")))
    if kind == "column":
        table, _, column = named.partition(".")
        return table in TABLES and any(one.name == column for one in TABLES[table].columns)
    if kind in ("variable", "file"):
        return any(f'"{named}' in source or f"'{named}" in source for source in SOURCE)
    if kind:
        return named in {"rule": RULES, "section": SECTIONS, "phase": BUILTIN_NAMES}[kind]
    if named.startswith("meshscope."):
        return has_attribute(named)
    return not named.startswith("meshscope ") or has_command(named)


def has_attribute(named: str) -> bool:
    path, _, arguments = named.partition("(")
    parts = path.split(".")
    found: Any = None
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("meshscope"):  # it belongs to a package not there
                return defines(".".join(parts[:-1]), parts[-1])
            continue
        break
    for part in parts[length:]:
        if part in getattr(found, "__dataclass_fields__", ()):
            return True
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    wanted = re.findall(r"(\w+)=", arguments)
    if not wanted:
        return True
    known = set(inspect.signature(found).parameters)
    return set(wanted) <= known | {field.name for field in dataclasses.fields(RecorderConfig)}


def defines(module: str, name: str) -> bool:
    """Whether a module that cannot be imported here has a class or function of that name."""
    found = find_spec(module)
    text = Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
    return re.search(rf"^(class|def) {name}\b", text, flags=re.MULTILINE) is not None


def has_command(named: str) -> bool:
    words = shlex.split(named)[1:]
    flags = [word for word in words if word.startswith("-")]
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        return False
    command: click.Command = main
    if not words[0].startswith("-"):
        found = main.get_command(click.Context(main), words[0])
        assert found is not None
        command = found
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    sections = [words[i + 1] for i, word in enumerate(words) if word == "--section"]
    return set(flags) <= known and set(sections) <= set(SECTIONS)


def has_key(key: str, value: str = "") -> bool:
    table, _, name = key.rpartition(".")
    config: Any = TrainConfig
    if table:
        config = ModelConfig if table == "model" else typing.get_type_hints(TrainConfig).get(table)
    if config is None or name not in config.__dataclass_fields__:
        return False
    if not value:
        return True
    choices = typing.get_args(typing.get_type_hints(config)[name])
    return value.strip('"') in (choices or BUILDERS)


@pytest.mark.parametrize("document", NUM_ROWS)
def test_no_row_of_a_document_is_dropped(document):
    rows = [row for row in ROWS if row.document == document]
    assert len(rows) == NUM_ROWS[document]
    assert len({row.old for row in rows}) == len(rows)


def test_every_row_has_a_status():
    for row in ROWS:
        assert row.status == "works" or re.fullmatch(r"none: .{40,}", row.status), row
        assert row.status.startswith("none: ") or "`" in row.here, row


def test_every_name_of_a_working_row_exists():
    missing = {row.old: find_missing(row.here) for row in ROWS if row.status == "works"}
    assert {old: names for old, names in missing.items() if names} == {}


def test_the_names_in_reasons_exist():
    reasons = [row.status for row in ROWS if row.status.startswith("none: ")]
    assert [name for reason in reasons for name in find_missing(reason)] == []


def test_the_moved_loop_runs(tmp_path, monkeypatch):
    (snippet,) = re.findall(r"<!-- runnable -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "program.py").write_text(snippet, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default, "_default", None)
    runpy.run_path("program.py", run_name="__main__")


@pytest.mark.parametrize(
    "named",
    [
        "`meshscope.Recorder.gone`",
        "`meshscope.gone.Thing`",
        "`meshscope.start(gone=)`",
        "`meshscope gone`",
        "`meshscope report --gone`",
        "`meshscope report --section gone`",
        "key `parallel.gone`",
        "key `gone.dp`",
        'key `memory.strategy = "gone"`',
        "rule `XX999`",
        "section `gone`",
        "column `steps.gone`",
        "phase `gone`",
        "variable `MESHSCOPE_GONE`",
        "file `gone.json`",
    ],
)
def test_a_name_that_vanished_is_found_out(named):
    assert find_missing(named)
