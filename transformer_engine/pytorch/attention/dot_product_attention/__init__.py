# SPDX-License-Identifier: Apache-2.0
"""The core of attention: `DotProductAttention`, its masks and its backends."""

from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention,
)

__all__ = ["DotProductAttention"]
