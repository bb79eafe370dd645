"""Operations by closed forms, rates against published peaks."""

import pytest

from meshscope.analyze.device.trace_roofline import measure_rates, parse_shapes
from meshscope.core.flops import count_operator_flops
from meshscope.core.unavailable import Unavailable
from meshscope.ingest.traces.trace_tables import OperatorRow


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[3, 4], [4, 5]], 2 * 3 * 4 * 5),
        ("aten::addmm", [[5], [3, 4], [4, 5]], 2 * 3 * 4 * 5),
        ("aten::bmm", [[7, 3, 4], [7, 4, 5]], 7 * 2 * 3 * 4 * 5),
        ("aten::linear", [[2, 3, 4], [5, 4], [5]], 2 * 2 * 3 * 4 * 5),
        ("aten::matmul", [[2, 3, 4], [4, 5]], 2 * 2 * 3 * 4 * 5),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[2, 8, 16, 4], [2, 8, 16, 4], []],
            4 * 2 * 8 * 16 * 16 * 4,
        ),
        ("aten::_flash_attention_forward", [[2, 16, 8, 4], [2, 32, 8, 4]], 4 * 2 * 8 * 16 * 32 * 4),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            [[2, 8, 16, 4], [2, 8, 16, 4], [2, 8, 16, 4], [2, 8, 16, 4], []],
            8 * 2 * 8 * 16 * 16 * 4,
        ),
        ("aten::_grouped_mm", [[64, 4], [8, 4, 5], [8]], 2 * 64 * 4 * 5),
        ("aten::mm", [[3, 4], [5, 4]], None),
        ("aten::mm", [], None),
        ("aten::add", [[3, 4], [3, 4]], None),
    ],
)
def test_operations_are_counted(name, shapes, expected):
    assert count_operator_flops(name, shapes) == expected


def make_row(**changes):
    fields = {
        "name": "aten::mm",
        "shapes": "[[4096, 4096], [4096, 4096]]",
        "types": '["c10::BFloat16", "c10::BFloat16"]',
        "values": "",
        "link_ns": 0,
        "count": 10,
        "num_kernels": 10,
        "device_ns": 2_000_000,
        "host_ns": 1,
        "share_ratio": 1.0,
    }
    return OperatorRow(**{**fields, **changes})


def test_a_rate_is_held_against_the_devices_dense_peak():
    (rate,) = measure_rates((make_row(),), "NVIDIA H100 80GB HBM3")
    assert rate.flops == 10 * 2 * 4096**3
    assert rate.flops_per_s == pytest.approx(10 * 2 * 4096**3 / 2e-3)
    assert rate.peak_ratio == pytest.approx(rate.flops_per_s / 989e12, rel=0.01)


def test_an_unknown_device_or_type_gives_a_rate_without_a_share():
    for rate in measure_rates((make_row(), make_row(types="")), "Nobody's Chip"):
        assert isinstance(rate.peak_ratio, Unavailable)


@pytest.mark.parametrize("text", ["", "x", "{}", "[[1e9]]", "[[-1, 2]]", "[" * 5000, "[[true]]"])
def test_hostile_shapes_count_nothing(text):
    assert count_operator_flops("aten::mm", parse_shapes(text)) is None
