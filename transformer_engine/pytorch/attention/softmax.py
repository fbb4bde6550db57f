# SPDX-License-Identifier: Apache-2.0
"""Differentiable softmax of attention scores: scale, mask, window, bias and dropout in one pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.custom_ops import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.execution.random import draw_pair

__all__ = [
    "THREADS_PER_BLOCK",
    "THREADS_PER_WARP",
    "scaled_softmax",
]

THREADS_PER_WARP, THREADS_PER_BLOCK = 32, 128
"""As programs count the rows that a block of threads takes; kernels here choose their own."""


def _row_of_each(scores: Tensor) -> Tensor:
    """A number for each row of scores, [batch * heads * queries] fp32."""
    return scores.new_empty(scores.shape[:3].numel(), dtype=torch.float32)


_forward = operator(
    "softmax",
    "Tensor input, Tensor? mask, Tensor? bias, Tensor? sink, Tensor? rng, float scale, "
    "float dropout, int window_left, int window_right, SymInt diagonal, bool wants_sink",
    "output probabilities log_sum",
    lambda scores, mask, bias, sink, rng, *numbers: (
        contiguous_like(scores),
        None if rng is None else contiguous_like(scores),
        _row_of_each(scores) if numbers[-1] else None,
    ),
    unit_stride="input",
)
_backward = operator(
    "softmax_backward",
    "Tensor grad_output, Tensor probabilities, Tensor? rng, Tensor? sink, Tensor? log_sum, "
    "float scale, float dropout",
    "grad_input grad_sinks",
    lambda grad, probabilities, rng, sink, *_: (
        contiguous_like(probabilities),
        None if sink is None else _row_of_each(probabilities),
    ),
    unit_stride="grad_output",
)


class _Bias(NamedTuple):
    """A bias that has a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    wide: bool
    """The gradients of scores are made in fp32: they are added up, or the bias has more digits."""


class _ScaledSoftmax(OperatorCall):
    """Settings: the bias, None where it has no gradient, then the numbers of the operator.

    The last of these says whether the sink has a gradient.
    """

    label = "scaled_softmax"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        output, probabilities, log_sum = _forward(self.traced, *tensors, *self.settings[1:])
        sink, rng = tensors[3:]
        of_sink = (sink, log_sum) if self.settings[-1] else (None, None)
        return output, (output if rng is None else probabilities, rng, *of_sink)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        of_bias, scale, dropout, *_ = self.settings
        (grad_output,), (probabilities, *rest) = grads, saved
        dtype = probabilities.dtype
        if of_bias is not None and of_bias.wide:
            grad_output, probabilities = grad_output.float(), probabilities.float()
        factor = scale if of_bias is None else 1.0  # the bias is added after scaling
        grad, sinks = _backward(self.traced, grad_output, probabilities, *rest, factor, dropout)
        grad_bias = None
        if of_bias is not None:
            grad_bias = grad.sum_to_size(of_bias.shape).to(of_bias.dtype)
            grad = (grad if scale == 1.0 else grad * scale).to(dtype)
        grad_sink = sinks.view(grad.shape[:3]).sum((0, 2)) if self.settings[-1] else None
        return None, grad, None, grad_bias, grad_sink, None


def scaled_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    diagonal: int = 0,
) -> Tensor:
    """Softmax over the keys of scale * scores + bias, with dropout, in fp32.

    Query i attends the keys i + diagonal - window[0] .. i + diagonal + window[1] that `mask`
    leaves; a negative number of the window is no limit on that side, and (-1, 0) is causal. The
    diagonal, the key of query 0, is 0, or keys - queries for the bottom right corner. A query that
    attends no key has probabilities of 0.

    `scores` are [batch, heads, queries, keys] fp32, fp16 or bf16, with a unit last stride; each dim
    of `mask` (bool, True: masked out) and `bias` (a float dtype, differentiable) is 1 or theirs.
    `sink` [heads] fp32, differentiable, are scores without a key, which join the sums that the
    others are divided by. The result has the shape and dtype of the scores.
    """
    of_bias = None
    if bias is not None and bias.requires_grad:
        finer = bias.dtype.itemsize > scores.dtype.itemsize
        of_bias = _Bias(bias.shape, bias.dtype, finer or bias.shape != scores.shape)
    wants_sink = sink is not None and sink.requires_grad
    call = _ScaledSoftmax(scores, of_bias, scale, dropout, *window, diagonal, wants_sink)
    return run_call(call, scores, mask, bias, sink, draw_pair(scores) if dropout > 0.0 else None)
