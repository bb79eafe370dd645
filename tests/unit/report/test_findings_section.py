import re
from dataclasses import replace

import pytest

from builders import Faults, make_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import (
    Confidence,
    ConfidenceLevel,
    Course,
    Estimate,
    Evidence,
    Finding,
    Onset,
)
from meshscope.diagnose.pricing import Scale
from meshscope.diagnose.runner import Diagnosis
from meshscope.report.run.report import Report
from meshscope.report.screen import Screen
from meshscope.report.sections.run.findings import describe_onset, describe_worst
from meshscope.simulate.what_if import Fidelity, Gain
from report_builders import document_of, render_report, report_of
from screens import find_widest

MS = 1_000_000
EVIL = "[bold]x[/bold]\x1b[31m\x1b]0;owned\x07\nsecond\u202eline\ud800"

SLOW_RANK = Finding(
    code="HE002",
    title="rank 5 is slow in forward",
    severity=Severity.HIGH,
    summary="rank 5 works 62.0 ms in forward, its peers 31.0 ms.",
    ranks=(5,),
    first_step=1,
    onset=Onset(step=1, start_unix_ns=1_763_200_000 * 10**9, course=Course.ALWAYS),
    evidence=(
        Evidence(name="work of rank 5 in forward", value=62.0 * MS, unit="ns"),
        Evidence(name="above its peers", value=1.0, unit="ratio"),
        Evidence(name="steps compared", value=59, unit="steps"),
        Evidence(name="memory held", value=3 << 30, unit="bytes"),
        Evidence(name="link", value=2.5e9, unit="bytes_per_s"),
        Evidence(name="rate", value=1234.5, unit="tokens_per_s"),
    ),
    confidence=Confidence(level=ConfidenceLevel.HIGH, text="p < 1e-9 over 59 steps", p_value=1e-20),
    change="Look at that rank's processor.",
    gain=Gain(saved_ns=31.0 * MS, saved_ratio=31 / 190, step_ns=190.0 * MS, fidelity_ratio=0.008),
)
SYMPTOM = Finding(
    code="TI001",
    title="steps become longer over the run",
    severity=Severity.LOW,
    summary="steps grow.",
    change="Nothing.",
    gain=Estimate(saved_ns=2.0 * MS, step_ns=190.0 * MS, basis="made up"),
    explained_by="HE002 rank 5 is slow in forward",
)
NOTE = Finding(
    code="HE008",
    title="the diagnosis is based on few steps",
    severity=Severity.LOW,
    summary="few steps.",
    change="Record more.",
    gain=Unavailable("it does not make steps longer"),
)


def diagnosis_of(*findings: Finding, has_accelerators: bool = True) -> Diagnosis:
    return Diagnosis(
        findings=findings,
        names={"HE002": "rank-stopped", "HE008": "part-of-the-steps", "TI001": "step-time-drift"},
        scale=Scale(num_steps=60, num_ranks=8, has_accelerators=has_accelerators),
        step_ns=190.0 * MS,
        fidelity=Fidelity(
            error_ratio=0.008,
            measured_ns=190.0 * MS,
            replayed_ns=188.5 * MS,
            num_steps=59,
            unexplained_ratio=0.0,
        ),
        changed_thresholds={"spikes_min_count": 4.0},
        ledger=Unavailable("not priced"),
    )


def report_with(path, diagnosis: Diagnosis | None) -> Report:
    return report_of(path, diagnosis=diagnosis)


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path, layout=Layout(dp=8), num_steps=60, faults=Faults(slow={5: 1.5}))


@pytest.mark.parametrize("width", [100, 60])
def test_findings_look_as_agreed(run_dir, golden, width):
    report = report_with(run_dir, diagnosis_of(SLOW_RANK, SYMPTOM, NOTE))
    text = render_report(report, Screen(width=width))
    golden(f"reports/findings-{width}.txt", text[: text.index("\n\n  Run ")] + "\n")


def test_the_most_urgent_is_the_first_line_and_takes_the_clues_place(run_dir):
    report = report_with(run_dir, diagnosis_of(SLOW_RANK))
    text = render_report(report, Screen())
    assert text.startswith(
        "Rank 5 is slow in forward: fixing it saves 31.0 ms of 190 ms a step (16 %).\n60 steps on"
    )
    assert "Clue:" not in text
    without = report_with(run_dir, None)
    assert "Clue: rank 5" in render_report(without, Screen())


def test_what_has_no_price_says_none():
    finding = Finding(
        code="CV001",
        title="the loss is not a number",
        severity=Severity.CRITICAL,
        summary="NaN.",
        change="Lower the rate.",
        gain=Unavailable("it does not make steps longer"),
    )
    assert describe_worst(diagnosis_of(finding)) == "The loss is not a number."


def test_a_count_of_steps_is_told_from_a_step(run_dir):
    evidence = (
        Evidence(name="steps that have one", value=1, unit="steps"),
        Evidence(name="first slow step", value=31, unit="step"),
    )
    text = render_report(report_with(run_dir, diagnosis_of(replace(SLOW_RANK, evidence=evidence))))
    assert "steps that have one 1 step; first slow step 31\n" in text


