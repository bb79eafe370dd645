"""Feeds damaged memory snapshots to both readers: the same columns, or the same stated error.

    python tests/fuzz/fuzz_snapshot.py --inputs 100000 --seed 1 [--result FILE]

Inputs are small snapshots as torch writes them, from Python (protocols 2 to 5) and from C++ (which
fills a list at once and numbers a value after it is made): with wrong types, huge numbers and
keys that are missing, then cut, spliced, with other instructions put in; instructions in any order;
and random bytes. They come in pieces of any size. Some take the whole way from a file to the JSON
document. Each input comes from its number and the seed alone: `--only N`. A child process runs
them, so that a crash of compiled code is seen; one that takes longer than TIMEOUT_S is a hang.

With a reader that was compiled with -fsanitize=address,undefined this looks for reads outside of
buffers too:

    gcc -g -O1 -std=c99 -shared -fPIC -fsanitize=address,undefined -fno-sanitize-recover=all \\
        -o snapshot_asan.so src/meshscope/ingest/snapshot_machine.c
    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \\
        python tests/fuzz/fuzz_snapshot.py --inputs 100000 --library ./snapshot_asan.so
"""

import argparse
import ctypes
import json
import multiprocessing
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np

from meshscope.analyze.memory.snapshot_summary import summarize_snapshot
from meshscope.errors import MeshscopeError, TraceError
from meshscope.ingest.snapshot import snapshot_native
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS, STATES
from meshscope.ingest.snapshot.snapshot_pickle import PlainPickle
from meshscope.ingest.snapshot.snapshot_words import KNOWN_TEXTS
from meshscope.report.encode import encode
from meshscope.report.sections.snapshot import DOCUMENT, SnapshotDocument

TIMEOUT_S = 120
BATCH = 2_000
WHOLE_WAY = 20
"""One input in so many takes the whole way."""

ODD = (None, True, -1, 0, 2**31, 2**59 - 1, 2**59, 2**63, -(2**63), 2**64, 2**200, 1.5)
ODD += ("", "large", "ü\ud800", "x" * 300, b"bytes", (), (1, 2), [], {}, [[]], [{}], {"frames": []})
SIMPLE = b"()]}N.a0123teuslbdhKq\x85\x86\x87\x88\x89\x94\x80\x95"
REFUSED = b"cRbioPQ\x93\x81\x92\x82\x83\x84"


# --- inputs ------------------------------------------------------------------------------------


def damage_dict(draw, value):
    """The dict, now and then with something wrong in it."""
    if draw.random() < 0.06:
        value.pop(draw.choice(list(value)), None)
    if draw.random() < 0.06:
        value[draw.choice(KNOWN_TEXTS)] = draw.choice(ODD)
    if draw.random() < 0.01:
        value[draw.choice([1, None, (1, 2), 2.5])] = draw.choice(ODD)
    return value


def make_value(draw):
    """A snapshot, more or less."""
    names = [draw.choice(["forward", "f", "ü", "", "x" * draw.randrange(400)]) for _ in range(3)]
    frames = [
        damage_dict(draw, {"name": name, "filename": f"/a/torch/{name}.py", "line": number})
        for number, name in enumerate(names)
    ]
    stacks = [draw.choices(frames, k=draw.randrange(6)) for _ in range(3)]
    segments = [make_segment(draw, stacks) for _ in range(draw.randrange(4))]
    traces = [
        [make_event(draw, stacks) for _ in range(draw.choice([0, 0, 1, 5, 12]))]
        for _ in range(draw.randrange(4))
    ]
    value = {"segments": segments, "device_traces": traces}
    if draw.random() < 0.7:
        value["allocator_settings"] = {"max_split_size": -1, "roundup": {"1": 0}}
        value["external_annotations"] = [{"name": "x", "time_us": 5, "device": 0, "stage": "START"}]
    if draw.random() < 0.02:
        return segments  # as torch.cuda.memory_snapshot() gives them
    return damage_dict(draw, value)


def make_segment(draw, stacks):
    address = 512 * draw.randrange(64)
    blocks = []
    for number in range(draw.randrange(5)):
        block = {"address": address + 512 * number, "size": 512, "requested_size": 500}
        block |= {"state": draw.choice(STATES), "frames": draw.choice(stacks)}
        if draw.random() < 0.1:
            block = {"size": 512, "state": draw.choice(STATES)}
            block["history"] = [{"frames": draw.choice(stacks), "real_size": 500, "addr": 0}]
        blocks.append(damage_dict(draw, block))
    segment = {"device": draw.randrange(3), "address": address, "total_size": 512 * len(blocks)}
    segment |= {"segment_type": draw.choice(["large", "small"]), "stream": 0, "frames": []}
    return damage_dict(draw, segment | {"segment_pool_id": (0, 0), "blocks": blocks})


