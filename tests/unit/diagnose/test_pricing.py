import numpy as np
import pytest
from diagnosed import context_of, scale_work

from builders import make_run
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.core.verdict.severity import Severity
from meshscope.diagnose.finding import Estimate
from meshscope.diagnose.pricing import Scale, join_edits, recoverable_hours, severity_of
from meshscope.simulate.what_if import Edit

NONE = Unavailable("no price")


def test_hours_are_saved_time_times_steps_times_ranks():
    gain = Estimate(saved_ns=36e6, step_ns=360e6, basis="made up")
    scale = Scale(num_steps=1000, num_ranks=100, has_accelerators=True)
    assert recoverable_hours(gain, scale) == pytest.approx(1.0)
    assert scale.hours_unit == "GPU-hours"
    assert recoverable_hours(NONE, scale) is NONE
    loss = Estimate(saved_ns=-1.0, step_ns=2.0, basis="made up")
    assert recoverable_hours(loss, scale) == 0.0
    cpu = Scale(num_steps=1, num_ranks=1, has_accelerators=False)
    assert cpu.hours_unit == "rank-hours"


def test_a_gain_is_graded_and_a_bound_stands_in_for_it():
    assert severity_of(Estimate(saved_ns=2.0, step_ns=10.0, basis="")) is Severity.HIGH
    assert severity_of(NONE) is Severity.LOW
    assert severity_of(NONE, otherwise=0.2) is Severity.HIGH
    assert Estimate(saved_ns=1.0, step_ns=0.0, basis="").saved_ratio == 0.0


def test_joined_edits_do_what_each_does_and_the_shorter_where_both_do(tmp_path):
    context = context_of(make_run(tmp_path, layout=Layout(dp=2), num_steps=6))
    pieces = context.study.timeline.pieces
    measured = pieces.end_ns - pieces.start_ns
    one = scale_work(context, "one", lambda p: np.where(p.rank == 0, 0.5, 1.0))
    two = scale_work(context, "two", lambda p: np.where(p.phase == 2, 2.0, 1.0))
    both = join_edits(context.study.timeline, (one, two))
    assert both.name == "one and two"
    expected = np.where(pieces.rank == 0, measured // 2, measured)
    expected = np.where((pieces.rank == 1) & (pieces.phase == 2), 2 * measured, expected)
    assert np.array_equal(both.work_ns, expected)
    assert both.transfer_ns is None
    assert join_edits(context.study.timeline, (Edit(name="nothing"), one)).work_ns is not None
    assert join_edits(context.study.timeline, (Edit(name="nothing"),)).work_ns is None
