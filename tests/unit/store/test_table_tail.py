from pathlib import Path

import numpy as np

from builders import MS, flip_byte, make_writer, put_step, table_path
from meshscope.store.read.table_tail import TableTail
from meshscope.store.schema import RECORD_BYTES, STEPS
from meshscope.store.write.table_file import HEADER_BYTES


def read_steps(tail: TableTail) -> list[int]:
    return tail.read()["step"].tolist()


def test_each_record_is_given_once_while_the_table_grows_and_after_it_is_closed(
    tmp_path: Path,
) -> None:
    writer = make_writer(tmp_path)
    path = table_path(writer.directory, "steps")
    tail = TableTail(path, STEPS)
    assert read_steps(tail) == []
    given: list[int] = []
    for step in range(5000):
        put_step(writer, step, step * MS, step * MS + 1)
        if step % 977 == 0:
            given += read_steps(tail)
            assert given == list(range(step + 1))
    writer.close(end_host_mono_ns=5000 * MS, num_errors=0, errors={})
    given += read_steps(tail)
    assert given == list(range(5000))
    assert read_steps(tail) == []


def test_a_record_that_was_not_finished_is_waited_for_and_then_passed_over(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in range(3):
        put_step(writer, step, step * MS, step * MS + 1)
    path = table_path(writer.directory, "steps")
    flip_byte(path, HEADER_BYTES + RECORD_BYTES + 20)
    tail = TableTail(path, STEPS)
    assert read_steps(tail) == [0]
    looks = [read_steps(tail) for _ in range(3)]
    assert looks == [[], [], [2]]


def test_an_unfinished_record_is_given_when_it_is_written(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    for step in range(3):
        put_step(writer, step, step * MS, step * MS + 1)
    path = table_path(writer.directory, "steps")
    offset = HEADER_BYTES + RECORD_BYTES + 20
    flip_byte(path, offset)
    tail = TableTail(path, STEPS)
    assert read_steps(tail) == [0]
    flip_byte(path, offset)
    columns = tail.read()
    assert columns["step"].tolist() == [1, 2]
    assert columns["end_host_mono_ns"].dtype == np.int64
