"""The first screen, in at most 40 lines: verdict, findings, where the time goes, slow ranks, and
what is not known. Everything else is in other sections.
"""

from collections.abc import Sequence

from meshscope.analyze.timeline.peers import PhaseClue
from meshscope.analyze.timeline.rank_reading import COMM_PHASE, WAIT_PHASE
from meshscope.analyze.timeline.whole_steps import is_thinned
from meshscope.core.layout import PEER_AXES
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.views.lost_steps import describe_gaps
from meshscope.report import format as form
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import (
    Blank,
    Headline,
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
    make_facts,
)
from meshscope.report.sections.hang_words import make_sentence
from meshscope.report.sections.run.findings import (
    TONES,
    describe_nothing,
    describe_price,
    describe_worst,
    show_findings,
)
from meshscope.report.sections.run.head import list_alarms
from meshscope.report.sections.run.recording import describe_problem
from meshscope.report.sections.run.training import show_training_briefly

MORE = "more"
"""Key of the section that names other options."""
MAX_FINDINGS = 3
_MAX_EVIDENCE = 60
_MAX_CHANGE = 150
"""Characters of the change; `--explain` shows all."""
_MAX_TIME_ROWS = 6
MIN_RATIO = 0.01
"""Lines of the budget below this share are combined."""
_MIN_REST_RATIO = 0.0005
"""Combined lines below this share are left out."""
MAX_SLOW_ROWS = 3
_MAX_MISSING = 4
_MAX_REASON = 160
_WAIT_PHASES = (COMM_PHASE, WAIT_PHASE)
_NO_SLOW_RANK = "no rank stands out among its peers"


def list_first_screen(report: Report, detail: Detail, names: Sequence[str]) -> list[Section]:
    """`names` are the sections that can be asked for."""
    findings = show_findings(report, detail) if detail.explains else _show_findings(report)
    found = (
        _show_verdict(report),
        findings,
        _show_time(report),
        _show_slow(report),
        show_training_briefly(report),
        _show_missing(report),
        _show_more(names),
    )
    return [section for section in found if section is not None]


def _show_verdict(report: Report) -> Section:
    lines = [Headline(_describe_pace(report), Tone.PLAIN)]
    diagnosis = report.diagnosis
    if diagnosis is not None:
        worst = describe_worst(diagnosis)
        if worst:
            lines.insert(0, Headline(worst, Tone.CRITICAL))
        elif not isinstance(report.study.step_ns, Unavailable):  # else nothing was looked at
            nothing = form.begin_sentence(describe_nothing(diagnosis))
            lines.insert(0, Headline(f"{nothing}.", Tone.STRONG))
    if report.hang is not None and report.hang.is_stuck:
        lines.insert(0, Headline(f"{make_sentence(report.hang)} (meshscope hang)", Tone.CRITICAL))
    lines += [Headline(f"! {alarm}", Tone.ALARM) for alarm in list_alarms(report)]
    return Section(key="verdict", title="", parts=tuple(lines))


def _describe_pace(report: Report) -> str:
    """`60 steps on 8 ranks (dp8), one every 186 ms (median).`"""
    steps, facts = report.study.steps, report.facts
    layout = form.describe_degrees(report.layout.degrees)
    where = form.plural(facts.num_ranks, "rank") + (f" ({layout})" if layout else "")
    step_ns = report.study.step_ns
    if isinstance(step_ns, Unavailable):
        recorded = form.duration(facts.longest_wall_ns)
        return f"{where}, {recorded} recorded; no step to measure: {step_ns.reason}."
    if steps.num_steps == 1:
        return f"1 step of {form.duration(step_ns)} on {where}."
    pace = f"one every {form.duration(step_ns)} (median)"
    return f"{_count_steps(report)} on {where}, {pace}."


def _count_steps(report: Report) -> str:
    """`60 steps`; of a very long run, with those that were thinned away."""
    steps = report.study.steps
    num_run = int(steps.step[-1] - steps.step[0]) + 1
    if num_run == steps.num_steps or not is_thinned(tuple(report.study.attempt)):
        return f"{form.count(steps.num_steps)} steps"
    return f"{form.count(num_run)} steps ({form.count(steps.num_steps)} of them kept one by one)"


