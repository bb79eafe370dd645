import json

import numpy as np
import pytest

import meshscope
from builders import Faults, make_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.errors import RunNotFound, UsageError
from meshscope.report.run_study import RunStudy


@pytest.fixture
def study(tmp_path) -> RunStudy:
    layout = Layout(dp=4)
    run = make_run(tmp_path, layout=layout, num_steps=30, faults=Faults(slow={1: 2.0}))
    return meshscope.study(run)


def test_a_slow_rank_is_found(study):
    assert study.findings[0].code == "ST001"
    assert study.findings[0].ranks == (1,)


def test_the_budget_adds_up_to_the_mean_period_of_a_step(study):
    timeline = study.study.timeline
    period_ns = (timeline.period_end_ns - timeline.period_start_ns).mean()
    assert sum(study.budget.values()) == pytest.approx(period_ns)


def test_a_run_without_steps_has_a_reason_instead_of_a_budget(tmp_path):
    assert isinstance(meshscope.study(make_run(tmp_path, num_steps=0)).budget, Unavailable)


def test_a_table_has_the_rows_of_all_ranks(study):
    steps = study.table("steps")
    assert list(steps)[:2] == ["rank", "step"]
    assert steps["rank"].tolist() == np.repeat(range(4), 30).tolist()
    assert steps["step"].tolist() == 4 * list(range(30))


def test_a_table_that_does_not_exist_is_said(study):
    with pytest.raises(UsageError, match="there is no table sheep; there are steps"):
        study.table("sheep")


def test_the_report_is_what_the_command_writes(study):
    report = study.report()
    assert "rank 1 is slow" in report.to_text()
    document = json.loads(report.to_json())
    assert document["diagnosis"]["findings"][0]["code"] == "ST001"
    assert report.is_complete


def test_an_attempt_that_does_not_exist_is_said(tmp_path):
    with pytest.raises(UsageError, match="has no attempt 1; it has 1, from 0 on"):
        meshscope.study(make_run(tmp_path, num_steps=4), attempt=1)


def test_sections_are_written_in_every_medium(study):
    report = study.report()
    assert report.to_text("budget").startswith("Budget")
    assert "Findings" not in report.to_text("budget")
    page, text = report.to_html("all"), report.to_markdown("all")
    assert "<h2>Ranks" in page
    assert "### Ranks" in text
    assert len(report.to_text("all")) > len(report.to_text())


def test_files_do_not_name_options(study):
    report = study.report()
    hint = "--section NAME shows one part"
    assert hint in report.to_text()
    assert hint not in report.to_html() + report.to_markdown()


def test_a_page_says_of_which_run_it_is(study):
    assert f"<h1>Report of {study.run.path}</h1>" in study.report().to_html()


def test_a_section_that_does_not_exist_is_said(study):
    with pytest.raises(UsageError, match="there is no section sheep; there are verdict"):
        study.report().to_text("budget", "sheep")


def test_a_path_that_is_no_run_is_said(tmp_path):
    with pytest.raises(RunNotFound, match="is not a run"):
        meshscope.study(tmp_path)
    with pytest.raises(RunNotFound, match="does not exist"):
        meshscope.study(tmp_path / "sheep")


def test_hostile_names_act_in_no_medium(tmp_path):
    evil = "<script>x</script>|[l](u)\x1b[31m"
    run = make_run(tmp_path, num_steps=4, phases=((evil, 10_000_000),))
    report = meshscope.study(run).report()
    page, text = report.to_html("all"), report.to_markdown("all")
    assert "<script" not in page + text
    assert "\x1b" not in page + text
    assert "[l](u)" not in text


def test_a_study_of_some_ranks_has_only_these(tmp_path):
    run = make_run(tmp_path, layout=Layout(dp=4), num_steps=5)
    chosen = meshscope.study(run, ranks="0,2-3")
    assert sorted(set(chosen.table("steps")["rank"].tolist())) == [0, 2, 3]
    with pytest.raises(UsageError, match="none of the recorded ranks"):
        meshscope.study(run, ranks="9")
