# SPDX-License-Identifier: Apache-2.0
"""Torch's fused attention: `torch.nn.functional.scaled_dot_product_attention`.

`forward` and `backward` are what that does and what autograd does for its gradient, for attention
in the middle of a native run; a fused kernel of a GPU is called without autograd.
"""

import contextlib

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.attention.dot_product_attention.masks import CAUSAL_WINDOW

__all__ = ["attend", "backward", "forward", "runs"]

_aten = torch.ops.aten
_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3
"""Numbers of `torch.nn.attention.SDPBackend`."""

Kept = tuple[int | None, tuple[Tensor, ...]]
"""Which kernel ran, and what its gradient needs: the logarithms of the sums, and two of the random
numbers. None is another one: the output, with its graph, and query, key and value."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Tensor:
    """softmax(scale * query x key^T) x value; torch chooses among its kernels at each call.

    Arguments as of `unfused.attend`; the limits say nothing but, where the window is causal, that a
    query sees keys up to its own position, counted from the start of both. Torch's generator draws
    the dropout.
    """
    return _attend(query, key, value, (dropout, limits.window == CAUSAL_WINDOW, scale))


def _attend(query: Tensor, key: Tensor, value: Tensor, settings: tuple) -> Tensor:
    """The attention, differentiable; `settings` as of `forward`."""
    dropout, causal, scale = settings
    grouped = query.shape[1] != key.shape[1]
    # cuDNN refuses to drop everything, and makes nothing of a batch of none.
    plain = dropout == 1.0 or query.numel() == 0 or key.numel() == 0
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, None, dropout, causal, scale=scale, enable_gqa=grouped
        )


def runs(channels: tuple[int, int]) -> bool:
    """Whether heads of so many channels, of keys and of values, need no padding by torch."""
    return channels[0] % 8 == 0 and channels[1] % 8 == 0


def forward(
    query: Tensor, key: Tensor, value: Tensor, settings: tuple[float, bool, float], records: bool
) -> tuple[Tensor, Kept]:
    """`attend` by the kernel that torch chooses: the output, and what `backward` needs.

    Tensors are [batch, heads, length, channels]; `settings` are dropout, whether the mask is
    causal, and the scale; `records`: a backward will follow.
    """
    dropout, causal, scale = settings
    if records:
        for tensor in (query, key, value):
            tensor.requires_grad_()
    grouped = query.shape[1] != key.shape[1]
    kind = torch._fused_sdp_choice(
        query, key, value, None, dropout, causal, scale=scale, enable_gqa=grouped
    )
    empty = query.numel() == 0 or key.numel() == 0
    if not query.is_cuda or empty or dropout == 1.0 or kind not in (_FLASH, _CUDNN, _EFFICIENT):
        with torch.set_grad_enabled(records):
            out = _attend(query, key, value, settings)
        return out.detach(), (None, (out, query, key, value))
    if kind == _FLASH:
        out, sums, _, _, _, _, *random, _ = torch._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
    elif kind == _CUDNN:
        out, sums, _, _, _, _, *random, _ = torch._scaled_dot_product_cudnn_attention(
            query, key, value, None, records, dropout, causal, False, scale=scale
        )
    else:
        out, sums, *random = torch._scaled_dot_product_efficient_attention(
            query, key, value, None, records, dropout, causal, scale=scale
        )
    return out, (kind, (sums, *random))


def backward(
    grad: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    kept: Kept,
    settings: tuple[float, bool, float],
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value.

    `tensors` are query, key, value and output; the others as of `forward`.
    """
    dropout, causal, scale = settings
    kind, found = kept
    if kind is None:
        return torch.autograd.grad(found[0], found[1:], grad, retain_graph=True)
    sums, *random = found
    lengths = tensors[0].shape[2], tensors[1].shape[2]
    if kind == _FLASH:
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, *tensors, sums, None, None, *lengths, dropout, causal, *random, scale=scale
        )
    if kind == _CUDNN:
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, *tensors, sums, *random, None, None, None, *lengths, dropout, causal, scale=scale
        )
    wanted = [True, True, True, False]
    query, key, value, out = tensors
    return _aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, sums, *random, dropout, wanted, causal, scale=scale
    )[:3]
