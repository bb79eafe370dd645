"""The planner's memory against published tables and closed forms nobody here chose."""

from dataclasses import replace

import pytest

from meshscope.core.config.layer_memory import count_published_layer_bytes
from meshscope.plan.candidate import Candidate
from meshscope.plan.memory.memory import estimate_ranks, make_layer_shape, measure_layer
from meshscope.plan.model.known_models import find_model, make_gpt
from meshscope.plan.recipe import make_recipe

GIB = 2**30
PAPER = make_recipe("megatron-2021")

PUBLISHED = [
    # Korthikanti et al., arXiv 2205.05198: GiB of none and of sequence parallel + selective;
    # percents of none: sequence parallel, selective, both, full.
    ("gpt-22b", Candidate(tp=8, microbatch_size=4), (59.25, 9.56), (66.84, 49.42, 16.18, 7.64)),
    (
        "gpt-175b",
        Candidate(tp=8, pp=8, num_microbatches=64, schedule="interleaved_1f1b", chunks=3),
        (66.84, 12.35),
        (62.04, 56.53, 18.49, 8.71),
    ),
]


def measure_activations(name, candidate, recompute, *, sequence_parallel):
    made = replace(candidate, recompute=recompute, sequence_parallel=sequence_parallel)
    return estimate_ranks(find_model(name), made, PAPER)[0].activations_bytes


@pytest.mark.parametrize(("name", "candidate", "gib", "percents"), PUBLISHED)
def test_activations_are_those_of_the_published_table(name, candidate, gib, percents):
    none = measure_activations(name, candidate, "none", sequence_parallel=False)
    ways = [("none", True), ("selective", False), ("selective", True), ("full", False)]
    found = [
        measure_activations(name, candidate, recompute, sequence_parallel=sp)
        for recompute, sp in ways
    ]
    assert none / GIB == pytest.approx(gib[0], abs=0.1)
    assert found[2] / GIB == pytest.approx(gib[1], abs=0.1)
    assert [100 * one / none for one in found] == pytest.approx(percents, abs=0.2)


@pytest.mark.parametrize(("name", "candidate", "gib", "percents"), PUBLISHED)
def test_states_are_those_of_the_published_table(name, candidate, gib, percents):
    """The table counts layers only; a middle stage of 175B has nothing else."""
    model = find_model(name)
    layers = model.num_layers * model.count_layer(tp=candidate.tp) / candidate.pp
    assert layers * PAPER.state_bytes / GIB == pytest.approx(45.56, rel=0.01)
    if candidate.pp > 1:
        middle = estimate_ranks(model, candidate, PAPER)[3]
        states = (
            middle.parameters_bytes
            + middle.gradients_bytes
            + middle.optimizer_bytes
            + middle.master_bytes
        )
        assert states / GIB == pytest.approx(45.56, rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_keeps_what_the_published_formula_says(recompute, sequence_parallel):
    model = find_model("gpt-22b")
    candidate = Candidate(tp=8, microbatch_size=2, sequence_parallel=sequence_parallel)
    shape = make_layer_shape(model, candidate, PAPER)
    kept, _ = measure_layer(shape, recompute, "attention", is_cast_kept=True)
    published = count_published_layer_bytes(
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        sequence_length=model.sequence_length,
        microbatch_size=2,
        tp=8,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    if recompute == "full" and sequence_parallel:
        published /= 8  # the formula keeps the whole input, sequence parallel a part of it
    assert kept == pytest.approx(published, rel=0.002)


@pytest.mark.parametrize(
    ("zero_stage", "bytes_each"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)]
)
def test_zero_stages_cut_what_the_paper_says(zero_stage, bytes_each):
    """ZeRO (arXiv 1910.02054): 7.5 B parameters on 64 ranks, 120, 31.4, 16.6 and 1.9 GB."""
    assert count_state_bytes(64, zero_stage) == pytest.approx(bytes_each, rel=1e-6)


def count_state_bytes(dp, zero_stage):
    """Of each parameter, without the layers that are gathered for a while."""
    model = find_model("llama-3-8b")
    recipe = make_recipe("megatron", "bf16-grads")
    rank = estimate_ranks(model, Candidate(dp=dp, zero_stage=zero_stage), recipe)[0]
    states = rank.parameters_bytes + rank.optimizer_bytes + rank.master_bytes
    whole_layer = 2 * model.count_layer() if zero_stage >= 2 else 0
    return (states + rank.gradients_bytes - whole_layer) / model.num_parameters


@pytest.mark.parametrize(
    ("zero_stage", "gigabytes"),
    [
        (1, (52.5, 35.6, 31.4, 30.4, 30.1)),
        (2, (41.3, 21.6, 16.6, 15.4, 15.1)),
        (3, (30, 7.5, 1.88, 0.47, 0.12)),
    ],
)
def test_states_are_those_of_zeros_table(zero_stage, gigabytes):
    """Table 1 of arXiv 1910.02054, in rounded numbers: 7.5 B parameters on 4 to 1,024 ranks."""
    found = [7.5 * count_state_bytes(dp, zero_stage) for dp in (4, 16, 64, 256, 1024)]
    assert found == pytest.approx(gigabytes, rel=0.01, abs=0.005)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("gpt2-xl", 1.558, None),
        ("llama-2-7b", 6.738, None),
        ("llama-3-8b", 8.030, None),
        ("llama-3-70b", 70.554, None),
        ("llama-3.1-405b", 405.853, None),
        ("mixtral-8x7b", 46.7, 12.9),
        ("deepseek-v3", 671.0, 37.0),
        ("gpt-175b", 174.6, None),
        ("gpt-530b", 529.6, None),
        ("gpt-1t", 1008.0, None),
    ],
)
def test_models_have_as_many_parameters_as_published(name, billions, active):
    model = find_model(name)
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    if active is not None:
        assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=0.015)


