"""Reports of recorded runs, as text and as parsed JSON."""

import json
from pathlib import Path
from typing import Any

from meshscope.analyze.study import Study
from meshscope.diagnose.runner import Diagnosis
from meshscope.report.contents import ALL, list_sections
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.document import encode_report
from meshscope.report.run.report import Detail, Report
from meshscope.report.screen import Screen
from meshscope.store.read.run import open_run


def report_of(
    path: Path, *, warmup: int | None = None, diagnosis: Diagnosis | None = None
) -> Report:
    """The report of a run's last attempt."""
    run = open_run(path)
    study = Study(run.last_attempt, warmup_steps=warmup)
    return Report(run=run, study=study, diagnosis=diagnosis)


def render_report(report: Report, screen: Screen | None = None, **detail: Any) -> str:
    """All sections as text."""
    return render_terminal(list_sections(report, Detail(**detail), (ALL,)), screen or Screen())


def document_of(report: Report) -> dict[str, Any]:
    """The JSON document, parsed; it may hold nothing that JSON does not know."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    parsed: dict[str, Any] = json.loads(encode_report(report), parse_constant=refuse)
    return parsed
