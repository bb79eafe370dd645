"""What a device did, by the union of kernels in a window of torch.profiler."""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from nccl_bench import Place
from torch.profiler import ProfilerActivity, profile, schedule

Span = tuple[float, float]

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def trace_steps(place: Place, step: Callable[[], None], num_steps: int) -> dict[str, float] | None:
    """Milliseconds a step on this rank; None without a CUDA device. Collective."""
    found = trace_events(place, step, num_steps)
    return None if found is None else measure_kernels(*found, num_steps)


def trace_events(
    place: Place, step: Callable[[], None], num_steps: int
) -> tuple[list[dict[str, Any]], float] | None:
    """The device's events and the window's wall clock in ms; None without a CUDA device.

    Collective. The window begins and ends with an empty device, so that its wall clock is the
    host's.
    """
    if not place.is_cuda:
        for _ in range(num_steps + 1):
            step()
        return None
    with profile(
        activities=[ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
    ) as profiled:
        step()
        place.meet()
        profiled.step()
        place.meet()
        begin = time.perf_counter()
        for index in range(num_steps):
            step()
            if index < num_steps - 1:
                profiled.step()
        place.synchronize()
        seconds = time.perf_counter() - begin
        profiled.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events, seconds * 1e3


def measure_kernels(
    events: Sequence[dict[str, Any]], wall_ms: float, num_steps: int
) -> dict[str, float]:
    """Unions of device work, milliseconds a step; `wall_ms` is of all steps.

    Compute are kernels without nccl in their name, copies are copies and fills. compute + exposed +
    copies_alone + idle is the wall clock.
    """
    work = [event for event in events if event.get("cat") in DEVICE_WORK]
    kernels = [event for event in work if event["cat"] == "kernel"]
    communication = unite(to_spans(one for one in kernels if is_communication(one)))
    compute = unite(to_spans(one for one in kernels if not is_communication(one)))
    copies = unite(to_spans(one for one in work if one["cat"] != "kernel"))
    computing = unite([*compute, *copies])
    busy = unite(to_spans(work))
    beside = total(unite([*compute, *communication]))
    found = {
        "compute": total(compute),
        "compute_with_copies": total(computing),
        "communication": total(communication),
        "overlapped": total(compute) + total(communication) - beside,
        "exposed": beside - total(compute),
        "exposed_beside_copies": total(busy) - total(computing),
        "copies": total(copies),
        "copies_alone": total(busy) - beside,
        "busy": total(busy),
    }
    scaled = {name: us * 1e-3 / num_steps for name, us in found.items()}
    scaled["wall"] = wall_ms / num_steps
    scaled["idle"] = scaled["wall"] - scaled.pop("busy")
    return {name: round(value, 4) for name, value in scaled.items()}


def is_communication(event: dict[str, Any]) -> bool:
    return "nccl" in event["name"].lower()


def to_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


def unite(spans: Iterable[Span]) -> list[Span]:
    """Sorted spans that do not touch."""
    united: list[Span] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((begin, end))
    return united


def total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
