"""The planner's step times against published ones of present stacks: MPT, torchtitan, Megatron-LM.

    python benchmarks/planner_published.py [-o benchmarks/results/planner_published.json]
    python benchmarks/planner_published.py --fit     # the cost of hidden communication, again

Presets of `meshscope plan` as they are. One constant was fitted on these rows: what communication
that compute hides costs (`overlap_cost_ratio`), on every second row of MPT, together with five that
are of MPT's software of 2023 and not shipped. All else is held out: the other rows of MPT, and all
of torchtitan and Megatron-LM. Numbers are tokens per second and GPU.

Sources: MPT, mosaicml/llm-foundry scripts/train/benchmarking/README.md (061f2c7). torchtitan,
pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md (31a17bf; H100 with 2.4 TB/s and 500
W), docs/performance.md (A100) and benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md (1af2937).
Megatron-LM, NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md (0a25f91), 25.09 and
25.11; whether layers are recomputed is not published and taken as none. `newer` rows were added
after all constants were set: the same project's 26.04.01 to 26.08 (067f987, the newest of each
model and system; MXFP8 counts as fp8), NeMo AutoModel docs/performance-summary.mdx (36044ad, FSDP2
in bf16) and torchtitan benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (b5bcd76, without async
TP). torchtitan's pipelines of 2024 have as many microbatches as ranks where nothing is said
(parallelisms/pipelining_utils.py at the benchmark's own commit, 9dec370).
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from meshscope.plan.candidate import Candidate
from meshscope.plan.cluster import make_cluster
from meshscope.plan.model.known_models import find_model
from meshscope.plan.model.model_shape import Experts, ModelShape
from meshscope.plan.recipe import make_recipe
from meshscope.plan.timing.calibration import EAGER, find_constants
from meshscope.plan.timing.fitting import _minimise
from meshscope.plan.timing.pricing import Job, price_candidates

H100, H200, A100, A100_40 = "H100-80GB", "H200", "A100-SXM4-80GB", "A100-SXM4-40GB"
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
"""Hidden size, heads, layers."""
MPT_ROWS = """
70b 2048 64 H 8 4 1 1039; 70b 2048 32 H 2 16 1 882; 30b 8192 8 H 1 21 1 1384
30b 4096 8 H 1 21 1 1802; 30b 2048 32 H 14 3 1 2308; 30b 2048 16 H 10 3 1 2263
30b 2048 8 H 3 21 1 2002; 30b 1024 8 H 6 21 1 2084; 13b 4096 8 H 10 3 1 4717
13b 2048 64 H 2 1 0 4800; 13b 2048 32 H 2 1 0 4811; 13b 2048 16 H 2 1 0 4767
13b 2048 8 H 2 1 0 4792; 13b 1024 8 H 40 3 1 5502; 7b 8192 8 H 8 2 1 6935
7b 4096 8 H 16 2 1 8611; 7b 2048 8 H 6 1 0 10643; 7b 1024 8 H 64 2 1 10203
3b 8192 8 H 3 6 0 16578; 3b 4096 8 H 5 6 0 20964; 3b 2048 64 H 6 3 0 22525
3b 2048 16 H 10 3 0 24142; 3b 1024 8 H 20 6 0 27046; 3b 512 8 H 40 6 0 27965
1b 8192 8 H 3 4 0 29157; 1b 4096 8 H 7 4 0 38535; 1b 2048 64 H 20 1 0 44402
1b 2048 8 H 14 1 0 45455; 1b 512 8 H 56 4 0 52275; 760m 8192 8 H 6 2 0 41825
760m 2048 32 H 24 1 0 67971; 760m 2048 8 H 24 2 0 63147; 760m 512 8 H 96 2 0 83749
70b 2048 64 A 8 4 1 410; 70b 2048 32 A 2 16 1 373; 30b 8192 8 A 1 21 1 574
30b 4096 8 A 1 21 1 814; 30b 2048 8 A 3 21 1 916; 30b 512 8 A 12 21 1 967
13b 4096 8 A 10 3 1 2060; 13b 2048 8 A 2 3 0 2262; 13b 1024 8 A 40 3 1 2330
7b 8192 8 A 8 2 1 3206; 7b 4096 8 A 16 2 1 3684; 7b 2048 8 A 6 2 0 4641
7b 1024 8 A 64 2 1 4357; 3b 8192 8 A 3 6 0 7695; 3b 2048 8 A 10 2 0 10811
3b 512 8 A 40 6 0 12127; 1b 8192 8 A 3 4 0 13814; 1b 2048 8 A 14 4 0 20513
1b 512 8 A 56 4 0 23148; 760m 8192 8 A 6 2 0 20933; 760m 2048 8 A 24 2 0 32434
350m 2048 8 A 32 2 0 58782; 125m 2048 8 A 32 2 0 141737; 70b 2048 128 a 4 1 1 376
70b 2048 64 a 2 1 1 276; 30b 2048 128 a 6 1 1 865; 13b 2048 128 a 16 1 1 1972
13b 2048 8 a 4 16 1 1668; 7b 2048 128 a 18 1 1 3623; 7b 2048 8 a 12 4 1 3679
3b 2048 128 a 6 1 0 9538
"""
"""Model, sequence, GPUs, device, microbatch, microbatches, recompute, tokens/s of a GPU. Those with
more than 8,192 tokens are left out: their attention is that of 2023's kernels."""
OLD_ATTENTION_RATIO = 0.35
"""Of an H100's peak: FlashAttention-2 by the measurements of arXiv 2407.08608."""
DEVICES = {"H": H100, "A": A100, "a": A100_40}

