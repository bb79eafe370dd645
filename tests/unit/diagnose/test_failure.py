from meshscope.diagnose.failure import Failure, attempt_to


def test_a_result_passes_and_an_exception_becomes_a_value():
    assert attempt_to("a sum", lambda: 1 + 1) == 2

    def fail():
        raise ValueError("two\nlines")

    failure = attempt_to("a sum", fail)
    assert isinstance(failure, Failure)
    assert (failure.what, failure.error) == ("a sum", "ValueError: two lines")
    assert failure.place.startswith("test_failure.py:")


def test_an_exception_without_a_message_has_its_type():
    def fail():
        raise KeyError

    assert attempt_to("x", fail).error == "KeyError"
