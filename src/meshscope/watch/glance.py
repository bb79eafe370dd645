"""What a screen says of a whole report: a few sentences and numbers, taken from its analyses.

Made beside the screen, in the thread that makes reports: drawing only reads it.
"""

from dataclasses import dataclass

import numpy as np

from meshscope.analyze.budget.budget import Budget
from meshscope.analyze.budget.budget_lines import Share
from meshscope.analyze.memory.memory import Place
from meshscope.core.layout import Axis
from meshscope.core.unavailable import Unavailable, known
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Finding
from meshscope.page.document import judge_run
from meshscope.page.heat.cells import Cells, measure_cells
from meshscope.page.lamps import Lamp, light_lamps
from meshscope.page.run_state import RunState
from meshscope.page.step_spans import StepSpans, choose_steps, cut_step
from meshscope.report import format as form
from meshscope.report.run.report import Report
from meshscope.report.sections.hang_words import advise
from meshscope.report.sections.run.findings import describe_price

GROUPS: dict[str, frozenset[Share]] = {
    "compute": frozenset((Share.USEFUL, Share.INEFFICIENCY, Share.COMPUTE, Share.SPAN)),
    "transfer": frozenset((Share.TRANSFER, Share.UNSPLIT, Share.UNQUEUED, Share.COPY)),
    "wait": frozenset((Share.WAIT,)),
    "bubble": frozenset((Share.BUBBLE,)),
    "idle": frozenset(
        (
            Share.BETWEEN,
            Share.IDLE_HOST,
            Share.IDLE_SYNCHRONISING,
            Share.IDLE_STREAM,
            Share.IDLE_RANK,
            Share.IDLE_UNKNOWN,
        )
    ),
    "input": frozenset((Share.INPUT,)),
}
"""Lines of the budget that a bar shows as one; all others are `other`."""
OTHER_GROUP = "other"
_MAX_LANE_SPANS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """Communication along one axis, per rank and step."""

    axis: str
    exposed_ns: float
    wait_ns: float
    transfer_ns: float
    hidden_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRow:
    """One line of the budget, mean of a rank's step."""

    name: str
    total_ns: float
    by_axis_ns: dict[str, float]
    """Empty for what is not communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The fullest rank of a pipeline stage, or of the job."""

    name: str
    rank: int
    peak_bytes: int
    limit_bytes: int | None
    where: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Glance:
    """One report."""

    tone: str
    """Of the verdict: `bad`, `attention`, `ok` or `not known`."""
    verdict: str
    change: str
    """What to do; empty without a finding."""
    lamps: tuple[Lamp, ...]
    layout: str
    places: dict[int, str]
    """By rank: `dp0.tp1.pp1`; empty where it is not known."""
    hosts: dict[int, str]
    step_ns: float | None
    tokens_per_s: float | None
    """Of the job, over the run."""
    wall_ns: float
    groups: tuple[tuple[str, float], ...]
    """Name and share of a rank's step."""
    no_budget: str
    """Why there is none; empty where there is."""
    lines: tuple[LineRow, ...]
    """In the budget's order."""
    axes: tuple[AxisRow, ...]
    late: str
    findings: tuple[Finding, ...]
    cells: Cells | None
    no_cells: str
    lanes: StepSpans | None
    memory: tuple[StageMemory, ...]
    alarm: str
    """What is wrong with the recording; empty for nothing."""
    report: Report


def take_glance(report: Report, state: RunState, metric: str) -> Glance:
    """The numbers of a report, and the heat map of a metric."""
    study, diagnosis = report.study, report.diagnosis
    lamps = light_lamps(report, state)
    verdict = judge_run(report, state, lamps)
    findings = () if diagnosis is None else diagnosis.findings
    first = findings[0] if findings and verdict.finding is not None else None
    price = "" if first is None else describe_price(first)
    budget, cells = study.budget, measure_cells(study, metric)
    groups = () if isinstance(budget, Unavailable) else _group_lines(budget)
    wall_ns = 0.0 if isinstance(budget, Unavailable) else budget.mean_wall_ns
    return Glance(
        tone=verdict.tone,
        verdict=form.clean_text(
            f"{verdict.title.rstrip('.')}: saves {price}"
            if price
            else f"{verdict.title} {'' if first is not None else verdict.text}",
            300,
        ),
        change=form.clean_text(_say_change(report, first), 300),
        lamps=lamps,
        layout=form.describe_degrees(report.layout.degrees),
        places={
            one.rank: form.position(known(one.label) or "", report.layout.degrees)
            for one in study.ranks
        },
        hosts={one.rank: form.clean_text(known(one.host) or "", 40) for one in study.ranks},
        step_ns=known(study.step_ns),
        tokens_per_s=None if isinstance(study.tokens, Unavailable) else study.tokens.tokens_per_s,
        wall_ns=wall_ns,
        groups=groups,
        no_budget=form.clean_text(budget.reason) if isinstance(budget, Unavailable) else "",
        lines=() if isinstance(budget, Unavailable) else _list_lines(budget),
        axes=_list_axes(report),
        late=_describe_late(report),
        findings=findings,
        cells=known(cells),
        no_cells=form.clean_text(cells.reason) if isinstance(cells, Unavailable) else "",
        lanes=_cut_lanes(report),
        memory=_list_memory(report),
        alarm=_describe_alarm(report),
        report=report,
    )


