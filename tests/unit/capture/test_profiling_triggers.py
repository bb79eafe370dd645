"""A file, a signal and what the recorder saw: what each asks for, and when."""

import math
import os
import signal

import pytest

from meshscope.capture.profiling.triggers import (
    LOOK_EVERY_NS,
    MIN_COMPARED_STEPS,
    AnomalyTrigger,
    FileTrigger,
    SignalTrigger,
)
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


def test_the_limit_ends_it():
    found = make_anomalies(limit=1)
    assert found.take(30, 30, 500 * MS) is not None
    assert found.is_spent
    assert found.take(60, 60, 500 * MS) is None
