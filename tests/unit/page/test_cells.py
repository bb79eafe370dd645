"""Values by rank and step, on runs whose work is chosen here."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS, make_run
from late_runs import STEADY, LateRun
from meshscope.analyze.study import Study
from meshscope.core.layout import Layout
from meshscope.core.unavailable import Unavailable
from meshscope.page.heat.cells import METRICS, measure_cells, take_others_median
from meshscope.store.read.run import open_run


def study_of(path):
    return Study(open_run(path).last_attempt)


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    """Four peers; rank 2 forwards 7 ms longer from step 6 on."""
    path = tmp_path_factory.mktemp("slow") / "run"

    def work(rank, step):
        late = 7 * MS if rank == 2 and step >= 6 else 0
        return {**STEADY, "forward": STEADY["forward"] + late}

    LateRun(layout=Layout(dp=4), work=work, num_steps=12).record(path)
    return study_of(path)


def test_excess_is_work_above_the_other_peers(slow_rank):
    cells = measure_cells(slow_rank, "excess")
    assert cells.ranks == (0, 1, 2, 3)
    assert cells.steps.tolist() == list(range(1, 12))  # the first warms up
    expected = np.zeros((4, 11))
    expected[2, 5:] = 7 * MS
    assert np.array_equal(cells.value, expected)


def test_excess_of_one_phase(slow_rank):
    assert measure_cells(slow_rank, "excess", "forward").value.max() == 7 * MS
    assert measure_cells(slow_rank, "excess", "backward").value.max() == 0
    none = measure_cells(slow_rank, "excess", "nowhere")
    assert isinstance(none, Unavailable)
    assert "nowhere" in none.reason


def test_rise_is_above_the_first_steps(slow_rank):
    rise = measure_cells(slow_rank, "rise").value
    assert rise[2, 5:].tolist() == [7 * MS] * 6
    assert not rise[[0, 1, 3]].any()


def test_waits_are_of_those_who_wait_and_caused_by_the_one_who_does_not(slow_rank):
    wait, caused = measure_cells(slow_rank, "wait").value, measure_cells(slow_rank, "caused").value
    assert wait[[0, 1, 3], 5:].tolist() == [[7 * MS] * 6] * 3
    assert not wait[2].any()
    assert caused[2, 5:].tolist() == [7 * MS] * 6
    assert caused.sum() == 6 * 7 * MS


def test_work_wait_and_transfer_make_the_period(slow_rank):
    parts = [measure_cells(slow_rank, key).value for key in ("work", "wait", "transfer")]
    assert np.array_equal(sum(parts), measure_cells(slow_rank, "period").value)


def test_what_a_run_does_not_have_is_said(tmp_path):
    make_run(tmp_path, num_steps=6)
    study = study_of(tmp_path)
    for key in METRICS:
        found = measure_cells(study, key)
        assert isinstance(found, Unavailable) == (key in ("excess", "rise", "caused", "memory"))
    assert "no metric" in measure_cells(study, "nonsense").reason


rows = st.integers(2, 9).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, 1000), min_size=count, max_size=count), min_size=1, max_size=4
    )
)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_the_median_of_the_others_is_numpys(values):
    table = np.array(values, dtype=np.float64)
    expected = [[np.median(np.delete(row, column)) for column in range(len(row))] for row in table]
    assert np.array_equal(take_others_median(table), np.array(expected))
