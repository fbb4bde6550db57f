# SPDX-License-Identifier: Apache-2.0
"""Attention with a matrix of scores, and its gradients by autograd; see `builtin.attention`.

There is no dropout: its random bits are an implementation's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.attention import enumerated, formats, limits
from transformer_engine.plugin.builtin.values import quantized, refuse
from transformer_engine.plugin.core.ops import NVTE_Bias_Type, NVTE_Softmax_Type, qkv_format_name
from transformer_engine.pytorch.attention.masks import default_alibi_slopes
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


class _Rule(NamedTuple):
    """What does not depend on the values of tensors."""

    forms: tuple[str, str]
    scale: float
    mask_type: Any
    window: Any
    bias_type: Any
    softmax_type: Any
    counted: tuple[Tensor, Tensor]
    padded: tuple[Tensor | None, Tensor | None]


def _sequence(t: Tensor, form: str, i: int, counted: Tensor, padded: Tensor | None) -> Tensor:
    """[heads, length, channels] of a sequence; of packed ones, its own tokens."""
    if form == "thd":
        first = int((counted if padded is None else padded)[i])
        return t[first : first + int(counted[i + 1] - counted[i])].transpose(0, 1)
    return (t[:, i] if form == "sbhd" else t[i]).transpose(0, 1)


def _put(made: Tensor, form: str, i: int, value: Tensor, first: int) -> None:
    """Write [heads, length, channels] of a sequence."""
    value = value.transpose(0, 1).to(made.dtype)
    if form == "thd":
        made[first : first + len(value)] = value
    elif form == "sbhd":
        made[: len(value), i] = value
    else:
        made[i, : len(value)] = value


def _ends(rule: _Rule, i: int, queries: int, keys: int) -> tuple[int, int]:
    """How many of these belong to a sequence; of packed ones, all."""
    if limits("fused_attn", rule.mask_type, rule.window)[0] and rule.forms[0] != "thd":
        queries, keys = (int(c[i + 1] - c[i]) for c in rule.counted)
    return queries, keys


def _allowed(rule: _Rule, i: int, queries: int, keys: int, device: Any) -> tuple[Tensor, int]:
    """Which keys each query attends, and by how much the diagonal is further right."""
    _, bottom_right, left, right = limits("fused_attn", rule.mask_type, rule.window)
    ends = _ends(rule, i, queries, keys)
    shift = ends[1] - ends[0] if bottom_right else 0
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    allowed = (query < ends[0]) & (key < ends[1])
    if left >= 0:
        allowed &= key >= query + shift - left
    if right >= 0:
        allowed &= key <= query + shift + right
    return allowed, shift


def _scores(
    rule: _Rule, i: int, q: Tensor, k: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores [heads, queries, keys] of a sequence, -Inf where nothing is attended; the mask."""
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    scores = rule.scale * (q @ k.transpose(1, 2))
    allowed, shift = _allowed(rule, i, q.shape[1], k.shape[1], q.device)
    kind = enumerated("fused_attn", NVTE_Bias_Type, "bias_type", rule.bias_type)
    if kind == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS:
        scores = scores + bias[i if bias.shape[0] > 1 else 0]
    elif kind == NVTE_Bias_Type.NVTE_ALIBI:
        query = torch.arange(q.shape[1], device=q.device)[:, None] + shift
        apart = (torch.arange(k.shape[1], device=q.device)[None] - query).abs()
        scores = scores - default_alibi_slopes(q.shape[0], q.device)[:, None, None] * apart
    elif kind != NVTE_Bias_Type.NVTE_NO_BIAS:
        raise NotImplementedError(f"fused_attn: bias_type={kind.name}: not built yet")
    return scores.masked_fill(~allowed, -torch.inf), allowed


