"""Costs of operators against closed forms, and against torch's own counter on real programs."""

import json

import pytest

from meshscope.analyze.device.trace_roofline import measure_coverage, measure_rates
from meshscope.core.operator_cost import Call, Tensor, count_cost
from meshscope.ingest.traces.trace_tables import OperatorRow

BF16, F32, I64 = 2, 4, 8


def call(name, *shapes, item=BF16, values=()):
    inputs = tuple(
        tuple(Tensor(sizes=tuple(one), item_bytes=item) for one in shape)
        if shape and isinstance(shape[0], list)
        else ((Tensor(sizes=tuple(shape), item_bytes=item),) if shape else ())
        for shape in shapes
    )
    return count_cost(Call(name=name, inputs=inputs, values=tuple(values)))


def test_a_product_moves_its_factors_and_its_result():
    cost = call("aten::mm", [64, 32], [32, 16])
    assert (cost.flops, cost.num_bytes) == (2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16))
    cost = call("aten::addmm", [16], [64, 32], [32, 16])
    assert (cost.flops, cost.num_bytes) == (2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16))


FIRST = ("", "", "", "[3, 3]", "[2, 2]", "[1, 1]", "1", "False", "False")


def test_the_first_convolution_of_a_resnet():
    """118.0 million multiply-adds an image of 224 × 224."""
    cost = call(
        "aten::miopen_convolution", [10, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], [], [], [],
        values=FIRST,
    )  # fmt: skip
    assert cost.flops == 2 * 10 * 118_013_952
    moved = 10 * 3 * 224 * 224 + 64 * 3 * 49 + 10 * 64 * 112 * 112
    assert cost.num_bytes == 2 * moved


@pytest.mark.parametrize(
    ("mask", "factor"),
    [("[True, True, False]", 2), ("[False, True, True]", 1), ("[True, False, False]", 1)],
)
def test_backward_of_a_convolution_is_one_or_two_of_its_forward(mask, factor):
    values = ("", "", "", "[0]", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1", mask)
    shapes = ([10, 64, 112, 112], [10, 3, 224, 224], [64, 3, 7, 7], *([[]] * 8))
    cost = call("aten::convolution_backward", *shapes, values=values)
    assert cost.flops == factor * 2 * 10 * 118_013_952


def test_groups_divide_the_inputs_of_a_convolution():
    values = ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "8")
    cost = call("aten::convolution", [2, 8, 10, 10], [8, 1, 3, 3], *([[]] * 7), values=values)
    assert cost.flops == 2 * 2 * 8 * 10 * 10 * 9


def test_without_its_numbers_a_convolution_is_not_counted():
    assert call("aten::cudnn_convolution", [10, 3, 224, 224], [64, 3, 7, 7], *([[]] * 7)) is None


@pytest.mark.parametrize(
    ("name", "shapes", "products"),
    [
        ("aten::_cudnn_attention_forward", [[2, 8, 64, 32]] * 3, 2),
        ("aten::_cudnn_attention_backward", [[2, 8, 64, 32]] * 5, 5),
        ("flash_attn::_flash_attn_forward", [[2, 64, 8, 32]] * 3, 2),
        ("flash_attn::_flash_attn_backward", [[2, 64, 8, 32]] * 5, 5),
        ("aten::_scaled_dot_product_efficient_attention", [[2, 8, 64, 32]] * 3, 2),
        ("aten::_scaled_dot_product_flash_attention_backward", [[2, 8, 64, 32]] * 5, 5),
        ("aten::_efficient_attention_backward", [[2, 64, 8, 32]] * 5, 5),
    ],
)
def test_attention_in_all_its_names(name, shapes, products):
    assert call(name, *shapes).flops == products * 2 * 2 * 8 * 64 * 64 * 32


