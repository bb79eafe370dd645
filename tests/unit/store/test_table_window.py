"""Reading some rows of a table gives those that reading all of it gives."""

import os
from pathlib import Path

import numpy as np
import pytest

from builders import START_MONO_NS, flip_byte, make_writer, put_span, put_step, table_path
from meshscope.store.read import table_window
from meshscope.store.read.columns import Columns, read_table_file, select_rows
from meshscope.store.read.table_window import (
    TimeWindows,
    find_step_extent,
    read_step_windows,
    read_time_windows,
)
from meshscope.store.schema import TABLES
from meshscope.store.write.pack import FIRST_EXTENT
from meshscope.store.write.table_file import HEADER_BYTES

NUM_ROWS = 5_000


def _write_waits(path: Path, starts: np.ndarray, *, closes: bool = True) -> Path:
    writer = make_writer(path)
    table = writer.table("waits")
    for place, start in enumerate(starts.tolist()):
        table.put(1, place, START_MONO_NS + start, 5, -1, 0, 0)
    if closes:
        writer.close(end_host_mono_ns=START_MONO_NS)
    else:
        writer.flush()
    return table_path(writer.directory, "waits")


def _windows(*bounds: tuple[int, int]) -> TimeWindows:
    moments = START_MONO_NS + np.array(bounds, dtype=np.int64).reshape(-1, 2)
    return TimeWindows(start_ns=moments[:, 0], end_ns=moments[:, 1])


def _expected(file: Path, windows: TimeWindows) -> Columns:
    columns = read_table_file(file, TABLES["waits"], 0).columns
    return select_rows(columns, windows.contain(columns["start_host_mono_ns"].astype(np.int64)))


def _check(file: Path, windows: TimeWindows) -> Columns:
    found, _ = read_time_windows(file, TABLES["waits"], windows, 0)
    expected = _expected(file, windows)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    return found


@pytest.fixture(params=[1 << 30, 0], ids=["whole", "searched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading."""
    monkeypatch.setattr(table_window, "WHOLE_BYTES", request.param)
    monkeypatch.setattr(table_window, "MARGIN_RECORDS", 64)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("disorder", [0, 30])
def test_rows_of_windows(tmp_path: Path, disorder: int) -> None:
    rng = np.random.default_rng(0)
    starts = 10 * np.arange(NUM_ROWS) + rng.integers(0, 10 * disorder + 1, NUM_ROWS)
    file = _write_waits(tmp_path, starts)

    found = _check(file, _windows((0, 500), (20_000, 21_000), (49_000, 90_000)))
    assert len(found["start_host_mono_ns"]) > 150
    _check(file, _windows((-500, -1)))
    _check(file, _windows((60_000_000, 70_000_000)))
    _check(file, _windows())
    _check(file, _windows((-10, 10**9)))


@pytest.mark.usefixtures("way")
def test_file_that_is_still_written(tmp_path: Path) -> None:
    file = _write_waits(tmp_path, 10 * np.arange(NUM_ROWS), closes=False)
    _check(file, _windows((49_000, 60_000)))


@pytest.mark.usefixtures("way")
def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    file = _write_waits(tmp_path, 10 * np.arange(NUM_ROWS))
    for record in (100, 2_500, 2_501, NUM_ROWS - 1):
        flip_byte(file, HEADER_BYTES + 64 * record + 20)
    found = _check(file, _windows((900, 1_100), (24_900, 25_100), (49_900, 50_000)))
    assert len(found["source"]) == 21 + 21 + 10 - 4


@pytest.mark.usefixtures("way")
def test_cut_file(tmp_path: Path) -> None:
    file = _write_waits(tmp_path, 10 * np.arange(NUM_ROWS))
    os.truncate(file.parent, FIRST_EXTENT + HEADER_BYTES + 64 * 1_000 + 30)
    _check(file, _windows((9_000, 12_000)))
    os.truncate(file.parent, 100)
    assert len(read_time_windows(file, TABLES["waits"], _windows((0, 10)), 0)[0]["source"]) == 0


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waits.tbl")
    with pytest.raises(OSError, match="not a regular file"):
        read_time_windows(tmp_path / "waits.tbl", TABLES["waits"], _windows((0, 1)), 0)


@pytest.mark.usefixtures("way")
def test_spans_are_placed_by_their_end(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in range(300):
        put_span(writer, "inner", START_MONO_NS + 100 * step + 10, 50, depth=1)
        put_span(writer, "outer", START_MONO_NS + 100 * step, 90)
    writer.close(end_host_mono_ns=START_MONO_NS)

    found, problems = read_time_windows(
        table_path(writer.directory, "spans"), TABLES["spans"], _windows((5_000, 5_999)), 0
    )
    assert not problems
    assert sorted(found["start_host_mono_ns"].tolist()) == sorted(
        START_MONO_NS + at for step in range(50, 60) for at in (100 * step, 100 * step + 10)
    )


@pytest.mark.usefixtures("way")
def test_steps_by_number(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in range(3, 500):
        put_step(writer, step, START_MONO_NS + step, START_MONO_NS + step + 1)
    writer.close(end_host_mono_ns=START_MONO_NS)
    file = table_path(writer.directory, "steps")

    assert find_step_extent(file) == (3, 499)
    found = read_step_windows(file, TABLES["steps"], [(0, 5), (100, 102), (499, 600)])
    assert found["step"].tolist() == [3, 4, 5, 100, 101, 102, 499]
