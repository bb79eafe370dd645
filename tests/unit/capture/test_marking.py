"""Which steps are marked on a device: as many as cost little, and the same on every rank."""

from types import SimpleNamespace

import pytest

from meshscope.capture.steps.marking import Marking

MS = 1_000_000


class Device:
    device_type = "cuda"

    def __init__(self, cost_ns):
        self.cost_ns = 0
        self._step_cost_ns = cost_ns
        self.is_marked = True

    def end_step(self, end_ns):
        if self.is_marked:
            self.cost_ns += self._step_cost_ns
        return 4 * self.is_marked


def mark(cost_ns, *, step_ns, num_steps=512, wanted=(), gap_ns=0, operation_stride=1):
    """The steps that are marked."""
    device = Device(cost_ns)
    timeline = SimpleNamespace(device=device, step_start_ns=0)

    def mark_device(chosen):
        timeline.device = chosen
        device.is_marked = chosen is not None

    timeline.mark_device = mark_device
    marking = Marking(timeline, lambda: 0, lambda *_: None, lambda *_: None)
    marking.device = device
    marked, now_ns = [], 0
    for step in range(num_steps):
        marked += [step] * device.is_marked
        timeline.step_start_ns = now_ns + gap_ns
        now_ns += step_ns + gap_ns
        marking.end_step(now_ns)
        marking.choose(
            step, now_ns, is_wanted=step + 1 in wanted, operation_stride=operation_stride
        )
    return marked


@pytest.mark.parametrize(
    ("cost_us", "step_ms", "one_in"),
    [
        (40, 20, 1),  # four phases on a device of one's own: 0.2 %
        (40, 2, 8),  # 2 %, where 0.3 % are allowed
        (400, 52, 4),  # four phases of a rank that shares its device
        (1_600, 57, 16),  # 17 phases: a pipeline with 8 microbatches
    ],
)
def test_marks_take_three_thousandths_of_steps(cost_us, step_ms, one_in):
    marked = mark(cost_us * 1000, step_ns=step_ms * MS)
    assert marked[:3] == [0, 1, 2]
    assert 512 / one_in * 0.6 < len(marked) < 512 / one_in * 1.4 + 4


def count_early_and_late(cost_ns, step_ms):
    marked = mark(cost_ns, step_ns=step_ms * MS)
    return [sum(start <= step < start + 64 for step in marked) for start in (0, 256)]


def test_early_steps_may_cost_twice_as_much():
    early, late = count_early_and_late(220_000, 12)
    assert early >= 12 > late


def test_early_steps_cost_no_more_where_they_have_marks_enough():
    early, late = count_early_and_late(400_000, 52)  # of a rank that shares its device
    assert 14 <= late <= early <= 20


def test_early_steps_are_marked_no_more_often_than_their_operations_are_recorded():
    """Those of a pipeline: one in 16 at first; later marks have a limit of their own."""
    marked = mark(400_000, step_ns=57 * MS, operation_stride=16)
    assert [step for step in marked if step < 64] == [0, 8, 26, 37, 61]
    assert len([step for step in marked if 256 <= step < 320]) >= 12


def test_gaps_between_steps_count():
    """A checkpoint after each step: the job has time enough for marks."""
    assert len(mark(40_000, step_ns=2 * MS, gap_ns=40 * MS)) == 512


def test_ranks_with_other_costs_mark_some_of_the_same_steps_and_wanted_ones():
    few, many = mark(1_600_000, step_ns=57 * MS), mark(400_000, step_ns=57 * MS)
    assert set(few[4:]) <= set(many)
    assert 33 in mark(1_600_000, step_ns=57 * MS, wanted=(33,))
