"""Peak, composition and course against a naive replay of the dicts and against torch itself."""

import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

from meshscope.analyze.memory.snapshot_peak import compose_peak, replay_device
from meshscope.analyze.memory.snapshot_sites import CATEGORIES, categorize_stacks, find_site
from meshscope.analyze.memory.snapshot_summary import summarize_snapshot
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.ingest.snapshot.snapshot_columns import Frame
from snapshot_builders import FRAMES, make_random_snapshot

DEVICE = 1
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "snapshot_read.py"


def read(tmp_path, value):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(value, 4))
    return read_snapshot(path)


def stack_of(frames):
    return tuple((frame["name"], frame["filename"], frame["line"]) for frame in frames)


def replay_naively(value):
    """Bytes by stack before the first event and after each allocation or free, one at a time."""
    events = [
        e for e in value["device_traces"][DEVICE] if e["action"] in ("alloc", "free_completed")
    ]
    opened = {}
    live = {}  # address: (bytes, stack)
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            opened[event["addr"]] = number
        elif opened.pop(event["addr"], None) is None:
            live[event["addr"]] = (event["size"], ())
    for segment in value["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in opened:
                live[block["address"]] = (block["size"], stack_of(block["frames"]))
    states = [dict(live)]
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], stack_of(event["frames"]))
        else:
            del live[event["addr"]]
        states.append(dict(live))
    return [sum_by_stack(state) for state in states]


def sum_by_stack(state):
    sums = {}
    for num_bytes, stack in state.values():
        sums[stack] = sums.get(stack, 0) + num_bytes
    return sums


def by_category(by_stack):
    sums = {}
    for stack, num_bytes in by_stack.items():
        name = find_site([Frame(*frame) for frame in stack]).category
        sums[name] = sums.get(name, 0) + num_bytes
    return sums


@pytest.mark.parametrize("seed", range(6))
def test_peak_and_course_are_those_of_a_naive_replay(tmp_path, seed):
    value = make_random_snapshot(seed, num_events=90 if seed < 3 else 700)
    snapshot = read(tmp_path, value)
    states = replay_naively(value)
    totals = [sum(state.values()) for state in states]
    replay = replay_device(snapshot, DEVICE)
    assert [replay.initial_bytes, *replay.allocated_bytes.tolist()] == totals
    assert replay.peak_bytes == max(totals)
    found = {
        tuple((f.name, f.filename, f.line) for f in snapshot.stack(stack)): num_bytes
        for stack, num_bytes in compose_peak(replay).items()
    }
    assert found == states[totals.index(max(totals))]
    [device] = summarize_snapshot(snapshot).devices
    assert device.unexplained_bytes == 0
    assert device.categories_bytes == by_category(states[totals.index(max(totals))])
    assert len(device.course) == min(100, len(totals) - 1)
    for moment in device.course:
        assert dict(moment.categories_bytes) == by_category(states[moment.event + 1])
        assert moment.allocated_bytes == totals[moment.event + 1]


@pytest.mark.parametrize("seed", range(3))
def test_counts_and_the_most_that_was_reserved(tmp_path, seed):
    value = make_random_snapshot(seed)
    [device] = summarize_snapshot(read(tmp_path, value)).devices
    actions = [event["action"] for event in value["device_traces"][DEVICE]]
    assert device.actions == {name: actions.count(name) for name in set(actions)}
    total = sum(segment["total_size"] for segment in value["segments"])
    assert device.reserved_peak_bytes == total  # segments only come in this model
    value["device_traces"][DEVICE].append(
        {"action": "segment_free", "addr": 5 << 40, "size": 1 << 30, "frames": [], "time_us": 1}
    )
    [device] = summarize_snapshot(read(tmp_path, value)).devices
    assert device.reserved_peak_bytes == total + (1 << 30)


def test_stacks_are_categorized_at_once_as_one_by_one(tmp_path):
    stacks = [FRAMES[first:last] for first in range(10) for last in range(first, 11)]
    stacks += [stack[::-1] for stack in stacks]
    events = [
        {"action": "alloc", "addr": 512 * n, "size": 512, "frames": list(stack)}
        for n, stack in enumerate(stacks)
    ]
    snapshot = read(tmp_path, {"segments": [], "device_traces": [events]})
    found = [CATEGORIES[code] for code in categorize_stacks(snapshot).tolist()]
    expected = [find_site(snapshot.stack(n)).category for n in range(snapshot.num_stacks)]
    assert found == expected
    assert len(set(found)) == len(CATEGORIES)


def test_an_allocation_without_its_free_gives_way_to_the_next(tmp_path):
    """A buffer that lost events in the middle: what is freed is the last that was allocated."""
    stacks = [[FRAMES[0]], [FRAMES[7]], [FRAMES[9]]]
    actions = [("alloc", 0), ("alloc", 1), ("free_completed", 2), ("free_completed", 2)]
    events = [
        {"action": action, "addr": 512, "size": 512, "frames": stacks[stack]}
        for action, stack in actions
    ]
    snapshot = read(tmp_path, {"segments": [], "device_traces": [events]})
    replay = replay_device(snapshot, 0)
    names = [[frame.name for frame in snapshot.stack(int(stack))] for stack in replay.stack]
    assert names == [["linear"], ["_init_group"], ["_init_group"], []]
    assert np.array_equal(replay.allocated_bytes, [512, 1024, 512, 0])


@pytest.mark.parametrize("num_events", [3000])
def test_torch_says_the_same_of_the_same_file(tmp_path, num_events):
    """pickle.load with torch's segsum and memory, on a file as torch 2.13 writes it."""
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("snapshot_read", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    path = tmp_path / "s.pickle"
    expected = benchmark.write_snapshot(path, num_events)
    ours = benchmark.answer_ours(read_snapshot(path))
    theirs = benchmark.answer_torch(benchmark.load_pickle(path))
    assert ours == theirs
    assert {name: ours[name] for name in expected} == expected
    assert sum(ours["events"].values()) == num_events
    assert len(ours["active_by_stack"]) > 10


@pytest.mark.parametrize("seed", range(3))
def test_torch_says_the_same_of_random_snapshots(tmp_path, seed):
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    value = make_random_snapshot(seed)
    [device] = summarize_snapshot(read(tmp_path, value)).devices
    part = device.fragmentation
    lines = dict(
        line.split(": ", 1) for line in _memory_viz.segsum(value).splitlines() if ": " in line
    )
    sizes = _memory_viz.Bytes
    assert lines["segments"] == str(part.num_segments)
    assert lines["total_reserved"] == str(sizes(part.reserved_bytes))
    assert lines["total_allocated"] == str(sizes(part.in_use_bytes - part.rounding_bytes))
    assert lines["total_free"].split(" ")[0] == str(sizes(part.free_bytes + part.rounding_bytes))
    text = _memory_viz.trace(value)
    assert f"{sum(device.actions.values())} entries" in text
    assert text.count(" = cudaMalloc(") == device.actions.get("segment_alloc", 0)
    assert text.count("# free completed for ") == device.actions["free_completed"]
