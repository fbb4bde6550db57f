# SPDX-License-Identifier: Apache-2.0
"""Differentiable softmax of attention scores: scale, mask, window, bias and dropout in one pass."""

from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.operators import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.random import draw_pair

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["scaled_softmax", *absent.names_of(__name__)]

_forward = operator(
    "softmax",
    "Tensor input, Tensor? mask, Tensor? bias, Tensor? rng, float scale, float dropout, "
    "int window_left, int window_right, SymInt diagonal",
    "output probabilities",
    lambda scores, mask, bias, rng, *_: (
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
    """Settings: shape and dtype of the bias gradient or None, then numbers of the operator."""

    label = "scaled_softmax"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        output, probabilities = _forward(self.traced, *tensors, *self.settings[1:])
        rng = tensors[3]
        return output, (output if rng is None else probabilities, rng)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        of_bias, scale, dropout, *_ = self.settings
        given = self.traced, *grads, *saved
        if of_bias is None:
            return None, _backward(*given, scale, dropout), None, None, None
        grad_bias = _backward(*given, 1.0, dropout)  # the bias is added after scaling
        grad_scores = grad_bias if scale == 1.0 else grad_bias * scale
        shape, dtype = of_bias
        return None, grad_scores, None, grad_bias.sum_to_size(shape).to(dtype), None


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
    leaves; a negative number of the window is no limit on that side, and (-1, 0) is causal. The
    diagonal, the key of query 0, is 0, or keys - queries for the bottom right corner. A query that
    attends no key has probabilities of 0.

    `scores` are [batch, heads, queries, keys] fp32, fp16 or bf16, with a unit last stride; each dim
    of `mask` (bool, True: masked out) and `bias` (a float dtype, differentiable) is 1 or theirs.
    The result has their shape and dtype.
    """
    of_bias = (bias.shape, bias.dtype) if bias is not None and bias.requires_grad else None
    call = _ScaledSoftmax(scores, of_bias, scale, dropout, *window, diagonal)
    return run_call(call, scores, mask, bias, draw_pair(scores) if dropout > 0.0 else None)
