# SPDX-License-Identifier: Apache-2.0
"""Helpers for programs beside attention: lengths of sequences, masks, layouts, windows.

These are the functions that programs of NVIDIA Transformer Engine import from ``utils``. They put
the modules behind `DotProductAttention` under those names, and nothing here calls them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.problem import (
    MIXED,
    check_format,
    layout_parts,
)
from transformer_engine.pytorch.module.parameters import one_of

__all__ = [
    "check_set_window_size",
    "get_cu_seqlens",
    "get_cu_seqlens_and_indices",
    "get_full_cu_seqlens",
    "get_indices",
    "get_padding_mask",
    "get_qkv_format",
    "get_qkv_layout",
    "maybe_contiguous",
]


def maybe_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its last dim has another stride than 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_set_window_size(
    attn_mask_type: str, window_size: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The window (left, right) that attention applies with a mask type.

    (-1, 0) for causal types without one, (-1, -1) for others. ValueError for a window that does not
    go with the type.
    """
    return masks.window_of(window_size, masks.mask_type(attn_mask_type))


# ---- lengths -------------------------------------------------------------------------------------


def _unmasked(mask: Any) -> Tensor:
    """Which tokens a padding mask [batch, 1, 1, length] (True: masked out) leaves, two dims."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(f"mask: {found}, expected torch.bool [batch, 1, 1, length]")
    if tuple(mask.shape[1:3]) != (1, 1):
        raise ValueError(f"mask: shape {tuple(mask.shape)}, expected [batch, 1, 1, length]")
    return ~mask[:, 0, 0]


def _sums(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def get_cu_seqlens(mask: Tensor) -> Tensor:
    """Sums of the lengths [batch + 1] int32 of a padding mask [batch, 1, 1, length] bool.

    True: masked out. ValueError for another mask.
    """
    return _sums(_unmasked(mask).sum(1))


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device) -> Tensor:
    """Sums of the lengths [batch + 1] int32 of sequences that all have `max_seqlen` tokens."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen


