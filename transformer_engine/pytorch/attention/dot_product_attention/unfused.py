# SPDX-License-Identifier: Apache-2.0
"""Attention in three steps on the library's own softmax: every mask, window and bias."""

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.attention.dot_product_attention.softmax import scaled_softmax


def attend(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Tensor:
    """Softmax(scale * query key^T + bias) value, with dropout of the probabilities.

    Heads that share keys and values are folded into the queries of one product, so keys and values
    are not repeated. The product is scaled before it is rounded: fp16 scores do not overflow for
    being unscaled. Shapes: query [batch, heads, queries, channels], key [batch, groups, keys,
    channels], value [batch, groups, keys, channels of values]; the output [batch, heads, queries,
    channels of values] is contiguous.
    """
    batch, heads, queries, channels = query.shape
    groups, keys = key.shape[1], key.shape[2]
    limits = limits.without_lengths(queries, keys)
    folded = heads // groups * queries
    scores = torch.baddbmm(
        query.new_empty(1),  # times 0: not read
        query.reshape(batch * groups, folded, channels),
        key.reshape(batch * groups, keys, channels).transpose(1, 2),
        beta=0,
        alpha=scale,
    )
    probabilities = scaled_softmax(
        scores.view(batch, heads, queries, keys),
        limits.mask,
        limits.bias,
        dropout=dropout,
        window=limits.window,
        diagonal=keys - queries if limits.bottom_right else 0,
    )
    values = value.reshape(batch * groups, keys, value.shape[3])
    out = torch.bmm(probabilities.view(batch * groups, folded, keys), values)
    return out.view(batch, heads, queries, value.shape[3])
