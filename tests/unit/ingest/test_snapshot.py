"""Snapshots made by hand in torch's structure, with known peaks, stacks and fragmentation."""

import json
import pickle

import numpy as np
import pytest

from command_line import invoke
from meshscope.analyze.memory.snapshot_peak import compose_peak, replay_device
from meshscope.analyze.memory.snapshot_sites import find_site
from meshscope.analyze.memory.snapshot_summary import measure_fragmentation, summarize_snapshot
from meshscope.core.unavailable import Unavailable
from meshscope.errors import TraceError
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.ingest.snapshot.snapshot_columns import Frame

KIB, MIB = 1 << 10, 1 << 20
TORCH = "/lib/site-packages/torch"


def frame(name, filename, line):
    return {"name": name, "filename": filename, "line": line}


FORWARD = [
    frame("linear", f"{TORCH}/nn/functional.py", 5),
    frame("forward", "/home/user/gpt.py", 10),
    frame("_call_impl", f"{TORCH}/nn/modules/module.py", 1500),
    frame("<module>", "/home/user/train.py", 3),
]
BACKWARD = [
    frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 800),
    frame("<module>", "/home/user/train.py", 4),
]
OPTIMIZER = [
    frame("_init_group", f"{TORCH}/optim/adam.py", 100),
    frame("<module>", "/home/user/train.py", 5),
]
MOVE = [
    frame("_apply", f"{TORCH}/nn/modules/module.py", 900),
    frame("<module>", "/home/user/train.py", 1),
]


def event(action, address, size, frames, time_us):
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "frames": frames,
    }


def block(address, size, state, frames=(), requested=None):
    return {
        "address": address,
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": list(frames),
    }


def segment(address, blocks, device=0):
    return {
        "device": device,
        "address": address,
        "total_size": sum(one["size"] for one in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "blocks": blocks,
    }


def make_snapshot():
    """Parameters from before the first event; activations up, then down as gradients come; state.

    Peak: 8 parameters + 2 × 4 activations + 3 gradients = 19 MiB, after the third event.
    """
    return {
        "segments": [
            segment(
                0x10000000,
                [
                    block(0x10000000, 8 * MIB, "active_allocated", MOVE, 8 * MIB - 100),
                    block(0x10800000, 4 * MIB, "inactive"),
                    block(0x10C00000, 3 * MIB, "active_allocated", BACKWARD),
                    block(0x10F00000, 1 * MIB, "inactive"),
                ],
            ),
            segment(0x20000000, [block(0x20000000, 2 * MIB, "inactive")]),
            segment(0x30000000, [block(0x30000000, 2 * MIB, "active_allocated", OPTIMIZER)]),
        ],
        "device_traces": [
            [
                event("alloc", 0x10800000, 4 * MIB, FORWARD, 10),
                event("alloc", 0x20000000, 4 * MIB, FORWARD, 20),
                event("alloc", 0x10C00000, 3 * MIB, BACKWARD, 30),
                event("free_requested", 0x20000000, 4 * MIB, BACKWARD, 40),
                event("free_completed", 0x20000000, 4 * MIB, BACKWARD, 40),
                event("free_completed", 0x10800000, 4 * MIB, BACKWARD, 50),
                event("segment_alloc", 0x30000000, 2 * MIB, OPTIMIZER, 60),
                event("alloc", 0x30000000, 2 * MIB, OPTIMIZER, 60),
            ],
            [],
        ],
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1},
        "external_annotations": [],
    }


def write(path, value, protocol=4):
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


@pytest.fixture
def snapshot(tmp_path):
    return read_snapshot(write(tmp_path / "s.pickle", make_snapshot()))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_all_protocols_give_the_same_columns(tmp_path, snapshot, protocol):
    found = read_snapshot(write(tmp_path / "p.pickle", make_snapshot(), protocol))
    for name in type(found).__slots__:
        one, other = getattr(found, name), getattr(snapshot, name)
        if isinstance(one, np.ndarray):
            assert one.tolist() == other.tolist(), name
    assert found.frames == snapshot.frames


def test_the_peak_and_what_it_is_made_of(snapshot):
    [device] = summarize_snapshot(snapshot).devices
    assert (device.peak_bytes, device.peak_event) == (19 * MIB, 2)
    assert device.categories_bytes == {
        "activations": 8 * MIB,
        "parameters": 8 * MIB,
        "gradients": 3 * MIB,
    }
    assert device.modules_bytes == {"": 11 * MIB, "gpt.py:10": 8 * MIB}
    assert device.unexplained_bytes == 0
    assert device.stacks[0].num_bytes == 8 * MIB
    assert device.sentence == (
        "Device 0 had 19.0 MiB allocated at its peak: activations 8.00 MiB (42 %), parameters "
        "8.00 MiB (42 %), gradients 3.00 MiB (16 %)."
    )


