"""Work beside waiting collectives: four ranks, one late, by closed forms."""

import numpy as np
import pytest

from meshscope.simulate.waiting_beside import WaitingBeside

NUM_RANKS, NUM_STEPS, FORWARD, BACKWARD = 4, 3, 1, 2
MS = 1_000_000


def make(work_ms, waited_ms) -> tuple[WaitingBeside, np.ndarray]:
    """A piece for each rank, step and phase; the first phase is between steps."""
    shape = (NUM_RANKS, NUM_STEPS, 3)
    work = np.broadcast_to(np.array(work_ms, dtype=np.int64)[:, None, :] * MS, shape)
    waited = np.broadcast_to(np.array(waited_ms, dtype=np.int64)[:, None, :] * MS, shape)
    period = np.full(NUM_STEPS, 60.0 * MS)
    beside = WaitingBeside(
        group_of=np.zeros(NUM_RANKS, dtype=np.int64),
        cell=np.arange(work.size),
        shape=shape,
        is_work=np.ones(work.size, dtype=np.bool_),
        work_ns=work.astype(np.float64),
        has_waited=waited > 0.01 * period[0],
        period_ns=period,
    )
    return beside, work.ravel().copy()


LATE = [[0, 13, 32], [0, 13, 32], [20, 13, 25], [0, 13, 32]]
WAITED = [[0, 0, 6], [0, 0, 6], [0, 0, 0], [0, 0, 6]]


def test_peers_compute_as_fast_as_the_late_rank_once_it_is_not_late():
    beside, work = make(LATE, WAITED)
    edited = work.reshape(beside.shape).copy()
    edited[2, :, 0] = 0
    eased = beside.ease(edited.ravel()).reshape(beside.shape)
    assert (eased[:, :, BACKWARD] == 25 * MS).all()
    assert (eased[:, :, FORWARD] == 13 * MS).all()
    assert not eased[:, :, 0].any()


def test_only_in_steps_in_which_the_rank_is_relieved():
    beside, work = make(LATE, WAITED)
    edited = work.reshape(beside.shape).copy()
    edited[2, 1, 0] = 0
    eased = beside.ease(edited.ravel()).reshape(beside.shape)
    assert (eased[[0, 1, 3], 1, BACKWARD] == 25 * MS).all()
    assert (eased[[0, 1, 3]][:, [0, 2], BACKWARD] == 32 * MS).all()


@pytest.mark.parametrize(
    ("work_ms", "waited_ms"),
    [
        (LATE, [[0, 0, 0]] * 4),  # nobody waits in that phase
        ([[0, 13, 25], [0, 13, 25], [20, 13, 25], [0, 13, 25]], WAITED),  # nobody is slower
        ([[0, 13, 22], [0, 13, 22], [20, 13, 25], [0, 13, 22]], WAITED),  # the late one is
    ],
)
def test_otherwise_an_edit_stays_what_it_is(work_ms, waited_ms):
    beside, work = make(work_ms, waited_ms)
    edited = work.reshape(beside.shape).copy()
    edited[2, :, 0] = 0
    assert beside.ease(edited.ravel()).tolist() == edited.ravel().tolist()
    assert beside.ease(work).tolist() == work.tolist()


def test_no_phase_becomes_shorter_than_three_fifths():
    beside, work = make([[0, 13, 32], [0, 13, 32], [20, 13, 5], [0, 13, 32]], WAITED)
    edited = work.reshape(beside.shape).copy()
    edited[2, :, 0] = 0
    eased = beside.ease(edited.ravel()).reshape(beside.shape)
    assert eased[0, 0, BACKWARD] == pytest.approx(0.6 * 32 * MS, abs=1)
