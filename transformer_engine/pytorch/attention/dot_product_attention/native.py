# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention by the library's own operator: no matrix of scores is kept."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch import torch_ops
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.random import draw_pair

__all__ = ["attend"]

_OPTIONAL = ("mask", "bias", "query_lengths", "key_lengths", "rng")
_SCHEMA = (
    "Tensor? mask, Tensor? bias, Tensor? query_lengths, Tensor? key_lengths, Tensor? rng, "
    "float scale, float dropout, int window_left, int window_right, SymInt diagonal, "
    "bool bottom_right"
)


class _Settings(NamedTuple):
    """Numbers of one attention, by the names of the operator's arguments and in their order."""

    scale: float
    dropout: float
    window_left: int
    window_right: int
    diagonal: Any  # int, or SymInt in a graph that is being traced
    bottom_right: bool


def _problem(arguments: tuple) -> dict[str, Any]:
    """Keywords of the operator, from what `_SCHEMA` lists."""
    return dict(zip((*_OPTIONAL, *_Settings._fields), arguments, strict=True))


def _empty(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[3])
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


def _forward(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    output, statistics = _empty(query, key, value)
    _core.attention(query, key, value, output, statistics=statistics, **_problem(arguments))
    return output, statistics


def _empty_gradients(grad: Tensor, wants_bias: bool, *tensors: Any) -> tuple[Tensor, ...]:
    query, key, value, _, _, _, bias, *_ = tensors
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[:3]]
    return *grads, torch.empty_like(bias) if wants_bias else grad.new_empty(0)


def _backward(grad: Tensor, wants_bias: bool, *tensors: Any) -> tuple[Tensor, ...]:
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grads = _empty_gradients(grad, wants_bias, *tensors)
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    wanted = dict(zip(names, grads if wants_bias else grads[:3], strict=False))
    _core.attention_backward(grad, *tensors[:5], **wanted, **_problem(tensors[5:]))
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
    settings : _Settings
        Its numbers.
    wants_bias : bool
        The bias has a gradient.
    traced : bool
        Run behind torch operators.
    given : list of bool
        Which optional tensors there are.
    """

    __slots__ = ("given", "settings", "traced", "wants_bias")
    label = "attention"

    def __init__(self, settings: _Settings, bias: Tensor | None, traced: bool) -> None:
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
    diagonal: int = 0,
    bottom_right: bool = False,
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
    diagonal : int, default 0
        The key on the diagonal of query 0.
    bottom_right : bool, default False
        The diagonal is further right by the keys less the queries of each sequence.

    Returns
    -------
    Tensor
        [batch, queries, heads, channels of values], contiguous, in the dtype of `query`.
    """
    inputs = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    settings = _Settings(scale, dropout, *window, diagonal, bottom_right)
    call = _AttentionCall(settings, bias, torch_ops.behind_operators(query))
    rng = draw_pair(query) if dropout > 0.0 else None
    return run_call(call, *inputs, mask, bias, query_lengths, key_lengths, rng)
