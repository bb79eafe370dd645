"""Times by hand: a clock that names what was, timers, durations measured elsewhere, counters."""

import threading
from types import SimpleNamespace

import pytest
from recorded import finish, read_recorded

import meshscope
from meshscope.capture import native_steps
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.capture.steps.device_events import Mark
from meshscope.store.schema import ScalarFlag, SpanFlag

MS = 1_000_000


@pytest.fixture(params=["native", "plain"])
def rec(request, tmp_path, clock, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native_steps, "_load", lambda: None)
    config = RecorderConfig(provenance=False, gc_pauses=False, memory=False)
    made = Recorder(tmp_path / "run", config=config, clock=clock)
    yield made
    made.close()


def in_ms(step) -> dict[str, float]:
    return {name: step.total_ns(name) / MS for name in step.names}


def test_marks_name_what_was_from_the_first_step_on(rec, clock):
    for _ in range(3):
        rec.begin_step()
        clock.advance(2 * MS)
        rec.mark("data")
        clock.advance(3 * MS)
        rec.mark("forward")
        clock.advance(5 * MS)
        rec.mark("backward")
        clock.advance(1 * MS)
        rec.mark("forward")  # again: times of a name add up
        clock.advance(7 * MS)  # not named: unattributed
        rec.end_step()
        clock.advance(100 * MS)
    recorded = finish(rec)
    for step in recorded.steps:
        assert in_ms(step) == {"data": 2, "forward": 4, "backward": 5}
        assert step.end_ns - step.start_ns == 18 * MS
    assert not recorded.outside


def test_phases_inside_take_their_time_from_the_mark(rec, clock):
    with rec.step():
        clock.advance(1 * MS)
        rec.mark("data")
        clock.advance(2 * MS)
        with rec.phase("comm"):
            clock.advance(4 * MS)
        clock.advance(8 * MS)
        rec.mark("forward")
    (step,) = finish(rec).steps
    assert in_ms(step) == {"data": 1, "comm": 4, "forward": 10}


def test_the_first_mark_claims_nothing_that_a_phase_before_it_had(rec, clock):
    for _ in range(2):
        with rec.step():
            with rec.phase("forward"):
                clock.advance(4 * MS)
            clock.advance(2 * MS)
            rec.mark("loss")
            clock.advance(1 * MS)
            rec.mark("metrics")
    first, second = finish(rec).steps
    assert in_ms(first) == {"forward": 4, "loss": 0, "metrics": 1}
    assert in_ms(second) == {"forward": 4, "loss": 2, "metrics": 1}


def test_a_mark_where_it_means_nothing_is_counted_and_changes_nothing(rec, clock):
    rec.mark("early")
    with rec.step():
        with rec.phase("forward"):
            clock.advance(3 * MS)
            rec.mark("inside")
        thread = threading.Thread(target=rec.mark, args=("elsewhere",))
        thread.start()
        thread.join()
    rec.mark("late")
    (step,) = finish(rec, mark=4).steps
    assert in_ms(step) == {"forward": 3}


def test_marks_survive_exceptions_pauses_and_a_new_attempt(rec, clock):
    def fail():
        with rec.step():
            clock.advance(1 * MS)
            rec.mark("data")
            clock.advance(1 * MS)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    rec.pause()
    with rec.step():
        rec.mark("data")
    rec.resume()
    with rec.step():
        clock.advance(6 * MS)
        rec.mark("data")
    first, last = read_recorded(rec.run_dir).steps
    assert (in_ms(first), in_ms(last)) == ({"data": 1}, {"data": 6})
    rec.reset()
    with rec.step():
        clock.advance(9 * MS)
        rec.mark("data")
    (again,) = finish(rec).steps
    assert in_ms(again) == {"data": 9}


def test_marks_are_made_on_the_device_and_taken_back(rec, clock):
    closed, free = [], []
    device = SimpleNamespace(
        mark=lambda name_id, host_ns: Mark(name_id, host_ns, object()),
        close_span=lambda mark, _: closed.append((mark.name_id, mark.host_ns)),
        forget=lambda mark: free.append(mark.host_ns),
    )
    with rec.step():
        rec.mark("data")
    rec.timeline.mark_device(device)
    with rec.step():
        start_ns = clock.now_ns
        clock.advance(2 * MS)
        rec.mark("forward")
        clock.advance(1 * MS)
    assert closed == [(rec.name_id("forward"), start_ns)]
    assert free == [start_ns + 2 * MS]
    rec.timeline.mark_device(None)
    finish(rec)


