"""What a trace says, computed again from its JSON, slowly and without any code of meshscope.

    python tests/trace_oracle.py TRACE…

Reads the whole file with the standard library, takes times from their digits, and does everything
with sorted lists of integers. It shares definitions with docs/traces.md, nothing else.
"""

import bisect
import gzip
import itertools
import json
import re
import sys
from decimal import Decimal
from pathlib import Path

DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "concurrent_kernel"}
SENDS = re.compile(r"nccl|rccl|internode|intranode|oneccl|msccl|nvshmem", re.IGNORECASE)
LAYS_OUT = re.compile(r"layout")
COPIES = re.compile(r"^(?:memcpy|_*amd_rocclr_copy|memory_copy_)", re.IGNORECASE)
OPTIMIZER = re.compile(r"^Optimizer\.step#")
LOADING = re.compile(
    r"enumerate\(DataLoader\)"
    r"|^[# ]*(?:data|data[_ ]?load(?:ing|er)?|load[_ ]data|get[_ ]batch)[# ]*$",
    re.IGNORECASE,
)
ENGINE = "autograd::engine::evaluate_function"
STEP = re.compile(r"ProfilerStep#(\d+)$")
RANGES = {
    "forward": re.compile(r"\(F\)\s*$|(?:^|[^a-z])(?:forward|fwd|fprop)(?:[^a-z]|$)"),
    "backward": re.compile(r"\(B\)\s*$|(?:^|[^a-z])(?:backward|bwd|bprop)(?:[^a-z]|$)"),
    "weight gradient": re.compile(r"\(W\)\s*$"),
    "optimizer": re.compile(r"(?:^|[^a-z])(?:optimi[sz]er|optim|opt)[ _.-]?(?:step)?(?:[^a-z]|$)"),
}
LIBRARY = re.compile(
    r"::|^DistributedDataParallel|^FullySharded|^Optimizer\.|^enumerate|nccl:|^Torch"
)


