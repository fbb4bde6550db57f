# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention scores and its gradient; see `builtin.softmax`."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import exact


def _softmax(input: Tensor, masked: Tensor, scale: float) -> Tensor:
    """Of scale * input where `masked` is False; 0 in a row where it is True everywhere."""
    scores = (exact("softmax", "input", input) * scale).masked_fill(masked, -torch.inf)
    nothing = masked.expand_as(scores).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0).to(input.dtype)


def _future(input: Tensor) -> Tensor:
    """Keys behind the query, where the last of both go together."""
    queries, keys = input.shape[-2:]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=input.device)
    return ones.triu(keys - queries + 1)


@operator
def scaled_softmax_forward(call: Any) -> Tensor:
    """Softmax of scale * input over the last dim."""
    return _softmax(call.input, torch.zeros_like(call.input[..., :1], dtype=torch.bool), call.scale)


@operator
def scaled_masked_softmax_forward(call: Any) -> Tensor:
    """Softmax of scale * input where `mask` is 0."""
    return _softmax(call.input, call.mask != 0, call.scale)


@operator
def scaled_upper_triang_masked_softmax_forward(call: Any) -> Tensor:
    """Softmax of scale * input over the keys up to the query."""
    return _softmax(call.input, _future(call.input), call.scale)


@operator
def scaled_aligned_causal_masked_softmax_forward(call: Any) -> Tensor:
    """Softmax of scale * input over the keys up to the query; the last of both go together."""
    return _softmax(call.input, _future(call.input), call.scale)


def _backward(call: Any) -> Tensor:
    """Compute scale * p * (dp - sum of dp * p over the last dim), whatever was masked."""
    p = exact("softmax", "softmax_output", call.softmax_output)
    grad = exact("softmax", "output_grad", call.output_grad)
    made = call.scale * p * (grad - (grad * p).sum(-1, keepdim=True))
    return made.to(call.softmax_output.dtype)


for _kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_"):
    _op = f"scaled_{_kind}softmax_backward"
    globals()[_op] = operator(_backward, _op)