def get_cu_seqlens_and_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`get_cu_seqlens`, and which tokens of the padded batch are none of padding.

    The second is [batch * length, 1, 1] int64: positions in the flattened batch, in order, and
    behind them batch * length in place of each token of padding, so that its size says nothing of
    the lengths.
    """
    unmasked = _unmasked(mask)
    return get_cu_seqlens(mask), _positions(unmasked)


def get_indices(max_seqlen: int, cu_seqlens: Tensor) -> Tensor:
    """The second result of `get_cu_seqlens_and_indices`, of sums of lengths [batch + 1]."""
    row = torch.arange(max_seqlen, device=cu_seqlens.device)
    return _positions(row < cu_seqlens.diff()[:, None])


def _positions(unmasked: Tensor) -> Tensor:
    count = unmasked.numel()
    positions = torch.arange(count, device=unmasked.device)
    found = torch.where(unmasked.flatten(), positions, count)
    return found.sort().values[:, None, None]


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attention_type: str = "self",
) -> Any:
    """The padding mask [batch, 1, 1, length] bool (True: masked out) of sums of lengths.

    For `attention_type` "cross" a pair, of queries and of keys; for "self" that of the queries. A
    length that is not given is that of the longest sequence, for which the host waits. TypeError
    for sums that are missing, ValueError for those of another shape or dtype than [batch + 1]
    int32, and for sizes that are none.
    """
    name = "get_padding_mask"
    one_of(name, ("self", "cross"), attention_type=attention_type)
    sizes = {"batch_size": batch_size, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    for label, size in sizes.items():
        optional = size is None and label != "batch_size"
        if not optional and (not hasattr(size, "__index__") or size < 0):
            raise ValueError(f"{name}: {label}={size!r}, expected a number from 0")
    of_queries = _length_mask(cu_seqlens_q, batch_size, max_seqlen_q, "cu_seqlens_q")
    if attention_type == "self":
        return of_queries
    return of_queries, _length_mask(cu_seqlens_kv, batch_size, max_seqlen_kv, "cu_seqlens_kv")


def _length_mask(sums: Any, batch: int, longest: int | None, label: str) -> Tensor:
    lengths = masks.lengths_of(sums, batch, label)
    if longest is None:
        longest = int(lengths.max()) if batch > 0 else 0
    return masks.length_mask(lengths, longest)


# ---- layouts -------------------------------------------------------------------------------------


def get_qkv_format(
    qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None
) -> tuple[str, str, str]:
    """Formats of a layout: as a call says it, of the queries, and of keys and values.

    With `inference_params` keys and values are those of its cache.
    """
    from_cache = "paged_kv_" if getattr(inference_params, "is_paged", False) else ""
    prefix = from_cache if not qkv_layout.startswith("paged_kv_") else ""
    of_queries, of_keys = layout_parts(prefix + qkv_layout)
    both = of_queries if of_queries == of_keys else f"{of_queries}_2{of_keys}"
    return both, of_queries, of_keys


def get_qkv_layout(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str = "sbhd", inference_params: Any = None
) -> tuple[str, Tensor, Tensor, Tensor, str, str]:
    """How queries, keys and values lie in memory.

    Parameters
    ----------
    q, k, v : Tensor
        [s, b, heads, channels] (sbhd), [b, s, heads, channels] (bshd) or [t, heads, channels]
        (thd).
    qkv_format : str, default "sbhd"
        One of these, or a mixed one as "thd_2bshd".
    inference_params : InferenceParams, optional
        Its cache has the keys and values.

    Returns
    -------
    tuple
        (layout, q, k, v, format of the queries, format of keys and values). Layouts are those of
        `AttentionParams`: "sb3hd" or "sbh3d" where the three are views of one tensor that counts
        them before or behind its heads, "sbhd_sb2hd" or "sbhd_sbh2d" where keys and values are,
        else "sbhd_sbhd_sbhd". Tensors whose channels are apart are copied.

    Raises
    ------
    ValueError
        A format that there is not.
    """
    check_format(qkv_format, mixed=True)
    q, k, v = map(maybe_contiguous, (q, k, v))
    if qkv_format in MIXED:
        of_queries, of_keys = qkv_format.split("_2")
        layout = f"{of_queries}_{of_keys}_{of_keys}"
    else:
        of_queries = of_keys = qkv_format
        lead = qkv_format[:-2]
        layout = "_".join([qkv_format] * 3)
        three, two = _joined((q, k, v)), _joined((k, v))
        if three:
            layout = lead + three
        elif two:
            layout = f"{qkv_format}_{lead}{two}"
    if getattr(inference_params, "is_paged", False):
        layout = f"paged_kv_{of_queries}_{of_keys}_{of_keys}"
    return layout, q, k, v, of_queries, of_keys


def _joined(parts: Sequence[Tensor]) -> str:
    """How parts lie in one tensor, "3hd" or "h3d" (or with 2); "" where they are no such views."""
    first, count = parts[0], len(parts)
    heads, channels = first.shape[-2:]
    if any(
        part.shape != first.shape
        or part.dtype is not first.dtype
        or part.stride() != first.stride()
        or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        for part in parts
    ):
        return ""
    outer = heads * channels * count  # elements of a token
    sizes = [*first.shape[:-2], 1]
    leading = [outer * torch.Size(sizes[i + 1 :]).numel() for i in range(len(sizes) - 1)]
    if list(first.stride()[:-2]) != leading:
        return ""
    offsets = [part.storage_offset() for part in parts]
    steps = {after - before for before, after in itertools.pairwise(offsets)}
    for name, step, between in (
        (f"{count}hd", heads * channels, channels),
        (f"h{count}d", channels, count * channels),
    ):
        if steps == {step} and first.stride(-2) == between:
            return name
    return ""
