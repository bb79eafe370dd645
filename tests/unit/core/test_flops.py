"""Closed forms against published numbers (Megatron's parameter counts and utilisations)."""

import pytest

from meshscope.core.flops import Flops, Recompute, TransformerShape, count_stage_flops

VOCABULARY = 51_200
LENGTH = 2048
A100 = 312e12


def count_gpt_flops(
    *,
    batch_size: int,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    recompute: Recompute = Recompute.NONE,
) -> Flops:
    """A step of the published GPT: 72·B·s·L·h²(1 + s/6h + V/12Lh), and what recompute adds."""
    b, s, layers, h = batch_size, sequence_length, num_layers, hidden_size
    unit = float(b * s * layers) * h * h
    model = 72 * unit * (1 + s / (6 * h) + vocab_size / (12 * layers * h))
    if recompute is Recompute.FULL:
        hardware = 96 * unit * (1 + s / (6 * h) + vocab_size / (16 * layers * h))
    elif recompute is Recompute.SELECTIVE:
        # As published, and what published HFUs are made with, but an upper bound: it counts all
        # six of attention's products twice, while only the forward two are computed again
        # (`count_stage_flops` has it so).
        hardware = 72 * unit * (1 + s / (3 * h) + vocab_size / (12 * layers * h))
    else:
        hardware = model
    return Flops(model=model, hardware=hardware)


def count_gpt_parameters(
    *, num_layers: int, hidden_size: int, vocab_size: int, sequence_length: int
) -> float:
    """12·L·h²(1 + 13/12h + (V + s)/12Lh): with biases, norms, learned positions, a tied head."""
    layers, h = num_layers, hidden_size
    share = 1 + 13 / (12 * h) + (vocab_size + sequence_length) / (12 * layers * h)
    return 12.0 * layers * h * h * share


def count_token_flops(shape: TransformerShape, recompute: Recompute = Recompute.NONE) -> Flops:
    return count_stage_flops(shape, num_layers=shape.num_layers, has_head=True, recompute=recompute)


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
    peak_flops = seconds * gpus * A100
    # Times are published to 10 ms: 0.005 s of the shorter one is half a percent.
    slack = 0.005 / seconds + 0.0005 / mfu
    assert flops.model / peak_flops == pytest.approx(mfu, rel=slack)
    assert flops.hardware / peak_flops == pytest.approx(hfu, rel=slack)


def test_175_billion_to_the_published_digit():
    flops = count_gpt_flops(
        batch_size=64,
        sequence_length=LENGTH,
        num_layers=96,
        hidden_size=12288,
        vocab_size=VOCABULARY,
        recompute=Recompute.SELECTIVE,
    )
    percents = [100 * part / (13.75 * 64 * A100) for part in (flops.model, flops.hardware)]
    assert [round(percent, 1) for percent in percents] == [51.4, 52.8]


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
    expected = 6.0 * parameters + 12.0 * layers * hidden * length
    assert count_token_flops(shape).model == expected


def test_a_mixture_counts_the_experts_a_token_passes():
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