def _attend(rule: _Rule, tensors: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """(output, logarithm of the sums [.., heads, s] or [tokens, heads], largest scores), fp32."""
    query, key, value, bias, offset = tensors
    form, of_keys = rule.forms
    batch = len(rule.counted[0]) - 1 if form == "thd" else query.shape[1 if form == "sbhd" else 0]
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    sums = query.new_full((*query.shape[:-1], 1), -torch.inf)
    top = query.new_full((query.shape[-2],), -torch.inf)
    softmax = enumerated("fused_attn", NVTE_Softmax_Type, "softmax_type", rule.softmax_type)
    for i in range(batch):
        q = _sequence(query, form, i, rule.counted[0], rule.padded[0])
        k, v = (_sequence(t, of_keys, i, rule.counted[1], rule.padded[1]) for t in (key, value))
        scores, allowed = _scores(rule, i, q, k, bias)
        joined = scores
        if softmax != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
            sink = scores.new_zeros(len(scores)) if offset is None else offset.reshape(-1)
            joined = torch.cat((scores, sink[:, None, None].expand(-1, scores.shape[1], 1)), -1)
        total = joined.logsumexp(-1)
        weights = (scores - total.masked_fill(total == -torch.inf, 0)[..., None]).exp()
        made = torch.where(allowed, weights, 0.0) @ v.repeat_interleave(q.shape[0] // v.shape[0], 0)
        if form == "thd":
            first = int((rule.counted[0] if rule.padded[0] is None else rule.padded[0])[i])
        else:
            first = 0
        _put(out, form, i, made, first)
        own = _ends(rule, i, q.shape[1], k.shape[1])[0]
        _put(sums, form, i, total[:, :own, None], first)
        if scores.numel():
            top = torch.maximum(top, scores.detach().amax((1, 2)))
    return out, sums[..., 0], top


def _rule(op: str, kinds: tuple, scale: float, counted: tuple, padded: tuple) -> _Rule:
    layout, mask_type, window, bias_type, softmax_type = kinds
    return _Rule(
        formats(op, layout), scale, mask_type, window, bias_type, softmax_type, counted, padded
    )


@in_own_dtypes
def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: Any,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
) -> list:
    """Softmax(attn_scale Q Kᵀ + Bias) V, and what the backward reads."""
    op = "fused_attn_fwd"
    refuse(op, page_table_k=page_table_k, page_table_v=page_table_v, s_quantizer=s_quantizer)
    refuse(op, p_dropout=is_training and p_dropout > 0.0)
    kinds = qkv_layout, attn_mask_type, window_size, bias_type, softmax_type
    packed = cu_seqlens_q_padded, cu_seqlens_kv_padded
    rule = _rule(op, kinds, attn_scale, (cu_seqlens_q, cu_seqlens_kv), packed)
    tensors = [None if t is None else t.detach().float() for t in (Q, K, V, Bias, SoftmaxOffset)]
    out, sums, top = _attend(rule, tuple(tensors))
    results = [quantized(op, out.to(Q.dtype), o_quantizer)]
    if return_max_logit:
        results.append(top)
    if is_training:
        order = {"sbhd": (1, 2, 0), "bshd": (0, 2, 1), "thd": (0, 1)}[rule.forms[0]]
        results += [sums.permute(order)[..., None].contiguous()]
        results += [torch.zeros(2, dtype=torch.int64, device=Q.device)]
        results += [each for each in (Bias, SoftmaxOffset) if each is not None]
    return results


@in_own_dtypes
def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Sequence[int],
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,  # noqa: E741 - the name that callers give
    dO: Tensor,
    fake_dtype: Any,
    dqkv_type: Any,
    Aux_CTX_Tensors: Sequence[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
) -> list:
    """[dQ, dK, dV, dBias or None, dSoftmaxOffset or None]: the forward again, differentiated."""
    op = "fused_attn_bwd"
    refuse(op, s_quantizer=s_quantizer, dp_quantizer=dp_quantizer, p_dropout=p_dropout > 0.0)
    kinds = qkv_layout, attn_mask_type, window_size, bias_type, softmax_type
    packed = cu_seqlens_q_padded, cu_seqlens_kv_padded
    rule = _rule(op, kinds, attn_scale, (cu_seqlens_q, cu_seqlens_kv), packed)
    rest = list(Aux_CTX_Tensors[2:])
    has_bias = NVTE_Bias_Type(bias_type) == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS
    bias = rest.pop(0) if has_bias else None
    given = [Q, K, V, bias, rest.pop(0) if rest else None]
    wide = [None if t is None else t.detach().float().requires_grad_() for t in given]
    with torch.enable_grad():
        out, *_ = _attend(rule, tuple(wide))
    wanted = [t for t in wide if t is not None]
    found = iter(torch.autograd.grad(out, wanted, dO.detach().float()))
    made = [None if t is None else next(found).to(t.dtype) for t in given]
    return [*(quantized(op, each, dqkv_quantizer) for each in made[:3]), *made[3:]]


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    kv_format: Any,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Put keys and values of new tokens behind those of their sequences in a cache."""
    form = qkv_format_name("copy_to_kv_cache", kv_format)
    limits, totals = cu_new_lens.tolist(), cu_cached_lens.diff().tolist()
    for new, cache in ((new_k.detach(), k_cache.detach()), (new_v.detach(), v_cache.detach())):
        if is_non_paged and page_table is not None:
            cache[:b] = cache[page_table.reshape(b, -1)[:, 0].long()]
        size = cache.shape[1]
        for i in range(b):
            tokens = _sequence(new, form, i, cu_new_lens, None).transpose(0, 1)
            count = limits[i + 1] - limits[i]
            for j, at in enumerate(range(totals[i] - count, totals[i])):
                page = i if is_non_paged else int(page_table[i, at // size])
                cache[page, at % size] = tokens[j]
