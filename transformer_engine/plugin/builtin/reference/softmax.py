# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention scores and its gradient; see `builtin.softmax`."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.softmax import define_all
from transformer_engine.pytorch.cpp_extensions.values import exact


def _forward(op: str, call: Any) -> Tensor:
    """Softmax of scale * input where nothing is masked; 0 in a row where everything is."""
    queries, keys = call.input.shape[-2:]
    masked = torch.zeros(queries, keys, dtype=torch.bool, device=call.input.device)
    if hasattr(call, "mask"):
        masked = call.mask != 0
    elif op != "scaled_softmax_forward":  # keys behind the query: the last of both go together
        masked = (~masked).triu(keys - queries + 1)
    scores = (exact(op, "input", call.input) * call.scale).masked_fill(masked, -torch.inf)
    nothing = masked.expand_as(scores).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(nothing, 0).to(call.input.dtype)


def _backward(op: str, call: Any) -> Tensor:
    """Compute scale * p * (dp - sum of dp * p over the last dim), whatever was masked."""
    p, grad = exact(op, "softmax_output", call.softmax_output), exact(op, "", call.output_grad)
    made = call.scale * p * (grad - (grad * p).sum(-1, keepdim=True))
    return made.to(call.softmax_output.dtype)


define_all(globals(), _forward, _backward)
