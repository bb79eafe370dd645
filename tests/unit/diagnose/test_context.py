from diagnosed import context_of, scale_work

from builders import MS, Faults, make_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable


def test_edits_are_priced_by_replay(tmp_path):
    run = make_run(tmp_path, layout=Layout(dp=2), num_steps=12, faults=Faults(slow={1: 2.0}))
    context = context_of(run)
    (gain,) = context.price([scale_work(context, "half", lambda p: 1 - 0.5 * (p.rank == 1))])
    assert gain.step_ns == 198 * MS
    assert gain.saved_ns == 99 * MS


def test_a_run_without_steps_has_reasons_instead_of_a_replay(tmp_path):
    context = context_of(make_run(tmp_path, num_steps=0))
    assert isinstance(context.replay, Unavailable)
    assert context.price([object()]) == [context.replay]
    assert context.study.failures == []
