# SPDX-License-Identifier: Apache-2.0
"""Attention with a matrix of scores, and its gradients by autograd; see `builtin.attention`.

There is no dropout: its random bits are an implementation's own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.plugin.attention_kinds import in_format
from transformer_engine.plugin.builtin import attention as native
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.core.ops import qkv_format_name
from transformer_engine.pytorch.cpp_extensions.values import exact, quantized, refuse
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


class _Tokens(NamedTuple):
    """Where the tokens of sequences lie among the rows of [batch, length, heads, channels]."""

    at: Tensor  # [sequences, the longest]
    inside: Tensor  # which of these there are

    def read(self, tensor: Tensor) -> Tensor:
        """[sequences, heads, the longest, channels], 0 behind the end of a sequence."""
        rows = functional.pad(tensor.flatten(0, 1), (0, 0, 0, 0, 0, 1))
        return rows[torch.where(self.inside, self.at, len(rows) - 1)].transpose(1, 2)

    def written(self, values: Tensor, like: Tensor, fill: float) -> Tensor:
        """Undo `read`, to the leading dims of a tensor; `fill` where no sequence has a token."""
        values = values.transpose(1, 2)
        made = values.new_full((like.shape[:2].numel(), *values.shape[2:]), fill)
        made = made.index_put((self.at[self.inside],), values[self.inside])
        return made.view(*like.shape[:2], *made.shape[1:])


def _tokens(fields: dict[str, Any], of: str, tensor: Tensor) -> _Tokens:
    """Those of the sequences of queries, or of keys, by the fields of `_core.attention`."""
    starts, lengths = fields.get(f"{of}_offsets"), fields.get(f"{of}_lengths")
    batch, longest = tensor.shape[:2]
    if starts is None:
        starts = torch.arange(batch + 1, device=tensor.device) * longest
    lengths = starts.diff() if lengths is None else lengths
    if f"{of}_offsets" in fields:
        longest = int(lengths.max()) if len(lengths) else 0
    place = torch.arange(longest, device=tensor.device)
    return _Tokens(starts[:-1, None].long() + place, place < lengths[:, None])


def attend(
    fields: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, logarithms of sums, largest scores [heads]) of a call of `_core.attention`.

    Tensors are [batch, length, heads, channels], or packed [1, tokens, heads, channels], as the
    output is; the sums are [batch, heads, length], or packed [1, tokens, heads], -Inf where no key
    is attended.
    """
    queries, keys = _tokens(fields, "query", query), _tokens(fields, "key", key)
    groups = query.shape[2] // key.shape[2]
    q = queries.read(query)
    k, v = (keys.read(t).repeat_interleave(groups, 1) for t in (key, value))
    shift: Any = 0
    if fields["bottom_right"]:
        shift = (keys.inside.sum(1) - queries.inside.sum(1)).view(-1, 1, 1, 1)
    at = torch.arange(q.shape[2], device=q.device)[:, None] + shift
    apart = torch.arange(k.shape[2], device=q.device) - at
    allowed = queries.inside[:, None, :, None] & keys.inside[:, None, None]
    if fields["window_left"] >= 0:
        allowed = allowed & (apart >= -fields["window_left"])
    if fields["window_right"] >= 0:
        allowed = allowed & (apart <= fields["window_right"])
    scores = fields["scale"] * (q @ k.transpose(2, 3))
    if "bias" in fields:
        scores = scores + fields["bias"][..., : q.shape[2], : k.shape[2]].to(q.dtype)
    if "slopes" in fields:
        scores = scores - fields["slopes"].to(q.dtype)[:, None, None] * apart.abs()
    scores = scores.masked_fill(~allowed, -torch.inf)
    top = (
        scores.detach().amax((0, 2, 3)) if scores.numel() else q.new_full(q.shape[1:2], -torch.inf)
    )
    joined = scores
    if "sink" in fields:
        sink = fields["sink"].to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        joined = torch.cat((scores, sink), -1)
    sums = joined.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums == -torch.inf, 0)[..., None]).exp()
    weights = torch.where(allowed, weights, 0.0)
    out = queries.written(weights @ v, query, 0.0)
    sums = queries.written(sums[..., None], query, -torch.inf)[..., 0]
    return out, sums if "query_offsets" in fields else sums.transpose(1, 2), top


def _attended(problem: native.Problem, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` to queries, keys and values in their formats."""
    return attend(problem.fields, *problem.seen(*tensors))


@in_own_dtypes
@operator
def fused_attn_fwd(call: Any) -> list:
    """Softmax(attn_scale Q Kᵀ + Bias) V, and what the backward reads."""
    op, given = "fused_attn_fwd", [t for t in (call.Bias, call.SoftmaxOffset) if t is not None]
    refuse(op, page_table_k=call.page_table_k, page_table_v=call.page_table_v)
    refuse(op, s_quantizer=call.s_quantizer, p_dropout=call.is_training and call.p_dropout > 0.0)
    problem = native.problem_of(op, call, (call.Bias, call.SoftmaxOffset))
    out, sums, top = _attended(problem, [exact(op, "", t) for t in (call.Q, call.K, call.V)])
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
        out, *_ = _attended(problem, wide[:3])
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
