# SPDX-License-Identifier: Apache-2.0
"""Attention by the operators `attention` and `attention_backward` alone: what plans are held to."""

import contextlib

import pytest
import torch

from transformer_engine import _core
from transformer_engine.pytorch.attention import plan
from transformer_engine.pytorch.attention.masks import deterministic
from transformer_engine.pytorch.execution.custom_ops import is_aligned
from transformer_engine.pytorch.execution.random import draw_pair

FORWARD, BACKWARD = (_core.obeying(name) for name in ("attention", "attention_backward"))


def as_read(tensor):
    """The tensor, or a copy that kernels read."""
    if tensor.stride(-1) != 1 or (tensor.is_cuda and not is_aligned(tensor)):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class Attention(torch.autograd.Function):
    """`problem` are arguments of the operators by name, `turn` gives them [batch, sequence, ..]."""

    @staticmethod
    def forward(ctx, turn, problem, query, key, value, bias, sink):
        query, key, value = map(as_read, (query, key, value))
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        batch, queries, heads = turn(query).shape[:3]
        packed = problem["query_offsets"] is not None
        shape = (1, queries, heads) if packed else (batch, heads, queries)
        statistics = query.new_empty(shape, dtype=torch.float32)
        top = statistics.new_empty(heads)
        wants_top = ctx.wants_top = problem.pop("wants_top")
        given = {**problem, "bias": bias, "sink": sink}
        FORWARD(
            *map(turn, (query, key, value, output)), statistics=statistics,
            top=top if wants_top else None, **given,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, output, statistics)
        ctx.turn, ctx.given = turn, given
        ctx.mark_non_differentiable(top)
        return output, top

    @staticmethod
    def backward(ctx, grad, _):
        query, key, value, output, statistics = ctx.saved_tensors
        grads = [
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)
        ]
        added = [
            torch.empty_like(ctx.given[name], memory_format=torch.contiguous_format)
            if ctx.needs_input_grad[at]
            else None
            for at, name in ((5, "bias"), (6, "sink"))
        ]
        turned = dict(
            zip(
                ("query", "key", "value", "output"),
                map(ctx.turn, (query, key, value, output)),
                strict=True,
            )
        )
        made = dict(
            zip(("grad_query", "grad_key", "grad_value"), map(ctx.turn, grads), strict=True)
        )
        BACKWARD(
            grad_output=ctx.turn(as_read(grad)), statistics=statistics,
            deterministic=deterministic(), grad_bias=added[0], grad_sink=added[1],
            **turned, **made, **ctx.given,
        )  # fmt: skip
        return None, None, *grads, *added


def attend(module, more, heads, qkv_format, limits, scale, dropout):
    """`plan.attend` in high precision, in eager mode."""
    tensors = heads.split()
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    ends, offsets, longest = limits.sequence_lengths() or (None, None), (None, None), (0, 0)
    if limits.packed is not None:
        offsets, longest = zip(*((of.offsets, of.longest) for of in limits.packed), strict=True)
    problem = {
        "mask": limits.mask, "slopes": limits.slopes, "query_lengths": ends[0],
        "key_lengths": ends[1], "query_offsets": offsets[0], "key_offsets": offsets[1],
        "rng": draw_pair(tensors[0]) if dropout > 0.0 else None, "scale": scale,
        "dropout": dropout, "window_left": limits.window[0], "window_right": limits.window[1],
        "bottom_right": limits.bottom_right, "max_queries": longest[0], "max_keys": longest[1],
        "softcap": limits.softcap, "wants_top": limits.max_logit,
    }  # fmt: skip
    turn = {"sbhd": lambda t: t.transpose(0, 1), "bshd": lambda t: t, "thd": lambda t: t[None]}
    out, top = Attention.apply(turn[qkv_format], problem, *tensors, limits.bias, limits.sink)
    out = out.flatten(-2)
    return (out, top) if limits.max_logit else out


@contextlib.contextmanager
def unkept():
    """No call of a `DotProductAttention` is found again in the block: each makes its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.KeptCalls, "look_up", lambda *_: (None, None))
        yield


@contextlib.contextmanager
def by_operators():
    """Every `DotProductAttention` by itself runs operators in the block, and no plan."""
    with unkept(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "attend", attend)
        yield