LENGTHS = [3]
"""Where two sequences, laid one behind the other, begin and end."""


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::_efficient_attention_forward", [*[[1, 128, 8, 32]] * 3, [], LENGTHS, LENGTHS]),
        ("aten::_efficient_attention_backward", [*[[1, 128, 8, 32]] * 4, [], [1], LENGTHS]),
        ("aten::_flash_attention_forward", [*[[128, 8, 32]] * 3, LENGTHS, LENGTHS]),
        ("aten::_cudnn_attention_forward", [*[[128, 8, 32]] * 3, [], LENGTHS, LENGTHS]),
        ("flash_attn::_flash_attn_varlen_forward", [*[[128, 8, 32]] * 3, LENGTHS, LENGTHS]),
    ],
)
def test_sequences_of_any_length_in_one_row_are_not_counted(name, shapes):
    """Every pair of the row's positions would be twice too many, or a hundred times."""
    assert call(name, *shapes) is None


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        # 96 rows of four experts, each through its own 32 × 16.
        ("aten::_grouped_mm", [[96, 32], [4, 32, 16], [4]], 2 * 96 * 32 * 16),
        ("aten::_scaled_grouped_mm", [[96, 32], [4, 32, 16], [96], [4, 16], [4]], 2 * 96 * 32 * 16),
        # Gradients of the weights: 32 × 16 for each expert, of all 96 rows together.
        ("aten::_grouped_mm", [[32, 96], [96, 16], [4]], 2 * 96 * 32 * 16),
        # Each expert has columns of its own; and a plain batch.
        ("aten::_grouped_mm", [[4, 8, 32], [32, 96], [4]], 2 * 8 * 32 * 96),
        ("aten::_grouped_mm", [[4, 8, 32], [4, 32, 16], []], 2 * 4 * 8 * 32 * 16),
        ("aten::mv", [[64, 32], [32]], 2 * 64 * 32),
        ("aten::addmv_", [[64], [64, 32], [32]], 2 * 64 * 32),
        ("aten::addbmm", [[8, 16], [4, 8, 32], [4, 32, 16]], 2 * 4 * 8 * 32 * 16),
        ("aten::_weight_int8pack_mm", [[8, 32], [16, 32], [16]], 2 * 8 * 32 * 16),
        # A transposed convolution: each of 2·8·10·10 inputs with 4·3·3 weights.
        ("aten::cudnn_convolution_transpose", [[2, 8, 10, 10], [8, 4, 3, 3]], 2 * 1600 * 36),
        ("triton_tem_fused_addmm_relu_2", [[64, 32], [32, 16], [16], [64, 16]], 2 * 64 * 32 * 16),
        ("triton_tem_fused_bmm_1", [[4, 64, 32], [4, 32, 16], [4, 64, 16]], 8 * 64 * 32 * 16),
    ],
)
def test_products_in_all_their_names(name, shapes, flops):
    assert call(name, *shapes).flops == flops


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("triton_tem_fused_flex_attention_0", [[2, 8, 64, 32]] * 4),
        ("triton_tem_fused_mm_0", [[64, 32], [32, 16], [8, 8]]),
        ("aten::_grouped_mm", [[96, 32], [4, 31, 16], [4]]),
        ("aten::mv", [[64, 32], [31]]),
    ],
)
def test_a_product_whose_sizes_do_not_fit_is_not_counted(name, shapes):
    assert call(name, *shapes) is None


