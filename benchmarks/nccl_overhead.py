"""What recording costs a job of several real NCCL ranks, by paired blocks inside one job.

    python benchmarks/nccl_overhead.py [--program fsdp2] [--ranks 4] [--output FILE]   (needs CUDA)

On a machine with fewer GPUs than ranks the ranks share a GPU: MPS runs them side by side, and each
has another NCCL_HOSTID, without which NCCL refuses two ranks on one device. On a machine with
enough GPUs each rank has its own. Ways of recording take turns in random order, the same on all
ranks; a block is a few steps between two synchronisations. Kernels of a few steps are traced for
each way, too: how much communication ran beside compute.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import meshscope

WARMUP_STEPS = 8
TRACED_STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 8, width // 8).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int = 8, width: int = 512, words: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(
            self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


WAYS: dict[str, dict | None] = {
    "bare": None,
    "recorded": {},
    "no_communication": {"communication": False},
}
"""Settings of the recorder, or none at all."""


def wrap(model: nn.Module, program: str, device: int) -> nn.Module:
    if program == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device])
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def rank_main(options: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    torch.manual_seed(0)
    model = wrap(Gpt().cuda(), options.program, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 8192, (16, 1024), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(way: str, num_steps: int, folder: Path, *, trace: bool = False) -> tuple[float, str]:
        recorder = None
        if WAYS[way] is not None:
            recorder = meshscope.start(folder, **WAYS[way])
            recorder.attach(model, optimizer)
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        text = ""
        if trace:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                for _ in range(num_steps):
                    step()
                torch.cuda.synchronize()
            if rank == 0:
                path = folder.with_suffix(".json")
                profiled.export_chrome_trace(str(path))
                text = str(path)
        else:
            for _ in range(num_steps):
                step()
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if recorder is not None:
            recorder.close()
        return seconds / num_steps, text

    root = Path(options.folder)
    for _ in range(WARMUP_STEPS):
        step()
    shuffle = random.Random(1)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    count = 0
    for _ in range(options.blocks):
        order = list(WAYS)
        shuffle.shuffle(order)
        for way in order:
            count += 1
            seconds, _ = block(way, options.steps, root / f"run{count}")
            found[way].append(1e3 * seconds)
    kernels = {}
    for way in ("bare", "recorded", "bare", "recorded"):
        count += 1
        _, path = block(way, TRACED_STEPS, root / f"run{count}", trace=True)
        if path:
            kernels.setdefault(way, []).append(measure_kernels(Path(path)))
    if rank == 0:
        (root / "result.json").write_text(json.dumps({"ms": found, "kernels": kernels}))
    dist.barrier()
    dist.destroy_process_group()


def measure_kernels(path: Path) -> dict[str, float]:
    """Union of kernels, ms a step."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    communication = unite([e for e in work if "nccl" in e["name"].lower()])
    compute = unite([e for e in work if "nccl" not in e["name"].lower()])
    both = unite(work)
    total = lambda spans: sum(end - begin for begin, end in spans)  # noqa: E731
    wall = both[-1][1] - both[0][0]
    scale = 1e-3 / TRACED_STEPS
    return {
        "compute": total(compute) * scale,
        "communication": total(communication) * scale,
        "overlapped": (total(compute) + total(communication) - total(both)) * scale,
        "idle": (wall - total(both)) * scale,
        "wall": wall * scale,
    }


def unite(events: list[dict]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def name_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"h{rank}"}


def launch(options: argparse.Namespace) -> dict:
    folder = tempfile.mkdtemp()
    environment = dict(os.environ, WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1")
    environment |= {"MASTER_PORT": str(random.randint(20000, 40000))}
    is_shared = torch.cuda.device_count() < options.ranks
    if is_shared:
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            environment[name] = tempfile.mkdtemp()
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    if options.connections:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.connections)
    try:
        command = [sys.executable, __file__, "--folder", folder]
        command += ["--program", options.program]
        command += ["--blocks", str(options.blocks), "--steps", str(options.steps)]
        ranks = [
            subprocess.Popen(command, env={**environment, **name_rank(rank)})
            for rank in range(options.ranks)
        ]
        codes = [rank.wait(timeout=420) for rank in ranks]
    finally:
        if is_shared:
            stop = ["nvidia-cuda-mps-control"]
            subprocess.run(stop, input=b"quit\n", env=environment, check=False)
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads((Path(folder) / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--connections", type=int, default=0, help="CUDA_DEVICE_MAX_CONNECTIONS; 0: not set"
    )
    parser.add_argument("--program", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.folder:
        rank_main(options)
        return
    result = launch(options)
    rows = result["ms"]
    for way, values in rows.items():
        low, middle, high = paired_change(values, rows["bare"])
        print(
            f"{options.program} {way:17} median {statistics.median(values):7.2f} ms   "
            f"{middle:+.2f} % of bare, 95 % interval {low:+.2f} to {high:+.2f} %"
        )
    for way, found in result["kernels"].items():
        for one in found:
            shown = "  ".join(f"{name} {value:.1f}" for name, value in one.items())
            print(f"{options.program} {way:17} kernels, ms a step: {shown}")
    if options.output:
        options.output.write_text(json.dumps({**vars(options), **result}, default=str, indent=1))


def paired_change(values: list[float], bare: list[float]) -> tuple[float, float, float]:
    """Median change in percent over blocks of the same round, with its bootstrap interval."""
    pairs = [100 * (value / other - 1) for value, other in zip(values, bare, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return medians[50], statistics.median(pairs), medians[1949]


if __name__ == "__main__":
    main()
