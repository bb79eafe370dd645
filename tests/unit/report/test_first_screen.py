"""The first screen: short, plain, and right for small, large, empty and damaged runs."""

import re

import pytest

from builders import MS, Faults, make_run
from meshscope.core.layout import Layout
from meshscope.report.run_study import study
from meshscope.report.screen import Screen
from screens import find_widest

MAX_LINES = 40
STATISTICS = re.compile(r"Holm|p <|independent|off the clock|rank-hours|\de-\d|p95|quantile")


def show(path, *, width=100, with_diagnosis=True):
    report = study(path).report(with_diagnosis=with_diagnosis)
    return report.to_text(screen=Screen(width=width))


def test_a_slow_rank_in_forty_lines(tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    faults = Faults(slow={5: 1.5})
    run = make_run(tmp_path / "run", layout=Layout(dp=8), num_steps=60, faults=faults)
    text = show(run)
    golden("reports/first-screen.txt", text)
    assert len(text.splitlines()) <= MAX_LINES
    assert not STATISTICS.search(text)
    titles = ("Findings", "Where the time goes", "Who is slow", "What is not known", "  More")
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)


def test_a_healthy_run_says_what_was_looked_for(tmp_path):
    run = make_run(tmp_path, layout=Layout(dp=4), num_steps=60)
    text = show(run)
    assert re.match(
        r"No finding above low severity( \(\d+ of low severity: --explain\))?; "
        r"\d+ rules ran(, \d+ could not see all they need)?\.",
        " ".join(text.splitlines()[:2]),
    )
    assert "no rank stands out among its peers" in text
    assert "Findings" not in text


def test_one_step_has_a_length_and_no_pace(tmp_path):
    text = show(make_run(tmp_path, layout=Layout(dp=2), num_steps=1))
    assert "1 step of 100 ms on 2 ranks (dp2)." in text


def test_the_rest_is_not_shown_where_it_is_nothing(tmp_path):
    phases = (("forward", 100 * MS), ("clip", 10_000))
    text = show(make_run(tmp_path, num_steps=20, phases=phases), with_diagnosis=False)
    assert "the rest" not in text
    phases = (("forward", 100 * MS), ("clip", 100_000))
    text = show(make_run(tmp_path / "more", num_steps=20, phases=phases), with_diagnosis=False)
    assert "the rest" in text


def test_one_rank_has_nobody_to_be_compared_with(tmp_path):
    text = show(make_run(tmp_path, num_steps=20))
    assert "20 steps on 1 rank" in text
    assert "Who is slow" not in text
    assert "Communication" not in text


def test_stages_have_no_peers(tmp_path):
    text = show(make_run(tmp_path, layout=Layout(pp=4), num_steps=20))
    assert "no rank has a peer that does the same work (dp1)" in text


def test_a_run_without_steps_has_reasons_instead_of_numbers(tmp_path):
    text = show(make_run(tmp_path, num_steps=0))
    assert text.startswith("1 rank, 510 ms recorded; no step to measure: no step finished.")
    assert "  Steps   no step finished\n" in text
    assert "Where the time goes" not in text


def test_damage_is_named(tmp_path):
    faults = Faults(missing=frozenset({1}), damaged={0: "spans", 2: "steps"})
    text = show(make_run(tmp_path, layout=Layout(dp=3), faults=faults))
    assert "! The recording is not complete: 1 rank missing" in text
    assert re.search(r"\n  Recording  .*more \(--section problems\)\n", text, flags=re.DOTALL)


def test_many_ranks_need_no_more_lines(tmp_path):
    faults = Faults(slow=dict.fromkeys((3, 40, 77, 100, 127), 1.5), missing=frozenset({9}))
    text = show(make_run(tmp_path, layout=Layout(dp=128), num_steps=12, faults=faults))
    assert len(text.splitlines()) <= MAX_LINES


def test_without_a_diagnosis_there_are_no_findings(tmp_path):
    run = make_run(tmp_path, layout=Layout(dp=4), num_steps=30, faults=Faults(slow={2: 1.5}))
    text = show(run, with_diagnosis=False)
    assert text.startswith("30 steps on 4 ranks (dp4), one every")
    assert "rules" not in text
    assert "by phase" in text
    assert re.search(r"^ +2  backward +90.0 ms +60.0 ms +30.0 ms$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    run = make_run(tmp_path, layout=Layout(dp=8), num_steps=30, faults=Faults(slow={5: 1.5}))
    assert find_widest(show(run, width=width), but=tmp_path) <= width


def test_explaining_shows_findings_in_full(tmp_path):
    from meshscope.report.run.report import Detail

    run = make_run(tmp_path, layout=Layout(dp=8), num_steps=60, faults=Faults(slow={5: 1.5}))
    text = study(run).report(detail=Detail(explains=True)).to_text()
    assert "  Evidence  " in text
    assert "  Sure  " in text
    assert "Where the time goes" in text
    assert "Step time" not in text
