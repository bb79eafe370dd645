"""The data of a page: the report's document, and what a picture of it needs besides.

`report`, `hang` and `compare` are the documents of the commands of these names, unchanged. The rest
are arrays by rank and step that those leave out, each with its reason where the run has none.
"""

import time
from dataclasses import dataclass
from pathlib import PurePath

from meshscope import __version__
from meshscope.analyze.memory.memory_attribution import MemoryOverview, summarize_memory
from meshscope.analyze.study import Study
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.diagnose.rule import SUBJECTS
from meshscope.diagnose.runner import Diagnosis
from meshscope.errors import MeshscopeError
from meshscope.hang.hang import Hang
from meshscope.page.budget_steps import StepBudget, spread_budget
from meshscope.page.events import Event, list_events
from meshscope.page.evidence import (
    FindingLinks,
    choose_lamp,
    find_step,
    link_findings,
    name_findings,
)
from meshscope.page.heat.matrices import Matrices, MetricFacts, draw_matrices
from meshscope.page.lamps import Lamp, LampState, light_lamps
from meshscope.page.mesh import MeshRank, place_ranks
from meshscope.page.run_state import RunState, StateKind, describe_state
from meshscope.page.series import Curve, list_curves
from meshscope.page.step_spans import MAX_SPANS, StepSpans, choose_steps, cut_step
from meshscope.page.waiting import WaitingRank, grow_tree
from meshscope.report.encode import Shape, Shapes, encode_schema
from meshscope.report.format import begin_sentence
from meshscope.report.run.document import SHAPES as REPORT_SHAPES
from meshscope.report.run.document import Document, build_document
from meshscope.report.run.report import Report
from meshscope.report.sections.compare import SHAPES as COMPARE_SHAPES
from meshscope.report.sections.compare import Compared, tell_verdict
from meshscope.report.sections.hang import SHAPES as HANG_SHAPES
from meshscope.report.sections.hang import HangDocument, make_hang_document
from meshscope.report.sections.hang_words import say_when
from meshscope.report.sections.run.findings import describe_nothing
from meshscope.store.read.memory_points import read_memory

