"""The transformer in one process: stages, shapes, loss, and what it equals in plain torch."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshscope.core.config.model_config import ModelConfig
from meshscope.engine.model.tensor_parallel import put_off_weight_gradients
from meshscope.engine.model.transformer import Stage, build_stage
from meshscope.errors import UsageError

LLAMA = ModelConfig(
    vocab_size=101,
    num_layers=4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    sequence_length=16,
    init_std=0.1,
)
GPT = replace(
    LLAMA, num_kv_heads=4, norm="layernorm", position="learned", activation="gelu", bias=True,
    tie_embeddings=True,
)  # fmt: skip


def make_batch(length: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 101, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(*stages: Stage) -> dict[str, Tensor]:
    """By name; a tied head of a stage of its own counts to the table."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter is stage.tied_weight:
                name = "token_embedding.weight"
            assert parameter.grad is not None
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


@pytest.mark.parametrize("config", [LLAMA, GPT, replace(LLAMA, tie_embeddings=True)])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [1, 1, 2], [1, 1, 1, 1]])
def test_stages_in_a_row_equal_the_whole_model_exactly(
    config: ModelConfig, sizes: list[int]
) -> None:
    whole = build_stage(config, seed=4)
    stages = [
        build_stage(config, index, len(sizes), stage_sizes=sizes, seed=4)
        for index in range(len(sizes))
    ]
    inputs, targets = make_batch()
    x = inputs
    for stage in stages[:-1]:
        x = stage(x)
        assert x.shape == stage.hidden_shape(3)
    loss, expected = stages[-1](x, targets), whole(inputs, targets)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    found, wanted = gradients(*stages), gradients(whole)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_stage_has_the_names_of_the_whole_model() -> None:
    names = {name for name, _ in build_stage(LLAMA, device="meta").named_parameters()}
    split = [
        {name for name, _ in build_stage(LLAMA, index, 2, device="meta").named_parameters()}
        for index in range(2)
    ]
    assert split[0] | split[1] == names
    assert split[0] & split[1] == set()


def test_the_tied_table_is_to_be_summed_between_first_and_last_stage_only() -> None:
    stages = [build_stage(GPT, index, 3) for index in range(3)]
    assert stages[0].tied_weight is stages[0].token_embedding.weight
    assert stages[1].tied_weight is None
    assert stages[2].tied_weight is stages[2].head.weight
    assert torch.equal(stages[0].tied_weight, stages[2].tied_weight)
    whole = build_stage(GPT)
    assert whole.tied_weight is None
    assert whole.head.weight is whole.token_embedding.weight
    assert build_stage(LLAMA, 0, 2).tied_weight is None


@pytest.mark.parametrize("config", [LLAMA, GPT])
def test_a_token_does_not_see_those_after_it(config: ModelConfig) -> None:
    model = build_stage(config)
    inputs, _ = make_batch()
    changed = inputs.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 101
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    assert before.shape == (3, 16, 101)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


@pytest.mark.parametrize("config", [LLAMA, GPT])
def test_shorter_sequences_are_the_beginning_of_longer_ones(config: ModelConfig) -> None:
    model = build_stage(config)
    inputs, _ = make_batch()
    with torch.no_grad():
        assert torch.allclose(model(inputs)[:, :7], model(inputs[:, :7]), atol=1e-6)


def test_attention_is_that_of_the_formula() -> None:
    """Grouped heads and rotation written out, in complex numbers and without a kernel."""
    config = replace(LLAMA, num_layers=1)
    block = build_stage(config, seed=2).layers["0"].attention
    rotation = build_stage(config).rotation
    x = torch.randn(2, 5, 32)
    weight_q, weight_k, weight_v = block.qkv.weight.split([32, 16, 16])
    heads = [(x @ w.t()).view(2, 5, -1, 8) for w in (weight_q, weight_k, weight_v)]

    def rotate(y: Tensor) -> Tensor:
        as_complex = torch.complex(y[..., :4], y[..., 4:])
        angles = torch.outer(torch.arange(5.0), 10_000.0 ** (-torch.arange(4) / 4))
        turned = as_complex * torch.polar(torch.ones(5, 4), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    query, key, value = rotate(heads[0]), rotate(heads[1]), heads[2]
    key, value = (y.repeat_interleave(2, 2) for y in (key, value))
    scores = torch.einsum("bqnh,bknh->bnqk", query, key) / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), value).flatten(2)
    assert torch.allclose(block(x, rotation), mixed @ block.output.weight.t(), atol=1e-5)


def test_the_loss_is_the_mean_over_targets_that_count() -> None:
    model = build_stage(LLAMA)
    inputs, targets = make_batch()
    targets = targets.clone()
    targets[0] = -100
    with torch.no_grad():
        logits = model(inputs)
        loss = model(inputs, targets)
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        parts = [model(x, t, 32) for x, t in zip(inputs.split(1), targets.split(1), strict=True)]
        assert sum(parts).item() == pytest.approx(loss.item(), rel=1e-6)
        assert model(inputs, torch.full_like(targets, -100)) == 0.0, "not nan"


@pytest.mark.parametrize("config", [LLAMA, GPT])
def test_weight_gradients_computed_later_are_those_of_one_backward(config: ModelConfig) -> None:
    whole, split = build_stage(config), build_stage(config)
    put_off = put_off_weight_gradients(split)
    inputs, targets = make_batch()
    parts = []
    for x, t in zip(inputs.split(1), targets.split(1), strict=True):
        whole(x, t).backward()
        with put_off.collect() as later:
            split(x, t).backward()
        parts.append(later)
    linear = [name for name, p in split.named_parameters() if p.ndim == 2 and "layers." in name]
    assert all(split.get_parameter(name).grad is None for name in linear)
    for later in parts:
        later.compute()
        later.compute()  # has nothing left to do
    found, wanted = gradients(split), gradients(whole)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_what_is_put_off_does_not_keep_the_stage_s_input() -> None:
    """Its first node would: with it the input and its gradient, for every microbatch in flight."""
    stage = build_stage(LLAMA, 1, LLAMA.num_layers)
    put_off = put_off_weight_gradients(stage)
    x = torch.randn(2, 8, LLAMA.hidden_size, requires_grad=True)
    alive = weakref.ref(x)
    with put_off.collect() as later:
        stage(x).sum().backward()
    del x
    assert alive() is None, "between the gradient of the input and those of the weights"
    later.compute()
    assert stage.get_parameter("layers.1.mlp.down.weight").grad is not None


def test_outside_of_collect_weight_gradients_are_computed_at_once() -> None:
    whole, split = build_stage(GPT), build_stage(GPT)
    put_off_weight_gradients(split)
    inputs, targets = make_batch()
    for model in (whole, split):
        model(inputs, targets).backward()
    found, wanted = gradients(split), gradients(whole)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


def test_bfloat16_is_possible() -> None:
    model = build_stage(LLAMA, dtype=torch.bfloat16)
    inputs, targets = make_batch()
    loss = model(inputs, targets)
    loss.backward()
    assert loss.dtype == torch.float32, "of the loss; the rest is narrow"
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert loss.item() == pytest.approx(build_stage(LLAMA)(inputs, targets).item(), rel=1e-2)


def test_what_cannot_be_built_is_refused_with_every_reason() -> None:
    with pytest.raises(UsageError, match=r"num_heads .*; stage 7 is outside 0\.\.1"):
        build_stage(replace(LLAMA, num_heads=3, num_kv_heads=1), 7, 2)
    with pytest.raises(UsageError, match="got 20 tokens, but sequence_length is 16"):
        build_stage(LLAMA)(torch.zeros(1, 20, dtype=torch.long))
