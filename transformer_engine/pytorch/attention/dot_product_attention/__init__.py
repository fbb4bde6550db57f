# SPDX-License-Identifier: Apache-2.0
"""The core of attention: `DotProductAttention`, its masks and its backends."""

from transformer_engine.common import absent
from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
    DotProductAttention,
)

__getattr__, __dir__ = absent.attach(globals(), ("context_parallel", "utils"))
__all__ = ["DotProductAttention"]

_attention_backends: dict[str, bool] = {"backend_selection_requires_update": False}
"""Programs set the entry after they have changed a variable; here every call reads them."""
