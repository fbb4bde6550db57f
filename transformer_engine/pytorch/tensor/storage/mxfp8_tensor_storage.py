# SPDX-License-Identifier: Apache-2.0
"""`MXFP8TensorStorage` under the path that programs import."""

from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8TensorStorage

__all__ = ["MXFP8TensorStorage"]
