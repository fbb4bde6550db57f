# SPDX-License-Identifier: Apache-2.0
"""`transformer_engine.pytorch.tensor.float8_tensor` under its older path."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

__all__ = ["Float8Quantizer", "Float8Tensor"]
