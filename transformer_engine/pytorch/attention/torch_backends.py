# SPDX-License-Identifier: Apache-2.0
"""Attention in three steps on the library's own softmax: every mask, window and bias."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.logits import softcap
from transformer_engine.pytorch.attention.softmax import scaled_softmax


def attend(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Any:
    """Softmax(scale * query key^T + bias) value, with dropout of the probabilities.

    Heads that share keys and values are folded into the queries of one product, so keys and values
    are not repeated. The product is scaled before it is rounded: fp16 scores do not overflow for
    being unscaled. Shapes: query [batch, heads, queries, channels], key [batch, groups, keys,
    channels], value [batch, groups, keys, channels of values]; the output [batch, heads, queries,
    channels of values] is contiguous. A `softcap` of the limits, then a `score_mod`, change the
    scaled scores before bias and mask; they are in fp32 then, and so is the product. Where the
    limits want them, the largest scores [heads] fp32 follow, without a gradient.
    """
    batch, heads, queries, channels = query.shape
    groups, keys = key.shape[1], key.shape[2]
    limits = limits.as_tensors(queries, keys)
    diagonal = keys - queries if limits.bottom_right else 0
    folded = heads // groups * queries
    factors = (
        query.reshape(batch * groups, folded, channels),
        key.reshape(batch * groups, keys, channels).transpose(1, 2),
    )
    if limits.score_mod is None and limits.softcap == 0.0:
        scores = _product(*factors, scale).view(batch, heads, queries, keys)
    else:
        with _in_own_dtypes(query.device):
            scores = _product(*(factor.float() for factor in factors), scale)
        scores, limits = _changed(scores.view(batch, heads, queries, keys), limits)
    probabilities = scaled_softmax(
        scores,
        limits.mask,
        limits.bias,
        sink=limits.sink,
        dropout=dropout,
        window=limits.window,
        diagonal=diagonal,
    )
    if limits.cast is not None:
        probabilities = limits.cast(probabilities)
    values = value.reshape(batch * groups, keys, value.shape[3])
    weights = probabilities.to(value.dtype).view(batch * groups, folded, keys)
    out = torch.bmm(weights, values)
    out = out.view(batch, heads, queries, value.shape[3])
    return (out, _largest(scores.detach(), limits, diagonal)) if limits.wants_top else out


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    nothing = a.new_empty(1)  # times 0: not read
    return torch.baddbmm(nothing, a, b, beta=0, alpha=scale)


def _changed(scores: Tensor, limits: Limits) -> tuple[Tensor, Limits]:
    """Scores [batch, heads, queries, keys] fp32 as the limits change them, and what these still do.

    A bias that is added before the scale is a part of what is capped.
    """
    if limits.softcap > 0.0:
        if limits.bias_in_cap:
            scores, limits = scores + limits.bias, limits.but(bias=None)
        scores = softcap(scores, limits.softcap)
    if limits.score_mod is not None:
        scores = limits.score_mod(scores)
    return scores, limits


def _in_own_dtypes(device: torch.device) -> Any:
    """Without `torch.autocast`, which would round what is multiplied."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _largest(scores: Tensor, limits: Limits, diagonal: int) -> Tensor:
    """The largest score of each head [heads] fp32; -Inf where none may be attended."""
    wide = scores.float()
    if limits.bias is not None:
        wide = wide + limits.bias.detach()
    start = torch.full((1, 1, 1, 1), diagonal, device=scores.device)
    for mask in (limits.mask, masks.window_mask(limits.window, start, *scores.shape[2:])):
        if mask is not None:
            wide = wide.masked_fill(mask, -torch.inf)
    if wide.numel() == 0:
        return wide.new_full(wide.shape[1:2], -torch.inf)
    return wide.amax((0, 2, 3))
