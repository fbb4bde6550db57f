# SPDX-License-Identifier: Apache-2.0
"""Torch's fused attention: `torch.nn.functional.scaled_dot_product_attention`."""

import contextlib

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.masks import CAUSAL_WINDOW
from transformer_engine.pytorch.execution.custom_ops import aligned, with_aligned_gradient


def attend(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Tensor:
    """softmax(scale * query x key^T) x value; torch chooses among its kernels at each call.

    Arguments as of `unfused.attend`; the limits say nothing but, where the window is causal, that a
    query sees keys up to its own position, counted from the start of both. Torch's generator draws
    the dropout.
    """
    causal, grouped = limits.window == CAUSAL_WINDOW, query.shape[1] != key.shape[1]
    # cuDNN refuses to drop everything, and makes nothing of a batch of none.
    plain = dropout == 1.0 or query.numel() == 0 or key.numel() == 0
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        out = torch.nn.functional.scaled_dot_product_attention(
            aligned(query),
            aligned(key),
            aligned(value),
            None,
            dropout,
            causal,
            scale=scale,
            enable_gqa=grouped,
        )
    return with_aligned_gradient(out)
