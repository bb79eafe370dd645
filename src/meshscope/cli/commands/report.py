"""`meshscope report`: explains one attempt of a run, for people or as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from meshscope.cli.locate import open_located, pick_attempt
from meshscope.cli.options import (
    attempt_option,
    check_redact,
    engine_option,
    flops_options,
    page_options,
    warmup_option,
)
from meshscope.cli.page_files import write_pages
from meshscope.cli.places import READ, WRITE_FILE
from meshscope.cli.terminal_screen import choose_screen, tell_work, write_file
from meshscope.core.config.given_flops import check_given
from meshscope.core.unit_text import plural
from meshscope.core.verdict.severity import Severity, parse_severity
from meshscope.core.verdict.thresholds import choose_thresholds
from meshscope.diagnose.foreign_rules import OWN_RULES, load_rules
from meshscope.diagnose.registry import list_thresholds
from meshscope.diagnose.runner import Diagnosis
from meshscope.errors import UsageError
from meshscope.report.contents import SECTIONS
from meshscope.report.media import MEDIA, PAGE, find_medium
from meshscope.report.run.report import Detail
from meshscope.report.run_study import RunReport, RunStudy, choose_ranks

if TYPE_CHECKING:
    from meshscope.report.screen import Screen

_EXIT_FINDING = 7
_JSON = "json"
_FORMS = ", ".join(f"{medium.words} (.{medium.suffixes[0]})" for medium in MEDIA)


@click.command("report", short_help="Explain a recorded run.")
@click.argument("run", type=READ)
@click.option("--json", "as_json", is_flag=True, help="Write the report as one JSON document.")
@click.option(
    "-o",
    "--output",
    type=WRITE_FILE,
    help=f"Write to this file: {_FORMS}, JSON (.{_JSON}), otherwise text.",
)
@page_options
@click.option(
    "--section",
    "section_names",
    multiple=True,
    type=click.Choice(list(SECTIONS)),
    metavar="NAME",
    help=f"Show this section; any number of times. One of {', '.join(SECTIONS)}.",
)
@click.option("--all", "shows_all", is_flag=True, help="Show every section.")
@click.option(
    "--explain", is_flag=True, help="Show findings in full: evidence and how sure they are."
)
@attempt_option
@warmup_option(" of statistics")
@engine_option
@flops_options
@click.option("--all-ranks", is_flag=True, help="Show every rank, in order of rank.")
@click.option(
    "--ranks",
    metavar="TEXT",
    help="Look at these ranks only: 0,3-5, stages, dp0.tp0. Without findings, which need all.",
)
@click.option(
    "--communication",
    is_flag=True,
    help="Show the section on communication in full: every kind, rank, size, pair and clock.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 unless every rank is there, finished and undamaged, without an error.",
)
@click.option("--no-diagnosis", is_flag=True, help="Leave out findings, budget and pipeline.")
@click.option(
    "--fail-on",
    type=click.Choice([severity.word for severity in Severity]),
    help="Exit with 7 if a finding has this severity or a higher one.",
)
@click.option(
    "--thresholds",
    "thresholds_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A TOML file whose table [thresholds] changes the limits of rules.",
)
@click.option(
    "--threshold",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change one limit; may be given several times. `meshscope rules CODE` lists them.",
)
@click.option(
    "--rules",
    "rules_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Python file with rules of your own, which is run; may be given several times.",
)
@click.pass_context
def command(
    context: click.Context,
    *,
    run: Path,
    as_json: bool,
    output: Path | None,
    page: Path | None,
    redact: bool,
    section_names: tuple[str, ...],
    shows_all: bool,
    explain: bool,
    attempt_index: int | None,
    warmup_steps: int | None,
    flops_per_step: str | None,
    peak_tflops: str | None,
    all_ranks: bool,
    ranks: str | None,
    communication: bool,
    strict: bool,
    no_diagnosis: bool,
    fail_on: str | None,
    thresholds_file: Path | None,
    assignments: tuple[str, ...],
    rules_files: tuple[Path, ...],
) -> None:
    """Shows what to change about RUN and where its time went.

    RUN is a run directory, or a folder with one run below it, or traces of torch.profiler; the run
    may still be recording. Exit codes: 0 fine, 1 only with --strict and a recording that has
    problems, 2 usage, 3 the run cannot be read, 7 only with --fail-on and such a finding.
    """
    if no_diagnosis and (fail_on or thresholds_file or assignments or rules_files):
        raise UsageError(
            "--no-diagnosis makes no findings; remove it, or --fail-on, --rules and thresholds"
        )
    if ranks is not None and (fail_on or thresholds_file or assignments or rules_files):
        raise UsageError(
            "--ranks makes no findings; remove it, or --fail-on, --rules and thresholds"
        )
    rule_set = OWN_RULES if no_diagnosis or ranks else load_rules(rules_files)
    thresholds = choose_thresholds(
        list_thresholds(rule_set.rules), file=thresholds_file, assignments=assignments
    )
    flops = check_given(flops_per_step, peak_tflops)
    with tell_work("reading"):
        opened = open_located(run)
        attempt = pick_attempt(opened, attempt_index)
        attempt = attempt if ranks is None else choose_ranks(attempt, ranks)
    study = RunStudy(
        opened,
        attempt,
        warmup_steps=warmup_steps,
        thresholds=thresholds,
        flops=flops,
        rule_set=rule_set,
    )
    detail = Detail(
        shows_all_ranks=all_ranks,
        shows_all_communication=communication or "communication" in section_names,
        explains=explain,
        ranks=ranks,
        directory=Path.cwd(),
    )
    names = section_names or ("communication",) * communication or ("ranks",) * all_ranks
    names = ("all",) if shows_all else names
    suffix = _JSON if as_json else "" if output is None else output.suffix.lower().lstrip(".")
    pages = [page] if page is not None else []
    is_page = output is not None and suffix in PAGE.suffixes and not names
    pages += [output] if is_page and output is not None else []
    check_redact(pages, redact=redact)
    with tell_work(f"explaining {plural(len(attempt.ranks), 'rank')}"):
        report = study.report(with_diagnosis=not (no_diagnosis or ranks), detail=detail)
        write_pages(report.content, pages, is_redacted=redact)
        screen = choose_screen(context) if output is None else None
        text = "" if is_page else _render(report, names, suffix, screen)
    if output is None:
        click.echo(text, nl=False, color=True)  # colours were decided when the text was made
    elif not is_page:
        write_file(text, output)
    if strict and not report.is_complete:
        context.exit(1)
    if fail_on is not None and _is_as_bad_as(study.diagnosis, fail_on):
        context.exit(_EXIT_FINDING)


def _is_as_bad_as(diagnosis: Diagnosis, word: str) -> bool:
    worst = diagnosis.worst
    return worst is not None and worst >= parse_severity(word)


def _render(report: RunReport, names: tuple[str, ...], suffix: str, screen: "Screen | None") -> str:
    """In the form that a file's suffix names, else as text."""
    if suffix == _JSON:
        return report.to_json()
    medium = find_medium(suffix)
    if medium is None:
        return report.to_text(*names, screen=screen)
    return report.write(medium, *names)
