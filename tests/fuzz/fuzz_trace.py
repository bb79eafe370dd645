"""Feeds damaged traces to the reader, by the million: an error it states, or a partial result.

    python tests/fuzz/fuzz_trace.py --inputs 1000000 --seed 1 [--result FILE]

Inputs are small traces: cut, spliced, with wrong types, negative and huge numbers, twice the
same key, deep nesting, hostile names, or packed by gzip, bzip2 or xz and cut then, or in UTF-16.
Most go to both scanners, in pieces of any size. These have to find the same, on damaged text in
what is before the damage; two kinds of input are known on which they do not, and are counted.
The others take the whole way from a file to the summary.
Each input comes from its number and the seed alone, so that a failure can be had again: `--only N`.
A child process runs them, so that a crash of compiled code is seen; one that takes more CPU time
than TIMEOUT_S is a hang, whatever else the machine does.

With a scanner compiled with -fsanitize=address this looks for reads outside of buffers too (see
CONTRIBUTING.md). A child's memory must not grow: one that ends with more than MAX_GROWTH_MB above
its first hundred inputs is a failure. `--result FILE` is written after every batch, and a run that
was cut goes on from it, if the scanners are still the same.
"""

import argparse
import bz2
import gzip
import hashlib
import json
import lzma
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from meshscope.analyze.device.trace_summary import summarize_trace
from meshscope.errors import MeshscopeError
from meshscope.ingest.kineto import python_scanner
from meshscope.ingest.kineto.kineto import make_scanner, read_trace
from meshscope.ingest.kineto.native_scanner import NativeScanner
from meshscope.ingest.kineto.python_scanner import PythonScanner
from meshscope.ingest.kineto.scan import MISSING, TEXT_IDENTITY, ValueType
from meshscope.ingest.native import load_library

TIMEOUT_S = 120
MAX_GROWTH_MB = 32
PIECES = ((1, 3, 17, 64, 4096), (64, 4096), (4096,), (300, 4096), (1 << 20,))
"""Sizes of the pieces of an input, one of which is drawn for each piece."""
BATCH = 2_000
WHOLE_WAY = 100
"""One input in so many takes the whole way."""

ESCAPED_KEY = re.compile(rb'\\[^"]*"\s*:')

JSON_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"(\s*:)?|[{}]', re.DOTALL)

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
    # The compiled scanner remembers what stands between values: some events are there again.
    made = [make_event(draw) for _ in range(draw.randrange(7))]
    events = ",".join(made * draw.choice([1, 1, 1, 2, 3]))
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


pack_xz = partial(lzma.compress, preset=0)  # the usual one takes 90 MB to pack a kilobyte


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
        pack = draw.choice([gzip.compress, bz2.compress, pack_xz, encode_wide])
        packed = bytearray(pack(bytes(data)))
        if draw.random() < 0.7:
            packed = packed[: draw.randrange(len(packed) + 1)]
        elif packed:
            packed[draw.randrange(len(packed))] ^= 1 << draw.randrange(8)
        return bytes(packed)
    return bytes(data)


def scan(scanner, data: bytes, draw: random.Random) -> str:
    """Feeds a scanner pieces; how it ended."""
    rest, place = b"", 0
    sizes = draw.choice(PIECES)
    while place < len(data):
        size = draw.choice(sizes)
        buffer = rest + data[place : place + size]
        done = scanner.feed(buffer)
        if not 0 <= done <= len(buffer):
            raise AssertionError(f"{done} of {len(buffer)} bytes")
        rest, place = buffer[done:], place + size
    return scanner.state.name


def list_events(scanner) -> list[tuple]:
    """The events of a scanner that gives all in batches, with texts for their numbers."""
    batch, symbols = scanner.take(), [*scanner.symbols(), None]

    def identify(value: int) -> object:
        is_text = MISSING < value < TEXT_IDENTITY + len(symbols) - 1
        return symbols[value - TEXT_IDENTITY] if is_text else value

    arguments: dict[int, list[tuple]] = {}
    for event, key, kind, value in zip(
        batch.argument_event.tolist(),
        batch.argument_key.tolist(),
        batch.argument_type.tolist(),
        batch.argument_value.tolist(),
        strict=True,
    ):
        found = value if kind in (ValueType.INT, ValueType.FLOAT) else symbols[value]
        arguments.setdefault(event, []).append((key, kind, found))
    return [
        (phase, symbols[category], symbols[name], identify(pid), identify(tid), ts, dur, said)
        for phase, category, name, pid, tid, ts, dur, said in zip(
            batch.phase.tolist(),
            batch.category.tolist(),
            batch.name.tolist(),
            batch.pid.tolist(),
            batch.tid.tolist(),
            batch.ts_ns.tolist(),
            batch.dur_ns.tolist(),
            [arguments.get(row, []) for row in range(len(batch))],
            strict=True,
        )
    ]


def scan_alone(data: bytes, draw: random.Random) -> str:
    """The compiled scanner as it is used: columns, batches and fields have to fit together."""
    scanner = make_scanner(use_native=True)
    ended = scan(scanner, data, draw)
    batch, num_symbols = scanner.take(), len(scanner.symbols())
    scanner.fields()
    columns = scanner.columns()
    events, arguments = columns.events, columns.arguments
    for names in (batch.name, events.name):
        if len(names) and not (names.max() < num_symbols and names.min() >= -1):
            raise AssertionError("a name that is not there")
    if len(arguments) and not 0 <= arguments.event.min() <= arguments.event.max() < len(events):
        raise AssertionError("an argument of no event")
    ordered = scanner.put_in_order()
    events, arguments = ordered.events, ordered.arguments
    if (np.diff(events.begin_ns) < 0).any() or (np.diff(arguments.event) < 0).any():
        raise AssertionError("not in order")
    return ended


