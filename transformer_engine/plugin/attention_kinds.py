# SPDX-License-Identifier: Apache-2.0
"""Enumerations of attention, and layouts of its tensors.

One place for the operators, for calls of modules that are handed to them, and for their cases.
Formats are "sbhd", "bshd" and "thd", which is packed.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from transformer_engine.plugin.core import ops
from transformer_engine.pytorch.attention.problem import layout_parts


def enumerated(op: str, kind: type, name: str, value: Any) -> Any:
    """An enumerator, given as one or as its number."""
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{op}: {name}={value!r}, expected a {kind.__name__}") from None


@functools.cache
def kinds_of(layout: str, bias: str, mask: str, softmax: str) -> tuple:
    """Layout, type of bias, of mask and of softmax by names: "bshd_bshd_bshd", "no_bias", ...

    Masks are named without "_mask", softmaxes without "_softmax".
    """
    return (
        ops.NVTE_QKV_Layout[f"NVTE_{layout.upper()}"],
        ops.NVTE_Bias_Type[f"NVTE_{bias.upper()}"],
        ops.NVTE_Mask_Type[f"NVTE_{mask.upper()}_MASK"],
        ops.NVTE_Softmax_Type[f"NVTE_{softmax.upper()}_SOFTMAX"],
    )


def formats(op: str, qkv_layout: Any) -> tuple[str, str]:
    """Formats of queries, and of keys and values; NotImplementedError for a cache in pages."""
    try:
        name = qkv_layout if isinstance(qkv_layout, str) else ops.NVTE_QKV_Layout(qkv_layout).name
    except ValueError:
        name = str(qkv_layout)
    found = name.lower().removeprefix("nvte_")
    if found.startswith("paged"):
        raise NotImplementedError(
            f"{op}: qkv_layout={name}: not built yet; te.DotProductAttention with InferenceParams "
            "attends to caches in pages"
        )
    try:
        return layout_parts(found)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def limits(op: str, mask_type: Any, window: Sequence[int]) -> tuple[bool, bool, int, int]:
    """(sequences end where cu_seqlens say, bottom right corner, window to the left, right)."""
    name = enumerated(op, ops.NVTE_Mask_Type, "attn_mask_type", mask_type).name
    left, right = (int(each) for each in (window or (-1, -1)))
    if "CAUSAL" in name:
        right = 0
    return "PADDING" in name, "BOTTOM_RIGHT" in name, left, right


def in_batches(tensor: Tensor, form: str) -> Tensor:
    """[batch, sequence, heads, channels] of a tensor in a format; packed ones [1, tokens, ...]."""
    if form == "thd":
        return tensor.unsqueeze(0)
    return tensor.transpose(0, 1) if form == "sbhd" else tensor


def in_format(tensor: Tensor, form: str) -> Tensor:
    """Undo `in_batches`."""
    return tensor[0] if form == "thd" else in_batches(tensor, form)
