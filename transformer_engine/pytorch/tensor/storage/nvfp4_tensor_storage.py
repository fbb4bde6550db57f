# SPDX-License-Identifier: Apache-2.0
"""`NVFP4TensorStorage` under the path that programs import."""

from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4TensorStorage

__all__ = ["NVFP4TensorStorage"]
