"""Writes pages to files; their code is loaded only for that."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshscope.cli.terminal_screen import write_file

if TYPE_CHECKING:
    from meshscope.hang.hang import Hang
    from meshscope.report.run.report import Report
    from meshscope.report.sections.compare import Compared
    from meshscope.store.read.run import Attempt, Run


def write_pages(report: "Report", paths: Sequence[Path], *, is_redacted: bool) -> None:
    """The page of a run, to each of these files."""
    if paths:
        from meshscope.page.document import describe_page
        from meshscope.page.file import write_page

        text = write_page(describe_page(report), is_redacted=is_redacted)
        for path in paths:
            write_file(text, path)


def write_hang_page(
    run: "Run", attempt: "Attempt", hang: "Hang", path: Path, *, is_redacted: bool
) -> None:
    """The page of a run that somebody looked at."""
    from meshscope.report.run_study import RunStudy

    report = RunStudy(run, attempt).report().content
    write_pages(replace(report, hang=hang), [path], is_redacted=is_redacted)


def write_compare_page(
    compared: "Compared", reports: "tuple[Report, Report]", path: Path, *, is_redacted: bool
) -> None:
    from meshscope.page.document import compare_pages
    from meshscope.page.file import write_page

    write_file(write_page(compare_pages(compared, *reports), is_redacted=is_redacted), path)
