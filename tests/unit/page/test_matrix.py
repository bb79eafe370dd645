"""Pictures of cells: what is lost and what is not."""

import base64
import gzip

import numpy as np
import pytest

from meshscope.page.heat.cells import METRICS, Cells
from meshscope.page.heat.matrix import (
    LEFT_OUT,
    NOT_RECORDED,
    Window,
    draw_matrix,
    pack_matrix,
    restore,
)

MS = 1e6


def make_cells(value, steps, key="excess"):
    return Cells(
        metric=METRICS[key],
        phase=None,
        ranks=tuple(range(len(value))),
        steps=np.array(steps, dtype=np.int64),
        value=np.array(value, dtype=np.float64),
    )


def unpack(text, shape):
    """As a browser does."""
    raw = gzip.decompress(base64.b64decode(text))
    return np.frombuffer(raw, dtype="<u2").reshape(shape)


def draw(value, numbers, recorded=None, **window):
    everything = np.array(numbers if recorded is None else recorded, dtype=np.int64)
    return draw_matrix(make_cells(value, numbers), everything, Window(**window))


def test_values_come_back_to_three_hundredths_of_a_per_cent():
    value = np.geomspace(1e3, 1e12, 5000)[None, :]
    matrix = pack_matrix(draw(value, range(5000), num_columns=5000))
    codes = unpack(matrix.largest_layer, (1, 5000))
    back = restore(codes, lo=matrix.lo, hi=matrix.hi)
    assert np.abs(back / value - 1).max() < 0.0003
    assert matrix.mean_layer is None
    assert (matrix.largest, matrix.row_edges) == (1e12, (0, 1))


def test_zero_is_zero_and_less_than_the_scale_is_its_end():
    codes = draw([[0.0, 1.0, 1e15]], range(3)).largest
    assert codes.tolist() == [[0, 1, 65_000]]


def test_not_analysed_and_not_recorded_are_told_apart():
    picture = draw([[MS, np.nan, MS]], [2, 3, 7], recorded=[0, 1, 2, 3, 7, 8])
    assert picture.step_edges.tolist() == [0, 2, 3, 4, 7, 8, 9]
    kinds = [
        {LEFT_OUT: "left out", NOT_RECORDED: "none"}.get(c, "value") for c in picture.largest[0]
    ]
    assert kinds == ["left out", "value", "none", "none", "value", "left out"]


def test_a_hot_cell_is_never_lost():
    value = np.zeros((64, 5000))
    value[37, 4321] = 5 * MS
    picture = draw(value, range(5000), num_rows=8, num_columns=100)
    assert picture.largest.shape == (8, 100)
    assert np.argwhere(picture.largest).tolist() == [[4, 86]]
    back = restore(picture.mean, lo=1e3, hi=1e12)
    assert back[4, 86] == pytest.approx(5 * MS / (8 * 50), rel=3e-4)


def test_counts_of_cells_are_exact_whatever_the_edges():
    value = np.arange(7 * 23, dtype=np.float64).reshape(7, 23) * MS
    picture = draw(value, range(100, 123), num_rows=3, num_columns=5)
    for row in range(3):
        ranks = slice(picture.row_edges[row], picture.row_edges[row + 1])
        for column in range(len(picture.step_edges) - 1):
            first, end = picture.step_edges[column : column + 2] - 100
            inside = value[ranks, first:end]
            assert restore(picture.largest, lo=1e3, hi=1e12)[row, column] == pytest.approx(
                inside.max(), rel=3e-4
            )
            assert restore(picture.mean, lo=1e3, hi=1e12)[row, column] == pytest.approx(
                inside.mean(), rel=3e-4
            )


def test_windows_of_a_long_run_keep_their_resolution():
    steps = [*range(10, 20), *range(5000, 5010), *range(9990, 10_000)]
    picture = draw(np.ones((2, 30)) * MS, steps, recorded=range(10_000), num_columns=1000)
    assert (picture.largest < LEFT_OUT).sum() == 2 * 30
    assert len(picture.step_edges) - 1 == 30 + 3


def test_steps_with_and_without_values_in_turn_share_columns():
    steps = list(range(0, 9000, 3))
    picture = draw(np.ones((1, 3000)), steps, recorded=range(9000), num_columns=500)
    assert picture.largest.shape == (1, 500)
    assert (picture.largest < LEFT_OUT).all()


def test_a_window_of_ranks_and_steps():
    value = np.arange(40, dtype=np.float64).reshape(4, 10) * MS
    picture = draw(value, range(10), ranks=(1, 2), steps=(3, 5))
    assert picture.ranks == (1, 2)
    assert picture.step_edges.tolist() == [3, 4, 5, 6]
    back = restore(picture.largest, lo=1e3, hi=1e12)
    assert back == pytest.approx(value[1:3, 3:6], rel=3e-4)
    assert draw(value, range(10), steps=(50, 60)).largest.size == 0
