"""Pipelines: what the bubble is, what it must be, and where the rest is from."""

from meshscope.core.unavailable import Unavailable, known
from meshscope.report import format as form
from meshscope.report.run.pipeline import PipelineFacts, StageFacts
from meshscope.report.run.report import Detail, Report
from meshscope.report.section import (
    Line,
    Part,
    Section,
    Table,
    Tone,
    make_column,
    make_facts,
    missing_section,
)
from meshscope.store.read.rank_ranges import abbreviate_ranks

_MAX_STAGE_ROWS = 16
_PART_NAMES = {
    "inherent": "few microbatches",
    "imbalance": "unequal stages",
    "communication": "transfers",
    "gaps": "between actions",
    "stragglers": "stragglers and jitter",
    "unexplained": "unexplained",
}
_MIN_SHOWN_RATIO = 0.001
"""Parts below this share of the cost are not named."""


def show_pipeline(report: Report, detail: Detail) -> Section | None:
    """The bubble; None for a run without a pipeline."""
    return describe_pipeline(report.pipeline, detail)


def describe_pipeline(
    pipeline: PipelineFacts | Unavailable | None, detail: Detail
) -> Section | None:
    """The section, or why a declared pipeline has none."""
    if pipeline is None:
        return None
    if isinstance(pipeline, Unavailable):
        return missing_section("pipeline", "Pipeline", form.clean_text(pipeline.reason, 300))
    facts = make_facts(
        [
            ("Bubble", _describe_bubble(pipeline)),
            ("Expected", _describe_expected(pipeline)),
            ("From", _describe_parts(pipeline)),
        ]
    )
    stages = pipeline.stages if detail.shows_all_ranks else pipeline.stages[:_MAX_STAGE_ROWS]
    parts: list[Part] = [facts, _make_table(stages)]
    if len(stages) < len(pipeline.stages):
        more = form.plural(len(pipeline.stages) - len(stages), "more stage")
        parts.append(Line(f"and {more} (--all-ranks)", Tone.QUIET))
    note = _describe_schedule(pipeline)
    return Section(key="pipeline", title="Pipeline", note=note, parts=tuple(parts))


def _describe_schedule(pipeline: PipelineFacts) -> str:
    order = "" if pipeline.is_exact else ", microbatches in another order"
    name = form.clean_text(pipeline.schedule, 40) + (
        order if pipeline.schedule != "unknown order" else ""
    )
    return (
        f"{name}, {form.plural(pipeline.num_microbatches, 'microbatch', 'microbatches')}, "
        f"{form.plural(pipeline.num_stages, 'stage')}; "
        f"{form.plural(pipeline.num_runs, 'step')} of "
        f"{form.plural(pipeline.bubble.num_pipelines, 'pipeline')}, from {pipeline.action_source}"
    )


def _describe_bubble(pipeline: PipelineFacts) -> str:
    bubble = pipeline.bubble
    return (
        f"{form.ratio(bubble.bubble_ratio)} of {form.duration(bubble.cost_ns)} "
        f"(utilisation {form.ratio(bubble.utilisation_ratio)})"
    )


def _describe_expected(pipeline: PipelineFacts) -> str:
    bubble = pipeline.bubble
    text = (
        f"{form.ratio(bubble.executed_ratio)} with these stages and transfers, "
        f"{form.ratio(bubble.balanced_ratio)} with equal stages"
    )
    closed_ratio = known(bubble.closed_form_ratio)
    return text + (
        "" if closed_ratio is None else f", {form.ratio(closed_ratio)} by {bubble.closed_form}"
    )


def _describe_parts(pipeline: PipelineFacts) -> str:
    shown = [
        f"{_PART_NAMES.get(name, name)} {form.duration(value)}"
        for name, value in pipeline.parts_ns.items()
        if abs(value) >= _MIN_SHOWN_RATIO * pipeline.bubble.cost_ns
    ]
    return ", ".join(shown) or "nothing"


def _make_table(rows: tuple[StageFacts, ...]) -> Table:
    return Table(
        (
            make_column("stage", rows, lambda row: str(row.time.stage), 100),
            make_column("ranks", rows, lambda row: abbreviate_ranks(row.time.ranks), 50),
            make_column("layers", rows, _show_layers, 60, is_right=False),
            make_column("forward", rows, lambda row: form.duration(row.time.forward_ns), 80),
            make_column("backward", rows, lambda row: form.duration(row.time.backward_ns), 80),
            make_column("bubble", rows, lambda row: form.ratio(row.bubble_ratio), 90),
        )
    )


def _show_layers(row: StageFacts) -> str:
    extras = "".join(f" + {form.clean_text(extra, 20)}" for extra in row.extras)
    return form.or_dash(row.num_layers, lambda num_layers: f"{num_layers}{extras}")
