"""The page about Python: its snippets run on a run with a slow rank."""

import re
import runpy
from pathlib import Path

import pytest

from builders import Faults, make_run
from meshscope.core.layout import Layout

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SNIPPETS = re.findall(
    r"<!-- runnable -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(number, tmp_path, monkeypatch, capsys):
    make_run(
        tmp_path / "runs" / "example",
        layout=Layout(dp=4),
        num_steps=30,
        faults=Faults(slow={1: 2.0}),
    )
    (tmp_path / "program.py").write_text(SNIPPETS[number], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    assert number or "ST001 rank 1" in printed
