# SPDX-License-Identifier: Apache-2.0
"""Operators of `transformer_engine_torch` around attention, as functions."""

from torch import Tensor

from transformer_engine_torch import (
    NVTE_QKV_Format,
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    copy_to_kv_cache as _copy_to_kv_cache,
    fa_prepare_bwd,
    fa_prepare_fwd,
)

__all__ = [
    "QKV_FORMAT_VALUE",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
]

QKV_FORMAT_VALUE = {form.name.removeprefix("NVTE_").lower(): int(form) for form in NVTE_QKV_Format}
"""Numbers of the formats of queries, keys and values, by name."""


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
    _copy_to_kv_cache(
        new_k, new_v, k_cache, v_cache, page_table, cu_new_lens, cu_cached_lens,
        NVTE_QKV_Format(qkv_format), b, max_ctx_len, max_seq_len, max_pages_per_seq, is_non_paged,
    )  # fmt: skip
