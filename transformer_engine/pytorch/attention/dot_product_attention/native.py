# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention by the library's own operator: no matrix of scores is kept."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.config import attention_switches
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.operators import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.random import draw_pair


def _results(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    del key
    *lead, heads, _ = query.shape
    batch, queries = lead[::-1] if arguments[-1] else lead
    output = query.new_empty(*lead, heads, value.shape[3])
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


def _gradients(
    grad: Tensor, wants_bias: bool, deterministic: bool, *arguments: Any
) -> tuple[Tensor | None, ...]:
    del grad, deterministic
    bias = contiguous_like(arguments[6]) if wants_bias else None
    return *map(contiguous_like, arguments[:3]), bias


_PROBLEM = (
    "Tensor? mask, Tensor? bias, Tensor? query_lengths, Tensor? key_lengths, Tensor? rng, "
    "float scale, float dropout, int window_left, int window_right, bool bottom_right, "
    "bool sequence_first"
)
_forward = operator(
    "attention",
    f"Tensor query, Tensor key, Tensor value, {_PROBLEM}",
    "output statistics",
    _results,
    unit_stride="query key value",
    aligned=True,
    by_sequence="query key value output",
)
_backward = operator(
    "attention_backward",
    "Tensor grad_output, bool wants_bias, bool deterministic, Tensor query, Tensor key, "
    f"Tensor value, Tensor output, Tensor statistics, {_PROBLEM}",
    "grad_query grad_key grad_value grad_bias",
    _gradients,
    unit_stride="grad_output query key value",
    aligned=True,
    by_sequence="grad_output query key value output grad_query grad_key grad_value",
)


def deterministic() -> bool:
    """Whether gradients must be the same from run to run, bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not attention_switches().nondeterministic


class _Attention(OperatorCall):
    """Settings: the bias has a gradient, gradients are repeatable, numbers of the operator."""

    label = "attention"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        output, statistics = _forward(self.traced, *tensors, *self.settings[2:])
        return output, (*tensors[:3], output, statistics, *tensors[3:])

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        how, numbers = self.settings[:2], self.settings[2:]
        *made, grad_bias = _backward(self.traced, *grads, *how, *saved, *numbers)
        return None, *made, None, grad_bias if how[0] else None, None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    qkv_format: str,
    limits: Limits,
    scale: float,
    dropout: float,
) -> Tensor:
    """Softmax(scale * query key^T + bias) value, with dropout of the weights.

    Tensors are [sequence, batch, heads, channels] (sbhd) or [batch, sequence, heads, channels]
    (bshd), in fp32 (on the CPU), fp16 or bf16; keys and values may have fewer heads, which divide
    those of `query`. The bias of the limits is differentiable. The output [.., .., heads, channels
    of values] has the order and dtype of `query` and is contiguous; under `torch.autocast` it has
    its dtype.
    """
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask, bias, window, bottom_right, *lengths = limits
    wants_bias, turned = bias is not None and bias.requires_grad, qkv_format == "sbhd"
    numbers = scale, dropout, *window, bottom_right, turned
    call = _Attention(query, wants_bias, deterministic(), *numbers)
    rng = draw_pair(query) if dropout > 0.0 else None
    return run_call(call, query, key, value, mask, bias, *lengths, rng)
