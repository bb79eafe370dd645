"""Are operations on a GPU timed rightly, at what cost, and without ever waiting for it?

    python benchmarks/communication_gpu.py [--output FILE]        (needs a CUDA device)

NCCL on one rank: blocking and asynchronous operations of several sizes, DistributedDataParallel
and FSDP2, recorded while torch.profiler traces the device. For each operation the recorder's end
minus start is compared with what the device did for it in the trace (found by correlation ids of
the launches inside the `c10d::` call). Several NCCL ranks cannot share one GPU, so four ranks use
gloo with CUDA tensors; there the profiler's `gloo:` spans are the reference. Host cost per
operation is measured without a profiler, and calls that make the host wait for the device are
counted with and without the recorder.
"""

import argparse
import collections
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from recorder_overhead import describe_machine
from torch.profiler import ProfilerActivity, profile

import meshscope
from meshscope.capture.operations import operation_stride
from meshscope.core.operations import EndSource, Kind
from meshscope.store.read.run import open_run

WAITING_CALLS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
SIZES = (1 << 24, 1 << 27, 1 << 30)
REPEATS = 6
GLOO_RANKS = 4
FILLER: list[torch.Tensor] = []
"""A matrix whose square keeps the stream busy while the host issues what follows: without it the
times of short operations are those of launching them."""
USUAL_SHARE = operation_stride.MAX_SHARE


def operations(tensor: torch.Tensor, out: torch.Tensor, *, is_async: bool) -> None:
    """Kinds that move memory on one rank, each behind some compute, as in training."""
    for call in (
        lambda: dist.all_gather_into_tensor(out, tensor, async_op=is_async),
        lambda: dist.reduce_scatter_tensor(out, tensor, async_op=is_async),
        lambda: dist.all_to_all_single(out, tensor, async_op=is_async),
        lambda: dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=is_async),
    ):
        FILLER[0] @ FILLER[0]
        handle = call()
        if handle is not None:
            handle.wait()


def read_trace(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def device_durations(events: list[dict]) -> list[tuple[str, float]]:
    """Name and microseconds on the device of each `c10d::` call, in order."""
    calls = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("c10d::")),
        key=lambda e: e["ts"],
    )
    launches = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    work = collections.defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            work[event["args"].get("correlation")].append(event)
    found = []
    for call in calls:
        begin, end = call["ts"], call["ts"] + call["dur"]
        inside = [
            item
            for launch in launches
            if launch["tid"] == call["tid"] and begin <= launch["ts"] <= end
            for item in work.get(launch["args"].get("correlation"), ())
        ]
        if inside:
            first = min(item["ts"] for item in inside)
            last = max(item["ts"] + item["dur"] for item in inside)
            found.append((call["name"], last - first))
        else:
            found.append((call["name"], 0.0))
    return found


def count_waiting(events: list[dict]) -> int:
    names = collections.Counter(e["name"] for e in events if e.get("cat") == "cuda_runtime")
    return sum(names[name] for name in WAITING_CALLS)


def recorded(run_dir: Path, rank: int = 0) -> list[dict]:
    columns = open_run(run_dir).last_attempt.ranks[rank].read("collectives")
    rows = [
        {name: int(values[index]) for name, values in columns.items()}
        for index in range(len(columns["kind"]))
    ]
    return sorted(rows, key=lambda row: row["enqueue_host_mono_ns"])


def compare_nccl(folder: Path) -> dict[str, object]:
    """Durations against the trace, kind by kind, blocking and asynchronous."""
    rows = []
    waiting = {}
    operation_stride.MAX_SHARE = 1e9  # every operation, however dense they are
    for is_async in (False, True):
        for size in SIZES:
            tensor = torch.ones(size // 4, device="cuda")
            out = torch.empty_like(tensor)
            for _ in range(2):
                operations(tensor, out, is_async=is_async)
            torch.cuda.synchronize()
            label = f"{'async' if is_async else 'sync'}-{size}"
            for with_recorder in (False, True):
                recorder = None
                if with_recorder:
                    recorder = meshscope.start(folder / label)
                    assert recorder.watching.collectives is not None, recorder.guard.first_messages
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                    for _ in range(REPEATS):
                        operations(tensor, out, is_async=is_async)
                if recorder is not None:
                    torch.cuda.synchronize()
                    recorder.close()
                    assert not recorder.guard.counts, recorder.guard.first_messages
                path = folder / f"{label}.json"
                profiler.export_chrome_trace(str(path))
                events = read_trace(path)
                waiting[f"{label}-{'recorded' if with_recorder else 'plain'}"] = count_waiting(
                    events
                )
            durations = device_durations(events)
            ours = recorded(folder / label)
            assert len(durations) == len(ours), (len(durations), len(ours))
            rows += _rows_by_kind(durations, ours, size, is_async=is_async)
    return {"operations": rows, "waiting_calls": waiting}


def _rows_by_kind(durations, ours, size: int, *, is_async: bool) -> list[dict[str, object]]:
    by_kind = collections.defaultdict(list)
    for (name, reference_us), row in zip(durations, ours, strict=True):
        mine_us = (row["end_host_mono_ns"] - row["start_host_mono_ns"]) / 1e3
        by_kind[Kind(row["kind"]).label].append((name, reference_us, mine_us, row["end_source"]))
    rows = []
    for kind, found in by_kind.items():
        reference = statistics.median(item[1] for item in found)
        mine = statistics.median(item[2] for item in found)
        rows.append(
            {
                "kind": kind,
                "torch_name": found[0][0],
                "is_async": is_async,
                "size_bytes": size,
                "trace_us": round(reference, 1),
                "recorded_us": round(mine, 1),
                "difference_percent": round(100 * (mine / reference - 1), 2) if reference else None,
                "end_sources": sorted({EndSource(item[3]).name for item in found}),
            }
        )
    return rows


def host_cost(folder: Path) -> dict[str, float]:
    """Microseconds of host time added to an operation, blocking and asynchronous."""
    tensor = torch.ones(1024, device="cuda")
    calls = {
        "sync": lambda: dist.all_reduce(tensor),
        "async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
    }

    def best(call) -> float:
        times = []
        for _ in range(40):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - begin) / 100 * 1e6)
        return statistics.median(sorted(times)[:20])

    plain = {name: best(call) for name, call in calls.items()}
    costs: dict[str, float] = {}
    for marking, share in (("all_marked", 1e9), ("as_it_is", USUAL_SHARE), ("none_marked", 0.0)):
        operation_stride.MAX_SHARE = share
        recorder = meshscope.start(folder / f"cost-{marking}")
        for name, call in calls.items():
            with_us = best(call)
            costs[f"{name}_plain_us"] = round(plain[name], 1)
            costs[f"{name}_{marking}_added_us"] = round(with_us - plain[name], 1)
        recorder.close()
    return costs


