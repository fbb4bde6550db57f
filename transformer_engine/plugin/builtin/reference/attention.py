# SPDX-License-Identifier: Apache-2.0
"""Attention with a matrix of scores, and rotary positions; see `builtin.attention`.

Gradients are autograd's. There is no dropout: its random bits are an implementation's own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.attention_kinds import in_format
from transformer_engine.plugin.builtin import ROPE, attention as native
from transformer_engine.plugin.builtin.signatures import define, operator
from transformer_engine.plugin.core.ops import qkv_format_name
from transformer_engine.plugin.definitions.attention import attend
from transformer_engine.pytorch.attention.rope import Positions, rotate_by_torch
from transformer_engine.pytorch.cpp_extensions.values import exact, quantized, refuse
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


@in_own_dtypes
@operator
def fused_attn_fwd(call: Any) -> list:
    """Softmax(attn_scale Q Kᵀ + Bias) V, and what the backward reads."""
    op, given = "fused_attn_fwd", [t for t in (call.Bias, call.SoftmaxOffset) if t is not None]
    refuse(op, page_table_k=call.page_table_k, page_table_v=call.page_table_v)
    refuse(op, s_quantizer=call.s_quantizer, p_dropout=call.is_training and call.p_dropout > 0.0)
    problem = native.problem_of(op, call, (call.Bias, call.SoftmaxOffset))
    heads = problem.seen(*(exact(op, "", t) for t in (call.Q, call.K, call.V)))
    out, sums, top = attend(problem.fields, *heads)
    results = [quantized(op, in_format(out, problem.forms[0]).to(call.Q.dtype), call.o_quantizer)]
    results += [top] * call.return_max_logit
    if call.is_training:
        rng = torch.zeros(2, dtype=torch.int64, device=call.Q.device)
        results += [problem.shown_statistics(sums).contiguous(), rng, *given]
    return results


@in_own_dtypes
@operator
def fused_attn_bwd(call: Any) -> list:
    """[dQ, dK, dV, dBias or None, dSoftmaxOffset or None]: the forward again, differentiated."""
    op, p_dropout = "fused_attn_bwd", call.p_dropout > 0.0
    refuse(op, s_quantizer=call.s_quantizer, dp_quantizer=call.dp_quantizer, p_dropout=p_dropout)
    bias, offset = native.added_of(call.bias_type, call.Aux_CTX_Tensors)
    problem = native.problem_of(op, call, (bias, offset))
    given = [call.Q, call.K, call.V, bias, offset]
    wide = [None if t is None else exact(op, "", t).detach().requires_grad_() for t in given]
    with torch.enable_grad():
        if bias is not None:
            problem.fields["bias"] = wide[3]
        if offset is not None:
            problem.fields["sink"] = wide[4].reshape(-1)
        out, *_ = attend(problem.fields, *problem.seen(*wide[:3]))
        leaves = [t for t in wide if t is not None]
        found = torch.autograd.grad(
            in_format(out, problem.forms[0]), leaves, exact(op, "dO", call.dO)
        )
    left = iter(found)
    made = [None if t is None else next(left).to(t.dtype) for t in given]
    return [*(quantized(op, each, call.dqkv_quantizer) for each in made[:3]), *made[3:]]


@operator
def copy_to_kv_cache(call: Any) -> None:
    """Put keys and values of new tokens behind those of their sequences in a cache."""
    form = qkv_format_name("copy_to_kv_cache", call.kv_format)
    starts, totals = call.cu_new_lens.tolist(), call.cu_cached_lens.diff().tolist()
    for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache)):
        cache, new = cache.detach(), new.detach()
        if call.is_non_paged and call.page_table is not None:
            cache[: call.b] = cache[call.page_table.reshape(call.b, -1)[:, 0].long()]
        for i in range(call.b):
            count = starts[i + 1] - starts[i]
            tokens = new[starts[i] :] if form == "thd" else new[:, i] if form == "sbhd" else new[i]
            for token, at in zip(tokens, range(totals[i] - count, totals[i]), strict=False):
                page, place = divmod(at, cache.shape[1])
                cache[i if call.is_non_paged else int(call.page_table[i, page]), place] = token


# ---- rotary positions ----------------------------------------------------------------------------


def _transposed(function: Callable[[Tensor], Any], like: Tensor, grads: Any) -> Tensor:
    """The transposed map of a linear one."""
    source = torch.zeros_like(like, requires_grad=True)
    with torch.enable_grad():
        made = function(source)
    return torch.autograd.grad(made, source, grads)[0]


def _rope(op: str, call: Any) -> Tensor:
    """Compute t cos + rot(t) sin over the first channels, or the transposed map of gradients."""
    form, starts = qkv_format_name(op, call.qkv_format), getattr(call, "start_positions", None)
    positions = Positions(
        form, starts, call.interleaved, call.cu_seqlens, call.cp_size, call.cp_rank
    )

    def turn(t: Tensor) -> Tensor:
        return rotate_by_torch(t, call.freqs, positions)

    if op == "fused_rope_forward":
        return turn(call.input.detach())
    return _transposed(turn, call.output_grads, call.output_grads)


def _rope_of_parts(op: str, call: Any) -> Any:
    """Queries and keys of a projection, rotated, and values; or the transposed map of gradients."""
    form, starts = qkv_format_name(op, call.qkv_format), getattr(call, "start_positions", None)
    positions = Positions(form, starts, call.interleaved, None, call.cp_size, call.cp_rank)
    sizes = [int(n) for n in call.qkv_split_arg_list]

    def turn(qkv: Tensor) -> tuple[Tensor, ...]:
        query, key, value = qkv.split(sizes, -1)
        query = query.reshape(*qkv.shape[:-2], -1, sizes[1])
        pairs = (query, call.q_freqs), (key, call.k_freqs)
        turned = (rotate_by_torch(t, freqs, positions) for t, freqs in pairs)
        return *turned, value.contiguous()

    if op == "fused_qkv_rope_forward":
        return turn(call.qkv_input.detach())
    key = call.k_grad_out
    like = key.new_empty(*key.shape[:-1], sum(sizes))
    return _transposed(turn, like, (call.q_grad_out, key, call.v_grad_out))


for _op in ROPE.split():
    _run = functools.partial(_rope_of_parts if "qkv" in _op else _rope, _op)
    define(globals(), _op, _run, getattr(native, _op).__doc__)
