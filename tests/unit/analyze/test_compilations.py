"""Journal lines of compilations, good and bad."""

import pytest

from builders import MS, make_writer
from meshscope.analyze.rank.compilations import Compilation, read_compilations
from meshscope.store.read.run import open_run

GOOD = {
    "compile_id": "0/1",
    "step": 4,
    "start_host_mono_ns": 7 * MS,
    "duration_ns": 2 * MS,
    "function": "my/model.py:40 forward",
    "where": "my/train.py:31 train > model",
    "reason": "tensor 'x' size mismatch at index 0. expected 8, actual 9",
}


def read(path, *lines):
    writer = make_writer(path)
    for line in lines:
        writer.journal.write("update", compilation=line)
    writer.close(end_host_mono_ns=9 * MS)
    return read_compilations(open_run(path).last_attempt.ranks[0])


def test_lines_come_back_in_order_of_time(tmp_path):
    later = {**GOOD, "start_host_mono_ns": 8 * MS}
    first, second = read(tmp_path, later, GOOD)
    fields = {key: value for key, value in GOOD.items() if key != "start_host_mono_ns"}
    assert first == Compilation(start_ns=7 * MS, **fields)
    assert second.start_ns == 8 * MS


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "text",
        {},
        {**GOOD, "step": -1},
        {**GOOD, "step": True},
        {**GOOD, "duration_ns": "1"},
        {**GOOD, "start_host_mono_ns": 1 << 63},
    ],
)
def test_lines_that_make_no_sense_are_left_out(tmp_path, bad):
    assert read(tmp_path, bad) == ()


def test_texts_that_are_none_are_empty(tmp_path):
    (found,) = read(tmp_path, {**GOOD, "reason": 7, "where": None})
    assert (found.reason, found.where) == ("", "")
