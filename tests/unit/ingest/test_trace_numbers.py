"""One operation has one number on all ranks, also where traces say little about it."""

import gzip
import json
from pathlib import Path

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


def state_numbers(path):
    """Gives every all-reduce the number that torch would, and takes the steps away."""
    count = iter(range(100, 200))

    def change(event):
        if event["name"].startswith("nccl"):
            event["args"]["Seq"] = next(count)
        return not event["name"].startswith("ProfilerStep")

    rewrite(path, change)


def drop_last_collective(path):
    count = iter(range(NUM_STEPS))
    rewrite(path, lambda e: not e["name"].startswith("nccl") or next(count) < NUM_STEPS - 1)


def test_stated_numbers_count_wherever_traces_begin_and_end(tmp_path):
    paths = write_traces(tmp_path, num_ranks=3, num_steps=NUM_STEPS)
    for path in paths:
        state_numbers(path)
    drop_first_collective(paths[1])
    drop_last_collective(paths[2])
    ends = end_by_number(paths)
    assert {rank: sorted(own) for rank, own in ends.items()} == {
        0: [0, 1, 2, 3],
        1: [1, 2, 3],
        2: [0, 1, 2],
    }
    assert ends[1].items() <= ends[0].items()
    assert ends[2].items() <= ends[0].items()


def forget_first_launch(path):
    """As of work that was queued when the profiler started: no call, no arguments."""
    gone = []

    def forget(event):
        if event["name"].startswith("nccl") and not gone:
            gone.append(event["args"]["correlation"])
            event["args"] = {"device": 0, "stream": 20, "correlation": gone[0]}
        return True

    rewrite(path, forget)
    rewrite(path, lambda e: e["cat"] != "cuda_runtime" or e["args"]["correlation"] not in gone)


def test_what_was_launched_before_a_trace_counts_back_from_the_first_number(tmp_path):
    paths = write_traces(tmp_path, num_ranks=2, num_steps=NUM_STEPS)
    for path in paths:
        state_numbers(path)
    whole = end_by_number(paths)
    forget_first_launch(paths[1])
    assert end_by_number(paths) == whole


NCCL = Path(__file__).parents[4] / "shared" / "data" / "nccl"


def read_numbers(paths):
    """By rank, begin of the kernel and channel, the number of each operation."""
    by_rank = {
        rank: [record_trace(read_trace(path), max_spans=10_000)] for rank, path in enumerate(paths)
    }
    return {
        (rank, one.recorded.found.begin_ns, one.channel): number
        for rank, (rows,) in number_operations(by_rank).items()
        for one, number in rows
    }


def cut_first(source, target, num_cut):
    """The trace without its first operations, as if the profiler had started after them."""
    with gzip.open(source, "rt") as file:
        document = json.load(file)
    events = document["traceEvents"]
    kernels = sorted(
        (e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()),
        key=lambda e: e["ts"],
    )
    last = kernels[num_cut - 1]["args"]["correlation"]
    calls = [
        e["ts"] + e["dur"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["args"].get("correlation") == last
    ]
    host_since, device_since = max(calls, default=0), kernels[num_cut]["ts"]

    def is_kept(event):
        if event.get("ph") != "X" or event["name"].startswith("ProfilerStep"):
            return True
        is_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        return event["ts"] >= (device_since if is_device else host_since)

    document["traceEvents"] = [event for event in events if is_kept(event)]
    with gzip.open(target, "wt", compresslevel=1) as file:
        json.dump(document, file)


@pytest.mark.parametrize(
    ("name", "rank", "num_cut"),
    [("ddp", 2, 2), ("ddp", 0, 6), ("fsdp2", 1, 12), ("tp2dp2", 3, 60), ("pp4", 1, 5)],
)
def test_real_traces_that_begin_later_match_as_before(tmp_path, name, rank, num_cut):
    if not NCCL.exists():
        pytest.skip("the shared traces are not on this machine")
    paths = [NCCL / name / f"rank{number}.json.gz" for number in range(4)]
    whole = read_numbers(paths)
    cut_first(paths[rank], tmp_path / "cut.json.gz", num_cut)
    paths[rank] = tmp_path / "cut.json.gz"
    found = read_numbers(paths)
    assert len(found) < len(whole)
    moved = {}
    for key, number in found.items():
        moved.setdefault(key[2], set()).add(whole[key] - number)
    assert {channel: len(by) for channel, by in moved.items()} == dict.fromkeys(moved, 1)
