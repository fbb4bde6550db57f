# SPDX-License-Identifier: Apache-2.0
"""Single kernels; most are not built under these names."""

from transformer_engine.common import absent
from transformer_engine.pytorch.constants import TE_DType

_PRODUCTS = ("general_gemm", "general_grouped_gemm")

__getattr__, __dir__ = absent.attach(
    globals(),
    ("fused_attn", "gemm"),
    dict.fromkeys(_PRODUCTS, "transformer_engine.pytorch.cpp_extensions.gemm"),
)
__all__ = ["TE_DType", *_PRODUCTS, *absent.names_of(__name__)]