def test_the_course_adds_up_at_every_moment(snapshot):
    [device] = summarize_snapshot(snapshot).devices
    assert [m.allocated_bytes // MIB for m in device.course] == [12, 16, 19, 15, 11, 13]
    for moment in device.course:
        assert sum(moment.categories_bytes.values()) == moment.allocated_bytes
    assert device.course[-1].categories_bytes == {
        "parameters": 8 * MIB,
        "gradients": 3 * MIB,
        "optimizer state": 2 * MIB,
    }


def test_fragmentation(snapshot):
    found = measure_fragmentation(snapshot, 0)
    assert (found.num_segments, found.reserved_bytes) == (3, 20 * MIB)
    assert (found.in_use_bytes, found.free_bytes) == (13 * MIB, 7 * MIB)
    assert found.free_in_used_segments_bytes == 5 * MIB
    assert found.largest_free_bytes == 4 * MIB
    assert found.fragmentation_ratio == pytest.approx(3 / 7)
    assert found.rounding_bytes == 100


def test_a_ring_buffer_that_begins_with_frees(tmp_path):
    value = make_snapshot()
    del value["device_traces"][0][:3]
    replay = replay_device(read_snapshot(write(tmp_path / "s.pickle", value)), 0)
    assert replay.initial_bytes == 19 * MIB
    assert (replay.peak_index, replay.peak_bytes) == (-1, 19 * MIB)
    assert sum(compose_peak(replay).values()) == 19 * MIB


def test_devices_keep_their_numbers(tmp_path):
    value = make_snapshot()
    value["device_traces"] = [[], [], value["device_traces"][0]]
    value["segments"] = [segment(0, [block(0, KIB, "inactive")], device=2)]
    found = read_snapshot(write(tmp_path / "s.pickle", value))
    assert set(found.event_device.tolist()) == {2}
    assert isinstance(replay_device(found, 0), Unavailable)


def test_more_devices_than_there_are(tmp_path):
    segments = [segment(0, [block(0, KIB, "active_allocated")], device=7 * n) for n in range(300)]
    summary = summarize_snapshot(
        read_snapshot(write(tmp_path / "s.pickle", {"segments": segments}))
    )
    assert len(summary.devices) == 256
    assert "300 devices" in summary.warnings[0]


def test_stacks_are_kept_once(tmp_path):
    value = make_snapshot()
    value["device_traces"][0] = [
        event("alloc", 512 * i, 512, list(FORWARD), i) for i in range(3000)
    ]
    found = read_snapshot(write(tmp_path / "s.pickle", value))
    assert len(found.event_stack) == 3000
    assert len(set(found.event_stack.tolist())) == 1
    assert found.num_stacks == 5  # that one, those of three blocks, and the empty one


@pytest.mark.parametrize(
    ("frames", "category"),
    [
        (FORWARD, "activations"),
        (BACKWARD, "gradients"),
        (OPTIMIZER, "optimizer state"),
        (MOVE, "parameters"),
        ([frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 1)], "communication"),
        ([frame("main", "/home/user/x.py", 1)], "other"),
        ([], "no stack"),
    ],
)
def test_categories_by_stack(frames, category):
    assert find_site([Frame(**one) for one in frames]).category == category


def test_blocks_of_old_snapshots_without_addresses(tmp_path):
    blocks = [
        {"size": 100, "state": "active_allocated", "history": [{"frames": FORWARD}]},
        {"size": 50, "state": "inactive"},
    ]
    value = {"segments": [{"address": 1000, "total_size": 150, "blocks": blocks}]}
    found = read_snapshot(write(tmp_path / "s.pickle", value))
    assert found.block_address.tolist() == [1000, 1100]
    [device] = summarize_snapshot(found).devices
    assert device.categories_bytes == {"activations": 100}


def test_a_cut_file_gives_its_beginning(tmp_path):
    data = pickle.dumps(make_snapshot(), protocol=4)
    path = tmp_path / "cut.pickle"
    path.write_bytes(data[: len(data) * 2 // 3])
    found = read_snapshot(path)
    assert "cut" in found.warnings[0]
    assert len(found.segment_device) == 3
    summarize_snapshot(found)


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], 5, {"segments": 3, "b": {}}])
def test_other_pickles(tmp_path, value):
    path = write(tmp_path / "s.pickle", value)
    if isinstance(value, dict) and "segments" in value:
        assert summarize_snapshot(read_snapshot(path)).devices == ()
    else:
        with pytest.raises(TraceError, match="not a memory snapshot"):
            read_snapshot(path)


