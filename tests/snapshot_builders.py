"""Snapshots in torch's structure: random ones that are consistent, and torch's C++ way to write."""

import random

from meshscope.ingest.snapshot.snapshot_columns import ACTIONS

TORCH = "/lib/site-packages/torch"
FRAMES = [
    {"name": name, "filename": filename, "line": line}
    for name, filename, line in (
        ("linear", f"{TORCH}/nn/functional.py", 5),
        ("forward", "/home/user/gpt.py", 10),
        ("forward", "/home/user/gpt.py", 20),
        ("_call_impl", f"{TORCH}/nn/modules/module.py", 1500),
        ("_apply", f"{TORCH}/nn/modules/module.py", 900),
        ("_engine_run_backward", f"{TORCH}/autograd/graph.py", 800),
        ("torch::autograd::Node::evaluate_function", "??", 0),
        ("_init_group", f"{TORCH}/optim/adam.py", 100),
        ("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 1),
        ("<module>", "/home/user/train.py", 3),
    )
]


def make_random_snapshot(seed, num_events=300, device=1):
    """A caching allocator at work; its first third of events is lost, as in a ring buffer.

    As torch 2.13 writes it: frames are the same objects everywhere, lists are not.
    """
    draw = random.Random(seed)
    slots = {}  # address: [size, requested, stack or None]
    segments, events, address = [], [], 0x7F0000000000
    while len(events) < num_events:
        stack = draw.choices(FRAMES, k=draw.randrange(1, 7))
        used = [one for one, slot in slots.items() if slot[2] is not None]
        if used and draw.random() < 0.45:
            place = draw.choice(used)
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, place, slots[place][0], stack, len(events)))
            slots[place][2] = None
            continue
        size = 512 << draw.randrange(12)
        free = [one for one, slot in slots.items() if slot[2] is None and slot[0] == size]
        if not free:
            count = draw.randrange(1, 4)
            segments.append((address, size, count))
            events.append(_event("segment_alloc", address, size * count, stack, len(events)))
            free = [address + size * number for number in range(count)]
            slots |= {one: [size, 0, None] for one in free}
            address += 2 << 20
        place = draw.choice(free)
        slots[place][1:] = [size - draw.randrange(512), stack]
        events.append(_event("alloc", place, size, stack, len(events)))
    return {
        "segments": [_segment(*segment, slots, device) for segment in segments],
        "device_traces": [[]] * device + [events[num_events // 3 :]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [
            {"stage": "START", "name": "step", "device": device, "time_us": 7},
        ],
    }


def _event(action, address, size, frames, number):
    assert action in ACTIONS
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000 + number,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": list(frames),
    }


def _segment(address, size, count, slots, device):
    blocks = []
    for number in range(count):
        _, requested, stack = slots[address + number * size]
        blocks.append(
            {
                "address": address + number * size,
                "size": size,
                "requested_size": requested if stack is not None else 0,
                "state": "inactive" if stack is None else "active_allocated",
                "frames": list(stack or ()),
            }
        )
    in_use = sum(size for block in blocks if block["frames"])
    return {
        "device": device,
        "address": address,
        "total_size": size * count,
        "allocated_size": in_use,
        "active_size": in_use,
        "stream": 0,
        "segment_type": "large" if size > 4096 else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def write_as_torch_cpp(value):
    """Bytes as torch's C++ pickler writes them: protocol 2, lists at once, numbered when made."""
    out, numbers = bytearray(b"\x80\x02"), {}

    def write(one):
        if isinstance(one, str):
            data = one.encode()
            out.extend(b"X" + len(data).to_bytes(4, "little") + data)
        elif isinstance(one, bool) or one is None:
            out.extend({True: b"\x88", False: b"\x89", None: b"N"}[one])
        elif isinstance(one, int):
            out.extend(b"\x8a\x08" + one.to_bytes(8, "little", signed=True))
        elif isinstance(one, tuple):
            for part in one:
                write(part)
            out.extend(b"\x86")
        elif id(one) in numbers:
            out.extend(b"j" + numbers[id(one)].to_bytes(4, "little"))
        else:
            write_container(one)

    def write_container(one):
        is_dict = isinstance(one, dict)
        out.extend(b"}" if is_dict else b"]")
        parts = [part for item in one.items() for part in item] if is_dict else one
        if parts:
            out.extend(b"(")
            for part in parts:
                write(part)
            out.extend(b"u" if is_dict else b"e")
        numbers[id(one)] = len(numbers)
        out.extend(b"r" + numbers[id(one)].to_bytes(4, "little"))

    write(value)
    return bytes(out + b".")
