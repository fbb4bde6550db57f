# SPDX-License-Identifier: Apache-2.0
"""What a query may attend: mask types, windows, the diagonal, masks and biases; a call's limits.

A mask is True where a key is masked out. Where nothing but the diagonal and a window limit the
keys, no tensor is made: the softmax takes three numbers.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import AttentionSwitches, attention_switches
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    Sequences,
    check_cu_seqlens,
    packed_sequences,
)
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

_NAME = "DotProductAttention"


class MaskType(NamedTuple):
    """One kind of mask."""

    name: str
    padding: bool  # sequences end before the longest one does
    causal: bool  # a query attends no key after its diagonal
    bottom_right: bool | None
    """The diagonal ends in the bottom right corner of the scores, not begins in the top left one;
    None: the caller says so."""


MASK_TYPES = {
    kind.name: kind
    for kind in (
        MaskType("no_mask", False, False, None),
        MaskType("padding", True, False, None),
        MaskType("causal", False, True, False),
        MaskType("padding_causal", True, True, False),
        MaskType("causal_bottom_right", False, True, True),
        MaskType("padding_causal_bottom_right", True, True, True),
        MaskType("arbitrary", False, False, None),
    )
}
"""Mask types by name."""

NO_WINDOW = (-1, -1)
"""(left, right) without a limit on either side."""

CAUSAL_WINDOW = (-1, 0)
"""(left, right) of a causal mask without a window."""


def mask_type(name: str, label: str = "attn_mask_type") -> MaskType:
    """Mask type of a name: a key of `MASK_TYPES`, or another spelling of "padding_causal".

    These are "padding,causal", "causal,padding" and "causal_padding", also with "_bottom_right".
    ValueError for others; `label` is the argument in its message.
    """
    kind = MASK_TYPES.get(name)
    if kind is not None:
        return kind
    spelt = str(name).replace(" ", "").replace(",", "_")
    if spelt.startswith("causal") and "_padding" in spelt:
        spelt = "padding_" + spelt.replace("_padding", "")
    kind = MASK_TYPES.get(spelt)
    if kind is None:
        raise ValueError(f"{label}={name!r}, expected one of {', '.join(MASK_TYPES)}")
    return kind


def with_padding(kind: MaskType, label: str) -> MaskType:
    """The mask type of sequences with lengths of their own that attends what a type says.

    "no_mask" counts as "padding", "causal" as "padding_causal", "causal_bottom_right" as
    "padding_causal_bottom_right". ValueError for "arbitrary"; `label` is where the lengths are.
    """
    if kind.padding:
        return kind
    if kind.name == "arbitrary":
        raise ValueError(
            f"attn_mask_type='arbitrary' with {label}: expected 'padding', 'padding_causal' or "
            "'padding_causal_bottom_right': a mask of all scores knows no lengths of sequences"
        )
    return MASK_TYPES["padding" if kind.name == "no_mask" else f"padding_{kind.name}"]


def without_padding(kind: MaskType) -> MaskType:
    """The mask type without padding that attends what a type does in sequences of full length."""
    if not kind.padding:
        return kind
    return MASK_TYPES[kind.name.removeprefix("padding").removeprefix("_") or "no_mask"]


def effective_window(window: Any, kind: MaskType, label: str = "window_size") -> tuple[int, int]:
    """The window (left, right) that applies to a mask type; right is 0 for a causal one.

    They are keys to the left and to the right of the diagonal; -1: no limit on that side.
    ValueError where it is no pair, or none that goes with the mask type; `label` is the argument in
    its message.
    """
    if window is None:
        return CAUSAL_WINDOW if kind.causal else NO_WINDOW
    if (
        not isinstance(window, tuple | list)
        or len(window) != 2
        or not all(hasattr(keys, "__index__") for keys in window)  # a float would be cut
    ):
        raise ValueError(f"{label}={window!r}, expected a pair of ints (left, right)")
    left, right = int(window[0]), int(window[1])
    if kind.causal:
        if (left, right) in (CAUSAL_WINDOW, NO_WINDOW):
            return CAUSAL_WINDOW
        if left >= 0 and right == 0:
            return left, right
        raise ValueError(
            f"{label}={window!r} with mask type {kind.name!r}: expected (-1, 0) or (left, 0)"
        )
    if (left, right) == CAUSAL_WINDOW:
        warnings.warn(
            f"{label}={window!r} with mask type {kind.name!r} counts as (-1, -1): no window",
            stacklevel=6,
        )
        return NO_WINDOW
    if (left, right) == NO_WINDOW or (left >= 0 and right >= 0):
        return left, right
    raise ValueError(
        f"{label}={window!r} with mask type {kind.name!r}: expected (-1, -1), or both at least 0"
    )


def ends_bottom_right(bottom_right: bool | None, kind: MaskType) -> bool:
    """Return whether the diagonal ends in the bottom right corner: by the type, else the caller."""
    if kind.bottom_right is not None:
        return kind.bottom_right
    return True if bottom_right is None else bool(bottom_right)


# ---- masks as tensors ----------------------------------------------------------------------------


def padding_masks(mask: Any, batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """The padding masks of queries [batch, 1, 1, queries] and of keys [batch, 1, 1, keys].

    `mask` is a pair of bool tensors, or one for both: then they are the same object. TypeError or
    ValueError for what are no such masks, and for one where queries and keys differ in number.
    """
    pair = isinstance(mask, tuple | list)
    if pair and len(mask) != 2:
        raise ValueError(f"attention_mask: {len(mask)} masks, expected one or a pair")
    if not pair and queries != keys:
        raise ValueError(
            f"attention_mask: {queries} queries and {keys} keys: padding needs a pair of masks, "
            "of the queries and of the keys"
        )
    labels = ("[0] (of the queries)", "[1] (of the keys)") if pair else ("", "")
    both = mask if pair else (mask, mask)
    for each, length, label in zip(both, (queries, keys), labels, strict=True):
        _check_bool(each, f"attention_mask{label}")
        if tuple(each.shape) != (batch, 1, 1, length):
            raise ValueError(
                f"attention_mask{label}: shape {tuple(each.shape)}, expected [batch, 1, 1, length] "
                f"= [{batch}, 1, 1, {length}] for a padding mask"
            )
    return tuple(both)


def _check_bool(mask: Any, label: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{label}: {found}, expected a torch.bool tensor, True: masked out")


def padded_lengths(
    cumulative: tuple[Tensor | None, Tensor | None], batch: int, queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Lengths of the sequences of queries and of keys, [batch] int32 each; one object for one.

    `cumulative` are [batch + 1] int32 sums of the lengths of the sequences before each; without the
    second, the first counts for both; without the first, all sequences have all queries. ValueError
    for what are no such sums, and for a first one alone where queries and keys differ in number.
    """
    of_queries, of_keys = cumulative
    if of_queries is None:
        second = sequence_lengths(of_keys, batch, "cu_seqlens_kv")
        return torch.full_like(second, queries), second
    first = sequence_lengths(of_queries, batch, "cu_seqlens_q")
    if queries == keys and (of_keys is None or of_keys is of_queries):
        return first, first
    if of_keys is None:
        raise ValueError(
            f"cu_seqlens_kv: None, with {queries} queries and {keys} keys: give the lengths of "
            "the keys"
        )
    return first, sequence_lengths(of_keys, batch, "cu_seqlens_kv")


