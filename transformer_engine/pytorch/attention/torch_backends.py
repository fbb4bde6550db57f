# SPDX-License-Identifier: Apache-2.0
"""Attention that is no plan: torch's fused one, in steps on our softmax, by a plug-in's class.

The first two take [batch, heads, length, channels] alone; `with_heads_first` lets them take every
format. In steps FP8 is emulated, too.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_engine.pytorch.attention import fp8, masks
from transformer_engine.pytorch.attention.masks import CAUSAL_WINDOW, Limits
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    Heads,
    refuse_export,
    to_packed,
    to_padded,
)
from transformer_engine.pytorch.attention.scores import scaled_softmax, softcap
from transformer_engine.pytorch.execution import overrides
from transformer_engine.pytorch.execution.custom_ops import aligned, with_aligned_gradient
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import autocast_dtype, unseen, without_memory

# ---- formats -------------------------------------------------------------------------------------


_HEADS_FIRST = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_HEADS_BACK = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}
"""Permutations of a format to [batch, heads, length, channels], and back."""


def with_heads_first(attend: Callable) -> Callable:
    """A backend from a function of tensors [batch, heads, length, channels].

    Packed sequences become a padded batch, and its output is packed again.
    """

    def run(heads: Heads, qkv_format: str, limits: Limits, *arguments: float) -> Any:
        tensors = heads.split()
        if limits.packed is not None:
            return _run_padded(run, tensors, limits, *arguments)
        query, key, value = (tensor.permute(*_HEADS_FIRST[qkv_format]) for tensor in tensors)
        out = attend(query, key, value, limits, *arguments)
        out, *largest = out if limits.max_logit else (out,)
        if limits.query_lengths is not None:
            out = _nan_unless(out, limits.valid_sequences(query.shape[2], key.shape[2]))
        out = out.permute(*_HEADS_BACK[qkv_format])
        return (out, *largest) if largest else out

    return run


def _nan_unless(out: Tensor, valid: Tensor) -> Tensor:
    """Make NaN of the outputs of sequences that are not `valid` [batch], and of their gradients."""
    return out * torch.where(valid, 1.0, torch.nan).to(out.dtype)[:, None, None, None]


def _run_padded(
    run: Callable, tensors: tuple[Tensor, Tensor, Tensor], limits: Limits, *arguments: float
) -> Any:
    """Run a backend that takes no packed sequences over a padded batch; tokens of none get 0."""
    query, key, value = tensors
    (queries, keys), tokens = limits.packed, query.shape[0]
    of_queries, of_keys = queries.token_rows(tokens), keys.token_rows(key.shape[0])
    padded = [
        to_padded(tensor, rows)
        for tensor, rows in ((query, of_queries), (key, of_keys), (value, of_keys))
    ]
    lengths = {"query_lengths": queries.token_counts(), "key_lengths": keys.token_counts()}
    out = run(Heads(tuple(padded)), "bshd", limits.replaced(packed=None, **lengths), *arguments)
    out, *largest = out if limits.max_logit else (out,)
    out = _nan_unless(out, queries.valid(tokens) & keys.valid(key.shape[0]))
    packed = to_packed(out, of_queries, tokens)
    return (packed, *largest) if largest else packed


# ---- torch's fused attention ---------------------------------------------------------------------


@with_heads_first
def attend_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Tensor:
    """softmax(scale * query x key^T) x value; torch chooses among its kernels at each call.

    Arguments as of `attend_in_steps`; the limits say nothing but, where the window is causal,
    that a query sees keys up to its own position, counted from the start of both. Torch's
    generator draws the dropout.
    """
    causal, grouped = limits.window == CAUSAL_WINDOW, query.shape[1] != key.shape[1]
    # cuDNN refuses to drop everything, and makes nothing of a batch of none.
    plain = dropout == 1.0 or query.numel() == 0 or key.numel() == 0
    with sdpa_kernel(SDPBackend.MATH) if plain else contextlib.nullcontext():
        tensors = aligned(query), aligned(key), aligned(value)
        out = torch.nn.functional.scaled_dot_product_attention(
            *tensors, None, dropout, causal, scale=scale, enable_gqa=grouped
        )
    return with_aligned_gradient(out)


# ---- by a class that a plug-in gives for `get_flash_attention_class` -----------------------------


def _module_of(core: Any) -> torch.nn.Module:
    """The module of the class in force that belongs to a `DotProductAttention`."""
    kind = overrides.attention_class()
    if kind is None:
        raise RuntimeError(
            "DotProductAttention: this graph was compiled for the attention class of a plug-in, "
            "which the policy no longer selects: call torch.compiler.reset() after such a change"
        )
    made, key = core.__dict__.setdefault("_plugin_modules", {}), (kind, masks.deterministic())
    if key not in made:
        made[key] = kind(
            core.softmax_scale, attention_dropout=core.attention_dropout,
            attention_type=core.attention_type, layer_number=core.layer_number,
            deterministic=key[1],
        )  # fmt: skip
    found = made[key]
    found.attention_dropout = core.attention_dropout
    return found.train(core.training)


def attend_by_class(core: Any, heads: Heads, options: AttentionOptions, qkv_format: str) -> Tensor:
    """Attend by the class in force: [.., heads, channels], with its own gradients.

    What the class runs of this library asks no plug-in.
    """
    query, key, value = (aligned(tensor) for tensor in heads.split())
    name, window = options.attn_mask_type, options.window_size
    kind = masks.mask_type(core.attn_mask_type if name is None else name)
    if qkv_format == "thd":
        kind = masks.with_padding(kind, "qkv_format='thd'")
    elif not options.has_lengths():
        kind = masks.without_padding(kind)
    biased = options.core_attention_bias_type == "alibi"
    slopes = options.alibi_slopes
    if biased and slopes is None:
        slopes = masks.default_alibi_slopes(query.shape[-2], query.device)
    run = _module_of(core)
    with overrides.natively():
        out = run(
            query, key, value, options.attention_mask, qkv_layout="_".join([qkv_format] * 3),
            cu_seqlens_q=options.cu_seqlens_q, cu_seqlens_kv=options.cu_seqlens_kv,
            max_seqlen_q=options.max_seqlen_q, max_seqlen_kv=options.max_seqlen_kv,
            attn_mask_type=kind.name, window_size=core.window_size if window is None else window,
            alibi_slopes=slopes if biased else None,
        )  # fmt: skip
    return with_aligned_gradient(out).reshape(*query.shape[:-1], value.shape[-1])


# ---- in steps ------------------------------------------------------------------------------------


@with_heads_first
def attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float, dropout: float
) -> Any:
    """Softmax(scale * query key^T + bias) value, with dropout of the probabilities.

    Heads that share keys and values are folded into the queries of one product, so keys and values
    are not repeated. The product is scaled before it is rounded: fp16 scores do not overflow for
    being unscaled. Shapes: query [batch, heads, queries, channels], key [batch, groups, keys,
    channels], value [batch, groups, keys, channels of values]; the output [batch, heads, queries,
    channels of values] is contiguous. A `softcap` of the limits, then a `score_mod`, change the
    scaled scores before bias and mask; they are in fp32 then, and so is the product. Where the
    limits want them, the largest scores [heads] fp32 follow, without a gradient.
    """
    batch, heads, queries, channels = query.shape
    groups, keys = key.shape[1], key.shape[2]
    limits = limits.as_mask_and_bias(queries, keys)
    diagonal = keys - queries if limits.bottom_right else 0
    folded = heads // groups * queries
    factors = (
        query.reshape(batch * groups, folded, channels),
        key.reshape(batch * groups, keys, channels).transpose(1, 2),
    )
    if limits.score_mod is None and limits.softcap == 0.0:
        scores = _product(*factors, scale).view(batch, heads, queries, keys)
    else:
        device = query.device.type
        rounds = autocast_dtype(device) is not None  # it would round what is multiplied
        with torch.autocast(device, enabled=False) if rounds else contextlib.nullcontext():
            scores = _product(*(factor.float() for factor in factors), scale)
        scores, limits = _modified(scores.view(batch, heads, queries, keys), limits)
    probabilities = scaled_softmax(
        scores, limits.mask, limits.bias, sink=limits.sink, dropout=dropout, window=limits.window,
        diagonal=diagonal,
    )  # fmt: skip
    if limits.round_weights is not None:
        probabilities = limits.round_weights(probabilities)
    values = value.reshape(batch * groups, keys, value.shape[3])
    weights = probabilities.to(value.dtype).view(batch * groups, folded, keys)
    out = torch.bmm(weights, values)
    out = out.view(batch, heads, queries, value.shape[3])
    return (out, _largest(scores.detach(), limits, diagonal)) if limits.max_logit else out


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    nothing = a.new_empty(1)  # times 0: not read
    return torch.baddbmm(nothing, a, b, beta=0, alpha=scale)


def _modified(scores: Tensor, limits: Limits) -> tuple[Tensor, Limits]:
    """Scores [batch, heads, queries, keys] fp32 as the limits change them, and what these still do.

    A bias that is added before the scale is a part of what is capped.
    """
    if limits.softcap > 0.0:
        if limits.bias_in_cap:
            scores, limits = scores + limits.bias, limits.replaced(bias=None)
        scores = softcap(scores, limits.softcap)
    if limits.score_mod is not None:
        scores = limits.score_mod(scores)
    return scores, limits


def _largest(scores: Tensor, limits: Limits, diagonal: int) -> Tensor:
    """The largest score of each head [heads] fp32; -Inf where none may be attended."""
    wide = scores.float()
    if limits.bias is not None:
        wide = wide + limits.bias.detach()
    start = torch.full((1, 1, 1, 1), diagonal, device=scores.device)
    for mask in (limits.mask, masks.window_mask(limits.window, start, *scores.shape[2:])):
        if mask is not None:
            wide = wide.masked_fill(mask, -torch.inf)
    if wide.numel() == 0:
        return wide.new_full(wide.shape[1:2], -torch.inf)
    return wide.amax((0, 2, 3))


# ---- in steps, FP8 emulated ----------------------------------------------------------------------


# What FP8 would round is rounded, and multiplied in high precision, so for every mask, bias and
# softmax, on every device. Queries, keys, values, weights and output are cast and read again, with
# the scales and slots of state that attention in FP8 has (`fp8.py`). The backward is in high
# precision, of what was read: casts pass gradients through.


_HEADS, _OUTPUT, _WEIGHTS = 2, 3, 8
"""Slots of the forward's state, as of ``csrc/layer/heads_fp8.c``."""
_E4M3 = torch.float8_e4m3fn
_MAX = 448.0  # of it


