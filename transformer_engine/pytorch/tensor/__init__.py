# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors and their quantizers: a file a format, loaded when a name is asked for."""

from transformer_engine.common import absent

FORMATS = {
    "float8_blockwise_tensor": "Float8BlockQuantizer Float8BlockwiseQTensor "
    "Float8BlockwiseQTensorStorage",
    "float8_row_tensor": "Float8RowQuantizer Float8RowTensor Float8RowTensorStorage",
    "float8_tensor": "Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor "
    "Float8TensorStorage",
    "hybrid_tensor": "HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer",
    "identity_tensor": "IdentityQuantizer IdentityTensor IdentityTensorStorage",
    "mxfp8_tensor": "MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage",
    "nvfp4_tensor": "NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage",
    "quantized_tensor": "QuantizedTensor QuantizedTensorStorage Quantizer "
    "prepare_for_saving restore_from_func_ctx restore_from_saved",
}
"""Names of files of this folder, which `transformer_engine.pytorch` has, too."""
_NAMES_OF = {**FORMATS, "utils": "cast_master_weights_to_fp8 replace_raw_data"}
_LAZY = {name: f"{__name__}.{of}" for of, names in _NAMES_OF.items() for name in names.split()}
__getattr__, __dir__ = absent.attach(globals(), (*_NAMES_OF, "grouped_tensor"), _LAZY)
__all__ = [*_LAZY, *absent.names_of(__name__)]
