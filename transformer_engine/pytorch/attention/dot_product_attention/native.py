# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention by the library's own operator: no matrix of scores is kept."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch import torch_ops
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.random import draw_pair

__all__ = ["attend", "run"]

_OPTIONAL = ("mask", "bias", "query_lengths", "key_lengths", "rng")
_SCHEMA = (
    "Tensor? mask, Tensor? bias, Tensor? query_lengths, Tensor? key_lengths, Tensor? rng, "
    "float scale, float dropout, int window_left, int window_right, bool bottom_right, "
    "bool sequence_first"
)


class _Settings(NamedTuple):
    """Numbers of one attention, by the names of the operator's arguments and in their order."""

    scale: float
    dropout: float
    window_left: int
    window_right: int
    bottom_right: bool


def _problem(arguments: tuple) -> dict[str, Any]:
    """Keywords of the operator, from what `_SCHEMA` lists before `sequence_first`."""
    return dict(zip((*_OPTIONAL, *_Settings._fields), arguments, strict=True))


def _batch_first(sequence_first: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors as the operator takes them, [batch, length, heads, channels]: by strides."""
    return tuple(t.transpose(0, 1) for t in tensors) if sequence_first else tensors


def _empty(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    del key
    *lead, heads, _ = query.shape
    batch, queries = lead[::-1] if arguments[-1] else lead
    output = query.new_empty(*lead, heads, value.shape[3])
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


def _forward(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *problem, sequence_first = arguments
    output, statistics = _empty(query, key, value, sequence_first)
    tensors = _batch_first(sequence_first, query, key, value, output)
    _core.attention(*tensors, statistics=statistics, **_problem(problem))
    return output, statistics


def _empty_gradients(grad: Tensor, wants_bias: bool, *tensors: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, _, bias, *_ = tensors
    grads = [
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
    ]
    return *grads, torch.empty_like(bias) if wants_bias else grad.new_empty(0)


def _backward(grad: Tensor, wants_bias: bool, *tensors: Any) -> tuple[Tensor, ...]:
    *tensors, sequence_first = tensors
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grads = _empty_gradients(grad, wants_bias, *tensors)
    first = _batch_first(sequence_first, grad, *tensors[:4], *grads[:3])
    wanted = dict(zip(("grad_query", "grad_key", "grad_value"), first[5:], strict=True))
    if wants_bias:
        wanted["grad_bias"] = grads[3]
    _core.attention_backward(*first[:5], tensors[4], **wanted, **_problem(tensors[5:]))
    return grads


torch_ops.define(
    f"attention(Tensor query, Tensor key, Tensor value, {_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _empty,
)
torch_ops.define(
    "attention_backward(Tensor grad, bool wants_bias, Tensor query, Tensor key, Tensor value, "
    f"Tensor output, Tensor statistics, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
)


class _AttentionCall:
    """One call of `attend` (see `function.Call`).

    Attributes
    ----------
    settings : tuple
        Its numbers, and whether its tensors begin with the sequence.
    wants_bias : bool
        The bias has a gradient.
    traced : bool
        Run behind torch operators.
    given : list of bool
        Which optional tensors there are.
    """

    __slots__ = ("given", "settings", "traced", "wants_bias")
    label = "attention"

    def __init__(self, settings: tuple, bias: Tensor | None, traced: bool) -> None:
        self.settings, self.traced, self.given = settings, traced, []
        self.wants_bias = bias is not None and bias.requires_grad

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        """Run the forward over query, key, value and the optional tensors."""
        run = torch_ops.choose(_forward, torch.ops.transformer_engine.attention, self.traced)
        output, statistics = run(*tensors, *self.settings)
        self.given = [tensor is not None for tensor in tensors[3:]]
        optional = [tensor for tensor in tensors[3:] if tensor is not None]
        return output, (*tensors[:3], output, statistics, *optional)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradients of the tensors of the forward."""
        optional = iter(saved[5:])
        tensors = *saved[:5], *(next(optional) if given else None for given in self.given)
        operator = torch.ops.transformer_engine.attention_backward
        run = torch_ops.choose(_backward, operator, self.traced)
        *made, grad_bias = run(grads[0], self.wants_bias, *tensors, *self.settings)
        return None, *made, None, grad_bias if self.wants_bias else None, None, None, None


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
    inputs = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    settings = (*_Settings(scale, dropout, *window, bottom_right), sequence_first)
    call = _AttentionCall(settings, bias, torch_ops.behind_operators(query))
    rng = draw_pair(query) if dropout > 0.0 else None
    return run_call(call, *inputs, mask, bias, query_lengths, key_lengths, rng)


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
