# SPDX-License-Identifier: Apache-2.0
"""Differentiable softmax of attention scores: scale, mask, window, bias and dropout in one pass."""

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.operators import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.random import draw_pair

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["scaled_softmax", *absent.names_of(__name__)]

_forward = operator(
    "softmax",
    "Tensor input, Tensor? mask, Tensor? bias, Tensor? sink, Tensor? rng, float scale, "
    "float dropout, int window_left, int window_right, SymInt diagonal",
    "output probabilities",
    lambda scores, mask, bias, sink, rng, *_: (
        contiguous_like(scores),
        None if rng is None else contiguous_like(scores),
    ),
    unit_stride="input",
)
_backward = operator(
    "softmax_backward",
    "Tensor grad_output, Tensor probabilities, Tensor? rng, float scale, float dropout",
    "grad_input",
    lambda grad, probabilities, *_: contiguous_like(probabilities),
    unit_stride="grad_output",
)


class _ScaledSoftmax(OperatorCall):
    """Settings: the bias's shape and dtype or None, the sink's gradient, numbers of the operator.

    The first two say what has a gradient.
    """

    label = "scaled_softmax"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        output, probabilities = _forward(self.traced, *tensors, *self.settings[2:])
        rng = tensors[4]
        return output, (output if rng is None else probabilities, rng)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        of_bias, wants_sink, scale, dropout, *_ = self.settings
        given = self.traced, *grads, *saved
        if of_bias is None and not wants_sink:
            return None, _backward(*given, scale, dropout), None, None, None, None
        grad = _backward(*given, 1.0, dropout)  # bias and sink are added after scaling
        grad_scores = grad if scale == 1.0 else grad * scale
        grad_bias = None
        if of_bias is not None:
            shape, dtype = of_bias
            grad_bias = grad.sum_to_size(shape).to(dtype)
        # The gradients of all scores of a row sum up to 0.
        grad_sink = -grad.sum((0, 2, 3), dtype=torch.float32) if wants_sink else None
        return None, grad_scores, None, grad_bias, grad_sink, None


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
    of_bias = (bias.shape, bias.dtype) if bias is not None and bias.requires_grad else None
    wants_sink = sink is not None and sink.requires_grad
    call = _ScaledSoftmax(scores, of_bias, wants_sink, scale, dropout, *window, diagonal)
    return run_call(call, scores, mask, bias, sink, draw_pair(scores) if dropout > 0.0 else None)
