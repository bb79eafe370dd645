"""A file, a signal and what the recorder saw: what each asks for, and when."""

import math
import os
import signal
import time

import pytest

from meshscope.capture.profiling.settings import parse_settings
from meshscope.capture.profiling.trace_windows import TraceWindows
from meshscope.capture.profiling.triggers import (
    LOOK_EVERY_NS,
    MIN_COMPARED_STEPS,
    AnomalyTrigger,
    FileTrigger,
    SignalTrigger,
)
from meshscope.capture.profiling.window_marks import MARKS_NAME, WindowMarks
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.errors import UsageError

MS = 1_000_000


def write(path, text: str, modified_ns: int) -> None:
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(modified_ns, modified_ns))


def test_a_file_is_followed_once_and_looked_at_once_a_second(tmp_path):
    path = tmp_path / "trigger"
    trigger = FileTrigger(path)
    assert trigger.take(0) is None
    write(path, '{"steps": 3}', 10)
    assert trigger.take(LOOK_EVERY_NS - 1) is None
    assert trigger.take(LOOK_EVERY_NS).num_steps == 3
    assert trigger.take(2 * LOOK_EVERY_NS) is None
    write(path, "", 20)
    assert trigger.take(3 * LOOK_EVERY_NS).num_steps is None


def test_what_stood_there_before_is_for_somebody_else(tmp_path):
    path = tmp_path / "trigger"
    write(path, '{"steps": 3}', 10)
    trigger = FileTrigger(path)
    assert trigger.take(0) is None


def test_a_file_that_makes_no_sense_is_said_once(tmp_path):
    path = tmp_path / "trigger"
    trigger = FileTrigger(path)
    write(path, "go", 10)
    with pytest.raises(UsageError):
        trigger.take(0)
    assert trigger.take(LOOK_EVERY_NS) is None


@pytest.fixture
def unused_signal():
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_a_signal_asks_and_is_left_as_it_was(unused_signal):
    trigger = SignalTrigger()
    assert trigger.install() == ""
    assert trigger.take() is None
    signal.raise_signal(signal.SIGUSR2)
    assert trigger.take().reason == "a signal"
    assert trigger.take() is None
    trigger.remove()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_signal_the_program_handles_is_its_own(unused_signal):
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    trigger = SignalTrigger()
    assert "handles SIGUSR2 itself" in trigger.install()
    trigger.remove()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def test_a_handler_the_program_has_put_in_since_stays(unused_signal):
    trigger = SignalTrigger()
    trigger.install()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    trigger.remove()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def make_anomalies(*, cooldown_steps: int = 5, cooldown_ns: int = 0, limit: int = 5):
    found = AnomalyTrigger(cooldown_steps=cooldown_steps, cooldown_ns=cooldown_ns, limit=limit)
    for step in range(MIN_COMPARED_STEPS):
        assert found.take(step, step, 20 * MS) is None
    return found


@pytest.mark.parametrize(
    ("duration_ns", "is_slow"), [(60 * MS, False), (61 * MS, True), (49 * MS, False)]
)
def test_a_slow_step_is_over_three_times_the_median(duration_ns, is_slow):
    found = make_anomalies().take(50, 50, duration_ns)
    assert (found is not None) == is_slow


def test_a_short_step_is_never_slow():
    found = AnomalyTrigger(cooldown_steps=0, cooldown_ns=0, limit=1)
    for step in range(20):
        found.take(step, step, MS)
    assert found.take(20, 20, 50 * MS) is None
    assert found.take(21, 21, 51 * MS).reason == "step 21 took 51.0 times the median"


def test_too_few_steps_say_nothing_about_what_is_usual():
    found = AnomalyTrigger(cooldown_steps=0, cooldown_ns=0, limit=1)
    assert found.take(0, 0, MS) is None
    assert found.take(1, 1, 1000 * MS) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(value):
    found = make_anomalies()
    found.note_loss("loss", 1.0)
    assert found.take(11, 11, 20 * MS) is None
    found.note_loss("loss", value)
    assert found.take(12, 12, 20 * MS).reason == f"loss is {value}, seen at step 12"
    assert found.take(13, 13, 20 * MS) is None


def test_after_a_window_both_steps_and_time_must_pass():
    found = make_anomalies(cooldown_steps=5, cooldown_ns=100)
    found.keep_quiet_after(20, 1000)

    def slow(step: int, now_ns: int) -> bool:
        return found.take(step, now_ns, 500 * MS) is not None

    assert not slow(25, 2000)
    assert not slow(26, 1099)
    assert slow(26, 1100)


def test_a_step_that_another_ranks_window_held_up_is_no_anomaly():
    found = make_anomalies(limit=1)
    assert found.take(30, 30, 500 * MS, is_disturbed=lambda: True) is None
    found.note_loss("loss", math.nan)
    lost = found.take(31, 31, 500 * MS, is_disturbed=lambda: True)
    assert lost.reason == "loss is nan, seen at step 31", "whatever held it up"


def test_a_window_is_near_a_step_up_to_half_its_duration_from_its_begin(tmp_path):
    other, marks = WindowMarks(tmp_path, 3), WindowMarks(tmp_path, 0)
    day_ns = 86_400 * 10**9
    assert not marks.is_any_near(0, day_ns), "no window yet"
    other.begin()
    marks.begin()
    os.utime(tmp_path / MARKS_NAME / "rank00000", ns=(0, 1))
    assert marks.is_any_near(0, day_ns)
    assert marks.is_any_near(day_ns // 3, day_ns)
    assert not marks.is_any_near(day_ns, day_ns), "begun at its end: for this very step"
    os.utime(tmp_path / MARKS_NAME / "rank00003", ns=(0, 1))
    assert not marks.is_any_near(0, day_ns), "over long before it"
    os.utime(tmp_path / MARKS_NAME / "rank00003", ns=(0, time.time_ns()))
    assert marks.is_any_near(day_ns, day_ns), "begun before it and not over"


def test_marks_that_cannot_be_set_are_let_be(tmp_path):
    marks = WindowMarks(tmp_path / "missing", 0)
    marks.begin()
    assert not marks.is_any_near(0, 10**18)


def test_the_limit_ends_it():
    found = make_anomalies(limit=1)
    assert found.take(30, 30, 500 * MS) is not None
    assert found.is_spent
    assert found.take(60, 60, 500 * MS) is None


def test_a_step_that_was_profiled_otherwise_is_no_anomaly(tmp_path):
    """The rank is not chosen: its one anomaly is used up without a window."""
    recorder = Recorder(tmp_path / "run", config=RecorderConfig(provenance=False))
    windows = TraceWindows(parse_settings("triggered,anomaly,limit=1,ranks=7"), recorder.session)
    for step in range(20):
        windows.visit(step, step * 1000 * MS, (step * 1000 + 20) * MS)
    windows.note_disturbed(20)
    windows.visit(20, 20_000 * MS, 20_500 * MS)
    assert windows.wants_every_step, "it still watches"
    windows.visit(21, 21_000 * MS, 21_500 * MS)
    assert not windows.wants_every_step, "the limit is reached"
    windows.close()
    recorder.close()
