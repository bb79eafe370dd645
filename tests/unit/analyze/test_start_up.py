import pytest

from builders import MS
from made_programs import ProgramRun, reduce, replay_of, work
from meshscope.analyze.timeline.start_up import count_start_up
from meshscope.core.layout import Layout
from meshscope.simulate.what_if import Edit

START = (4.0, 3.5, 2.2, 1.5)
"""Times the usual, from the first step that is looked at on."""


def record(path, factor, *, num_steps=31):
    def make(rank, step):
        return [
            work("forward", int(20 * MS * factor(rank, step))),
            work("backward", int((20 + 10 * rank) * MS * factor(rank, step))),
            reduce((0, 1), 2 * MS),
        ]

    run = ProgramRun(make, num_ranks=2, num_steps=num_steps, layout=Layout(dp=2))
    return replay_of(run, path)


def start_up(rank, step):
    return START[step - 1] if 0 < step <= len(START) else 1.0


@pytest.mark.parametrize(
    ("factor", "number"),
    [
        (start_up, len(START)),
        (lambda rank, step: 1.0, 0),
        # One rank that recovers is a fault of this rank.
        (lambda rank, step: start_up(rank, step) if rank else 1.0, 0),
        # What comes again is no start-up, as an evaluation in every fifth step.
        (lambda rank, step: 3.0 if step % 10 in (1, 2) else 1.0, 0),
        (lambda rank, step: 3.0 if step == 1 else 1.0, 0),
        (lambda rank, step: 3.0 if step < 15 else 1.0, 0),
    ],
)
def test_only_long_first_steps_of_all_ranks_are_a_start_up(tmp_path, factor, number):
    assert count_start_up(record(tmp_path, factor).timeline) == number


def test_a_price_is_that_of_the_steps_after_the_start_up(tmp_path):
    replay = record(tmp_path, start_up)
    pieces = replay.timeline.pieces
    even = pieces.duration_ns.copy()
    even[pieces.rank == 1] = even[pieces.rank == 1] * 4 // 5
    (gain,) = replay.price([Edit(name="rank 1 as rank 0", work_ns=even)])
    assert gain.saved_ns == pytest.approx(10 * MS, rel=0.01)
    assert gain.step_ns == pytest.approx(52 * MS, rel=0.01)
    assert replay.fidelity.error_ratio < 0.01
