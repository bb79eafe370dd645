"""The sections of a report, in order: each is a function of the report and of how much is shown.

A section is added by writing its function in `sections/` and naming it here.
"""

from collections.abc import Callable, Collection

from meshscope.core.unavailable import Unavailable
from meshscope.errors import UsageError
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import Line, Section, Tone, missing_section
from meshscope.report.sections.run.budget import show_budget
from meshscope.report.sections.run.findings import show_findings
from meshscope.report.sections.run.first_screen import list_first_screen
from meshscope.report.sections.run.hardware import show_hardware
from meshscope.report.sections.run.head import show_run, show_verdict
from meshscope.report.sections.run.ledger import show_ledger
from meshscope.report.sections.run.memory import show_memory
from meshscope.report.sections.run.phases import show_peers, show_phases
from meshscope.report.sections.run.pipeline import show_pipeline
from meshscope.report.sections.run.prediction import show_prediction
from meshscope.report.sections.run.program import show_logged, show_settings
from meshscope.report.sections.run.ranks import show_ranks, show_time
from meshscope.report.sections.run.recording import show_problems, show_recording
from meshscope.report.sections.run.steps import name_left_out, show_steps, show_throughput
from meshscope.report.sections.run.totals import show_totals
from meshscope.report.sections.run.traces import show_traces
from meshscope.report.sections.run.training import show_training


def _show_communication(report: Report, detail: Detail) -> Section | None:
    """For several ranks it also says that none was recorded."""
    facts = report.communication
    if isinstance(facts, Unavailable):
        reason = form.clean_text(facts.reason)
        is_expected = report.facts.num_ranks > 1
        return missing_section("communication", "Communication", reason) if is_expected else None
    from meshscope.report.sections.run.communication import describe_communication

    return describe_communication(
        facts,
        detail,
        without=name_left_out(report),
        has_profiled=report.study.steps.num_profiled > 0,
    )


ALL = "all"
SECTIONS: dict[str, Callable[[Report, Detail], Section | None]] = {
    "verdict": show_verdict,
    "findings": show_findings,
    "run": show_run,
    "phases": show_phases,
    "budget": show_budget,
    "ledger": show_ledger,
    "prediction": show_prediction,
    "pipeline": show_pipeline,
    "steps": show_steps,
    "throughput": show_throughput,
    "training": show_training,
    "logged": show_logged,
    "totals": show_totals,
    "peers": show_peers,
    "communication": _show_communication,
    "time": show_time,
    "ranks": show_ranks,
    "memory": show_memory,
    "hardware": show_hardware,
    "settings": show_settings,
    "traces": show_traces,
    "recording": show_recording,
    "problems": show_problems,
}


def list_sections(report: Report, detail: Detail, names: Collection[str] = ()) -> list[Section]:
    """The named sections in their order here, or `all` that have something to say; else the first
    screen."""
    if not names:
        return list_first_screen(report, detail, [name for name in SECTIONS if name != "verdict"])
    if unknown := set(names) - set(SECTIONS) - {ALL}:
        raise UsageError(f"there is no section {min(unknown)}; there are {', '.join(SECTIONS)}")
    if ALL in names:
        found = (show(report, detail) for show in SECTIONS.values())
        return [section for section in found if section is not None]
    return [
        show(report, detail) or _show_nothing(report, detail, name)
        for name, show in SECTIONS.items()
        if name in names
    ]


def _show_nothing(report: Report, detail: Detail, name: str) -> Section:
    """A section that was asked for and has nothing to say, with the reason."""
    pipeline = report.study.pipeline
    if report.diagnosis is None and name in ("findings", "budget", "pipeline"):
        text = f"left out by {'--no-diagnosis' if detail.ranks is None else '--ranks'}"
    elif name == "pipeline" and isinstance(pipeline, Unavailable):
        text = form.clean_text(pipeline.reason)
    else:
        text = "none"
    return Section(key=name, title=name.capitalize(), parts=(Line(text, Tone.QUIET),))