def load(path):
    """All events of a file."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    found = json.loads(data, parse_float=Decimal)
    events = found.get("traceEvents", []) if isinstance(found, dict) else found
    return [one for one in events if isinstance(one, dict)]


def to_ns(value):
    return int(Decimal(value) * 1000)


def unite(spans):
    """Sorted spans that do not touch."""
    joined = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return [(begin, end) for begin, end in joined]


def subtract(spans, others):
    """What of united spans lies outside of other united ones."""
    left, place = [], 0
    for begin, end in spans:
        while place and others[place - 1][1] > begin:
            place -= 1
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at, index = begin, place
        while index < len(others) and others[index][0] < end:
            if others[index][0] > at:
                left.append((at, others[index][0]))
            at = max(at, others[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def cut(spans, begin, end):
    return [(max(a, begin), min(b, end)) for a, b in spans if min(b, end) > max(a, begin)]


def length(spans):
    return sum(end - begin for begin, end in spans)


class Oracle:
    """One trace with one busy device."""

    def __init__(self, path):
        self.events = load(path)
        self.work = []
        self.calls = {}
        self.host = []
        for one in self.events:
            if one.get("ph") != "X" or one.get("dur") is None or one.get("ts") is None:
                continue
            category = str(one.get("cat", "")).lower()
            begin = to_ns(one["ts"])
            span = (begin, begin + to_ns(one["dur"]))
            if span[1] < begin:
                continue  # no such event can have been
            arguments = one.get("args") if isinstance(one.get("args"), dict) else {}
            name = str(one.get("name", ""))
            if category in DEVICE_CATEGORIES:
                self.work.append(
                    (span, name, category, arguments, (one.get("pid"), one.get("tid")))
                )
            elif category in ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime"):
                number = arguments.get("correlation")
                if isinstance(number, int) and number > 0:
                    self.calls.setdefault(number, span[0])
            elif category in ("cpu_op", "user_annotation", "operator"):
                if category == "operator":  # profilers until 2021: ranges are operators, too
                    category = "user_annotation" if OPTIMIZER.match(name) else "cpu_op"
                self.host.append((span, name, category, one.get("tid"), arguments))
        self.device = self._busiest()
        own = [one for one in self.work if self._device_of(one) == self.device]
        self.compute = unite(s for s, *rest in own if self.kind(rest) == "compute")
        self.sent = [(s, rest) for s, *rest in own if self.kind(rest) == "communication"]
        self.copies = unite(s for s, *rest in own if self.kind(rest) == "copy")
        self.own = own

    @staticmethod
    def _device_of(one):
        device = one[3].get("device")
        return device if isinstance(device, int) else one[4][0]

    def _busiest(self):
        counts = {}
        for one in self.work:
            counts[self._device_of(one)] = counts.get(self._device_of(one), 0) + 1
        return max(sorted(counts, key=str), key=lambda d: counts[d]) if counts else None

    @staticmethod
    def kind(rest):
        name, category, arguments = rest[0], rest[1], rest[2]
        if "memcpy" in category or COPIES.match(name):
            return "copy"
        is_sent = "Collective name" in arguments or SENDS.search(name.split("(")[0])
        if "mem" not in category and is_sent and not LAYS_OUT.search(name.split("(")[0]):
            return "communication"
        return "compute"

    def breakdown(self):
        """ns of the busiest device."""
        if not self.own:
            return None
        sent = unite(span for span, _ in self.sent)
        exposed = subtract(sent, self.compute)
        copies = subtract(self.copies, unite(self.compute + sent))
        begin = min(one[0][0] for one in self.own)
        end = max(one[0][1] for one in self.own)
        busy = length(self.compute) + length(exposed) + length(copies)
        return {
            "compute": length(self.compute),
            "communication": length(sent),
            "exposed": length(exposed),
            "copies": length(copies),
            "idle": end - begin - busy,
            "total": end - begin,
            "kernels": sum("mem" not in one[2] and not COPIES.match(one[1]) for one in self.own),
        }

    def steps(self):
        """How they were found, and (begin, end) on the host: marked, or by ends of optimizers."""
        marked = {}
        for span, name, *_ in sorted(self.host, key=lambda one: one[0]):
            found = STEP.match(name)
            if found:
                marked.setdefault(int(found[1]), span)
        spans = sorted(marked.values())
        if spans:
            begins = [begin for begin, _ in spans[1:]] + [1 << 62]
            return "profiler", [(b, min(e, n)) for (b, e), n in zip(spans, begins, strict=True)]
        ends = sorted(
            s[1] for s, name, c, *_ in self.host if c == "user_annotation" and OPTIMIZER.match(name)
        )
        passes = sorted(
            s[0] for s, name, c, *_ in self.host if c == "cpu_op" and name.startswith(ENGINE)
        )
        if passes:
            place = [bisect.bisect_left(passes, end) for end in ends]
            ends = [e for i, e in enumerate(ends) if i + 1 == len(ends) or place[i] != place[i + 1]]
        if len(ends) < 2:
            return "none", []
        started = sorted(
            [s[0] for s, name, c, *_ in self.host if c == "cpu_op"] + list(self.calls.values())
        )
        ranges = [s[0] for s, _, c, *_ in self.host if c == "user_annotation"]
        ends = ends[self._turns(ends) - 1 :: self._turns(ends)]
        begins = [min(started[0], ends[0] - 1, *ranges), *ends[:-1]]
        spans = list(zip(begins, ends, strict=True))
        counts = [bisect.bisect_left(started, e) - bisect.bisect_left(started, b) for b, e in spans]
        middle = sorted(counts[1:])
        if len(counts) > 2 and counts[0] * 2 < middle[len(middle) // 2]:
            spans = spans[1:]
        return "optimizer", spans

    def _turns(self, ends):
        """After how many of the ends the same functions of autograd run again, always."""
        ran = [[] for _ in ends]
        for span, name, category, *_ in self.host:
            place = bisect.bisect_left(ends, span[0])
            if category == "cpu_op" and name.startswith(ENGINE) and place < len(ends):
                ran[place].append(name)
        ran = [sorted(one) for one in ran]
        for num in (2, 3, 4):
            rows = [ran[at : at + num] for at in range(0, len(ran), num)]
            different = {tuple(one) for one in rows[0]}
            if len(rows) > 1 and all(row == rows[0] for row in rows) and len(different) == num:
                return num
        return 1

    def launched_ns(self, arguments):
        number = arguments.get("correlation")
        return self.calls.get(number) if isinstance(number, int) else None

    def step_of(self, steps):
        """For each of the device's events its step; -1 for none. What runs on a stream ahead of the
        first whose call is known was launched before the trace: it is the first step's."""
        first = {}
        for span, _, _, arguments, track in self.own:
            if self.launched_ns(arguments) is not None:
                first[track] = min(first.get(track, 1 << 62), span[0])
        begins = [begin for begin, _ in steps]
        found = []
        has_calls = bool(first)
        for span, _, _, arguments, track in self.own:
            moment = self.launched_ns(arguments)
            if moment is None and has_calls and span[0] < first.get(track, -(1 << 62)):
                found.append(0)
                continue
            moment = span[0] if moment is None else moment
            place = bisect.bisect_right(begins, moment) - 1
            found.append(place if place >= 0 and moment < steps[place][1] else -1)
        return found

    def exposed_in_steps(self, steps):
        """ns of communication of steps with no compute of the device beside it."""
        picked = [
            one[0]
            for one, step in zip(self.own, self.step_of(steps), strict=True)
            if step >= 0 and self.kind(one[1:]) == "communication"
        ]
        return length(subtract(unite(picked), self.compute))

    def phases(self, steps):
        """ns of the host by phase, in steps."""
        annotated = [
            one for one in self.host if one[2] == "user_annotation" and not LIBRARY.search(one[1])
        ]
        said = {phase: [] for phase in RANGES}
        for thread in {one[3] for one in annotated}:
            until = -1
            own = sorted(
                (o for o in annotated if o[3] == thread), key=lambda o: (o[0][0], -o[0][1])
            )
            for span, name, *_ in own:
                phase = next(
                    (p for p, r in RANGES.items() if r.search(name) or r.search(name.lower())), None
                )
                if phase and "zero" not in name.lower() and span[0] >= until:
                    said[phase].append(span)
                    until = span[1]
        data = unite(s for s, name, *_ in self.host if LOADING.search(name))
        weights = subtract(unite(said["weight gradient"]), data)
        before = unite(data + weights)
        backward = unite(said["backward"]) or self._passes()
        backward = subtract(backward, before)
        before = unite(before + backward)
        optimizer = [s for s, name, *_ in self.host if OPTIMIZER.match(name)]
        optimizer = unite(optimizer + said["optimizer"])
        optimizer = subtract(optimizer, before)
        forward = subtract(unite(said["forward"]), unite(before + optimizer))
        found = {
            "data": 0,
            "weight gradient": 0,
            "backward": 0,
            "optimizer": 0,
            "forward": 0,
            "rest": 0,
        }
        for begin, end in steps:
            taken = []
            for phase, spans in (
                ("data", data), ("weight gradient", weights), ("backward", backward),
                ("optimizer", optimizer), ("forward", forward),
            ):  # fmt: skip
                inside = cut(spans, begin, end)
                found[phase] += length(inside)
                taken += inside
            rest = subtract([(begin, end)], unite(taken))
            starts = sorted(
                [(a, "b") for a, _ in cut(backward, begin, end)]
                + [(a, "o") for a, _ in cut(optimizer, begin, end)]
            )
            for since, until in rest:
                after = next((kind for at, kind in starts if at >= since), "")
                is_forward = after == "b" and not forward
                found["forward" if is_forward else "rest"] += until - since
        if not backward and not optimizer and not forward:
            found["compute"] = found.pop("rest")
        return {phase: ns for phase, ns in found.items() if ns}

    def _passes(self):
        """Functions of autograd's engine, joined where the training thread ran nothing between."""
        engine = [one for one in self.host if one[2] == "cpu_op" and one[1].startswith(ENGINE)]
        spans = unite(one[0] for one in engine)
        if len(spans) < 2:
            return spans
        others = [one for one in self.host if one[2] == "cpu_op" and not one[1].startswith(ENGINE)]
        threads = {one[3] for one in engine}
        outside = [one for one in others if one[3] not in threads] or others
        counts = {}
        for one in outside:
            counts[one[3]] = counts.get(one[3], 0) + 1
        thread = max(counts, key=lambda t: counts[t]) if counts else None
        begins = [begin for begin, _ in spans]
        own = []
        for span, _, _, tid, _ in others + engine:
            place = bisect.bisect_right(begins, span[0]) - 1
            is_inside = place >= 0 and span[0] < spans[place][1]
            if tid == thread and not is_inside:
                own.append(span[0])
        own.sort()
        joined = [list(spans[0])]
        for before, after in itertools.pairwise(spans):
            if bisect.bisect_left(own, before[0]) == bisect.bisect_left(own, after[0]):
                joined[-1][1] = after[1]
            else:
                joined.append(list(after))
        return [tuple(one) for one in joined]


def answer(path):
    """Everything at once, in ns."""
    oracle = Oracle(path)
    source, steps = oracle.steps()
    found = {"device": oracle.breakdown(), "step_source": source, "num_steps": len(steps)}
    if steps:
        found["steps_ns"] = [end - begin for begin, end in steps]
        found["phases"] = oracle.phases(steps)
        if oracle.own:
            found["exposed_in_steps"] = oracle.exposed_in_steps(steps)
    return found


if __name__ == "__main__":
    for one in sys.argv[1:]:
        print(json.dumps({one: answer(one)}, default=int))
