# SPDX-License-Identifier: Apache-2.0
"""The one list of what NVIDIA Transformer Engine has and this library does not have yet.

An entry leaves this list when its names are built. A name that begins with a capital letter (after
underscores) is a class, any other one a function; ``Class.method`` is a method that is called on
the class itself. Modules are relative to ``transformer_engine``. Where a name is listed under
several modules of one feature, the first is its home and the others give the same object.
Modules that have the same names share a row.
"""

from typing import NamedTuple

MODULES = frozenset(
    "pytorch.attention.dot_product_attention.context_parallel "
    "pytorch.distributed_weight pytorch.module.fp8_padding "
    "pytorch.module.fp8_unpadding pytorch.module.grouped_linear pytorch.ops.op "
    "pytorch.permutation pytorch.router "
    "pytorch.tensor.grouped_tensor".split()
)
"""Modules with no other names than absent ones. They have no files: `absent` makes them."""


class Feature(NamedTuple):
    """Names that wait for one piece of work."""

    title: str  # for the documentation
    reason: str  # what is missing; a clause that follows a colon
    instead: str  # what a program can do today
    names: str
    """Rows "modules: names in each of them"; lines without modules go on with those before."""
    base: str = ""  # full name of the base class of the absent classes; "" for `object`
    partly: str = ""  # paths of what is built, but refuses some of its arguments for this reason

    def listed(self) -> list[tuple[str, str]]:
        """Return (module, name) of all rows."""
        where: list[str] = []
        rows = []
        for line in self.names.splitlines():
            modules, _, names = line.rpartition(":")
            where = modules.split() or where
            rows += [(module, name) for module in where for name in names.split()]
        return rows


