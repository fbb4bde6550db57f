# SPDX-License-Identifier: Apache-2.0
"""The one list of what NVIDIA Transformer Engine has and this library does not have yet.

An entry leaves this list when its names are built. A name that begins with a capital letter (after
underscores) is a class, any other one a function; ``Class.method`` is a method that is called on
the class itself. Modules are relative to ``transformer_engine``. Where a name is listed under
several modules of one feature, the first is its home and the others give the same object.
Modules that have the same names share a row. A module with a star has no other names than absent
ones, and no file: `absent` makes it.
"""

import re
from typing import NamedTuple


class Feature(NamedTuple):
    """Names that wait for one piece of work."""

    title: str  # for the documentation
    reason: str  # what is missing; a clause that follows a colon
    instead: str  # what a program can do today
    base: str = ""  # full name of the base class of the absent classes; "" for `object`
    partly: str = ""  # paths of what is built, but refuses some of its arguments for this reason
    names: str = ""
    """Rows "modules: names in each of them"; lines without modules go on with those before."""

    def listed(self) -> list[tuple[str, str]]:
        """Return (module, name) of all rows."""
        where: list[str] = []
        found = []
        for line in self.names.splitlines():
            modules, _, names = line.replace("*", "").rpartition(":")
            where = modules.split() or where
            found += [(module, name) for module in where for name in names.split()]
        return found


def _features(table: str) -> tuple[Feature, ...]:
    """Read titles, with the fields of each below it."""
    found = []
    for feature in re.split(r"\n(?=\S)", table.strip()):
        title, *parts = re.split(r"\n    (\w+):", feature)
        fields = dict(zip(parts[::2], parts[1::2], strict=True))
        names = fields.pop("names", "")
        texts = {name: " ".join(value.split()) for name, value in fields.items()}
        found.append(Feature(title, **texts, names=names))
    return tuple(found)


