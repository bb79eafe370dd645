"""The sections on hyper-parameters and logged numbers, in text and JSON."""

import math

from meshscope.capture.recorder import Recorder
from meshscope.report.contents import list_sections
from meshscope.report.render.terminal import render_terminal
from meshscope.report.run.report import Detail
from meshscope.report.screen import Screen
from report_builders import document_of, report_of


def record(path, **groups):
    with Recorder(path) as recorder:
        for name, config in groups.items():
            recorder.set_config(config, name, f"made by {name}")
        for _ in range(2):
            with recorder.step(), recorder.phase("forward"):
                pass
    return report_of(path)


def test_every_group_is_shown_with_how_it_is_known(tmp_path):
    report = record(tmp_path, config={"lr": 0.1, "data": {"shuffle": True}}, Arguments={"bf16": 1})
    text = render_terminal(list_sections(report, Detail(), ("settings",)), Screen(width=80))
    assert [line.split() for line in text.splitlines() if line] == [
        ["Settings", "as", "the", "lowest", "rank", "recorded", "them"],
        ["config:", "made", "by", "config"],
        ["name", "value"],
        ["lr", "0.1"],
        ["data.shuffle", "True"],
        ["Arguments:", "made", "by", "Arguments"],
        ["name", "value"],
        ["bf16", "1"],
    ]
    first = {"name": "config", "known_by": "made by config", "num_left_out": 0}
    values = {"lr": 0.1, "data.shuffle": True}
    assert document_of(report)["settings"][0] == {**first, "values": values}


def test_a_run_without_any_says_how_to_give_them(tmp_path):
    assert "start(config=…)" in document_of(record(tmp_path))["settings"]["unavailable"]


def test_logged_numbers_are_shown_with_who_logged_them(tmp_path):
    with Recorder(tmp_path) as recorder:
        for step in range(3):
            with recorder.step():
                recorder.log(
                    accuracy=step / 4, **{"loss (logged by Frame)": [2, math.nan, 1][step]}
                )
                recorder.log(lr=0.1, empty=math.inf)
    report = report_of(tmp_path)
    text = render_terminal(list_sections(report, Detail(), ("logged",)), Screen(width=100))
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["name", "logged", "by", "values", "steps", "first", "last", "lowest", "highest"],
        ["accuracy", "the", "program", "3", "0–2", "0", "0.5", "0", "0.5"],
        ["empty", "the", "program", "3", "0–2", "n/a", "n/a", "n/a", "n/a"],
        ["loss", "Frame", "3", "0–2", "2", "1", "1", "2"],
    ]
    accuracy, empty, _ = document_of(report)["logged"]
    assert (accuracy["first_step"], accuracy["last"]) == (0, 0.5)
    assert empty["last"] == {"unavailable": "no logged value is finite"}
