"""The recording itself, or the traces: what it cost, what it lost, what is damaged."""

from pathlib import Path

from meshscope.analyze.health import RecordingHealth
from meshscope.analyze.rank.overhead import Overhead
from meshscope.core.unavailable import Unavailable
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report, name_file
from meshscope.report.section import Line, Part, Section, Tone, make_facts
from meshscope.report.sections.run.phases import count_of
from meshscope.store.read.columns import Problem

MAX_NOTES = 4
_MAX_ERRORS = 4
MAX_PROBLEMS = 12


def show_recording(report: Report, detail: Detail) -> Section:
    health = report.study.health
    if report.attempt.is_from_traces:
        return _show_trace_notes(health)
    opening = form.or_reason(health.opening_cost_ns, lambda ns: f"{form.duration(ns)}, once")
    facts = [
        ("Own cost", form.or_reason(health.overhead, lambda cost: _describe_cost(cost, report))),
        ("Opening", opening),
        *_list_sampling(health.sampling_cost_ns),
        ("Errors", _describe_errors(report)),
        ("Lost records", form.or_reason(health.num_dropped, _describe_dropped)),
    ]
    if health.num_pauses:
        times = form.plural(health.num_pauses, "time")
        facts.append(("Pauses", f"recording was paused {times}"))
    if health.num_device_steps_given_up:
        given_up = form.plural(health.num_device_steps_given_up, "step")
        facts.append(("Device", f"marks of {given_up} were never reached and given up"))
    facts += _list_notes(health)
    return Section(key="recording", title="The recording itself", parts=(make_facts(facts),))


def _show_trace_notes(health: RecordingHealth) -> Section:
    """Nothing was recorded: what the profiler cost and dropped is not in its traces."""
    facts = [
        ("Cost", form.or_reason(health.overhead, str)),
        ("Lost events", form.or_reason(health.num_dropped, form.count)),
        *_list_notes(health),
    ]
    return Section(key="recording", title="The traces themselves", parts=(make_facts(facts),))


def _describe_dropped(num_dropped: int) -> str:
    return form.count(num_dropped) if num_dropped else "none"


def _list_notes(health: RecordingHealth) -> list[tuple[str, str]]:
    return [
        ("Note", f"{form.clean_text(note.text)} ({form.name_ranks(note.ranks)})")
        for note in health.notes[:MAX_NOTES]
    ]


def _list_sampling(cost_ns: int | Unavailable) -> list[tuple[str, str]]:
    if isinstance(cost_ns, Unavailable):
        return []
    return [("Samples", f"of kernels, {form.duration(cost_ns)} in all; of steps left out above")]


def _describe_cost(cost: Overhead, report: Report) -> str:
    num_rank_steps = report.study.health.num_rank_steps
    return (
        f"{_describe_loss(cost)}median {form.duration(cost.median_ns)} a step "
        f"({form.or_dash(cost.median_ratio, form.ratio)}), "
        f"p95 {form.duration(cost.p95_ns)} ({form.or_dash(cost.p95_ratio, form.ratio)}), "
        f"measured in {count_of(report, cost.num_steps, num_rank_steps)}"
        + (", opening included" if cost.is_warmup_only else "")
    )


def _describe_loss(cost: Overhead) -> str:
    """On a device: what of the host's time the job lost."""
    if not cost.has_device:
        return ""
    host = form.or_dash(cost.host_ratio, form.ratio)
    if isinstance(cost.starved_ratio, Unavailable):
        return f"at most {host} of a step ({cost.starved_ratio.reason}); host time: "
    lost = form.or_dash(cost.lost_ratio, form.ratio)
    starved = form.ratio(cost.starved_ratio)
    return f"{lost} of a step, as the device waited at {starved} of the marks; host time: "


def _describe_errors(report: Report) -> str:
    errors = report.study.health.errors
    if not errors:
        return "none caught"
    return "; ".join(
        f"{'at least ' if error.is_at_least else ''}{form.count(error.count)} in "
        f"{form.clean_text(error.site, 40)} ({form.name_ranks(error.ranks)}): "
        f"{form.clean_text(error.first_message, 100)}"
        for error in errors[:_MAX_ERRORS]
    )


def show_problems(report: Report, detail: Detail) -> Section | None:
    """Damaged and missing parts, one by one; None without any."""
    problems = report.study.health.problems
    if not problems:
        return None
    parts: list[Part] = [
        Line(describe_problem(problem, report.run.path), Tone.ALARM)
        for problem in problems[:MAX_PROBLEMS]
    ]
    if len(problems) > MAX_PROBLEMS:
        more = f"and {len(problems) - MAX_PROBLEMS} more (see --json)"
        parts.append(Line(more, Tone.QUIET))
    return Section(key="problems", title="Problems", parts=tuple(parts))


def describe_problem(problem: Problem, run_path: Path) -> str:
    where = [] if problem.rank is None else [f"rank {problem.rank}"]
    file = name_file(problem, run_path)
    if file is not None:
        where.append(form.clean_text(file, 80))
    text = form.clean_text(problem.text)
    return f"{', '.join(where)}: {text}" if where else text
