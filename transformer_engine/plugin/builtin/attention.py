# SPDX-License-Identifier: Apache-2.0
"""Fused attention, caches of keys and values, and rotary positions.

They are ``_core.attention`` and its neighbours, and functions of `attention.rope`.

Queries, keys and values come as three tensors, views of one where the layout says so:
[s, b, heads, d] (SBHD), [b, s, heads, d] (BSHD), [tokens, heads, d] (THD), in fp16 or bf16 (fp32 on
the CPU). ``cu_seqlens_*`` [b + 1] int32 count the tokens of sequences, ``cu_seqlens_*_padded`` say
where packed ones begin, if that is elsewhere. Angles are [positions, 1, 1, rotated channels].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.attention_kinds import enumerated, formats, in_batches, limits
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.core import ops
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.attention.masks import default_alibi_slopes
from transformer_engine.pytorch.constants import torch_dtype
from transformer_engine.pytorch.cpp_extensions.values import quantized, refuse
from transformer_engine.pytorch.execution.custom_ops import is_aligned
from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.torchside.device import (
    canonicalize_device,
    get_device_compute_capability,
    on_cuda,
    prepare_device,
)

_FORWARD, _BACKWARD = "fused_attn_fwd", "fused_attn_bwd"


class Problem(NamedTuple):
    """Which keys a query attends, as numbers and tensors of `_core.attention`."""

    fields: dict[str, Any]
    forms: tuple[str, str]  # formats of queries, and of keys and values

    def seen(self, query: Tensor, *keys: Tensor) -> list[Tensor]:
        """Tensors [batch, sequence, heads, channels], as native code reads them."""
        return [in_batches(query, self.forms[0]), *(in_batches(t, self.forms[1]) for t in keys)]

    def shown_statistics(self, sums: Tensor) -> Tensor:
        """[b, heads, s, 1] of native code's [b, heads, s], [tokens, heads, 1] of packed ones."""
        return sums[0, ..., None] if self.forms[0] == "thd" else sums[..., None]


def _lengths(cu_seqlens: Tensor) -> Tensor:
    return (cu_seqlens[1:] - cu_seqlens[:-1]).to(torch.int32)


def _sequences(forms: tuple[str, str], padding: bool, call: Any) -> dict[str, Any]:
    """Where sequences begin and end."""
    counted = call.cu_seqlens_q, call.cu_seqlens_kv
    padded = call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded
    found: dict[str, Any] = {}
    if forms == ("thd", "thd"):
        found |= {"max_queries": int(call.max_seqlen_q), "max_keys": int(call.max_seqlen_kv)}
        pairs = zip(counted, padded, strict=True)
        starts = [(c if p is None else p).to(torch.int32) for c, p in pairs]
        found |= {"query_offsets": starts[0], "key_offsets": starts[1]}
        padding = any(each is not None for each in padded)
    elif "thd" in forms:
        raise NotImplementedError(
            f"fused_attn: {forms[0]} queries and {forms[1]} keys: not built yet; pack both"
        )
    if padding:
        query, key = map(_lengths, counted)
        found |= {"query_lengths": query, "key_lengths": key}
    return found


def _added(op: str, call: Any, bias: Tensor | None, offset: Tensor | None) -> dict[str, Any]:
    """Bias, slopes and sink."""
    found: dict[str, Any] = {}
    heads, device = call.Q.shape[-2], call.Q.device
    kind = enumerated(op, ops.NVTE_Bias_Type, "bias_type", call.bias_type)
    if kind == ops.NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        raise NotImplementedError(
            f"{op}: bias_type={kind.name}: not built yet; divide by the scale"
        )
    if kind == ops.NVTE_Bias_Type.NVTE_POST_SCALE_BIAS:
        if bias is None:
            raise ValueError(f"{op}: bias_type={kind.name} needs Bias")
        found["bias"] = bias.detach()
    elif kind == ops.NVTE_Bias_Type.NVTE_ALIBI:
        found["slopes"] = default_alibi_slopes(heads, device)
    softmax = enumerated(op, ops.NVTE_Softmax_Type, "softmax_type", call.softmax_type)
    if softmax == ops.NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
        found["sink"] = torch.zeros(heads, dtype=torch.float32, device=device)
    elif softmax == ops.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX:
        if offset is None:
            raise ValueError(f"{op}: softmax_type={softmax.name} needs SoftmaxOffset")
        found["sink"] = offset.detach().reshape(-1).float()
    return found


