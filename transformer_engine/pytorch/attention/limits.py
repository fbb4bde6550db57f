# SPDX-License-Identifier: Apache-2.0
"""What a call's queries may attend: the rules of its kind, and the tensors that come with it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import AttentionSwitches, attention_switches
from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.cache_adapter import cached_sequences
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    Sequences,
    sequences_of,
)

_NAME = "DotProductAttention"


class CallKind(NamedTuple):
    """A kind of call: what the choice of a backend depends on."""

    mask_type: masks.MaskType
    """As `masks.mask_type` gives it, but with padding where lengths or a mask of it are there."""
    window: tuple[int, int]  # as `masks.window_of` gives it
    bottom_right: bool  # as `masks.diagonal_of` gives it
    square: bool  # there are as many queries as keys
    bias: str  # one of `backends.BIAS_TYPES`
    grouped: bool  # several heads share keys and values
    dtype: torch.dtype  # of queries, keys and values
    device: str  # type of their device
    switches: AttentionSwitches  # what the environment allows
    channels: tuple[int, int]  # of a head: of queries and keys, and of values
    capability: int = 0  # of a CUDA device: 90 for 9.0. Tracers compare numbers, not their tuples
    cudnn: int = 0  # version of the library on a CUDA device, 91900 for 9.19.0
    unusual: str = ""  # what is about the mask, the bias or its gradient
    packed: bool = False  # sequences lie one behind the other (thd)
    slopes_grad: bool = False  # those of ALiBi want a gradient
    slopes_apart: bool = False  # each sequence has its own
    softmax: str = "vanilla"  # as `DotProductAttention` has it
    max_logit: bool = False  # the largest scores are returned too
    fp8: bool = False  # the recipe in force runs attention in FP8
    by_mask: bool = False  # who is padding says a mask, not lengths
    one_query: bool = False
    drops: bool = False  # in FP8, with dropout
    score_mod: bool = False  # a function of the program changes the scores
    fp8_unbuilt: str = ""  # recipe in force that attention does not run by
    plugin: str = ""  # class of a plug-in that is selected
    gaps: bool = False  # between packed sequences
    softcap: bool = False  # the scaled scores are capped


class Limits(NamedTuple):
    """What a query may attend."""

    mask: Tensor | None
    """bool, True: masked out; each dim 1 or that of [batch, heads, queries, keys]."""
    bias: Tensor | None  # added to the scaled scores; each dim 1 or that of the scores
    window: tuple[int, int]  # (left, right) of the diagonal; negative: no limit
    bottom_right: bool
    """The diagonal ends in the bottom right corner of the scores of each sequence."""
    query_lengths: Tensor | None = None  # [batch] int32: where the sequences end; both, or neither
    key_lengths: Tensor | None = None  # [batch] int32: where the sequences end; both, or neither
    packed: tuple[Sequences, Sequences] | None = None
    """Queries and keys of packed sequences, which have their lengths there."""
    slopes: Tensor | None = None  # of ALiBi, [heads] or [batch, heads] fp32
    sink: Tensor | None = None  # [heads] fp32: scores without a key
    wants_top: bool = False  # the largest score of each head is a second result
    cast: Any = None  # rounds the weights of softmax, where FP8 is emulated
    score_mod: Any = None  # changes the scaled scores before bias and mask (`scores.ScoreMod`)
    softcap: float = 0.0  # the scaled scores become softcap tanh(scores / softcap); 0: as they are
    bias_in_cap: bool = False  # the bias is a part of the scores that are capped

    def but(self, **changed: Any) -> "Limits":
        """These with other values of some fields.

        Made by the class itself: what ``_replace`` makes torch 2.11 can not make again behind the
        end of a graph.
        """
        values = zip(self._fields, self, strict=True)
        return Limits(*[changed.get(name, value) for name, value in values])

    def as_tensors(self, queries: int, keys: int) -> "Limits":
        """The same as a mask and a bias, for a backend that reads no lengths and no slopes."""
        return self._without_slopes(queries, keys)._without_lengths(queries, keys)

    def ends(self) -> tuple[Tensor, ...]:
        """Lengths of the sequences' queries and keys; () where all of them are full.

        Of packed sequences where they do not follow from the offsets.
        """
        if self.packed is None:
            return () if self.query_lengths is None else (self.query_lengths, self.key_lengths)
        queries, keys = self.packed
        if queries.lengths is None and keys.lengths is None:
            return ()
        same = keys.lengths is queries.lengths
        return (of_queries := queries.ends()), of_queries if same else keys.ends()

    def lengths_fit(self, queries: int, keys: int) -> Tensor:
        """Whether the lengths of each sequence are within these, [batch] bool."""
        of_queries, of_keys = self.query_lengths, self.key_lengths
        is_wrong = (of_queries < 0) | (of_queries > queries) | (of_keys < 0) | (of_keys > keys)
        return ~is_wrong

    def _without_slopes(self, queries: int, keys: int) -> "Limits":
        if self.slopes is None:
            return self
        shift = None
        if self.query_lengths is not None:
            shift = _corner_shift(self.bottom_right, (self.query_lengths, self.key_lengths))
        return self.but(bias=self._sloped(queries, keys, shift), slopes=None)

    def _sloped(self, queries: int, keys: int, shift: Tensor | None) -> Tensor:
        """The bias of the slopes; `shift` tells diagonals apart."""
        diagonal: Any = keys - queries if self.bottom_right else 0
        diagonal = diagonal if shift is None else shift
        return masks.alibi_bias(self.slopes, queries, keys, diagonal)

    def _without_lengths(self, queries: int, keys: int) -> "Limits":
        if self.query_lengths is None:
            return self
        lengths = self.query_lengths, self.key_lengths
        of_queries = masks.length_mask(self.query_lengths, queries)
        if self.key_lengths is self.query_lengths:
            both = of_queries, of_queries
        else:
            both = of_queries, masks.length_mask(self.key_lengths, keys)
        return self._masked(both, _corner_shift(self.bottom_right, lengths))

    def _masked(self, both: tuple[Tensor, Tensor], shift: Tensor | None) -> "Limits":
        """With padding masks, and with none but a mask where a `shift` tells diagonals apart."""
        of_queries, of_keys = both
        mask, window = of_queries.transpose(2, 3) | of_keys, self.window
        if shift is not None:
            outside = masks.window_mask(window, shift, of_queries.shape[3], of_keys.shape[3])
            mask, window = mask if outside is None else mask | outside, masks.NO_WINDOW
        return self.but(mask=mask, window=window, query_lengths=None, key_lengths=None)


def _corner_shift(bottom_right: bool, lengths: tuple[Tensor, Tensor]) -> Tensor | None:
    """Keys less queries of each sequence [batch, 1, 1, 1]; None where all have one diagonal."""
    if not bottom_right or lengths[0] is lengths[1]:
        return None
    return (lengths[1] - lengths[0])[:, None, None, None]


def deterministic() -> bool:
    """Whether gradients must be the same from run to run, bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not attention_switches().nondeterministic


