"""The estimate against published tables, against what autograd keeps, and against itself."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from meshscope.core.config.layer_memory import (
    LayerShape,
    count_published_layer_bytes,
    estimate_stage,
    find_peak_bytes,
)
from meshscope.core.config.memory_model import estimate_memory
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.schedule import Action, count_peak_activations
from meshscope.core.schedule_builders import BUILDERS, build_schedule
from meshscope.engine.config.toml_file import from_document
from meshscope.engine.memory.strategy import make_memory_strategy
from meshscope.engine.model.transformer import build_stage

GIB = 2**30

LLAMA = ModelConfig(
    vocab_size=500,
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=192,
    sequence_length=32,
)
GPT = ModelConfig(
    vocab_size=300,
    num_layers=3,
    hidden_size=96,
    num_heads=6,
    num_kv_heads=6,
    ffn_hidden_size=384,
    sequence_length=24,
    norm="layernorm",
    position="learned",
    activation="gelu",
    bias=True,
    tie_embeddings=True,
)


def measure_kept_bytes(stage, x, targets=None, dtype=None):
    """What autograd keeps of one forward, each storage once, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in [*stage.parameters(), *stage.buffers()]}
    kept, held = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # or its memory would be used again
        return tensor

    cast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        stage(x) if targets is None else stage(x, targets)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("model", "percents", "gib"),
    [
        # Korthikanti et al., arXiv 2205.05198: hidden, layers held, heads, batch; then of "none":
        # sequence parallel, selective, both, full; and GiB of none and of both.
        ((6144, 48, 64, 4), (66.84, 49.42, 16.18, 7.64), (59.25, 9.56)),
        ((12288, 96 * (1 + 7 / 24), 96, 1), (62.04, 56.53, 18.49, 8.71), (66.84, 12.35)),
    ],
)
def test_published_formulas_give_the_published_table(model, percents, gib):
    hidden_size, num_layers, num_heads, microbatch_size = model

    def count(**options):
        return num_layers * count_published_layer_bytes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            sequence_length=2048,
            microbatch_size=microbatch_size,
            tp=8,
            **options,
        )

    none, both = count(), count(sequence_parallel=True, recompute="selective")
    found = [
        count(sequence_parallel=True),
        count(recompute="selective"),
        both,
        count(recompute="full"),
    ]
    assert [100 * one / none for one in found] == pytest.approx(list(percents), abs=0.1)
    assert [none / GIB, both / GIB] == pytest.approx(list(gib), rel=0.001)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage_index", [None, 0, 1, 2])
def test_what_autograd_keeps_is_as_estimated(model, dtype, stage_index):
    measured, estimated = compare(model, stage_index, dtype=dtype)
    assert estimated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage_index", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("strategy", "num_in_flight"), [("standard", 1), ("aggressive", 1), ("aggressive", 4)]
)
def test_so_is_what_is_kept_to_be_computed_again(
    model, dtype, stage_index, strategy, num_in_flight
):
    measured, estimated = compare(
        model, stage_index, dtype=dtype, strategy=strategy, num_in_flight=num_in_flight
    )
    tokens_bytes = 2 * 8 * 4 * model.sequence_length  # inputs and targets
    assert estimated == pytest.approx(measured, rel=0.01, abs=tokens_bytes + 64)


