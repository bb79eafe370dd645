"""Five questions about a run, each with a state, a number and what is behind it.

A state is that of the worst finding of the question's rules. Without one it is ok only if a rule
that asks it could run and the number behind it is known; otherwise it is not known, which is never
shown as ok.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshscope.analyze.memory.memory import Place
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.unit_text import plural
from meshscope.core.verdict.severity import Severity
from meshscope.page.evidence import choose_lamp, name_findings
from meshscope.page.run_state import RunState, StateKind
from meshscope.report import format as form
from meshscope.report.run.report import Report

QUESTIONS = {
    "fast": "Is it fast?",
    "move": "Does it move?",
    "fit": "Does it fit?",
    "learn": "Does it learn?",
    "trust": "Can I trust this?",
}
_MAX_NOTE = 200
_NOT_KNOWN = "not known"


class LampState(StrEnum):
    """What a lamp shows."""

    OK = "ok"
    ATTENTION = "attention"
    """A finding of low or medium severity."""
    BAD = "bad"
    NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamp:
    """One question."""

    key: str
    question: str
    state: LampState
    value: str
    """A few words: `299 ms/step`."""
    note: str
    """One line behind it, the worst finding first; the reason where the state is not known."""
    rules: tuple[str, ...]
    """Codes of the rules that looked."""
    not_run: Mapping[str, str]
    """Code to reason of those that could not."""
    findings: tuple[str, ...]
    """Ids, the worst first."""


def light_lamps(report: Report, state: RunState) -> tuple[Lamp, ...]:
    """All five, always."""
    values = {
        "fast": _say_fast(report),
        "move": (_NOT_KNOWN, state.note)
        if report.attempt.is_from_traces
        else (state.text, state.note.partition("; ")[0]),
        "fit": _say_fit(report),
        "learn": _say_learn(report),
        "trust": _say_trust(report, state),
    }
    return tuple(
        _light(key, question, report, state, *values[key]) for key, question in QUESTIONS.items()
    )


def _light(
    key: str, question: str, report: Report, run_state: RunState, value: str, note: str
) -> Lamp:
    diagnosis = report.diagnosis
    findings = () if diagnosis is None else diagnosis.findings
    own = [
        (name, one)
        for name, one in zip(name_findings(findings), findings, strict=True)
        if choose_lamp(one.code) == key
    ]
    rules = () if diagnosis is None else diagnosis.rules
    reasons = {} if diagnosis is None else diagnosis.not_run
    codes = [code for code in rules if choose_lamp(code) == key]
    not_run = {code: reasons[code] for code in codes if code in reasons}
    looked = tuple(code for code in codes if code not in not_run)
    worst = max((one.severity for _, one in own), default=None)
    if worst is not None:
        state = LampState.BAD if worst >= Severity.HIGH else LampState.ATTENTION
        title = form.begin_sentence(own[0][1].title)
        note = title if key == "move" else f"{title} · {note}"
    elif value == _NOT_KNOWN:
        state = LampState.NOT_KNOWN
    elif looked:
        state = LampState.OK
    else:
        state = LampState.NOT_KNOWN
        note = next(iter(not_run.values()), "no rule looked")
    if key == "move":
        state = _judge_move(run_state, state)
    return Lamp(
        key=key,
        question=question,
        state=state,
        value=value,
        note=form.clean_text(note, _MAX_NOTE),
        rules=looked,
        not_run=not_run,
        findings=tuple(name for name, _ in own),
    )


def _judge_move(run_state: RunState, state: LampState) -> LampState:
    """Whether a run goes on is known from its ranks' ends, not from rules alone."""
    if run_state.kind in (StateKind.STUCK, StateKind.FAILED):
        return LampState.BAD
    if run_state.kind is StateKind.OPEN and state is LampState.OK:
        return LampState.NOT_KNOWN
    return state


def _say_fast(report: Report) -> tuple[str, str]:
    study = report.study
    step_ns = study.step_ns
    if isinstance(step_ns, Unavailable):
        return _NOT_KNOWN, step_ns.reason
    # Of the same quantity as the median beside it: from one start to the next.
    times = known(study.steps.interval) or known(study.steps.time)
    notes = [] if times is None else [f"median; p95 {form.duration(times.p95_ns)}"]
    tokens = known(study.tokens)
    notes += [] if tokens is None else [f"{form.count(round(tokens.tokens_per_s))} tokens/s"]
    budget = known(study.budget)
    mfu = None if budget is None else known(budget.mfu)
    notes.append("MFU n/a" if mfu is None else f"MFU {form.ratio(mfu.ratio)}")
    return f"{form.duration(step_ns)}/step", " · ".join(notes)


def _say_fit(report: Report) -> tuple[str, str]:
    memory = report.study.memory
    if isinstance(memory, Unavailable):
        return _NOT_KNOWN, memory.reason
    on_device = [one for one in memory.ranks if one.place is Place.DEVICE]
    one = max(on_device or memory.ranks, key=lambda rank: rank.peak_bytes)
    where = "on the device" if on_device else "RSS"
    limit = one.limit_bytes
    of = limit.reason if isinstance(limit, Unavailable) else f"of {form.memory(limit)}"
    return f"{form.memory(one.peak_bytes)} {where}", f"peak of rank {one.rank}, the fullest; {of}"


def _say_learn(report: Report) -> tuple[str, str]:
    found = known(report.study.convergence)
    loss = Unavailable("not analysed") if found is None else found.loss
    if found is None or isinstance(loss, Unavailable):
        return _NOT_KNOWN, loss.reason if isinstance(loss, Unavailable) else ""
    course, nonfinite = known(found.course), found.loss_nonfinite
    if nonfinite is not None and nonfinite.is_lasting:
        notes = [f"last a number in step {loss.last.step}: {loss.last.value:.4g}"]
        return f"loss {nonfinite.first_kind}", " · ".join(notes)
    bad = len(loss.bad_steps)
    notes = [f"from {loss.first.value:.4g}", f"{plural(bad, 'step')} not finite"]
    notes += [] if course is None else [str(course)]
    return f"loss {loss.last.value:.4g}", " · ".join(notes)


def _say_trust(report: Report, state: RunState) -> tuple[str, str]:
    health, facts = report.study.health, report.facts
    notes = [f"{facts.num_ranks}/{max(facts.world_size, facts.num_ranks)} ranks"]
    diagnosis = report.diagnosis
    error = None if diagnosis is None else known(diagnosis.replay_error_ratio)
    notes += [] if error is None else [f"replay {form.ratio(error)} off"]
    num_dropped = known(health.num_dropped)
    notes += [] if num_dropped is None else [f"{form.count(num_dropped)} lost"]
    if health.is_complete:
        return "Complete", " · ".join(notes)
    is_going = state.kind in (StateKind.LIVE, StateKind.STUCK, StateKind.OPEN)
    is_damaged = bool(health.errors or health.problems or num_dropped)
    return "Complete so far" if is_going and not is_damaged else "Not complete", " · ".join(notes)
