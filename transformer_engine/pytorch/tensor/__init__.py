# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors and their quantizers: a file a format."""

from transformer_engine.common import absent
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from transformer_engine.pytorch.tensor.float8_row_tensor import (
    Float8RowQuantizer,
    Float8RowTensor,
    Float8RowTensorStorage,
)
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from transformer_engine.pytorch.tensor.hybrid import (
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
)
from transformer_engine.pytorch.tensor.identity import (
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import (
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
)
from transformer_engine.pytorch.tensor.nvfp4_tensor import (
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
)

_MODULES = (
    "grouped_tensor",
    "hybrid_tensor",
    "identity_tensor",
    "quantized_tensor",
    "storage",
    "utils",
)
_LAZY = dict.fromkeys(("cast_master_weights_to_fp8", "replace_raw_data"), f"{__name__}.utils")
__getattr__, __dir__ = absent.attach(globals(), _MODULES, _LAZY)
__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8RowQuantizer",
    "Float8RowTensor",
    "Float8RowTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
    *_LAZY,
    *absent.names_of(__name__),
]
