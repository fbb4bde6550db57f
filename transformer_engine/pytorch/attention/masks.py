# SPDX-License-Identifier: Apache-2.0
"""What a query may attend: mask types, windows, the diagonal, and masks and biases as tensors.

A mask is True where a key is masked out. Where nothing but the diagonal and a window limit the
keys, no tensor is made: the softmax takes three numbers.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


def padding_form(kind: MaskType, label: str) -> MaskType:
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


def full_form(kind: MaskType) -> MaskType:
    """The mask type without padding that attends what a type does in sequences of full length."""
    if not kind.padding:
        return kind
    return MASK_TYPES[kind.name.removeprefix("padding").removeprefix("_") or "no_mask"]


def window_of(window: Any, kind: MaskType, label: str = "window_size") -> tuple[int, int]:
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
            stacklevel=7,
        )
        return NO_WINDOW
    if (left, right) == NO_WINDOW or (left >= 0 and right >= 0):
        return left, right
    raise ValueError(
        f"{label}={window!r} with mask type {kind.name!r}: expected (-1, -1), or both at least 0"
    )


def diagonal_of(bottom_right: bool | None, kind: MaskType) -> bool:
    """Whether the diagonal ends in the bottom right corner: the type says so, else the caller."""
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


def sequence_lengths(
    cumulative: tuple[Tensor | None, Tensor | None], batch: int, queries: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Lengths of the sequences of queries and of keys, [batch] int32 each; one object for one.

    `cumulative` are [batch + 1] int32 sums of the lengths of the sequences before each; without the
    second, the first counts for both; without the first, all sequences have all queries. ValueError
    for what are no such sums, and for a first one alone where queries and keys differ in number.
    """
    of_queries, of_keys = cumulative
    if of_queries is None:
        second = lengths_of(of_keys, batch, "cu_seqlens_kv")
        return torch.full_like(second, queries), second
    first = lengths_of(of_queries, batch, "cu_seqlens_q")
    if queries == keys and (of_keys is None or of_keys is of_queries):
        return first, first
    if of_keys is None:
        raise ValueError(
            f"cu_seqlens_kv: None, with {queries} queries and {keys} keys: give the lengths of "
            "the keys"
        )
    return first, lengths_of(of_keys, batch, "cu_seqlens_kv")


def check_tensor(cumulative: Any, label: str) -> None:
    """Raise a TypeError for sums of lengths, of that name, that are no tensor.

    What is asked by shapes has descriptions of tensors (`arguments.Described`).
    """
    if not hasattr(cumulative, "dim"):
        raise TypeError(
            f"{label}={cumulative!r}: {type(cumulative).__name__}, expected a torch.int32 tensor "
            "[batch + 1] on the device of the queries"
        )


def lengths_of(cumulative: Any, batch: int, label: str) -> Tensor:
    """Lengths [batch] int32 of sums [batch + 1]; TypeError or ValueError for what are no such."""
    check_tensor(cumulative, label)
    if cumulative.dtype is not torch.int32 or tuple(cumulative.shape) != (batch + 1,):
        raise ValueError(
            f"{label}: {cumulative.dtype} of shape {tuple(cumulative.shape)}, expected torch.int32 "
            f"[batch + 1] = [{batch + 1}]"
        )
    return cumulative[1:] - cumulative[:-1]


def length_mask(lengths: Tensor, longest: int) -> Tensor:
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


def check_numbers(given: Any, label: str) -> None:
    """Raise a TypeError for what is added to scores, of that name, and is no tensor of numbers."""
    if not hasattr(given, "dim"):
        raise TypeError(f"{label}={given!r}: {type(given).__name__}, expected a tensor")
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