def _show_findings(report: Report) -> Section | None:
    findings = () if report.diagnosis is None else report.diagnosis.findings
    urgent = [finding for finding in findings if finding.severity > Severity.LOW]
    if not urgent:
        return None
    parts: list[Part] = []
    for finding in urgent[:MAX_FINDINGS]:
        parts.append(Line(_describe_finding(finding), TONES[finding.severity]))
        parts.append(make_facts([("  Change", form.clean_text(finding.change, _MAX_CHANGE))]))
    more = len(urgent) - MAX_FINDINGS
    rest = [form.plural(more, "more finding")] if more > 0 else []
    num_low = len(findings) - len(urgent)
    rest += [f"{num_low} of low severity"] if num_low else []
    if rest:
        parts.append(Line(f"and {', '.join(rest)} (--explain)", Tone.QUIET))
    return Section(key="findings", title="Findings", parts=tuple(parts))


def _describe_finding(finding: Finding) -> str:
    price = describe_price(finding)
    saves = f": saves {price}" if price else ""
    return f"{finding.severity.word}  {finding.code}  {form.clean_text(finding.title)}{saves}"


def _show_time(report: Report) -> Section | None:
    budget = report.budget
    if budget is None or isinstance(budget, Unavailable):
        shares = [(one.phase, one.mean_ns, known(one.ratio) or 0.0) for one in report.phases]
        note = "mean of a rank's step, by phase"
    else:
        shares = [(line.name, line.mean_ns, line.ratio) for line in budget.lines]
        note = "mean of a rank's step, with the gap before it"
        if not isinstance(budget.evidence, Unavailable):
            note += f"; from {form.clean_text(budget.evidence, _MAX_EVIDENCE)}"
    shares.sort(key=lambda row: -row[2])
    rows = [row for row in shares if row[2] >= MIN_RATIO][:_MAX_TIME_ROWS]
    if not rows:
        return None
    rest = [row for row in shares if row not in rows]
    if sum(row[2] for row in rest) >= _MIN_REST_RATIO:
        rows.append(("the rest", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    table = Table(
        (
            make_column("", rows, lambda row: form.clean_text(row[0], 40), 3, is_right=False),
            make_column("time", rows, lambda row: form.duration(row[1]), 2),
            make_column("share", rows, lambda row: form.ratio(row[2]), 2),
        )
    )
    parts: list[Part] = [table]
    if not isinstance(budget, Unavailable | None) and not isinstance(budget.mfu, Unavailable):
        source = form.clean_text(budget.mfu.peak_source, _MAX_EVIDENCE)
        text = f"MFU {form.ratio(budget.mfu.ratio)}; peak: {source} (--section budget)"
        parts.append(Line(text, Tone.QUIET))
    return Section(key="time", title="Where the time goes", note=note, parts=tuple(parts))


def _show_slow(report: Report) -> Section | None:
    """Ranks that persistently spend longer in a phase than their peers."""
    if report.facts.num_ranks < 2 or not report.phases:
        return None
    clues, layout = _choose_clues(report), known(report.study.layout)
    rows = clues[:MAX_SLOW_ROWS]
    if not rows:
        is_alone = layout is not None and all(layout.degree(axis) == 1 for axis in PEER_AXES)
        text = "no rank has a peer that does the same work (dp1)" if is_alone else _NO_SLOW_RANK
        named = _list_named(report)
        return Section(
            key="slow", title="Who is slow", parts=tuple(map(Line, named)) or (Line(text),)
        )
    parts: list[Part] = [
        Table(
            (
                make_column("rank", rows, lambda clue: str(clue.rank), 9),
                make_column(
                    "phase", rows, lambda c: form.clean_text(c.phase, 24), 8, is_right=False
                ),
                make_column("takes", rows, lambda clue: form.duration(clue.median_ns), 7),
                make_column("peers", rows, lambda clue: form.duration(clue.peers_median_ns), 6),
                make_column("more", rows, lambda clue: form.duration(clue.excess_ns), 5),
            )
        )
    ]
    more = len(clues) - len(rows)
    if more:
        parts.append(Line(f"and {form.plural(more, 'more case')} (--section peers)", Tone.QUIET))
    doubt = "" if report.layout.degrees else "; layout not known: ranks may do different work"
    note = f"medians per step{doubt}"
    return Section(key="slow", title="Who is slow", note=note, parts=tuple(parts))


def _choose_clues(report: Report) -> list[PhaseClue]:
    """Phases of the ranks that findings blame. A phase includes waits inside of it: where ranks
    wait for a slow one, their phases stand out as well, and they are not slow."""
    clues = [clue for clue in report.study.clues if clue.phase not in _WAIT_PHASES]
    findings = report.diagnosis.findings if report.diagnosis is not None else ()
    blamed = {rank for one in findings if one.severity > Severity.LOW for rank in one.ranks}
    return [clue for clue in clues if clue.rank in blamed] if blamed else clues


def _list_named(report: Report) -> list[str]:
    """What findings say of single ranks: they need fewer steps, or see more than phases."""
    findings = report.diagnosis.findings if report.diagnosis is not None else ()
    return [
        f"{form.clean_text(one.title)} ({one.code})"
        for one in findings
        if one.code.startswith("ST") and one.ranks and one.severity > Severity.LOW
    ][:MAX_SLOW_ROWS]


def _show_missing(report: Report) -> Section | None:
    rows = _list_damage(report)
    missing = _list_unavailable(report)
    rows += [(name, form.clean_text(one.reason, _MAX_REASON)) for name, one in missing]
    if not rows:
        return None
    parts: list[Part] = [make_facts(rows[:_MAX_MISSING])]
    if len(rows) > _MAX_MISSING:
        others = ", ".join(name.lower() for name, _ in rows[_MAX_MISSING:])
        parts.append(Line(f"and: {others} (--all)", Tone.QUIET))
    return Section(key="missing", title="What is not known", parts=tuple(parts))


def _list_damage(report: Report) -> list[tuple[str, str]]:
    """The first problem and the first note of the recording."""
    health = report.study.health
    name = "Traces" if report.attempt.is_from_traces else "Recording"
    rows = [(name, describe_problem(one, report.run.path)) for one in health.problems[:1]]
    if len(health.problems) > 1:
        rows[0] = (name, f"{rows[0][1]}; {len(health.problems) - 1} more (--section problems)")
    gaps = "" if report.diagnosis is None else describe_gaps(report.study)
    rows += [("Steps", f"{gaps}; findings that rest on the others are less sure")] if gaps else []
    return rows + [("Note", form.clean_text(note.text)) for note in health.notes[:1]]


def _list_unavailable(report: Report) -> list[tuple[str, Unavailable]]:
    study, budget = report.study, report.budget
    is_alone = report.facts.num_ranks == 1
    found: list[tuple[str, object]] = [
        ("Steps", study.steps.time),
        ("Budget", budget),
        ("Pipeline", report.pipeline),
        ("Layout", None if is_alone else report.layout.text),
        ("Communication", None if is_alone else study.communication),
        ("MFU", None if budget is None or isinstance(budget, Unavailable) else budget.mfu),
        ("Device time", study.time.device_phase_ns if study.has_accelerators else None),
        ("Tokens", study.tokens if isinstance(study.samples, Unavailable) else None),
        ("Loss", study.signals["loss"]),
    ]
    return [(name, value) for name, value in found if isinstance(value, Unavailable)]


def _show_more(names: Sequence[str]) -> Section:
    rows = [
        (
            "More",
            "--explain shows findings in full, --all everything, meshscope glossary the words",
        ),
        ("", f"--section NAME shows one part: {', '.join(names)}"),
    ]
    return Section(key=MORE, title="", parts=(Blank(), make_facts(rows)))
