# SPDX-License-Identifier: Apache-2.0
"""Differentiable softmax of attention scores: scale, mask, window, bias and dropout in one pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import absent
from transformer_engine.pytorch import torch_ops
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.random import draw_pair

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["scaled_softmax", *absent.names_of(__name__)]


def _forward(
    scores: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    rng: Tensor | None,
    scale: float,
    dropout: float,
    left: int,
    right: int,
    diagonal: int,
) -> tuple[Tensor, Tensor | None]:
    output = torch.empty_like(scores, memory_format=torch.contiguous_format)
    probabilities = None if rng is None else torch.empty_like(output)
    _core.softmax(
        scores,
        output,
        mask=mask,
        bias=bias,
        probabilities=probabilities,
        rng=rng,
        scale=scale,
        dropout=dropout,
        window_left=left,
        window_right=right,
        diagonal=diagonal,
    )
    return output, probabilities


def _forward_op(scores: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    output, probabilities = _forward(scores, *arguments)
    return output, scores.new_empty(0) if probabilities is None else probabilities


def _forward_fake(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, rng: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    del mask, bias
    output = torch.empty_like(scores, memory_format=torch.contiguous_format)
    return output, scores.new_empty(0) if rng is None else torch.empty_like(output)


def _backward(
    grad: Tensor, probabilities: Tensor, rng: Tensor | None, scale: float, dropout: float
) -> Tensor:
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grad_input = torch.empty_like(probabilities)
    _core.softmax_backward(grad, probabilities, grad_input, rng=rng, scale=scale, dropout=dropout)
    return grad_input


torch_ops.define(
    "softmax(Tensor scores, Tensor? mask, Tensor? bias, Tensor? rng, float scale, float dropout, "
    "int left, int right, SymInt diagonal) -> (Tensor, Tensor)",
    _forward_op,
    _forward_fake,
)
torch_ops.define(
    "softmax_backward(Tensor grad, Tensor probabilities, Tensor? rng, float scale, float dropout) "
    "-> Tensor",
    _backward,
    lambda grad, probabilities, *_: torch.empty_like(probabilities),
)


@dataclass(slots=True)
class _SoftmaxCall:
    """One call of `scaled_softmax` (see `function.Call`).

    Attributes
    ----------
    settings : tuple
        (scale, dropout, left, right, diagonal) in the order of the operator's arguments.
    bias_grad : tuple or None
        (shape, dtype) of the gradient of the bias; None where it is not needed.
    traced : bool
        Run behind torch operators: `diagonal` may be a SymInt then.
    """

    settings: tuple
    bias_grad: tuple | None
    traced: bool
    label = "scaled_softmax"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        """Run the forward over (scores, mask or None, bias or None, pair or None)."""
        scores, mask, bias, rng = tensors
        run = torch_ops.choose(_forward, torch.ops.transformer_engine.softmax, self.traced)
        output, probabilities = run(scores, mask, bias, rng, *self.settings)
        return output, (output,) if rng is None else (probabilities, rng)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradients of (scores, mask, bias, pair)."""
        (grad,) = grads
        probabilities, *rng = saved
        scale, dropout = self.settings[:2]
        pair = rng[0] if rng else None
        operator = torch.ops.transformer_engine.softmax_backward
        run = torch_ops.choose(_backward, operator, self.traced)
        if self.bias_grad is None:
            return None, run(grad, probabilities, pair, scale, dropout), None, None, None
        grad_bias = run(grad, probabilities, pair, 1.0, dropout)  # the bias is added after scaling
        grad_scores = grad_bias if scale == 1.0 else grad_bias * scale
        shape, dtype = self.bias_grad
        grad_bias = grad_bias.sum_to_size(shape).to(dtype)
        return None, grad_scores, None, grad_bias, None


def scaled_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    diagonal: int = 0,
) -> Tensor:
    """Softmax over the keys of scale * scores + bias, with dropout, in fp32.

    Query i attends the keys i + diagonal - window[0] .. i + diagonal + window[1] that `mask`
    leaves. A query that attends none has probabilities of 0.

    Parameters
    ----------
    scores : Tensor
        [batch, heads, queries, keys] fp32, fp16 or bf16, unit last stride.
    mask : Tensor, optional
        bool, True: masked out; each dim 1 or that of `scores`.
    bias : Tensor, optional
        fp32, fp16 or bf16; each dim 1 or that of `scores`. Differentiable.
    scale : float, default 1
        Factor of the scores.
    dropout : float, default 0
        Probability that a probability is dropped.
    window : tuple of int
        Keys to the left and to the right of the diagonal; negative: no limit on that side. (-1, 0)
        is causal.
    diagonal : int, default 0
        The key on the diagonal of query 0: 0, or keys - queries for the bottom right corner.

    Returns
    -------
    Tensor
        Shape and dtype of `scores`.
    """
    traced = torch_ops.behind_operators(scores)
    if scores.stride(-1) != 1:
        scores = scores.contiguous()
    bias_grad = (bias.shape, bias.dtype) if bias is not None and bias.requires_grad else None
    call = _SoftmaxCall((scale, dropout, *window, diagonal), bias_grad, traced)
    rng = draw_pair(scores) if dropout > 0.0 else None
    return run_call(call, scores, mask, bias, rng)
