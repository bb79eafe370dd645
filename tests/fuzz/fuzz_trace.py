"""Feeds damaged traces to the reader, by the million: an error it states, or a partial result.

    python tests/fuzz/fuzz_trace.py --inputs 1000000 --seed 1 [--result FILE]

Inputs are small traces: cut, spliced, with wrong types, negative and huge numbers, twice the
same key, deep nesting, hostile names, or packed by gzip, bzip2 or xz and cut then, or in UTF-16.
Most go to a scanner in pieces of any size; some take the whole way from a file to the summary.
Each input comes from its number and the seed alone, so that a failure can be had again: `--only N`.
A child process runs them, so that a crash of compiled code is seen; one that takes longer than
TIMEOUT_S is a hang.

With `--native-only` and a scanner compiled with -fsanitize=address this looks for reads outside of
buffers too (see CONTRIBUTING.md).
"""

import argparse
import bz2
import gzip
import json
import lzma
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.errors import MeshscopeError
from meshscope.ingest.kineto.kineto import make_scanner, read_trace
from meshscope.ingest.native import load_library

TIMEOUT_S = 60
BATCH = 2_000
WHOLE_WAY = 25
"""One input in so many takes the whole way."""

NUMBERS = (
    "0",
    "-0",
    "1",
    "-1",
    "1e308",
    "1e-400",
    "-1e999",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809",
    "1.5",
    ".5",
    "5.",
    "1e",
    "0x10",
    "NaN",
    "Infinity",
    "-Infinity",
    "00012",
    "123456789012345678901234567890.123456789",
    "1682725898236590.123",
    "true",
    "null",
    '""',
    "[]",
    "{}",
    '"12"',
    '"\\ud800"',
    "--1",
)
NAMES = (
    "",
    "\x1b[31m",
    "\u202e",
    "a" * 5_000,
    "<script>alert(1)</script>",
    "ProfilerStep#7",
    "nn.Module: X_0",
    "ProfilerStep#999999999999999999999",
    "ncclDevKernel_AllReduce(x)",
    "process_name",
    "\\",
    "\x00",
    "nccl:all_reduce",
    "c10d::allreduce_",
    "Memcpy HtoD",
    "cudaLaunchKernel",
    "cudaDeviceSynchronize",
    "thread_name",
    "Ascend Hardware",
    "Stream 3",
    "/device:TPU:0",
    "XLA Ops",
    "event_wait",
)
CATEGORIES = (
    "kernel",
    "cpu_op",
    "cuda_runtime",
    "gpu_memcpy",
    "gpu_memset",
    "user_annotation",
    "python_function",
    "ac2g",
    "nobody knows",
    "",
)
KEYS = (
    "stream",
    "device",
    "correlation",
    "External id",
    "Input Dims",
    "Collective name",
    "dtype",
    "In msg nelems",
    "Group size",
    "Process Group Ranks",
    "name",
    "labels",
    "bytes",
    "other",
)
TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"\\u",
    b"\x00",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b" " * 50,
    b'"traceEvents"',
    b'{"ph":"X"',
    b"[" * 60,
    b"]" * 60,
    b'{"a":' * 40,
    b"NaN",
    b"\xef\xbb\xbf",
)


def make_event(draw: random.Random) -> str:
    """An event, more or less."""
    parts = []
    for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args"):
        if draw.random() < 0.06:
            continue
        value = draw.choice(NUMBERS)
        if draw.random() < 0.9:
            if key == "ph":
                value = json.dumps(
                    draw.choice(["X", "X", "X", "M", "B", "E", "s", "f", "C", "", "XX"])
                )
            elif key == "cat":
                value = json.dumps(draw.choice(CATEGORIES))
            elif key == "name":
                value = json.dumps(draw.choice(NAMES))
            elif key == "args":
                value = make_arguments(draw)
            else:
                value = str(
                    draw.choice([draw.randrange(10), draw.random() * 1e6, draw.randrange(1 << 50)])
                )
        parts.append(f'"{key}": {value}')
        if draw.random() < 0.03:
            parts.append(f'"{key}": {draw.choice(NUMBERS)}')
    if draw.random() < 0.3:
        draw.shuffle(parts)
    return "{" + draw.choice([",", ", ", ",\n  "]).join(parts) + "}"


def make_arguments(draw: random.Random) -> str:
    entries = []
    for _ in range(draw.randrange(5)):
        value = draw.choice(NUMBERS)
        if draw.random() < 0.7:
            value = draw.choice(
                [str(draw.randrange(9)), json.dumps(draw.choice(NAMES)), "[0, 1]", '"[0, 1]"']
            )
        entries.append(f'"{draw.choice(KEYS)}": {value}')
    return "{" + ", ".join(entries) + "}"