def test_convolutions_of_intels_xpu_are_those_of_others():
    values = ("", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1")
    cost = call(
        "aten::convolution_overrideable", [10, 3, 224, 224], [64, 3, 7, 7], *([[]] * 7),
        values=values,
    )  # fmt: skip
    assert cost.flops == 2 * 10 * 118_013_952
    shapes = ([10, 64, 112, 112], [10, 3, 224, 224], [64, 3, 7, 7], *([[]] * 7))
    cost = call(
        "aten::convolution_backward_overrideable", *shapes,
        values=(*values, "[False, True, True]"),
    )  # fmt: skip
    assert cost.flops == 2 * 10 * 118_013_952


@pytest.mark.parametrize(
    "name",
    [
        "aten::_cudnn_attention_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
)
def test_of_backwards_five_products_three_have_the_keys_width(name):
    wide, narrow = [2, 8, 64, 32], [2, 8, 64, 16]
    # Scores once more, and the gradients of queries and keys; then those of scores and values.
    products = 3 * 32 + 2 * 16
    assert call(name, narrow, wide, wide, narrow, []).flops == products * 2 * 2 * 8 * 64 * 64


@pytest.mark.parametrize(
    ("name", "shapes", "elements"),
    [
        ("aten::add", [[8, 4], [8, 4], []], 3 * 32),
        ("aten::add", [[8, 4], [4], []], 32 + 4 + 32),
        ("aten::copy_", [[8, 4], [8, 4]], 2 * 32),
        ("aten::fill_", [[8, 4], []], 32),
        ("aten::sum", [[8, 4], []], 32),
        ("aten::native_layer_norm", [[8, 4], [], [4], [4], []], 32 + 8 + 32),
        ("aten::_foreach_add_", [[[8], [4]], [[8], [4]], []], 3 * 12),
        ("aten::cat", [[[8, 4], [8, 4]], []], 2 * 64),
    ],
)
def test_operators_that_only_move_data(name, shapes, elements):
    cost = call(name, *shapes)
    assert (cost.flops, cost.num_bytes) == (0, elements * BF16)


def test_an_embedding_reads_rows_and_not_its_table():
    inputs = ((Tensor(sizes=(50_000, 64), item_bytes=F32),), (Tensor(sizes=(32,), item_bytes=I64),))
    cost = count_cost(Call(name="aten::embedding", inputs=inputs))
    assert cost is not None
    assert cost.num_bytes == 32 * 8 + 2 * 32 * 64 * 4


@pytest.mark.parametrize(
    ("name", "shapes", "num_bytes"),
    [
        ("aten::gather", [[100, 64], [], [32, 64]], 32 * 64 * (8 + 2 * 4)),
        ("aten::index_add_", [[100, 64], [], [32], [32, 64], []], 32 * 8 + 3 * 32 * 64 * 4),
        ("aten::_index_put_impl_", [[100, 64], [], [32, 64]], 2 * 32 * 64 * 4),
    ],
)
def test_look_ups_touch_what_they_have_indices_for(name, shapes, num_bytes):
    inputs = tuple(
        (Tensor(sizes=tuple(shape), item_bytes=I64 if place == 2 and "put" not in name else F32),)
        if shape
        else ()
        for place, shape in enumerate(shapes)
    )
    cost = count_cost(Call(name=name, inputs=inputs))
    assert cost is not None
    assert (cost.flops, cost.num_bytes) == (0, num_bytes)


def test_the_kernels_name_tells_the_type_of_tensors_in_a_list():
    shapes, types = [[[8, 4], [8, 4]], []], ["TensorList", "Scalar"]
    opaque = "void CatArrayBatchedCopy_vectorized<at::native::OpaqueType<2u>, unsigned int>(x)"
    (rate,) = measure_rates((row("aten::cat", shapes, types, 100, kernel=opaque),), "")
    assert rate.num_bytes == 2 * 64 * BF16
    assert not measure_rates((row("aten::cat", shapes, types, 100, kernel="any"),), "")


def test_a_long_list_has_no_shapes_and_is_not_counted():
    kernel = "multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<float, 1, 1>>"
    operators = (
        row("aten::_foreach_mul_", [[], []], ["TensorList", "Scalar"], 100, kernel=kernel),
        row("aten::_foreach_mul_", [[[8], [4]], []], ["TensorList", "Scalar"], 50, kernel=kernel),
    )
    rates = measure_rates(operators, "")
    assert [(one.device_ns, one.num_bytes) for one in rates] == [(50, 2 * 12 * F32)]
    (left,) = measure_coverage(operators, rates).uncounted
    assert "long list" in left.reason


def test_float32_on_matrix_units_is_held_against_their_peak():
    """An H100 has 494.7 TFLOP/s of tf32 and 66.9 of float32."""
    shapes, types = [[4096, 4096], [4096, 4096]], ["float", "float"]
    kernels = ("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x256x32", "cutlass_simt_sgemm")
    rows = (row("aten::mm", shapes, types, 10**6, kernel=one) for one in kernels)
    rates = measure_rates(tuple(rows), "NVIDIA H100 80GB HBM3")
    per_s = 2 * 4096**3 / 1e-3
    assert [one.peak_ratio for one in rates] == [
        pytest.approx(per_s / 494.7e12),
        pytest.approx(per_s / 66.9e12),
    ]


def test_products_of_eight_bits_are_held_against_their_own_peak_and_not_their_scales():
    """An MI300X has 2,614.9 TFLOP/s of float8, in a type of its own, and 163.4 of float32."""
    shapes = [[4096, 4096], [4096, 4096], [], [], []]
    types = ["c10::Float8_e4m3fnuz", "c10::Float8_e4m3fnuz", "float", "float", ""]
    (rate,) = measure_rates((row("aten::_scaled_mm", shapes, types, 10**6),), "AMD Instinct MI300X")
    assert rate.peak_ratio == pytest.approx(2 * 4096**3 / 1e-3 / 2614.9e12)
    unknown = ["c10::Float4_e2m1fn_x2", "c10::Float4_e2m1fn_x2", "float", "float", ""]
    assert not measure_rates((row("aten::_scaled_mm", shapes, unknown, 10**6),), "NVIDIA B200")


def test_scales_in_lists_do_not_hide_a_product():
    """As torch's second form of it has them: their type is not in the trace, nor is it needed."""
    shapes = [[256, 128], [128, 64], [[256, 4]], [], [], [[64, 4]], [], []]
    kind = "c10::Float8_e4m3fn"
    types = [kind, kind, "TensorList", "ScalarList", "", "TensorList", "ScalarList", ""]
    (rate,) = measure_rates((row("aten::_scaled_mm_v2", shapes, types, 1000),), "NVIDIA B200")
    assert rate.flops == 2 * 256 * 128 * 64
    assert rate.num_bytes == 256 * 128 + 128 * 64 + 256 * 64


def test_what_is_not_known_is_not_counted():
    assert call("aten::index", [8, 4], []) is None
    assert call("vllm::moe_forward", [888, 3072], [888, 128]) is None


def row(name, shapes, types, device_ns, **changes):
    fields = {"values": "", "count": 1, "num_kernels": 1, "host_ns": 1, "share_ratio": 0.5}
    return OperatorRow(
        name=name,
        shapes=json.dumps(shapes) if shapes is not None else "",
        types=json.dumps(types),
        device_ns=device_ns,
        **{"link_ns": 0, **fields, **changes},
    )


def test_a_roofline_takes_the_longer_of_both_times():
    """An H100 has 989.4 TFLOP/s of bfloat16 and 3.352 TB/s."""
    bf16 = "c10::BFloat16"
    large = row("aten::mm", [[8192, 8192], [8192, 8192]], [bf16, bf16], 2_000_000)
    thin = row("aten::mm", [[1, 8192], [8192, 8192]], [bf16, bf16], 100_000)
    moved = row("aten::add", [[4096, 4096], [4096, 4096]], [bf16, bf16], 60_000)
    rates = measure_rates((large, thin, moved), "NVIDIA H100 80GB HBM3")
    assert [rate.bound for rate in rates] == ["arithmetic", "memory", "memory"]
    assert rates[0].roofline_ratio == pytest.approx(2 * 8192**3 / 989.4e12 / 2e-3)
    assert rates[1].roofline_ratio == pytest.approx(2 * (8192**2 + 2 * 8192) / 3.352e12 / 1e-4)
    assert rates[2].roofline_ratio == pytest.approx(3 * 2 * 4096**2 / 3.352e12 / 6e-5)


def test_coverage_is_of_what_can_be_counted_and_says_the_rest():
    f32 = "float"
    operators = (
        row("aten::add", [[1024], [1024]], [f32, f32], 300),
        row("aten::index", [[8, 4], []], [f32, ""], 100),
        row("aten::mm", None, [], 200),
        row("", None, [], 200),
        row("record_param_comms", None, [], 5000, link_ns=5000),
        row("aten::copy_", [[64], [64]], [f32, f32], 700, link_ns=700),
    )
    coverage = measure_coverage(operators, measure_rates(operators, ""))
    assert (coverage.device_ns, coverage.counted_ns, coverage.unlaunched_ns) == (800, 300, 200)
    assert coverage.ratio == pytest.approx(300 / 800)
    assert coverage.launched_ratio == pytest.approx(300 / 600)
    assert [(one.name, one.device_ns) for one in coverage.uncounted] == [
        ("aten::mm", 200),
        ("(no operator)", 200),
        ("aten::index", 100),
    ]