class _StraightThrough(torch.autograd.Function):
    """A cast and its reading, with the gradient passed through."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, quantizer: Any, note: Callable | None) -> Tensor:
        del ctx
        cast = quantizer(source.contiguous())
        if note is not None:
            note(cast._scale_inv)
        return cast.dequantize(dtype=source.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None, None


class _Casts:
    """The casts of one call."""

    def __init__(self, recipe: Any, state: tuple, device: torch.device, dropout: float) -> None:
        self._recipe, self._device, self._room = recipe, device, 1.0 - dropout
        self._slots, self._scales, _ = state
        # Few ask for it, and what it loads.
        from transformer_engine.pytorch import tensor

        self._by_scale, self._by_amax = tensor.Float8Quantizer, tensor.Float8CurrentScalingQuantizer
        self._of_values: Tensor | None = None  # their 1 / scale

    def _scale(self, value: Tensor | float, slot: int) -> Any:
        """A cast with a scale; a slot of the state, where there is one, records its amax."""
        like = {"dtype": torch.float32, "device": self._device}
        scale = torch.as_tensor(value, **like).reshape(1)
        with unseen():  # a repetition records no amax
            amax = torch.zeros_like(scale)
            if self._slots is not None and self._scales is None:
                at = self._slots.forward_slot + slot
                amax = self._slots.forward_history[0, at : at + 1]
        return self._by_scale(scale, amax, _E4M3, columnwise=False)

    def _delayed(self, slot: int) -> Any:
        """A cast with a scale of the state, or that of a call that is repeated."""
        scales, first = self._scales, 0
        if scales is None:
            scales, first = self._slots.forward_scale, self._slots.forward_slot
        with unseen():
            scale = scales[first + slot].clone()
        return self._scale(scale, slot)

    def heads(self, tensor: Tensor) -> Tensor:
        """Queries, keys, values, or several of them; what comes last has the values."""
        if self._recipe.delayed():
            quantizer: Any = self._delayed(_HEADS)
        else:
            how = self._recipe.fp8_quant_fwd_inp
            quantizer = self._by_amax(
                _E4M3, columnwise=False, force_pow_2_scales=how.power_2_scale,
                amax_epsilon=how.amax_epsilon,
            )  # fmt: skip
        return _StraightThrough.apply(tensor, quantizer, self._note)

    def _note(self, scale_inv: Tensor) -> None:
        self._of_values = scale_inv

    def weights(self, tensor: Tensor) -> Tensor:
        """Weights of softmax with their dropout, which are at most 1 / (1 - p)."""
        if self._room == 0.0:  # all are dropped
            return tensor
        return _StraightThrough.apply(tensor, self._scale(_MAX * self._room, _WEIGHTS), None)

    def output(self, tensor: Tensor) -> Tensor:
        """The output; no mean of values exceeds them, but by dropout."""
        if self._recipe.delayed():
            return _StraightThrough.apply(tensor, self._delayed(_OUTPUT), None)
        if self._room == 0.0:
            return tensor
        return _StraightThrough.apply(
            tensor, self._scale(self._room / self._of_values, _OUTPUT), None
        )


def attend_emulated(
    module: Any, heads: Heads, qkv_format: str, limits: Limits, scale: float, dropout: float
) -> Any:
    """Attend; arguments as of `attend_in_steps`, of a `DotProductAttention`.

    Its casts keep their state outside of graphs, and so it runs. NotImplementedError in
    `torch.export`.
    """
    if torch.compiler.is_compiling():
        refuse_export("FP8 attention that is emulated (TE_UNFUSED_DPA_EMULATE_FP8)")
        return _attend_outside(module, heads, qkv_format, limits, scale, dropout)
    region, heads = fp8.region_of(module, False), heads.in_autocast()
    like = heads.tensors[0]
    if without_memory(like):
        return attend_in_steps(heads, qkv_format, limits, scale, dropout)
    module._quantization_of(region.recipe, False)  # what programs read of it
    state = fp8.scaling_state_of(module, region, like)
    casts = _Casts(region.recipe, state, like.device, dropout)
    given = heads._replace(tensors=tuple(map(casts.heads, heads.tensors)))
    out = attend_in_steps(
        given, qkv_format, limits.replaced(round_weights=casts.weights), scale, dropout
    )
    out, *largest = out if limits.max_logit else (out,)
    out = casts.output(out)
    if region.record:
        module._record(region, state[0] if region.replay is None else None, False)
    return (out, *largest) if largest else out


_attend_outside = Outside(attend_emulated)
