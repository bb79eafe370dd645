"""Every rule has its page, generated from its docstring, and the pages are linked."""

import re
import subprocess
import sys
from pathlib import Path

from meshscope.diagnose.registry import RULES, list_thresholds
from meshscope.diagnose.rule import HEADINGS

DOCS = Path(__file__).parents[2] / "docs"


def test_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "generate.py"), "--check"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_every_rule_has_a_page_with_every_heading() -> None:
    index = (DOCS / "rules" / "README.md").read_text(encoding="utf-8")
    for code in RULES:
        page = (DOCS / "rules" / f"{code}.md").read_text(encoding="utf-8")
        assert re.findall("^## (.*)$", page, flags=re.MULTILINE)[: len(HEADINGS)] == list(HEADINGS)
        assert f"({code}.md)" in index


def test_the_page_on_diagnosis_names_only_what_there_is() -> None:
    page = (DOCS / "diagnosis.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\b[A-Z]{2}[0-9]{3}\b", page)) <= set(RULES)
    names = {threshold.name for threshold in list_thresholds()}
    assert set(re.findall(r"--threshold (\w+)=", page)) <= names