def make_event(draw, stacks):
    event = {"action": draw.choice(ACTIONS), "addr": 512 * draw.randrange(9)}
    event |= {
        "size": draw.choice([512, 70_000, 2**40]),
        "stream": 0,
        "time_us": draw.randrange(1 << 51),
    }
    frames = draw.choice(stacks)
    return damage_dict(draw, event | {"frames": frames if draw.random() < 0.5 else list(frames)})


def write_as_torch(value):
    """As torch's C++ writes it: protocol 2, lists at once, numbered after they are made."""
    out, numbers = bytearray(b"\x80\x02"), {}

    def write(one):
        if isinstance(one, str):
            data = one.encode("utf-8", "surrogatepass")
            out.extend(b"X" + len(data).to_bytes(4, "little") + data)
        elif type(one) is int and -(2**63) <= one < 2**63:
            out.extend(b"\x8a\x08" + one.to_bytes(8, "little", signed=True))
        elif isinstance(one, tuple) and len(one) == 2:
            write(one[0])
            write(one[1])
            out.extend(b"\x86")
        elif isinstance(one, dict | list):
            write_container(one)
        else:
            out.extend(b"N")

    def write_container(one):
        if id(one) in numbers:
            out.extend(b"j" + numbers[id(one)].to_bytes(4, "little"))
            return
        out.extend(b"}" if isinstance(one, dict) else b"]")
        if one:
            out.extend(b"(")
            for item in one.items() if isinstance(one, dict) else one:
                for part in item if isinstance(one, dict) else [item]:
                    write(part)
            out.extend(b"u" if isinstance(one, dict) else b"e")
        numbers[id(one)] = len(numbers)
        out.extend(b"r" + numbers[id(one)].to_bytes(4, "little"))

    write(value)
    return bytes(out + b".")


def make_input(seed, number):
    """The bytes of one input."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.random()
    if kind < 0.04:
        return draw.randbytes(draw.randrange(400))
    if kind < 0.16:
        return b"\x80\x04" + make_program(draw)
    value = make_value(draw)
    data = (
        write_as_torch(value) if kind < 0.4 else pickle.dumps(value, draw.choice([2, 3, 4, 4, 5]))
    )
    return damage(draw, bytearray(data))


def make_program(draw):
    """Instructions in any order, with texts that mean something."""
    out = bytearray()
    for _ in range(draw.randrange(120)):
        kind = draw.random()
        if kind < 0.3:
            text = draw.choice(KNOWN_TEXTS).encode()
            out += b"\x8c" + bytes([len(text)]) + text
        elif kind < 0.4:
            out += b"h" + bytes([draw.randrange(12)])
        elif kind < 0.45:
            out += b"\x94" * draw.choice([1, 1, 1, 6000])
        elif kind < 0.5:
            out += draw.choice([b"(", b"]", b"}", b"((", b"]("])
        elif kind < 0.51:
            out += draw.choice([b"(" * 70_000, b"](" * 500, b"}s" * 40, b"N" * 3000])
        else:
            out.append(draw.choice(SIMPLE[:29]))
    return bytes(out)


def damage(draw, data):
    for _ in range(draw.choice([0, 0, 1, 1, 2, 5])):
        place = draw.randrange(len(data) + 1)
        kind = draw.randrange(8)
        if kind == 0:
            del data[place:]
        elif kind == 1 and data:
            data[place % len(data)] = draw.randrange(256)
        elif kind == 2:
            data.insert(place, draw.choice(SIMPLE))
        elif kind == 3:
            del data[place : place + draw.randrange(12)]
        elif kind == 4:
            data[place:place] = data[place : place + draw.randrange(60)]
        elif kind == 5:
            data[place:place] = make_program(draw)[:60]
        elif kind == 6:
            head = draw.choice([b"X", b"\x8d", b"B", b"\x8e", b"\x8b", b"\x8a", b"j", b"r", b"C"])
            data[place:place] = head + draw.choice([b"\xff", b"\x00", b"\x01"]) * draw.randrange(9)
        elif draw.random() < 0.2:
            data.insert(place, draw.choice(REFUSED))
    return bytes(data)


# --- checks ------------------------------------------------------------------------------------


def feed(reader, data, draw):
    """The columns, or the error's text."""
    rest, place = bytearray(), 0
    try:
        while place < len(data) and not reader.is_done:
            size = draw.choice([1, 7, 64, 4096, 1 << 20])
            # The exact size, so that a read behind the end is a read outside of the memory.
            buffer = bytearray(rest + data[place : place + size])
            place += size
            taken = reader.feed(buffer, len(buffer))
            if not 0 <= taken <= len(buffer):
                raise AssertionError(f"{taken} of {len(buffer)} bytes")
            rest = buffer[taken:]
            if not reader.is_done and rest and not 1 <= len(rest) < reader.needed:
                raise AssertionError(f"{len(rest)} bytes are left, {reader.needed} needed")
        return reader.finish(is_cut=not reader.is_done)
    except TraceError as error:
        return str(error)


