"""How much memory does each memory strategy take, and how much time does it cost?

    python benchmarks/memory_strategies.py [--device cuda] [--output FILE] [--offload-dir DIR]

One model under every strategy, each in a fresh process, with 1 and with 4 microbatches between
forward and backward (all forwards, then the backwards, oldest first, as in a pipeline's first
stage). On the CPU the peak is counted twice: as the most bytes of live tensors (each storage from
when an operation makes it until it is freed), and as the process's peak resident memory beyond what
it was before the first step. On CUDA it is `torch.cuda.max_memory_allocated`. A step's seconds are
the process's CPU time on the CPU (one torch thread; others may use the machine), wall time on CUDA.
Gradients must be those of basic; the largest difference, relative to each parameter's largest
gradient, is printed.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from recorder_overhead import describe_machine
from tests.distributed.engine_memory import TensorPeak
from torch import Tensor

from meshscope.core.unavailable import Unavailable
from meshscope.engine import ModelConfig, build_stage
from meshscope.engine.memory.strategy import (
    MemoryStatistics,
    MemoryStrategy,
    make_memory_strategy,
)
from meshscope.engine.model.transformer import Stage

# Fixed, or the C library moves its threshold and keeps freed memory, which hides what is live.
CHILD_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "OMP_NUM_THREADS": "1"}
STRATEGIES = {
    "cpu": ("basic", "standard", "aggressive", "extreme"),
    "cuda": ("basic", "standard", "aggressive", "extreme", "cpu_offload"),
}
IN_FLIGHT = (1, 4)
BATCH_SIZE = 4
CONFIGS = {
    "cpu": ModelConfig(
        vocab_size=8192,
        num_layers=8,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=8,
        ffn_hidden_size=704,
        sequence_length=512,
    ),
    "cuda": ModelConfig(
        vocab_size=16384,
        num_layers=16,
        hidden_size=512,
        num_heads=8,
        num_kv_heads=8,
        ffn_hidden_size=1408,
        sequence_length=2048,
    ),
}


def run_step(stage: Stage, strategy: MemoryStrategy, batches: list[tuple[Tensor, Tensor]]) -> float:
    stage.zero_grad()
    device_type = batches[0][0].device.type
    losses = []
    for inputs, targets in batches:
        with (
            torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda"),
            strategy.forward_context(),
        ):
            losses.append(stage(inputs, targets) / len(batches))
    total = sum(loss.item() for loss in losses)
    while losses:
        losses.pop(0).backward()
    return total


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    device, config = options.device, CONFIGS[options.device]
    generator = torch.Generator().manual_seed(1)
    shape = (options.in_flight, BATCH_SIZE, config.sequence_length + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
    batches = [(part[:, :-1], part[:, 1:]) for part in tokens]
    stage = build_stage(config, device=device)
    strategy = make_memory_strategy(
        options.strategy,
        device=device,
        offload_dir=options.offload_dir,
        num_in_flight=options.in_flight,
    )
    strategy.prepare(stage)
    before_bytes = read_resident_bytes()
    seconds = []
    clock = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(options.steps + 1):
        synchronize(device)
        begin_s = clock()
        loss = run_step(stage, strategy, batches)
        synchronize(device)
        seconds.append(clock() - begin_s)
    numbers = strategy.statistics
    found = {
        "strategy": options.strategy,
        "in_flight": options.in_flight,
        "loss": loss,
        "step_s": statistics.median(seconds[1:]),
        "num_steps": len(seconds),
        "saved_bytes_per_forward": count_saved(numbers),
        "written_bytes_per_step": numbers.written_bytes // len(seconds),
        "recompute_s_per_step": numbers.recompute_ns / len(seconds) / 1e9,
        "wait_s_per_step": numbers.wait_ns / len(seconds) / 1e9,
    }
    found |= measure_peak(options, stage, strategy, batches, before_bytes)
    torch.save({n: p.grad.cpu() for n, p in stage.named_parameters()}, options.gradients)
    strategy.close()
    return found


def count_saved(numbers: MemoryStatistics) -> int | str:
    if isinstance(numbers.saved_bytes, Unavailable):
        return numbers.saved_bytes.reason
    return numbers.saved_bytes // numbers.num_forwards


def measure_peak(
    options: argparse.Namespace,
    stage: Stage,
    strategy: MemoryStrategy,
    batches: list[tuple[Tensor, Tensor]],
    before_bytes: int,
) -> dict[str, int]:
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run_step(stage, strategy, batches)
        synchronize("cuda")
        return {"peak_bytes": torch.cuda.max_memory_allocated()}
    # Before the count: the mode below keeps records of its own.
    resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes
    stage.zero_grad()
    with TensorPeak([*stage.parameters(), *stage.buffers()]) as peak:
        run_step(stage, strategy, batches)
    return {"peak_bytes": peak.peak_bytes, "peak_resident_bytes": resident_bytes}


def read_resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- all of them ----------------------------------------------------------------------------------


def run_child(options: argparse.Namespace, strategy: str, in_flight: int, gradients: Path) -> Any:
    command = [
        sys.executable,
        __file__,
        *("--device", options.device),
        *("--strategy", strategy),
        *("--in-flight", str(in_flight)),
        *("--steps", str(options.steps)),
        *("--offload-dir", str(options.offload_dir)),
        *("--gradients", str(gradients)),
    ]
    environment = {**os.environ, **(CHILD_ENVIRONMENT if options.device == "cpu" else {})}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def compare_gradients(found: Path, expected: Path) -> float:
    ours, basic = torch.load(found), torch.load(expected)
    return max(
        ((ours[name] - grad).abs().max() / grad.abs().max()).item() for name, grad in basic.items()
    )


def measure_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for in_flight in IN_FLIGHT:
        basic: dict[str, Any] = {}
        for strategy in STRATEGIES[options.device]:
            gradients = folder / f"{'basic' if strategy == 'basic' else 'other'}.pt"
            row = run_child(options, strategy, in_flight, gradients)
            basic = basic or row
            row["gradient_difference"] = compare_gradients(gradients, folder / "basic.pt")
            row["peak_ratio"] = row["peak_bytes"] / basic["peak_bytes"]
            row["step_ratio"] = row["step_s"] / basic["step_s"]
            rows.append(row)
            print(format_row(row), flush=True)
    return rows


HEADER = (
    f"{'in flight':>9} {'strategy':<12} {'peak MB':>9} {'ratio':>6} {'resident MB':>11} "
    f"{'step s':>8} {'ratio':>6} {'written MB':>10} {'recompute s':>11} {'wait s':>7} "
    f"{'gradients':>9}"
)


def format_row(row: dict[str, Any]) -> str:
    resident = row.get("peak_resident_bytes")
    return (
        f"{row['in_flight']:>9} {row['strategy']:<12} {row['peak_bytes'] / 1e6:>9.1f} "
        f"{row['peak_ratio']:>6.2f} {'' if resident is None else f'{resident / 1e6:.1f}':>11} "
        f"{row['step_s']:>8.3f} {row['step_ratio']:>6.2f} "
        f"{row['written_bytes_per_step'] / 1e6:>10.1f} {row['recompute_s_per_step']:>11.3f} "
        f"{row['wait_s_per_step']:>7.3f} {row['gradient_difference']:>9.1e}"
    )


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=3, help="of which the median is taken")
    parser.add_argument(
        "--offload-dir", type=Path, help="on a disk; by default the folder for temporary files"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    parser.add_argument("--in-flight", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strategy:
        print(json.dumps(measure(options)))
        return
    print(HEADER)
    place = options.offload_dir or Path(tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        options.offload_dir = Path(folder)
        rows = measure_all(options, Path(folder))
    if options.output:
        config = CONFIGS[options.device]
        document = {
            "machine": describe_machine(options.device),
            "model": {name: getattr(config, name) for name in config.__dataclass_fields__},
            "batch_size": BATCH_SIZE,
            "rows": rows,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