def has_phase_twice(data: bytes) -> bool:
    """Whether an object says its phase twice, whatever its keys and arguments hold."""
    counts = [0]
    for token in JSON_TOKENS.finditer(data):
        if token[0] == b"{":
            counts.append(0)
        elif token[0] == b"}":
            counts = counts[:-1] or [0]
        elif token[1] is not None and token[0].startswith(b'"ph"'):
            counts[-1] += 1
            if counts[-1] > 1:
                return True
    return False


def scan_both(data: bytes, draw: random.Random) -> str:
    """Both scanners, which have to find the same: on damaged text, in what is before the damage."""
    if (ended := agree(data, draw)) is not None:
        return f"both {ended}"
    damage = find_damage(data)
    if damage is not None and agree(data[:damage], draw) is not None:
        return "both, up to the damage"
    if ESCAPED_KEY.search(data):
        return "apart: a key with an escape, which the compiled one does not read"
    if has_phase_twice(data):
        return "apart: two phases of one event; the compiled one is done with the first"
    raise AssertionError("the scanners do not agree")


def agree(data: bytes, draw: random.Random) -> str | None:
    """How both ended; None where they found different things."""
    state = draw.getstate()
    native, python = NativeScanner(load_library(), is_raw=True), PythonScanner()
    ended = scan(native, data, draw)
    draw.setstate(state)
    is_same = (
        scan(python, data, draw) == ended
        and list_events(native) == list_events(python)
        and native.fields() == python.fields()
    )
    return ended if is_same else None


def find_damage(data: bytes) -> int | None:
    """Where it stops being JSON; None where it does not."""
    try:
        json.loads(data.removeprefix(b"\xef\xbb\xbf").decode("latin-1"), strict=False)
    except json.JSONDecodeError as error:
        return error.pos
    except RecursionError:
        return 0
    return None


def take_whole_way(data: bytes, folder: Path) -> str:
    path = folder / "input.json"
    path.write_bytes(data)
    try:
        summary = summarize_trace(read_trace(path))
    except MeshscopeError:
        return "error"
    return "partial" if summary.warnings else "whole"


def run_batch(seed: int, first: int, count: int, results) -> None:
    """In a child: every input of the batch; the number under way stands in a shared value."""
    counts, under_way = results
    resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S))
    ended: Counter[str] = Counter()
    has_native = load_library() is not None
    warm_mb = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            under_way.value = number
            data = make_input(seed, number)
            draw = random.Random(number)
            if number % WHOLE_WAY == 0:
                ended[f"whole way: {take_whole_way(data, Path(folder))}"] += 1
            elif has_native:
                scan_alone(data, draw)
                ended[scan_both(data, draw)] += 1
            else:
                ended[f"python {scan(PythonScanner(), data, draw)}"] += 1
            if number == first + 100:
                warm_mb = measure_memory_mb()
    if warm_mb and measure_memory_mb() - warm_mb > MAX_GROWTH_MB:
        raise AssertionError(f"{measure_memory_mb() - warm_mb} MB more than at the beginning")
    counts.put(dict(ended))


def measure_memory_mb() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") >> 20


def hash_scanners() -> str:
    """Of the sources of both."""
    folder = Path(python_scanner.__file__).parent
    sources = (folder.with_name("scanner.c"), folder / "python_scanner.py")
    return hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:16]


def run(seed: int, inputs: int, result: Path | None = None, limit_s: float = 1e9) -> dict:
    """All inputs, or as many as can be begun in `limit_s`; those of an earlier, cut run of the same
    seed with the same scanners are not run again."""
    stop = time.monotonic() + limit_s
    scanners = hash_scanners()
    found = {"seed": seed, "scanners": scanners, "inputs": 0, "failures": [], "ended": {}}
    found["seconds"] = 0.0
    if result is not None and result.exists():
        before = json.loads(result.read_text(encoding="utf-8"))
        is_same = before["seed"] == seed and before.get("scanners") == scanners
        found = before if is_same else found
    context = multiprocessing.get_context("fork")
    while found["inputs"] < inputs and time.monotonic() < stop:
        first, begin = found["inputs"], time.monotonic()
        counts, under_way = context.SimpleQueue(), context.Value("q", first)
        count = min(BATCH, inputs - first)
        child = context.Process(target=run_batch, args=(seed, first, count, (counts, under_way)))
        child.start()
        child.join()
        if child.exitcode:
            found["failures"].append({"number": under_way.value, "exit": child.exitcode})
        if not counts.empty():
            found["ended"] = dict(sorted((Counter(found["ended"]) + Counter(counts.get())).items()))
        found["inputs"] += count
        found["seconds"] = round(found["seconds"] + time.monotonic() - begin, 1)
        if result is not None:
            result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this input alone, here")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="then stop; --result goes on")
    options = parser.parse_args()
    if options.only is not None:
        sys.stdout.buffer.write(make_input(options.seed, options.only) + b"\n")
        queue, value = multiprocessing.SimpleQueue(), multiprocessing.Value("q", 0)
        run_batch(options.seed, options.only, 1, (queue, value))
        print(queue.get())
        return
    found = run(options.seed, options.inputs, options.result, options.seconds)
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
