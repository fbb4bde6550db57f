# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention scores and its gradient, by ``_core.softmax`` and its backward.

Scores are [batch, heads, queries, keys], or with an upper triangular mask [batch, queries,
queries]. The probabilities have their shape and dtype; a row in which everything is masked is 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.cpp_extensions.values import wide


def _forward(op: str, input: Any, scale: float, dims: int, **limits: Any) -> Tensor:
    scores = wide(op, "input", input)
    if scores.dim() != dims:
        raise ValueError(f"{op}: input: shape {tuple(scores.shape)}, expected {dims} dims")
    out = torch.empty_like(scores)
    _core.softmax(*(t if dims == 4 else t[None] for t in (scores, out)), scale=scale, **limits)
    return out


def _gradient_of(forward: Callable) -> Callable:
    """The gradient of a softmax, of its result: whatever was masked."""
    op = forward.__name__.replace("forward", "backward")

    def run(output_grad: Tensor, softmax_output: Tensor, scale: float) -> Tensor:
        grad = wide(op, "output_grad", output_grad)
        probabilities = wide(op, "softmax_output", softmax_output)
        made = torch.empty_like(probabilities)
        tensors = (t if t.dim() != 3 else t[None] for t in (grad, probabilities, made))
        _core.softmax_backward(*tensors, scale=scale)
        return made

    run.__name__ = run.__qualname__ = op
    run.__doc__ = f"""Gradient of the input of `{forward.__name__}`, from its result."""
    return run


def scaled_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input over the last of four dims."""
    return _forward("scaled_softmax_forward", input, scale, 4)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input where `mask` (bool or uint8, each dim 1 or the input's) is 0."""
    op = "scaled_masked_softmax_forward"
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"{op}: mask: {mask.dtype}, expected torch.bool or torch.uint8")
    return _forward(op, input, scale, 4, mask=mask.view(torch.uint8))


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input, [batch, queries, queries], over the keys up to the query."""
    op = "scaled_upper_triang_masked_softmax_forward"
    if input.dim() == 3 and input.shape[1] != input.shape[2]:
        raise ValueError(f"{op}: input: shape {tuple(input.shape)}, expected square matrices")
    return _forward(op, input, scale, 3, window_right=0)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input over the keys up to the query; the last of both go together."""
    op = "scaled_aligned_causal_masked_softmax_forward"
    diagonal = input.shape[-1] - input.shape[-2] if input.dim() == 4 else 0
    return _forward(op, input, scale, 4, window_right=0, diagonal=diagonal)


scaled_softmax_backward = _gradient_of(scaled_softmax_forward)
scaled_masked_softmax_backward = _gradient_of(scaled_masked_softmax_forward)
scaled_upper_triang_masked_softmax_backward = _gradient_of(
    scaled_upper_triang_masked_softmax_forward
)
scaled_aligned_causal_masked_softmax_backward = _gradient_of(
    scaled_aligned_causal_masked_softmax_forward
)