def test_wrong_types_are_left_out(tmp_path):
    value = make_snapshot()
    value["segments"][0]["blocks"][0].update(size="x", address=-5, frames=7)
    value["device_traces"][0][0].update(action="explode", addr=None, size=2**200)
    value["device_traces"][0][1]["frames"] = [3, None, {"name": 5, "line": "x"}]
    found = read_snapshot(write(tmp_path / "s.pickle", value))
    assert found.num_odd == 2
    summarize_snapshot(found)


def test_keys_that_are_no_keys(tmp_path):
    value = {(1, (2,)): 3, None: 4, **make_snapshot()}
    assert len(read_snapshot(write(tmp_path / "s.pickle", value)).event_action) == 8
    with pytest.raises(TraceError, match="not a memory snapshot"):
        read_snapshot(write(tmp_path / "s.pickle", {(1, (2,)): 3}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"\x1f\x8b\x08\x00", "packed by gzip"),
        (b"\x28\xb5\x2f\xfd\x00", "packed by zstd"),
        (b"PK\x03\x04 archive", "zip file"),
        (b'{"traceEvents": []}', "it is text"),
        (b"cos\nsystem\n(S'x'\ntR.", "does not begin as pickles"),
        (b"\x80\x04cos\nsystem\n.", "would run code .GLOBAL."),
        (b"\x80\x04N.", "neither segments nor traces"),
        (b"\x80", "neither segments nor traces"),
    ],
)
def test_files_that_are_no_snapshots(tmp_path, data, message):
    path = tmp_path / "bad.pickle"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as failed:
        read_snapshot(path)
    assert str(failed.value).count(str(path)) == 1
    assert "\n" not in str(failed.value)


def test_files_that_cannot_be_opened(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(TraceError, match="cannot be read"):
            read_snapshot(path)


@pytest.mark.parametrize("use_native", [False, None])
def test_texts_longer_than_the_buffer(tmp_path, monkeypatch, use_native):
    monkeypatch.setattr("meshscope.ingest.snapshot.snapshot.BUFFER_BYTES", 50)
    value = make_snapshot()
    value["device_traces"][0][0]["user_metadata"] = "x" * 100_000
    value["device_traces"][0][0]["frames"] = [frame("ü" * 2000, "x.py", 1)]
    found = read_snapshot(write(tmp_path / "s.pickle", value), use_native=use_native)
    assert found.warnings == ()
    assert found.stack(int(found.event_stack[0]))[0].name == "ü" * 500


def test_an_out_of_memory_event_counts_as_a_failure(tmp_path):
    value = make_snapshot()
    value["device_traces"][0].append(
        {"action": "oom", "device_free": 512, "size": 9 * MIB, "stream": 0, "frames": FORWARD}
    )
    found = read_snapshot(write(tmp_path / "s.pickle", value))
    assert found.event_address[-1] == 512
    [device] = summarize_snapshot(found).devices
    assert device.num_failures == 1
    assert (device.peak_bytes, device.final_bytes) == (19 * MIB, 13 * MIB)


def test_the_command_line(tmp_path):
    path = write(tmp_path / "s.pickle", make_snapshot())
    text = invoke("snapshot", path, catch_exceptions=False)
    assert text.exit_code == 0
    assert "19.0 MiB" in text.output
    assert "gpt.py:10 forward" in text.output
    found = json.loads(invoke("snapshot", path, "--json").stdout)
    [device] = found["snapshot"]["devices"]
    assert device["peak_bytes"] == 19 * MIB
    assert device["actions"] == {
        "alloc": 4,
        "free_requested": 1,
        "free_completed": 2,
        "segment_alloc": 1,
    }
    assert sum(one["num_bytes"] for one in device["stacks"]) == 19 * MIB
    assert sum(device["modules_bytes"].values()) == 19 * MIB
    assert device["course"][2]["categories_bytes"] == device["categories_bytes"]
    assert device["fragmentation"]["free_in_used_segments_bytes"] == 5 * MIB
    assert invoke("snapshot", path, "--device", "7").exit_code == 2
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(b"cos\nsystem\n.")
    failed = invoke("snapshot", bad)
    assert failed.exit_code == 3
    assert len(failed.stderr.strip().splitlines()) == 1
