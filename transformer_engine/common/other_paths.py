# SPDX-License-Identifier: Apache-2.0
"""Paths from which programs import names that this package defines elsewhere.

`absent` makes these modules when they are imported; no file stands there.
"""

_GROUPED = "is_op_fuser_grouped_tensor_path_supported"
_STORAGES = {
    "float8_blockwise_tensor": "Float8BlockwiseQTensorStorage",
    "float8_tensor": "Float8TensorStorage",
    "hybrid_tensor": "HybridQuantizedTensorStorage",
    "identity_tensor": "IdentityTensorStorage",
    "mxfp8_tensor": "MXFP8TensorStorage",
    "nvfp4_tensor": "NVFP4TensorStorage",
}
"""By module of ``pytorch.tensor``; programs find them below ``pytorch.tensor.storage``."""

OTHER_PATHS: dict[str, dict[str, str]] = {
    "plugin.core.builtin_ops": {"plugin.builtin": "register_builtins"},
    "pytorch.attention.custom_ops": {"pytorch.cpp_extensions.attention_ops": "*"},
    "pytorch.attention.dot_product_attention": {
        "pytorch.attention.core": "DotProductAttention _attention_backends"
    },
    "pytorch.attention.dot_product_attention.context_parallel": {
        "pytorch.attention.context_parallel": "*"
    },
    "pytorch.attention.dot_product_attention.dot_product_attention": {
        "pytorch.attention.core": "DotProductAttention"
    },
    "pytorch.attention.dot_product_attention.softmax": {
        "pytorch.attention.scores": "THREADS_PER_BLOCK THREADS_PER_WARP"
    },
    "pytorch.attention.dot_product_attention.utils": {
        "plugin.builtin.queries": "FusedAttentionParams",
        "pytorch.cpp_extensions.attention_utils": "*",
    },
    "pytorch.attention.multi_head_attention": {"pytorch.layer.multi_head_attention": "*"},
    "pytorch.cpu_offload_v1": {
        "pytorch.cpu_offload": "CPUOffloadEnabled get_cpu_offload_context is_cpu_offload_enabled "
        "is_current_layer_offloaded mark_activation_offload"
    },
    "pytorch.ep": {"pytorch.distributed": "is_ep_bootstrapped is_symm_backed"},
    "pytorch.float8_tensor": {"pytorch.tensor.float8_tensor": "Float8Quantizer Float8Tensor"},
    "pytorch.fp8": {"pytorch.quantization": "*"},
    "pytorch.ops.basic": {"pytorch.module.grouped_linear": _GROUPED},
    "pytorch.ops.basic.grouped_linear": {
        "pytorch.module.grouped_linear": f"GRAD_INPUT_BUFFER_KEY OUTPUT_BUFFER_KEY {_GROUPED}"
    },
    "pytorch.quantized_tensor": {"pytorch.tensor.quantized_tensor": "*"},
    "pytorch.tensor.storage": {f"pytorch.tensor.{m}": name for m, name in _STORAGES.items()},
    **{
        f"pytorch.tensor.storage.{module}_storage": {f"pytorch.tensor.{module}": name}
        for module, name in _STORAGES.items()
    },
    "pytorch.tensors": {"pytorch.tensor.pickling": "rebuild_quantized"},  # in checkpoints
    "pytorch.transformer": {"pytorch.layer.transformer_layer": "*"},
}
"""Module -> module that defines names -> these names, or ``*``: all that it exports.

Modules are relative to ``transformer_engine``.
"""
