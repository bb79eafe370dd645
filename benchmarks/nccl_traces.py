"""Records traces of several real NCCL ranks, healthy and with a slow rank, and what each costs.

    python benchmarks/nccl_traces.py --output FOLDER [--ranks 4]                       (needs CUDA)

Trains one small model with DDP in one job. Ways of being slow take turns: `clean`; `kernels`, where
rank 2 runs more kernels between forward and backward; `host`, where rank 2 sleeps there; `input`,
where it sleeps before the step. Each way is first timed without a profiler, in several blocks of
which the median counts, then traced over 3 steps. FOLDER gets `WAY.tar.gz` with the traces of all
ranks and `step_times.json`: what `meshscope report` must find in the traces, and the price it must
name. Where there are fewer GPUs than ranks they share one, by MPS.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

WAYS = ("clean", "kernels", "host", "input")
SLOW_RANK = 2
SLEEP_S = 0.04
NUM_MATMULS = 60
"""Of 4096 × 4096 in bfloat16: about 15 ms of an H200 by itself."""
ROUNDS, STEPS_PER_BLOCK, TRACED_STEPS = 4, 8, 3


class Trainer:
    """One rank's training, which one of the ways makes slow."""

    def __init__(self, rank: int) -> None:
        self._is_slow = rank == SLOW_RANK
        device = rank % torch.cuda.device_count()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device("cuda", device))
        torch.manual_seed(0)
        layer = partial(nn.TransformerEncoderLayer, 512, 8, 2048, batch_first=True, dropout=0.0)
        model = nn.Sequential(
            nn.Embedding(8192, 512), *(layer() for _ in range(8)), nn.Linear(512, 8192)
        )
        self._model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[device])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._tokens = torch.randint(0, 8192, (16, 512), device="cuda")
        self._square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step(self, way: str) -> None:
        is_slow = self._is_slow
        if is_slow and way == "input":
            time.sleep(SLEEP_S)
        with torch.autocast("cuda", torch.bfloat16):
            guess = self._model(self._tokens)
            loss = nn.functional.cross_entropy(guess.flatten(0, 1).float(), self._tokens.flatten())
        if is_slow and way == "kernels":
            for _ in range(NUM_MATMULS):
                torch.mm(self._square, self._square)
        if is_slow and way == "host":
            time.sleep(SLEEP_S)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def time_block(self, way: str) -> float:
        """Milliseconds a step."""
        self.step(way)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            self.step(way)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / STEPS_PER_BLOCK

    def trace(self, way: str, path: Path) -> None:
        plan = schedule(wait=1, warmup=2, active=TRACED_STEPS, repeat=1)
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]

        def save(found: profile) -> None:
            found.export_chrome_trace(str(path))

        with profile(activities=activities, schedule=plan, on_trace_ready=save) as profiled:
            for _ in range(3 + TRACED_STEPS):
                self.step(way)
                profiled.step()
        torch.cuda.synchronize()


def rank_main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    trainer = Trainer(rank)
    for _ in range(8):
        trainer.step("clean")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            times[way].append(trainer.time_block(way))
    for way in WAYS:
        (folder / way).mkdir(exist_ok=True)
        dist.barrier()
        trainer.trace(way, folder / way / f"rank{rank}.json.gz")
    if rank == 0:
        (folder / "step_times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(num_ranks: int, folder: Path) -> None:
    environment = dict(os.environ, WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    environment["MASTER_PORT"] = str(random.randint(20000, 40000))
    is_shared = torch.cuda.device_count() < num_ranks
    control = ["nvidia-cuda-mps-control"]
    if is_shared:
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            environment[name] = tempfile.mkdtemp()
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        subprocess.run([*control, "-d"], env=environment, check=True)
    command = [sys.executable, __file__, "--folder", str(folder)]
    ranks = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"h{rank}"}
        ranks.append(subprocess.Popen(command, env=environment | own))
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        if is_shared:
            subprocess.run(control, input=b"quit\n", env=environment, check=False)
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.folder:
        rank_main(options.folder)
        return
    if options.output is None:
        parser.error("--output is needed")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_ranks(options.ranks, folder)
        times = json.loads((folder / "step_times.json").read_text())
        for way in WAYS:
            with tarfile.open(options.output / f"{way}.tar.gz", "w:gz") as archive:
                archive.add(folder / way, arcname=way)
    found = {way: statistics.median(values) for way, values in times.items()}
    (options.output / "step_times.json").write_text(json.dumps({"median": found, "ms": times}))
    for way in WAYS:
        lost = found[way] - found["clean"]
        shown = " ".join(f"{value:.1f}" for value in times[way])
        print(f"{way:8} {found[way]:7.1f} ms a step, {lost:+6.1f} against clean   ({shown})")


if __name__ == "__main__":
    main()
