from dataclasses import replace

import pytest
from diagnosed import context_of, make_finding, make_rule

from builders import make_run
from meshscope.core.layout import Layout
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Estimate
from meshscope.diagnose.registry import RULES
from meshscope.diagnose.runner import diagnose

GAIN = Estimate(saved_ns=10.0, step_ns=100.0, basis="made up")


def write_run(path, queued_ratio, *, run_ratio=0.4):
    """What a recorder would have written on closing."""
    make_run(path, num_steps=12)
    context = context_of(path)
    (rank,) = context.study.attempt.ranks
    recording = context.study.attempt.ranks[rank]
    run_ns, queued_ns = int(1000 * run_ratio), int(1000 * queued_ratio)
    counted = {"elapsed_ns": 1000, "run_ns": run_ns, "queued_ns": queued_ns}
    told = replace(recording, updates=(*recording.updates, {"core_queue": counted}))
    context.study.attempt.ranks[rank] = told
    return context


@pytest.mark.parametrize(
    ("code", "queued_ratio", "severity"),
    [
        ("PA002", 0.06, Severity.LOW),
        ("PA002", 0.04, Severity.HIGH),
        ("ST001", 0.5, Severity.HIGH),
        ("IN002", 0.11, Severity.LOW),
        ("IN002", 0.09, Severity.HIGH),
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
    ("run_ratio", "saved_ns", "severity"),
    [(0.9, 4.0, Severity.LOW), (0.9, 6.0, Severity.HIGH), (0.3, 4.0, Severity.HIGH)],
)
def test_a_rank_that_computes_on_a_core_may_have_a_slower_one(
    tmp_path, run_ratio, saved_ns, severity
):
    context = write_run(tmp_path, 0.0, run_ratio=run_ratio)
    gain = replace(GAIN, saved_ns=saved_ns)
    rule = make_rule("ST001", lambda _: [make_finding("ST001", ranks=(0,), gain=gain)])
    (found,) = diagnose(context, rules={"ST001": rule}).findings
    assert found.severity is severity


@pytest.mark.parametrize(("saved_ns", "severity"), [(9.0, Severity.LOW), (30.0, Severity.CRITICAL)])
def test_data_that_takes_much_of_the_step_is_told_however_long_threads_wait(
    tmp_path, saved_ns, severity
):
    """What waits for cores slows the rest of the step as well."""
    context = write_run(tmp_path, 0.6)
    gain = replace(GAIN, saved_ns=saved_ns)
    rule = make_rule(
        "IN002", lambda _: [make_finding("IN002", gain=gain, severity=Severity.CRITICAL)]
    )
    (found,) = diagnose(context, rules={"IN002": rule}).findings
    assert found.severity is severity


def write_ranks(path, queued_ratios, *, num_cores):
    make_run(path, layout=Layout(dp=len(queued_ratios)), num_steps=12)
    context = context_of(path)
    for rank, recording in context.study.attempt.ranks.items():
        queued_ns = int(1000 * queued_ratios[rank])
        counted = {"elapsed_ns": 1000, "run_ns": 500, "queued_ns": queued_ns, "cores": "0-1"}
        counted |= {"num_threads": 1, "num_cores": num_cores}
        told = replace(recording, updates=({"core_queue": counted},))
        context.study.attempt.ranks[rank] = told
    return context


@pytest.mark.parametrize(("num_cores", "severity"), [(2, Severity.LOW), (3, Severity.HIGH)])
def test_a_short_wait_for_data_is_low_where_ranks_outnumber_cores(tmp_path, num_cores, severity):
    context = write_ranks(tmp_path, (0.01, 0.01, 0.01), num_cores=num_cores)
    gain = replace(GAIN, saved_ns=9.0)
    rule = make_rule("IN002", lambda _: [make_finding("IN002", gain=gain)])
    (found,) = diagnose(context, rules={"IN002": rule}).findings
    assert found.severity is severity
    assert ("outnumber" in found.confidence.text) == (severity is Severity.LOW)


@pytest.mark.parametrize(("code", "severity"), [("PA002", Severity.LOW), ("ST003", Severity.HIGH)])
def test_who_pauses_is_not_compared_with_others_that_wait_as_long(tmp_path, code, severity):
    context = write_ranks(tmp_path, (0.3, 0.3), num_cores=2)
    rule = make_rule(code, lambda _: [make_finding(code, gain=GAIN, ranks=(0,))])
    (found,) = diagnose(context, rules={code: rule}).findings
    assert found.severity is severity


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


def crowd(path, *, num_threads, num_cores, queued_ratio, num_ranks=2):
    """Ranks of one host that may use the same cores."""
    make_run(path, layout=Layout(dp=num_ranks), num_steps=12)
    context = context_of(path)
    for rank, recording in context.study.attempt.ranks.items():
        counted = {
            "elapsed_ns": 1000,
            "run_ns": 500,
            "queued_ns": int(1000 * queued_ratio),
            "num_threads": num_threads,
            "num_cores": num_cores,
            "cores": f"0-{num_cores - 1}",
        }
        told = replace(recording, updates=({"core_queue": counted},))
        context.study.attempt.ranks[rank] = told
    return diagnose(context, rules={"HW003": RULES["HW003"]}).findings


def test_threads_that_outnumber_their_cores_cost_what_they_wait(tmp_path):
    (found,) = crowd(tmp_path, num_threads=16, num_cores=4, queued_ratio=0.4)
    assert found.title == "32 threads share 4 cores"
    assert found.gain.saved_ratio == pytest.approx(0.4)
    assert "OMP_NUM_THREADS=2" in found.change


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "queued_ratio"),
    [(16, 4, 0.02), (2, 4, 0.4), (1, 1, 0.4), (True, 4, 0.4), (-3, 4, 0.4)],
)
def test_threads_that_fit_or_wait_for_nothing_or_cannot_be_fewer(
    tmp_path, num_threads, num_cores, queued_ratio
):
    """A loaded machine makes ranks of one thread wait, too."""
    assert not crowd(
        tmp_path, num_threads=num_threads, num_cores=num_cores, queued_ratio=queued_ratio
    )
