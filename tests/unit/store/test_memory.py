"""Recordings in memory: read like a folder's, and the same when written to one."""

from pathlib import Path

import numpy as np
import pytest

from builders import make_run
from meshscope.store.read.columns import decode_words, encode_words
from meshscope.store.read.memory import MemoryRecording, make_columns, write_recording
from meshscope.store.read.recording import Recording
from meshscope.store.read.run import group_attempts, open_run
from meshscope.store.read.table_window import TimeWindows
from meshscope.store.schema import TABLES


def load(recording: Recording) -> MemoryRecording:
    """A rank's files, in memory."""
    return MemoryRecording(
        rank=recording.rank,
        attempt=recording.attempt,
        directory=recording.directory,
        header=recording.header,
        names=recording.names,
        closing=recording.closing,
        groups=recording.groups,
        columns={name: recording.read_raw(name) for name in TABLES if recording.has_table(name)},
    )


def assert_same_tables(one: Recording, other: Recording) -> None:
    for name in TABLES:
        left, right = one.read(name), other.read(name)
        assert {n: (a.dtype, a.tobytes()) for n, a in left.items()} == {
            n: (a.dtype, a.tobytes()) for n, a in right.items()
        }
        assert one.has_table(name) == other.has_table(name)


def test_a_recording_in_memory_is_read_like_a_folder(tmp_path: Path) -> None:
    run = open_run(
        make_run(tmp_path / "run", world_size=2, device_ratio=0.5, memory=[1, 2, 3, 4, 5])
    )
    loaded = [load(recording) for recording in run.last_attempt]
    (attempt,) = group_attempts(loaded)
    for recording in run.last_attempt:
        twin = attempt.ranks[recording.rank]
        assert_same_tables(recording, twin)
        assert twin.find_step_extent() == recording.find_step_extent()
        assert twin.count_rows("steps") == len(recording.read("steps")["step"])
        steps = recording.read("steps")
        windows = TimeWindows(
            start_ns=steps["start_host_mono_ns"][1:2].astype(np.int64),
            end_ns=steps["end_host_mono_ns"][2:3].astype(np.int64),
        )
        assert_same_tables(recording.narrow(windows), twin.narrow(windows))
        assert twin.read_steps([(1, 2)])["step"].tolist() == [1, 2]


def test_a_written_recording_is_the_one_in_memory(tmp_path: Path) -> None:
    source = load(open_run(make_run(tmp_path / "run")).last_attempt.ranks[0])
    write_recording(source, tmp_path / "copy")
    copy = open_run(tmp_path / "copy").last_attempt.ranks[0]
    assert_same_tables(source, copy)
    assert (copy.names, copy.groups, copy.closing) == (source.names, source.groups, source.closing)
    assert copy.header == source.header


def test_records_and_columns_are_inverse() -> None:
    draws = np.random.default_rng(0)
    for table in TABLES.values():
        words = draws.integers(-(1 << 63), 1 << 63, size=(50, 8), dtype=np.int64)
        columns = decode_words(table, words)
        again = decode_words(table, encode_words(table, columns))
        assert {n: a.tobytes() for n, a in columns.items()} == {
            n: a.tobytes() for n, a in again.items()
        }


def test_columns_that_are_not_given_are_missing_or_zero() -> None:
    made = make_columns("collectives", {"start_host_mono_ns": np.array([5, 6])}, 2)
    assert made["start_host_mono_ns"].tolist() == [5, 6]
    assert made["peer"].tolist() == [-1, -1]
    assert made["kind"].dtype == np.uint8
    with pytest.raises(KeyError, match="no column"):
        make_columns("steps", {"stpe": 1}, 1)
