"""The planner against a GPU: peak memory and step time of models on one GPU and of engine layouts
on NCCL ranks that share it.

    python benchmarks/planner_gpu.py --output OUT.json --parcel OUT.tar    # measures; needs CUDA
    python benchmarks/planner_gpu.py --device cpu --output OUT.json    # tiny, only whether it runs
    python benchmarks/planner_gpu.py --held-out --rounds 3 --output OUT.json    # other layouts
    python benchmarks/planner_gpu.py --judge OUT.json [--output FILE]  # anywhere

Measured memory is `torch.cuda.max_memory_allocated` of a rank over steps after the first three,
less what cuBLAS holds as its workspace, which is no tensor; both are in the output. A step is the
wall clock between two synchronisations, the longest of all ranks; its compute is the union of
kernels without NCCL's. Ranks that share the GPU have an equal part of its multiprocessors each
(`nccl_bench`), a fact of the placement that is not fitted. Constants of time are fitted on
`CALIBRATION` alone, separately for one GPU and for NCCL ranks, because their links differ; all
others are judged. Order is judged for pairs whose steps differ by more than their two spreads (half
of the middle nine tenths) together.

`HELD_OUT` were chosen on 2026-11-19, before any of them had run; what is calibrated on is measured
again beside them. `--rounds` measures step times again, all cases in turn, in the same processes: a
host's pace drifts within a job.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nccl_bench import FAILED_KEY, Place, Task, add_options, choose, is_rank, run_jobs, serve_rank
from nccl_kernels import DEVICE_WORK, measure_kernels, trace_events
from nccl_parcel import pack
from planner_engine import count_ordered
from torch.nn.functional import scaled_dot_product_attention

from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import (
    BatchConfig,
    MemoryConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

NUM_WARMUP_STEPS = 3
NUM_TRACED_STEPS = 2
NUM_RECORDED_STEPS = 24
MAX_NAMES, MAX_NAME = 50, 110
GLOBAL_BATCH = 16
AGAIN = " again "
"""In a task's name: step times alone, for another round."""
HOST_BOUND = 0.9
"""Of a step: a host that issues for longer is what the step waits for."""
GOAL_MEMORY = 0.05
GOAL_TIME = 0.15
DEVICE = "NVIDIA H200"


def make_model(
    h: int, layers: int, heads: int, ffn: int, s: int, v: int, **more: Any
) -> ModelConfig:
    return ModelConfig(
        hidden_size=h, num_layers=layers, num_heads=heads, ffn_hidden_size=ffn, sequence_length=s,
        vocab_size=v, **{"num_kv_heads": heads, **more},
    )  # fmt: skip


GPT = {
    "norm": "layernorm", "position": "learned", "activation": "gelu", "bias": True,
    "tie_embeddings": True,
}  # fmt: skip
SHARED = make_model(512, 8, 8, 1408, 512, 8192)
"""34 million parameters: ranks talk over TCP."""


def single(model: ModelConfig, b: int, m: int = 1, **settings: Any) -> TrainConfig:
    return configure(model, {}, b, m, **settings)


