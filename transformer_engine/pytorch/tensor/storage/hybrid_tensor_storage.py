# SPDX-License-Identifier: Apache-2.0
"""`HybridQuantizedTensorStorage` under the path that programs import."""

from transformer_engine.pytorch.tensor.hybrid import HybridQuantizedTensorStorage

__all__ = ["HybridQuantizedTensorStorage"]
