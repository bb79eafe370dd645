"""Both readers give what the pickle holds, the same, and refuse all that is not plain values."""

import os
import pickle
import pickletools
import random
from dataclasses import fields

import numpy as np
import pytest

from meshscope.errors import TraceError
from meshscope.ingest.snapshot import snapshot_native
from meshscope.ingest.snapshot.snapshot import make_reader
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, STATES
from meshscope.ingest.snapshot.snapshot_words import CODE_NAMES, limit_memo
from snapshot_builders import make_random_snapshot, write_as_torch_cpp

PLAIN_INSTRUCTIONS = [
    *("MARK", "STOP", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "EMPTY_LIST"),
    *("EMPTY_TUPLE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "TUPLE"),
    *("TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("PROTO", "FRAME", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
]
has_native = snapshot_native.load_library() is not None
READERS = [
    pytest.param(False, id="python"),
    pytest.param(
        True, id="compiled", marks=pytest.mark.skipif(not has_native, reason="no compiler here")
    ),
]


def read(data, use_native, piece=1 << 20):
    reader = make_reader(len(data), use_native=use_native)
    rest = bytearray()
    for place in range(0, len(data), piece):
        rest += data[place : place + piece]
        rest = rest[reader.feed(rest, len(rest)) :]
        if reader.is_done:
            break
    return reader.finish(is_cut=not reader.is_done), reader.is_done


def as_plain(columns):
    """Lists of numbers; the types are compared apart."""
    return {
        field.name: [one.tolist() for one in value] if isinstance(value, tuple) else list(value)
        for field in fields(columns)
        if not isinstance(value := getattr(columns, field.name), int)
    }


def expect(value):
    """Rows of a snapshot of torch 2.13, from the dicts themselves."""
    events = [event for trace in value["device_traces"] for event in trace]
    blocks = [
        (
            row,
            block["address"],
            block["size"],
            block["requested_size"],
            STATES.index(block["state"]),
        )
        for row, segment in enumerate(value["segments"])
        for block in segment["blocks"]
    ]
    stacks = [block["frames"] for segment in value["segments"] for block in segment["blocks"]]
    stacks += [event["frames"] for event in events]
    return {
        "events": [
            (ACTIONS.index(e["action"]), e["addr"], e["size"], e["time_us"]) for e in events
        ],
        "blocks": blocks,
        "segments": [
            (s["device"], s["address"], s["total_size"], int(s["segment_type"] == "large"))
            for s in value["segments"]
        ],
        "stacks": [[(f["name"], f["filename"], f["line"]) for f in stack] for stack in stacks],
    }


def rows_of(columns):
    frames = [(name.decode(), file.decode(), line) for name, file, line in columns.frames]
    begin = columns.stack_begin.tolist()
    numbers = [*columns.blocks[5].tolist(), *columns.event_stack.tolist()]
    event = (columns.event_action, columns.event_address, columns.event_bytes)
    return {
        "events": list(
            zip(*(one.tolist() for one in (*event, columns.event_time_us)), strict=True)
        ),
        "blocks": list(zip(*(one.tolist() for one in columns.blocks[:5]), strict=True)),
        "segments": list(zip(*(one.tolist() for one in columns.segments), strict=True)),
        "stacks": [
            [frames[place] for place in columns.stack_frames[begin[n] : begin[n + 1]].tolist()]
            for n in numbers
        ],
    }


@pytest.mark.parametrize("use_native", READERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5, "C++"])
def test_rows_are_those_of_the_dicts(use_native, protocol):
    for seed, num_events in enumerate((0, 40, 1700)):
        value = make_random_snapshot(seed, num_events)
        data = write_as_torch_cpp(value) if protocol == "C++" else pickle.dumps(value, protocol)
        assert pickle.loads(data) == value
        columns, is_done = read(data, use_native)
        assert is_done
        assert rows_of(columns) == expect(value)
        assert set(columns.event_device.tolist()) <= {1}
        assert columns.num_odd == 0


@pytest.mark.skipif(not has_native, reason="no compiler here")
def test_the_readers_agree_on_every_type():
    data = pickle.dumps(make_random_snapshot(5), 4)
    found, other = (read(data, use_native)[0] for use_native in (True, False))
    assert as_plain(found) == as_plain(other)
    for field in fields(found):
        one, two = getattr(found, field.name), getattr(other, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == two.dtype, field.name


@pytest.mark.skipif(not has_native, reason="no compiler here")
def test_memory_lives_as_long_as_a_column_and_no_longer(monkeypatch):
    freed = []
    library = snapshot_native.load_library()
    monkeypatch.setattr(snapshot_native._Machine, "__del__", lambda self: freed.append(self.handle))
    columns, _ = read(pickle.dumps(make_random_snapshot(5), 4), use_native=True)
    kept = columns.event_bytes[3:10]
    expected = kept.tolist()
    del columns
    assert (freed, kept.tolist()) == ([], expected)
    del kept
    [handle] = freed
    library.snapshot_free(handle)


@pytest.mark.parametrize("use_native", READERS)
@pytest.mark.parametrize("piece", [1, 13, 1000])
def test_pieces_of_any_size(use_native, piece):
    data = pickle.dumps(make_random_snapshot(6, num_events=120), 4)
    whole, cut_up = read(data, use_native)[0], read(data, use_native, piece)[0]
    assert as_plain(cut_up) == as_plain(whole)


@pytest.mark.parametrize("use_native", READERS)
@pytest.mark.parametrize("is_cpp", [False, True])
def test_a_cut_file_gives_what_was_whole(use_native, is_cpp):
    value = make_random_snapshot(7, num_events=1500, device=2)
    data = write_as_torch_cpp(value) if is_cpp else pickle.dumps(value, 4)
    whole = expect(value)
    columns, is_done = read(data[: len(data) * 3 // 4], use_native)
    assert not is_done
    found = rows_of(columns)
    num = len(found["events"])
    assert 300 < num < len(whole["events"])
    assert found["events"] == whole["events"][:num]
    assert set(columns.event_device.tolist()) == {2}  # the two before it are empty


class Hostile:
    def __reduce__(self):
        return os.system, ("echo hostile",)


@pytest.mark.parametrize("use_native", READERS)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [Hostile(), {"a": [Hostile()]}, len, {1, 2}, 1j])
def test_what_would_run_code_is_refused(use_native, protocol, value):
    with pytest.raises(TraceError, match=r"run code|no instruction"):
        read(pickle.dumps(value, protocol=protocol), use_native)


@pytest.mark.parametrize("use_native", READERS)
def test_every_instruction_of_python_that_is_not_plain_is_refused(use_native):
    plain = set(PLAIN_INSTRUCTIONS)
    for opcode in pickletools.opcodes:
        code = ord(opcode.code)
        runs_code = opcode.name in CODE_NAMES.values()
        assert not (runs_code and opcode.name in plain)
        if opcode.name not in plain:
            with pytest.raises(TraceError, match="run code" if runs_code else "no instruction"):
                read(b"\x80\x04NN" + bytes([code]) + b"\0" * 20, use_native)


@pytest.mark.parametrize("use_native", READERS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x09N.", "protocol 9"),
        (b"\x80\x04a.", "without the values"),
        (b"\x80\x04NNa.", "without the values"),
        (b"\x80\x04h\x05.", "without the values"),
        (b"\x80\x04(u.", "without the values"),
        (b"\x80\x04N(0u.", "without the values"),
        (b"\x80\x04}(Nu.", "without the values"),
        (b"\x80\x04]Nu", "without the values"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "out of order"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "a number of 2147483647 bytes"),
        (b"\x80\x04X\xff\xff\xff\xff.", "a text of 4294967295 bytes"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "a text of 9223372036854775807 bytes"),
        (b"\x80\x04N" + b"\x94" * 8000, "too many"),
        (b"\x80\x04" + b"(" * 70_000, "too many"),
        (b"\x80\x04" + b"N" * (80 << 10), "too many"),
    ],
)
def test_nonsense_is_a_stated_error(use_native, data, message):
    with pytest.raises(TraceError, match=message):
        read(data, use_native)


@pytest.mark.parametrize("use_native", READERS)
def test_references_are_bounded_by_the_size_and_enough_for_pickle(use_native):
    data = pickle.dumps({"device_traces": [[] for _ in range(4000)]}, 4)
    assert data.count(b"]\x94") <= limit_memo(len(data))
    assert read(data, use_native)[0].has_root


@pytest.mark.parametrize("use_native", READERS)
def test_an_entry_that_is_named_twice_counts_once(use_native):
    event = {"action": "alloc", "addr": 512, "size": 512, "time_us": 1}
    columns, _ = read(pickle.dumps({"device_traces": [[event, event], [event]]}, 4), use_native)
    assert len(columns.event_action) == 1
    own = {"segments": []}
    own["segments"].append(own)  # a list that holds what holds it
    assert len(read(pickle.dumps(own, 4), use_native)[0].event_action) == 0


@pytest.mark.parametrize("use_native", READERS)
def test_numbers_at_the_limits(use_native):
    sizes = [
        0,
        255,
        256,
        65535,
        65536,
        2**31 - 1,
        2**31,
        2**59 - 1,
        2**59,
        2**63,
        2**64,
        -1,
        -(2**70),
    ]
    events = [{"action": "alloc", "addr": 0, "size": size} for size in sizes]
    columns, _ = read(pickle.dumps({"device_traces": [events]}, 4), use_native)
    assert columns.event_bytes.tolist() == [*sizes[:8], -1, -1, -1, -1, -1]


@pytest.mark.parametrize("use_native", READERS)
def test_damaged_pickles_never_do_more_than_fail(use_native):
    chance = random.Random(6)
    good = pickle.dumps(make_random_snapshot(8, num_events=60), protocol=4)
    for _ in range(150):
        data = bytearray(good[: chance.randrange(1, len(good))] if chance.random() < 0.2 else good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        try:
            read(bytes(data), use_native)
        except TraceError:
            pass


@pytest.mark.skipif(not has_native, reason="no compiler here")
def test_a_compiled_reader_of_another_version_is_not_used(monkeypatch):
    assert snapshot_native.load_library.__wrapped__() is not None
    monkeypatch.setattr(snapshot_native, "_NUM_LOOKED", snapshot_native._NUM_LOOKED + 2)
    assert snapshot_native.load_library.__wrapped__() is None
