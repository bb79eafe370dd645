"""What does reading the memory of a device cost, and how many readings have 60 steps of 25 ms?

    python benchmarks/memory_readings.py [--output FILE]        (needs a CUDA device; half a minute)

The calls that a reading is made of, timed alone while the device is busy and its allocator has held
many blocks. Then 60 steps that leak 64 MiB each and take 25 ms of device time, recorded: how many
readings there are, what the slope is, and whether it is called a leak; and the same without a leak.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recorder_overhead import describe_machine

from meshscope.analyze.memory.memory import Place, analyze_memory, forecast_device
from meshscope.capture.memory.device_memory import DeviceCapacity, read_capacity, sample_memory
from meshscope.capture.memory.host_memory import resident_bytes
from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.core.unavailable import Unavailable
from meshscope.store.read.run import open_run

NUM_CALLS = 300
NUM_STEPS = 60
STEP_NS = 25_000_000
LEAK_BYTES = 64 << 20


def time_call(function: Callable[[], object]) -> dict[str, float]:
    """Median and 95th percentile, in microseconds."""
    times = []
    for _ in range(NUM_CALLS):
        start_ns = time.perf_counter_ns()
        function()
        times.append((time.perf_counter_ns() - start_ns) / 1e3)
    times.sort()
    return {"median_us": statistics.median(times), "p95_us": times[int(0.95 * NUM_CALLS)]}


def time_calls() -> dict[str, dict[str, float]]:
    blocks = [torch.empty(1 << (12 + index % 12), device="cuda") for index in range(2000)]
    del blocks[::2]
    for _ in range(50):
        busy_device(STEP_NS)
    return {
        "a reading": time_call(lambda: sample_memory(torch, DeviceCapacity())),
        "allocator, nested": time_call(torch.cuda.memory_stats_as_nested_dict),
        "allocator, flat (as before)": time_call(torch.cuda.memory_stats),
        "resident set": time_call(resident_bytes),
        "driver": time_call(lambda: read_capacity(torch)),
        "driver, free memory alone": time_call(torch.cuda.mem_get_info),
    }


def busy_device(duration_ns: int) -> None:
    torch.cuda._sleep(int(duration_ns * measure_cycles()))


@functools.cache
def measure_cycles() -> float:
    """Cycles of `_sleep` in a nanosecond."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    return 100_000_000 / (start.elapsed_time(end) * 1e6)


def record_steps(leak_bytes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "run", config=RecorderConfig(provenance=False))
        kept = []
        for _ in range(NUM_STEPS):
            with recorder.step():
                busy_device(STEP_NS)
                if leak_bytes:
                    kept.append(torch.empty(leak_bytes, dtype=torch.uint8, device="cuda"))
                torch.cuda.synchronize()
        path = recorder.run_dir
        recorder.close()
        assert path is not None
        attempt = open_run(path).last_attempt
        memory = analyze_memory(attempt)
        assert not isinstance(memory, Unavailable)
        (rank,) = (rank for rank in memory.ranks if rank.place is Place.DEVICE)
        forecast = forecast_device(rank, float(STEP_NS))
        growth = rank.growth
        return {
            "num_readings": len(attempt.ranks[0].read("memory")["step"]),
            "growth": growth.reason if isinstance(growth, Unavailable) else growth.kind.value,
            "is_leak": rank.is_leaking,
            "per_step_mib": None
            if isinstance(growth, Unavailable)
            else round(growth.per_step / (1 << 20), 3),
            "steps_left": None if isinstance(forecast, Unavailable) else round(forecast.num_steps),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = {
        "machine": describe_machine("cuda"),
        "calls": time_calls(),
        "leak": record_steps(LEAK_BYTES),
        "level": record_steps(0),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
