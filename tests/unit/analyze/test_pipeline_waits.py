"""Pipelines of which only messages were recorded."""

import pytest

from builders import MS, put_span, put_step
from communication_builders import Job
from meshscope.analyze.pipeline.message_chains import find_message_chains
from meshscope.analyze.pipeline.pipeline import analyze_pipeline
from meshscope.analyze.pipeline.pipeline_waits import measure_pipeline_waits
from meshscope.analyze.study import Study
from meshscope.analyze.timeline.timeline import build_timeline
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.context import Context
from meshscope.diagnose.finding import Estimate
from meshscope.diagnose.registry import RULES
from meshscope.store.read.run import open_run

WORK_NS = 10 * MS
NUM_STEPS = 6


def write_gpipe(path, *, m, layout=None, num_steps=NUM_STEPS):
    """Two ranks, F and B of 10 ms each, GPipe, nothing else: each ends its steps on its own."""
    job = Job(path, num_ranks=2, layout=layout)
    group = job.group((0, 1))
    free = [0, 0]
    for step in range(num_steps):
        start, now = list(free), list(free)
        for _ in range(m):
            now[0] += WORK_NS
            asked = now[1]
            job.message(group, 0, 1, sent_ns=now[0], asked_ns=asked, latency_ns=1000)
            now[1] = max(now[0], asked) + WORK_NS
        for _ in range(m):
            now[1] += WORK_NS
            asked = now[0]
            job.message(group, 1, 0, sent_ns=now[1], asked_ns=asked, latency_ns=1000)
            now[0] = max(now[1], asked) + WORK_NS
        for rank in range(2):
            free[rank] = now[rank] + MS
            writer = job.writers[rank]
            put_step(writer, step, job.local_ns(rank, start[rank]), job.local_ns(rank, free[rank]))
    job.close()
    return path


def timeline_of(path):
    attempt = open_run(path).last_attempt
    timeline = build_timeline(attempt, warmup_steps=0)
    assert not isinstance(timeline, Unavailable), timeline
    return timeline, attempt


@pytest.mark.parametrize("layout", [None, Layout(pp=2)])
def test_waits_are_the_bubble_and_messages_the_microbatches(tmp_path, layout):
    timeline, attempt = timeline_of(write_gpipe(tmp_path / "run", m=2, layout=layout))
    assert isinstance(analyze_pipeline(timeline, attempt), Unavailable)
    waits = measure_pipeline_waits(timeline)
    assert not isinstance(waits, Unavailable)
    assert (waits.chains, waits.num_microbatches, waits.num_stages) == (((0, 1),), 2, 2)
    # A step is 2 + 1 microbatches of 20 ms; each rank waits for 20 ms of it.
    assert waits.bubble_ns == pytest.approx(20 * MS, rel=0.1)
    assert waits.saved_ns(4) == pytest.approx(10 * MS, rel=0.1)


def test_chains_are_found_by_messages(tmp_path):
    timeline, _ = timeline_of(write_gpipe(tmp_path / "run", m=3))
    assert find_message_chains(timeline) == ((0, 1),)


def write_exchange(path, *, is_before, is_answered):
    """Two ranks that run backward from 10 to 20 ms of a step, and a message from rank 0 before or
    after it."""
    job = Job(path, num_ranks=2)
    group = job.group((0, 1))
    for step in range(NUM_STEPS):
        begin = step * 40 * MS
        sent = begin + (5 * MS if is_before else 25 * MS)
        job.message(group, 0, 1, sent_ns=sent, asked_ns=sent, latency_ns=1000)
        if is_answered:
            back = begin + 30 * MS
            job.message(group, 1, 0, sent_ns=back, asked_ns=back, latency_ns=1000)
        for rank, writer in job.writers.items():
            put_step(writer, step, job.local_ns(rank, begin), job.local_ns(rank, begin + 39 * MS))
            put_span(writer, "backward", job.local_ns(rank, begin + 10 * MS), 10 * MS)
    job.close()
    return path


@pytest.mark.parametrize(
    ("is_before", "is_answered", "is_pipeline"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_stages_have_inputs_before_backward_and_gradients_come_back(
    tmp_path, is_before, is_answered, is_pipeline
):
    path = write_exchange(tmp_path / "run", is_before=is_before, is_answered=is_answered)
    timeline, _ = timeline_of(path)
    found = find_message_chains(timeline)
    assert (found == ((0, 1),)) if is_pipeline else isinstance(found, Unavailable)


def test_few_messages_are_told_with_an_estimate(tmp_path):
    context = Context(Study(open_run(write_gpipe(tmp_path / "run", m=1)).last_attempt))
    (found,) = RULES["PP001"]().run(context)
    assert found.severity >= Severity.HIGH
    assert isinstance(found.gain, Estimate)
    # Three microbatches of a third: 40 ms become 80 / 3.
    assert found.gain.saved_ns == pytest.approx((1 - 1 / 3) * 20 * MS, rel=0.1)
    assert "waits" in found.gain.basis


def test_many_messages_are_not(tmp_path):
    context = Context(Study(open_run(write_gpipe(tmp_path / "run", m=16)).last_attempt))
    assert list(RULES["PP001"]().run(context)) == []


def test_without_messages_there_is_nothing(tmp_path):
    timeline, _ = timeline_of(write_gpipe(tmp_path / "run", m=0, layout=Layout(pp=2)))
    assert isinstance(measure_pipeline_waits(timeline), Unavailable)