FSDP = {"zero_stage": 3, "recompute": "selective"}
FULL = {"zero_stage": 3, "recompute": "full", "sequence_parallel": True}
LOOPED = {"schedule": "interleaved_1f1b", "sequence_parallel": True, "zero_stage": 1}


@dataclass(frozen=True)
class Row:
    source: str
    name: str
    model: ModelShape
    device: str
    stack: str
    candidate: Candidate
    tokens_per_s: float
    precision: str | None = None
    cluster: dict = field(default_factory=dict)
    is_slow: bool = False
    """Whether its H100 are those with slower memory and 500 W."""

    @property
    def has_old_attention(self):
        """torch took FlashAttention-2 on Hopper in all of these runs of MPT, torchtitan and FMS
        (cuDNN's kernels came later, torchtitan 3b85aa3 and after)."""
        return self.device in (H100, H200) and self.source.removeprefix("newer ") in (
            "MPT", "torchtitan", "FMS",
        )  # fmt: skip

    @property
    def step_s(self):
        one = self.candidate
        tokens = one.global_batch_size * self.model.sequence_length
        return tokens / one.world_size / self.tokens_per_s


def list_mpt():
    rows = []
    for text in MPT_ROWS.replace("\n", ";").split(";"):
        if not text.strip():
            continue
        name, s, gpus, device, b, m, again, rate = text.split()
        h, heads, layers = MPT[name]
        model = ModelShape(
            name=f"mpt-{name}", vocab_size=50_368, num_layers=layers, hidden_size=h,
            num_heads=heads, num_kv_heads=heads, head_size=h // heads, ffn_hidden_size=4 * h,
            sequence_length=int(s), norm="layernorm", position="learned", activation="gelu",
            tie_embeddings=True,
        )  # fmt: skip
        candidate = Candidate(
            dp=int(gpus), microbatch_size=int(b), num_microbatches=int(m), zero_stage=3,
            recompute="full" if again == "1" else "none",
        )  # fmt: skip
        cluster = {} if device == "H" else {"between": "200GB/s"}
        label = f"mpt-{name} s{s} {gpus}×{DEVICES[device]} b{b}×{m}"
        rows.append(
            Row("MPT", label, model, DEVICES[device], "torchtitan", candidate, float(rate),
                cluster=cluster)
        )  # fmt: skip
    return rows