def wrappers(folder: Path) -> dict[str, object]:
    """DDP and FSDP2 on one NCCL rank: every operation has an end, and the trace's count."""
    from torch.distributed.fsdp import fully_shard

    operation_stride.MAX_SHARE = USUAL_SHARE
    found = {}
    for name in ("ddp", "fsdp2"):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4096, 4096) for _ in range(8)]
        model = torch.nn.Sequential(*layers).cuda()
        if name == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100)
        else:
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randn(4096, 4096, device="cuda")

        def step(model=model, optimizer=optimizer, batch=batch) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        plain_peak = torch.cuda.max_memory_allocated()
        recorder = meshscope.start(folder / name)
        recorder.attach(model, optimizer)
        torch.cuda.reset_peak_memory_stats()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                step()
        torch.cuda.synchronize()
        recorder.close()
        path = folder / f"{name}.json"
        profiler.export_chrome_trace(str(path))
        events = read_trace(path)
        durations = device_durations(events)
        rows = recorded(folder / name)
        kinds = collections.Counter(
            (Kind(r["kind"]).label, EndSource(r["end_source"]).name, r["flags"]) for r in rows
        )
        found[name] = {
            "errors": dict(recorder.guard.first_messages),
            "operations_recorded": len(rows),
            "operations_in_trace": len(durations),
            "kinds": {" ".join(map(str, key)): count for key, count in kinds.items()},
            "peak_bytes_plain": plain_peak,
            "peak_bytes_recorded": torch.cuda.max_memory_allocated(),
            "median_recorded_us": _median_us(rows),
        }
    return found


def _median_us(rows: list[dict]) -> float | None:
    spans = [
        r["end_host_mono_ns"] - r["start_host_mono_ns"] for r in rows if r["end_host_mono_ns"] > 0
    ]
    return round(statistics.median(spans) / 1e3, 1) if spans else None


def gloo_rank(rank: int, folder: Path) -> None:
    """One of four ranks with gloo and CUDA tensors."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(GLOO_RANKS), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=GLOO_RANKS
    )
    tensor = torch.ones(1 << 22, device="cuda")
    for _ in range(3):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    recorder = meshscope.start(folder / "gloo")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            dist.all_reduce(tensor)
        for _ in range(10):
            dist.all_reduce(tensor, async_op=True).wait()
    recorder.close()
    assert not recorder.guard.counts, recorder.guard.first_messages
    profiler.export_chrome_trace(str(folder / f"gloo{rank}.json"))
    dist.barrier()
    time.sleep(0.2)


def compare_gloo(folder: Path) -> dict[str, object]:
    """Durations of gloo's own spans and ours, per rank."""
    result = {}
    for rank in range(GLOO_RANKS):
        events = read_trace(folder / f"gloo{rank}.json")
        spans = sorted(
            (e for e in events if e["name"].startswith("gloo:") and "dur" in e),
            key=lambda e: e["ts"],
        )
        rows = recorded(folder / "gloo", rank)
        pairs = [
            (span["dur"], (row["end_host_mono_ns"] - row["enqueue_host_mono_ns"]) / 1e3)
            for span, row in zip(spans, rows, strict=False)
        ]
        for name, part in (("sync", pairs[:10]), ("async", pairs[10:])):
            reference = statistics.median(p[0] for p in part) if part else 0
            mine = statistics.median(p[1] for p in part) if part else 0
            result[f"rank{rank}_{name}"] = {
                "spans_in_trace": len(spans),
                "recorded": len(rows),
                "trace_us": round(reference, 1),
                "recorded_us": round(mine, 1),
                "difference_percent": round(100 * (mine / reference - 1), 2) if reference else None,
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(GLOO_RANKS):  # before CUDA is touched here: it does not survive a fork
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    gloo_rank(rank, folder)
                    code = 0
                finally:
                    os._exit(code)
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        result: dict[str, object] = {"gloo_exit_codes": codes}
        if not any(codes):
            result["gloo"] = compare_gloo(folder)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda:0"))
        FILLER.append(torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16))
        result["nccl"] = compare_nccl(folder)
        result["host_cost"] = host_cost(folder)
        result["wrappers"] = wrappers(folder)
        result["machine"] = describe_machine("cuda")
        dist.destroy_process_group()
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
