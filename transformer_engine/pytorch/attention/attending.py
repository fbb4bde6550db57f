# SPDX-License-Identifier: Apache-2.0
"""Attention as a node of a layer's plan: by the library's operator, or by torch's in the run."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.layer_graphs import AttentionSpec
from transformer_engine.pytorch.attention.dot_product_attention import native, sdpa
from transformer_engine.pytorch.attention.dot_product_attention.backends import Choice
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.attention.dot_product_attention.masks import CAUSAL_WINDOW
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
    backend = choice.backend
    source, angles, interleaved, norms_first = given
    dropout = core.attention_dropout if core.training else 0.0
    tracker = core._get_tracker if dropout > 0.0 else None
    if limits.sink is not None or limits.slopes is not None:
        return None
    if backend == "native":
        functions = {"fill": _draw_in(tracker)}
    elif backend == "sdpa" and sdpa.runs((slices[0][1], slices[2][1])):
        causal = limits.window == CAUSAL_WINDOW
        functions = _sdpa_functions(tracker, (dropout, causal, core.softmax_scale), core.qkv_format)
    else:
        return None
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
    bias_grad = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    window = tuple(limits.window)
    channels = tuple(of.shape[1] for of in angles)
    repeatable = native.deterministic()
    key = (
        backend, slices, dropout, tracker, core.softmax_scale, window, limits.bottom_right, *masks,
        len(lengths), bias_dtype, bias_grad, channels, interleaved, norms_first, core.qkv_format,
        bool(source) and source[0].requires_grad, repeatable, packed,
    )  # fmt: skip

    def spec() -> AttentionSpec:
        return AttentionSpec(
            slices, core.qkv_format == "sbhd", core.softmax_scale, dropout, window,
            limits.bottom_right, backend == "sdpa", channels, interleaved, norms_first, *masks,
            len(lengths),
            _core.dtype_code(bias_dtype), bias_grad, repeatable, packed,
        )  # fmt: skip

    tensors = (limits.mask, bias, *lengths, *offsets)
    tensors = (*source, *angles, *(tensor for tensor in tensors if tensor is not None))
    return Attending(key, spec, tensors, functions, choice)


def _fork(tracker: Callable | None) -> Any:
    return contextlib.nullcontext() if tracker is None else tracker().fork()


def _draw_in(tracker: Callable | None) -> Callable:
    def draw(tensors: Sequence[Tensor], kept: dict | None) -> None:
        del kept
        with _fork(tracker):
            tensors[0].random_()

    return draw


def _sdpa_functions(
    tracker: Callable | None, settings: tuple[float, bool, float], qkv_format: str
) -> dict[str, Callable]:
    """Torch's attention as the stages of forward and backward.

    A forward gets query, key and value [batch, heads, length, channels] and makes the output [..,
    heads * channels]; what torch's gradient needs besides is kept. A backward gets query, key,
    value, the gradient of the output, the output, and the gradients that it fills.
    """
    name = object()

    def forward(tensors: Sequence[Tensor], kept: dict | None) -> Tensor:
        with _fork(tracker):
            out, found = sdpa.forward(*tensors[:3], settings, kept is not None)
        rows = _rows_of(out, qkv_format)
        if kept is not None:
            # The gradient has the bits of torch's own where it reads the output as it was written.
            how, values = found
            copied = how is not None and rows.data_ptr() != out.data_ptr()
            kept[name] = how, (*values, out) if copied else values
        return rows

    def backward(tensors: Sequence[Tensor], kept: dict) -> None:
        query, key, value, grad, out, *grads = tensors
        shape = (*query.shape[:3], value.shape[3])
        grad, out = _heads_of(grad, shape, qkv_format), _heads_of(out, shape, qkv_format)
        how, values = kept[name]
        if how is not None and len(values) == 4:
            *values, out = values
        made = sdpa.backward(grad, (query, key, value, out), (how, values), settings)
        torch._foreach_copy_(grads, list(_wanted(made, len(grads))))

    return {"attention": forward, "attention_backward": backward}


def _wanted(made: tuple, count: int) -> tuple:
    """Gradients of all; of the query alone, or of key and value, whose projections are others."""
    return {1: made[:1], 2: made[1:], 3: made}[count]


def _rows_of(out: Tensor, qkv_format: str) -> Tensor:
    """[batch, heads, length, channels] as the projection reads it, [.., heads * channels]."""
    batch, heads, length, channels = out.shape
    columns, sbhd = heads * channels, qkv_format == "sbhd"
    if out.stride() != _strides(out.shape, qkv_format):  # the kernel wrote in another order
        return out.permute(*((2, 0, 1, 3) if sbhd else (0, 2, 1, 3))).flatten(2).contiguous()
    shape = (length, batch, columns) if sbhd else (batch, length, columns)
    return out.as_strided(shape, (shape[1] * columns, columns, 1))


def _heads_of(matrix: Tensor, shape: tuple, qkv_format: str) -> Tensor:
    """The inverse: [.., heads * channels] as [batch, heads, length, channels]."""
    return matrix.as_strided(shape, _strides(shape, qkv_format))


def _strides(shape: tuple, qkv_format: str) -> tuple[int, int, int, int]:
    """Strides of heads [batch, heads, length, channels] in a contiguous matrix."""
    batch, heads, length, channels = shape
    columns = heads * channels
    if qkv_format == "sbhd":
        return columns, channels, batch * columns, 1
    return length * columns, channels, columns, 1