def test_stages_hold_all_parameters_once():
    model = find_model("deepseek-v3")
    counts = model.count_stages(8, None, tp=1, ep=1)
    assert sum(dense + routed for dense, routed in counts) == model.num_parameters
    uneven = (10, 9, 8, 8, 8, 8, 5, 5)
    counts = model.count_stages(8, uneven, tp=1, ep=1)
    assert sum(dense + routed for dense, routed in counts) == model.num_parameters
    sizes = [routed for _, routed in counts]
    assert sizes[0] < sizes[1]  # the first three layers have no experts


def test_expert_parallel_cuts_routed_experts_only():
    model = find_model("mixtral-8x7b")
    (dense, routed), (same, eighth) = (
        model.split_parameters(range(1), tp=1, ep=ep) for ep in (1, 8)
    )
    assert same == dense
    assert eighth * 8 == routed


def test_recompute_keeps_less_the_more_it_makes_again():
    model, recipe = find_model("llama-3-8b"), make_recipe("torchtitan")
    kept = [
        estimate_ranks(
            model, Candidate(dp=8, zero_stage=3, microbatch_size=2, recompute=one), recipe
        )[0]
        for one in ("none", "selective", "full", "every-4", "offload")
    ]
    sizes = [rank.activations_bytes for rank in kept]
    assert sizes == sorted(sizes, reverse=True)
    assert kept[-1].offloaded_bytes == sizes[2]
    assert kept[3].workspace_bytes > kept[2].workspace_bytes


PER_RANK = {"zero_stage": 3, "recompute": "selective", "microbatch_size": 2}
FULL = {"zero_stage": 3, "recompute": "full"}
PIPELINE = {"dp": 8, "tp": 8, "pp": 8, "sequence_parallel": True, **FULL}
TORCHTITAN = [
    # benchmarks/llama3_h100_202412_torchtitan.md: GiB reserved, and how far off we may be.
    ("llama-3-8b", 8192, Candidate(dp=8, **PER_RANK), "", 82.4),
    ("llama-3-8b", 8192, Candidate(dp=8, **PER_RANK), "compile", 77.0),
    ("llama-3-8b", 8192, Candidate(dp=8, **PER_RANK), "compile fp8", 76.8),
    ("llama-3-8b", 8192, Candidate(dp=128, **PER_RANK), "", 67.0),
    ("llama-3-8b", 8192, Candidate(dp=128, **PER_RANK), "compile", 62.0),
    ("llama-3-8b", 32768, Candidate(dp=8, **FULL), "compile fp8", 83.9),
    ("llama-3-8b", 65536, Candidate(dp=4, cp=2, **FULL), "compile fp8", 84.2),
    (
        "llama-3.1-405b", 8192, Candidate(microbatch_size=4, num_microbatches=8, **PIPELINE),
        "compile fp8", 82.5,
    ),
    (
        "llama-3.1-405b", 8192,
        Candidate(
            microbatch_size=4, num_microbatches=8, schedule="interleaved_1f1b", chunks=2,
            **PIPELINE,
        ),
        "compile fp8", 72.7,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "length", "candidate", "how", "gib"), TORCHTITAN)
def test_torchtitan_peaks_near_its_published_memory(name, length, candidate, how, gib):
    """Of 8B and 405B; not fitted. 70B on 256 GPUs is 14 % low and not here."""
    recipe = make_recipe(
        "torchtitan-compile" if "compile" in how else "torchtitan", "fp8" if "fp8" in how else None
    )
    model = replace(find_model(name), sequence_length=length)
    most = max(rank.total_bytes for rank in estimate_ranks(model, candidate, recipe))
    assert most / GIB == pytest.approx(gib, rel=0.08)


def test_categories_sum_to_the_total():
    rank = estimate_ranks(find_model("gpt-22b"), Candidate(tp=8, dp=2), PAPER)[0]
    assert rank.total_bytes == (rank.tensor_bytes + rank.context_bytes + rank.fragmentation_bytes)
    assert rank.fragmentation_bytes == round(0.03 * rank.tensor_bytes)


@pytest.mark.parametrize(
    ("layers", "heads", "hidden", "pp", "size", "gigabytes"),
    [
        (22, 24, 2304, 8, 6, (30, 32)),
        (30, 32, 4096, 8, 3, (39, 42)),
        (46, 40, 5120, 16, 1, (32, 33)),
        (62, 48, 6144, 32, 1, (43, 44)),
    ],
)
def test_peaks_of_the_zero_bubble_paper(layers, heads, hidden, pp, size, gigabytes):
    """Arxiv 2401.10241, table 4, 1F1B and ZB-1p: within 15 %, allowances included. Between the two
    parts of a backward a layer keeps 32sbh instead of sbh(34 + 5as/h)."""
    model = make_gpt(
        "gpt", hidden_size=hidden, num_layers=layers, num_heads=heads, sequence_length=1024
    )
    inner = (layers + 2) // pp
    sizes = (inner - 1, *[inner] * (pp - 2), inner - 1)
    for schedule, published in zip(("1f1b", "zb_h1"), gigabytes, strict=True):
        candidate = Candidate(
            pp=pp, microbatch_size=size, num_microbatches=3 * pp, schedule=schedule,
            stage_sizes=sizes,
        )  # fmt: skip
        ranks = estimate_ranks(model, candidate, make_recipe("megatron-2021"))
        assert max(rank.total_bytes for rank in ranks) / 1e9 == pytest.approx(published, rel=0.15)
