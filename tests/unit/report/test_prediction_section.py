"""Predicted against measured: a run whose times are known, and one without a prediction."""

import json
from types import SimpleNamespace

import pytest

from builders import MS, make_run
from meshscope.core.layout import Layout
from meshscope.core.prediction import LINES, PredictedTime, Prediction
from meshscope.core.unavailable import Unavailable
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.report import Detail
from meshscope.report.screen import Screen
from meshscope.report.sections.run.prediction import show_prediction
from report_builders import report_of

PHASES = (("forward", 30 * MS), ("backward", 60 * MS), ("data", 7 * MS))
"""With 3 ms in no phase a step takes 100 ms: 90 compute, 10 other, and 1 of a gap before it."""


def make_report(path, prediction):
    header = {"prediction": json.loads(json.dumps(prediction.as_fields()))} if prediction else {}
    make_run(path, layout=Layout(pp=2), num_steps=12, phases=PHASES, header=header)
    return report_of(path, diagnosis=SimpleNamespace())


def predict(step_ns, **lines_ns):
    lines = {**dict.fromkeys(LINES, 0.0), **{name: one * MS for name, one in lines_ns.items()}}
    return Prediction(
        time=PredictedTime(
            step_ns=step_ns, interval_ratio=0.1, lines_ns=lines, calibrated_on="runs \x1b[31m",
            fitted=("the pace",),
        ),
        memory_bytes={0: {"parameters": 3 << 20}, 1: {"parameters": 1 << 20, "gradients": 1 << 20}},
    )  # fmt: skip


def test_the_residual_of_each_line_is_measured_minus_predicted(tmp_path):
    check = make_report(tmp_path, predict(95 * MS, compute=80, bubble=5, other=10)).prediction
    assert check.step.measured_ns == pytest.approx(101 * MS)
    assert check.step.residual_ns == pytest.approx(6 * MS)
    assert check.is_within is True
    left = {one.name: one.residual_ns / MS for one in check.lines}
    assert list(left) == list(LINES)
    assert left == pytest.approx(
        {"compute": 10, "bubble": -5, "tp": 0, "dp": 0, "pp": 0, "other": 1}
    )


def test_a_step_beyond_the_interval_is_outside(tmp_path):
    assert make_report(tmp_path, predict(80 * MS, compute=80)).prediction.is_within is False


def test_memory_that_was_not_measured_says_so(tmp_path):
    report = make_report(tmp_path, predict(95 * MS, compute=80))
    assert [one.predicted_bytes for one in report.prediction.memory] == [3 << 20, 2 << 20]
    assert all(isinstance(one.residual_bytes, Unavailable) for one in report.prediction.memory)
    text = render_terminal([show_prediction(report, Detail())], Screen())
    assert "--profiling" in text
    assert "left over" in text
    assert "\x1b" not in text


def test_without_a_prediction_there_is_no_section(tmp_path):
    report = make_report(tmp_path, None)
    assert "nothing was predicted" in report.prediction.reason
    assert show_prediction(report, Detail()) is None
