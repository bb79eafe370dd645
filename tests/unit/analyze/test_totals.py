"""Totals of a job against sums made by hand, and given durations in a step's split."""

import math
import random

import pytest

import meshscope
from builders import MS, make_run
from fake_clock import FakeClock
from meshscope.analyze.training.totals import Counter, TimedName
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable


@pytest.fixture
def recorded(tmp_path):
    """A recorder on a clock, and a function that ends it and studies what it recorded."""
    clock = FakeClock(7_000 * MS)
    config = RecorderConfig(provenance=False, gc_pauses=False, memory=False)
    recorder = Recorder(tmp_path / "run", config=config, clock=clock)

    def study():
        recorder.close()
        assert recorder.guard.counts == {}
        return meshscope.study(tmp_path / "run", warmup_steps=0)

    yield recorder, clock, study
    recorder.close()


def test_what_a_program_counts_times_and_logs_is_added_up(recorded):
    recorder, clock, study = recorded
    for step in range(4):
        with recorder.step():
            recorder.count("samples", 8)
            timer = recorder.timer("upload").start()
            clock.now_ns += 3 * MS
            timer.stop()
            recorder.add_duration("rollout", 0.002)
            recorder.log(memory_gib=10 - step, tokens=50, loss=1.0)
        recorder.log(memory_gib=math.inf)
    found = study()
    totals = found.study.totals
    assert totals.counters == (Counter(name="samples", total=32, num_values=4, num_ranks=1),)
    common = {"num_times": 4, "num_ranks": 1}
    assert totals.times == (
        TimedName(name="upload", is_given=False, total_ns=12 * MS, **common),
        TimedName(name="rollout", is_given=True, total_ns=8 * MS, **common),
    )
    (memory,) = found.study.logged  # what was counted is not logged
    assert (memory.name, memory.num_values, memory.last, memory.highest) == ("memory_gib", 8, 7, 10)
    assert (totals.num_rank_steps, totals.num_tokens) == (4, 200)
    text = found.report().to_text("totals")
    for row in ("samples  32", "upload   12.0 ms  3.00 ms", "the program"):
        assert row in text


def test_ranks_are_added_up_and_tokens_of_only_some_are_not_a_total(tmp_path):
    made = {"layout": Layout(dp=2), "num_steps": 3, "detail": "decode"}
    totals = meshscope.study(make_run(tmp_path / "a", **made, input_tokens=64)).study.totals
    assert (totals.num_rank_steps, totals.num_backwards, totals.num_tokens) == (6, 6, 6 * 64)
    assert [(one.name, one.num_times, one.num_ranks) for one in totals.times] == [("decode", 24, 2)]
    scalars = {"reward": lambda rank, step: rank + step}
    found = meshscope.study(make_run(tmp_path / "b", **made, scalars=scalars)).study.totals
    assert isinstance(found.num_tokens, Unavailable)


def test_a_given_duration_counts_where_nothing_was_measured(recorded):
    recorder, clock, study = recorded
    with recorder.step():
        clock.now_ns += 5 * MS
        recorder.add_duration("forward", 0.004)
        with recorder.phase("backward"):
            clock.now_ns += 3 * MS
        recorder.add_duration("forward", 0.001)  # backward was measured then
        clock.now_ns += 2 * MS
        recorder.add_duration("update", 0.002)
        recorder.add_duration("update", 0.001)  # told twice
    found = study()
    split = found.study.time.steps
    assert dict(split.phase_ns) == {"forward": 4 * MS, "backward": 3 * MS, "update": 2 * MS}
    assert split.unattributed_ns == 1 * MS
    assert "given by the program, not measured: forward, update" in found.report().to_text("phases")


def test_whatever_is_given_a_split_adds_up(recorded):
    recorder, clock, study = recorded
    draw = random.Random(3)
    for _ in range(50):
        with recorder.step():
            for _ in range(8):
                clock.now_ns += draw.randrange(3 * MS)
                if draw.random() < 0.5:
                    with recorder.phase(draw.choice(["forward", "mine"])):
                        clock.now_ns += draw.randrange(3 * MS)
                recorder.add_duration(draw.choice(["forward", "data"]), draw.random() * 0.006)
    split = study().study.time.steps
    assert all(total > 0 for total in split.phase_ns.values())
    assert split.unattributed_ns >= 0


def test_programs_that_put_numbers_into_names_are_cut_off(recorded):
    recorder, clock, study = recorded
    for number in range(150):
        recorder.count(f"file {number:03}")
        with recorder.span(f"item {number:03}"):
            clock.now_ns += 1 + number
    totals = study().study.totals
    assert [one.name for one in totals.counters] == [f"file {number:03}" for number in range(100)]
    assert totals.times[0].name == "item 149"
    assert totals.num_names_left_out == 100
