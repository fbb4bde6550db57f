# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention by the library's own operator: no matrix of scores is kept."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.config import attention_switches
from transformer_engine.pytorch.attention.dot_product_attention.heads import Heads, joined_shape
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.operators import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.random import draw_pair


def _results(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    del key
    *lead, heads, _ = query.shape
    if len(lead) == 1:  # packed sequences
        sums = 1, lead[0], heads
    else:
        batch, queries = lead[::-1] if arguments[-1] else lead
        sums = batch, heads, queries
    output = query.new_empty(*lead, heads, value.shape[-1])
    return output, query.new_empty(sums, dtype=torch.float32)


def _gradients(
    grad: Tensor, wants_bias: bool, deterministic: bool, joined: int, dim: int, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Of query, key and value, or less of what is `joined`: the last 2, or all 3; of the bias."""
    del grad, deterministic
    bias = contiguous_like(arguments[6]) if wants_bias else None
    if joined == 0:
        return *map(contiguous_like, arguments[:3]), bias
    value = arguments[2]
    packed = value.new_empty(joined_shape(value.shape, joined, dim))
    return (
        (packed, None, None, bias)
        if joined == 3
        else (contiguous_like(arguments[0]), packed, None, bias)
    )


def _parts(
    made: tuple, grad: Tensor, wants_bias: bool, deterministic: bool, joined: int, dim: int, *_: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and bias, from what `_gradients` made."""
    if joined == 0:
        return made
    return *Heads(made[: 4 - joined], dim).split(), made[3]


_PROBLEM = (
    "Tensor? mask, Tensor? bias, Tensor? query_lengths, Tensor? key_lengths, "
    "Tensor? query_offsets, Tensor? key_offsets, Tensor? rng, float scale, float dropout, "
    "int window_left, int window_right, bool bottom_right, SymInt max_queries, SymInt max_keys, "
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
    "Tensor grad_output, bool wants_bias, bool deterministic, int joined, int dim, Tensor query, "
    f"Tensor key, Tensor value, Tensor output, Tensor statistics, {_PROBLEM}",
    "grad_query grad_key grad_value grad_bias",
    _gradients,
    unit_stride="grad_output query key value",
    aligned=True,
    by_sequence="grad_output query key value output grad_query grad_key grad_value",
    split=_parts,
)


def deterministic() -> bool:
    """Whether gradients must be the same from run to run, bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not attention_switches().nondeterministic


class _Attention(OperatorCall):
    """Settings: two flags, `joined` and `dim` as `_gradients` takes them, then the operator's."""

    label = "attention"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        _, _, joined, dim, *numbers = self.settings
        heads, others = tensors[: _COUNTS[joined]], tensors[_COUNTS[joined] :]
        output, statistics = _forward(self.traced, *Heads(heads, dim).split(), *others, *numbers)
        return output, (*heads, output, statistics, *others)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        wants_bias, _, joined, dim, *numbers = self.settings
        count = _COUNTS[joined]
        given = *Heads(saved[:count], dim).split(), *saved[count:]
        made = _backward(self.traced, *grads, *self.settings[:4], *given, *numbers)
        grad_bias = made[3] if wants_bias else None
        return None, *made[:count], None, grad_bias, None, None, None, None, None


_COUNTS = {0: 3, 2: 2, 3: 1}
"""How many tensors query, key and value are, by how many of them are in one."""


def attend(heads: Heads, qkv_format: str, limits: Limits, scale: float, dropout: float) -> Tensor:
    """Softmax(scale * query key^T + bias) value, with dropout of the weights.

    Tensors are [sequence, batch, heads, channels] (sbhd), [batch, sequence, heads, channels] (bshd)
    or [tokens, heads, channels] (thd), in fp32 (on the CPU), fp16 or bf16; keys and values may have
    fewer heads, which divide those of the queries. Of what is in one tensor the gradient is too:
    nothing is put together. The bias of the limits is differentiable. The output [.., heads,
    channels of values] has the order and dtype of the queries and is contiguous; under
    `torch.autocast` it has its dtype.
    """
    tensors = heads.tensors
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(tensor.to(dtype) for tensor in tensors)
    bias, packed = limits.bias, limits.packed
    wants_bias, turned = bias is not None and bias.requires_grad, qkv_format == "sbhd"
    if packed is None:
        where = limits.query_lengths, limits.key_lengths, None, None
        longest = 0, 0
    else:
        queries, keys = packed
        where = queries.lengths, keys.lengths, queries.offsets, keys.offsets
        longest = queries.longest, keys.longest
        if (where[0] is None) != (where[1] is None):
            where = queries.ends(), keys.ends(), *where[2:]
    joined = 0 if heads.dim == 0 else 4 - len(tensors)
    how = wants_bias, deterministic(), joined, heads.dim
    numbers = scale, dropout, *limits.window, limits.bottom_right, *longest, turned
    call = _Attention(tensors[0], *how, *numbers)
    rng = draw_pair(tensors[0]) if dropout > 0.0 else None
    return run_call(call, *tensors, limits.mask, bias, *where, rng)
