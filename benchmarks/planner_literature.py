"""The planner's step times and memory against tables that nobody looked at while it was made.

    python benchmarks/planner_literature.py [-o benchmarks/results/planner_literature.json]

Rows were written down and committed before the planner was run on them; nothing is fitted on them.
Presets as they are, by `planner_published.predict`. Step times, in tokens per second and GPU:

- NeMo: docs/source/performance/performance_summary.md of NVIDIA/NeMo (070a0bb, container 24.07,
  DGX H100, fp8), and the same page of 25.02 (B200) and 25.04 (GB200) without models and layouts
  that `planner_published.py` has. Whether layers are recomputed is not published: taken as none.
- NeMo recipe: Nemotron-4 340B in bf16 on 128 H100, 4.77 s (NVIDIA's DGX Cloud benchmark, 24.11).
- FMS: foundation-model-stack/fms-fsdp README (0d31998) and pytorch.org's "Maximizing training
  throughput using PyTorch FSDP" (13 March 2024), not compiled, FlashAttention-2; its 13B with every
  nth layer recomputed is left out, since n is not published.
- Zero Bubble: arXiv 2401.10241, tables 3 and 4, least and most microbatches: 1F1B and ZB-1p, which
  is `zb_h1` with another order; the first and the last stage have a layer less. 1F1B-I is left out:
  its first and last chunk have no layer at all. Rows first said present Megatron-LM, with a fused
  attention; the paper counts scores in memory (section 4.2: sbh(34 + 5as/h) of a layer), which
  was looked up when predicted peaks came out at half.
- BLOOM: arXiv 2211.05100 and its training chronicles: 150 TFLOP/s by Megatron-LM's formula with
  recompute. GPT-NeoX-20B: arXiv 2204.06745 (150,000 steps in 1,830 hours).
- Nemotron-4 340B: its report's table 2. Megatron-LM PTD-P: arXiv 2104.04473, table 2. MegaScale's
  Megatron-LM: arXiv 2402.15627, table 2. TinyLlama: its README. These four are written down from
  memory, without the text at hand, but for Nemotron's 8.0 s.

Memory: the peaks of table 4 of the Zero Bubble paper, in GB.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from planner_published import A100, A100_40, H100, Row, summarize

from meshscope.plan.candidate import Candidate
from meshscope.plan.memory.memory import estimate_ranks
from meshscope.plan.model.known_models import find_model, make_gpt
from meshscope.plan.model.model_shape import ModelShape
from meshscope.plan.recipe import make_recipe

# Model, device, GPUs, batch, microbatch, tokens, tp, pp, cp, chunks, ep, ZeRO, tokens/s of a GPU.
NEMO_ROWS = """
gpt-5b H100 64 2048 4 2048 1 1 1 0 1 1 22521
gpt-20b H100 64 256 2 2048 2 1 1 0 1 1 5851
gpt-175b H100 128 256 1 2048 4 8 1 6 1 1 726
gpt-175b H100 512 2048 2 2048 4 8 1 6 1 1 782
llama-2-7b H100 8 128 1 4096 1 1 1 0 1 1 16847
llama-2-13b H100 16 128 1 4096 1 4 1 10 1 1 8646
llama-2-70b H100 64 128 1 4096 4 4 1 20 1 1 1707
nemotron-8b H100 64 256 4 4096 2 1 1 0 1 1 12701
nemotron-22b H100 64 256 2 4096 2 4 1 10 1 1 4256
nemotron-340b H100 128 32 1 4096 8 8 1 12 1 1 322
llama-3-8b H100 8 128 1 8192 1 1 2 0 1 1 12036
llama-3-70b H100 64 128 1 8192 4 4 2 5 1 1 1533
gpt-175b B200 512 2048 2 2048 4 4 1 6 1 1 1600
llama-3-70b B200 64 128 1 8192 2 4 2 5 1 1 3062
nemotron-15b B200 64 256 2 4096 1 1 1 0 1 1 14760
nemotron-340b B200 128 32 1 4096 8 4 1 12 1 1 602
mixtral-8x7b B200 64 256 2 4096 1 1 1 0 8 1 15457
mixtral-8x22b B200 256 64 1 65536 2 4 8 14 8 1 2232
gpt-175b GB200 128 256 2 2048 4 4 1 12 1 1 1804
llama-3.1-405b GB200 128 64 1 8192 4 8 2 8 1 1 665
nemotron-15b GB200 64 256 2 4096 1 1 1 0 1 1 17809
nemotron-340b GB200 128 32 1 4096 8 4 1 12 1 1 737
mixtral-8x7b GB200 64 256 2 4096 1 1 1 0 8 1 19275
mixtral-8x22b GB200 256 64 1 65536 2 4 8 14 8 1 2731
"""

# Model, device, GPUs, microbatch, recompute, ranks that weights are cut over, tokens/s of a GPU.
FMS_ROWS = """
7b A100 128 2 none 8 3760; 13b A100 128 1 none 8 1700; 34b A100 128 8 full 128 772
70b A100 128 6 full 128 380; 34b A100 128 2 full 128 700; 70b A100 128 2 full 128 370
7b H100 96 2 none 96 7500; 34b H100 96 2 full 96 1550; 70b H100 96 2 full 96 800
"""

# Layers, heads, hidden size, pp, microbatch, microbatches, then samples per second and GPU of 1F1B
# and of ZB-1p, and the peak memory of both in GB.
ZERO_BUBBLE_ROWS = """
22 24 2304 8 6 24 11.8 12.9 30 32; 22 24 2304 8 6 64 13.6 14.2 30 32
30 32 4096 8 3 24 3.50 3.88 39 42; 30 32 4096 8 3 64 4.03 4.20 39 42
46 40 5120 16 1 48 1.40 1.61 32 33; 46 40 5120 16 1 128 1.64 1.76 32 33
62 48 6144 32 1 96 0.76 0.87 43 44; 62 48 6144 32 1 256 0.88 0.96 43 44
"""


def list_models():
    """Models that no preset has, by their published shapes."""

    def nemotron(name, hidden, layers, heads, kv_heads):
        return ModelShape(
            name=name, vocab_size=256_000, num_layers=layers, hidden_size=hidden, num_heads=heads,
            num_kv_heads=kv_heads, head_size=hidden // heads, ffn_hidden_size=4 * hidden,
            sequence_length=4096, norm="layernorm", activation="gelu",
        )  # fmt: skip

    def llama_2(name, hidden, layers, heads, kv_heads, inner):
        return ModelShape(
            name=name, vocab_size=32_000, num_layers=layers, hidden_size=hidden, num_heads=heads,
            num_kv_heads=kv_heads, head_size=128, ffn_hidden_size=inner, sequence_length=4096,
        )  # fmt: skip

    mixtral = find_model("mixtral-8x7b")
    models = [
        make_gpt("gpt-5b", hidden_size=4096, num_layers=24, num_heads=32),
        make_gpt("gpt-20b", hidden_size=6144, num_layers=44, num_heads=48),
        nemotron("nemotron-8b", 4096, 32, 32, 32),
        nemotron("nemotron-15b", 6144, 32, 48, 8),
        nemotron("nemotron-22b", 6144, 40, 48, 48),
        nemotron("nemotron-340b", 18_432, 96, 96, 8),
        llama_2("llama-2-7b", 4096, 32, 32, 32, 11_008),
        llama_2("llama-2-13b", 5120, 40, 40, 40, 13_824),
        llama_2("llama-2-34b", 8192, 48, 64, 8, 22_016),
        llama_2("llama-2-70b", 8192, 80, 64, 8, 28_672),
        replace(
            mixtral, name="mixtral-8x22b", num_layers=56, hidden_size=6144, num_heads=48,
            ffn_hidden_size=16_384, experts=replace(mixtral.experts, width=16_384),
        ),
    ]  # fmt: skip
    return {model.name: model for model in models}


def list_nemo():
    models, rows = list_models(), []
    for line in filter(None, NEMO_ROWS.split("\n")):
        name, device, *numbers = line.split()
        world, batch, size, tokens, tp, pp, cp, chunks, ep, zero, rate = map(int, numbers)
        dp = world // (tp * pp * cp)
        candidate = Candidate(
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, microbatch_size=size,
            num_microbatches=batch // (dp * size), zero_stage=zero, chunks=chunks or 1,
            schedule="interleaved_1f1b" if chunks else "1f1b", sequence_parallel=tp > 1,
        )  # fmt: skip
        model = replace(models.get(name) or find_model(name), sequence_length=tokens)
        device = H100 if device == "H100" else device
        label = f"{name} {world}×{device} {candidate.describe()}"
        rows.append(Row("NeMo", label, model, device, "megatron", candidate, rate, "fp8"))
    recipe = Candidate(
        dp=2, tp=8, pp=8, num_microbatches=16, chunks=12, zero_stage=1, sequence_parallel=True,
        schedule="interleaved_1f1b",
    )  # fmt: skip
    large = models["nemotron-340b"]
    return [*rows, make_timed("NeMo recipe", large, H100, "megatron", recipe, 4.77)]


def make_timed(source, model, device, stack, candidate, step_s, **more):
    """A row of which seconds of a step are published."""
    tokens = candidate.global_batch_size * model.sequence_length
    label = f"{model.name} {candidate.world_size}×{device} {candidate.describe()}"
    rate = tokens / candidate.world_size / step_s
    return Row(source, label, model, device, stack, candidate, rate, **more)


def list_fms():
    models, rows = list_models(), []
    for line in FMS_ROWS.replace("\n", ";").split(";"):
        if not line.strip():
            continue
        size, device, world, microbatch, again, shards, rate = line.split()
        candidate = Candidate(
            dp=int(world), microbatch_size=int(microbatch), zero_stage=3, recompute=again,
            shard_size=None if shards == world else int(shards),
        )  # fmt: skip
        node = {"between": "50GB/s" if device == "A100" else "100GB/s"}
        device = A100 if device == "A100" else H100
        label = f"{size} {world}×{device} {candidate.describe()}"
        rows.append(
            Row("FMS", label, models[f"llama-2-{size}"], device, "torchtitan", candidate,
                float(rate), cluster=node)
        )  # fmt: skip
    return rows


def list_zero_bubble():
    """Rows, and their peaks in bytes."""
    rows, peaks = [], []
    for line in ZERO_BUBBLE_ROWS.replace("\n", ";").split(";"):
        if not line.strip():
            continue
        layers, heads, hidden, pp, size, number, *rates = line.split()
        inner = (int(layers) + 2) // int(pp)
        model = make_gpt(
            f"gpt-{layers}×{hidden}", hidden_size=int(hidden), num_layers=int(layers),
            num_heads=int(heads), sequence_length=1024,
        )  # fmt: skip
        for schedule, rate, peak in zip(("1f1b", "zb_h1"), rates, rates[2:], strict=False):
            candidate = Candidate(
                pp=int(pp), microbatch_size=int(size), num_microbatches=int(number),
                schedule=schedule, stage_sizes=(inner - 1, *[inner] * (int(pp) - 2), inner - 1),
            )  # fmt: skip
            label = f"{model.name} m{number} {candidate.describe()}"
            rows.append(
                Row(
                    "Zero Bubble",
                    label,
                    model,
                    A100,
                    "megatron-2021",
                    candidate,
                    1024 * float(rate),
                )
            )
            peaks.append(1e9 * float(peak))
    return rows, peaks


def time_megatron(model, batch, num_gpus, rate_flops_per_s):
    """Seconds of a step by Megatron-LM's formula with full recompute (arXiv 2104.04473)."""
    s, h, layers, vocab = (
        model.sequence_length, model.hidden_size, model.num_layers, model.vocab_size,
    )  # fmt: skip
    flops = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flops / num_gpus / rate_flops_per_s


