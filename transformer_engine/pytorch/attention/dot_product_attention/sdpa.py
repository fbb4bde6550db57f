# SPDX-License-Identifier: Apache-2.0
"""Torch's fused attention: `torch.nn.functional.scaled_dot_product_attention`."""

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.attention.dot_product_attention.masks import CAUSAL_WINDOW

__all__ = ["attend"]


def attend(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Tensor:
    """softmax(scale * query x key^T) x value; torch chooses among its kernels at each call.

    Parameters
    ----------
    query, key, value : Tensor
        [batch, heads, length, channels], any strides; keys and values may have fewer heads.
    limits : Limits
        Nothing but, where its window is causal: a query sees keys up to its own position, counted
        from the start of both.
    scale : float
        Of the scores.
    dropout : float
        Probability with which a probability is dropped; torch's generator draws.

    Returns
    -------
    Tensor
        [batch, heads, queries, channels].
    """
    causal, grouped = limits.window == CAUSAL_WINDOW, query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, None, dropout, causal, scale=scale, enable_gqa=grouped
    )