def sequence_lengths(cumulative: Any, batch: int, label: str) -> Tensor:
    """Lengths [batch] int32 of sums [batch + 1]; TypeError or ValueError for what are no such."""
    check_cu_seqlens(cumulative, batch, label)
    return cumulative[1:] - cumulative[:-1]


def padding_mask(lengths: Tensor, longest: int) -> Tensor:
    """The padding mask [batch, 1, 1, longest] of sequences of these lengths [batch]."""
    return torch.arange(longest, device=lengths.device) >= lengths[:, None, None, None]


def arbitrary_mask(mask: Any, sizes: tuple[int, int, int, int]) -> Tensor:
    """View of a bool mask that can be broadcast to (batch, heads, queries, keys), with 4 dims.

    Raises TypeError or ValueError where it is no such mask.
    """
    _check_bool(mask, "attention_mask of mask type arbitrary")
    dims = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(dims) != 4 or any(n not in (1, m) for n, m in zip(dims, sizes, strict=True)):
        raise ValueError(
            f"attention_mask: shape {tuple(mask.shape)}, expected one that can be broadcast to "
            f"[batch, heads, queries, keys] = {list(sizes)}"
        )
    return mask.view(dims)


def _distance(queries: int, keys: int, diagonal: Any, device: torch.device) -> Tensor:
    """Key minus the diagonal's key, [queries, keys] or with the leading dims of `diagonal`."""
    rows = torch.arange(queries, device=device)[:, None] + diagonal
    return torch.arange(keys, device=device) - rows