def list_old():
    """Runs of Megatron-LM of 2021 and 2022, all layers recomputed."""
    bloom = make_gpt(
        "bloom-176b", hidden_size=14_336, num_layers=70, num_heads=112, vocab_size=250_880
    )
    neox = replace(
        make_gpt("gpt-neox-20b", hidden_size=6144, num_layers=44, num_heads=64, vocab_size=50_432),
        position="rope", tie_embeddings=False,
    )  # fmt: skip
    again = {"recompute": "full"}
    laid = Candidate(
        dp=8, tp=4, pp=12, microbatch_size=2, num_microbatches=128, zero_stage=1,
        stage_sizes=(5, *[6] * 10, 5), **again,
    )  # fmt: skip
    old = "megatron-2021"
    seconds = time_megatron(bloom, 2048, 384, 150e12)
    rows = [
        make_timed("BLOOM", bloom, A100, old, laid, seconds, cluster={"between": "50GB/s"}),
        make_timed(
            "GPT-NeoX", neox, A100_40, old,
            Candidate(dp=12, tp=2, pp=4, microbatch_size=4, num_microbatches=32, zero_stage=1,
                      **again),
            1830 * 3600 / 150_000, cluster={"num_adapters": 4},
        ),
    ]  # fmt: skip
    for name, heads, pp, batch, measured in (
        ("gpt-175b", 96, 12, 1536, {384: 153, 768: 149, 1536: 141}),
        ("gpt-530b", 128, 35, 2240, {560: 171, 1120: 167, 2240: 159}),
    ):
        model = find_model(name)
        assert model.num_heads == heads
        for world, teraflops in measured.items():
            dp = world // (8 * pp)
            candidate = Candidate(
                dp=dp, tp=8, pp=pp, num_microbatches=batch // dp, recompute="full"
            )
            step_s = time_megatron(model, batch, world, 1e12 * teraflops)
            rows.append(make_timed("PTD-P", model, A100, old, candidate, step_s))
    return rows


