import numpy as np
import pytest

from meshscope.analyze.memory.retry_cost import RetryCost, measure_retry_cost
from meshscope.core.unavailable import Unavailable

MS = 1_000_000


def make_steps(period_ns):
    """Steps that follow each other at these periods; the last one's is not known."""
    start = np.concatenate([[0], np.cumsum(period_ns)]).astype(np.int64)
    return {"step": np.arange(len(start)), "start_host_mono_ns": start}


def test_steps_with_retries_are_held_against_those_without():
    # 41 steps of 25 ms, read after every other one; 3 retries in steps 11 and 12, 1 in 31 and 32.
    period = np.full(40, 25 * MS)
    period[11] += 60 * MS
    period[32] += 20 * MS
    read_step = np.arange(0, 41, 2)
    counts = 5 + 3 * (read_step >= 12) + 1 * (read_step >= 32)
    cost = measure_retry_cost(make_steps(period), read_step, counts)
    # Steps 1 to 39 are between two readings and have a period.
    assert cost == RetryCost(
        num_retries=4,
        excess_ns=80.0 * MS,
        per_step_ns=80 * MS / 39,
        step_ns=25 * MS + 80 * MS / 39,
    )
    assert cost.per_retry_ns == 20 * MS


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (np.full(20, 7), "no retry between two readings"),
        (np.arange(20), "only 0 steps are known to be without a retry"),
    ],
)
def test_without_steps_to_compare_there_is_no_price(counts, reason):
    found = measure_retry_cost(make_steps(np.full(19, 25 * MS)), np.arange(20), counts)
    assert found == Unavailable(reason)


def test_readings_of_other_steps_are_no_price():
    found = measure_retry_cost(make_steps(np.full(3, MS)), np.array([100, 200]), np.array([0, 1]))
    assert found == Unavailable("only 0 steps are known to be without a retry")