def constant_limits(call_kind: CallKind) -> Limits | None:
    """Limits that all calls of a kind have; None where they depend on tensors."""
    kind = call_kind.mask_type
    if kind.padding or kind.name == "arbitrary" or call_kind.bias != "no_bias":
        return None
    window, corner = call_kind.window, call_kind.bottom_right
    return Limits(None, None, window, corner, wants_top=call_kind.max_logit)


def limits_of(
    call_kind: CallKind,
    options: AttentionOptions,
    sizes: tuple,
    scale: float,
    query: Tensor,
    tokens: tuple[int, int] = (0, 0),
) -> Limits:
    """Limits of one call, of `sizes` (batch, heads, queries, keys).

    `scale` is the factor of the scores. A bias is made on the device of `query`. `tokens` are the
    queries and keys of all packed sequences. TypeError or
    ValueError where a tensor of the options is missing, one too many, or none of the kind.
    """
    batch, _, queries, keys = sizes
    kind, corner, shift = call_kind.mask_type, call_kind.bottom_right, None
    limits = Limits(None, None, call_kind.window, corner, wants_top=call_kind.max_logit)
    if options.inference_params is not None:
        now = options.inference_params.lengths
        if call_kind.packed:
            limits = limits.but(packed=cached_sequences(options.inference_params, sizes))
        else:
            limits = limits.but(query_lengths=now.counts, key_lengths=now.totals)
    elif call_kind.packed:
        limits = limits.but(packed=sequences_of(options, sizes, tokens))
    elif kind.name == "arbitrary":
        limits = limits.but(mask=masks.arbitrary_mask(options.attention_mask, sizes))
    elif kind.padding and options.attention_mask is not None:
        both = masks.padding_masks(options.attention_mask, batch, queries, keys)
        if corner and both[0] is not both[1]:
            shift = _corner_shift(corner, tuple((~mask[:, 0, 0]).sum(-1) for mask in both))
        limits = limits._masked(both, shift)
    elif kind.padding:
        cumulative = (options.cu_seqlens_q, options.cu_seqlens_kv)
        lengths = masks.sequence_lengths(cumulative, batch, queries, keys)
        limits = limits.but(query_lengths=lengths[0], key_lengths=lengths[1])
    bias = _bias(call_kind.bias, options, sizes)
    if call_kind.bias == "pre_scale_bias":
        return limits.but(bias=bias.float() * scale)
    if call_kind.bias != "alibi":
        return limits.but(bias=bias)
    slopes = _slopes(options.alibi_slopes, sizes, query)
    return _with_slopes(limits.but(slopes=slopes), call_kind, sizes, shift)


