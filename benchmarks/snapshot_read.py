"""Reads a memory snapshot beyond 1 GB, and holds it against pickle.load with torch's own tools.

    python benchmarks/snapshot_read.py [--events 10000000] [--compared-events 5000000]
                                       [--output benchmarks/results/snapshot_read.json]

The file is synthetic: a training loop over a caching allocator with segments of equal blocks, the
last events of a ring buffer, stacks of 24 to 60 frames, written instruction by instruction as
torch 2.13's `_dump_snapshot` writes it (pickle protocol 4, every frame once, a list per event).
Each reader runs alone in its process; CPU time is user and system time of reading and of analysing,
memory the growth of the peak resident size over that after its imports.

Answers are compared with the simulation and between the readers: reserved, allocated and free
bytes, events by kind, the peak, and bytes by stack at the end. Torch's side is pickle.load with its
own `segsum` and `memory`; the peak, which torch only draws, comes from a replay of the dicts.
"""

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import numpy as np

from meshscope.analyze.memory.snapshot_peak import ALLOC, FREE
from meshscope.analyze.memory.snapshot_summary import summarize_snapshot
from meshscope.ingest.snapshot.snapshot import read_snapshot
from meshscope.ingest.snapshot.snapshot_columns import ACTIONS

MIB = 1 << 20
NUM_LAYERS = 48
FRAME_BYTES = 1 << 16
FIRST_TIME_US = 1_700_000_000_000_000
TORCH = "/usr/lib/python3/site-packages/torch"
ACTIVATIONS, GRADIENTS, STATE, PARAMETERS = range(4)
OPERATIONS = (
    (ACTIVATIONS, "linear", 16),
    (ACTIVATIONS, "gelu", 16),
    (ACTIVATIONS, "layer_norm", 4),
    (ACTIVATIONS, "scaled_dot_product_attention", 8),
)


# --- the workload ----------------------------------------------------------------------------


