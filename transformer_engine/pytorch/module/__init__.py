# SPDX-License-Identifier: Apache-2.0
"""Modules with FP8 GEMMs, norms, and what they share."""

from transformer_engine.common import absent
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    UserBufferQuantizationMode,
    destroy_ub,
)
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm
from transformer_engine.pytorch.module.user_buffers import initialize_ub

__getattr__, __dir__ = absent.attach(
    globals(),
    ("_common", "grouped_linear"),
    {"is_module_grouped_tensor_path_supported": "transformer_engine.pytorch.module.grouped_linear"},
)
__all__ = [
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
    "UserBufferQuantizationMode",
    "destroy_ub",
    "initialize_ub",
    "is_module_grouped_tensor_path_supported",
    *absent.names_of(__name__),
]
