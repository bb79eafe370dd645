"""The section on pipelines, in JSON and in text."""

import msgspec
import pytest

from meshscope.analyze.pipeline.pipeline import analyze_pipeline
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.schedule_builders import build_schedule
from meshscope.core.unavailable import Unavailable
from meshscope.report.pipeline_document import PipelineFacts, build_pipeline
from meshscope.report.pipeline_text import write_pipeline
from meshscope.report.screen import Screen, ScreenWriter
from meshscope.report.values import Absent
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
    facts = build_pipeline(analyze_pipeline(timeline, attempt), is_expected=True)
    assert facts is not None
    assert not isinstance(facts, Absent)
    return facts


def render(facts, reason=None):
    out = ScreenWriter(Screen(width=100))
    write_pipeline(out, facts, reason)
    return out.finish()


def test_the_document_has_parts_that_sum_to_the_bubble(tmp_path):
    facts = build(tmp_path, parts={0: {"Block": 1}, 1: {"Block": 2, "head": 1}})
    assert sum(facts.parts_ns.values()) == pytest.approx(facts.cost_ns - facts.busy_ns)
    assert facts.utilisation_ratio == 1 - facts.bubble_ratio
    assert (facts.schedule, facts.sends) == ("1f1b", "free")
    assert [stage.num_layers for stage in facts.stages] == [1, 2]
    assert facts.stages[1].extras == ["head"]
    assert msgspec.json.decode(msgspec.json.encode(facts), type=PipelineFacts) == facts


def test_the_text_says_what_and_why(tmp_path):
    text = render(build(tmp_path, parts={0: {"Block": 1}, 1: {"Block": 2, "head": 1}}))
    assert "Pipeline  1f1b, 4 microbatches, 2 stages; 6 steps of 1 pipeline" in text
    assert "with equal stages, 20 % by (p−1)(F+B)" in text
    assert "unequal stages" in text
    assert "2 + head" in text


def test_unknown_layers_are_said(tmp_path):
    assert "n/a" in render(build(tmp_path))


def test_a_pipeline_that_cannot_be_seen_says_why():
    facts = build_pipeline(Unavailable("no actions\x1b[31m"), is_expected=True)
    assert isinstance(facts, Absent)
    text = render(None, facts.unavailable)
    assert "n/a: no actions" in text
    assert "\x1b" not in text


def test_a_run_without_a_pipeline_has_no_section():
    assert build_pipeline(Unavailable("one stage"), is_expected=False) is None
    assert render(None) == "\n"
