"""The table of devices: exact names, dense rates, and nothing by resemblance."""

import pytest

from meshscope.core.hardware import (
    DEVICES,
    find_device,
    find_peak,
    normalise_dtype,
    normalise_name,
)
from meshscope.core.unavailable import Unavailable


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200", "float8_e4m3fn", 1978.9),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L4", "float16", 121),
        ("NVIDIA L40", "float16", 181.05),
        ("NVIDIA L40S", "float16", 362.05),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla T4", "float16", 65),
        ("NVIDIA A10", "float16", 125),
        ("NVIDIA A10G", "float16", 70),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("AMD Instinct MI325X", "bfloat16", 1307.4),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
    ],
)
def test_dense_peaks_of_known_devices(name, dtype, tera):
    assert find_peak(name, dtype) == pytest.approx(tera * 1e12)


def test_names_are_compared_without_case_blanks_and_maker():
    assert find_device("nvidia  a100-sxm4-40gb") is find_device("A100-SXM4-40GB")
    assert find_device("NVIDIA Tesla T4") is find_device("Tesla T4")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA L4000",
        "NVIDIA L",
        "NVIDIA T400",
        "NVIDIA A1000",
        "NVIDIA A100",
        "NVIDIA H100",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "AMD Instinct MI250X / MI250",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "cpu",
    ],
)
def test_what_only_resembles_a_known_name_is_unavailable(name):
    for found in (find_device(name), find_peak(name, "bfloat16")):
        assert isinstance(found, Unavailable)
        assert f"“{name}”" in found.reason


def test_an_unknown_device_is_told_what_is_known_and_what_to_do():
    found = find_device("Something 9000")
    assert isinstance(found, Unavailable)
    assert "set_peak" in found.reason
    assert "NVIDIA H200" in found.reason


def test_a_dtype_the_device_has_no_rate_for_is_unavailable():
    found = find_peak("Tesla V100-SXM2-16GB", "bfloat16")
    assert found == Unavailable(
        "no peak of Tesla V100-SXM2-16GB for bfloat16; there is one for float16, float32"
    )


def test_no_two_devices_share_a_name_and_rates_are_plausible():
    names = [normalise_name(device.name) for device in DEVICES]
    assert len(set(names)) == len(names)
    for device in DEVICES:
        rates = device.flops_per_s
        assert 1e12 < rates["float32"] <= max(rates.values()) < 1e16, device.name
        assert rates["float16"] > rates["float32"], device.name
        assert rates.get("float8", 1e30) > rates["float16"], device.name
        assert 1e11 < device.bandwidth_bytes_per_s < 1e13, device.name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("torch.bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("float8_e5m2", "float8"),
        ("TF32", "tf32"),
    ],
)
def test_dtypes_have_one_name_each(given, expected):
    assert normalise_dtype(given) == expected
