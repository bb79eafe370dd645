import pytest
from diagnosed import context_of, scale_work

from builders import MS, Faults, make_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable


@pytest.fixture
def context(tmp_path):
    return context_of(make_run(tmp_path, layout=Layout(dp=2), num_steps=12))


def test_an_analysis_is_made_once(context):
    calls = []

    def count_ranks(given):
        calls.append(given)
        return given.num_ranks

    assert context.obtain(count_ranks) == 2
    assert context.obtain(count_ranks) == 2
    assert calls == [context]
    assert context.timeline is context.timeline


def test_an_analysis_that_raises_is_unavailable_and_kept_as_a_failure(context):
    def count_sheep(given):
        raise RuntimeError("none here")

    first = context.obtain(count_sheep)
    assert first == Unavailable("count sheep failed: RuntimeError: none here")
    assert context.obtain(count_sheep) is first
    assert [failure.what for failure in context.failures] == ["count_sheep"]


def test_the_steps_period_has_the_gap_in_it(context):
    assert context.step_ns == 101 * MS
    assert context.num_steady_steps == 11
    assert not context.has_accelerators


def test_edits_are_priced_by_replay(tmp_path):
    run = make_run(tmp_path, layout=Layout(dp=2), num_steps=12, faults=Faults(slow={1: 2.0}))
    context = context_of(run)
    (gain,) = context.price([scale_work(context, "half", lambda p: 1 - 0.5 * (p.rank == 1))])
    assert gain.step_ns == 198 * MS
    assert gain.saved_ns == 99 * MS


def test_a_run_without_steps_has_reasons_instead_of_analyses(tmp_path):
    context = context_of(make_run(tmp_path, num_steps=0))
    for value in (context.timeline, context.work, context.replay, context.step_ns):
        assert isinstance(value, Unavailable)
    assert context.price([object()]) == [context.replay]
    assert context.failures == []
