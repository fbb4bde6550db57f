# SPDX-License-Identifier: Apache-2.0
"""What a call's queries may attend: the rules of its kind, and the tensors that come with it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import AttentionSwitches
from transformer_engine.pytorch.attention.dot_product_attention import masks
from transformer_engine.pytorch.attention.options import AttentionOptions

__all__ = ["Limits", "Situation", "constant_limits", "limits_of"]

_NAME = "DotProductAttention"


class Situation(NamedTuple):
    """A kind of call: what the choice of a backend depends on.

    Attributes
    ----------
    kind, window, bottom_right
        What `masks.mask_type`, `masks.window_of` and `masks.diagonal_of` give.
    square : bool
        There are as many queries as keys.
    bias : str
        One of `backends.BIAS_TYPES`.
    grouped : bool
        Several heads share keys and values.
    dtype : torch.dtype
        Of queries, keys and values.
    switches : AttentionSwitches
        What the environment allows.
    """

    kind: masks.MaskType
    window: tuple[int, int]
    bottom_right: bool
    square: bool
    bias: str
    grouped: bool
    dtype: torch.dtype
    switches: AttentionSwitches


class Limits(NamedTuple):
    """What a query may attend.

    Attributes
    ----------
    mask : Tensor or None
        bool, True: masked out; each dim 1 or that of [batch, heads, queries, keys].
    bias : Tensor or None
        Added to the scaled scores; each dim 1 or that of the scores.
    window : tuple of int
        (left, right) of the diagonal; negative: no limit.
    diagonal : int
        Key on the diagonal of query 0.
    """

    mask: Tensor | None
    bias: Tensor | None
    window: tuple[int, int]
    diagonal: Any


def constant_limits(situation: Situation) -> Limits | None:
    """Limits that all calls of a kind have; None where they depend on tensors or on lengths."""
    kind = situation.kind
    if kind.padding or kind.name == "arbitrary" or situation.bias != "no_bias":
        return None
    if situation.bottom_right and not situation.square and situation.window != masks.NO_WINDOW:
        return None
    return Limits(None, None, situation.window, 0)


def limits_of(
    situation: Situation, options: AttentionOptions, sizes: tuple, scale: float, query: Tensor
) -> Limits:
    """Limits of one call.

    Parameters
    ----------
    situation : Situation
        Its kind.
    options : AttentionOptions
        Its masks, lengths and biases.
    sizes : tuple of int
        (batch, heads, queries, keys).
    scale : float
        Factor of the scores.
    query : Tensor
        On whose device a bias is made.

    Raises
    ------
    TypeError, ValueError
        A tensor is missing, one too many, or none of the kind.
    """
    batch, _, queries, keys = sizes
    kind, window = situation.kind, situation.window
    diagonal: Any = keys - queries if situation.bottom_right else 0
    mask = None
    if kind.name == "arbitrary":
        mask = masks.arbitrary_mask(options.attention_mask, sizes)
    elif kind.padding:
        lengths = (options.cu_seqlens_q, options.cu_seqlens_kv)
        if options.attention_mask is None and lengths[0] is None:
            raise ValueError(f"{_NAME}: mask type {kind.name} needs attention_mask or cu_seqlens_q")
        both = masks.padding_masks(options.attention_mask, lengths, batch, queries, keys)
        mask = both[0].transpose(2, 3) | both[1]
        if situation.bottom_right and both[0] is not both[1]:
            # Each sequence has a diagonal of its own: a mask says what the window leaves.
            diagonal = masks.length_difference(both)
            outside = masks.window_mask(window, diagonal, queries, keys)
            mask = mask if outside is None else mask | outside
            window = masks.NO_WINDOW
    bias = _bias(situation.bias, options, sizes, diagonal, query)
    if situation.bias == "pre_scale_bias":
        bias = bias.float() * scale
    return Limits(mask, bias, window, 0 if isinstance(diagonal, Tensor) else diagonal)


def _bias(
    kind: str, options: AttentionOptions, sizes: tuple, diagonal: Any, query: Tensor
) -> Tensor | None:
    """What is added to the scores, as given or made."""
    bias, slopes = options.core_attention_bias, options.alibi_slopes
    _, heads, queries, keys = sizes
    takes = kind in ("pre_scale_bias", "post_scale_bias")
    if takes != (bias is not None):
        which = "needs core_attention_bias" if takes else "takes no core_attention_bias"
        raise ValueError(f"{_NAME}: core_attention_bias_type={kind!r} {which}")
    if kind != "alibi":
        if slopes is not None:
            raise ValueError(f"{_NAME}: core_attention_bias_type={kind!r} takes no alibi_slopes")
        if takes and (
            bias.dim() != 4
            or any(n not in (1, size) for n, size in zip(bias.shape, sizes, strict=True))
        ):
            raise ValueError(
                f"{_NAME}: core_attention_bias: shape {tuple(bias.shape)}, expected {sizes}, each "
                "dim that or 1"
            )
        return bias
    if slopes is None:
        slopes = masks.default_alibi_slopes(heads, query.device)
    elif slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
        raise ValueError(
            f"{_NAME}: alibi_slopes: shape {tuple(slopes.shape)}, expected [heads] or "
            f"[batch, heads] of {heads} heads"
        )
    return masks.alibi_bias(slopes, queries, keys, diagonal)