FEATURES: tuple[Feature, ...] = (
    Feature(
        "Grouped tensors",
        "tensors are quantized one by one",
        "one quantized tensor for each of a group",
        "pytorch.tensor.grouped_tensor pytorch.tensor: GroupedTensor",
    ),
    Feature(
        "Grouped linear layers",
        "there are no grouped GEMMs",
        "one te.Linear for each expert in a torch.nn.ModuleList (megatron-core: leave "
        "--moe-grouped-gemm out)",
        """
        pytorch.module.grouped_linear: GroupedLinear
        pytorch.module.fp8_padding: Fp8Padding
        pytorch.module.fp8_unpadding: Fp8Unpadding
        pytorch.module pytorch: GroupedLinear Fp8Padding Fp8Unpadding
        pytorch.cpp_extensions.gemm pytorch.cpp_extensions: general_grouped_gemm
        """,
        base="torch.nn.Module",
    ),
    Feature(
        "Mixtures of experts: permutation",
        "there are no kernels that permute tokens",
        "torch.argsort, index_select and index_add (megatron-core: leave --moe-permute-fusion out)",
        """
        pytorch.permutation pytorch: moe_permute moe_permute_with_probs
            moe_permute_and_pad_with_probs moe_unpermute moe_sort_chunks_by_index
            moe_sort_chunks_by_index_with_probs
        """,
    ),
    Feature(
        "Mixtures of experts: router",
        "there are no router kernels",
        "torch.topk and torch.softmax (megatron-core: leave --moe-router-fusion out)",
        """
        pytorch.router: fused_topk_with_score_function fused_compute_score_for_moe_aux_loss
            fused_moe_aux_loss
        """,
    ),
    Feature(
        "Mixtures of experts: communication",
        "tokens are not exchanged by this library",
        "torch.distributed.all_to_all_single",
        """
        pytorch.ep: EpBuffer ep_bootstrap ep_prepare ep_dispatch ep_combine ep_finalize
            symm_mem_alloc
        pytorch.distributed: symm_mem_alloc release_symm_mem_pool
        """,
    ),
    Feature(
        "Fused operations",
        "there is no operation fuser",
        "the modules te.Linear, te.LayerNormLinear, te.LayerNormMLP, which fuse what they consist "
        "of (megatron-core: leave --use-transformer-engine-op-fuser out)",
        """
        pytorch.ops.op pytorch.ops: FusibleOperation BasicOperation FusedOperation
        pytorch.ops.basic.grouped_linear: GroupedLinear
        pytorch.ops.basic pytorch.ops: AddExtraInput AllGather AllReduce BasicLinear Bias
            ConstantScale Dropout GroupedLinear Identity L2Normalization LayerNorm MakeExtraOutput
            Quantize ReduceScatter Reshape RMSNorm GELU GEGLU GLU QGELU QGEGLU ReLU ReGLU SReLU
            SReGLU SiLU SwiGLU SiTUGLU ClampedSwiGLU ScaledSwiGLU ScaledSReLU ScaledSiTUGLU
            ScaledClampedQGeGLU
        pytorch.ops: Sequential Linear register_forward_fusion register_backward_fusion
            register_forward_backward_fusion
        """,
        base="torch.nn.Module",
    ),
    Feature(
        "Optimizer kernels",
        "optimizers compute by torch's fused kernels, in fp32",
        "optimizers.FusedAdam and optimizers.FusedSGD with these options at their defaults",
        "",
        partly="pytorch.optimizers.FusedAdam pytorch.optimizers.FusedSGD",
    ),
    Feature(
        "CUDA graphs of whole models",
        "modules are captured by torch.cuda.graph, not by a helper of this library",
        "torch.cuda.make_graphed_callables or torch.cuda.graph, after one warm-up step with the "
        "same recipe",
        "pytorch.graph pytorch: make_graphed_callables",
        partly="pytorch.quantization.FP8GlobalStateManager.set_skip_fp8_weight_update_tensor",
    ),
    Feature(
        "CPU offload",
        "activations are not copied to the host",
        "torch.autograd.graph.save_on_cpu(pin_memory=True), or te.checkpoint",
        """
        pytorch.cpu_offload: OffloadableLayerState DefaultOffloadSynchronizer
            ManualOffloadSynchronizer start_offload
        """,
        partly="pytorch.cpu_offload.get_cpu_offload_context "
        "pytorch.cpu_offload_v1.get_cpu_offload_context",
    ),
    Feature(
        "Cross entropy over several ranks",
        "logits that are split over ranks are not gathered",
        "torch.nn.functional.cross_entropy on whole logits",
        "",
        partly="pytorch.cross_entropy.parallel_cross_entropy",
    ),
    Feature(
        "Attention: parts of other backends",
        "the backends are torch's scaled_dot_product_attention, this library's own and a plug-in's",
        "NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN choose (docs/attention.md); "
        "te.DotProductAttention attends",
        """
        pytorch.attention.dot_product_attention.utils: FlashAttentionUtils
            FlashAttentionUtils.is_version_supported
            FlashAttentionUtils.set_flash_attention_version
            FlashAttentionUtils.set_flash_attention_3_params
            FlashAttentionUtils.set_flash_attention_4_params
        pytorch.attention.dot_product_attention.backends: FlashAttention FusedAttention
            UnfusedDotProductAttention
        pytorch.attention.dot_product_attention.softmax: FusedScaleMaskSoftmax
            FusedScaleMaskSoftmax.is_kernel_available FusedScaleMaskSoftmax.forward_fused_softmax
            FusedScaleMaskSoftmax.forward_torch_softmax FusedScaleMaskSoftmax.get_batch_per_block
        pytorch.cpp_extensions.fused_attn pytorch.cpp_extensions: fused_attn_fwd fused_attn_bwd
            get_fused_attn_backend
        """,
    ),
    Feature(
        "Attention: steps of other backends",
        "no backend here is put together from them",
        "te.DotProductAttention, which takes masks, lengths, packed sequences, slopes of ALiBi and "
        "recipes as they are",
        """
        pytorch.attention.dot_product_attention.utils: ConvertBSHDtoTHD ConvertTHDtoBSHD PackTensors
            UnpackTensor _get_supported_versions combine_and_dequantize combine_and_quantize
            get_alibi get_attention_quantizers get_full_mask mxfp8_quantize_fast_path
            mxfp8_quantize_only mxfp8_transpose_swizzle print_quantizers qkv_layout_needs_detection
            transpose_to_bhsd_htd_pytorch
        pytorch.attention.dot_product_attention.softmax: scaled_softmax_forward
            scaled_softmax_backward scaled_masked_softmax_forward scaled_masked_softmax_backward
            scaled_upper_triang_masked_softmax_forward scaled_upper_triang_masked_softmax_backward
            scaled_aligned_causal_masked_softmax_forward
            scaled_aligned_causal_masked_softmax_backward
        """,
    ),
    Feature(
        "Context parallelism",
        "attention is not spread over ranks",
        "cp_group of one rank",
        """
        pytorch.attention.dot_product_attention.context_parallel: attn_forward_func_with_cp
            AttnFuncWithCPAndKVP2P AttnFuncWithCPAndKVAllGather AttnFuncWithCPAndQKVOA2A
        """,
    ),
    Feature(
        "Overlap of communication and GEMMs",
        "there are no user buffers",
        "leave the ub_* arguments at their defaults",
        """
        pytorch.module.base: initialize_ub destroy_ub get_ub
        pytorch.module pytorch: initialize_ub destroy_ub
        transformer_engine_torch: CommOverlapHelper CommOverlap CommOverlapP2P
            CommGemmOverlapAlgoConfig
        plugin.core.ops: CommOverlapHelper CommOverlap CommOverlapP2P CommGemmOverlapAlgoConfig
        """,
    ),
    Feature(
        "Optimizer kernels as objects",
        "updates are operators on lists of tensors",
        "multi_tensor_adam, multi_tensor_sgd, or te.optimizers.FusedAdam and FusedSGD",
        """
        transformer_engine_torch plugin.core.ops: FusedAdamCUDAKernel FusedSGDCUDAKernel
        """,
    ),
    Feature(
        "Communication of quantized tensors",
        "what ranks exchange is in high precision",
        "pass plain tensors, quantizer=None",
        "pytorch.distributed: _NVFP4AllGatherAsyncHandle",
        partly="pytorch.distributed.gather_along_first_dim",
    ),
    Feature(
        "FSDP of activations",
        "what a forward saves is not split over ranks",
        "torch.distributed.fsdp.fully_shard or FullyShardedDataParallel, which shard parameters; "
        "te.checkpoint for activations",
        """
        pytorch.distributed: FullyShardedDataParallel prepare_te_modules_for_fsdp
        """,
    ),
    Feature(
        "Single kernels",
        "the native entry points have another form",
        "transformer_engine_torch (docs/plugins.md), the modules (te.RMSNorm, te.Linear, ...), or "
        "the C API (transformer_engine.h)",
        """
        pytorch.cpp_extensions: rmsnorm_fwd rmsnorm_bwd layernorm_fwd layernorm_bwd cast_to_fp8
            cast_from_fp8 fp8_gemm
        pytorch.module._common: apply_normalization WeightGradStore
        """,
        partly="pytorch.cpp_extensions.general_gemm",
    ),
    Feature(
        "Export to ONNX",
        "modules have no decomposed forward",
        "torch.export.export",
        "pytorch.export: te_translation_table",
        partly="pytorch.export.onnx_export",
    ),
    Feature(
        "Newton-Schulz",
        "there is no distributed solver",
        "the iteration in torch.matmul on whole matrices",
        "pytorch: CusolverMpCtx newton_schulz",
    ),
    Feature(
        "Fused projection of MLA",
        "there is no such kernel",
        "te.Linear and te.apply_rotary_pos_emb",
        "pytorch: FusedMLAQUpProjRopeQuant",
    ),
    Feature(
        "Sharded weights of other libraries",
        "weights are plain parameters",
        "FSDP2 (torch.distributed.fsdp.fully_shard)",
        """
        pytorch.distributed_weight: DistributedWeight materialize_weight_for_forward
            materialize_weight_for_backward materialize_weights_for_forward
            materialize_weights_for_backward finalize_weight_grads
        """,
    ),
    Feature(
        "Debug features",
        "nothing reads configuration files of nvdlfw_inspect",
        "te.explain and docs/debugging_numerics.md",
        "debug.pytorch.debug_state: TEDebugState",
    ),
)
