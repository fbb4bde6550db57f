# SPDX-License-Identifier: Apache-2.0
"""`hybrid` under the path that programs import."""

from transformer_engine.pytorch.tensor.hybrid import (
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
)

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]
