# SPDX-License-Identifier: Apache-2.0
"""FP8 modules for PyTorch: swap `torch.nn` modules for these, run the forward inside `autocast`."""

from transformer_engine.common.requirements import check_requirements

check_requirements()

import torch  # noqa: E402 - these are there, as was checked

from transformer_engine import _core  # noqa: E402
from transformer_engine.common import absent, recipe  # noqa: E402
from transformer_engine.pytorch.torchside.tensor_kinds import plain_tensor  # noqa: E402

_core.bind_torch(torch, plain_tensor)

from transformer_engine.pytorch.attention import (  # noqa: E402 - these use the binding
    DotProductAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.execution import overrides  # noqa: E402
from transformer_engine.pytorch.execution.recompute import checkpoint  # noqa: E402
from transformer_engine.pytorch.layer.multi_head_attention import MultiheadAttention  # noqa: E402
from transformer_engine.pytorch.layer.planned_module import PlannedModule  # noqa: E402
from transformer_engine.pytorch.layer.transformer_layer import TransformerLayer  # noqa: E402
from transformer_engine.pytorch.module.layernorm import LayerNorm  # noqa: E402
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear  # noqa: E402
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP  # noqa: E402
from transformer_engine.pytorch.module.linear import Linear  # noqa: E402
from transformer_engine.pytorch.module.rmsnorm import RMSNorm  # noqa: E402
from transformer_engine.pytorch.scaling_state.autocast import (  # noqa: E402
    autocast,
    fp8_autocast,
    get_default_recipe,
)
from transformer_engine.pytorch.scaling_state.extra_state import without_scaling_state  # noqa: E402
from transformer_engine.pytorch.scaling_state.scaling import reset  # noqa: E402
from transformer_engine.pytorch.tensor import FORMATS as _FORMATS  # noqa: E402
from transformer_engine.pytorch.tensor.pickling import rebuild_quantized  # noqa: E402, F401 - `torch.load` knows it
from transformer_engine.pytorch.tools.explain import explain  # noqa: E402
from transformer_engine.pytorch.torch_version import torch_version  # noqa: E402
from transformer_engine.pytorch.torchside.device import (  # noqa: E402
    get_device_compute_capability,
    is_available,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)

_SUBMODULES = (
    "_extra_state constants cpp_extensions cpu_offload cross_entropy custom_recipes distributed "
    "distributed_weight export graph jit ops optimizers permutation quantization router tensor "
    "utils"
).split()
"""Submodules that are imported when they are asked for."""

_NAMES_OF = {
    "attention.inference": "InferenceParams",
    "constants": "CPLoadBalancingStrategy DType",
    "cpu_offload": "get_cpu_offload_context mark_not_offload",
    "cross_entropy": "parallel_cross_entropy",
    "distributed": "CudaRNGStatesTracker",
    "export": "onnx_export",
    "module.base": "UserBufferQuantizationMode destroy_ub",
    "module.user_buffers": "initialize_ub",
    "quantization": "DelayedScalingRequest QuantizerRequest QuantizerRole fp8_model_init "
    "quantized_model_init",
    **{f"tensor.{of}": names for of, names in _FORMATS.items()},
    "tools.conversion": "convert convertible",
    "tools.counts": "counters counting reset_counters scales",
    "tools.explain_attention": "explain_attention",
    "tools.nonfinite": "NonFiniteError find_nonfinite watch_finite",
    "tools.observation": "observe",
    "tools.reporting": "report",
    "utils": "deinterleave_glu_tensor get_cudnn_version interleave_glu_tensor",
}
"""Modules that are imported when one of these names is asked for."""
_LAZY = {name: f"{__name__}.{of}" for of, names in _NAMES_OF.items() for name in names.split()}
_LAZY["plugin"] = "transformer_engine"  # te.plugin.explain, te.plugin.check

__getattr__, __dir__ = absent.attach(globals(), _SUBMODULES, _LAZY)

__all__ = [
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "PlannedModule",
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

overrides.replace_operators()