def problem_of(op: str, call: Any, added: tuple[Tensor | None, Tensor | None]) -> Problem:
    """The problem that a call of `fused_attn_fwd` or `fused_attn_bwd` is.

    `added` are Bias and SoftmaxOffset.
    """
    forms = formats(op, call.qkv_layout)
    padding, bottom_right, left, right = limits(op, call.attn_mask_type, call.window_size)
    fields = {
        "scale": float(call.attn_scale),
        "window_left": left,
        "window_right": right,
        "bottom_right": int(bottom_right),
    }
    fields |= _sequences(forms, padding, call)
    return Problem(fields | _added(op, call, *added), forms)


def added_of(bias_type: Any, aux: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Bias and SoftmaxOffset of the forward, by what it gave its backward."""
    rest = list(aux[2:])
    has_bias = ops.NVTE_Bias_Type(bias_type) == ops.NVTE_Bias_Type.NVTE_POST_SCALE_BIAS
    bias = rest.pop(0) if has_bias and rest else None
    return bias, rest.pop(0) if rest else None


def _heads(op: str, **given: Any) -> list[Tensor]:
    """Queries, keys, values, ... in high precision."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or hasattr(type(tensor), "_dequantized"):
            raise NotImplementedError(
                f"{op}: {name}: {type(tensor).__name__}: give plain tensors; attention in FP8 is "
                "te.DotProductAttention under autocast"
            )
    tensors = [tensor.detach() for tensor in given.values()]
    prepare_device(tensors[0].device)
    return [
        t if t.stride(-1) == 1 and (is_aligned(t) or not t.is_cuda) else t.contiguous()
        for t in tensors
    ]


@operator
def get_fused_attn_backend(call: Any) -> ops.NVTE_Fused_Attn_Backend:
    """Return whether `fused_attn_fwd` and its backward take such a call on the current device.

    `NVTE_F16_arbitrary_seqlen` where they do: fp16 or bf16 (without a CUDA device fp32, too), on
    compute capability 9.0 heads of multiples of 8 channels up to 256; else `NVTE_No_Backend`.
    """
    kinds = ops.NVTE_Fused_Attn_Backend
    return kinds.NVTE_No_Backend if no_backend_because(call) else kinds.NVTE_F16_arbitrary_seqlen


def _check_sizes(op: str, call: Any) -> None:
    for name in ("num_attn_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v"):
        if not hasattr(getattr(call, name), "__index__"):
            raise TypeError(f"{op}: {name}={getattr(call, name)!r}, expected an int")


def no_backend_because(call: Any) -> str:
    """Why `fused_attn_fwd` does not take such a call on the current device; "": it does.

    `call` has the arguments of `get_fused_attn_backend`. ValueError for what is no enumerator,
    TypeError for what is no number.
    """
    op = "get_fused_attn_backend"
    _check_sizes(op, call)
    heads = call.num_attn_heads, call.num_gqa_groups
    channels = call.head_dim_qk, call.head_dim_v
    found = [torch_dtype(op, name, getattr(call, name)) for name in ("q_dtype", "kv_dtype")]
    bias = enumerated(op, ops.NVTE_Bias_Type, "bias_type", call.bias_type)
    try:
        packed = [form == "thd" for form in formats(op, call.qkv_layout)]
    except NotImplementedError as error:
        return str(error)
    by_cudnn, taken = on_cuda(canonicalize_device(None)), [torch.float16, torch.bfloat16]
    if not by_cudnn:
        taken.append(torch.float32)
    text = ""
    if found[0] != found[1] or found[0] not in taken:
        text = f"dtypes {found[0]} and {found[1]}: expected one of {taken} for both"
    elif min(*channels, heads[0] - 1) < 0:
        text = f"{heads[0]} heads of queries with {channels} channels"
    elif heads[1] < 1 or heads[0] % heads[1] != 0:
        text = f"{heads[0]} heads of queries and {heads[1]} of keys: these must divide those"
    elif packed[0] != packed[1]:
        text = "packed queries or keys alone: pack both"
    elif bias == ops.NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        text = f"bias_type={bias.name}: not built yet"
    elif by_cudnn and any(dim % 8 != 0 or dim > 256 for dim in channels):
        text = f"{channels} channels of a head: expected multiples of 8 up to 256"
    elif by_cudnn and call.return_max_logit:
        text = "return_max_logit: cuDNN's kernels do not write it"
    elif by_cudnn and get_device_compute_capability() != (9, 0):
        text = f"compute capability {get_device_compute_capability()}: built and tested for 9.0"
    return f"{op}: {text}" if text else ""


@operator
def fused_attn_fwd(call: Any) -> list:
    """Dropout(softmax(attn_scale Q Kᵀ + Bias)) V.

    Parameters
    ----------
    is_training : bool
        Return what `fused_attn_bwd` needs, and drop.
    qkv_layout, bias_type, attn_mask_type, softmax_type
        `NVTE_QKV_Layout` and so on, or their numbers.
    window_size : (int, int)
        Keys to the left and to the right; -1: no limit.
    Q, K, V : Tensor
        See above; the heads of keys and values divide those of queries.
    Bias : Tensor, optional
        Each dim 1 or that of [b, heads, queries, keys].
    SoftmaxOffset : Tensor, optional
        [1, heads, 1, 1] fp32, of the learnable softmax.
    rng_gen : torch.Generator, optional
        What dropout draws its seed from; torch's default where None.
    return_max_logit : bool
        Return the largest score of each head; on the CPU alone.
    set_zero, fake_dtype, rng_elts_per_thread
        Not needed.

    Returns
    -------
    list
        The output, cast by `o_quantizer` where that is not None; with `return_max_logit` the
        largest scores [heads] fp32; when training then the statistics [b, heads, s, 1], of packed
        sequences [tokens, heads, 1], fp32, the seed and offset of dropout int64 [2], and `Bias`
        and `SoftmaxOffset` where they were given.

    Raises
    ------
    NotImplementedError
        FP8, caches in pages, a bias before the scale.
    TypeError, ValueError
        Arguments that do not go together.
    """
    refuse(_FORWARD, page_table_k=call.page_table_k, page_table_v=call.page_table_v)
    refuse(_FORWARD, s_quantizer=call.s_quantizer)
    query, key, value = _heads(_FORWARD, Q=call.Q, K=call.K, V=call.V)
    problem = problem_of(_FORWARD, call, (call.Bias, call.SoftmaxOffset))
    probability = float(call.p_dropout) if call.is_training else 0.0
    rng = torch.zeros(2, dtype=torch.int64, device=query.device)
    if probability > 0.0:
        rng.random_(generator=call.rng_gen)
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    seen = problem.seen(query, key, value)
    batch, queries, heads, _ = seen[0].shape
    shape = (1, queries, heads) if problem.forms[0] == "thd" else (batch, heads, queries)
    statistics = query.new_empty(shape, dtype=torch.float32)
    top = query.new_empty(heads, dtype=torch.float32) if call.return_max_logit else None
    _core.attention(
        *seen,
        *problem.seen(output),
        statistics=statistics,
        top=top,
        rng=rng if probability > 0.0 else None,
        dropout=probability,
        **problem.fields,
    )
    results = [quantized(_FORWARD, output, call.o_quantizer)]
    if call.return_max_logit:
        results.append(top)
    if call.is_training:
        results += [problem.shown_statistics(statistics), rng]
        results += [each for each in (call.Bias, call.SoftmaxOffset) if each is not None]
    return results


@operator
def fused_attn_bwd(call: Any) -> list:
    """Gradients of `fused_attn_fwd`: [dQ, dK, dV, dBias or None, dSoftmaxOffset or None].

    `O` is the output of the forward, `dO` its gradient, `Aux_CTX_Tensors` what the forward returned
    behind its output (and largest scores). With `deterministic` the bits are the same from run to
    run. `dqkv_quantizer` casts the first three where it is not None. Errors as of the forward.
    """
    refuse(_BACKWARD, s_quantizer=call.s_quantizer, dp_quantizer=call.dp_quantizer)
    given = {name: getattr(call, name) for name in ("Q", "K", "V", "O", "dO")}
    query, key, value, output, grad = _heads(_BACKWARD, **given)
    if len(call.Aux_CTX_Tensors) < 2:
        raise ValueError(
            f"{_BACKWARD}: Aux_CTX_Tensors: {len(call.Aux_CTX_Tensors)} tensors, expected those of "
            "the forward: statistics, seed and offset, ..."
        )
    statistics, rng = call.Aux_CTX_Tensors[:2]
    bias, offset = added_of(call.bias_type, call.Aux_CTX_Tensors)
    problem = problem_of(_BACKWARD, call, (bias, offset))
    made = [torch.empty(t.shape, dtype=grad.dtype, device=t.device) for t in (query, key, value)]
    grad_bias = None if bias is None else torch.empty_like(problem.fields["bias"])
    grad_sink = None if offset is None else torch.empty_like(problem.fields["sink"])
    statistics = statistics[..., 0]
    _core.attention_backward(
        *(*problem.seen(grad), *problem.seen(query, key, value), *problem.seen(output)),
        (statistics[None] if problem.forms[0] == "thd" else statistics).contiguous(),
        **dict(zip(("grad_query", "grad_key", "grad_value"), problem.seen(*made), strict=True)),
        grad_bias=grad_bias,
        grad_sink=grad_sink,
        rng=rng if call.p_dropout > 0.0 else None,
        dropout=float(call.p_dropout),
        deterministic=int(call.deterministic),
        **problem.fields,
    )
    made = [quantized(_BACKWARD, each, call.dqkv_quantizer) for each in made]
    return [*made, grad_bias, None if grad_sink is None else grad_sink.view(offset.shape)]


@operator
def copy_to_kv_cache(call: Any) -> None:
    """Put keys and values of new tokens behind those of their sequences in a cache.

    Parameters
    ----------
    new_k, new_v : Tensor
        Of the new tokens, in `kv_format`: [b, max_ctx_len, ...], [max_ctx_len, b, ...] or packed.
    k_cache, v_cache : Tensor
        [pages, tokens of a page, heads, channels]; written.
    page_table : Tensor, optional
        [b, pages of a sequence] int32; not paged: where in the cache each sequence was, from which
        it moves to its number in the batch first.
    cu_new_lens, cu_cached_lens : Tensor
        [b + 1] int32: sums of the new tokens of sequences, and of all that they have then.
    is_non_paged : bool
        Page i is all of sequence i.
    max_ctx_len, max_seq_len, max_pages_per_seq
        Not needed.
    """
    form, table = ops.qkv_format_name("copy_to_kv_cache", call.kv_format), call.page_table
    new = [t.detach().contiguous() for t in (call.new_k, call.new_v)]
    if form == "sbhd":
        new = [t.transpose(0, 1) for t in new]
    caches = call.k_cache.detach(), call.v_cache.detach()
    counts = _lengths(call.cu_new_lens)
    if call.is_non_paged and table is not None:
        rows = table.reshape(call.b, -1)[:, 0].long()
        for cache in caches:
            cache[: call.b] = cache[rows]
    prepare_device(call.k_cache.device)
    _core.cache_append(
        *(*new, *caches, _lengths(call.cu_cached_lens) - counts),
        counts=counts,
        cu_seqlens=call.cu_new_lens.to(torch.int32) if form == "thd" else None,
        page_table=None if call.is_non_paged else table,
    )


# ---- rotary positions ----------------------------------------------------------------------------


def _natively(function: Callable) -> Callable:
    """Make a function an operator that asks nobody and records no gradients (decorator)."""
    return native(torch.no_grad()(operator(function)))


@_natively
def fused_rope_forward(call: Any) -> Tensor:
    """Rotate the first channels; see `apply_rotary_pos_emb`, whose arguments these are.

    `qkv_format` is an `NVTE_QKV_Format`, or its name. TypeError or ValueError for shapes or
    arguments that do not go together.
    """
    form = ops.qkv_format_name("fused_rope_forward", call.qkv_format)
    given = call.input, call.freqs, form, call.start_positions, call.interleaved
    ranks = {"cp_size": call.cp_size, "cp_rank": call.cp_rank}
    return rope.apply_rotary_pos_emb(*given, cu_seqlens=call.cu_seqlens, **ranks)


@_natively
def fused_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_rope_forward` without start positions."""
    form = ops.qkv_format_name("fused_rope_backward", call.qkv_format)
    given = call.output_grads, call.freqs, call.interleaved, form, call.cu_seqlens
    return rope.rotary_backward(*given, call.cp_size, call.cp_rank)


@_natively
def fused_qkv_rope_forward(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values apart and rotate the first two.

    See `apply_fused_qkv_rotary_pos_emb`; the formats are SBHD and BSHD.
    """
    form = ops.qkv_format_name("fused_qkv_rope_forward", call.qkv_format)
    given = call.qkv_input, call.q_freqs, call.k_freqs, call.qkv_split_arg_list, form
    more = call.start_positions, call.interleaved, None, call.cp_size, call.cp_rank
    return rope.apply_fused_qkv_rotary_pos_emb(*given, *more)


@_natively
def fused_qkv_rope_backward(call: Any) -> Tensor:
    """Gradient of the input of `fused_qkv_rope_forward` without start positions."""
    form = ops.qkv_format_name("fused_qkv_rope_backward", call.qkv_format)
    grads = call.q_grad_out, call.k_grad_out, call.v_grad_out
    sizes = [int(size) for size in call.qkv_split_arg_list]
    given = grads, (call.q_freqs, call.k_freqs), sizes, call.interleaved, form
    return rope.fused_qkv_rotary_backward(*given, call.cp_size, call.cp_rank)