def list_reports():
    """Of present stacks."""
    rows = []
    looped = {
        "tp": 8, "schedule": "interleaved_1f1b", "sequence_parallel": True, "zero_stage": 1,
    }  # fmt: skip
    large = list_models()["nemotron-340b"]
    for dp, batch, step_s in ((16, 768, 10.3), (32, 1536, 10.3), (64, 2304, 8.0)):
        candidate = Candidate(dp=dp, pp=12, num_microbatches=batch // dp, chunks=8, **looped)
        rows.append(make_timed("Nemotron-4", large, H100, "megatron", candidate, step_s))
    gpt = make_gpt("gpt-175b", hidden_size=12_288, num_layers=96, num_heads=128, vocab_size=64_000)
    for world, batch, step_s in (
        (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9), (3072, 6144, 29.02),
        (6144, 6144, 14.78), (8192, 6144, 12.24),
    ):  # fmt: skip
        dp = world // 64
        candidate = Candidate(dp=dp, pp=8, num_microbatches=batch // dp, chunks=6, **looped)
        rows.append(make_timed("MegaScale", gpt, A100, "megatron", candidate, step_s))
    tiny = ModelShape(
        name="tinyllama-1.1b", vocab_size=32_000, num_layers=22, hidden_size=2048, num_heads=32,
        num_kv_heads=4, head_size=64, ffn_hidden_size=5632, sequence_length=2048,
    )  # fmt: skip
    candidate = Candidate(dp=16, microbatch_size=8, num_microbatches=8, zero_stage=3)
    label = f"{tiny.name} {candidate.describe()}"
    rows.append(Row("TinyLlama", label, tiny, A100_40, "torchtitan-compile", candidate, 24_000.0))
    return rows


def list_all():
    return [*list_nemo(), *list_fms(), *list_zero_bubble()[0], *list_old(), *list_reports()]


def judge_memory(rows, peaks):
    """Predicted over published peaks, of the fullest rank."""
    found = {}
    for row, peak in zip(rows, peaks, strict=True):
        ranks = estimate_ranks(row.model, row.candidate, make_recipe(row.stack, row.precision))
        predicted = max(rank.total_bytes for rank in ranks)
        found[row.name] = {
            "published_gb": round(peak / 1e9, 1), "predicted_over_published": predicted / peak,
        }  # fmt: skip
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    pipelines, peaks = list_zero_bubble()
    found = summarize(list_all())
    found["memory"] = judge_memory(pipelines, peaks)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
