# SPDX-License-Identifier: Apache-2.0
"""FP8 modules for PyTorch: swap `torch.nn` modules for these, run the forward inside `autocast`."""

from transformer_engine.common.requirements import check_requirements

check_requirements()

import torch  # noqa: E402 - these are there, as was checked

from transformer_engine import _core  # noqa: E402
from transformer_engine.common import absent, recipe  # noqa: E402
from transformer_engine.pytorch.tensors import plain_tensor  # noqa: E402

_core.bind_torch(torch, plain_tensor)

from transformer_engine.pytorch.attention import (  # noqa: E402 - these use the binding
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.autocast import (  # noqa: E402
    autocast,
    fp8_autocast,
    get_default_recipe,
)
from transformer_engine.pytorch.device import (  # noqa: E402
    get_device_compute_capability,
    is_available,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.extra_state import without_scaling_state  # noqa: E402
from transformer_engine.pytorch.module.layernorm import LayerNorm  # noqa: E402
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear  # noqa: E402
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP  # noqa: E402
from transformer_engine.pytorch.module.linear import Linear  # noqa: E402
from transformer_engine.pytorch.module.rmsnorm import RMSNorm  # noqa: E402
from transformer_engine.pytorch.recompute import checkpoint  # noqa: E402
from transformer_engine.pytorch.scaling import reset  # noqa: E402
from transformer_engine.pytorch.tools.explain import explain  # noqa: E402
from transformer_engine.pytorch.torch_version import torch_version  # noqa: E402
from transformer_engine.pytorch.transformer import TransformerLayer  # noqa: E402

_SUBMODULES = (
    "constants",
    "cpp_extensions",
    "cpu_offload",
    "cpu_offload_v1",
    "cross_entropy",
    "distributed",
    "distributed_weight",
    "ep",
    "export",
    "float8_tensor",
    "fp8",
    "graph",
    "jit",
    "ops",
    "optimizers",
    "permutation",
    "quantization",
    "quantized_tensor",
    "router",
    "tensor",
    "utils",
)
"""Submodules that are imported when they are asked for."""

_LAZY = {
    "CudaRNGStatesTracker": f"{__name__}.distributed",
    "DType": f"{__name__}.constants",
    "NonFiniteError": f"{__name__}.tools.nonfinite",
    "UserBufferQuantizationMode": f"{__name__}.module.base",
    "convert": f"{__name__}.tools.conversion",
    "convertible": f"{__name__}.tools.conversion",
    "counters": f"{__name__}.tools.counts",
    "counting": f"{__name__}.tools.counts",
    "deinterleave_glu_tensor": f"{__name__}.utils",
    "find_nonfinite": f"{__name__}.tools.nonfinite",
    "fp8_model_init": f"{__name__}.quantization",
    "get_cpu_offload_context": f"{__name__}.cpu_offload",
    "get_cudnn_version": f"{__name__}.utils",
    "interleave_glu_tensor": f"{__name__}.utils",
    "mark_not_offload": f"{__name__}.cpu_offload",
    "observe": f"{__name__}.tools.observation",
    "onnx_export": f"{__name__}.export",
    "parallel_cross_entropy": f"{__name__}.cross_entropy",
    "quantized_model_init": f"{__name__}.quantization",
    "report": f"{__name__}.tools.reporting",
    "reset_counters": f"{__name__}.tools.counts",
    "scales": f"{__name__}.tools.counts",
    "watch_finite": f"{__name__}.tools.nonfinite",
}
"""Names whose modules are imported when they are asked for."""

__getattr__, __dir__ = absent.attach(globals(), _SUBMODULES, _LAZY)

__all__ = [
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "explain",
    "fp8_autocast",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_available",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "recipe",
    "reset",
    "torch_version",
    "without_scaling_state",
    *_LAZY,
    *absent.names_of(__name__),
]
