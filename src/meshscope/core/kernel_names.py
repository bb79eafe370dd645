"""What a kernel of a device is for, and a name for it that people can read, from its own name.

Categories come from the libraries' naming (cuBLAS, cuDNN, CUTLASS, hipBLASLt, CK, MIOpen, Triton,
ATen, FlashAttention, DeepEP, …); where a name says nothing, from the operator that launched it.
What neither tells is `other`. A fused kernel counts for the most expensive thing in its name.
"""

import re
from enum import StrEnum
from functools import lru_cache


class KernelCategory(StrEnum):
    """What kind of work a device event is."""

    GEMM = "GEMM"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    NORMALISATION = "normalisation"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    COMMUNICATION = "communication"
    COPY = "copy"
    """Between memories, between layouts, and fills."""
    OTHER = "other"


_KERNELS: tuple[tuple[KernelCategory, re.Pattern[str]], ...] = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        (
            KernelCategory.ATTENTION,
            r"flash|fmha|attention|attn|sdpa|sage_fwd|sage_bwd|mla_|paged_?kv|compute_dot_do_o|convert_dq"
            r"|bwd_kernel_(?:d[kqv]|fuse)|bwd_preprocess",
        ),
        (
            KernelCategory.CONVOLUTION,
            r"conv(?!ert)|winograd|_fprop|dgrad|wgrad|scudnn|igemm(?!_int8)|implicit_gemm|miopen.*(?:xdl|asm)"
            r"|naive_conv|depthwise|im2d?2?col|col2im|sp3AsmConv|gtcx|fft2d_",
        ),
        (
            KernelCategory.NORMALISATION,
            r"(?:layer|batch|group|rms|instance)_?norm|\bbn_|batchnorm|GammaBeta|RowwiseMoments"
            r"|layer_norm|welford|rsqrt|ln_(?:fwd|bwd)|ComputeInternalGradients|ComputeFusedParams",
        ),
        (
            KernelCategory.EMBEDDING,
            r"embedding|embs_kernel|indexSelect|EmbeddingBag|linearize_index|bounds_check_indices",
        ),
        (
            KernelCategory.OPTIMIZER,
            r"adam|\blamb\b|sgd_?momentum|multi_tensor_apply|FusedOptimizer|adagrad",
        ),
        (
            KernelCategory.GEMM,
            r"(?<!fb)gemm|Cijk_|\bbmm_|nvjet|matmul|cublas|splitKreduce|gemv|_mm_|\bmm_|dot_kernel|gemmk1"
            r"|addmm(?=.*template)|tem_fused|(?<!sub)tensorop|epilogue::impl|wvSplitK|moe_.*mxfp|fused_moe|_mm\b",
        ),
        (
            KernelCategory.REDUCTION,
            r"reduce_?kernel|reduce_fused|softmax|logsumexp|cross_?entropy|nll_loss|triton_(?:red|per)_|cumsum"
            r"|segmented_?reduce|DeviceReduce|DeviceScan|RadixSort|topk|argmax|sort|\bnorm_kernel"
            r"|l2norm|scan_kernel|_scan_(?:innermost|outer)|bitonic",
        ),
        (
            KernelCategory.COPY,
            r"copy_kernel|CatArray|transpose|nchwToNhwc|nhwcToNchw|FillFunctor|\bcopy\b|memcpy|memset"
            r"|permute|recat_copy|reshape_and_cache|split_with_sizes|chunk_cat|batched_transpose"
            r"|SubTensorOp|_copy_|store_kvcache",
        ),
        (
            KernelCategory.ELEMENTWISE,
            r"elementwise|triton_poi_|act_and_mul|_silu|gelu|rotary|rope|dropout|activation"
            r"|add_|mul_|quant|_cast_|swiglu|pointwise|\bscale|where|index_|indexing_|indexFunc|gather|scatter|pool|upsample|distribution",
        ),
    )
)
_LIKE_COPY = re.compile(r"direct_copy_kernel|(?:bfloat16|float16|float8)_copy_kernel|FillFunctor")
_OPERATORS: tuple[tuple[KernelCategory, re.Pattern[str]], ...] = tuple(
    (category, re.compile(pattern, re.IGNORECASE))
    for category, pattern in (
        (KernelCategory.ATTENTION, r"attention|attn|sdpa"),
        (KernelCategory.CONVOLUTION, r"conv"),
        (KernelCategory.NORMALISATION, r"_norm\b|_norm_|batch_norm|layer_norm"),
        (KernelCategory.EMBEDDING, r"embedding"),
        (KernelCategory.OPTIMIZER, r"fused_adam|fused_sgd|_foreach_"),
        (
            KernelCategory.GEMM,
            r"::(?:mm|addmm|bmm|baddbmm|matmul|linear|_scaled_mm|_grouped_mm)\b|moe",
        ),
        (
            KernelCategory.REDUCTION,
            r"::(?:sum|mean|softmax|_softmax|log_softmax|argmax|max|min|topk)",
        ),
        (KernelCategory.COPY, r"::(?:copy_|cat|contiguous|clone|fill_|zero_|to)\b"),
        (KernelCategory.ELEMENTWISE, r"::(?:add|mul|sub|div|relu|gelu|silu|threshold|where|pow)"),
    )
)


