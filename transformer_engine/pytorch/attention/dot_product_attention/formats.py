# SPDX-License-Identifier: Apache-2.0
"""Formats of queries, keys and values: one for all, or keys and values in another one.

A mixed format, "thd_2bshd", names that of the queries and, behind "_2", that of keys and values. A
call in one becomes a call in the format of the queries: keys and values are turned, or what pads
their sequences is a gap between packed ones. `layout_parts` knows the names of layouts in memory.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention.heads import Heads
from transformer_engine.pytorch.attention.options import AttentionOptions

_NAME = "DotProductAttention"

FORMATS = ("sbhd", "bshd", "thd")
MIXED = ("sbhd_2bshd", "bshd_2sbhd", "thd_2bshd", "thd_2sbhd")


def check_format(qkv_format: str, mixed: bool = False) -> None:
    """Raise for what is no format, or none of a module's where `mixed` is not set (ValueError)."""
    if qkv_format in FORMATS or (mixed and qkv_format in MIXED):
        return
    expected = "'sbhd', 'bshd' or 'thd'" + (f", or one of {', '.join(MIXED)}" if mixed else "")
    raise ValueError(f"{_NAME}: qkv_format={qkv_format!r}, expected {expected}")


def keys_as(of_queries: str, of_keys: str, tensor: Any) -> Any:
    """Keys or values of a format, sbhd or bshd, in that of queries.

    A view, but that what becomes packed and is not [b, s, ..] in memory is copied.
    """
    if of_queries == of_keys:
        return tensor
    turned = tensor if (of_queries, of_keys) == ("thd", "bshd") else tensor.transpose(0, 1)
    return turned.flatten(0, 1) if of_queries == "thd" else turned


def in_one_format(
    heads: Heads, options: AttentionOptions, qkv_format: str
) -> tuple[Heads, AttentionOptions, str]:
    """Heads, options and format of a call, with a mixed format as that of its queries.

    ValueError for a mixed format beside what it does not go with.
    """
    if qkv_format not in MIXED:
        return heads, options, qkv_format
    of_queries, of_keys = qkv_format.split("_2")
    if options.inference_params is not None:
        raise ValueError(
            f"{_NAME}: qkv_format={qkv_format!r} with inference_params: new keys have the format "
            f"of the queries, {of_queries!r}"
        )
    if heads.joined == 3:
        raise ValueError(
            f"{_NAME}: qkv_format={qkv_format!r} with qkv_layer, which has one format: give "
            "query_layer and kv_layer"
        )
    query, key, value = heads.split()
    dims = [getattr(tensor, "shape", ()) for tensor in (query, key, value)]
    if [len(shape) for shape in dims] != [3 if of_queries == "thd" else 4, 4, 4]:
        raise ValueError(
            f"{_NAME}: query {tuple(dims[0])}, key {tuple(dims[1])}, value {tuple(dims[2])}: "
            f"expected {qkv_format}"
        )
    if of_queries == "thd":
        batch, length = dims[1][:2] if of_keys == "bshd" else (dims[1][1], dims[1][0])
        options = _with_gaps(options, key, batch, length)
    made = (query, *(keys_as(of_queries, of_keys, tensor) for tensor in (key, value)))
    return Heads(made), options, of_queries


def _with_gaps(options: AttentionOptions, key: Any, batch: int, length: int) -> AttentionOptions:
    """The options of packed queries, to sequences of keys that begin at multiples of a length."""
    sums = options.cu_seqlens_q
    if sums is not None and sums.shape[0] - 1 != batch:
        raise ValueError(
            f"{_NAME}: cu_seqlens_q of {sums.shape[0] - 1} sequences, and keys of {batch}: "
            "expected the same number"
        )
    starts = None
    if isinstance(key, Tensor):
        starts = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * length
    ends = options.cu_seqlens_kv
    if ends is None:
        ends = sums if starts is None else starts  # all of them
    longest = length if options.max_seqlen_kv is None else options.max_seqlen_kv
    return options._replace(cu_seqlens_kv=ends, cu_seqlens_kv_padded=starts, max_seqlen_kv=longest)


# ---- layouts -------------------------------------------------------------------------------------


def _layouts() -> dict[str, tuple[str, str]]:
    """Formats of the queries and of the keys, by the name of a layout."""
    made = {}
    for form in FORMATS:
        lead = form[:-2]
        for name in (
            f"{lead}3hd", f"{lead}h3d", f"{form}_{lead}2hd", f"{form}_{lead}h2d",
            f"{form}_{form}_{form}",
        ):  # fmt: skip
            made[name] = form, form
    for mixed in MIXED:
        of_queries, of_keys = mixed.split("_2")
        made[f"{of_queries}_{of_keys}_{of_keys}"] = of_queries, of_keys
    for of_queries, of_keys in itertools.product(FORMATS, FORMATS[:2]):
        made[f"paged_kv_{of_queries}_{of_keys}_{of_keys}"] = of_queries, of_keys
    return made


LAYOUTS = _layouts()
"""The fifteen of one format (three in one tensor or two, counted before or behind the heads, or
apart), those of mixed formats, and those of a cache in pages."""


def layout_parts(name: str) -> tuple[str, str]:
    """Formats of the queries and of keys and values in a layout; ValueError for no layout."""
    if name not in LAYOUTS:
        raise ValueError(f"qkv_layout={name!r}, expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
