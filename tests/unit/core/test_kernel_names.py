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


LIBRARIES = {
    "GEMM": (
        "ampere_igemm_int8_128x128_ldg4_nn",
        "fused_moe_kernel",
        "void reduce_1Block_kernel<float, 128, 7, cublasGemvTensorStridedBatched<float>>",
        "triton_tem_fused__scaled_mm_1",
        "triton_tem_fused_mm_3",
        "nvjet_qqtst_64x8_64x16_4x1_v_bz_TNT",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<X>>>",
        "_ZN9deep_gemm20sm100_fp8_gemm_1d1d_implE",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>",
        "void splitKreduce_kernel<32, 16, int, float>",
        "gemm_kernel",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",
        "cudnn_generated_fort_native_sdpa_sm90_knob_3i_64x64x64_bprop",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<X>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, X>",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80",
        "_ZN5aiter35fmha_bwd_hd128_bf16_causal_a32_rtneE",
        "attn_fwd",
        "bwd_kernel_dk_dv",
        "bwd_kernel_dq",
        "triton_tem_fused_flex_attention_0",
    ),
    "convolution": (
        "sm80_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32",
        "sm80_xmma_dgrad_implicit_gemm_f16f16",
        "igemm_wrw_gtcx3_nhwc_fp16_bx0_ex1_bt128x128x32",
        "MIOpenConvUni",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f3x2_stride1",
        "kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle",
        "gen_conv_kernel",
    ),
    "copy": (
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>",
        "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda()>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<X>",
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel",
        "void at::native::chunk_cat_cuda_kernel<float>",
    ),
    "normalisation": (
        "void at::native::batch_norm_collect_statistics_channels_last_kernel<X>",
        "void at::native::(anonymous namespace)::cuComputePartGradGammaBeta<float>",
        "MIOpenBatchNormFwdTrainSpatial",
        "_layer_norm_fwd_1pass_kernel",
        "_rms_norm_bwd_kernel",
        "void vllm::rms_norm_kernel<c10::BFloat16>",
    ),
    "embedding": (
        "void at::native::(anonymous namespace)::embedding_bag_forward<X>",
        "split_embedding_nobag_codegen_forward_unweighted_small_kernel",
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_1",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float>",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float>",
    ),
    "optimizer": (
        "at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>",
    ),
    "reduction": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForwardReg<float>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>",
        "liger_cross_entropy_kernel",
        "triton_per_fused_sum_3",
        "triton_red_fused_mean_1",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>",
        "void at::native::(anonymous namespace)::bitonicSortKVInPlace<X>",
        "void at::native::gatherTopK<float>",
        "void at::native::tensor_kernel_scan_innermost_dim<float>",
        "_topk_gating_softmax",
    ),
    "elementwise": (
        "triton_poi_fused_add_mul_silu_5",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float>",
        "void vllm::act_and_mul_kernel<c10::BFloat16>",
        "void at::native::max_pool_forward_nhwc<float>",
    ),
}
"""What libraries call their kernels: cuDNN, cuBLAS, CUTLASS, hipBLASLt, MIOpen, CK, AOTriton,
Liger, vLLM, DeepGEMM, fbgemm, torch's own and generated ones."""


@pytest.mark.parametrize(
    ("category", "name"), [(one, name) for one, names in LIBRARIES.items() for name in names]
)
def test_kernels_of_many_libraries_have_their_category(category, name):
    assert str(categorise_kernel(name)) == category