def list_torchtitan():
    small, middle, large = map(find_model, ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"))

    def make(name, model, stack, rate, precision=None, device=H100, s=8192, **chosen):
        shape = replace(model, sequence_length=s)
        is_slow = device == H100
        return Row("torchtitan", name, shape, device, stack, Candidate(**chosen), rate, precision,
                   is_slow=is_slow)  # fmt: skip

    plain, compiled = "torchtitan", "torchtitan-compile"
    two = {"microbatch_size": 2, **FSDP}
    pipeline = {"dp": 8, "tp": 8, "pp": 8, "microbatch_size": 4, "num_microbatches": 8, **FULL}
    return [
        make("8B fsdp8", small, plain, 5762, dp=8, **two),
        make("8B fsdp8 compiled", small, compiled, 6667, dp=8, **two),
        make("8B fsdp8 compiled fp8", small, compiled, 8532, "fp8", dp=8, **two),
        make("8B fsdp128", small, plain, 5605, dp=128, **two),
        make("8B fsdp128 compiled", small, compiled, 6514, dp=128, **two),
        make("8B 32k compiled fp8", small, compiled, 3890, "fp8", s=32768, dp=8, zero_stage=3,
             recompute="full"),
        make("8B 64k cp2 compiled fp8", small, compiled, 2540, "fp8", s=65536, dp=4, cp=2,
             zero_stage=3, recompute="full"),
        make("70B fsdp32 tp8 compiled fp8", middle, compiled, 829, "fp8", dp=32, tp=8,
             microbatch_size=16, **FULL),
        make("405B 1f1b compiled fp8", large, compiled, 100, "fp8", **pipeline),
        make("405B looped compiled fp8", large, compiled, 128, "fp8", schedule="interleaved_1f1b",
             chunks=2, **pipeline),
        make("8B fsdp64 A100", small, plain, 2973, device=A100, dp=64, **FSDP),
        make("70B fsdp64 A100", middle, plain, 331, device=A100, dp=64, zero_stage=3,
             recompute="full"),
        make("8B fsdp32 H200 compiled fp8", small, compiled, 10938, "fp8", H200, dp=32, **two),
        make("8B fsdp64 H200 compiled fp8", small, compiled, 10753, "fp8", H200, dp=64, **two),
    ]  # fmt: skip


def list_megatron():
    small, middle, large = map(find_model, ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"))
    deepseek = find_model("deepseek-v3")
    qwen_30, qwen_235 = (list_mixtures()[name] for name in ("qwen3-30b", "qwen3-235b"))

    def make(name, model, device, rate, precision="fp8", **chosen):
        return Row("Megatron-LM", f"{name} {device}", model, device, "megatron",
                   Candidate(**chosen), rate, precision)  # fmt: skip

    replicas = {"dp": 8, "microbatch_size": 2, "num_microbatches": 8, "zero_stage": 1}
    routed = {"zero_stage": 1, "schedule": "interleaved_1f1b"}
    return [
        make("8B fsdp", small, H100, 14451, dp=8, num_microbatches=16, zero_stage=3),
        make("70B tp4 pp8", middle, H100, 1602, dp=2, tp=4, pp=8, num_microbatches=64, chunks=5,
             **LOOPED),
        make("405B tp8 pp8 cp2", large, H100, 292, dp=8, tp=8, pp=8, cp=2, num_microbatches=64,
             chunks=8, **LOOPED),
        make("8B", small, "B200", 30624, **replicas),
        make("405B tp4 pp8 cp2", large, "B200", 661, dp=2, tp=4, pp=8, cp=2, num_microbatches=32,
             chunks=8, **LOOPED),
        make("8B", small, "GB200", 31508, **replicas),
        make("70B fsdp", middle, "GB200", 4312, dp=64, microbatch_size=2, num_microbatches=2,
             zero_stage=3),
        make("405B tp4 pp16", large, "GB200", 813, dp=4, tp=4, pp=16, num_microbatches=384,
             chunks=4, **LOOPED),
        make("DeepSeek-V3 pp4 ep64", deepseek, "GB200", 3139, "bf16", dp=64, pp=4, ep=64,
             num_microbatches=64, chunks=4, **routed),
        make("DeepSeek-V3 tp2 pp8 ep64", deepseek, H100, 1297, dp=64, tp=2, pp=8, ep=64,
             num_microbatches=128, chunks=4, **LOOPED),
        make("Qwen3-30B pp2 ep8", qwen_30, H100, 5275, dp=8, pp=2, ep=8, microbatch_size=2,
             num_microbatches=32, chunks=24, **routed),
        make("Qwen3-235B pp8 ep32", qwen_235, "GB200", 4916, "bf16", dp=32, pp=8, ep=32,
             num_microbatches=256, zero_stage=1),
    ]  # fmt: skip


NEWER_ROWS = """
llama-3-8b GB300 8 fp8 128 2 8192 1 1 1 0 1 1 37556; llama-3-70b GB300 64 fp8 256 2 8192 1 1 1 0 1 3 5248
llama-3-70b GB300 64 fp8 256 1 8192 1 4 1 5 1 1 4864; llama-3-70b GB200 64 fp8 256 2 8192 1 1 1 0 1 3 4224
llama-3-70b GB200 64 fp8 256 1 8192 2 4 1 5 1 1 3712; llama-3-70b H100 64 fp8 256 1 8192 4 8 1 5 1 1 1664
llama-3.1-405b GB300 256 fp8 1536 1 8192 4 8 1 4 1 1 1048
llama-3.1-405b GB300 256 fp8 1536 1 8192 2 8 2 4 1 1 952
llama-3.1-405b GB200 256 fp8 1536 1 8192 4 16 1 4 1 1 843
llama-3.1-405b H100 1024 fp8 1536 1 8192 8 8 2 8 1 1 326
deepseek-v3 GB300 256 fp8 4096 1 4096 1 2 1 8 32 1 6288
deepseek-v3 GB200 256 fp8 4096 1 4096 1 4 1 4 64 1 4912
deepseek-v3 B300 256 fp8 4096 2 4096 1 8 1 0 8 1 3541; deepseek-v3 B200 256 fp8 4096 1 4096 1 8 1 2 32 1 3328
gpt-oss-120b GB300 64 fp8 1280 4 4096 1 1 1 0 16 1 33024; gpt-oss-120b GB200 64 fp8 1280 4 4096 1 1 1 0 64 1 28672
gpt-oss-120b B300 64 fp8 1280 4 4096 1 1 1 0 8 1 18534; gpt-oss-120b GB300 64 bf16 1280 4 4096 1 1 1 0 64 1 19200
gpt-oss-120b GB200 64 bf16 1280 4 4096 1 1 1 0 64 1 16640; gpt-oss-120b B300 64 bf16 1280 4 4096 1 1 1 0 8 1 15232
gpt-oss-120b B200 64 bf16 1280 4 4096 1 1 1 0 8 1 13568; gpt-oss-120b H100 64 bf16 1280 1 4096 1 4 1 0 8 1 5824
qwen3-30b GB300 8 fp8 512 8 4096 1 1 1 0 8 1 44544; qwen3-30b GB200 8 fp8 512 4 4096 1 1 1 0 8 1 39936
qwen3-30b B300 8 fp8 512 8 4096 1 1 1 0 8 1 40769; qwen3-30b B200 8 fp8 512 4 4096 1 1 1 0 8 1 27136
qwen3-30b H100 16 fp8 1024 1 4096 1 1 1 0 16 1 8826; qwen3-235b GB300 256 fp8 8192 2 4096 1 4 1 12 32 1 8816
qwen3-235b GB200 256 fp8 8192 1 4096 1 8 1 3 32 1 7280; qwen3-235b B300 256 fp8 8192 2 4096 1 8 1 0 8 1 5936
qwen3-235b H100 256 fp8 8192 1 4096 2 8 1 4 32 1 1712; kimi-k2 GB300 256 fp8 4096 2 4096 1 4 1 4 64 1 5372
deepseek-v3 H100 256 bf16 512 1 4096 1 4 1 8 64 3 1002; qwen3-30b H100 8 bf16 512 4 4096 1 1 1 0 8 3 12040
gpt-oss-20b H100 8 bf16 256 2 4096 1 1 1 0 8 3 13058; gpt-oss-120b H100 64 bf16 512 2 4096 1 1 1 0 64 3 7626
llama-3-70b H100 64 bf16 128 1 8192 1 1 2 0 1 3 866.77
"""  # noqa: E501
"""Model, device, devices, precision, batch, microbatch, tokens, tp, pp, cp, chunks, ep, ZeRO,
tokens/s of a device; the last five are NeMo AutoModel's, ep and recompute by its configurations
(examples/llm_benchmark)."""
NUM_AUTOMODEL = 5


def list_newer():
    models, rows = list_mixtures(), []
    lines = [one for one in NEWER_ROWS.replace("\n", ";").split(";") if one.strip()]
    for index, line in enumerate(lines):
        name, device, *numbers = line.split()
        precision = numbers.pop(1)
        world, batch, size, tokens, tp, pp, cp, chunks, ep, zero, rate = map(float, numbers)
        dp = int(world / tp / pp / cp)
        is_megatron = index < len(lines) - NUM_AUTOMODEL
        is_recomputed = not is_megatron and not name.startswith("gpt-oss")
        candidate = Candidate(
            dp=dp, tp=int(tp), pp=int(pp), cp=int(cp), ep=int(ep), microbatch_size=int(size),
            num_microbatches=int(batch / dp / size), zero_stage=int(zero), chunks=int(chunks) or 1,
            schedule="interleaved_1f1b" if chunks else "1f1b", sequence_parallel=tp > 1,
            recompute="full" if is_recomputed else "none",
        )  # fmt: skip
        model = models.get(name) or find_model(name)
        rows.append(
            Row(
                "newer Megatron-LM" if is_megatron else "newer AutoModel",
                f"{name} {device} {precision} {candidate.describe()}",
                replace(model, sequence_length=int(tokens)), H100 if device == "H100" else device,
                "megatron", candidate, rate, precision,
            )
        )  # fmt: skip
    return [*rows, *list_newer_torchtitan()]


def list_mixtures():
    """Models that only published tables ask for."""
    qwen = {"vocab_size": 151_936, "num_kv_heads": 4, "head_size": 128, "sequence_length": 4096}
    oss = {
        "hidden_size": 2880, "num_heads": 64, "num_kv_heads": 8, "head_size": 64, "bias": True,
        "ffn_hidden_size": 2880, "vocab_size": 201_088, "sequence_length": 4096,
    }  # fmt: skip
    kimi = Experts(count=384, active=8, width=2048, num_shared=1, num_dense_layers=1)
    return {
        "qwen3-30b": ModelShape(
            num_layers=48, hidden_size=2048, num_heads=32, ffn_hidden_size=6144,
            experts=Experts(count=128, active=8, width=768), **qwen,
        ),
        "qwen3-235b": ModelShape(
            num_layers=94, hidden_size=4096, num_heads=64, ffn_hidden_size=12_288,
            experts=Experts(count=128, active=8, width=1536), **qwen,
        ),
        "gpt-oss-120b": ModelShape(
            num_layers=36, experts=Experts(count=128, active=4, width=2880), **oss
        ),
        "gpt-oss-20b": ModelShape(
            num_layers=24, experts=Experts(count=32, active=4, width=2880), **oss
        ),
        "kimi-k2": replace(
            find_model("deepseek-v3"), vocab_size=163_840, num_heads=64, num_kv_heads=64,
            experts=kimi,
        ),
    }  # fmt: skip


def list_newer_torchtitan():
    rows = []
    for name, model, rate, precision, chosen in (
        ("70B bf16", "llama-3-70b", 597.3, None, {"dp": 32, "microbatch_size": 16, **FULL}),
        ("70B fp8", "llama-3-70b", 809.8, "fp8", {"dp": 32, "microbatch_size": 16, **FULL}),
        ("8B bf16", "llama-3-8b", 4378, None, {"dp": 8, "microbatch_size": 12, **FSDP}),
        ("8B fp8", "llama-3-8b", 5078.1, "fp8", {"dp": 8, "microbatch_size": 12, **FSDP}),
    ):
        candidate = Candidate(tp=8, **{**chosen, "sequence_parallel": True})
        rows.append(
            Row("newer torchtitan", f"{name} {candidate.describe()}", find_model(model), H100,
                "torchtitan-compile", candidate, rate, precision, is_slow=True)
        )  # fmt: skip
    return rows


def list_rows():
    return [*list_mpt(), *list_torchtitan(), *list_megatron(), *list_newer()]


def predict(row, constants=None):
    """Seconds of a step. At 500 W of 700 clocks are lower by about the third root."""
    cluster = make_cluster(row.device, row.candidate.world_size, **row.cluster)
    own = constants or find_constants(row.stack, cluster.device.name)
    if constants is None and row.has_old_attention:
        own = replace(own, attention_ratio=OLD_ATTENTION_RATIO)
    if row.is_slow:
        clock = (500 / 700) ** (1 / 3)
        device = replace(cluster.device, bandwidth_bytes_per_s=2.4e12)
        cluster = replace(cluster, device=device, gemm_ratio=clock * cluster.gemm_ratio)
        own = replace(own, attention_ratio=clock * own.attention_ratio)
    job = Job(
        model=row.model, recipe=make_recipe(row.stack, row.precision), cluster=cluster,
        constants=own,
    )  # fmt: skip
    return price_candidates(job, [row.candidate])[0].step_s


def fit():
    """Names and values of what is fitted on every second row of MPT, and the error of the rest."""
    rows = list_mpt()
    names = ("overlap_cost_ratio", "gemm_half_size")
    origin = np.log([0.4, 45.0, 0.65, 0.8, 0.3, 0.5])

    def measure(part, point):
        overlap, half, *ratios = np.exp(point).tolist()
        found = []
        for row in part:
            is_hopper = row.device == H100
            constants = replace(
                EAGER, overlap_cost_ratio=overlap, gemm_half_size=half,
                gemm_ratio=ratios[0 if is_hopper else 1],
                attention_ratio=ratios[2 if is_hopper else 3],
            )  # fmt: skip
            found.append(predict(row, constants) / row.step_s)
        return np.array(found)

    def lose(point):
        error = np.abs(np.log(measure(rows[::2], point)))
        return float(np.mean(np.minimum(error, 0.4)) + 0.002 * np.mean((point - origin) ** 2))

    best = _minimise(lose, origin, 120)
    errors = [float(np.abs(measure(part, best) - 1).mean()) for part in (rows[::2], rows[1::2])]
    found = dict(zip((*names, "gemm H100", "gemm A100", "attention H100", "attention A100"),
                     np.exp(best).round(3).tolist(), strict=True))  # fmt: skip
    return {"fitted": found, "mape_percent": [round(100 * one, 2) for one in errors]}


def judge():
    return summarize(list_rows())


def summarize(rows):
    """Predicted over published steps, by source and device and one by one."""
    groups, shown = defaultdict(list), {}
    for row in rows:
        ratio = predict(row) / row.step_s
        groups[row.source, row.device].append(ratio)
        shown[f"{row.source}: {row.name}"] = {
            "published_s": round(row.step_s, 3), "predicted_over_published": round(ratio, 3),
        }  # fmt: skip
    ratios = np.array([ratio for one in groups.values() for ratio in one])
    width = find_constants("megatron").interval_ratio
    return {
        "groups": {
            " ".join(key): {
                "rows": len(one),
                "mean_ratio": round(float(np.mean(one)), 3),
                "mape_percent": round(100 * float(np.mean(np.abs(np.array(one) - 1))), 1),
            }
            for key, one in groups.items()
        },
        "rows": len(ratios),
        "within_the_interval": int(((ratios <= 1 + width) & (ratios >= 1 / (1 + width))).sum()),
        "each": shown,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit again instead of judging")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    text = json.dumps(fit() if given.fit else judge(), indent=1, ensure_ascii=False)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
