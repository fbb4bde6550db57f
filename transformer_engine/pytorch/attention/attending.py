# SPDX-License-Identifier: Apache-2.0
"""Attention as a node of a layer's plan: by the library's operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.layer_graphs import AttentionSpec
from transformer_engine.pytorch.attention.dot_product_attention import native
from transformer_engine.pytorch.attention.dot_product_attention.backends import Choice
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.module.layer_call import Attending

__all__ = ["attending"]


def attending(
    core: Any, how: tuple[Choice, Limits], slices: tuple, given: tuple[tuple, tuple, bool, bool]
) -> Attending | None:
    """How a call attends as part of a layer; None for a backend that runs in no plan.

    Scale, dropout and random state are those of `core`, a `DotProductAttention`; `how` is what its
    `limits_for` gives; `slices` are of queries, keys and values in their projections; `given` is
    the source or nothing, the angles, whether these are interleaved, and whether norms come before
    them.
    """
    choice, limits = how
    if choice.backend != "native":
        return None
    source, angles, interleaved, norms_first = given
    dropout = core.attention_dropout if core.training else 0.0
    tracker = core._get_tracker if dropout > 0.0 else None
    masks = [
        None if tensor is None else tuple(1 if n == 1 else 0 for n in tensor.shape)
        for tensor in (limits.mask, limits.bias)
    ]
    lengths = [n for n in (limits.query_lengths, limits.key_lengths) if n is not None]
    offsets, packed = (), None
    if limits.packed is not None:
        of_lengths, offsets = native.told_of(limits.packed)
        lengths = [n for n in of_lengths if n is not None]
        queries, keys = limits.packed
        packed = offsets[0].shape[0] - 1, queries.longest, keys.longest
    bias = limits.bias
    bias_dtype = torch.float32 if bias is None else bias.dtype
    sink, slopes = limits.sink, limits.slopes
    bias_grad, sink_grad = (
        added is not None and added.requires_grad and torch.is_grad_enabled()
        for added in (bias, sink)
    )
    softmax = sink is not None, sink_grad, 0 if slopes is None else slopes.dim()
    window = tuple(limits.window)
    channels = tuple(of.shape[1] for of in angles)
    repeatable = native.deterministic()
    key = (
        slices, dropout, tracker, core.softmax_scale, window, limits.bottom_right, *masks,
        len(lengths), bias_dtype, bias_grad, channels, interleaved, norms_first, core.qkv_format,
        bool(source) and source[0].requires_grad, repeatable, packed, *softmax,
    )  # fmt: skip

    def spec() -> AttentionSpec:
        return AttentionSpec(
            slices, core.qkv_format == "sbhd", core.softmax_scale, dropout, window,
            limits.bottom_right, channels, interleaved, norms_first, *masks, len(lengths),
            _core.dtype_code(bias_dtype), bias_grad, repeatable, packed, *softmax,
        )  # fmt: skip

    tensors = (limits.mask, bias, *lengths, *offsets, sink, slopes)
    tensors = (*source, *angles, *(tensor for tensor in tensors if tensor is not None))
    return Attending(key, spec, tensors, _draw_in(tracker), choice)


def _draw_in(tracker: Callable | None) -> Callable[[Tensor], None] | None:
    """What fills the random pair of a dropout in the fork of a tracker; None without one."""
    if tracker is None:
        return None

    def draw(pair: Tensor) -> None:
        with tracker().fork():
            pair.random_()

    return draw
