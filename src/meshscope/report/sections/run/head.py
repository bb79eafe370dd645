"""The head of the report: what is wrong in one sentence each, and what was recorded."""

from meshscope.analyze.rank.steps import JobStepSummary
from meshscope.core.unavailable import Unavailable, known, need
from meshscope.report import format as form
from meshscope.report.run.report import Detail, PhaseShare, Report
from meshscope.report.section import Blank, Cell, Headline, Part, Section, Tone, make_facts
from meshscope.report.sections.hang_words import make_sentence
from meshscope.report.sections.run.findings import describe_worst
from meshscope.store.read.columns import ProblemKind

_MAX_MORE_CLUES = 2
"""Clues named after the first."""
_MAX_HOSTS = 4
_MAX_SAME_RATIO = 1.02
"""Of a step's time: a period up to here is said once."""
OPEN = "running or killed"
"""State of a rank without a closing line."""
_NAMED_KINDS = (
    ProblemKind.MISSING_RANK,
    ProblemKind.SHORT_RANK,
    ProblemKind.DROPPED,
    ProblemKind.DUPLICATE_RANK,
    ProblemKind.OVERLAPPING_STEPS,
)
"""Problems with a separate clause."""


def show_verdict(report: Report, detail: Detail) -> Section:
    """The worst finding, where the time went, and warnings."""
    lines = [Headline(describe_run(report))]
    worst = "" if report.diagnosis is None else describe_worst(report.diagnosis)
    if worst:
        lines.insert(0, Headline(worst, Tone.CRITICAL))
    if report.hang is not None and report.hang.is_stuck:
        lines.insert(0, Headline(make_sentence(report.hang), Tone.CRITICAL))
    lines += [Headline(f"! {alarm}", Tone.ALARM) for alarm in list_alarms(report)]
    clue = _describe_clues(report)
    if clue and report.diagnosis is None:
        lines.append(Headline(f"Clue: {clue}.", Tone.NOTICE))
    return Section(key="verdict", title="", parts=tuple(lines))


def list_alarms(report: Report) -> list[str]:
    """Sentences about what makes the numbers doubtful."""
    warning = _describe_incompleteness(report)
    what = "set of traces" if report.attempt.is_from_traces else "recording"
    alarms = [f"The {what} is not complete: {warning}."] if warning else []
    if not isinstance(report.communication, Unavailable):
        from meshscope.report.sections.run.communication import describe_alarms

        alarms += describe_alarms(report.communication)
    return alarms


def describe_run(report: Report) -> str:
    steps, facts = report.study.steps, report.facts
    ranks = form.plural(facts.num_ranks, "rank")
    layout = form.describe_degrees(report.layout.degrees)
    where = f"{ranks} ({layout})" if layout else ranks
    if isinstance(steps.time, Unavailable):
        recorded = form.duration(facts.longest_wall_ns)
        return f"{where}, {recorded} recorded; no step to measure: {steps.time.reason}."
    opening = f"{form.plural(steps.num_steps, 'step')} on {where}, "
    shares = [phase for phase in report.phases if not phase.is_unattributed]
    rest = [phase for phase in report.phases if phase.is_unattributed]
    parts = [f"{_share(one)} of it in {form.clean_text(one.phase, 40)}" for one in shares[:1]]
    parts += [f"{_share(one)} unattributed" for one in rest]
    return f"{opening}{_describe_pace(steps)}; {', '.join(parts)}."


def _describe_pace(steps: JobStepSummary) -> str:
    """The period is the pace; a step's own time is it, where little is between steps."""
    time, interval = need(steps.time), known(steps.interval)
    own = f"median step {form.duration(time.median_ns)}"
    if interval is None or interval.median_ns <= _MAX_SAME_RATIO * time.median_ns:
        return own
    return f"one every {form.duration(interval.median_ns)} (median); {own}"


def _share(phase: PhaseShare) -> str:
    return form.or_dash(phase.ratio, form.ratio)


def _describe_clues(report: Report) -> str:
    """Ranks that stand out among their peers, in a sentence; empty if none does."""
    if not report.study.clues:
        return ""
    first, *more = report.study.clues
    others = "the others" if first.num_peers > 1 else "its only peer"
    if 1 < first.num_peers + 1 < report.facts.num_ranks and report.layout.degrees:
        others = "its dp peers" if first.num_peers > 1 else "its only dp peer"
    text = (
        f"rank {first.rank} spends {form.duration(first.median_ns)} in "
        f"{form.clean_text(first.phase, 40)}, {others} {form.duration(first.peers_median_ns)} "
        f"(median)"
    )
    also = [
        f"rank {clue.rank} in {form.clean_text(clue.phase, 40)} "
        f"({form.duration(clue.median_ns)}, {form.duration(clue.peers_median_ns)})"
        for clue in more[:_MAX_MORE_CLUES]
    ]
    if also:
        text += f"; also {', '.join(also)}"
    if len(more) > _MAX_MORE_CLUES:
        text += f" and {len(more) - _MAX_MORE_CLUES} more (see --json)"
    if not report.layout.degrees:
        text += "; the layout is not known, so they may do different work"
    return text


