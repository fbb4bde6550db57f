# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention scores and its gradient; see `builtin.softmax`."""

import torch
from torch import Tensor


def _forward(input: Tensor, masked: Tensor | None, scale: float) -> Tensor:
    scores = input.detach().float() * scale
    if masked is None:
        return scores.softmax(-1).to(input.dtype)
    scores = scores.masked_fill(masked, -torch.inf)
    return scores.softmax(-1).masked_fill(masked.expand_as(scores).all(-1, True), 0).to(input.dtype)


def _future(input: Tensor, diagonal: int) -> Tensor:
    """Keys behind the query."""
    ones = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device)
    return ones.triu(diagonal + 1)


def scaled_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input over the last dim."""
    return _forward(input, None, scale)


def scaled_softmax_backward(output_grad: Tensor, softmax_output: Tensor, scale: float) -> Tensor:
    """Compute scale * p * (dp - sum of dp * p over the last dim)."""
    grad, p = output_grad.detach().float(), softmax_output.detach().float()
    made = scale * p * (grad - (grad * p).sum(-1, keepdim=True))
    return made.to(softmax_output.dtype)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input where `mask` is 0."""
    return _forward(input, mask != 0, scale)


def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float
) -> Tensor:
    """`scaled_softmax_backward`."""
    return scaled_softmax_backward(output_grad, softmax_output, scale)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input over the keys up to the query."""
    return _forward(input, _future(input, 0), scale)


def scaled_upper_triang_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float
) -> Tensor:
    """`scaled_softmax_backward`."""
    return scaled_softmax_backward(output_grad, softmax_output, scale)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    """Softmax of scale * input over the keys up to the query; the last of both go together."""
    return _forward(input, _future(input, input.shape[-1] - input.shape[-2]), scale)


def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float
) -> Tensor:
    """`scaled_softmax_backward`."""
    return scaled_softmax_backward(output_grad, softmax_output, scale)