def _with_slopes(limits: Limits, call_kind: CallKind, sizes: tuple, shift: Tensor | None) -> Limits:
    """With slopes of ALiBi as they are, or as a bias where the operator does not take them."""
    _, _, queries, keys = sizes
    if shift is not None:  # diagonals that a mask alone tells apart
        return limits.but(bias=limits._sloped(queries, keys, shift), slopes=None)
    if call_kind.device == "cpu" or call_kind.packed:
        return limits
    # cuDNN's kernels count from the top left corner, with one slope of a head.
    from_corner = not limits.bottom_right or (queries == keys and limits.query_lengths is None)
    if from_corner and not call_kind.slopes_apart:
        return limits
    return limits._without_slopes(queries, keys)


def _bias(kind: str, options: AttentionOptions, sizes: tuple) -> Tensor | None:
    """What is added to the scores, as given."""
    bias = options.core_attention_bias
    takes = kind in ("pre_scale_bias", "post_scale_bias")
    if takes != (bias is not None):
        which = "needs core_attention_bias" if takes else "takes no core_attention_bias"
        raise ValueError(f"{_NAME}: core_attention_bias_type={kind!r} {which}")
    if kind != "alibi" and options.alibi_slopes is not None:
        raise ValueError(
            f"{_NAME}: core_attention_bias_type={kind!r} takes no alibi_slopes: 'alibi' does"
        )
    if takes:
        masks.check_numbers(bias, f"{_NAME}: core_attention_bias")
    if takes and (
        bias.dim() != 4
        or any(n not in (1, size) for n, size in zip(bias.shape, sizes, strict=True))
    ):
        raise ValueError(
            f"{_NAME}: core_attention_bias: shape {tuple(bias.shape)}, expected {sizes}, each "
            "dim that or 1"
        )
    return bias


def _slopes(slopes: Tensor | None, sizes: tuple, query: Tensor) -> Tensor:
    """The slopes of ALiBi [heads] or [batch, heads] fp32, as given or those by default."""
    batch, heads = sizes[:2]
    if slopes is None:
        return masks.default_alibi_slopes(heads, query.device)
    if tuple(slopes.shape) not in ((heads,), (batch, heads), (1, heads)):
        raise ValueError(
            f"{_NAME}: alibi_slopes: shape {tuple(slopes.shape)}, expected [heads] or "
            f"[batch, heads] of {heads} heads"
        )
    shared = slopes.dim() == 2 and slopes.shape[0] == 1
    return (slopes[0] if shared else slopes).float().contiguous()
