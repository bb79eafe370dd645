"""The section on pipelines, in JSON and in text."""

from types import SimpleNamespace

import pytest

from meshscope.analyze.pipeline.pipeline import analyze_pipeline
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.report.encode import as_plain
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.document import SHAPES
from meshscope.report.run.pipeline import describe_pipeline
from meshscope.report.run.report import Detail, Report
from meshscope.report.screen import Screen
from meshscope.report.sections.run import pipeline as section
from meshscope.store.read.run import open_run
from pipeline_builders import Recipe, make_pipeline_run, stage_cost


def build(path, *, parts=None):
    recipe = Recipe(
        schedule=build_schedule("1f1b", 2, 4),
        cost=stage_cost({0: (2, 4), 1: (4, 8)}),
        communication_ns=500_000,
        parts=parts or {},
    )
    attempt = open_run(make_pipeline_run(path / "run", recipe)).last_attempt
    timeline = build_timeline(attempt, warmup_steps=0)
    assert not isinstance(timeline, Unavailable)
    found = analyze_pipeline(timeline, attempt)
    assert not isinstance(found, Unavailable)
    return describe_pipeline(found)


def render(facts):
    return render_terminal([section.describe_pipeline(facts, Detail())], Screen(width=100))


def report_without(reason, layout):
    study = SimpleNamespace(layout=layout, pipeline=Unavailable(reason))
    return Report(run=None, study=study, diagnosis=SimpleNamespace())


def test_the_document_has_parts_that_sum_to_the_bubble(tmp_path):
    facts = build(tmp_path, parts={0: {"Block": 1}, 1: {"Block": 2, "head": 1}})
    found = as_plain(facts, SHAPES)
    assert sum(found["parts_ns"].values()) == pytest.approx(found["cost_ns"] - found["busy_ns"])
    assert found["utilisation_ratio"] == 1 - found["bubble_ratio"]
    assert (found["schedule"], found["sends"]) == ("1f1b", "free")
    assert [stage["num_layers"] for stage in found["stages"]] == [1, 2]
    assert found["stages"][1]["extras"] == ["head"]
    assert found["stages"][0]["ranks"] == [{"first": 0, "last": 0}]


def test_the_text_says_what_and_why(tmp_path):
    text = render(build(tmp_path, parts={0: {"Block": 1}, 1: {"Block": 2, "head": 1}}))
    assert "Pipeline  1f1b, 4 microbatches, 2 stages; 6 steps of 1 pipeline" in text
    assert "with equal stages, 20 % by (p−1)(F+B)" in text
    assert "unequal stages" in text
    assert "2 + head" in text


def test_unknown_layers_are_said(tmp_path):
    assert "n/a" in render(build(tmp_path))


def test_a_pipeline_that_cannot_be_seen_says_why():
    report = report_without("no actions\x1b[31m", Layout(pp=2))
    text = render(report.pipeline)
    assert "n/a: no actions" in text
    assert "\x1b" not in text


def test_a_run_without_a_pipeline_has_no_section():
    for layout in (Layout(dp=2), Unavailable("not recorded")):
        report = report_without("one stage", layout)
        assert section.show_pipeline(report, Detail()) is None