def test_a_healthy_run_says_that_rules_looked(run_dir):
    text = render_report(report_with(run_dir, diagnosis_of(NOTE)), Screen())
    assert text.startswith("60 steps on 8 ranks")
    nothing = "No finding above low severity (1 of low severity: --explain); 3 rules ran\n"
    assert nothing in text
    assert "low  HE008  the diagnosis is based on few steps\n" in text


@pytest.mark.parametrize(("has_accelerators", "unit"), [(True, "GPU-hours"), (False, "rank-hours")])
def test_hours_are_of_ranks_without_accelerators(run_dir, has_accelerators, unit):
    diagnosis = diagnosis_of(SLOW_RANK, has_accelerators=has_accelerators)
    long_run = replace(diagnosis, scale=replace(diagnosis.scale, num_steps=180_000))
    text = render_report(report_with(run_dir, long_run), Screen(width=200))
    assert f"(16 %), 12.4 {unit} over 180,000 steps; replayed" in text


def test_next_to_no_hours_are_not_named(run_dir):
    text = render_report(report_with(run_dir, diagnosis_of(SLOW_RANK)), Screen(width=200))
    assert "  Saves     31.0 ms of 190 ms a step (16 %); replayed\n" in text


def test_an_exact_replay_is_not_off_by_zero(run_dir):
    diagnosis = diagnosis_of(SLOW_RANK)
    exact = replace(diagnosis, fidelity=replace(diagnosis.fidelity, error_ratio=0.0))
    text = render_report(report_with(run_dir, exact), Screen())
    assert "Findings  savings come from a replay that reproduces the measured time\n" in text


def test_the_document_has_everything(run_dir):
    report = report_with(run_dir, diagnosis_of(SLOW_RANK, SYMPTOM, NOTE))
    document = document_of(report)["diagnosis"]
    assert document["worst_severity"] == "high"
    assert document["replay_error_ratio"] == 0.008
    assert document["changed_thresholds"] == {"spikes_min_count": 4.0}
    first, second, third = document["findings"]
    assert first["ranks"] == [{"first": 5, "last": 5}]
    assert (first["saved_ns"], first["price_basis"]) == (31.0 * MS, "replayed")
    assert first["recoverable_rank_hours"] == pytest.approx(31e6 * 60 * 8 / 3.6e12)
    assert first["evidence"][2] == {"name": "steps compared", "value": 59, "unit": "steps"}
    assert first["confidence"]["p_value"] == 1e-20
    assert (second["price_basis"], second["explained_by"]) == (
        "made up",
        "HE002 rank 5 is slow in forward",
    )
    assert third["saved_ns"] == {"unavailable": "it does not make steps longer"}
    assert document_of(report_with(run_dir, None))["diagnosis"] is None


def test_hostile_text_and_numbers_have_no_effect(run_dir):
    import numpy as np

    finding = Finding(
        code="TI001",
        title=EVIL,
        severity=Severity.HIGH,
        summary=EVIL * 100,
        ranks=(np.int64(3),),
        evidence=(
            Evidence(name=EVIL, value=EVIL),
            Evidence(name="nan", value=float("nan"), unit="ns"),
            Evidence(name="count", value=np.int64(7)),
            Evidence(name="time", value=np.float64(7.5), unit="ns"),
        ),
        change=EVIL,
        gain=Estimate(saved_ns=np.float64("nan"), step_ns=1.0, basis=EVIL),
    )
    report = report_with(run_dir, diagnosis_of(finding))
    assert document_of(report)["diagnosis"]["findings"][0]["evidence"][2]["value"] == 7
    for width in (40, 100):
        text = render_report(report, Screen(width=width))
        assert not re.search("[\x1b\u202e]", text)
        assert "owned" not in text
        assert find_widest(text, but=run_dir) <= width


def test_many_findings_are_cut_and_counted(run_dir):
    findings = [SLOW_RANK] * 9 + [NOTE] * 7
    text = render_report(report_with(run_dir, diagnosis_of(*findings)), Screen())
    assert text.count("high  HE002") == 6
    assert "and 3 more findings (see --json)" in text
    assert "and 3 more findings of low severity (see --json)" in text


@pytest.mark.parametrize(
    ("course", "steps", "is_over", "text"),
    [
        (Course.ALWAYS, (None, None), False, "since the first analysed step, 7"),
        (Course.SINCE, (7, None), False, "since step 7"),
        (Course.SINCE, (7, 12), True, "from step 7 to 12"),
        (Course.SINCE, (7, 59), False, "since step 7"),
        (Course.SINCE, (7, 7), False, "in step 7"),
        (Course.AT_TIMES, (7, 30), True, "at times, first in step 7"),
    ],
)
def test_since_when_reads_as_a_sentence(course, steps, is_over, text):
    unseen = Unavailable("not recorded")
    onset = Onset(step=7, start_unix_ns=unseen, course=course, is_over=is_over)
    found = replace(SLOW_RANK, first_step=steps[0], last_step=steps[1], onset=onset)
    assert describe_onset(found) == text
    assert "not known: because" in describe_onset(replace(found, onset=Unavailable("because")))
