# SPDX-License-Identifier: Apache-2.0
"""`transformer_engine.pytorch.quantized_tensor` under another path."""

from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

__all__ = ["QuantizedTensor", "QuantizedTensorStorage", "Quantizer"]
