# SPDX-License-Identifier: Apache-2.0
"""Bias, dropout, stochastic depth and residual in one pass over memory."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.custom_ops import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.execution.random import draw_pair
from transformer_engine.pytorch.module.parameters import probabilities


def _gradients(
    grad: Tensor, rng: Tensor | None, bias_dtype: torch.dtype | None, *_: Any
) -> tuple[Tensor | None, Tensor | None]:
    return (
        None if rng is None else contiguous_like(grad),
        None if bias_dtype is None else grad.new_empty(grad.shape[-1], dtype=bias_dtype),
    )


_forward = operator(
    "dropout_add",
    "Tensor input, Tensor? bias, Tensor? residual, Tensor? rng, float dropout, float drop_path, "
    "SymInt samples",
    "output",
    lambda inp, *_: contiguous_like(inp),
)
_backward = operator(
    "dropout_backward",
    "Tensor grad_output, Tensor? rng, ScalarType? bias_dtype, float dropout, float drop_path, "
    "SymInt samples",
    "grad_input bias_grad",
    _gradients,
)


class _BiasDropoutAdd(OperatorCall):
    """Settings: there is a residual, dtype of the bias gradient, dropout, drop path, samples."""

    label = "bias_dropout_add"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return _forward(self.traced, *tensors, *self.settings[2:]), tensors[3:]

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        (grad,), (rng,) = grads, saved
        has_residual, bias_dtype, *_ = self.settings
        grad_input = grad_bias = None
        if rng is not None or bias_dtype is not None:
            grad_input, grad_bias = _backward(self.traced, grad, rng, *self.settings[1:])
        return (
            None,
            grad if rng is None else grad_input,
            None if bias_dtype is None else grad_bias,
            grad if has_residual else None,
            None,
        )


def bias_dropout_add(
    inp: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    training: bool = True,
) -> Tensor:
    """Compute residual + drop_path(dropout(input + bias)) in fp32.

    `inp` is [samples, ..., features] in fp32, fp16 or bf16, `bias` [features]; one of no elements
    counts as none. The result has the shape of `inp`, and the common dtype of it and `residual`.
    `dropout` is the probability that an element is dropped, `drop_path` that a whole sample (of the
    first dim) is; what is kept is multiplied by 1 / (1 - p). Nothing is dropped unless `training`.
    """
    if not training:
        dropout = drop_path = 0.0
    if bias is not None and bias.numel() == 0:
        bias = None
    drops = dropout > 0.0 or drop_path > 0.0
    if bias is None and not drops:
        return inp if residual is None else inp + residual
    if residual is not None and residual.dtype is not inp.dtype:
        dtype = torch.promote_types(inp.dtype, residual.dtype)
        inp, residual = inp.to(dtype), residual.to(dtype)
    bias_dtype = bias.dtype if bias is not None and bias.requires_grad else None
    samples = inp.shape[0] if drop_path > 0.0 and inp.shape[0] > 0 else 1
    call = _BiasDropoutAdd(inp, residual is not None, bias_dtype, dropout, drop_path, samples)
    return run_call(call, inp, bias, residual, draw_pair(inp) if drops else None)


class DropPath(torch.nn.Module):
    """Stochastic depth: drops whole samples, of the first dim, and scales the others.

    `drop_prob` is the probability that one is dropped; in evaluation nothing is.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        probabilities("DropPath", drop_prob=drop_prob)
        self.drop_prob = drop_prob

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Of [samples, ..., features] in fp32, fp16 or bf16."""
        return bias_dropout_add(hidden_state, None, None, 0.0, self.drop_prob, self.training)
