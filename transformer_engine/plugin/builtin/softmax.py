# SPDX-License-Identifier: Apache-2.0
"""Softmax of attention scores and its gradient, by ``_core.softmax`` and its backward.

Scores are [batch, heads, queries, keys], or with an upper triangular mask [batch, queries,
queries]. The probabilities have their shape and dtype; a row in which everything is masked is 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin.signatures import define
from transformer_engine.pytorch.cpp_extensions.values import wide

_OVER = {
    "": "the last of four dims",
    "masked_": "the last of four where `mask` (bool or uint8, each dim 1 or the input's) is 0",
    "upper_triang_masked_": "the keys up to the query, of [batch, queries, queries]",
    "aligned_causal_masked_": "the keys up to the query; the last of both go together",
}


def define_all(module: dict[str, Any], forward: Callable, backward: Callable) -> None:
    """Define all in a module, by its ``globals()``, of functions of an operator and its call."""
    for kind, over in _OVER.items():
        op, gradient = f"scaled_{kind}softmax_forward", f"scaled_{kind}softmax_backward"
        define(module, op, partial(forward, op), f"Softmax of scale * input over {over}.")
        doc = f"Gradient of the input of `{op}`, from its result."
        define(module, gradient, partial(backward, gradient), doc)


def _forward(op: str, call: Any) -> Tensor:
    scores, limits = wide(op, "input", call.input), {}
    dims = 3 if "triang" in op else 4
    if scores.dim() != dims:
        raise ValueError(f"{op}: input: shape {tuple(scores.shape)}, expected {dims} dims")
    queries, keys = scores.shape[-2:]
    if dims == 3 and queries != keys:
        raise ValueError(f"{op}: input: shape {tuple(scores.shape)}, expected square matrices")
    if hasattr(call, "mask"):
        if call.mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"{op}: mask: {call.mask.dtype}, expected torch.bool or torch.uint8")
        limits = {"mask": call.mask.view(torch.uint8)}
    elif op != "scaled_softmax_forward":
        limits = {"window_right": 0, "diagonal": keys - queries}
    out = torch.empty_like(scores)
    tensors = (t if dims == 4 else t[None] for t in (scores, out))
    _core.softmax(*tensors, scale=call.scale, **limits)
    return out


def _backward(op: str, call: Any) -> Tensor:
    grad = wide(op, "output_grad", call.output_grad)
    probabilities = wide(op, "softmax_output", call.softmax_output)
    made = torch.empty_like(probabilities)
    tensors = (t if t.dim() != 3 else t[None] for t in (grad, probabilities, made))
    _core.softmax_backward(*tensors, scale=call.scale)
    return made


define_all(globals(), _forward, _backward)
