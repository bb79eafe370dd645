import os
import signal

import pytest

from meshscope.engine.launch.stop_request import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_interrupts_nothing(number):
    with StopRequest.on_signals() as stop:
        assert not stop.is_set
        os.kill(os.getpid(), number)
        assert stop.is_set
        assert stop.signal_number == number


def test_the_first_signal_counts():
    with StopRequest.on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_number == signal.SIGTERM


def test_handlers_from_before_are_back_afterwards():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError), StopRequest.on_signals():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_without_being_asked_to_it_touches_no_handler():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    stop = StopRequest()
    stop.set()
    assert (stop.is_set, stop.signal_number) == (True, None)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