def make_input(seed: int, number: int) -> bytes:
    """The bytes of one input."""
    draw = random.Random(f"{seed}/{number}")
    events = ",".join(make_event(draw) for _ in range(draw.randrange(7)))
    world = draw.choice(["2", "8", "-1", "1e99", '"x"', "null", "[]"])
    header = f'"distributedInfo": {{"rank": {draw.choice(NUMBERS)}, "world_size": {world}}}'
    text = draw.choice(
        [
            f'{{{header}, "traceEvents": [{events}]}}',
            f'{{"traceEvents": [{events}], {header}}}',
            f"[{events}]",
            f'{{"traceEvents": [{events}], "traceEvents": [{events}]}}',
        ]
    )
    return damage(draw, bytearray(text.encode("utf-8", "surrogatepass")))


def encode_wide(data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode("utf-16")


def damage(draw: random.Random, data: bytearray) -> bytes:
    for _ in range(draw.choice([0, 0, 1, 1, 2, 5])):
        place = draw.randrange(len(data) + 1)
        kind = draw.randrange(6)
        if kind == 0:
            del data[place:]
        elif kind == 1 and data:
            data[place % len(data)] = draw.randrange(256)
        elif kind == 2:
            data[place:place] = draw.choice(TOKENS)
        elif kind == 3:
            del data[place : place + draw.randrange(12)]
        elif kind == 4:
            data[place:place] = data[place : place + draw.randrange(60)]
        else:
            data[place:place] = draw.choice(NUMBERS).encode()
    if draw.random() < 0.04:
        pack = draw.choice([gzip.compress, bz2.compress, lzma.compress, encode_wide])
        packed = bytearray(pack(bytes(data)))
        if draw.random() < 0.7:
            packed = packed[: draw.randrange(len(packed) + 1)]
        elif packed:
            packed[draw.randrange(len(packed))] ^= 1 << draw.randrange(8)
        return bytes(packed)
    return bytes(data)


def scan(data: bytes, draw: random.Random, *, use_native: bool) -> str:
    """Feeds a scanner pieces; how it ended."""
    scanner = make_scanner(use_native=use_native)
    rest, place = b"", 0
    while place < len(data):
        size = draw.choice([1, 3, 17, 64, 4096])
        buffer = rest + data[place : place + size]
        done = scanner.feed(buffer)
        if not 0 <= done <= len(buffer):
            raise AssertionError(f"{done} of {len(buffer)} bytes")
        rest, place = buffer[done:], place + size
    batch, num_symbols = scanner.take(), len(scanner.symbols())
    if len(batch) and not (batch.name.max() < num_symbols and batch.name.min() >= -1):
        raise AssertionError("a name that is not there")
    scanner.fields()
    ended = scanner.state.name
    scanner.close()
    return ended


def take_whole_way(data: bytes, folder: Path) -> str:
    path = folder / "input.json"
    path.write_bytes(data)
    try:
        summary = summarize_trace(read_trace(path))
    except MeshscopeError:
        return "error"
    return "partial" if summary.warnings else "whole"


def run_batch(seed: int, first: int, count: int, native_only: bool, results) -> None:
    """In a child: every input of the batch; the number under way stands in a shared value."""
    counts, under_way = results
    ended: Counter[str] = Counter()
    has_native = load_library() is not None
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            under_way.value = number
            data = make_input(seed, number)
            draw = random.Random(number)
            if number % WHOLE_WAY == 0:
                ended[take_whole_way(data, Path(folder))] += 1
            elif has_native and (native_only or number % 4):
                ended[f"native {scan(data, draw, use_native=True)}"] += 1
            else:
                ended[f"python {scan(data, draw, use_native=False)}"] += 1
    counts.put(dict(ended))


def run(seed: int, inputs: int, native_only: bool) -> dict:
    ended: Counter[str] = Counter()
    failures: list[dict] = []
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    for first in range(0, inputs, BATCH):
        counts, under_way = context.SimpleQueue(), context.Value("q", first)
        count = min(BATCH, inputs - first)
        child = context.Process(
            target=run_batch, args=(seed, first, count, native_only, (counts, under_way))
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
        "failures": failures,
        "ended": dict(sorted(ended.items())),
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this input alone, here")
    parser.add_argument("--native-only", action="store_true")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    if options.only is not None:
        sys.stdout.buffer.write(make_input(options.seed, options.only) + b"\n")
        queue, value = multiprocessing.SimpleQueue(), multiprocessing.Value("q", 0)
        run_batch(options.seed, options.only, 1, options.native_only, (queue, value))
        print(queue.get())
        return
    found = run(options.seed, options.inputs, options.native_only)
    print(json.dumps(found, indent=1))
    if options.result:
        options.result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