class Allocator:
    """Blocks of one size share segments; freed blocks are taken again, the last first."""

    def __init__(self):
        self.slot_address, self.slot_bytes, self.slot_site = array("q"), array("q"), array("i")
        self.slot_requested = array("q")
        self.segments = []
        """First slot, number of slots."""
        self.free_slots = {}
        self.next_address = 0x7F00_0000_0000
        self.event_action, self.event_slot, self.event_site = array("b"), array("i"), array("i")

    def allocate(self, requested, site):
        size = (requested + 511) // 512 * 512
        free = self.free_slots.setdefault(size, [])
        if not free:
            count = max(1, 20 * MIB // size)
            first = len(self.slot_address)
            self.segments.append((first, count))
            for number in range(count):
                self.slot_address.append(self.next_address + number * size)
                self.slot_bytes.append(size)
                self.slot_site.append(-1)
                self.slot_requested.append(0)
            self.next_address += (count * size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.record("segment_alloc", first, site)
            free.extend(range(first + count - 1, first - 1, -1))
        slot = free.pop()
        self.slot_site[slot], self.slot_requested[slot] = site, requested
        self.record("alloc", slot, site)
        return slot

    def free(self, slot, site):
        self.record("free_requested", slot, site)
        self.record("free_completed", slot, site)
        self.slot_site[slot] = -1
        self.free_slots[self.slot_bytes[slot]].append(slot)

    def record(self, action, slot, site):
        self.event_action.append(ACTIONS.index(action))
        self.event_slot.append(slot)
        self.event_site.append(site)


def simulate(num_events):
    """A training loop until so many events are there."""
    allocator, num_operations = Allocator(), len(OPERATIONS)
    num_forward = NUM_LAYERS * num_operations
    for layer in range(NUM_LAYERS):
        for operation in range(num_operations):
            site = PARAMETERS * num_forward + layer * num_operations + operation
            allocator.allocate(4 * MIB + 100 * operation, site)
    state_slots = []
    while len(allocator.event_action) < num_events:
        held = []
        for place in range(num_forward):
            _, _, size = OPERATIONS[place % num_operations]
            temporary = allocator.allocate(size * MIB // 2, place)
            held.append(allocator.allocate(size * MIB - 300, place))
            allocator.free(temporary, place)
        for place in reversed(range(num_forward)):
            site = num_forward + place
            gradient = allocator.allocate(4 * MIB, site)
            allocator.free(held.pop(), site)
            allocator.free(gradient, site)
        if not state_slots:
            state_slots = [
                allocator.allocate(8 * MIB, STATE * num_forward + place)
                for place in range(num_forward)
            ]
    return allocator


def make_stack(site):
    """Frames of a site, innermost first, as (name, file, line)."""
    num_forward = NUM_LAYERS * len(OPERATIONS)
    kind, place = divmod(site, num_forward)
    layer, operation = divmod(place, len(OPERATIONS))
    name = OPERATIONS[operation][1]
    modules = f"{TORCH}/nn/modules/module.py"
    calls = [("_call_impl", modules, 1750), ("_wrapped_call_impl", modules, 1739)]
    model = [("forward", "/home/user/model/gpt.py", 100 + 7 * layer + operation)]
    loop = [(f"call_{n}", "/home/user/train/loop.py", 10 + n) for n in range(12 + layer // 2)]
    if kind == ACTIVATIONS:
        return [
            (name, f"{TORCH}/nn/functional.py", 2000 + operation),
            *calls,
            *model,
            *calls * 3,
            *loop,
        ]
    if kind == GRADIENTS:
        engine = ("_engine_run_backward", f"{TORCH}/autograd/graph.py", 824)
        names = [(f"{name}_backward", "??", 0), (f"torch::autograd::node_{place}", "??", 0)]
        return [*names, *(("c10::call", "??", n) for n in range(8)), engine, *loop]
    if kind == STATE:
        return [("_init_group", f"{TORCH}/optim/adam.py", 100 + operation), *loop]
    return [("_apply", modules, 900 + operation), *loop]


# --- the file ----------------------------------------------------------------------------------


class PickleWriter:
    """Writes pickle protocol 4 as `pickle.dump` does, without making the objects first."""

    def __init__(self, file):
        self.file, self.buffer = file, bytearray()
        self.num_remembered, self.texts = 0, {}
        file.write(b"\x80\x04")

    def put(self, *parts):
        for part in parts:
            self.buffer += part
        if len(self.buffer) >= FRAME_BYTES:
            self.flush()

    def flush(self):
        if self.buffer:
            self.file.write(b"\x95" + len(self.buffer).to_bytes(8, "little") + self.buffer)
            self.buffer.clear()

    def remember(self):
        """The instruction that gives the last value a number, which is the next one."""
        self.num_remembered += 1
        return b"\x94"

    def text(self, text):
        if text in self.texts:
            return refer(self.texts[text])
        data = text.encode()
        head = (
            b"\x8c" + bytes([len(data)])
            if len(data) < 256
            else b"X" + len(data).to_bytes(4, "little")
        )
        self.texts[text] = self.num_remembered
        return head + data + self.remember()


def refer(number):
    return b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")


def integer(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def write_snapshot(path, num_events):
    """Writes the last events, as a ring buffer keeps them; what a reader must find."""
    allocator = simulate(num_events + num_events // 50)
    first = len(allocator.event_action) - num_events
    with open(path, "wb") as file:
        out = PickleWriter(file)
        out.put(b"}", out.remember(), b"(", out.text("segments"), b"]", out.remember(), b"(")
        frames = FrameWriter(out)
        for number, (slot, count) in enumerate(allocator.segments):
            if number and number % 1000 == 0:
                out.put(b"e(")
            write_segment(out, frames, allocator, slot, count)
        out.put(b"e", out.text("device_traces"), b"]", out.remember(), b"(")
        out.put(b"]", out.remember())  # device 0 has no events
        out.put(b"]", out.remember(), b"(")
        write_events(out, frames, allocator, first)
        out.put(b"ee", out.text("allocator_settings"), b"}", out.remember(), b"(")
        out.put(out.text("PYTORCH_CUDA_ALLOC_CONF"), out.text(""), out.text("max_split_size"))
        out.put(integer(-1), out.text("expandable_segments"), b"\x89u")
        out.put(out.text("external_annotations"), b"]", out.remember(), b"u.")
        out.flush()
    return expect(allocator, first)


def expect(allocator, first):
    """From the workload itself, with all its events, also those that were not written."""
    action = np.frombuffer(allocator.event_action, dtype=np.int8)
    size = np.frombuffer(allocator.slot_bytes, dtype=np.int64)[
        np.frombuffer(allocator.event_slot, np.int32)
    ]
    allocated = np.cumsum(np.where(action == ALLOC, size, 0) - np.where(action == FREE, size, 0))
    counts = np.bincount(action[first:], minlength=len(ACTIONS)).tolist()
    used = np.frombuffer(allocator.slot_site, dtype=np.int32) >= 0
    reserved = sum(allocator.slot_bytes)
    asked = int(np.frombuffer(allocator.slot_requested, dtype=np.int64)[used].sum())
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": asked,
        "free_bytes": reserved - asked,
        "events": {name: count for name, count in zip(ACTIONS, counts, strict=True) if count},
        "peak_bytes": int(allocated[max(first - 1, 0) :].max()),
        "unexplained_bytes": 0,
    }


class FrameWriter:
    """Lists of frames; a frame that was written is referred to."""

    def __init__(self, out):
        self.out, self.frames, self.lists = out, {}, {}

    def list_of(self, site):
        """Of a site; the first time with what was not written before."""
        out = self.out
        known = self.lists.get(site)
        if known is not None:
            out.num_remembered += 1
            return known
        parts = [b"]", out.remember(), b"("]
        for name, file, line in make_stack(site):
            number = self.frames.get((name, file, line))
            if number is not None:
                parts.append(refer(number))
                continue
            self.frames[name, file, line] = out.num_remembered
            parts += [b"}", out.remember(), b"(", out.text("name"), out.text(name)]
            parts += [out.text("filename"), out.text(file), out.text("line"), integer(line), b"u"]
        references = b"".join(refer(self.frames[frame]) for frame in make_stack(site))
        self.lists[site] = b"]\x94(" + references + b"e"
        return b"".join([*parts, b"e"])


def write_segment(out, frames, allocator, first, count):
    size = allocator.slot_bytes[first]
    used = [slot for slot in range(first, first + count) if allocator.slot_site[slot] >= 0]
    asked = sum(allocator.slot_requested[slot] for slot in used)
    out.put(b"}", out.remember(), b"(", out.text("device"), integer(1))
    out.put(out.text("address"), integer(allocator.slot_address[first]))
    out.put(out.text("total_size"), integer(count * size))
    out.put(out.text("allocated_size"), integer(len(used) * size))
    out.put(out.text("active_size"), integer(len(used) * size))
    out.put(out.text("requested_size"), integer(asked), out.text("stream"), integer(0))
    out.put(out.text("segment_type"), out.text("large"))
    out.put(out.text("segment_pool_id"), b"K\x00K\x00\x86", out.remember())
    out.put(out.text("is_expandable"), b"\x89", out.text("frames"), b"]", out.remember())
    out.put(out.text("blocks"), b"]", out.remember(), b"(")
    for slot in range(first, first + count):
        site = allocator.slot_site[slot]
        state = "active_allocated" if site >= 0 else "inactive"
        requested = allocator.slot_requested[slot] if site >= 0 else 0
        out.put(b"}", out.remember(), b"(", out.text("address"))
        out.put(integer(allocator.slot_address[slot]), out.text("size"), integer(size))
        out.put(out.text("requested_size"), integer(requested))
        out.put(out.text("state"), out.text(state), out.text("frames"))
        if site >= 0:
            out.put(frames.list_of(site), b"u")
        else:
            out.put(b"]", out.remember(), b"u")
    out.put(b"eu")


def write_events(out, frames, allocator, first):
    """The hot part: what does not change is put together once."""
    addresses = [integer(address) for address in allocator.slot_address]
    sizes = [integer(size) for size in allocator.slot_bytes]
    heads = {}
    keys = None
    num_events = len(allocator.event_action)
    for number in range(first, num_events):
        if number > first and (number - first) % 1000 == 0:
            out.put(b"e(")
        action, slot = allocator.event_action[number], allocator.event_slot[number]
        begin = b"}" + out.remember() + b"("
        if action in heads and keys:
            head = heads[action]
        else:
            head = out.text("action") + out.text(ACTIONS[action]) + out.text("addr")
            heads[action] = refer(out.texts["action"]) + refer(out.texts[ACTIONS[action]])
            heads[action] += refer(out.texts["addr"])
        if keys is None:
            middle = [out.text("size"), out.text("stream") + integer(0) + out.text("time_us")]
            ending = out.text("compile_context") + out.text("N/A") + out.text("user_metadata")
            ending += out.text("") + out.text("pool_id") + b"K\x00K\x00\x86" + out.remember()
            middle.append(ending + out.text("frames"))
            keys = [
                refer(out.texts["size"]),
                refer(out.texts["stream"]) + integer(0) + refer(out.texts["time_us"]),
                b"".join(
                    refer(out.texts[text])
                    for text in ("compile_context", "N/A", "user_metadata", "", "pool_id")
                )
                + b"K\x00K\x00\x86\x94"
                + refer(out.texts["frames"]),
            ]
        else:
            middle = keys
            out.num_remembered += 1
        moment = integer(FIRST_TIME_US + 7 * number)
        listed = frames.list_of(allocator.event_site[number])
        out.put(
            begin, head, addresses[slot], middle[0], sizes[slot], middle[1], moment, middle[2],
            listed, b"u",
        )  # fmt: skip


# --- the readers: each in a process of its own ------------------------------------------------


def find_peak_bytes():
    """The most that was resident. Not ru_maxrss, which a process inherits from its parent."""
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("the kernel does not say how much was resident")


def measure(name, path):
    """Runs one reader here; what it found and used."""
    if name == "torch":
        import torch.cuda._memory_viz  # noqa: F401  not a part of reading
    base_bytes = find_peak_bytes()
    begin = time.process_time()
    value = READERS[name][0](path)
    read_s = time.process_time() - begin
    read_bytes = find_peak_bytes() - base_bytes
    begin = time.process_time()
    found = READERS[name][1](value)
    analyse_s = time.process_time() - begin
    peak_bytes = find_peak_bytes() - base_bytes
    size = path.stat().st_size
    return {
        "read_cpu_s": round(read_s, 2),
        "analyse_cpu_s": round(analyse_s, 2),
        "read_bytes_per_byte": round(read_bytes / size, 3),
        "bytes_per_byte": round(peak_bytes / size, 3),
        "peak_bytes": peak_bytes,
        "found": found,
    }


def answer_ours(snapshot):
    [device] = summarize_snapshot(snapshot).devices
    part = device.fragmentation
    counts = {name: int((snapshot.event_action == i).sum()) for i, name in enumerate(ACTIONS)}
    return {
        "reserved_bytes": part.reserved_bytes,
        "allocated_bytes": part.in_use_bytes - part.rounding_bytes,
        "free_bytes": part.free_bytes + part.rounding_bytes,
        "active_by_stack": sum_live(snapshot),
        "events": {name: count for name, count in counts.items() if count},
        "peak_bytes": device.peak_bytes,
        "unexplained_bytes": device.unexplained_bytes,
    }


def sum_live(snapshot):
    """Requested bytes by stack at the end, the names joined."""
    sums = {}
    for row in (snapshot.block_state == 0).nonzero()[0].tolist():
        names = ";".join(
            frame.name for frame in reversed(snapshot.stack(int(snapshot.block_stack[row])))
        )
        sums[names] = sums.get(names, 0) + int(snapshot.block_requested_bytes[row])
    return dict(sorted(sums.items()))


def load_pickle(path):
    with open(path, "rb") as file:
        return pickle.load(file)


def answer_torch(data):
    """From torch's own functions; the peak, which they only draw, from a replay of the dicts."""
    from torch.cuda import _memory_viz

    _memory_viz.segsum(data)  # checks that its sums agree, and gives them as text
    active = {}
    text = _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
    for line in text.splitlines():
        path, _, size = line.rpartition(" ")
        _, state, *names = path.split(";")
        if state == "active_allocated" and names != ["<gaps>"]:
            key = ";".join(name.split(":", 2)[2] for name in names)
            active[key] = active.get(key, 0) + int(size)
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    allocated = sum(active.values())
    reserved = sum(segment["total_size"] for segment in data["segments"])
    events = {}
    current, highest = 0, 0
    for trace in data["device_traces"]:
        for event in trace:
            action = event["action"]
            events[action] = events.get(action, 0) + 1
            if action == ACTIONS[ALLOC]:
                current += event["size"]
            elif action == ACTIONS[FREE]:
                current -= event["size"]
            highest = max(highest, current)
    final = sum(block["size"] for block in blocks if block["state"] != "inactive")
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "free_bytes": reserved - allocated,
        "active_by_stack": dict(sorted(active.items())),
        "events": {name: events[name] for name in ACTIONS if name in events},
        "peak_bytes": final - current + highest,
        "unexplained_bytes": 0,
    }


READERS = {
    "compiled": (lambda path: read_snapshot(path, use_native=True), answer_ours),
    "python": (lambda path: read_snapshot(path, use_native=False), answer_ours),
    "torch": (load_pickle, answer_torch),
}


def run_reader(name, path):
    command = [sys.executable, __file__, "--reader", name, "--file", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def compare(folder, num_events, names):
    path = folder / "snapshot.pickle"
    expected = write_snapshot(path, num_events)
    size = path.stat().st_size
    found = {name: run_reader(name, path) for name in names}
    answers = [one.pop("found") for one in found.values()]
    by_stack = [answer.pop("active_by_stack") for answer in answers]
    for one in found.values():
        cpu_s = one["read_cpu_s"] + one["analyse_cpu_s"]
        one["megabytes_per_cpu_s"] = round(size / 1e6 / cpu_s, 1)
    path.unlink()
    return {
        "file_bytes": size,
        "events": num_events,
        "answers_as_simulated": all(answer == expected for answer in answers),
        "stacks_agree": all(one == by_stack[0] for one in by_stack[1:]) if by_stack[1:] else None,
        "expected": expected,
        "readers": found,
    }


def add_ratios(result):
    ours, theirs = result["readers"]["compiled"], result["readers"]["torch"]
    cpu = [one["read_cpu_s"] + one["analyse_cpu_s"] for one in (ours, theirs)]
    result["cpu_ratio_whole"] = round(cpu[1] / cpu[0], 1)
    result["cpu_ratio_read"] = round(theirs["read_cpu_s"] / ours["read_cpu_s"], 1)
    result["memory_ratio"] = round(theirs["peak_bytes"] / ours["peak_bytes"], 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--compared-events", type=int, default=5_000_000)
    parser.add_argument("--python-events", type=int, default=400_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    if options.reader:
        print(json.dumps(measure(options.reader, options.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        document = {
            "python": compare(Path(folder), options.python_events, list(READERS)),
            "compared": compare(Path(folder), options.compared_events, ["compiled", "torch"]),
            "large": compare(Path(folder), options.events, ["compiled"]),
        }
    add_ratios(document["python"])
    add_ratios(document["compared"])
    text = json.dumps(document, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    parts = document.values()
    is_right = all(
        one["answers_as_simulated"] and one["stacks_agree"] is not False for one in parts
    )
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