def _say_change(report: Report, first: Finding | None) -> str:
    """What to do about a hang comes before what steps cost."""
    hang = report.hang
    if hang is not None and hang.is_stuck:
        return advise(hang)
    return "" if first is None else first.change


def _group_lines(budget: Budget) -> tuple[tuple[str, float], ...]:
    wall = max(budget.total_wall_ns, 1)
    shares = dict.fromkeys((*GROUPS, OTHER_GROUP), 0.0)
    for line, total in zip(budget.lines, budget.total_ns().tolist(), strict=True):
        name = next((key for key, own in GROUPS.items() if line.share in own), OTHER_GROUP)
        shares[name] += total / wall
    return tuple((name, share) for name, share in shares.items() if share > 0)


def _list_lines(budget: Budget) -> tuple[LineRow, ...]:
    totals: dict[str, float] = {}
    by_axis: dict[str, dict[str, float]] = {}
    num_cells = max(budget.num_rank_steps, 1)
    for line, total_ns in zip(budget.lines, budget.total_ns().tolist(), strict=True):
        name, mean_ns = str(line.share), total_ns / num_cells
        totals[name] = totals.get(name, 0.0) + mean_ns
        if line.axis:
            by_axis.setdefault(name, {})[form.clean_text(line.axis, 12)] = mean_ns
    return tuple(
        LineRow(name=name, total_ns=total_ns, by_axis_ns=by_axis.get(name, {}))
        for name, total_ns in totals.items()
        if total_ns > 0
    )


def _list_axes(report: Report) -> tuple[AxisRow, ...]:
    facts = known(report.communication)
    rows = []
    for one in () if facts is None else facts.axes:
        mean = known(one.per_rank_step)
        if mean is not None:
            rows.append(
                AxisRow(
                    axis=form.clean_text(one.axis, 12),
                    exposed_ns=mean.exposed_ns,
                    wait_ns=mean.exposed_wait_ns,
                    transfer_ns=mean.exposed_transfer_ns,
                    hidden_ns=mean.overlapped_ns,
                )
            )
    return tuple(sorted(rows, key=lambda row: -row.exposed_ns))


def _describe_late(report: Report) -> str:
    """The rank that is last to arrive more often than by chance and costs most."""
    facts = known(report.study.communication)
    late = [] if facts is None else [one for one in facts.last_arrivers if one.is_beyond_chance]
    late = [one for one in late if one.axis != "all"]
    if not late:
        return ""
    worst = max(late, key=lambda one: one.cost_ns)
    counts = f"{form.count(worst.num_last)}/{form.count(worst.num_operations)}"
    return f"late: rank {worst.rank}, {form.clean_text(worst.axis, 12)}, {counts}"


def _cut_lanes(report: Report) -> StepSpans | None:
    """The median step of a pipeline."""
    study = report.study
    step = choose_steps(study).get("median")
    if step is None or isinstance(study.pipeline, Unavailable):
        return None
    spans = known(cut_step(study, step, max_spans=_MAX_LANE_SPANS))
    return spans if spans is not None and spans.actions is not None else None


def _list_memory(report: Report) -> tuple[StageMemory, ...]:
    found = known(report.study.memory)
    if found is None:
        return ()
    layout = known(report.study.layout)
    fullest: dict[int, StageMemory] = {}
    for one in found.ranks:
        is_placed = layout is not None and one.rank < layout.world_size
        stage = layout.coordinates(one.rank).along(Axis.PP) if layout and is_placed else 0
        if stage not in fullest or fullest[stage].peak_bytes < one.peak_bytes:
            has_stages = layout is not None and layout.degree(Axis.PP) > 1
            fullest[stage] = StageMemory(
                name=f"pp{stage}" if has_stages else "job",
                rank=one.rank,
                peak_bytes=one.peak_bytes,
                limit_bytes=known(one.limit_bytes),
                where="device" if one.place is Place.DEVICE else "RSS",
            )
    return tuple(fullest[stage] for stage in sorted(fullest))


def _describe_alarm(report: Report) -> str:
    num_there, num_ranks = len(report.attempt.ranks), report.study.num_ranks
    if num_there < num_ranks:
        return f"of {num_there} of {num_ranks} ranks"
    damaged = sum(bool(one.problems) for one in report.attempt)
    if damaged:
        return f"{form.plural(damaged, 'rank')} damaged"
    return ""


def name_severity(finding: Finding) -> str:
    """A mark: characters alone say how bad it is."""
    return {Severity.LOW: "·", Severity.MEDIUM: "△"}.get(finding.severity, "▲")


def order_ranks(cells: Cells) -> list[int]:
    """Indices of ranks, those that stand out most first: by the mean of their worst 6 % of
    steps."""
    value = np.nan_to_num(cells.value, nan=0.0)
    num = max(round(value.shape[1] * 0.06), 1) if value.shape[1] else 0
    worst = np.sort(value, axis=1)[:, -num:].mean(axis=1) if num else np.zeros(len(value))
    order: list[int] = np.argsort(-worst, kind="stable").tolist()
    return order
