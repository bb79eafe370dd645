"""The reader gives what `pickle.loads` gives for plain values, and refuses everything else."""

import io
import os
import pickle
import pickletools
import random

import pytest

from meshscope.errors import TraceError
from meshscope.ingest.snapshot_pickle import CutPickle, PlainPickle


def read(data):
    def fill_dict(target, items):
        target.update(zip(items[::2], items[1::2], strict=True))

    reader = PlainPickle(io.BytesIO(data), len(data), on_dict=fill_dict, on_list=list.extend)
    return reader.read()


SHARED = [1, 2]
PLAIN = {
    "numbers": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**62, -(2**70), 1.5],
    "texts": ["", "a", "ü" * 300, "\u2028"],
    "more": (None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), b"", b"x" * 300),
    "shared": [SHARED, SHARED, {}],
    5: {"many": list(range(2500)), "deep": [[[[]]]]},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_out_as_they_went_in(protocol):
    value = PLAIN
    if protocol == 2:  # which writes bytes as a call
        value = {**PLAIN, "more": PLAIN["more"][:-2]}
    found = read(pickle.dumps(value, protocol=protocol))
    assert found == value
    assert found["shared"][0] is found["shared"][1]


class Hostile:
    def __reduce__(self):
        return os.system, ("echo hostile",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [Hostile(), {"a": [Hostile()]}, len, {1, 2}, 1j])
def test_what_would_run_code_is_refused(protocol, value):
    with pytest.raises(TraceError, match=r"run code|no instruction"):
        read(pickle.dumps(value, protocol=protocol))


def test_every_code_instruction_of_python_is_refused():
    known = PlainPickle(io.BytesIO(), 0, on_dict=lambda *_: None, on_list=lambda *_: None)._actions
    for opcode in pickletools.opcodes:
        name = opcode.name
        runs_code = name in {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ"}
        if runs_code or name.startswith(("NEWOBJ", "EXT", "PERSID", "BINPERSID")):
            assert opcode.code.encode("latin-1") not in known, name


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"\x80\x04]q", b"\x80\x04X\xff\x00\x00\x00a", b"\x80\x04}("]
)
def test_a_file_that_is_cut(data):
    with pytest.raises(CutPickle):
        read(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04.",
        b"\x80\x09N.",
        b"\x80\x04a.",
        b"\x80\x04NNa.",
        b"\x80\x04h\x05.",
        b"\x80\x04}]Ns.",
        b"\x80\x04(u.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"not a pickle",
    ],
)
def test_nonsense_is_an_error_or_nothing(data):
    try:
        assert read(data) is None
    except (TraceError, CutPickle):
        pass


def test_damaged_pickles_never_do_more_than_fail():
    chance = random.Random(6)
    good = pickle.dumps(PLAIN, protocol=4)
    for _ in range(300):
        data = bytearray(good[: chance.randrange(1, len(good))] if chance.random() < 0.2 else good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        try:
            read(bytes(data))
        except (TraceError, CutPickle):
            pass
