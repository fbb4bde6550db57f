# SPDX-License-Identifier: Apache-2.0
"""`Float8TensorStorage` under the path that programs import."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8TensorStorage

__all__ = ["Float8TensorStorage"]
