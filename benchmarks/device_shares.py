"""Does the device time line say the same as a kernel trace? And does recording ever synchronise?

    python benchmarks/device_shares.py [--output FILE]        (needs a CUDA device)

One loop (a GPT in bf16) is recorded while torch.profiler traces its kernels. A kernel belongs to
the phase during which the host launched it, found by its correlation id: backward kernels are
launched by autograd's own thread, so annotation ranges would miss them. The device shares of
forward, backward and optimizer from the recorder's marks, without a profiler beside it, must agree
with the kernels' within two percentage points while the device is the bottleneck (350M). The small
model is launch-bound: there the marks include the device's idle time by definition, and the row
shows by how much that differs. The same loop is traced without the recorder, and the calls that
make a host wait for the device are counted in both.
"""

import argparse
import collections
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from recorder_overhead import describe_machine, make_trainer
from torch.profiler import ProfilerActivity, profile, record_function

from meshscope.capture.recorder import Recorder, RecorderConfig
from meshscope.store.read.run import open_run

PHASES = ("forward", "backward", "optimizer")
NUM_STEPS = 12
WAITING_CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
)


def train(trainer, num_steps: int) -> None:
    """The loop under test, with host ranges that the trace can be cut by."""
    for _ in range(num_steps):
        trainer.optimizer.zero_grad(set_to_none=True)
        with record_function("host:forward"):
            logits = trainer.model(trainer.inputs)
        loss = trainer.loss(logits)
        with record_function("host:backward"):
            loss.backward()
        with record_function("host:optimizer"):
            trainer.optimizer.step()


def trace(trainer, folder: Path, name: str) -> dict[str, list[dict]]:
    """Events of a profiled run of the loop, by category."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train(trainer, NUM_STEPS)
        torch.cuda.synchronize()
    path = folder / f"{name}.json"
    profiler.export_chrome_trace(str(path))
    events = collections.defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("ph") == "X":
            events[event.get("cat", "")].append(event)
    return events


def kernel_shares(events: dict[str, list[dict]]) -> dict[str, float]:
    """Share of kernel time per phase, by the host range in which the kernel was launched."""
    ranges = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("host:"))
        for event in events["user_annotation"]
        if event["name"].startswith("host:")
    ]
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events["cuda_runtime"] + events["cuda_driver"]
        if "correlation" in event.get("args", {})
    }
    totals: collections.Counter[str] = collections.Counter()
    for event in events["kernel"] + events["gpu_memcpy"] + events["gpu_memset"]:
        launched = launches[event["args"]["correlation"]]
        phase = next((name for a, b, name in ranges if a <= launched < b), "other")
        totals[phase] += event["dur"]
    whole = sum(totals[phase] for phase in PHASES)
    return {phase: totals[phase] / whole for phase in PHASES}


def recorded_shares(run_dir: Path, table: str) -> dict[str, float]:
    """Share of host or device time per phase, from the recording, without the first two steps."""
    rank = open_run(run_dir).last_attempt.ranks[0]
    columns = rank.read(table)
    key = "start_host_mono_ns" if table == "spans" else "host_start_host_mono_ns"
    steps = rank.read("steps")
    kept = columns[key] >= steps["start_host_mono_ns"][2]
    totals = {
        phase: float(
            columns["duration_ns"][
                kept & np.array([rank.name_of(int(i)) == phase for i in columns["name_id"]])
            ].sum()
        )
        for phase in PHASES
    }
    whole = sum(totals.values())
    return {phase: value / whole for phase, value in totals.items()}


def count_waits(events: dict[str, list[dict]]) -> dict[str, int]:
    """Calls that make the host wait for the device."""
    names = collections.Counter(event["name"] for event in events["cuda_runtime"])
    return {name: names[name] for name in WAITING_CALLS}


def record(trainer, run_dir: Path) -> Recorder:
    """A recorder as a user has it, already used for a few steps so that the device is known."""
    recorder = Recorder(run_dir, config=RecorderConfig(provenance=False))
    recorder.attach(trainer.model, trainer.optimizer)
    train(trainer, 3)
    torch.cuda.synchronize()
    return recorder


def main() -> None:
    """Measures one or two model sizes, prints and writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="*", default=["350M", "10M"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, object] = {"machine": describe_machine("cuda")}
    for size in arguments.sizes:
        trainer = make_trainer(size, "cuda")
        train(trainer, 5)
        torch.cuda.synchronize()
        with tempfile.TemporaryDirectory(prefix="meshscope-bench-") as scratch:
            folder = Path(scratch)
            plain = trace(trainer, folder, "plain")
            recorder = record(trainer, folder / "traced-run")
            recorded = trace(trainer, folder, "recorded")
            recorder.close()
            alone = record(trainer, folder / "run")
            train(trainer, NUM_STEPS)
            torch.cuda.synchronize()
            alone.close()
            assert not alone.guard.counts, alone.guard.first_messages
            found = {
                "kernels": kernel_shares(plain),
                "device_marks_under_profiler": recorded_shares(
                    folder / "traced-run", "device_spans"
                ),
                "device_marks_without_profiler": recorded_shares(folder / "run", "device_spans"),
                "host": recorded_shares(folder / "run", "spans"),
                "waits_without_recorder": count_waits(plain),
                "waits_with_recorder": count_waits(recorded),
                "num_steps": NUM_STEPS,
            }
        found["largest_difference"] = max(
            abs(found["kernels"][phase] - found["device_marks_without_profiler"][phase])
            for phase in PHASES
        )
        results[size] = found
        print_comparison(size, found)
        del trainer
        torch.cuda.empty_cache()
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def print_comparison(size: str, found: dict) -> None:
    """One row per source, one column per phase."""
    print(f"\n{size}: share of the three phases")
    print(f"{'':32}" + "".join(f"{phase:>12}" for phase in PHASES))
    for source in (
        "kernels",
        "device_marks_under_profiler",
        "device_marks_without_profiler",
        "host",
    ):
        print(f"{source:32}" + "".join(f"{found[source][phase]:12.2%}" for phase in PHASES))
    print(f"largest difference to the kernels: {100 * found['largest_difference']:.2f} points")
    print(f"waiting calls without recorder {found['waits_without_recorder']}")
    print(f"waiting calls with recorder    {found['waits_with_recorder']}")


if __name__ == "__main__":
    main()
