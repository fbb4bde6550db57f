# SPDX-License-Identifier: Apache-2.0
"""Operators of `transformer_engine_torch` around attention, as functions."""

from torch import Tensor

import transformer_engine_torch as tex

__all__ = [
    "QKV_FORMAT_VALUE",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
]

QKV_FORMAT_VALUE = {
    form.name.removeprefix("NVTE_").lower(): int(form) for form in tex.NVTE_QKV_Format
}
"""Numbers of the formats of queries, keys and values, by name."""


def fa_prepare_fwd(qkvi: Tensor) -> Tensor:
    """Queries, keys and values of a projection, each whole; as of the operator."""
    return tex.fa_prepare_fwd(qkvi)


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Gradient of the input of `fa_prepare_fwd`."""
    return tex.fa_prepare_bwd(q, k, v)


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Sequences one after the other as a padded batch; as of the operator."""
    return tex.convert_thd_to_bshd(tensor, cu_seqlens, b, max_seq_len)


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Undo `convert_thd_to_bshd`; there are `t` tokens."""
    return tex.convert_bshd_to_thd(tensor, cu_seqlens, t)


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: int,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Write keys and values of new tokens into caches, in place; as of the operator.

    `qkv_format` is one of `QKV_FORMAT_VALUE`.
    """
    tex.copy_to_kv_cache(
        new_k,
        new_v,
        k_cache,
        v_cache,
        page_table,
        cu_new_lens,
        cu_cached_lens,
        tex.NVTE_QKV_Format(qkv_format),
        b,
        max_ctx_len,
        max_seq_len,
        max_pages_per_seq,
        is_non_paged,
    )
