"""docs/cli.md names what the command line has."""

import re
from pathlib import Path

from meshscope.cli import COMMANDS
from meshscope.report.contents import SECTIONS
from meshscope.report.media import MEDIA

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def find_row(start: str) -> str:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(start))
    return row


def test_every_command_has_a_row():
    rows = re.findall(r"^\| `meshscope ([a-z]+)", PAGE, flags=re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


def test_every_section_is_named_in_order():
    named = re.findall(r"`([a-z]+)`", find_row("| `--section NAME`"))
    assert named == list(SECTIONS)


def test_every_suffix_of_a_medium_is_named():
    named = re.findall(r"`\.([a-z]+)`", find_row("| `-o`, `--output FILE`"))
    assert set(named) == {medium.suffixes[0] for medium in MEDIA} | {"json"}