def hold_together(one, other):
    """AssertionError when the readers differ."""
    if isinstance(one, str) or isinstance(other, str):
        if one != other:
            raise AssertionError(f"{one!r} and {other!r}")
        return
    for field in fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        pairs = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
        for left, right in pairs:
            if isinstance(left, np.ndarray):
                is_same = left.dtype == right.dtype and np.array_equal(left, right)
            else:
                is_same = left == right
            if not is_same:
                raise AssertionError(f"{field.name}: {left!r} and {right!r}")


def check_columns(columns):
    """Every reference leads somewhere."""
    num_stacks, num_segments = len(columns.stack_begin) - 1, len(columns.segments[0])
    limits = [
        (columns.event_stack, num_stacks),
        (columns.blocks[5], num_stacks),
        (columns.blocks[0], num_segments),
        (columns.stack_frames, len(columns.frames)),
        (columns.event_action, len(ACTIONS)),
    ]
    for column, limit in limits:
        if len(column) and not -1 <= int(column.min()) <= int(column.max()) < limit:
            raise AssertionError(f"{column!r} leads outside of {limit}")


def take_whole_way(data, folder):
    path = folder / "input.pickle"
    path.write_bytes(data)
    try:
        summary = summarize_snapshot(read_snapshot(path))
    except MeshscopeError:
        return "whole way: error"
    json.loads(encode(*DOCUMENT, SnapshotDocument(snapshot=summary)))
    return "whole way: partial" if summary.warnings else "whole way: whole"


def run_batch(seed, first, count, library, results):
    """In a child: every input of the batch; the number under way stands in a shared value."""
    counts, under_way = results
    ended = Counter()
    if library:
        loaded = ctypes.CDLL(library)
        snapshot_native._set_signatures(loaded)
    else:
        loaded = snapshot_native.load_library()
    if loaded is None:
        raise SystemExit("the compiled reader is not there")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            under_way.value = number
            data = make_input(seed, number)
            found = feed(
                snapshot_native.NativePickle(loaded, len(data)), data, random.Random(number)
            )
            other = feed(PlainPickle(len(data)), data, random.Random(number + 1))
            hold_together(found, other)
            if isinstance(found, str):
                ended["refused" if found.startswith("refused") else "error"] += 1
            else:
                check_columns(found)
                ended["rows" if len(found.event_action) + len(found.blocks[0]) else "no rows"] += 1
            if number % WHOLE_WAY == 0:
                ended[take_whole_way(data, Path(folder))] += 1
    counts.put(dict(ended))


def run(seed, inputs, library):
    ended = Counter()
    failures = []
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    for first in range(0, inputs, BATCH):
        counts, under_way = context.SimpleQueue(), context.Value("q", first)
        count = min(BATCH, inputs - first)
        child = context.Process(
            target=run_batch, args=(seed, first, count, library, (counts, under_way))
        )
        child.start()
        child.join(TIMEOUT_S)
        if child.is_alive():
            child.kill()
            child.join()
        if child.exitcode:
            failures.append({"number": under_way.value, "exit": child.exitcode})
        if not counts.empty():
            ended.update(counts.get())
    return {
        "seed": seed,
        "inputs": inputs,
        "library": Path(library).name if library else "as installed",
        "failures": failures,
        "ended": dict(sorted(ended.items())),
        "seconds": round(time.monotonic() - begin, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this input alone, here")
    parser.add_argument(
        "--library", help="the compiled reader to load instead of the installed one"
    )
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    if options.only is not None:
        print(make_input(options.seed, options.only))
        queue, value = multiprocessing.SimpleQueue(), multiprocessing.Value("q", 0)
        run_batch(options.seed, options.only, 1, options.library, (queue, value))
        print(queue.get())
        return
    found = run(options.seed, options.inputs, options.library)
    print(json.dumps(found, indent=1))
    if options.result:
        options.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