@lru_cache(maxsize=1 << 14)
def categorise_kernel(name: str, operator: str = "") -> KernelCategory:
    """By the kernel's name, else by that of the operator that launched it. Communication and copies
    between memories are told by more than a name: `ingest.traces.trace_kernels`."""
    text = name[:2000]
    if _LIKE_COPY.search(text):
        return KernelCategory.COPY
    for patterns, said in ((_KERNELS, text), (_OPERATORS, operator[:400])):
        for category, pattern in patterns:
            if said and pattern.search(said):
                return category
    return KernelCategory.OTHER


_TEMPLATES = re.compile(r"^(?:Kernel2?|device_kernel|kernel|kentry|globalKernel)$")
"""Wrappers that say nothing: what is inside of them has the name."""
_DULL_WORDS = """
    void const unsigned signed int long short char bool float double half true false std array at
    native detail c10 cub cuda thrust anonymous namespace lambda operator TensorIteratorBase
    TensorIterator Array TrivialOffsetCalculator OffsetCalculator memory LoadWithoutCast
    StoreWithoutCast LoadWithCast StoreWithCast gpu_kernel_impl gpu_kernel_impl_nocast
    binary_internal func_wrapper_t RestrictPtrTraits GenericPackedTensorAccessor TensorListMetadata
    elementwise_kernel_helper cutlass cute tuple C decltype nullptr Scalar policies type
    ReduceOp OpaqueType CatArrInputTensorMetadata Params auto typename size_t uint
    """
_DULL = frozenset(_DULL_WORDS.split())
_TYPES = {"float": "f32", "double": "f64", "BFloat16": "bf16", "Half": "f16", "__half": "f16",
          "__nv_bfloat16": "bf16", "hip_bfloat16": "bf16"}  # fmt: skip
_MAX_INSIDE = 2
_WORD = re.compile(r"[A-Za-z_]\w*")
_TENSILE = re.compile(r"^Cijk_(\w+?)_.*?(MT\d+x\d+x\d+)")


@lru_cache(maxsize=1 << 14)
def shorten_kernel_name(name: str) -> str:
    """`vectorized_elementwise_kernel<CUDAFunctor_add, f32>` of the whole signature.

    Namespaces, parameters and templates' settings are left out; words that tell kernels of one
    template apart are kept. Different kernels may get the same name.
    """
    text = " ".join(name.split())[:4000].removeprefix("void ").removesuffix(" [clone .kd]")
    tensile = _TENSILE.match(text)
    if tensile:
        return f"Cijk_{tensile[1]} {tensile[2]}"
    if text.startswith("_ZN"):
        return _demangle(text)
    text = text.replace("(anonymous namespace)::", "")
    head, inside = _split_template(text)
    base = head.rsplit("::", 1)[-1]
    words = _find_telling_words(inside)
    if _TEMPLATES.match(base) and words:
        return words[0] if len(words) == 1 else f"{words[0]}<{words[1]}>"
    kinds = [_TYPES[one] for one in _WORD.findall(inside) if one in _TYPES][:1]
    parts = [one for one in words[:_MAX_INSIDE] if one != base] + kinds
    return f"{base}<{', '.join(parts)}>" if parts else base or text


def _demangle(text: str) -> str:
    """The last part of a mangled name; of a wrapper, what is inside of it."""
    names, place = [], 0
    while (found := re.compile(r"\d+").search(text, place)) is not None:
        length = int(found[0][:4])
        name = text[found.end() : found.end() + length]
        place = found.end() + max(length, 1)
        if len(name) == length and _WORD.fullmatch(name):
            names.append((name, text[place : place + 1]))
    telling = [name for name, after in names if after in ("I", "E") and not _TEMPLATES.match(name)]
    return telling[0] if telling else text


def _split_template(text: str) -> tuple[str, str]:
    """The name before its templates or parameters, and what stands in its templates."""
    at = min((place for place in (text.find("<"), text.find("(")) if place >= 0), default=-1)
    if at < 0:
        return text, ""
    if text[at] == "(":
        return text[:at], ""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == "<") - (text[place] == ">" and text[place - 1] != "-")
        if not depth:
            return text[:at], text[at + 1 : place]
    return text[:at], text[at + 1 :]


def _find_telling_words(inside: str) -> list[str]:
    found: dict[str, None] = {}
    for word in _WORD.findall(inside):
        if word not in _DULL and word not in _TYPES and not re.fullmatch(r"[a-z]|\w\d?u?l?", word):
            found[word] = None
    # What comes first may be the namespace of what follows.
    names = list(found)
    return [one for one in names if f"{one}::" not in inside or len(names) == 1]