def shared(b: int, *, memory: str = "basic", **parallel: Any) -> TrainConfig:
    dp = parallel.get("dp", 1)
    return configure(SHARED, parallel, b, GLOBAL_BATCH // (dp * b), memory=memory)


def configure(
    model: ModelConfig, parallel: Mapping[str, Any], b: int, m: int, *, memory: str = "basic",
    compute: str = "bf16",
) -> TrainConfig:  # fmt: skip
    return TrainConfig(
        model=model,
        device="cuda",
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(compute=compute),  # type: ignore[arg-type]
        batch=BatchConfig(microbatch_size=b, num_microbatches=m),
        memory=MemoryConfig(strategy=memory),  # type: ignore[arg-type]
    )


GPT_124M = make_model(768, 12, 12, 3072, 1024, 50304, **GPT)
LLAMA_50M = make_model(512, 8, 8, 1408, 1024, 32000)
LLAMA_350M = make_model(1024, 24, 16, 2816, 1024, 32000, num_kv_heads=4)
GPT_760M = make_model(1536, 24, 16, 6144, 1024, 50304, **GPT)
LLAMA_1B = make_model(2048, 18, 16, 5632, 2048, 32000)

CASES = {
    "50m b8": single(LLAMA_50M, 8),
    "50m b2 m4": single(LLAMA_50M, 2, 4),
    "124m b8": single(GPT_124M, 8),
    "124m b4 m2 fp32": single(GPT_124M, 4, 2, compute="fp32"),
    "350m b4": single(LLAMA_350M, 4),
    "350m b16": single(LLAMA_350M, 16),
    "350m b16 recompute": single(LLAMA_350M, 16, memory="standard"),
    "760m b4 m2": single(GPT_760M, 4, 2),
    "1b b4": single(LLAMA_1B, 4),
    "1b b2 m4 recompute": single(LLAMA_1B, 2, 4, memory="standard"),
    "1b b4 aggressive": single(LLAMA_1B, 4, memory="aggressive"),
    "dp4 b4": shared(4, dp=4),
    "dp4 zero3 b4": shared(4, dp=4, data_parallel="fsdp"),
    "dp2 tp2 b4": shared(4, dp=2, tp=2),
    "tp2 pp2 1f1b b2": shared(2, tp=2, pp=2),
    "tp4 sp recompute b4": shared(4, tp=4, sequence_parallel=True, memory="standard"),
    "pp4 1f1b b2": shared(2, pp=4),
    "pp4 zb_h1 b2": shared(2, pp=4, schedule="zb_h1"),
    "dp2 tp2 pp2 1f1b b2": shared(2, dp=2, tp=2, pp=2),
    "dp8 b2": shared(2, dp=8),
    "dp8 zero1 b2": shared(2, dp=8, data_parallel="fsdp", zero_stage=1),
    "dp4 pp2 gpipe b2": shared(2, dp=4, pp=2, schedule="gpipe"),
    "dp2 pp4 interleaved b2": shared(2, dp=2, pp=4, schedule="interleaved_1f1b", chunks_per_rank=2),
    "pp8 1f1b b1": shared(1, pp=8),
}
HELD_OUT = {
    "50m b16": single(LLAMA_50M, 16),
    "124m b2 m4": single(GPT_124M, 2, 4),
    "124m b16 recompute": single(GPT_124M, 16, memory="standard"),
    "350m b2 m2": single(LLAMA_350M, 2, 2),
    "350m b8 fp32": single(LLAMA_350M, 8, compute="fp32"),
    "760m b8": single(GPT_760M, 8),
    "1b b2 m2": single(LLAMA_1B, 2, 2),
    "dp4 b2": shared(2, dp=4),
    "dp4 zero1 b4": shared(4, dp=4, data_parallel="fsdp", zero_stage=1),
    "tp4 b4": shared(4, tp=4),
    "dp2 tp2 sp b4": shared(4, dp=2, tp=2, sequence_parallel=True),
    "dp2 pp2 1f1b b2": shared(2, dp=2, pp=2),
    "tp2 pp2 gpipe b4": shared(4, tp=2, pp=2, schedule="gpipe"),
    "pp4 interleaved b2": shared(2, pp=4, schedule="interleaved_1f1b", chunks_per_rank=2),
    "pp4 1f1b b1 recompute": shared(1, pp=4, memory="standard"),
}
ALL_CASES = {**CASES, **HELD_OUT}
CALIBRATION = {
    "one GPU": ("124m b8", "350m b4"),
    "4 NCCL ranks": ("dp4 b4", "tp2 pp2 1f1b b2"),
    "8 NCCL ranks": ("dp8 b2", "dp2 tp2 pp2 1f1b b2"),
}


# --- measuring -----------------------------------------------------------------------------------


def measure(place: Place, name: str, num_steps: int, parcel: Path | None) -> dict[str, Any]:
    """Collective: rank 0's result has all ranks'."""
    if name == CONSTANTS:
        return measure_constants(place)
    from meshscope.engine import Engine
    from meshscope.engine.mesh import Mesh

    begin = time.perf_counter()
    case, _, again = name.partition(AGAIN)
    config = ALL_CASES[case] if place.is_cuda else shrink(ALL_CASES[case])
    mesh = Mesh(config.layout, place.device)
    engine = Engine(config, mesh=mesh, device=place.device)
    generator = torch.Generator().manual_seed(mesh.here.dp)
    shape = (
        config.num_microbatches,
        config.batch.microbatch_size,
        config.model.sequence_length + 1,
    )
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)

    def step() -> None:
        engine.train_step(tokens)

    for _ in range(NUM_WARMUP_STEPS):
        step()
    place.meet()
    reset_peak(place)
    own_ms, issue_ms = [], []
    for _ in range(num_steps):
        place.meet()
        start = time.perf_counter()
        step()
        issue_ms.append(1e3 * (time.perf_counter() - start))
        place.synchronize()
        own_ms.append(1e3 * (time.perf_counter() - start))
    if again:
        engine.close()
        walls_ms = place.gather(own_ms)
        issued_ms = place.gather(round(statistics.median(issue_ms), 3))
        steps_ms = [round(max(row), 3) for row in zip(*walls_ms, strict=True)]
        return {"step_ms": steps_ms, "issue_ms": issued_ms}
    memory = place.gather({"pp_rank": mesh.here.pp, **read_memory(place, engine)})
    moments = follow_step(place, engine, tokens) if place.num_ranks == 1 else None
    events = trace_events(place, step, NUM_TRACED_STEPS)
    walls_ms = place.gather(own_ms)
    kernels = place.gather(events and measure_kernels(*events, NUM_TRACED_STEPS))
    by_name = place.gather(events and sum_by_name(events[0], only_nccl=place.rank > 0))
    issued_ms = place.gather(round(statistics.median(issue_ms), 3))
    engine.close()
    if any(name in names for names in CALIBRATION.values()) and parcel:
        record(place, config, mesh, tokens, place.folder / name.replace(" ", "_"), parcel)
    return {
        "num_ranks": place.num_ranks,
        "issue_ms": issued_ms,
        "kernels_by_name": by_name,
        "step_ms": [round(max(row), 3) for row in zip(*walls_ms, strict=True)],
        "memory": memory,
        "moments": moments,
        "kernels_ms": kernels,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def shrink(config: TrainConfig) -> TrainConfig:
    """The same layout on a CPU, tiny."""
    model = replace(
        config.model, hidden_size=64, num_heads=8, num_kv_heads=8, ffn_hidden_size=96,
        sequence_length=32, vocab_size=256,
    )  # fmt: skip
    return replace(config, model=model, device="cpu", precision=PrecisionConfig(compute="fp32"))


CONSTANTS = "constants"
"""Not a model: what one device does with single operations."""
PRODUCTS = tuple(
    (m, k, n)
    for m in (1024, 4096, 8192)
    for k, n in (
        (1024, 1024), (2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192),
        (1024, 4096), (2048, 1024), (512, 2048), (4096, 32000),
    )
)  # fmt: skip
ATTENTIONS = ((8, 16, 1024, 64), (4, 32, 2048, 128), (1, 32, 8192, 128), (2, 8, 4096, 128))
"""Sequences, heads, tokens, channels."""


def measure_constants(place: Place) -> dict[str, Any]:
    """Microseconds of the device for single operations in bf16, the median of repetitions."""
    begin = time.perf_counter()
    scale = 1 if place.is_cuda else 16
    kind = torch.bfloat16 if place.is_cuda else torch.float32
    found: dict[str, Any] = {"num_ranks": 1, "products_us": [], "attentions_us": []}

    def make(*shape: int, needs_gradient: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=place.device, dtype=kind, requires_grad=needs_gradient)

    for sizes in PRODUCTS:
        m, k, n = (size // scale for size in sizes)
        left, right, given = make(m, k), make(n, k), make(m, n)
        operands = ((left, right.T), (given, right), (given.T, left))
        runs = [partial(torch.matmul, *two) for two in operands]
        found["products_us"].append([*sizes, *(time_us(place, run) for run in runs)])
    for sequences, heads, tokens, channels in ATTENTIONS:
        shape = (sequences, heads, tokens // scale, channels)
        given = [make(*shape, needs_gradient=True) for _ in range(3)]
        attend = partial(scaled_dot_product_attention, *given, is_causal=True)
        back = partial(torch.autograd.grad, attend(), given, make(*shape), retain_graph=True)
        row = [sequences, heads, tokens, channels, time_us(place, attend), time_us(place, back)]
        found["attentions_us"].append(row)
    found["passes_us"] = measure_passes(place, make, 8192 // scale, 4096 // scale)
    found["layers"] = measure_plain_layers(place, scale)
    found["seconds"] = round(time.perf_counter() - begin, 1)
    return found


def measure_passes(
    place: Place, make: Callable[..., torch.Tensor], m: int, n: int
) -> dict[str, Any]:
    """Operations that only move bytes, on m × n elements."""
    a, b = make(m, n), make(m, n)
    wide, weight = a.float(), make(n)
    functional = torch.nn.functional
    runs = {
        "add": lambda: a + b,
        "silu": lambda: functional.silu(a),
        "to float": lambda: a.float(),
        "from float": lambda: wide.to(a.dtype),
        "rms_norm": lambda: functional.rms_norm(a, (n,), weight),
        "layer_norm float": lambda: functional.layer_norm(wide, (n,)),
        "copy": a.clone,
        "empty": lambda: b[:1, :1] + 1,
        "sum": lambda: a.sum(),
    }
    found = {name: time_us(place, run) for name, run in runs.items()}
    start = time.perf_counter()
    for _ in range(500):
        b[:1, :1].add_(1)
    found["host of one operation"] = round(1e6 * (time.perf_counter() - start) / 500, 2)
    return {"m": m, "n": n, **found}


def time_us(place: Place, run: Callable[[], Any], repetitions: int = 12) -> float:
    for _ in range(3):
        run()
    place.synchronize()
    spent = []
    for _ in range(repetitions):
        if place.is_cuda:
            # Something long before it: the host is ahead, so events stand close together.
            torch.cuda._sleep(1_000_000)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            spent.append(1e3 * first.elapsed_time(last))
        else:
            start = time.perf_counter()
            run()
            spent.append(1e6 * (time.perf_counter() - start))
    return round(statistics.median(spent), 2)


class PlainLayer(torch.nn.Module):
    """A Llama layer of separate operations in bf16, as stacks without a compiler run it."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.norm_1, self.norm_2 = (torch.nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))

        def make(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False)

        self.q, self.out = make(hidden, hidden), make(hidden, hidden)
        self.k, self.v = (make(hidden, kv_heads * self.size) for _ in range(2))
        self.gate, self.up, self.down = make(hidden, ffn), make(hidden, ffn), make(ffn, hidden)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        y = self.norm_1(x)
        q, k = turn(self.q(y).view(b, s, -1, self.size), self.k(y).view(b, s, -1, self.size), turns)
        v = self.v(y).view(b, s, -1, self.size)
        again = self.heads // self.kv_heads
        k, v = (one.repeat_interleave(again, dim=2).transpose(1, 2) for one in (k, v))
        mixed = scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        y = self.norm_2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def turn(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> list[torch.Tensor]:
    """Rotary positions by complex numbers in float32."""
    found = []
    for one in (q, k):
        pairs = torch.view_as_complex(one.float().reshape(*one.shape[:-1], -1, 2))
        found.append(torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(one))
    return found


def measure_plain_layers(place: Place, scale: int) -> list[dict[str, Any]]:
    """Four layers of Llama's sizes, forward and backward, by kernel."""
    found = []
    kind = torch.bfloat16 if place.is_cuda else torch.float32
    for hidden, heads, kv_heads, ffn, b, s in (
        (4096, 32, 8, 14336, 1, 8192), (4096, 32, 8, 14336, 2, 4096), (2048, 16, 16, 5632, 4, 2048),
    ):  # fmt: skip
        sizes = (hidden // scale, heads // (scale // 2 or 1), max(1, kv_heads // scale))
        hidden_here, heads_here, kv_here = sizes
        layers = [
            PlainLayer(hidden_here, heads_here, kv_here, ffn // scale).to(place.device, kind)
            for _ in range(4)
        ]
        size = hidden_here // heads_here
        turns = torch.polar(
            torch.ones(s // scale, size // 2), torch.randn(s // scale, size // 2)
        ).to(place.device)
        x = torch.randn(b, s // scale, hidden_here, device=place.device, dtype=kind)

        def step(layers=layers, x=x, turns=turns) -> None:  # type: ignore[no-untyped-def]
            y = x.requires_grad_()
            for layer in layers:
                y = layer(y, turns)
            y.sum().backward()

        for _ in range(2):
            step()
        walls = []
        for _ in range(6):
            place.synchronize()
            start = time.perf_counter()
            step()
            place.synchronize()
            walls.append(1e3 * (time.perf_counter() - start))
        events = trace_events(place, step, NUM_TRACED_STEPS)
        found.append(
            {
                "sizes": [hidden, heads, kv_heads, ffn, b, s],
                "num_layers": len(layers),
                "step_ms": round(statistics.median(walls), 3),
                "kernels": events and measure_kernels(*events, NUM_TRACED_STEPS),
                "kernels_by_name": events and sum_by_name(events[0], only_nccl=False),
            }
        )
    return found


def reset_peak(place: Place) -> None:
    if place.is_cuda:
        torch.cuda.reset_peak_memory_stats()


def read_memory(place: Place, engine: Any) -> dict[str, int]:
    """Bytes of this rank; peaks are those since they were reset."""
    parameters = [one for stage in engine.stages.values() for one in stage.parameters()]
    states = [v for one in engine.optimizer.state.values() for v in one.values()]
    found = {"parameters": count_bytes(parameters), "optimizer": count_bytes(states)}
    if place.is_cuda:
        statistics_now = torch.cuda.memory_stats()
        found["peak_allocated"] = torch.cuda.max_memory_allocated()
        found["peak_requested"] = statistics_now["requested_bytes.all.peak"]
        found["peak_reserved"] = torch.cuda.max_memory_reserved()
        found["between_steps"] = torch.cuda.memory_allocated()
        # Made again by the next product; the peak had it.
        torch._C._cuda_clearCublasWorkspaces()
        found["workspace"] = found["between_steps"] - torch.cuda.memory_allocated()
    return found


def count_bytes(tensors: Any) -> int:
    """On this rank's device; states of FSDP2 are cut."""
    total = 0
    for one in tensors:
        if isinstance(one, torch.Tensor):
            local = one.to_local() if hasattr(one, "to_local") else one
            total += local.numel() * local.element_size() if local.dim() else 0
    return total


def follow_step(place: Place, engine: Any, tokens: torch.Tensor) -> list[list[Any]] | None:
    """Of one step by hand: what was allocated after each of its parts, and the peak in it."""
    if not place.is_cuda:
        return None
    rows: list[list[Any]] = []

    def note(part: str) -> None:
        torch.cuda.synchronize()
        rows.append([part, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()])
        torch.cuda.reset_peak_memory_stats()

    note("before")
    engine.begin_step()
    for index, microbatch in enumerate(tokens):
        engine.forward(index, microbatch[:, :-1], microbatch[:, 1:])
        note(f"forward {index}")
        engine.backward(index)
        note(f"backward {index}")
    engine.finish_step()
    note("update")
    return rows


def sum_by_name(events: Sequence[Mapping[str, Any]], *, only_nccl: bool) -> list[list[Any]]:
    """Name, how many, microseconds, the shortest, in all traced steps; the longest first."""
    found: dict[str, list[float]] = {}
    for event in events:
        is_wanted = event.get("cat") in DEVICE_WORK
        if is_wanted and (not only_nccl or "nccl" in event["name"].lower()):
            found.setdefault(event["name"][:MAX_NAME], []).append(event["dur"])
    rows = [[n, len(us), round(sum(us), 1), round(min(us), 2)] for n, us in found.items()]
    return sorted(rows, key=lambda row: -row[2])[:MAX_NAMES]


def record(
    place: Place, config: TrainConfig, mesh: Any, tokens: torch.Tensor, folder: Path, parcel: Path
) -> None:
    """The same program again as `meshscope train` records it. Collective."""
    import meshscope
    from meshscope.engine import Engine

    recorder = meshscope.start(folder / "run", layout=config.layout)
    recorder.set_config(config, "train", "the configuration of meshscope train")
    engine = Engine(config, mesh=mesh, device=place.device, recorder=recorder)
    for _ in range(NUM_RECORDED_STEPS):
        engine.train_step(tokens)
    place.synchronize()
    recorder.close()
    engine.close()
    place.meet()
    if place.rank == 0:
        pack(folder, parcel)


def show(name: str, result: dict[str, Any]) -> None:
    if FAILED_KEY in result or name == CONSTANTS or AGAIN in name:
        return
    peaks = [one.get("peak_allocated") for one in result["memory"]]
    peak = "-" if None in peaks else f"{max(peaks) / 2**20:.0f} MiB"
    middle = statistics.median(result["step_ms"])
    print(f"{name:26} {middle:8.2f} ms  {peak:>10}  ({result['seconds']} s)", flush=True)


# --- judging -------------------------------------------------------------------------------------


def compare_memory(config: TrainConfig, result: Mapping[str, Any]) -> dict[str, Any]:
    """Tensor bytes of each stage's fullest rank, measured and predicted."""
    from meshscope.core.config.memory_model import estimate_memory

    ranks = estimate_memory(config, device_type="cuda").ranks
    measured = [0] * len(ranks)
    for one in result["memory"]:
        size = one["peak_allocated"] - one["workspace"]
        measured[one["pp_rank"]] = max(measured[one["pp_rank"]], size)
    predicted = [rank.total_bytes for rank in ranks]
    ratios = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    return {
        "measured_mib": [round(one / 2**20, 1) for one in measured],
        "predicted_mib": [round(one / 2**20, 1) for one in predicted],
        "workspace_mib": round(max(one["workspace"] for one in result["memory"]) / 2**20, 1),
        "peak_error_percent": round(100 * (max(predicted) / max(measured) - 1), 2),
        "worst_stage_error_percent": round(100 * max(ratios, key=abs), 2),
    }


def make_part(config: TrainConfig) -> Any:
    """The job of a configuration; ranks that share the GPU have a part of it each, and every rank
    is a host of its own to NCCL."""
    from meshscope.plan.predict import make_device_job

    num_ranks = config.layout.world_size
    job: Any = make_device_job(config, device=DEVICE, num_gpus=num_ranks, per_node=1)
    device = job.cluster.device
    part = replace(
        device,
        flops_per_s={name: rate / num_ranks for name, rate in device.flops_per_s.items()},
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s / num_ranks,
    )
    return replace(job, cluster=replace(job.cluster, device=part))


def measure_case(name: str, result: Mapping[str, Any]) -> Any:
    """What constants are fitted to: step, compute, and lines by the kernels' names."""
    from meshscope.plan.memory.engine_layout import make_candidate, make_shape
    from meshscope.plan.timing.from_run import MeasuredRun, RecordedLayout

    config, steps = ALL_CASES[name], result["step_ms"]
    # Profiled steps take longer or shorter: shares of them carry over, not times.
    step_s = statistics.median(steps) / 1e3
    traced_s = statistics.median(row["wall"] for row in result["kernels_ms"]) / 1e3
    layout: Any = RecordedLayout(model=make_shape(config.model), candidate=make_candidate(config))
    lines: dict[str, float] = {}
    for axis, word in (("tp", "_bf16_"), ("dp", "_f32_")):
        spent = [
            sum(us for kernel, _, us, _ in rows if "nccl" in kernel and word in kernel)
            for rows in result["kernels_by_name"]
        ]
        if getattr(config.parallel, axis) > 1:
            lines[axis] = statistics.fmean(spent) / 1e6 / NUM_TRACED_STEPS * step_s / traced_s
    issue_s = result["issued_ms"] / 1e3
    if issue_s > HOST_BOUND * step_s:
        # Kernels of collectives wait for hosts that are late: they say nothing of links.
        lines.pop("tp", None)
    return MeasuredRun(
        layout=layout,
        step_s=step_s,
        issue_s=issue_s,
        compute_s=max(row["compute"] for row in result["kernels_ms"]) / 1e3,
        lines=lines,
        spread_ratio=(max(steps) - min(steps)) / 2 / statistics.median(steps),
        device=make_part(config).cluster.device,
    )


def judge_times(
    programs: Mapping[str, Any], kind: str, names: Sequence[str], start: Any
) -> tuple[dict[str, Any], Any]:
    """Step times of one kind of cases, with constants of two of them, and those constants.

    What two runs say nothing of stays as it was at the `start`: the time to issue a layer cannot be
    seen where ranks wait for messages, but one GPU's cases have the same host.
    """
    from meshscope.core.unavailable import Unavailable
    from meshscope.plan.memory.engine_layout import make_candidate
    from meshscope.plan.timing.from_run import fit_measured
    from meshscope.plan.timing.pricing import price_candidates

    calibration = CALIBRATION[kind]
    runs = [measure_case(name, programs[name]) for name in calibration]
    job = make_part(ALL_CASES[calibration[0]])
    job = job if start is None else replace(job, constants=start)
    job, said, _ = fit_measured(job, runs)
    rows = {}
    for name in names:
        candidate = make_candidate(ALL_CASES[name])
        if isinstance(candidate, Unavailable):
            continue  # its strategy is not one that the planner prices
        part = make_part(ALL_CASES[name])
        cluster = replace(
            job.cluster, device=part.cluster.device, num_devices=part.cluster.num_devices
        )
        own = replace(part, constants=job.constants, cluster=cluster)
        (found,) = price_candidates(own, [candidate])
        steps = programs[name]["step_ms"]
        low, _, high = statistics.quantiles(steps, n=20)[0::9]
        rows[name] = {
            "measured_ms": round(statistics.median(steps), 2),
            "spread_ms": round((high - low) / 2, 2),
            "predicted_ms": round(1e3 * found.step_s, 2),
            "error_percent": round(100 * (1e3 * found.step_s / statistics.median(steps) - 1), 1),
            "is_calibration": name in calibration,
        }
    judged = [row for row in rows.values() if not row["is_calibration"]]
    right, total = count_ordered(judged)
    errors = [abs(row["error_percent"]) for row in judged]
    return {
        "fitted": list(said),
        "layouts": rows,
        "judged": len(judged),
        f"within_{100 * GOAL_TIME:.0f}_percent": sum(e <= 100 * GOAL_TIME for e in errors),
        "mean_error_percent": round(statistics.fmean(errors), 1),
        "pairs_in_order": [right, total],
    }, job.constants


def join_rounds(programs: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, with the steps of all rounds, and the middle of what the busiest host took
    in each."""
    good = {name: one for name, one in programs.items() if FAILED_KEY not in one}
    found = {name: one for name, one in good.items() if AGAIN not in name}
    for case in found.keys() - {CONSTANTS}:
        rounds = [one for name, one in good.items() if name.partition(AGAIN)[0] == case]
        found[case] = {
            **found[case],
            "step_ms": [ms for one in rounds for ms in one["step_ms"]],
            "issued_ms": statistics.median(max(one["issue_ms"]) for one in rounds),
        }
    return found


def judge(path: Path, output: Path | None) -> None:
    measured = json.loads(path.read_text(encoding="utf-8"))
    programs = join_rounds(measured["programs"])
    cases = [name for name in ALL_CASES if name in programs]
    times, start = {}, None
    for kind, size in zip(CALIBRATION, (1, 4, 8), strict=True):
        names = [name for name in cases if ALL_CASES[name].layout.world_size == size]
        if not set(CALIBRATION[kind]) <= set(names):
            continue
        times[kind], constants = judge_times(programs, kind, names, start)
        start = start or constants
    memory = {name: compare_memory(ALL_CASES[name], programs[name]) for name in cases}
    errors = [abs(one["peak_error_percent"]) for one in memory.values()]
    found = {
        "machine": measured["machine"],
        "memory": {
            "layouts": memory,
            f"within_{100 * GOAL_MEMORY:.0f}_percent": sum(e <= 100 * GOAL_MEMORY for e in errors),
            "of": len(errors),
            "worst_percent": max(errors),
        },
        "time": times,
        "kernels_ms": {
            name: {part: statistics.fmean(row[part] for row in one["kernels_ms"])
                   for part in ("compute", "communication", "exposed", "idle", "wall")}
            for name, one in programs.items() if name in cases
        },
        "issue_ms": {name: programs[name]["issued_ms"] for name in cases},
        CONSTANTS: programs.get(CONSTANTS),
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.set_defaults(limit_s=235.0, task_limit_s=45.0)
    parser.add_argument("--steps", type=int, default=8, help="measured, after the first three")
    parser.add_argument("--held-out", action="store_true", help="HELD_OUT and what calibrates")
    parser.add_argument("--rounds", type=int, default=1, help="of step times, all cases in turn")
    parser.add_argument("--parcel", type=Path, help="recordings of what is calibrated on; a tar")
    parser.add_argument("--judge", type=Path, help="measurements; nothing is measured")
    options = parser.parse_args()
    if options.judge:
        judge(options.judge, options.output)
        return
    if is_rank():
        serve_rank(
            options.device, lambda place, name: measure(place, name, options.steps, options.parcel)
        )
        return
    known = [*CASES, CONSTANTS]
    if options.held_out:
        known = [*CALIBRATION["one GPU"], *CALIBRATION["4 NCCL ranks"], *HELD_OUT]
    names = choose(known, options.only)
    tasks = [
        Task(name=name, num_ranks=ALL_CASES[name].layout.world_size if name in ALL_CASES else 1)
        for name in names
    ]
    for number in range(2, options.rounds + 1):
        tasks += [
            replace(task, name=f"{task.name}{AGAIN}{number}")
            for task in tasks[: len(names)]
            if task.name in ALL_CASES
        ]
    run_jobs(tasks, options, show)


if __name__ == "__main__":
    main()
