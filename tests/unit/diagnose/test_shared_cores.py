from dataclasses import replace

import pytest
from diagnosed import context_of, make_finding, make_rule

from builders import make_run
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Estimate
from meshscope.diagnose.runner import diagnose

GAIN = Estimate(saved_ns=10.0, step_ns=100.0, basis="made up")


def write_run(path, queued_ratio):
    """What a recorder would have written on closing."""
    make_run(path, num_steps=12)
    context = context_of(path)
    (rank,) = context.study.attempt.ranks
    recording = context.study.attempt.ranks[rank]
    counted = {"elapsed_ns": 1000, "run_ns": 500, "queued_ns": int(1000 * queued_ratio)}
    told = replace(recording, updates=(*recording.updates, {"core_queue": counted}))
    context.study.attempt.ranks[rank] = told
    return context


@pytest.mark.parametrize(
    ("code", "queued_ratio", "severity"),
    [
        ("PA002", 0.06, Severity.LOW),
        ("PA002", 0.04, Severity.HIGH),
        ("ST001", 0.5, Severity.HIGH),
    ],
)
def test_what_a_busy_machine_shows_too_is_low(tmp_path, code, queued_ratio, severity):
    """The finding costs 10 % of a step: waiting for cores in half of that may be all of it."""
    context = write_run(tmp_path, queued_ratio)
    rule = make_rule(code, lambda _: [make_finding(code, gain=GAIN)])
    (found,) = diagnose(context, rules={code: rule}).findings
    assert found.severity is severity
    assert ("for a core" in found.confidence.text) == (severity is Severity.LOW)


@pytest.mark.parametrize(
    "value", [None, {}, {"elapsed_ns": 0}, {"elapsed_ns": "x"}, {"elapsed_ns": True}]
)
def test_whatever_a_journal_says_of_it_is_read_safely(tmp_path, value):
    context = write_run(tmp_path, 0.5)
    (rank,) = context.study.attempt.ranks
    recording = context.study.attempt.ranks[rank]
    context.study.attempt.ranks[rank] = replace(recording, updates=({"core_queue": value},))
    rule = make_rule("PA002", lambda _: [make_finding("PA002", gain=GAIN)])
    (found,) = diagnose(context, rules={"PA002": rule}).findings
    assert found.severity is Severity.HIGH
