# SPDX-License-Identifier: Apache-2.0
"""Storages of quantized tensors, of which torch knows nothing: a module a format."""

from transformer_engine.common import absent
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.float8_tensor import Float8TensorStorage
from transformer_engine.pytorch.tensor.hybrid import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.identity import IdentityTensorStorage
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4TensorStorage

_MODULES = (
    "float8_blockwise_tensor_storage",
    "float8_tensor_storage",
    "hybrid_tensor_storage",
    "identity_tensor_storage",
    "mxfp8_tensor_storage",
    "nvfp4_tensor_storage",
)
__getattr__, __dir__ = absent.attach(globals(), _MODULES)
__all__ = [
    "Float8TensorStorage",
    "Float8BlockwiseQTensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
    "HybridQuantizedTensorStorage",
    "IdentityTensorStorage",
    *absent.names_of(__name__),
]
