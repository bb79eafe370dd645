import pytest

from builders import MS, make_run
from meshscope.analyze.job import job as job_module
from meshscope.analyze.study import Failure, Study, catch_failure
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Missing, Unavailable
from meshscope.store.read import files
from meshscope.store.read import recording as recording_module
from meshscope.store.read.run import open_run


@pytest.fixture
def study(tmp_path):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=12)
    return Study(open_run(tmp_path).last_attempt)


def test_an_analysis_is_made_once(study):
    calls = []

    def count_ranks(given):
        calls.append(given)
        return given.num_ranks

    assert study.get(count_ranks) == 2
    assert study.get(count_ranks) == 2
    assert calls == [study]
    assert study.timeline is study.timeline


def test_an_analysis_that_raises_is_unavailable_and_kept_as_a_failure(study):
    def count_sheep(given):
        raise RuntimeError("none here")

    first = study.get(count_sheep)
    assert first == Unavailable("count sheep failed: RuntimeError: none here")
    assert study.get(count_sheep) is first
    assert [failure.what for failure in study.failures] == ["count_sheep"]


def test_an_analysis_that_misses_something_says_what_and_is_no_failure(study):
    def count_sheep(given):
        raise Missing("no sheep were recorded")

    assert study.get(count_sheep) == Unavailable("no sheep were recorded")
    assert study.failures == []


def test_the_steps_period_has_the_gap_in_it(study):
    assert study.step_ns == 101 * MS
    assert study.num_steady_steps == 11
    assert not study.has_accelerators


def test_a_run_without_steps_has_reasons_instead_of_analyses(tmp_path):
    make_run(tmp_path, num_steps=0)
    study = Study(open_run(tmp_path).last_attempt)
    for value in (study.timeline, study.work, study.budget, study.pipeline, study.step_ns):
        assert isinstance(value, Unavailable)
    assert study.failures == []


def count_calls(monkeypatch, module, name):
    calls, real = [], getattr(module, name)

    def call(*given):
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(module, name, call)
    return calls


def test_operations_are_matched_once_and_tables_read_once(tmp_path, monkeypatch):
    make_run(tmp_path, layout=Layout(dp=2), num_steps=12)
    reads = count_calls(monkeypatch, recording_module, "read_table_file")
    matchings = count_calls(monkeypatch, job_module, "match_operations")
    study = Study(open_run(tmp_path).last_attempt)
    for name in ("health", "communication", "timeline", "budget", "suspects", "pipeline"):
        getattr(study, name)
    found = [path for path, *_ in reads if files.exists(path)]
    assert found
    assert len(found) == len(set(found))
    assert len(matchings) == 1


def test_what_is_kept_of_a_table_cannot_be_changed(study):
    columns = study.attempt.ranks[0].read("steps")
    with pytest.raises(ValueError, match="read-only"):
        columns["step"][0] = 7


def test_a_result_passes_and_an_exception_becomes_a_value():
    assert catch_failure("a sum", lambda: 1 + 1) == 2

    def fail():
        raise ValueError("two\nlines")

    failure = catch_failure("a sum", fail)
    assert isinstance(failure, Failure)
    assert (failure.what, failure.error) == ("a sum", "ValueError: two lines")
    assert failure.place.startswith("test_study.py:")


def test_an_exception_without_a_message_has_its_type():
    def fail():
        raise KeyError

    assert catch_failure("x", fail).error == "KeyError"