_TABLE = """
Grouped tensors
    reason: tensors are quantized one by one
    instead: one quantized tensor for each of a group
    names:
        pytorch.tensor.grouped_tensor* pytorch.tensor: GroupedTensor
        pytorch.tensor.grouped_tensor*: BANNED_SHAPE_OPS
        pytorch.tensor.storage.grouped_tensor_storage* pytorch.tensor.storage pytorch.tensor:
            GroupedTensorStorage
        pytorch.module._split_quantization*: validate_grouped_quantizer_list
        pytorch.utils: resolve_grouped_linear_single_param_flags mark_grouped_tensor
Grouped linear layers
    reason: there is no grouped GEMM kernel: `general_grouped_gemm` multiplies one pair after the
        other
    instead: one te.Linear for each expert in a torch.nn.ModuleList (megatron-core: leave
        --moe-grouped-gemm out)
    base: torch.nn.Module
    names:
        pytorch.module.grouped_linear: GroupedLinear _GroupedLinear
        pytorch.module.fp8_padding*: Fp8Padding
        pytorch.module.fp8_unpadding*: Fp8Unpadding
        pytorch.module pytorch: GroupedLinear Fp8Padding Fp8Unpadding
        pytorch.cpp_extensions.gemm pytorch.cpp_extensions: general_grouped_gemm_for_grouped_tensor
            get_grouped_gemm_setup_workspace_size
Mixtures of experts: permutation
    reason: there are no kernels that permute tokens
    instead: torch.argsort, index_select and index_add (megatron-core: leave --moe-permute-fusion
        out)
    names:
        pytorch.permutation* pytorch: moe_permute moe_permute_with_probs
            moe_permute_and_pad_with_probs moe_unpermute moe_sort_chunks_by_index
            moe_sort_chunks_by_index_with_probs
        pytorch.permutation*: moe_chunk_sort_backward moe_chunk_sort_forward
            moe_permute_index_map_backward moe_permute_index_map_forward
            moe_permute_mask_map_backward moe_permute_mask_map_forward
            moe_unpermute_index_map_backward moe_unpermute_index_map_forward
            moe_unpermute_mask_map_backward_no_probs moe_unpermute_mask_map_backward_with_probs
            moe_unpermute_mask_map_forward
Mixtures of experts: router
    reason: there are no router kernels
    instead: torch.topk and torch.softmax (megatron-core: leave --moe-router-fusion out)
    names:
        pytorch.router*: fused_topk_with_score_function fused_compute_score_for_moe_aux_loss
            fused_moe_aux_loss mark_qb_bin_bounds_validated FusedAuxLoss
            FusedComputeScoresForMoEAuxLoss FusedTopkScoreFunction FusedTopkScoreFunctionQB
            RoutingMapFormat QBHistogramMode
Mixtures of experts: communication
    reason: tokens are not exchanged by this library
    instead: torch.distributed.all_to_all_single
    names:
        pytorch.ep: EpBuffer ep_bootstrap ep_prepare ep_dispatch ep_combine ep_finalize
            symm_mem_alloc
        pytorch.distributed: symm_mem_alloc release_symm_mem_pool
Fused operations
    reason: there is no operation fuser
    instead: the modules te.Linear, te.LayerNormLinear, te.LayerNormMLP, which fuse what they
        consist of (megatron-core: leave --use-transformer-engine-op-fuser out)
    base: torch.nn.Module
    names:
        pytorch.ops.op* pytorch.ops*: FusibleOperation BasicOperation FusedOperation
        pytorch.ops.basic.grouped_linear: GroupedLinear
        pytorch.ops.basic* pytorch.ops*: AddExtraInput AllGather AllReduce BasicLinear Bias
            ConstantScale Dropout GroupedLinear Identity L2Normalization LayerNorm MakeExtraOutput
            Quantize ReduceScatter Reshape RMSNorm GELU GEGLU GLU QGELU QGEGLU ReLU ReGLU SReLU
            SReGLU SiLU SwiGLU SiTUGLU ClampedSwiGLU ScaledSwiGLU ScaledSReLU ScaledSiTUGLU
            ScaledClampedQGeGLU ScaledTanhSReLU
        pytorch.ops*: Sequential Linear register_forward_fusion register_backward_fusion
            register_forward_backward_fusion
        pytorch.ops.basic.activation*: GEGLU GELU GLU QGEGLU QGELU ReGLU ReLU SReGLU SReLU
            ScaledSReLU ScaledTanhSReLU SiLU
        pytorch.ops.basic.add_extra_input*: AddExtraInput
        pytorch.ops.basic.all_gather*: AllGather
        pytorch.ops.basic.all_reduce*: AllReduce
        pytorch.ops.basic.basic_linear*: BasicLinear
        pytorch.ops.basic.bias*: Bias
        pytorch.ops.basic.constant_scale*: ConstantScale
        pytorch.ops.basic.dropout*: Dropout
        pytorch.ops.basic.identity*: Identity
        pytorch.ops.basic.l2normalization*: L2Normalization
        pytorch.ops.basic.layer_norm*: LayerNorm
        pytorch.ops.basic.make_extra_output*: MakeExtraOutput
        pytorch.ops.basic.quantize*: Quantize
        pytorch.ops.basic.reduce_scatter*: ReduceScatter
        pytorch.ops.basic.reshape*: Reshape
        pytorch.ops.basic.rmsnorm*: RMSNorm
        pytorch.ops.basic.swiglu*: ClampedSwiGLU ScaledClampedQGeGLU ScaledSiTUGLU ScaledSwiGLU
            SiTUGLU SwiGLU
        pytorch.ops.fused*: BackwardActivationBias BackwardAddRMSNorm BackwardLinearAdd
            BackwardLinearScale ForwardLinearBiasActivation ForwardLinearBiasAdd
            ForwardLinearScaleAdd GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary
            UserbuffersBackwardLinear UserbuffersForwardLinear register_backward_fusion
            register_forward_fusion
        pytorch.ops.fused.backward_activation_bias*: BackwardActivationBias
        pytorch.ops.fused.backward_add_rmsnorm*: BackwardAddRMSNorm
        pytorch.ops.fused.backward_linear_add*: BackwardLinearAdd
        pytorch.ops.fused.backward_linear_scale*: BackwardLinearScale
        pytorch.ops.fused.forward_linear_bias_activation*: ForwardLinearBiasActivation
        pytorch.ops.fused.forward_linear_bias_add*: ForwardLinearBiasAdd
        pytorch.ops.fused.forward_linear_scale_add*: ForwardLinearScaleAdd
        pytorch.ops.fused.grouped_mlp*: GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary fuse_glu_ops
            fuse_grouped_mlp_ops fuse_unary_activation_ops is_glu_activation
            validate_grouped_mlp_dims
        pytorch.ops.fused.userbuffers_backward_linear*: UserbuffersBackwardLinear
        pytorch.ops.fused.userbuffers_forward_linear*: UserbuffersForwardLinear
        pytorch.ops.fuser*: OperationFuser OperationFusionFunction register_backward_fusion
            register_forward_backward_fusion register_forward_fusion
        pytorch.ops.linear*: Linear
        pytorch.ops.sequential*: Sequential
Fused operations: what they share
    reason: there is no operation fuser
    instead: the modules te.Linear, te.LayerNormLinear, te.LayerNormMLP, which fuse what they
        consist of
    names:
        pytorch.ops.op*: OperationContext
        pytorch.ops._common*: get_accumulate_flag_in_param get_dummy_wgrads_for_params
            get_fp8_meta_from_fp8_tensor get_fused_normalization_quantizer get_main_grad_from_param
            is_quantized_tensor maybe_autocast_dtype maybe_dequantize validate_or_alloc_output
            view_main_grad_as_grouped_buffer
AMSGrad
    reason: the largest mean of squares is not kept
    instead: optimizers.FusedAdam(amsgrad=False), or torch.optim.AdamW(amsgrad=True)
    partly: pytorch.optimizers.FusedAdam
CUDA graphs of whole models
    reason: modules are captured by torch.cuda.graph, not by a helper of this library
    instead: torch.cuda.make_graphed_callables or torch.cuda.graph, after one warm-up step with the
        same recipe
    partly: pytorch.quantization.FP8GlobalStateManager.set_skip_fp8_weight_update_tensor
    names: pytorch.graph pytorch: make_graphed_callables
CPU offload
    reason: activations are not copied to the host
    instead: torch.autograd.graph.save_on_cpu(pin_memory=True), or te.checkpoint
    partly: pytorch.cpu_offload.get_cpu_offload_context
        pytorch.cpu_offload_v1.get_cpu_offload_context
    names:
        pytorch.cpu_offload: OffloadableLayerState DefaultOffloadSynchronizer
            ManualOffloadSynchronizer start_offload OffloadSynchronizer TensorGroup
            TensorGroupProcessor
        pytorch: ManualOffloadSynchronizer
        pytorch.cpu_offload_v1: AsyncDoubleBufferGroupOffloadHandler CPUOffloadedLayer
            CpuOffloadHookWithOffloadHandler CpuOffloadSavedTensorHook GroupCommitFunction
            OffloadHandler SynchronizedGroupOffloadHandler group_prefetch_offload_commit
Cross entropy over several ranks
    reason: logits that are split over ranks are not gathered
    instead: torch.nn.functional.cross_entropy on whole logits
    partly: pytorch.cross_entropy.parallel_cross_entropy
    names: pytorch.cross_entropy: CrossEntropyFunction
Attention: parts of other backends
    reason: the backends are torch's scaled_dot_product_attention, this library's own and a
        plug-in's
    instead: NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN choose (docs/attention.md);
        te.DotProductAttention attends
    names:
        pytorch.attention.dot_product_attention.utils: FlashAttentionUtils
            FlashAttentionUtils.is_version_supported FlashAttentionUtils.set_flash_attention_version
            FlashAttentionUtils.set_flash_attention_3_params
            FlashAttentionUtils.set_flash_attention_4_params
        pytorch.attention.dot_product_attention.backends*: FlashAttention FusedAttention
            UnfusedDotProductAttention FP8EmulationFunc FusedAttnBwdArgs FusedAttnFunc
            FusedAttnFwdArgs flash_attn_cuda_bwd flash_attn_func flash_attn_func_v3
            flash_attn_func_v4 flash_attn_varlen_func flash_attn_varlen_func_v3
            flash_attn_varlen_func_v4 flash_attn_with_kvcache_v3
        pytorch.attention.dot_product_attention.flex_attention*: FusedAttentionWithScoreModFunc
        pytorch.attention.dot_product_attention.softmax: FusedScaleMaskSoftmax
            FusedScaleMaskSoftmax.is_kernel_available FusedScaleMaskSoftmax.forward_fused_softmax
            FusedScaleMaskSoftmax.forward_torch_softmax FusedScaleMaskSoftmax.get_batch_per_block
        pytorch.cpp_extensions.fused_attn pytorch.cpp_extensions: fused_attn_fwd fused_attn_bwd
Attention: steps of other backends
    reason: no backend here is put together from them
    instead: te.DotProductAttention, which takes masks, lengths, packed sequences, slopes of ALiBi
        and recipes as they are
    names:
        pytorch.attention.dot_product_attention.utils: ConvertBSHDtoTHD ConvertTHDtoBSHD PackTensors
            UnpackTensor FusedAttnSpec get_fused_attn_spec get_thd_padding_mask
            _get_supported_versions combine_and_dequantize combine_and_quantize get_alibi
            get_attention_quantizers get_full_mask mxfp8_quantize_fast_path mxfp8_quantize_only
            mxfp8_transpose_swizzle print_quantizers qkv_layout_needs_detection
            transpose_to_bhsd_htd_pytorch
        pytorch.attention.dot_product_attention.softmax: scaled_softmax_forward
            scaled_softmax_backward scaled_masked_softmax_forward scaled_masked_softmax_backward
            scaled_upper_triang_masked_softmax_forward scaled_upper_triang_masked_softmax_backward
            scaled_aligned_causal_masked_softmax_forward
            scaled_aligned_causal_masked_softmax_backward
Context parallelism
    reason: attention over ranks is made of other parts
    instead: set_context_parallel_group of te.DotProductAttention and the layers
    names:
        pytorch.attention.dot_product_attention.context_parallel: AttnFuncWithCPAndKVAllGather
            AttnFuncWithCPAndKVP2P AttnFuncWithCPAndQKVOA2A attn_forward_func_with_cp
            cp_p2p_bwd_flash_attn cp_p2p_bwd_fused_attn cp_p2p_bwd_prepare_qkv cp_p2p_fwd_flash_attn
            cp_p2p_fwd_fused_attn cp_p2p_fwd_prepare_qkv cp_per_step_configs
            flash_attn_a2a_communicate flash_attn_a2a_communicate_softmax_offset
            flash_attn_fwd_incremental_out_correction
            flash_attn_fwd_incremental_second_half_out_correction
            flash_attn_fwd_second_half_softmax_lse_correction flash_attn_fwd_softmax_lse_correction
            flash_attn_p2p_communicate get_fa_args get_kv_seq_info_after_all_gather
            get_no_load_balance_thd_causal_metadata reorder_seq_chunks_for_a2a_after_attn
            reorder_seq_chunks_for_a2a_before_attn restore_thd_gathered_kv
            unrestore_thd_gathered_kv validate_no_load_balance_thd_metadata
Overlap of communication and GEMMs
    reason: there are no user buffers
    instead: ub_* arguments of modules, and initialize_ub
    names:
        pytorch.module.base: get_ub get_ub_is_fp8 fill_userbuffers_buffer_for_all_gather
        transformer_engine_torch: CommOverlapHelper CommOverlap CommOverlapP2P
            CommGemmOverlapAlgoConfig
        plugin.core.ops: CommOverlapHelper CommOverlap CommOverlapP2P CommGemmOverlapAlgoConfig
Optimizer kernels as objects
    reason: updates are operators on lists of tensors
    instead: multi_tensor_adam, multi_tensor_sgd, or te.optimizers.FusedAdam and FusedSGD
    names: transformer_engine_torch plugin.core.ops: FusedAdamCUDAKernel FusedSGDCUDAKernel
Coalesced communication of quantized tensors
    reason: scales are put in place after a collective, which one of the caller does not say
    instead: leave external_coalescing out, and wait for the handle
    partly: pytorch.distributed.gather_along_first_dim
Modules: parts of their calls
    reason: a call of a module is one plan, and its state is made by the first one
    instead: modules of your own as torch.nn.Module around those of this library; fp8_meta,
        get_fp8_meta_tensors and reset_fp8_meta_tensors for the state
    names:
        pytorch.module.base: TransformerEngineBaseModule.adjust_amax_history_length
            TransformerEngineBaseModule.prepare_forward
            TransformerEngineBaseModule.prepare_forward_ctx TransformerEngineBaseModule.end_forward
            TransformerEngineBaseModule.grad_output_preprocess
            TransformerEngineBaseModule.init_fp8_meta_tensors
            TransformerEngineBaseModule.init_fp8_metadata
            TransformerEngineBaseModule.set_activation_dtype
            TransformerEngineBaseModule.set_meta_tensor
Single kernels
    reason: the native entry points have another form
    instead: transformer_engine_torch (docs/plugins.md), the modules (te.RMSNorm, te.Linear, ...),
        or the C API (transformer_engine.h)
    names:
        pytorch.cpp_extensions: rmsnorm_fwd rmsnorm_bwd layernorm_fwd layernorm_bwd cast_to_fp8
            cast_from_fp8 fp8_gemm
        pytorch.module._common: apply_normalization WeightGradStore
            can_reconstruct_wgrad_input_from_original
        pytorch.module.base: quantize_weight
        pytorch.module.linear: LinearFwdArgs LinearBwdArgs
        common: _get_shared_object_file
        pytorch.attention.rope: FusedRoPEFunc FusedQKVRoPEFunc
Export to ONNX
    reason: modules have no decomposed forward
    instead: torch.export.export
    partly: pytorch.export.onnx_export
    names:
        pytorch.export: te_translation_table assert_warmed_up
        pytorch.module.base: TransformerEngineBaseModule.onnx_forward
        pytorch.onnx_extensions*: TRT_FP8DequantizeLinear TRT_FP8QuantizeLinear
            TRT_MXFP8DequantizeLinear TRT_MXFP8DynamicQuantize onnx_attention_mask_func
            onnx_cs_quantize_fp8_op onnx_dequantize_fp8_op onnx_dequantize_fp8_symbolic
            onnx_dequantize_mxfp8_op onnx_dequantize_mxfp8_symbolic onnx_gemm onnx_gemm_inf_symbolic
            onnx_layernorm onnx_layernorm_op onnx_layernorm_symbolic onnx_quantize_fp8_cs_symbolic
            onnx_quantize_fp8_op onnx_quantize_fp8_symbolic onnx_quantize_mxfp8_op
            onnx_quantize_mxfp8_symbolic schema te_translation_table torch_onnx_gemm_inf_op
            trt_opset
Newton-Schulz
    reason: there is no distributed solver
    instead: the iteration in torch.matmul on whole matrices
    names:
        pytorch.optimizers.newton_schulz*: CusolverMpCtx newton_schulz newton_schulz_tp
            get_coefficients get_coefficient_iterator CoeffIterMode CoeffT NSCoeffT
        pytorch: CusolverMpCtx newton_schulz newton_schulz_tp
Fused projection of MLA
    reason: there is no such kernel
    instead: te.Linear and te.apply_rotary_pos_emb
    names:
        pytorch.attention.fused_mla_q_uproj* pytorch.attention pytorch: FusedMLAQUpProjRopeQuant
            FusedMLAQUpProjFunction
        pytorch.attention.fused_mla_q_uproj*: rotary_bwd_q_kernel
Debug features
    reason: nothing reads configuration files of nvdlfw_inspect
    instead: te.explain and docs/debugging_numerics.md
    names:
        debug.pytorch.debug_state*: TEDebugState
        debug.pytorch.debug_state* debug: set_weight_tensor_tp_group_reduce
        debug.features* debug.pytorch*:
        debug.features._test_dummy_feature*: TestDummyFeature
        debug.features.api*: TEConfigAPIMapper TEDefaultFeatures TransformerEngineAPI
            required_kwargs
        debug.features.disable_fp8_gemm*: DisableFP8GEMM
        debug.features.disable_fp8_layer*: DisableFP8Layer
        debug.features.disable_quantization_gemm*: DisableQuantizationGEMM
        debug.features.disable_quantization_layer*: DisableQuantizationLayer
        debug.features.dump_tensors*: DumpTensors TensorLogger
        debug.features.fake_quant*: FakeQuant fake_quantize
        debug.features.log_fp8_tensor_stats*: ALL_RECIPE_NAMES LogFp8TensorStats
        debug.features.log_nvfp4_tensor_stats*: LogNvfp4TensorStats
        debug.features.log_tensor_stats*: LogTensorStats
        debug.features.per_tensor_scaling*: PerTensorScaling per_tensor_cast
        debug.features.utils*: TEDebugState get_reduction_params next_enabled_iter
        debug.features.utils.stats_buffer*: STATS_BUFFERS StatsBuffers
        debug.features.utils.stats_computation*: BlockwiseDynamicRangeStat DEPENDENCIES
            FP8_NEGATIVE_ZERO STATS add_max_blockwise_dynamic_range_stats add_mse_stats
            add_nvfp4_underflows_stats add_scale_inv_stats add_underflows_stats
            compute_fp8_delayed_scaling_overflows_num compute_max_blockwise_dynamic_range
            compute_std compute_variance count_nonzero_fp8 count_nonzero_nvfp4 stats_to_num
        debug.pytorch.debug_quantization*: API_CALL_MODIFY DebugQuantizedTensor DebugQuantizer
            HIGH_PRECISION STANDARD_QUANTIZE
        debug.pytorch.utils*: any_feature_enabled next_iter_when_debug_should_be_run
        pytorch.numerics_debug*: debug fp8_tensor_statistics
Linear attention
    reason: there are no kernels of gated delta rules
    instead: a module of your own around the kernels of another library
    base: torch.nn.Module
    names:
        pytorch.attention.linear_attention.base*: LinearAttentionBase LinearAttentionKernelAdapter
            AlignedTimelineKernelAdapter
        pytorch.attention.linear_attention.gdn*: GatedDeltaNetAttention
        pytorch.attention.linear_attention.gdn2*: GatedDeltaNet2Attention
        pytorch.attention.linear_attention.gdp*: GatedDeltaProductAttention
        pytorch.attention.linear_attention* pytorch.attention pytorch: GatedDeltaNetAttention
            GatedDeltaNet2Attention GatedDeltaProductAttention
Kernels in Triton
    reason: kernels are CUDA C
    instead: the functions of transformer_engine.pytorch that need them, where they are built
    names:
        pytorch.triton.cross_entropy*: MAX_FUSED_SIZE cross_entropy_backward cross_entropy_forward
        pytorch.triton.grouped_dbias_dscales*: compute_grouped_dbias compute_grouped_dbias_dscales
        pytorch.triton.mhc*: ENFORCE_DETERMINISTIC check_deterministic mHCAggregateOp
            mHCExpandCombineOp mHCProjectionOp mHCScaleFusedOp mHCSinkhornOp mhc_fused_aggregate
            mhc_fused_expand_combine mhc_fused_projection mhc_fused_scale mhc_fused_sinkhorn
            mhc_generate_mix_and_aggregate
        pytorch.triton.pad*: pad_columnwise_scale_inv
        pytorch.triton.permutation*: make_chunk_sort_map make_row_id_map permute_with_mask_map
            sort_chunks_by_map unpermute_with_mask_map
            unpermute_with_mask_map_bwd_with_merging_probs
        common.triton.cross_entropy*: cross_entropy_backward_kernel cross_entropy_forward_kernel
            cross_entropy_tp_post_kernel cross_entropy_tp_pre_kernel
        pytorch.triton* common.triton* common.triton.grouped_dbias_dscales*:
        common.triton.mhc*: MAX_GRID_DIM_Y aggregate_config_bwd aggregate_config_fwd
            aggregate_prune_bwd aggregate_prune_fwd align_to expand_combine_config_bwd
            expand_combine_config_fwd expand_combine_prune_bwd expand_combine_prune_fwd
            projection_config_bwd_dphi projection_config_bwd_dx projection_config_fwd
            projection_prune_bwd_dphi projection_prune_fwd scale_config sinkhorn_config
        common.triton.pad*: zero_pad_kernel
        common.triton.permutation*: get_int_dtype
Operators of other libraries in graphs
    reason: graphs of torch.compile have this library's own operators as nodes
    instead: torch.compile of the modules as they are; torch.library.custom_op
    partly: pytorch.jit.no_torch_dynamo
    names:
        pytorch.dynamo.tensor_spec* pytorch.dynamo*: TensorSpec to_tensor_spec
        pytorch.dynamo.custom_op* pytorch.dynamo*: TensorOrQuantized register_custom_op
        pytorch.dynamo.custom_op*: OpaqueValueBundle
        pytorch.dynamo.quantizer_opaque* pytorch.dynamo*: is_value_opaque_quantizer
            register_value_opaque_quantizer
Symmetric memory
    reason: collectives are those of torch.distributed
    instead: torch.distributed.all_reduce; leave symmetric_ar_type at None
    names: pytorch.distributed: get_symmetric_memory_tensor symmetric_all_reduce
Scaling state as objects
    reason: scales and histories lie in arenas of the C library, whichever the recipe
    instead: module.fp8_meta and the quantizers of transformer_engine.pytorch.tensor
    names:
        pytorch.quantization: RecipeState DelayedScalingRecipeState Float8CurrentScalingRecipeState
            Float8BlockScalingRecipeState MXFP8BlockScalingRecipeState NVFP4BlockScalingRecipeState
            CustomRecipeState FP8GlobalState split_and_copy get_fp4_te_dtype _amax_and_scale_update
            _default_sf_compute
Steps of matrix products
    reason: workspaces and checks of a product are those of the C library
    instead: cpp_extensions.general_gemm, or the modules
    names:
        pytorch.cpp_extensions.gemm pytorch.cpp_extensions: get_cublas_workspace
            get_cublas_workspace_size_bytes validate_gemm_scale
        pytorch.cpp_extensions.gemm: _unwrap_tensor _validate_native_gemm_output_quantizer
Parts of quantized tensors
    reason: casts, transforms and scales are one operator here
    instead: the quantizers and tensors of transformer_engine.pytorch.tensor
    names:
        pytorch.tensor.nvfp4_tensor: get_hadamard_matrix get_no_random_sign_vector
            get_random_sign_mask_for_rht get_rht_matrix get_sign_from_vector get_wgrad_sign_vector
        pytorch.tensor.utils: clear_columnwise_cache is_custom
        pytorch.tensor: get_all_tensor_types
        pytorch.optimizers.fused_adam: get_fp8_meta
Native functions without a caller
    reason: no module here calls them
    instead: the modules and functions of transformer_engine.pytorch; a plug-in may register
        operators (docs/plugins.md)
    names:
        transformer_engine_torch: bgrad_group_quantize bulk_allocate copy_data_ptrs_to_device
            create_empty_quantized_tensor cusolvermp_ctx_create cusolvermp_ctx_destroy dsituglu
            fused_moe_aux_loss_fwd_graph_safe fused_topk_with_score_function_qb_fwd
            get_grouped_gemm_setup_workspace_size group_dequantize group_quantize
            group_requantize_inplace group_scaled_clamped_swiglu group_scaled_swiglu
            grouped_swizzle_for_gemm multi_tensor_pad_last_dim multi_tensor_swizzle_scales_for_gemm_
            multi_tensor_swizzle_scales_for_gemm_unchecked_ multi_tensor_transpose_to_bhsd
            mxfp8_scaling_compute_partial_amax mxfp8_scaling_partial_cast newton_schulz
            nvfp4_2d_compute_partial_amax nvfp4_2d_multi_tensor_transpose nvfp4_2d_partial_cast
            nvfp4_2d_scale_transpose nvfp4_compute_global_scale nvfp4_compute_per_block_scale
            nvfp4_data_transpose nvfp4_expand_scale_to_fp8 nvfp4_fused_scale
            nvfp4_group_quantize_with_amax nvfp4_multi_tensor_2d_partial_cast
            nvfp4_multi_tensor_compute_partial_amax nvfp4_multi_tensor_fused_scale
            nvfp4_quantize_with_amax scaled_clamped_dswiglu scaled_clamped_swiglu scaled_dsituglu
            scaled_dsrelu scaled_dswiglu scaled_situglu scaled_srelu scaled_swiglu situglu
            splits_to_offsets splits_to_offsets_multi swizzle_scales_for_gemm_
            te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out
            te_general_grouped_gemm_for_grouped_tensor
            thd_copy_valid_tokens_from_per_split_to_rank_local thd_cp_rank_order_to_sequence_order
            thd_sequence_order_to_cp_rank_order
JAX: mixtures of experts
    reason: there are no grouped GEMMs, routers, permutations or expert parallelism for JAX
    instead: one dense layer for each expert, and jax.lax.top_k and jnp.take for what goes where
    names:
        jax.dense: grouped_dense
        jax.quantize.tensor jax.quantize: GroupedScaledTensor1x GroupedNoScaleTensor
        jax.quantize.quantizer jax.quantize: GroupedQuantizer
        jax.cpp_extensions: grouped_gemm grouped_quantize grouped_dbias topk
        jax.permutation*: token_dispatch token_combine sort_chunks_by_index
            pure_jax_token_dispatch pure_jax_token_combine
        jax.router*: fused_topk_with_score_function fused_moe_aux_loss RoutingMapFormat
        jax.moe*: moe get_moe_recv_capacity_per_rank
        jax.flax jax.flax.module: make_grouped_dense_cls _MoEBlock
        jax.ep*: ep_bootstrap ep_prepare ep_dispatch ep_combine
JAX: products that overlap collectives
    reason: collectives are those that XLA inserts
    instead: a mesh and MeshResource
    names: jax.cpp_extensions: collective_gemm_bootstrap
"""

FEATURES = _features(_TABLE)
MODULES = frozenset(name for f in FEATURES for name in re.findall(r"(\S+)\*", f.names))
"""Modules with no other names than absent ones."""