def window_mask(
    window: tuple[int, int], diagonal: Tensor, queries: int, keys: int
) -> Tensor | None:
    """Mask [batch, 1, queries, keys] of a window around diagonals that differ by sequence.

    `diagonal` is the key on the diagonal of query 0, [batch, 1, 1, 1]. None where the window has no
    limit on either side.
    """
    left, right = window
    if left < 0 and right < 0:
        return None
    distance = _distance(queries, keys, diagonal, diagonal.device)
    if left < 0:
        return distance > right
    if right < 0:
        return distance < -left
    return (distance > right) | (distance < -left)


# ---- ALiBi and other biases ----------------------------------------------------------------------


def check_real(given: Any, label: str) -> None:
    """Raise a TypeError for what is added to scores, of that name, and is no tensor of numbers."""
    expect_tensor(label, given)
    if given.dtype.is_complex or given.dtype is torch.bool:
        raise TypeError(f"{label}: {given.dtype}, expected real numbers")


def default_alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Slopes [heads] fp32: 2^(-8 k / n), k = 1 .. n, then 2^(-4 (2 k - 1) / n).

    n is the largest power of two of at most as many as there are heads.
    """
    power = 1 << (heads.bit_length() - 1)
    k = torch.arange(1, heads + 1, dtype=torch.float32, device=device)
    exponents = torch.where(k <= power, 8.0 * k, 4.0 * (2.0 * (k - power) - 1.0))
    return torch.exp2(exponents / -power)


def alibi_bias(slopes: Tensor, queries: int, keys: int, diagonal: Any) -> Tensor:
    """-slope * |distance from the diagonal|, [1 or batch, heads, queries, keys] fp32.

    `slopes` are [heads] or [batch, heads]; `diagonal` is the key on the diagonal of query 0, an int
    or, where sequences differ, [batch, 1, 1, 1].
    """
    distance = _distance(queries, keys, diagonal, slopes.device).abs()
    return distance * -slopes.reshape(-1, slopes.shape[-1], 1, 1).to(torch.float32)


# ---- limits of a call ----------------------------------------------------------------------------


class CallKind(NamedTuple):
    """A kind of call: what the choice of a backend depends on."""

    mask_type: MaskType
    """As `mask_type` gives it, but with padding where lengths or a mask of it are there."""
    window: tuple[int, int]  # as `effective_window` gives it
    bottom_right: bool  # as `ends_bottom_right` gives it
    square: bool  # there are as many queries as keys
    bias: str  # one of `backends.BIAS_TYPES`
    grouped: bool  # several heads share keys and values
    dtype: torch.dtype  # of queries, keys and values
    device: str  # type of their device, as of `device.type_name`
    switches: AttentionSwitches  # what the environment allows
    channels: tuple[int, int]  # of a head: of queries and keys, and of values
    capability: int = 0  # of a CUDA device: 90 for 9.0. Tracers compare numbers, not their tuples
    cudnn: int = 0  # version of the library on a CUDA device, 91900 for 9.19.0
    cudnn_lacks: str = ""  # what cuDNN does not make of the mask, the bias or its gradient
    packed: bool = False  # sequences lie one behind the other (thd)
    slopes_grad: bool = False  # those of ALiBi want a gradient
    slopes_apart: bool = False  # each sequence has its own
    softmax: str = "vanilla"  # as `DotProductAttention` has it
    max_logit: bool = False  # the largest scores are returned too
    fp8: bool = False  # the recipe in force runs attention in FP8
    padding_by_mask: bool = False  # who is padding says a mask, not lengths
    one_query: bool = False
    fp8_dropout: bool = False  # in FP8, with dropout
    score_mod: bool = False  # a function of the program changes the scores
    unsupported_fp8: str = ""  # recipe in force that attention does not run by
    plugin: str = ""  # class of a plug-in that is selected
    gaps: bool = False  # between packed sequences
    softcap: bool = False  # the scaled scores are capped


class Limits(NamedTuple):
    """Limits of what a query attends."""

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
    max_logit: bool = False  # the largest score of each head is a second result
    round_weights: Any = None  # rounds the weights of softmax, where FP8 is emulated
    score_mod: Any = None  # changes the scaled scores before bias and mask (`scores.ScoreMod`)
    softcap: float = 0.0  # the scaled scores become softcap tanh(scores / softcap); 0: as they are
    bias_in_cap: bool = False  # the bias is a part of the scores that are capped

    def replaced(self, **changed: Any) -> "Limits":
        """These with other values of some fields.

        Made by the class itself: what ``_replace`` makes torch 2.11 can not make again behind the
        end of a graph.
        """
        values = zip(self._fields, self, strict=True)
        return Limits(*[changed.get(name, value) for name, value in values])

    def as_mask_and_bias(self, queries: int, keys: int) -> "Limits":
        """The same as a mask and a bias, for a backend that reads no lengths and no slopes."""
        return self._without_slopes(queries, keys)._without_lengths(queries, keys)

    def sequence_lengths(self) -> tuple[Tensor, ...]:
        """Lengths of the sequences' queries and keys; () where all of them are full.

        Of packed sequences where they do not follow from the offsets.
        """
        if self.packed is None:
            return () if self.query_lengths is None else (self.query_lengths, self.key_lengths)
        queries, keys = self.packed
        if queries.lengths is None and keys.lengths is None:
            return ()
        same = keys.lengths is queries.lengths
        return (of_queries := queries.token_counts()), of_queries if same else keys.token_counts()

    def valid_sequences(self, queries: int, keys: int) -> Tensor:
        """Return whether the lengths of each sequence are within these, [batch] bool."""
        of_queries, of_keys = self.query_lengths, self.key_lengths
        is_wrong = (of_queries < 0) | (of_queries > queries) | (of_keys < 0) | (of_keys > keys)
        return ~is_wrong

    def _without_slopes(self, queries: int, keys: int, shift: Tensor | None = None) -> "Limits":
        """With a bias in place of slopes; `shift` tells the diagonals of sequences apart."""
        if self.slopes is None:
            return self
        if shift is None and self.query_lengths is not None:
            shift = _corner_shift(self.bottom_right, (self.query_lengths, self.key_lengths))
        diagonal = keys - queries if self.bottom_right else 0
        bias = alibi_bias(self.slopes, queries, keys, diagonal if shift is None else shift)
        return self.replaced(bias=bias, slopes=None)

    def _without_lengths(self, queries: int, keys: int) -> "Limits":
        if self.query_lengths is None:
            return self
        lengths = self.query_lengths, self.key_lengths
        of_queries = of_keys = padding_mask(self.query_lengths, queries)
        if self.key_lengths is not self.query_lengths:
            of_keys = padding_mask(self.key_lengths, keys)
        return self._masked((of_queries, of_keys), _corner_shift(self.bottom_right, lengths))

    def _masked(self, both: tuple[Tensor, Tensor], shift: Tensor | None) -> "Limits":
        """With padding masks, and with none but a mask where a `shift` tells diagonals apart."""
        of_queries, of_keys = both
        mask, window = of_queries.transpose(2, 3) | of_keys, self.window
        if shift is not None:
            outside = window_mask(window, shift, of_queries.shape[3], of_keys.shape[3])
            mask, window = mask if outside is None else mask | outside, NO_WINDOW
        return self.replaced(mask=mask, window=window, query_lengths=None, key_lengths=None)


def _corner_shift(bottom_right: bool, lengths: tuple[Tensor, Tensor]) -> Tensor | None:
    """Keys less queries of each sequence [batch, 1, 1, 1]; None where all have one diagonal."""
    if not bottom_right or lengths[0] is lengths[1]:
        return None
    return (lengths[1] - lengths[0])[:, None, None, None]


def deterministic() -> bool:
    """Return whether gradients must be the same from run to run, bit for bit."""
    return torch.are_deterministic_algorithms_enabled() or not attention_switches().nondeterministic


def _plain_limits(call_kind: CallKind) -> Limits:
    window, corner = call_kind.window, call_kind.bottom_right
    return Limits(None, None, window, corner, max_logit=call_kind.max_logit)


def constant_limits(call_kind: CallKind) -> Limits | None:
    """Limits that all calls of a kind have; None where they depend on tensors."""
    kind = call_kind.mask_type
    if kind.padding or kind.name == "arbitrary" or call_kind.bias != "no_bias":
        return None
    return _plain_limits(call_kind)


def call_limits(
    call_kind: CallKind,
    options: AttentionOptions,
    sizes: tuple,
    scale: float,
    query: Tensor,
    tokens: tuple[int, int] = (0, 0),
) -> Limits:
    """Limits of one call, of `sizes` (batch, heads, queries, keys).

    `scale` is the factor of the scores. A bias is made on the device of `query`. `tokens` are the
    queries and keys of all packed sequences. TypeError or ValueError where a tensor of the options
    is missing, one too many, or none of the kind.
    """
    batch, _, queries, keys = sizes
    kind, corner, shift = call_kind.mask_type, call_kind.bottom_right, None
    limits = _plain_limits(call_kind)
    if options.inference_params is not None:
        now = options.inference_params.lengths
        if call_kind.packed:
            starts = options.inference_params.offsets(keys)
            of_queries = Sequences(now.cu_seqlens_q, now.counts, queries)
            limits = limits.replaced(packed=(of_queries, Sequences(starts, now.totals, keys)))
        else:
            limits = limits.replaced(query_lengths=now.counts, key_lengths=now.totals)
    elif call_kind.packed:
        limits = limits.replaced(packed=packed_sequences(options, sizes, tokens))
    elif kind.name == "arbitrary":
        limits = limits.replaced(mask=arbitrary_mask(options.attention_mask, sizes))
    elif kind.padding and options.attention_mask is not None:
        both = padding_masks(options.attention_mask, batch, queries, keys)
        if corner and both[0] is not both[1]:
            shift = _corner_shift(corner, tuple((~mask[:, 0, 0]).sum(-1) for mask in both))
        limits = limits._masked(both, shift)
    elif kind.padding:
        cumulative = (options.cu_seqlens_q, options.cu_seqlens_kv)
        lengths = padded_lengths(cumulative, batch, queries, keys)
        limits = limits.replaced(query_lengths=lengths[0], key_lengths=lengths[1])
    bias = _bias(call_kind.bias, options, sizes)
    if call_kind.bias == "pre_scale_bias":
        return limits.replaced(bias=bias.float() * scale)
    if call_kind.bias != "alibi":
        return limits if bias is None else limits.replaced(bias=bias)
    slopes = _slopes(options.alibi_slopes, sizes, query)
    return _with_slopes(limits.replaced(slopes=slopes), call_kind, sizes, shift)


def _with_slopes(limits: Limits, call_kind: CallKind, sizes: tuple, shift: Tensor | None) -> Limits:
    """With slopes of ALiBi as they are, or as a bias where the operator does not take them."""
    _, _, queries, keys = sizes
    if shift is not None:  # diagonals that a mask alone tells apart
        return limits._without_slopes(queries, keys, shift)
    if call_kind.device != "cuda" or call_kind.packed:
        return limits
    # cuDNN's kernels count from the top left corner, with one slope of a head.
    from_corner = not limits.bottom_right or (queries == keys and limits.query_lengths is None)
    if from_corner and not call_kind.slopes_apart:
        return limits
    return limits._without_slopes(queries, keys)


def _bias(kind: str, options: AttentionOptions, sizes: tuple) -> Tensor | None:
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
        check_real(bias, f"{_NAME}: core_attention_bias")
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
        return default_alibi_slopes(heads, query.device)
    if tuple(slopes.shape) not in ((heads,), (batch, heads), (1, heads)):
        raise ValueError(
            f"{_NAME}: alibi_slopes: shape {tuple(slopes.shape)}, expected [heads] or "
            f"[batch, heads] of {heads} heads"
        )
    shared = slopes.dim() == 2 and slopes.shape[0] == 1
    return (slopes[0] if shared else slopes).float().contiguous()