DOCUMENT = ("meshscope-page", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What page this is."""

    kind: str
    """`run`, `hang` or `compare`."""
    title: str
    """Name of the run: the last part of its path."""
    meshscope_version: str
    made_unix_ns: int
    is_from_traces: bool
    state: RunState | None
    """Null for a comparison."""
    is_redacted: bool
    """Hosts, paths and command lines are left out."""
    left_out: tuple[str, ...]
    """What is not in the page to keep it small, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleFacts:
    """A rule, and whether it could look."""

    code: str
    name: str
    subject: str
    lamp: str
    reason: str | None
    """Why it could not look, or not at everything; null where it could."""
    num_findings: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimelineFacts:
    """One step, and why it is here."""

    picked: tuple[str, ...]
    """`fastest`, `median`, `slowest`, and ids of findings."""
    found: StepSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFacts:
    """The sentence on top of a page."""

    tone: str
    """`bad`, `attention`, `ok` or `not known`."""
    title: str
    text: str
    finding: str | None
    """Id; null where it is none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HangFacts:
    """A stuck or dead job."""

    found: HangDocument
    tree: tuple[WaitingRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedRun:
    """One side of a comparison."""

    name: str
    report: Document
    ranks: tuple[MeshRank, ...]
    matrices: Matrices
    series: tuple[Curve, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompareFacts:
    """Two runs."""

    found: Compared
    a: ComparedRun
    b: ComparedRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageDocument:
    """All that a page shows."""

    meta: PageFacts
    verdict: VerdictFacts
    lamps: tuple[Lamp, ...]
    report: Document | None
    """Null for a comparison."""
    ranks: tuple[MeshRank, ...]
    findings: tuple[FindingLinks, ...]
    """One per entry of `report.diagnosis.findings`, at the same index."""
    rules: tuple[RuleFacts, ...]
    matrices: Matrices | None
    budget_steps: StepBudget | Unavailable | None
    timelines: tuple[TimelineFacts, ...]
    series: tuple[Curve, ...]
    events: tuple[Event, ...]
    memory: MemoryOverview | Unavailable | None
    """A profile of what fills memory."""
    hang: HangFacts | None
    compare: CompareFacts | None


SHAPES: Shapes = {
    **REPORT_SHAPES,
    **COMPARE_SHAPES,
    **HANG_SHAPES,
    HangFacts: Shape(inlined=("found",)),
    MetricFacts: Shape(inlined=("found",)),
    TimelineFacts: Shape(inlined=("found",)),
}
_MATRIX_BYTES = 14_000_000
"""Of a page's matrices, packed."""
_MAX_TIMELINE_RANKS = 64
_MIN_VERDICT_STEPS = 5


def render_schema() -> dict[str, str]:
    """Text of the schema by the name of its file in `docs/schemas`."""
    return {f"{DOCUMENT[0]}.schema.json": encode_schema(*DOCUMENT, PageDocument, SHAPES)}


def describe_page(report: Report) -> PageDocument:
    """The page of a run, or of a stuck one."""
    study, diagnosis, hang = report.study, report.diagnosis, report.hang
    findings = () if diagnosis is None else diagnosis.findings
    state = describe_state(report.attempt, hang)
    matrices, left_out = draw_matrices(study, findings, max_bytes=_MATRIX_BYTES)
    lamps = light_lamps(report, state)
    return PageDocument(
        meta=PageFacts(
            kind="hang" if hang is not None and hang.is_stuck else "run",
            title=name_run(report),
            meshscope_version=__version__,
            made_unix_ns=time.time_ns(),
            is_from_traces=report.attempt.is_from_traces,
            state=state,
            is_redacted=False,
            left_out=tuple(left_out),
        ),
        verdict=judge_run(report, state, lamps),
        lamps=lamps,
        report=build_document(report),
        ranks=place_ranks(study),
        findings=link_findings(study, findings),
        rules=() if diagnosis is None else _list_rules(diagnosis),
        matrices=matrices,
        budget_steps=spread_budget(study),
        timelines=pick_timelines(study, findings),
        series=list_curves(study),
        events=list_events(study, findings),
        memory=_read_profile(report),
        hang=None if hang is None else _describe_hang(report, hang),
        compare=None,
    )


def compare_pages(compared: Compared, a: Report, b: Report) -> PageDocument:
    """The page of a comparison."""
    sides = [_describe_side(name, one) for name, one in ((compared.a, a), (compared.b, b))]
    return PageDocument(
        meta=PageFacts(
            kind="compare",
            title=f"{name_run(a)} and {name_run(b)}",
            meshscope_version=__version__,
            made_unix_ns=time.time_ns(),
            is_from_traces=a.attempt.is_from_traces,
            state=None,
            is_redacted=False,
            left_out=(),
        ),
        verdict=VerdictFacts(
            tone=_judge_change(compared),
            title=tell_verdict(compared),
            text="",
            finding=None,
        ),
        lamps=(),
        report=None,
        ranks=(),
        findings=(),
        rules=(),
        matrices=None,
        budget_steps=None,
        timelines=(),
        series=(),
        events=(),
        memory=None,
        hang=None,
        compare=CompareFacts(found=compared, a=sides[0], b=sides[1]),
    )


def _judge_change(compared: Compared) -> str:
    """Better or worse only where the whole interval is."""
    interval = known(compared.comparison.period.interval_ratio)
    if compared.has_failed or (interval is not None and interval[0] > 0):
        return "bad"
    return "ok" if interval is not None and interval[1] < 0 else "not known"


def name_run(report: Report) -> str:
    return PurePath(report.facts.path).name or report.facts.path


def _describe_side(name: str, report: Report) -> ComparedRun:
    matrices, _ = draw_matrices(report.study, (), max_bytes=_MATRIX_BYTES // 2)
    return ComparedRun(
        name=name,
        report=build_document(report),
        ranks=place_ranks(report.study),
        matrices=matrices,
        series=list_curves(report.study),
    )


def judge_run(report: Report, state: RunState, lamps: tuple[Lamp, ...]) -> VerdictFacts:
    """A stuck or failed run first, then the worst finding above low."""
    if state.kind is StateKind.STUCK:
        title, _, behind = state.note.partition("; ")
        when = "" if report.hang is None else say_when(report.hang)
        text = " ".join(filter(None, (begin_sentence(behind) or state.text, when)))
        return VerdictFacts(tone="bad", title=title, text=text, finding=None)
    diagnosis = report.diagnosis
    findings = () if diagnosis is None else diagnosis.findings
    if findings and findings[0].severity > Severity.LOW:
        first = findings[0]
        return VerdictFacts(
            tone="bad" if first.severity >= Severity.HIGH else "attention",
            title=f"{begin_sentence(first.title)}.",
            text=begin_sentence(first.summary),
            finding=name_findings(findings)[0],
        )
    if state.kind is StateKind.FAILED:
        return VerdictFacts(tone="bad", title=f"{state.text}: {state.note}", text="", finding=None)
    if diagnosis is None or report.study.steps.num_steps < _MIN_VERDICT_STEPS:
        text = f"There is no verdict before {_MIN_VERDICT_STEPS} steps."
        title = "No findings were asked for." if diagnosis is None else "Too few steps to judge."
        return VerdictFacts(tone="not known", title=title, text=text, finding=None)
    is_known = any(lamp.state is LampState.OK for lamp in lamps)
    return VerdictFacts(
        tone="ok" if is_known else "not known",
        title=f"{begin_sentence(describe_nothing(diagnosis))}.",
        text="That is not proof of health.",
        finding=None,
    )


def _list_rules(diagnosis: Diagnosis) -> tuple[RuleFacts, ...]:
    codes = [one.code for one in diagnosis.findings]
    return tuple(
        RuleFacts(
            code=code,
            name=name,
            subject=SUBJECTS.get(code[:2], ""),
            lamp=choose_lamp(code),
            reason=diagnosis.not_run.get(code),
            num_findings=codes.count(code),
        )
        for code, name in diagnosis.names.items()
    )


def pick_timelines(study: Study, findings: tuple[Finding, ...]) -> tuple[TimelineFacts, ...]:
    """The fastest, median and slowest step, and the first of each finding above low; all together
    at most `MAX_SPANS` spans."""
    picked: dict[int, list[str]] = {}
    ranks: list[int] = []
    for name, step in choose_steps(study).items():
        picked.setdefault(step, []).append(name)
    for name, one in zip(name_findings(findings), findings, strict=True):
        first = find_step(study, one) if one.severity > Severity.LOW else None
        if first is not None:
            picked.setdefault(first, []).append(name)
            ranks += one.ranks
    chosen = _choose_ranks(study, ranks)
    found = []
    for step, names in sorted(picked.items()):
        spans = known(cut_step(study, step, ranks=chosen, max_spans=MAX_SPANS // len(picked)))
        if spans is not None:
            found.append(TimelineFacts(picked=tuple(names), found=spans))
    return tuple(found)


def _choose_ranks(study: Study, wanted: list[int]) -> tuple[int, ...] | None:
    """None for all; of many ranks those of findings with all that share their pipeline and group,
    then the first."""
    timeline = known(study.timeline)
    if timeline is None or len(timeline.ranks) <= _MAX_TIMELINE_RANKS:
        return None
    layout = known(study.layout)
    near: dict[int, None] = {}
    for rank in dict.fromkeys([*wanted, *timeline.ranks]):
        near[rank] = None
        if layout is not None and rank < layout.world_size:
            for axis in ("pp", "tp"):
                near |= dict.fromkeys(layout.group_ranks(axis, rank))
        if len(near) >= _MAX_TIMELINE_RANKS:
            break
    return tuple(sorted(list(near)[:_MAX_TIMELINE_RANKS]))


def _read_profile(report: Report) -> MemoryOverview | Unavailable:
    if report.attempt.is_from_traces:
        return Unavailable("traces have no memory profile")
    try:
        return summarize_memory(read_memory(report.run.path))
    except MeshscopeError as error:
        return Unavailable(str(error))


def _describe_hang(report: Report, hang: Hang) -> HangFacts:
    found = make_hang_document(
        hang, run=report.facts.path, attempt=report.attempt.index, shows_all_ranks=True
    )
    return HangFacts(found=found, tree=grow_tree(hang))
