"""Real traces of a healthy DDP job as they would be if one rank were slower in every step.

    slow_down(source, target, slow_rank=2, cause="host", delay_ns=40 * MS)

A stand-in until such a job is traced: times are moved, nothing is invented but the extra kernels.
The slow rank reaches its backward `delay_ns` later than it did: on its device, which ran extra
kernels before, or on its host, which did nothing before it launched backward. The others begin
their first all-reduce when they did; it ends later by the delay, and so does all that follows it,
but for kernels of their backward, which do not wait for it.
"""

import gzip
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_CALLS = ("cuda_runtime", "cuda_driver")
NUM_EXTRA = 10

Event = dict[str, Any]


def slow_down(source: Path, target: Path, *, slow_rank: int, cause: str, delay_ns: int) -> None:
    """Writes the traces of all ranks; `cause` is "kernels" or "host"."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("rank*.json.gz")):
        with gzip.open(path, "rt") as file:
            document = json.load(file)
        moved = _Moved(document["traceEvents"], delay_ns / 1e3)
        if path.name.startswith(f"rank{slow_rank}."):
            document["traceEvents"] += moved.make_slow(cause)
        else:
            moved.make_wait()
        with gzip.open(target / path.name, "wt", compresslevel=1) as file:
            json.dump(document, file)


class _Moved:
    """One rank's events while their times are changed; times are microseconds."""

    def __init__(self, events: list[Event], delay: float) -> None:
        self._events = [event for event in events if event.get("ph") == "X"]
        self._delay = delay
        self._called = {
            event["args"]["correlation"]: event["ts"]
            for event in self._events
            if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
        }
        self._steps = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in self._events
            if event["name"].startswith("ProfilerStep") and event["cat"] == "user_annotation"
        )
        reduces = sorted(
            (e for e in self._events if _is_nccl(e) and e["args"]["correlation"] in self._called),
            key=lambda event: event["ts"],
        )
        count = len(reduces) // len(self._steps)
        self._first = reduces[::count]
        self._last = reduces[count - 1 :: count]

    def make_slow(self, cause: str) -> list[Event]:
        """Moves all that comes with each step's backward; gives the kernels, if these cause it."""
        host = [
            min(e["ts"] for e in self._events if _is_backward(e) and low <= e["ts"] < high)
            for low, high in self._steps
        ]
        device = [
            min(
                event["ts"]
                for event in self._events
                if event.get("cat") == "kernel"
                and self._called.get(event["args"]["correlation"], 0) >= moment
            )
            for moment in host
        ]
        ends = [end for _, end in self._steps]
        self._move(device, host if cause == "host" else ends)
        if cause == "host":
            return []
        return [
            event
            for step, (begin, called) in enumerate(zip(device, host, strict=True))
            for event in self._add_kernels(step, begin, called)
        ]

    def make_wait(self) -> None:
        """Lets the first all-reduce of each step end later, and what waits for it begin later."""
        begun = [event["ts"] for event in self._first]
        over = [event["ts"] + event["dur"] for event in self._last]
        queued = [event for event in self._events if _is_nccl(event)]
        moved = [bisect_right(begun, event["ts"]) for event in queued]
        kept = [event["ts"] for event in queued]
        self._move(over, [end for _, end in self._steps])
        for event, count, begin in zip(queued, moved, kept, strict=True):
            is_first = any(event is one for one in self._first)
            event["ts"] = begin + (count - is_first) * self._delay
            event["dur"] += is_first * self._delay

    def _move(self, device: list[float], host: list[float]) -> None:
        for event in self._events:
            limits = device if event.get("cat") in _DEVICE else host
            if event["name"].startswith("ProfilerStep") and event["cat"] == "user_annotation":
                event["dur"] += self._delay
                limits = [end for _, end in self._steps]
            event["ts"] += bisect_right(limits, event["ts"]) * self._delay

    def _add_kernels(self, step: int, begin: float, called: float) -> list[Event]:
        length = self._delay / NUM_EXTRA
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 0.5}
        kernel = {"ph": "X", "cat": "kernel", "name": "extra_gemm", "pid": 0, "tid": 7}
        made: list[Event] = []
        for index in range(NUM_EXTRA):
            number = 900_000 + step * NUM_EXTRA + index
            own = {"device": 0, "stream": 7, "correlation": number}
            since = begin + step * self._delay + index * length
            made.append({**kernel, "ts": since, "dur": length - 1, "args": own})
            asked = called + step * self._delay - NUM_EXTRA + index
            made.append(
                {**launch, "pid": 1, "tid": 1, "ts": asked, "args": {"correlation": number}}
            )
        return made


def _is_nccl(event: Event) -> bool:
    return event.get("cat") == "kernel" and "nccl" in event["name"].lower()


def _is_backward(event: Event) -> bool:
    return event.get("cat") == "cpu_op" and event["name"].startswith("autograd::engine")
