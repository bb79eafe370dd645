"""One operation has one number on all ranks, also where traces say little about it."""

import gzip
import json

import pytest

from meshscope.ingest.kineto.kineto import read_trace
from meshscope.ingest.traces.trace_numbers import number_operations
from meshscope.ingest.traces.trace_recording import record_trace
from trace_builders import MS, write_traces

NUM_STEPS = 4


def rewrite(path, change):
    with gzip.open(path, "rt") as file:
        document = json.load(file)
    document["traceEvents"] = [e for e in document["traceEvents"] if change(e)]
    with gzip.open(path, "wt") as file:
        json.dump(document, file)


def end_by_number(paths):
    by_rank = {
        rank: [record_trace(read_trace(path), max_spans=1000)] for rank, path in enumerate(paths)
    }
    return {
        rank: {number: one.recorded.found.end_ns for one, number in rows}
        for rank, (rows,) in number_operations(by_rank).items()
    }


def hide_launches(path):
    def change(event):
        if event["name"].startswith("nccl"):
            del event["args"]["correlation"]
        return True

    rewrite(path, change)


def move_steps(path, later_ns):
    """The host is behind, so that kernels without a launching call seem to be of other steps."""

    def change(event):
        if event["name"] in ("ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"):
            event["ts"] += later_ns / 1e3
        if event["name"] == "ProfilerStep#5":
            event["dur"] += later_ns / 1e3
        return True

    rewrite(path, change)


def drop_first_collective(path):
    seen = []

    def change(event):
        is_first = event["name"].startswith("nccl") and not seen
        seen.extend([event] * is_first)
        return not is_first

    rewrite(path, change)


@pytest.mark.parametrize("num_dropped", [0, 1])
def test_guessed_steps_do_not_number(tmp_path, num_dropped):
    paths = write_traces(tmp_path, num_ranks=3, num_steps=NUM_STEPS)
    for path in paths:
        hide_launches(path)
    move_steps(paths[1], 35 * MS)
    for _ in range(num_dropped):
        drop_first_collective(paths[1])
    ends = end_by_number(paths)
    assert len(ends[0]) == NUM_STEPS
    assert len(ends[1]) == NUM_STEPS - num_dropped
    assert ends[1].items() <= ends[0].items()
    assert ends[2] == ends[0]


def test_known_steps_number_what_a_rank_lacks(tmp_path):
    paths = write_traces(tmp_path, num_ranks=2, num_steps=NUM_STEPS)
    drop_first_collective(paths[1])
    ends = end_by_number(paths)
    assert ends[1].items() <= ends[0].items()
    assert sorted(ends[1]) == [1, 2, 3]
