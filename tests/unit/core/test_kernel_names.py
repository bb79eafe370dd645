"""Names of kernels as libraries write them."""

import pytest

from meshscope.core.kernel_names import KernelCategory, categorise_kernel, shorten_kernel_name

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3>)"
)
COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
    "const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&,"
    " at::native::direct_copy_kernel_cuda(int) const&)::{lambda(int)#1}>(int, x)"
)
SUM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t"
    "<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::"
    "{lambda(float, float)#1}>, unsigned int, float, 4> >(at::native::ReduceOp<float>)"
)
TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1"
CUTLASS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nn_align8>("
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nn_align8::Params)"
)
MANGLED = "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8ELb0ELb0ELb1ELi1EEEvPT0_PT_Pf"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>, true>(x)"


@pytest.mark.parametrize(
    ("name", "short", "category"),
    [
        (ADD, "vectorized_elementwise_kernel<CUDAFunctor_add, f32>", KernelCategory.ELEMENTWISE),
        (COPY, "elementwise_kernel<direct_copy_kernel_cuda, bf16>", KernelCategory.COPY),
        (SUM, "reduce_kernel<sum_functor, f32>", KernelCategory.REDUCTION),
        (TENSILE, "Cijk_Alik MT256x192x64", KernelCategory.GEMM),
        (
            CUTLASS,
            "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nn_align8",
            KernelCategory.GEMM,
        ),
        (MANGLED, "add_rmsnorm_quant_kernel", KernelCategory.NORMALISATION),
        (FLASH, "flash_fwd_kernel<Flash_fwd_kernel_traits>", KernelCategory.ATTENTION),
        ("nvjet_sm90_tst_256x128_64x4_NNT", "nvjet_sm90_tst_256x128_64x4_NNT", KernelCategory.GEMM),
        (
            "triton_red_fused_add_native_layer_norm_3",
            "triton_red_fused_add_native_layer_norm_3",
            KernelCategory.NORMALISATION,
        ),
        ("triton_poi_fused_silu_2", "triton_poi_fused_silu_2", KernelCategory.ELEMENTWISE),
        (
            "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
            "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
            KernelCategory.CONVOLUTION,
        ),
        (
            "void fbgemm_gpu::permute_2D_data_kernel<false, int>(int)",
            "permute_2D_data_kernel",
            KernelCategory.COPY,
        ),
        ("", "", KernelCategory.OTHER),
    ],
)
def test_names_and_categories(name, short, category):
    assert shorten_kernel_name(name) == short
    assert categorise_kernel(name) is category


def test_an_operator_tells_what_a_name_does_not():
    assert categorise_kernel("triton__0d1d2d", "aten::convolution") is KernelCategory.CONVOLUTION
    assert categorise_kernel("triton__0d1d2d") is KernelCategory.OTHER


@pytest.mark.parametrize("name", ["<" * 5000, "void (", "_ZN" + "9" * 3000, "a<b<c<d", "\x00\x1b["])
def test_hostile_names_have_a_short_one(name):
    assert len(shorten_kernel_name(name)) <= 4000