def compare(model, stage_index, *, dtype=None, strategy="basic", num_in_flight=1):
    """Bytes that a forward of the stage keeps, measured and estimated; None is the whole model."""
    batch_size, num_stages = 4, 1 if stage_index is None else 3
    index = stage_index or 0
    is_last = index == num_stages - 1
    stage = build_stage(model, index, num_stages)
    make_memory_strategy(strategy, num_in_flight=num_in_flight).prepare(stage)
    x = torch.randint(0, model.vocab_size, (batch_size, model.sequence_length))
    targets = x.roll(-1, 1) if is_last else None
    if index > 0:
        x = torch.randn(stage.hidden_shape(batch_size), requires_grad=True)
    shape = LayerShape(
        model=model, microbatch_size=batch_size, compute_bytes=4 if dtype is None else 2
    )
    estimated = estimate_stage(
        shape,
        len(stage.layers),
        strategy,
        is_first=index == 0,
        is_last=is_last,
        num_in_flight=num_in_flight,
    )
    return (
        measure_kept_bytes(stage, x, targets, dtype),
        estimated.kept_bytes + estimated.logits_bytes,
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_with_equal_stages_the_peak_is_that_of_the_schedule(name):
    schedule = build_schedule(name, 4, 8)
    peaks = [
        find_peak_bytes(row, dict.fromkeys(range(schedule.num_stages), 1))
        for row in schedule.actions
    ]
    assert tuple(peaks) == count_peak_activations(schedule)


def make_config(**tables):
    model = {"preset": "gpt2-small", "vocab_size": 50_304}
    return from_document({"model": model, "batch": {"num_microbatches": 8}} | tables)


def test_states_are_four_bytes_each():
    config = make_config(optimizer={"kind": "adamw"})
    worst = estimate_memory(config).worst
    num_parameters = sum(p.numel() for p in build_stage(config.model, device="meta").parameters())
    assert worst.parameters_bytes == 4 * num_parameters
    assert worst.gradients_bytes == 4 * num_parameters
    assert worst.optimizer_bytes == 8 * num_parameters


def test_float32_with_grouped_queries_keeps_scores_on_cuda():
    """350m b8 fp32 of results/planner_gpu_held_out.json: 32,817.5 MiB on an H200."""
    model = ModelConfig(
        vocab_size=32000, num_layers=24, hidden_size=1024, num_heads=16, num_kv_heads=4,
        ffn_hidden_size=2816, sequence_length=1024,
    )  # fmt: skip
    config = replace(
        make_config(
            batch={"microbatch_size": 8, "num_microbatches": 1}, precision={"compute": "fp32"}
        ),
        model=model,
    )
    assert estimate_memory(config, device_type="cuda").worst.total_bytes == pytest.approx(
        32817.5 * 2**20, rel=0.05
    )


@pytest.mark.parametrize(("momentum", "num_states"), [(0.0, 0), (0.9, 1)])
def test_sgd_keeps_momentum_only(momentum, num_states):
    config = make_config(optimizer={"kind": "sgd", "momentum": momentum})
    worst = estimate_memory(config).worst
    assert worst.optimizer_bytes == num_states * worst.parameters_bytes


def test_zero_stages_cut_what_they_say():
    def estimate(zero_stage):
        parallel = {"dp": 4, "data_parallel": "fsdp", "zero_stage": zero_stage}
        return estimate_memory(make_config(parallel=parallel)).worst

    whole = estimate_memory(make_config(parallel={"dp": 4})).worst
    one, two, three = (estimate(stage) for stage in (1, 2, 3))
    assert [s.optimizer_bytes * 4 for s in (one, two, three)] == pytest.approx(
        [whole.optimizer_bytes] * 3, abs=64
    )
    assert whole.gradients_bytes * 1.25 == pytest.approx(one.gradients_bytes, abs=64)
    assert one.gradients_bytes > two.gradients_bytes == three.gradients_bytes
    assert one.parameters_bytes == two.parameters_bytes > three.parameters_bytes


def test_strategies_need_less_in_their_order():
    needs = [
        estimate_memory(
            make_config(parallel={"pp": 2}, memory={"strategy": strategy})
        ).worst.total_bytes
        for strategy in ("basic", "standard", "aggressive", "extreme")
    ]
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == 4


def test_gpipe_keeps_every_microbatch_and_1f1b_only_as_many_as_ranks():
    def worst(schedule):
        # Plain SGD on a large batch: activations are most of it.
        config = make_config(
            batch={"microbatch_size": 8, "num_microbatches": 8},
            parallel={"pp": 4, "schedule": schedule},
        )
        rank = estimate_memory(config).ranks[0]
        return rank.activations_bytes - find_made(config), rank.gradients_bytes

    gpipe, gpipe_gradients = worst("gpipe")
    one_each, gradients = worst("1f1b")
    assert gpipe == 2 * one_each  # 8 microbatches, 4 ranks
    assert gpipe_gradients == 0  # fullest before its first backward
    assert gradients > 0  # fullest again after it


def find_made(config):
    """What a middle layer's backward makes, beside what is kept."""
    return LayerShape(
        model=config.model, microbatch_size=config.batch.microbatch_size
    ).backward_bytes


def test_one_microbatch_is_fullest_before_its_gradients_are_made():
    one, two = (
        estimate_memory(make_config(batch={"microbatch_size": 4, "num_microbatches": number})).worst
        for number in (1, 2)
    )
    assert one.gradients_bytes == 0
    assert two.gradients_bytes == two.parameters_bytes
    assert two.activations_bytes == one.activations_bytes
    # With next to no activations the end of backward is fuller.
    narrow = make_config(batch={"num_microbatches": 1}, memory={"strategy": "aggressive"})
    small = estimate_memory(narrow).worst
    assert small.gradients_bytes == small.parameters_bytes


def test_between_input_and_weight_gradients_less_is_kept_than_before():
    """Inputs of matrices and gradients of what they gave, not all that a layer keeps."""
    row = [
        Action.parse(text)
        for text in ["0F0", "0F1", "0I0", "0F2", "0I1", "0I2", "0W0", "0W1", "0W2"]
    ]
    assert find_peak_bytes(row, {0: 10}) == 30
    assert find_peak_bytes(row, {0: 10}, split_bytes={0: 6}) == 26
    assert find_peak_bytes(row, {0: 10}, split_bytes={0: 14}) == 42


def test_the_first_rank_of_1f1b_is_worst_and_the_last_has_the_logits():
    ranks = estimate_memory(make_config(parallel={"pp": 4})).ranks
    assert [rank.activations_bytes for rank in ranks] == sorted(
        (rank.activations_bytes for rank in ranks), reverse=True
    )
    assert [rank.logits_bytes > 0 for rank in ranks] == [False, False, False, True]


@pytest.mark.parametrize(
    ("compression", "num_copies"), [("none", 0.0), ("fp16", 0.5), ("int8", 1.0), ("topk", 1.0)]
)
@pytest.mark.parametrize(
    ("num_microbatches", "schedule", "num_buckets"),
    # That buckets are whole beside gradients is counted in tests/distributed/engine_data_parallel.
    [(8, "1f1b", 1.0), (1, "1f1b", 1.0), (1, "zb_h1", 1.0)],
)
def test_buckets_and_compression_cost_copies_of_the_gradients(
    compression, num_copies, num_microbatches, schedule, num_buckets
):
    config = make_config(
        batch={"num_microbatches": num_microbatches},
        parallel={"dp": 2, "schedule": schedule},
        communication={"compression": compression, "bucket_mib": 1},
    )
    worst = estimate_memory(config).worst
    assert worst.communication_bytes == pytest.approx(
        (num_buckets + num_copies) * worst.parameters_bytes, abs=2 * 2**20
    )


def test_a_timed_model_needs_next_to_nothing():
    times = {"forward_ms": 1.0, "input_grad_ms": 1.0, "weight_grad_ms": 1.0}
    config = from_document({"model": {"kind": "timed", "num_layers": 4, **times}})
    assert 0 < estimate_memory(config).worst.total_bytes < 2**20