def test_a_timer_starts_here_and_stops_there(rec, clock):
    timer = rec.timer("upload")
    with rec.step(), rec.phase("forward"):
        timer.start()
        clock.advance(3 * MS)
    clock.advance(2 * MS)
    assert timer.is_running
    thread = threading.Thread(target=lambda: results.append(timer.stop()))
    results: list[float] = []
    thread.start()
    thread.join()
    assert results == [0.005]
    assert timer.stop() is None  # counted, not raised
    recorded = finish(rec, timer=1)
    spans = [*recorded.steps[0].phases, *recorded.outside]
    assert [one.is_detail for one in spans if one.name == "upload"] == [True]
    assert in_ms(recorded.steps[0]) == {"forward": 3}


def test_a_duration_measured_elsewhere_is_a_part_of_the_open_phase(rec, clock):
    with rec.step(), rec.phase("forward"):
        clock.advance(10 * MS)
        rec.add_duration("attention", 0.004)
        rec.add_duration("too long", 0.007)  # 6 ms are left: it cannot be a part
    recorded = finish(rec)
    assert in_ms(recorded.steps[0]) == {"forward": 6, "attention": 4}
    flags = dict(zip(*read_flags(recorded), strict=True))
    assert flags["attention"] == SpanFlag.GIVEN
    assert flags["too long"] == SpanFlag.GIVEN | SpanFlag.DETAIL


def read_flags(recorded) -> tuple[list[str], list[int]]:
    spans = recorded.rank.read("spans")
    return [recorded.rank.name_of(one) for one in spans["name_id"]], spans["flags"].tolist()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, 1e12, "soon", None])
def test_what_is_no_duration_is_counted(rec, seconds):
    with rec.step():
        rec.add_duration("data", seconds)
    assert in_ms(finish(rec, duration=1).steps[0]) == {}


def test_data_given_before_a_step_begin_it(rec, clock):
    for _ in range(3):
        clock.advance(4 * MS)
        rec.add_duration("data", 0.003)
        clock.advance(1 * MS)
        rec.begin_step()
        clock.advance(5 * MS)
        rec.mark("forward")
        rec.end_step()
    clock.advance(1 * MS)
    rec.add_duration("data", 60.0)  # longer than the gap: the step before keeps its time
    rec.begin_step()
    rec.end_step()
    path = rec.run_dir
    finish(rec)
    study = meshscope.study(path, warmup_steps=0).study
    steps = study.attempt.ranks[0].read("steps")
    duration = steps["end_host_mono_ns"] - steps["start_host_mono_ns"]
    assert (duration / MS).tolist() == [9, 9, 9, 1]
    assert dict(study.time.steps.phase_ns) == {"data": 9 * MS, "forward": 15 * MS}
    assert study.time.given == ("data",)


def test_given_durations_are_in_the_monitor(rec, clock):
    for _ in range(2):
        with rec.step():
            clock.advance(6 * MS)
            rec.add_duration("forward", 0.006)
            with rec.phase("backward"):
                clock.advance(3 * MS)
            rec.add_duration("forward", 0.002)  # that was backward: it is measured
            rec.log(tokens=100)
    stats = rec.stats()
    assert (stats.forward_ns, stats.backward_ns, stats.num_tokens) == (12 * MS, 6 * MS, 200)
    assert "2 forward, 2 backward" in rec.report()


def test_counters_are_added_up_and_marked_as_such(rec):
    with rec.step():
        rec.count("samples", 32)
        rec.count("skipped")
        rec.count("samples", "many")
    recorded = finish(rec, count=1)
    assert recorded.values("samples") == [32]
    assert recorded.rank.read("scalars")["flags"].tolist() == [ScalarFlag.COUNT] * 2


def test_nothing_is_opened_while_recording_is_off(tmp_path):
    rec = Recorder(tmp_path / "run", config=RecorderConfig(enabled=False))
    rec.begin_step()
    rec.mark("data")
    rec.add_duration("data", 1.0)
    rec.count("samples", 3)
    timer = rec.timer("upload").start()
    assert timer.stop() is not None
    rec.end_step()
    assert rec.guard.counts == {}
    assert not (tmp_path / "run").exists()
