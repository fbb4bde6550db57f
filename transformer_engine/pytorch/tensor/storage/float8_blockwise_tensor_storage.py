# SPDX-License-Identifier: Apache-2.0
"""`Float8BlockwiseQTensorStorage` under the path that programs import."""

from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensorStorage

__all__ = ["Float8BlockwiseQTensorStorage"]
