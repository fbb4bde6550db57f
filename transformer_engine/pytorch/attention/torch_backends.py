# SPDX-License-Identifier: Apache-2.0
"""Attention on torch's operators: its fused attention, and in steps on the library's own softmax.

Both take [batch, heads, length, channels] alone; `with_heads_first` lets them take every format.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.masks import CAUSAL_WINDOW
from transformer_engine.pytorch.attention.problem import Heads, to_packed, to_padded
from transformer_engine.pytorch.attention.scores import scaled_softmax, softcap
from transformer_engine.pytorch.execution.custom_ops import aligned, with_aligned_gradient

# ---- formats -------------------------------------------------------------------------------------


_HEADS_FIRST = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_HEADS_BACK = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}
"""Permutations of a format to [batch, heads, length, channels], and back."""


def with_heads_first(attend: Callable) -> Callable:
    """A backend from a function of tensors [batch, heads, length, channels].

    Packed sequences become a padded batch, and its output is packed again.
    """

    def run(heads: Heads, qkv_format: str, limits: Limits, *arguments: float) -> Any:
        tensors = heads.split()
        if limits.packed is not None:
            return _run_padded(run, tensors, limits, *arguments)
        query, key, value = (tensor.permute(*_HEADS_FIRST[qkv_format]) for tensor in tensors)
        out = attend(query, key, value, limits, *arguments)
        out, *top = out if limits.wants_top else (out,)
        if limits.query_lengths is not None:
            out = _nan_unless(out, limits.lengths_fit(query.shape[2], key.shape[2]))
        out = out.permute(*_HEADS_BACK[qkv_format])
        return (out, *top) if top else out

    return run


def _nan_unless(out: Tensor, fit: Tensor) -> Tensor:
    """Make NaN of what is of sequences that do not fit [batch], and of their gradients likewise."""
    return out * torch.where(fit, 1.0, torch.nan).to(out.dtype)[:, None, None, None]


def _run_padded(
    run: Callable,
    tensors: tuple[Tensor, Tensor, Tensor],
    limits: Limits,
    *arguments: float,
) -> Any:
    """Run a backend that takes no packed sequences."""
    query, key, value = tensors
    (queries, keys), tokens = limits.packed, query.shape[0]
    of_queries, of_keys = queries.rows(tokens), keys.rows(key.shape[0])
    padded = to_padded(query, of_queries), to_padded(key, of_keys), to_padded(value, of_keys)
    lengths = {"query_lengths": queries.ends(), "key_lengths": keys.ends()}
    out = run(Heads(padded), "bshd", limits.but(packed=None, **lengths), *arguments)
    out, *top = out if limits.wants_top else (out,)
    fit = queries.lengths_fit(tokens) & keys.lengths_fit(key.shape[0])
    out = to_packed(_nan_unless(out, fit), of_queries, tokens)
    return (out, *top) if top else out


# ---- torch's fused attention ---------------------------------------------------------------------


@with_heads_first
def attend_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Tensor:
    """softmax(scale * query x key^T) x value; torch chooses among its kernels at each call.

    Arguments as of `attend_in_steps`; the limits say nothing but, where the window is causal,
    that a query sees keys up to its own position, counted from the start of both. Torch's
    generator draws the dropout.
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


# ---- in steps ------------------------------------------------------------------------------------


@with_heads_first
def attend_in_steps(
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
