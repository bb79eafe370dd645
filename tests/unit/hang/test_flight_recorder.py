"""Dumps of torch's flight recorder are read, and never run."""

import json
import os
import pickle

import pytest

from meshscope.hang.flight_recorder import (
    GroupRecord,
    decode_dump,
    find_dumps,
    read_dumps,
    summarize_dump,
)


def make_entry(sequence: int, *, group: str = "0", state: str = "completed", **fields: object):
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "state": state,
        "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/d.py", "line": 1},
            {"name": "step", "filename": "/home/me/train.py", "line": 88},
        ],
        **fields,
    }


DUMP = {
    "version": "2.10",
    "entries": [
        make_entry(1),
        make_entry(2, state="scheduled"),
        make_entry(9, is_p2p=True),
        make_entry(4, group="tp", state="scheduled", retired=True, frames=None),
    ],
}
RECORDS = [
    GroupRecord(
        rank=5,
        group="0",
        sequence=1,
        name="nccl:all_reduce",
        state="scheduled",
        is_over=False,
        place="train.py:88 in step",
    ),
    GroupRecord(
        rank=5,
        group="tp",
        sequence=3,
        name="nccl:all_reduce",
        state="scheduled",
        is_over=True,
        place="",
    ),
]


@pytest.mark.parametrize("encode", [pickle.dumps, lambda dump: json.dumps(dump).encode()])
def test_the_last_collective_of_every_group(encode):
    assert summarize_dump(5, decode_dump(encode(DUMP))) == RECORDS


def test_dumps_are_found_by_the_rank_in_their_names(tmp_path):
    names = ["nccl_trace_rank_5", "trace7.json", "rank_12.pkl", "notes.txt"]
    for name in names:
        (tmp_path / name).write_bytes(pickle.dumps(DUMP))
    assert sorted(rank for rank, _ in find_dumps(tmp_path)) == [5, 7, 12]
    assert find_dumps(tmp_path / names[0]) == [(5, tmp_path / names[0])]
    records, problems = read_dumps(tmp_path / names[0])
    assert (records, problems) == (RECORDS, [])


class Malicious:
    def __init__(self, function, *arguments) -> None:
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_asks_for_code_is_refused(tmp_path, protocol):
    mark = tmp_path / "mark"
    data = pickle.dumps({"entries": [Malicious(os.mkdir, str(mark))]}, protocol)
    with pytest.raises(ValueError, match="it asks for"):
        decode_dump(data)
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"{" * 100_000,
        b"\x80\x02",
        pickle.dumps({"entries": 3}),
        pickle.dumps([1, 2]),
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # wants room for two thousand million objects
        b"\x80\x04Q.",  # an object from outside
        b"(" * 100_000,
    ],
)
def test_what_is_no_dump_is_told(tmp_path, data):
    (tmp_path / "rank_3").write_bytes(data)
    records, (problem,) = read_dumps(tmp_path)
    assert records == []
    assert problem.startswith("rank_3 is no dump of the flight recorder: ")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        make_entry(0),
        make_entry(1, process_group=[]),
        make_entry(1, process_group=None),
        make_entry(1, collective_seq_id="1"),
    ],
)
def test_entries_that_are_not_as_expected_are_left_out(entry):
    assert summarize_dump(0, {"entries": [entry]}) == []


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank_1")
    _, (problem,) = read_dumps(tmp_path)
    assert "not a regular file" in problem
