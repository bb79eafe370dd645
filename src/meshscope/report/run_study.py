"""The Python API of a report: `meshscope.study(path)`.

It opens a run or traces and gives the content of `meshscope report` as Python values: findings, the
budget, tables, and the report itself. Everything is computed on first use, and once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshscope.analyze.rank.step_choice import StepChoice
from meshscope.analyze.study import Study
from meshscope.capture.profiling.rank_choice import NO_MESH, RankChoice
from meshscope.core.config.given_flops import GivenFlops, check_given
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.thresholds import Thresholds
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.foreign_rules import OWN_RULES, RuleSet, load_rules
from meshscope.diagnose.runner import Diagnosis, diagnose
from meshscope.errors import UsageError
from meshscope.ingest.kineto.trace_files import find_traces, is_trace_name
from meshscope.report.contents import list_sections
from meshscope.report.format import name_ranks
from meshscope.report.media import MARKDOWN, PAGE, Medium
from meshscope.report.render.page import render_fragment
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Section
from meshscope.report.sections.run.first_screen import MORE
from meshscope.report.tables import REPORT_TABLES, StudyTable, build_table
from meshscope.store.read.columns import ProblemKind
from meshscope.store.read.files import fetch_below, find_files, is_file, is_folder
from meshscope.store.read.rank_ranges import RankRanges
from meshscope.store.read.run import Attempt, Run, is_run_directory, open_run
from meshscope.store.remote.mirror import open_place
from meshscope.store.schema import TABLES

if TYPE_CHECKING:
    from meshscope.hang.hang import Hang
    from meshscope.report.screen import Screen


def study(
    path: str | PathLike[str],
    *,
    attempt: int | None = None,
    warmup_steps: int | None = None,
    ranks: str | None = None,
    flops_per_step: float | None = None,
    peak_tflops: float | None = None,
    rules: Sequence[str | PathLike[str]] = (),
) -> "RunStudy":
    """Opens a run directory, a trace of torch.profiler, or a folder with traces of one job; also by
    a URL, such as `s3://bucket/run`.

    `attempt` counts launches of the job from 0; the default is the last. `warmup_steps` is the
    number of first steps to leave out of statistics; the default is 1 if more than 3 finished.
    `ranks` are those to look at (`0,3-5`, `stages`, `dp0.tp0`); what compares ranks then compares
    only these.
    `flops_per_step` (of the whole job) and `peak_tflops` (of one device, dense) give MFU, and stand
    above what was recorded.
    `rules` are Python files with rules of your own, which are run.
    """
    flops = check_given(flops_per_step, peak_tflops)
    if warmup_steps is not None and warmup_steps < 0:
        raise UsageError(f"warmup_steps is {warmup_steps}; it takes 0 or more")
    run = _open(open_place(path))
    if attempt is not None and not 0 <= attempt < len(run.attempts):
        raise UsageError(f"{path} has no attempt {attempt}; it has {len(run.attempts)}, from 0 on")
    chosen = run.last_attempt if attempt is None else run.attempts[attempt]
    chosen = chosen if ranks is None else choose_ranks(chosen, ranks)
    rule_set = load_rules([Path(file) for file in rules])
    return RunStudy(run, chosen, warmup_steps=warmup_steps, flops=flops, rule_set=rule_set)


def choose_ranks(attempt: Attempt, text: str) -> Attempt:
    """The attempt as if only some ranks had recorded; UsageError if none is chosen."""
    choice = RankChoice.parse(text)
    layout = known(attempt.layout)
    ranks = {rank: one for rank, one in attempt.ranks.items() if choice.has(rank, layout)}
    if not ranks:
        there = name_ranks(attempt.ranks)
        mesh = f", and {NO_MESH}" if choice.needs_mesh and layout is None else ""
        raise UsageError(f"{text!r} chooses none of the recorded ranks ({there}{mesh})")
    return replace(
        attempt,
        ranks=ranks,
        missing_ranks=RankRanges(()),
        problems=tuple(
            one
            for one in attempt.problems
            if one.kind is not ProblemKind.MISSING_RANK and (one.rank is None or one.rank in ranks)
        ),
    )


class RunStudy:
    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        *,
        warmup_steps: int | None = None,
        thresholds: Thresholds | None = None,
        flops: GivenFlops | None = None,
        rule_set: RuleSet = OWN_RULES,
        step_choice: StepChoice | None = None,
    ) -> None:
        self.run = run
        self.study = Study(attempt, warmup_steps=warmup_steps, flops=flops, step_choice=step_choice)
        """All analyses, with their arrays."""
        self._thresholds = thresholds
        self._rule_set = rule_set

    @cached_property
    def diagnosis(self) -> Diagnosis:
        chosen = self._rule_set
        self.study.failures.extend(chosen.failures)
        context = Context(self.study, thresholds=self._thresholds)
        return diagnose(context, rules=chosen.rules, sources=chosen.sources)

    @cached_property
    def hang(self) -> "Hang | None":
        """What holds the job up, without asking processes for their stacks; None where every rank
        wrote an end."""
        attempt = self.study.attempt
        if attempt.is_from_traces or all(rank.closing is not None for rank in attempt):
            return None
        from meshscope.hang.hang import diagnose_hang  # most runs ended
        from meshscope.hang.processes import this_machine

        return diagnose_hang(attempt, this_machine(), asks_stacks=False)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings, the most urgent first."""
        return self.diagnosis.findings

    @property
    def budget(self) -> dict[str, float] | Unavailable:
        """Nanoseconds per rank and step, by line of the budget."""
        budget = self.study.budget
        if isinstance(budget, Unavailable):
            return budget
        count = max(budget.num_rank_steps, 1)
        totals = zip(budget.lines, budget.total_ns().tolist(), strict=True)
        return {line.name: total / count for line, total in totals}

    def table(self, name: str) -> StudyTable:
        """A table of all ranks as numpy columns: one that was recorded (`rank` comes first), or one
        of the report (`findings`, `budget`, `matches`, …). `to_pandas`, `to_polars` and `to_arrow`
        of it need their packages."""
        if name in REPORT_TABLES:
            made = build_table(name, self.study, lambda: self.findings)
            if isinstance(made, Unavailable):
                raise UsageError(f"this run has no table {name}: {made.reason}")
            return made
        if name not in TABLES:
            there = ", ".join((*TABLES, *REPORT_TABLES))
            raise UsageError(f"there is no table {name}; there are {there}")
        tables = {recording.rank: recording.read(name) for recording in self.study.attempt}
        names = [column.name for column in TABLES[name].columns]
        counts = [len(columns[names[0]]) for columns in tables.values()]
        return StudyTable(
            {
                "rank": np.repeat(list(tables), counts),
                **{name: np.concatenate([one[name] for one in tables.values()]) for name in names},
            }
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the first screen, without a script."""
        return self.report()._repr_html_()

    def report(self, *, with_diagnosis: bool = True, detail: Detail | None = None) -> "RunReport":
        """What `meshscope report` shows."""
        diagnosis = self.diagnosis if with_diagnosis else None
        report = Report(run=self.run, study=self.study, diagnosis=diagnosis, hang=self.hang)
        return RunReport(report, detail)


class RunReport:
    """A report and its output formats. Names select sections; without any, the first screen."""

    def __init__(self, report: Report, detail: Detail | None = None) -> None:
        self.content = report
        self._detail = detail or Detail()

    @property
    def is_complete(self) -> bool:
        """Every rank is there, finished and undamaged, and no error was caught."""
        return self.content.study.health.is_complete

    def sections(self, *names: str) -> list[Section]:
        """The content without a medium."""
        return list_sections(self.content, self._detail, names)

    def _without_hints(self, *names: str) -> list[Section]:
        """Without the section on other options, which does not help the reader of a file."""
        return [section for section in self.sections(*names) if section.key != MORE]

    def to_text(self, *names: str, screen: "Screen | None" = None) -> str:
        """Terminal text, 100 columns wide and without colours unless `screen` says otherwise."""
        from meshscope.report.render.terminal import render_terminal  # Rich is not needed for JSON
        from meshscope.report.screen import Screen

        return render_terminal(self.sections(*names), screen or Screen()).lstrip("\n")

    def to_html(self, *names: str) -> str:
        """A self-contained page without scripts."""
        return self.write(PAGE, *names)

    def _repr_html_(self) -> str:
        """The same as an element of a notebook."""
        return render_fragment(self._without_hints())

    def to_markdown(self, *names: str) -> str:
        """For a comment or a job's summary."""
        return self.write(MARKDOWN, *names)

    def write(self, medium: Medium, *names: str) -> str:
        """In any medium of `report.media`."""
        return medium.render(self._without_hints(*names), f"Report of {self.content.facts.path}")

    def to_json(self) -> str:
        """The document that docs/schemas/meshscope-report.schema.json describes."""
        from meshscope.report.run.document import encode_report

        return encode_report(self.content)


def _open(path: Path) -> Run:
    fetch_below(path)
    is_trace = is_file(path) and is_trace_name(path)
    if not is_trace and not (is_folder(path) and not is_run_directory(path) and _has_traces(path)):
        return open_run(path)
    return open_traces(find_traces([path]), path)


def open_traces(files: list[Path], path: Path) -> Run:
    """Traces as a run, which is named by `path`."""
    from meshscope.ingest.kineto.kineto import read_trace
    from meshscope.ingest.traces.trace_recording import record_trace
    from meshscope.ingest.traces.trace_run import MAX_SPANS, make_run

    max_spans = max(MAX_SPANS // len(files), 1000)
    recordings = [record_trace(read_trace(file), max_spans=max_spans) for file in files]
    return make_run(recordings, path).run


def _has_traces(folder: Path) -> bool:
    return any(is_trace_name(file) for file in find_files(folder, "**/*.json*"))
