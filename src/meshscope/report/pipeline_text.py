"""The section on pipelines: what the bubble is, what it must be, and where the rest is from."""

from meshscope.report import format as form
from meshscope.report.pipeline_document import PipelineFacts, PipelineStageFacts
from meshscope.report.screen import ScreenWriter, make_column
from meshscope.report.values import Absent, list_ranges

MAX_STAGE_ROWS = 16
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


def write_pipeline(out: ScreenWriter, pipeline: PipelineFacts | None, reason: str | None) -> None:
    """The section, or why a declared pipeline has none; nothing for a run without a pipeline."""
    if pipeline is None:
        if reason is not None:
            out.section("Pipeline")
            out.line(f"n/a: {form.clean_text(reason, 300)}", "dim")
        return
    out.section("Pipeline", _describe_schedule(pipeline))
    out.facts(
        [
            ("Bubble", _describe_bubble(pipeline)),
            ("Expected", _describe_expected(pipeline)),
            ("From", _describe_parts(pipeline)),
        ]
    )
    _write_stages(out, pipeline.stages)


def _describe_schedule(pipeline: PipelineFacts) -> str:
    order = "" if pipeline.is_exact else ", microbatches in another order"
    known = form.clean_text(pipeline.schedule, 40) + (
        order if pipeline.schedule != "unknown order" else ""
    )
    return (
        f"{known}, {form.plural(pipeline.num_microbatches, 'microbatch', 'microbatches')}, "
        f"{form.plural(pipeline.num_stages, 'stage')}; "
        f"{form.plural(pipeline.num_runs, 'step')} of "
        f"{form.plural(pipeline.num_pipelines, 'pipeline')}, from {pipeline.action_source}"
    )


def _describe_bubble(pipeline: PipelineFacts) -> str:
    return (
        f"{form.ratio(pipeline.bubble_ratio)} of {form.duration(pipeline.cost_ns)} "
        f"(utilisation {form.ratio(pipeline.utilisation_ratio)})"
    )


def _describe_expected(pipeline: PipelineFacts) -> str:
    text = (
        f"{form.ratio(pipeline.executed_ratio)} with these stages and transfers, "
        f"{form.ratio(pipeline.balanced_ratio)} with equal stages"
    )
    if not isinstance(pipeline.closed_form_ratio, Absent):
        text += f", {form.ratio(pipeline.closed_form_ratio)} by {pipeline.closed_form}"
    return text


def _describe_parts(pipeline: PipelineFacts) -> str:
    shown = [
        f"{_PART_NAMES.get(name, name)} {form.duration(value)}"
        for name, value in pipeline.parts_ns.items()
        if abs(value) >= _MIN_SHOWN_RATIO * pipeline.cost_ns
    ]
    return ", ".join(shown) or "nothing"


def _write_stages(out: ScreenWriter, stages: list[PipelineStageFacts]) -> None:
    rows = stages if out.screen.shows_all_ranks else stages[:MAX_STAGE_ROWS]
    out.table(
        [
            make_column("stage", rows, lambda row: str(row.stage), 100),
            make_column("ranks", rows, lambda row: str(list_ranges(row.ranks)), 50),
            make_column("layers", rows, _show_layers, 60, is_right=False),
            make_column("forward", rows, lambda row: form.duration(row.forward_ns), 80),
            make_column("backward", rows, lambda row: form.duration(row.backward_ns), 80),
            make_column("bubble", rows, lambda row: form.ratio(row.bubble_ratio), 90),
        ]
    )
    if len(rows) < len(stages):
        out.line(f"and {form.plural(len(stages) - len(rows), 'more stage')} (--all-ranks)", "dim")


def _show_layers(row: PipelineStageFacts) -> str:
    if isinstance(row.num_layers, Absent):
        return "n/a"
    extras = "".join(f" + {form.clean_text(extra, 20)}" for extra in row.extras)
    return f"{row.num_layers}{extras}"
