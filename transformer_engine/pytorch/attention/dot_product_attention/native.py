# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention by the library's own operator: no matrix of scores is kept."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.operators import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.random import draw_pair

__all__ = ["attend", "run"]


def _results(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    del key
    *lead, heads, _ = query.shape
    batch, queries = lead[::-1] if arguments[-1] else lead
    output = query.new_empty(*lead, heads, value.shape[3])
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


def _gradients(grad: Tensor, wants_bias: bool, *arguments: Any) -> tuple[Tensor | None, ...]:
    del grad
    bias = torch.empty_like(arguments[6]) if wants_bias else None
    return *map(contiguous_like, arguments[:3]), bias


_PROBLEM = (
    "Tensor? mask, Tensor? bias, Tensor? query_lengths, Tensor? key_lengths, Tensor? rng, "
    "float scale, float dropout, int window_left, int window_right, bool bottom_right, "
    "bool sequence_first"
)
_forward = operator(
    "attention",
    f"Tensor query, Tensor key, Tensor value, {_PROBLEM}",
    "output statistics",
    _results,
    unit_stride="query key value",
    by_sequence="query key value output",
)
_backward = operator(
    "attention_backward",
    "Tensor grad_output, bool wants_bias, Tensor query, Tensor key, Tensor value, Tensor output, "
    f"Tensor statistics, {_PROBLEM}",
    "grad_query grad_key grad_value grad_bias",
    _gradients,
    unit_stride="grad_output query key value",
    by_sequence="grad_output query key value output grad_query grad_key grad_value",
)


class _Attention(OperatorCall):
    """Settings: the bias has a gradient, then numbers of the operator."""

    label = "attention"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        output, statistics = _forward(self.traced, *tensors, *self.settings[1:])
        return output, (*tensors[:3], output, statistics, *tensors[3:])

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        wants_bias, *numbers = self.settings
        *made, grad_bias = _backward(self.traced, *grads, wants_bias, *saved, *numbers)
        return None, *made, None, grad_bias if wants_bias else None, None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    sequence_first: bool = False,
) -> Tensor:
    """Softmax(scale * query key^T + bias) value with dropout of the weights; on the CPU.

    Parameters
    ----------
    query : Tensor
        [batch, queries, heads, channels] fp32, fp16 or bf16, unit last stride, any others.
    key, value : Tensor
        [batch, keys, groups, channels], [batch, keys, groups, channels of values]; groups divides
        heads.
    mask : Tensor, optional
        bool, True: masked out; each dim 1 or that of [batch, heads, queries, keys].
    bias : Tensor, optional
        fp32, fp16 or bf16, broadcastable likewise. Differentiable.
    query_lengths, key_lengths : Tensor, optional
        [batch] int32: tokens of each sequence; those after them are not read.
    scale : float, default 1
        Factor of the scores.
    dropout : float, default 0
        Probability that a weight is dropped.
    window : tuple of int
        Keys to the left and to the right of the diagonal; negative: no limit. (-1, 0) is causal.
    bottom_right : bool, default False
        The diagonal, key 0 of query 0, is further right by the keys less the queries of each
        sequence.
    sequence_first : bool, default False
        Tensors are [queries or keys, batch, heads, channels], and so is the result.

    Returns
    -------
    Tensor
        [batch, queries, heads, channels of values], contiguous, in the dtype of `query`; under
        `torch.autocast` in its dtype.
    """
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    wants_bias = bias is not None and bias.requires_grad
    call = _Attention(query, wants_bias, scale, dropout, *window, bottom_right, sequence_first)
    rng = draw_pair(query) if dropout > 0.0 else None
    return run_call(call, query, key, value, mask, bias, query_lengths, key_lengths, rng)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    qkv_format: str,
    limits: Limits,
    scale: float,
    dropout: float,
) -> Tensor:
    """`attend` as a backend of `DotProductAttention`.

    Parameters
    ----------
    query, key, value : Tensor
        [sequence, batch, heads, channels] (sbhd) or [batch, sequence, heads, channels] (bshd).
    qkv_format : str
        Which of these.
    limits : Limits
        What a query may attend.
    scale : float
        Factor of the scores.
    dropout : float
        Probability that a weight is dropped.

    Returns
    -------
    Tensor
        [.., .., heads, channels of values] in the order of `query`.
    """
    return attend(
        query,
        key,
        value,
        mask=limits.mask,
        bias=limits.bias,
        query_lengths=limits.query_lengths,
        key_lengths=limits.key_lengths,
        scale=scale,
        dropout=dropout,
        window=limits.window,
        bottom_right=limits.bottom_right,
        sequence_first=qkv_format == "sbhd",
    )
