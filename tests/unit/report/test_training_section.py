"""The section on loss, gradient norm and learning rate, in text and JSON."""

import math
import re
from pathlib import Path

from builders import make_run
from meshscope.core.layout import Layout
from meshscope.report.contents import list_sections
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.report import Detail, Report
from meshscope.report.screen import Screen
from report_builders import document_of, render_report, report_of


def make_report(path: Path, *, num_steps: int = 60) -> Report:
    """The loss falls, worst in step 0 and best in step 50; the rate never changes."""

    def log_loss(rank: int, step: int) -> float:
        noise = 0.05 * (-1) ** step
        return 0.4 if step == 50 else math.nan if step == 7 else 4 * math.exp(-step / 30) + noise

    scalars = {"loss": log_loss, "lr": lambda rank, step: 3e-4}
    return report_of(make_run(path, layout=Layout(dp=2), num_steps=num_steps, scalars=scalars))


def show(report: Report, width: int = 100) -> str:
    return render_terminal(list_sections(report, Detail(), ("training",)), Screen(width=width))


def test_each_signal_has_its_ends_its_extremes_and_a_line(tmp_path):
    lines = show(make_report(tmp_path)).splitlines()
    assert lines[1] == "Training  each step's median over ranks"
    ends = "4.050 → 0.5097 at step 59"
    assert lines[2] == f"  Loss  {ends}; best 0.4000 at step 50, highest 4.050 at step 0"
    assert len(lines[3].strip()) == 59  # NaN is no mark
    assert lines[3].strip()[0] == "█"
    assert lines[4] == "  loss at 59 of steps 0 to 59, a mark is one step"
    # 4 exp(-s / 30) falls from 1.47 to 0.56 in the last half: by about 0.32 in 10 steps
    assert re.match(r"  Trend  falling: -0\.3\d+ per 10 steps \(-0\.\d+ to -0\.2\d+\)", lines[5])
    assert "in the last half, steps 30 to 59" in " ".join(lines[5:7])
    assert "  Learning rate  3.000e-04 in all of 60 steps" in lines


def test_the_first_screen_has_the_loss_and_what_is_trained_on(tmp_path):
    scalars = {"loss": lambda rank, step: 4.0 - step, "samples": lambda rank, step: 32}
    text = render_report(report_of(make_run(tmp_path, num_steps=3, scalars=scalars)))
    assert "Loss  4.000 → 2.000 at step 2; best 2.000 at step 2, highest 4.000 at step 0" in text
    assert re.search(r"Samples +\d+ samples/s over 1 rank, logged by the program as samples", text)


def test_a_long_run_is_binned_and_no_line_is_too_wide(tmp_path):
    report = make_report(tmp_path, num_steps=1000)
    text = show(report)
    assert "a mark is up to 13 steps" in text
    for width in (40, 60):
        assert max(map(len, show(report, width).splitlines())) <= width


def test_the_document_holds_the_same_numbers(tmp_path):
    training = document_of(make_report(tmp_path))["training"]
    assert training["course"] == "falling"
    assert training["trend"]["slope_low"] < training["trend"]["slope"] < 0
    assert training["loss"]["lowest"] == {"step": 50, "value": 0.4}
    assert len(training["loss"]["points"]) == 59
    assert training["grad_norm"] == {"unavailable": "no rank logged grad_norm"}
    assert training["loss_nonfinite"]["first_step"] == 7


def test_a_run_that_logs_nothing_has_no_section(tmp_path):
    report = report_of(make_run(tmp_path, num_steps=5))
    assert "\nTraining\n" not in render_report(report)
    assert show(report) == "\nTraining\n  none\n"
