"""A device by what people call it, and what of it a configuration needs."""

import pytest

from meshscope.core.config.device_fit import (
    DEVICE_MEMORY_GIB,
    describe_device,
    estimate_fit,
    find_target_device,
    parse_bytes,
)
from meshscope.core.config.memory_model import estimate_memory
from meshscope.core.config.model_config import ModelConfig
from meshscope.core.config.train_config import TrainConfig
from meshscope.core.unavailable import Unavailable

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("H100-80GB", 80),
        ("h100 80gb", 80),
        ("NVIDIA H100 80GB HBM3", 80),
        ("H100-NVL", 94),
        ("A100-40GB", 40),
        ("A100-SXM4-80GB", 80),
        ("V100-32GB", 32),
        ("L4", 24),
        ("L40S", 48),
        ("H200", 141),
        ("GH200-96GB", 96),
        ("MI300X", 192),
        ("RTX-4090", 24),
        ("80GiB", 80),
        ("0.5 TiB", 512),
    ],
)
def test_devices_have_the_memory_they_are_sold_with(text, gib):
    assert find_target_device(text).memory_bytes == gib * GIB


@pytest.mark.parametrize("name", DEVICE_MEMORY_GIB)
def test_every_name_that_a_message_lists_is_one(name):
    found = find_target_device(describe_device(name, DEVICE_MEMORY_GIB[name]))
    assert found.memory_bytes == DEVICE_MEMORY_GIB[name] * GIB


@pytest.mark.parametrize("text", ["H100", "A100", "GH200", "X1", "", "80", "-80GB", "0GiB", "9EiB"])
def test_what_is_not_clear_is_said(text):
    found = find_target_device(text)
    assert isinstance(found, Unavailable)
    assert "80GB" in found.reason
    assert parse_bytes(text) is None


@pytest.mark.parametrize(
    ("text", "near"), [("B3000-270GB", "B300-270GB"), ("H20O-141GB", "H200-141GB")]
)
def test_an_unknown_device_names_the_nearest(text, near):
    found = find_target_device(text)
    assert isinstance(found, Unavailable)
    assert f"did you mean {near}" in found.reason
    far = find_target_device("banana")
    assert isinstance(far, Unavailable)
    assert "did you mean" not in far.reason


def test_sizes_are_decimal_or_binary_as_written():
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes(" 1.5 gib ") == 3 * 2**29


def test_the_fit_is_the_worst_ranks():
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, ffn_hidden_size=256,
        vocab_size=100, sequence_length=32,
    )  # fmt: skip
    config = TrainConfig(model=model)
    needed = estimate_memory(config, device_type="cuda").worst.total_bytes
    fit = estimate_fit(config, find_target_device(f"{2 * needed}b"))
    assert (fit.ratio, fit.fits, fit.is_tight) == (0.5, True, False)
    assert estimate_fit(config, find_target_device(f"{needed}b")).is_tight
    assert not estimate_fit(config, find_target_device(f"{needed - 1}b")).fits
