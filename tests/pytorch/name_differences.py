# SPDX-License-Identifier: Apache-2.0
"""What test_inventory.py lets differ from NVIDIA Transformer Engine, and why."""

_TE = "transformer_engine.pytorch"

SAME_DEFAULTS = {("device", "cuda"): None}
"""(argument, default there): default here, which means the same. None is the GPU where there is
one."""

_REASONS = {
    "it says how that package finds, loads and checks its own libraries": """
        transformer_engine.common.MIN_CUDNN_VERSION
        transformer_engine.common.check_cudnn_version
        transformer_engine.common.cuda_include_dir
        transformer_engine.common.get_te_core_package_info
        transformer_engine.common.load_framework_extension
        transformer_engine.common.load_libs_for_no_ctk
        transformer_engine.common.sanity_checks_for_pypi_installation
        transformer_engine.common.system_curand
        transformer_engine.common.system_nvrtc
        .load_framework_extension
        .attention.dot_product_attention.backends.cutlass_dsl_version
    """,
    "it is another library's, or of another module, and seen there by the way": """
        transformer_engine.debug.features.log_fp8_tensor_stats.NVFP4Quantizer
        transformer_engine.debug.pytorch.debug_quantization.aten
        .attention.fused_mla_q_uproj.tl
        .attention.fused_mla_q_uproj.triton
        .attention.dot_product_attention.dot_product_attention.FlashAttention
        .attention.dot_product_attention.dot_product_attention.formats
        .graph.SingleOrTuple
        .tensor.*.aten
    """,
    "it serves that package's own deprecations and messages": """
        transformer_engine.common.utils
        .tensor._quantization_helpers
    """,
    "the name is that of the function te.newton_schulz; optimizers.newton_schulz is the module": """
        .newton_schulz
    """,
    "it is called by `apply`, which is the same": """
        .utils.SplitAlongDim.forward
        .utils.SplitAlongDim.backward
    """,
    "each class that is made has it (parallel.TensorParallel), not their common base": """
        .module.base.TransformerEngineBaseModule.set_tensor_parallel_group
    """,
    "its FSDP2 hooks call it between themselves": """
        *.fsdp_assign_gathered
        *.fsdp_buffer_fields
        *.fsdp_extract_buffers
    """,
    "a private argument of the capture of graphs": """
        .quantization.autocast.__init__
        .quantization.fp8_autocast
    """,
    "all tensors are given: what is not there is None": """
        .tensor.storage.*.get_data_tensors
    """,
}

DIFFERENCES = {
    (_TE + pattern if pattern.startswith(".") else pattern): reason
    for reason, patterns in _REASONS.items()
    for pattern in patterns.split()
}
