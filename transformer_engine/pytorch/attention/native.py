# SPDX-License-Identifier: Apache-2.0
"""Differentiable attention by the library's own operator: no matrix of scores is kept."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.config import attention_switches
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.problem import Heads, Sequences, joined_shape
from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.custom_ops import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.execution.random import draw_pair


def _results(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    del key
    *lead, heads, _ = query.shape
    sequence_first, wants_top = arguments[-2:]
    if len(lead) == 1:  # packed sequences
        sums = 1, lead[0], heads
    else:
        batch, queries = lead[::-1] if sequence_first else lead
        sums = batch, heads, queries
    output = query.new_empty(*lead, heads, value.shape[-1])
    statistics = query.new_empty(sums, dtype=torch.float32)
    return output, statistics, statistics.new_empty(heads) if wants_top else None


def _gradients(
    grad: Tensor,
    wants_bias: bool,
    wants_sink: bool,
    deterministic: bool,
    joined: int,
    dim: int,
    *arguments: Any,
) -> tuple[Tensor | None, ...]:
    """Of query, key and value, or less of what is `joined`: the last 2, or all 3; bias and sink."""
    del grad, deterministic
    query, key, value, _, _, _, bias, sink, *_ = arguments
    added = (
        contiguous_like(bias) if wants_bias else None,
        contiguous_like(sink) if wants_sink else None,
    )
    if joined == 0:
        return *map(contiguous_like, (query, key, value)), *added
    packed = value.new_empty(joined_shape(value.shape, joined, dim))
    if joined == 3:
        return packed, None, None, *added
    return contiguous_like(query), packed, None, *added


def _parts(made: tuple, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias and sink, from what `_gradients` made of these."""
    joined, dim = arguments[4:6]
    if joined == 0:
        return made
    return *Heads(made[: 4 - joined], dim).split(), *made[3:]


_PROBLEM = (
    "Tensor? mask, Tensor? bias, Tensor? sink, Tensor? slopes, Tensor? query_lengths, "
    "Tensor? key_lengths, Tensor? query_offsets, Tensor? key_offsets, Tensor? rng, float scale, "
    "float dropout, int window_left, int window_right, bool bottom_right, SymInt max_queries, "
    "SymInt max_keys, float softcap, bool sequence_first"
)
_forward = operator(
    "attention",
    f"Tensor query, Tensor key, Tensor value, {_PROBLEM}, bool wants_top",
    "output statistics top",
    _results,
    unit_stride="query key value",
    aligned=True,
    by_sequence="query key value output",
)
_backward = operator(
    "attention_backward",
    "Tensor grad_output, bool wants_bias, bool wants_sink, bool deterministic, int joined, "
    "int dim, Tensor query, "
    f"Tensor key, Tensor value, Tensor output, Tensor statistics, {_PROBLEM}",
    "grad_query grad_key grad_value grad_bias grad_sink",
    _gradients,
    unit_stride="grad_output query key value",
    aligned=True,
    by_sequence="grad_output query key value output grad_query grad_key grad_value",
    split=_parts,
)


def deterministic() -> bool:
    """Whether gradients must be the same from run to run, bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not attention_switches().nondeterministic


def lengths_and_offsets(packed: tuple[Sequences, Sequences]) -> tuple[tuple, tuple]:
    """Lengths, or None twice, and offsets of packed queries and keys, as the operator reads."""
    queries, keys = packed
    lengths: tuple = (None, None)
    if queries.lengths is not None or keys.lengths is not None:
        lengths = queries.ends(), queries.ends() if keys.lengths is queries.lengths else keys.ends()
    return lengths, (queries.offsets, keys.offsets)


class _Attention(OperatorCall):
    """Settings: what is wanted, `joined` and `dim` as of `_gradients`, then the operator's.

    Wanted are the largest scores, gradients of bias and of sink, and repeatable gradients.
    """

    label = "attention"

    def run_forward(self, tensors: tuple) -> tuple[Any, tuple]:
        wants_top, _, _, _, joined, dim, *numbers = self.settings
        heads, others = tensors[: _COUNTS[joined]], tensors[_COUNTS[joined] :]
        given = *Heads(heads, dim).split(), *others, *numbers
        output, statistics, top = _forward(self.traced, *given, wants_top)
        saved = *heads, output, statistics, *others
        return (output, top) if wants_top else output, saved

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        _, wants_bias, wants_sink, _, joined, dim, *numbers = self.settings
        count = _COUNTS[joined]
        given = *Heads(saved[:count], dim).split(), *saved[count:]
        made = _backward(self.traced, grads[0], *self.settings[1:6], *given, *numbers)
        added = made[3] if wants_bias else None, made[4] if wants_sink else None
        return None, *made[:count], None, *added, None, None, None, None, None, None


_COUNTS = {0: 3, 2: 2, 3: 1}
"""How many tensors query, key and value are, by how many of them are in one."""


def attend(heads: Heads, qkv_format: str, limits: Limits, scale: float, dropout: float) -> Any:
    """Softmax(scale * query key^T + bias) value, with dropout of the weights.

    A softcap of the limits bounds the products before the bias is added.

    Tensors are [sequence, batch, heads, channels] (sbhd), [batch, sequence, heads, channels] (bshd)
    or [tokens, heads, channels] (thd), in fp32 (on the CPU), fp16 or bf16; keys and values may have
    fewer heads, which divide those of the queries. Of what is in one tensor the gradient is too:
    nothing is put together. Bias and sink of the limits are differentiable. The output [.., heads,
    channels of values] has the order and dtype of the queries and is contiguous; under
    `torch.autocast` it has its dtype. Where the limits want them, the largest scores [heads] fp32
    follow, without a gradient.
    """
    tensors = heads.tensors
    device = tensors[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(tensor.to(dtype) for tensor in tensors)
    bias, sink, packed = limits.bias, limits.sink, limits.packed
    grads = bias is not None and bias.requires_grad, sink is not None and sink.requires_grad
    if packed is None:
        where = limits.query_lengths, limits.key_lengths, None, None
        longest = 0, 0
    else:
        lengths, offsets = lengths_and_offsets(packed)
        where, longest = (*lengths, *offsets), (packed[0].longest, packed[1].longest)
    joined = heads.joined
    how = limits.wants_top, *grads, deterministic(), joined, heads.dim
    turned = qkv_format == "sbhd"
    numbers = scale, dropout, *limits.window, limits.bottom_right, *longest, limits.softcap, turned
    call = _Attention(tensors[0], *how, *numbers)
    rng = draw_pair(tensors[0]) if dropout > 0.0 else None
    out = run_call(call, *tensors, limits.mask, bias, sink, limits.slopes, *where, rng)
    return (out[0], out[1].detach()) if limits.wants_top else out