def _describe_incompleteness(report: Report) -> str:
    """What is wrong with the recording in a few words; empty if nothing is."""
    health = report.study.health
    parts = []
    if health.errors:
        parts.append(f"{form.plural(health.num_errors, 'error')} caught")
    if health.num_missing_ranks:
        parts.append(f"{form.plural(health.num_missing_ranks, 'rank')} missing")
    if health.unfinished_ranks:
        parts.append(f"{form.plural(len(health.unfinished_ranks), 'rank')} without an end")
    if health.short_ranks:
        parts.append(f"{form.name_ranks(health.short_ranks)} with fewer steps")
    if num_dropped := known(health.num_dropped):
        parts.append(f"{form.plural(num_dropped, 'record')} lost")
    shared = {p.rank for p in health.problems if p.kind is ProblemKind.DUPLICATE_RANK}
    if shared:
        parts.append(
            f"several processes were {form.name_ranks(tuple(r for r in shared if r is not None))}"
        )
    overlapping = {p.rank for p in health.problems if p.kind is ProblemKind.OVERLAPPING_STEPS}
    if overlapping:
        who = form.name_ranks(tuple(sorted(r for r in overlapping if r is not None)))
        parts.append(f"{who} with steps that overlap in time")
    others = sum(problem.kind not in _NAMED_KINDS for problem in health.problems)
    if others:
        parts.append(f"{form.plural(others, 'damaged or unreadable part')}")
    return ", ".join(parts)


def show_run(report: Report, detail: Detail) -> Section:
    facts = report.facts
    attempt = f" · attempt {facts.attempt} of {facts.num_attempts}" * (facts.num_attempts > 1)
    started = form.or_reason(facts.started_unix_ns, form.moment)
    rows: list[tuple[str, str | Cell]] = [
        ("Run", form.clean_path(facts.path) + attempt),
        ("Recorded", f"{started} · {form.duration(facts.longest_wall_ns)}"),
        ("Ranks", _describe_ranks(report, detail)),
        ("Hosts", _describe_hosts(report) or "n/a: no rank names its host"),
        ("Layout", _describe_layout(report)),
    ]
    program = _describe_program(report, detail)
    if program:
        rows.append(("Program", Cell(program, is_cut=True)))
    parts: tuple[Part, ...] = (Blank(), make_facts(rows))
    return Section(key="run", title="", parts=parts)


def _describe_hosts(report: Report) -> str:
    hosts = report.facts.hosts
    shown = [f"{form.clean_text(h.host, 40)} ({h.num_ranks})" for h in hosts[:_MAX_HOSTS]]
    more = f" and {len(hosts) - _MAX_HOSTS} more hosts" if len(hosts) > _MAX_HOSTS else ""
    return ", ".join(shown) + more


def _describe_layout(report: Report) -> str:
    layout = report.layout
    if report.facts.world_size == 1 and not layout.degrees:
        return "1 rank: nothing is split"
    source = known(layout.source)
    how = "how this is known was not recorded" if source is None else form.clean_text(source, 80)
    return form.or_reason(layout.text, lambda text: f"{form.layout(text, layout.degrees)} · {how}")


def _describe_ranks(report: Report, detail: Detail) -> str:
    facts, num_open = report.facts, len(report.study.health.unfinished_ranks)
    what = (
        "recorded"
        if detail.ranks is None
        else f"chosen (--ranks {form.clean_text(detail.ranks, 40)})"
    )
    if report.attempt.is_from_traces:
        what = "have a trace" if detail.ranks is None else what
        return f"{form.count(facts.num_ranks)} of {form.count(facts.world_size)} {what}"
    recorded = f"{form.count(facts.num_ranks)} of {form.count(facts.world_size)} {what}"
    if not num_open:
        raised = [rank.exception for rank in report.study.attempt if rank.exception is not None]
        first = form.clean_text(raised[0], 60) if raised else ""
        how = f"{form.count(len(raised))} ended with {first}" if raised else "all finished"
        return f"{recorded}, {how}"
    return f"{recorded}, {form.count(facts.num_ranks - num_open)} finished, {num_open} {OPEN}"


def _describe_program(report: Report, detail: Detail) -> str:
    facts = report.facts
    parts = []
    if facts.argv:
        words = [form.script(facts.argv[0], detail.directory), *facts.argv[1:]]
        parts.append(form.clean_text(" ".join(words), 120))
    if isinstance(facts.git_revision, str):
        dirty = " (modified)" if facts.is_git_dirty else ""
        parts.append(f"git {form.clean_text(facts.git_revision)[:9]}{dirty}")
    if isinstance(facts.torch_version, str):
        parts.append(f"torch {form.clean_text(facts.torch_version, 30)}")
    if isinstance(facts.device_name, str):
        parts.append(form.clean_text(facts.device_name, 40))
    return " · ".join(parts)
