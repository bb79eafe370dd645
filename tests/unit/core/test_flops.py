"""Closed forms against published numbers (Megatron's parameter counts and utilisations)."""

import pytest

from meshscope.core.flops import (
    Flops,
    Recompute,
    TransformerShape,
    Utilization,
    count_active_parameters,
    count_flops_per_token,
    count_gpt_flops,
    count_gpt_parameters,
    count_token_flops,
    measure_utilization,
)
from meshscope.core.unavailable import Unavailable

VOCABULARY = 51_200
LENGTH = 2048
A100 = 312e12


@pytest.mark.parametrize(
    ("billions", "hidden", "layers"),
    [(1.7, 2304, 24), (7.5, 4096, 36), (39.1, 8192, 48), (145.6, 12288, 80), (1008.0, 25600, 128)],
)
def test_parameters_of_megatrons_models(billions, hidden, layers):
    found = count_gpt_parameters(
        num_layers=layers, hidden_size=hidden, vocab_size=VOCABULARY, sequence_length=LENGTH
    )
    assert round(found / 1e9, 1) == billions


PUBLISHED = [
    # hidden, layers, batch, GPUs, seconds with sequence parallelism and selective recompute
    (6144, 48, 4, 8, 1.10, 0.415, 0.437),
    (12288, 96, 64, 64, 13.75, 0.514, 0.528),
]


@pytest.mark.parametrize(("hidden", "layers", "batch", "gpus", "seconds", "mfu", "hfu"), PUBLISHED)
def test_published_utilisations(hidden, layers, batch, gpus, seconds, mfu, hfu):
    flops = count_gpt_flops(
        batch_size=batch,
        sequence_length=LENGTH,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=VOCABULARY,
        recompute=Recompute.SELECTIVE,
    )
    found = measure_utilization(
        flops, step_ns=seconds * 1e9, num_devices=gpus, peak_flops_per_s=A100
    )
    assert isinstance(found, Utilization)
    # Times are published to 10 ms: 0.005 s of the shorter one is half a percent.
    slack = 0.005 / seconds + 0.0005 / mfu
    assert found.mfu_ratio == pytest.approx(mfu, rel=slack)
    assert found.hfu_ratio == pytest.approx(hfu, rel=slack)
    assert not found.is_impossible


def test_175_billion_to_the_published_digit():
    flops = count_gpt_flops(
        batch_size=64,
        sequence_length=LENGTH,
        num_layers=96,
        hidden_size=12288,
        vocab_size=VOCABULARY,
        recompute=Recompute.SELECTIVE,
    )
    found = measure_utilization(flops, step_ns=13.75e9, num_devices=64, peak_flops_per_s=A100)
    assert isinstance(found, Utilization)
    assert (round(100 * found.mfu_ratio, 1), round(100 * found.hfu_ratio, 1)) == (51.4, 52.8)


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_the_general_form_is_the_published_one_for_its_model(recompute):
    shape = TransformerShape(
        num_layers=36, hidden_size=4096, sequence_length=LENGTH, vocab_size=VOCABULARY
    )
    published = count_gpt_flops(
        batch_size=512,
        sequence_length=LENGTH,
        num_layers=36,
        hidden_size=4096,
        vocab_size=VOCABULARY,
        recompute=recompute,
    )
    found = count_token_flops(shape, recompute).scaled(512 * LENGTH)
    assert found.model == pytest.approx(published.model, rel=1e-12)
    assert found.hardware == pytest.approx(published.hardware, rel=1e-12)


def test_selective_recompute_costs_the_forward_products_of_attention_once_more():
    shape = TransformerShape(num_layers=2, hidden_size=8, sequence_length=16, vocab_size=32)
    kept, again = (count_token_flops(shape, r) for r in (Recompute.NONE, Recompute.SELECTIVE))
    assert again.model == kept.model == kept.hardware
    assert again.hardware - kept.hardware == 2 * 4 * 16 * 8


def test_six_per_parameter_and_twelve_for_attention():
    layers, hidden, length = 4, 64, 128
    shape = TransformerShape(
        num_layers=layers, hidden_size=hidden, sequence_length=length, vocab_size=100
    )
    parameters = 12 * layers * hidden * hidden + hidden * 100
    expected = count_flops_per_token(
        active_parameters=parameters,
        num_layers=layers,
        hidden_size=hidden,
        sequence_length=length,
    )
    assert count_token_flops(shape).model == expected
    causal = count_flops_per_token(
        active_parameters=parameters,
        num_layers=layers,
        hidden_size=hidden,
        sequence_length=length,
        is_causal_credited=True,
    )
    assert expected - causal == 6 * layers * hidden * length


def test_a_mixture_counts_the_experts_a_token_passes():
    # Mixtral 8x7B: 46.7 billion parameters, 12.9 active (its paper); 45.1 of them in experts.
    active = count_active_parameters(
        dense_parameters=46.7e9 - 45.1e9, expert_parameters=45.1e9, num_experts=8, num_active=2
    )
    assert active == pytest.approx(12.9e9, rel=0.01)
    dense = TransformerShape(num_layers=1, hidden_size=8, sequence_length=1, vocab_size=1)
    mixture = TransformerShape(
        num_layers=1,
        hidden_size=8,
        sequence_length=1,
        vocab_size=1,
        num_active_experts=2,
        router_width=4,
    )
    expert = 2 * 8 * 32
    assert mixture.layer_matrix_weights - dense.layer_matrix_weights == expert + 8 * 4


def test_more_than_the_peak_is_said_and_not_clamped():
    found = measure_utilization(
        Flops(model=3.0, hardware=4.0), step_ns=1e9, num_devices=1, peak_flops_per_s=2.0
    )
    assert isinstance(found, Utilization)
    assert (found.mfu_ratio, found.hfu_ratio, found.is_impossible) == (1.5, 2.0, True)


@pytest.mark.parametrize("peak", [0.0, -1.0, float("nan")])
def test_without_a_peak_there_is_no_utilisation(peak):
    flops = Flops(model=1.0, hardware=1.0)
    found = measure_utilization(flops, step_ns=1e9, num_devices=1, peak_flops_per_s=peak)
    assert isinstance(found, Unavailable)
