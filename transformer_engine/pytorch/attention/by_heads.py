# SPDX-License-Identifier: Apache-2.0
"""Backends that take [batch, heads, length, channels] alone, for every format of the callers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.heads import Heads
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.packed import to_packed, to_padded

_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_FROM_HEADS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3)}
"""Permutations of a format to [batch, heads, length, channels], and back."""


def by_heads(attend: Callable) -> Callable:
    """A backend from a function of tensors [batch, heads, length, channels].

    Packed sequences become a padded batch, and its output is packed again.
    """

    def run(heads: Heads, qkv_format: str, limits: Limits, *arguments: float) -> Any:
        tensors = heads.split()
        if limits.packed is not None:
            return _run_padded(run, tensors, limits, *arguments)
        query, key, value = (tensor.permute(*_TO_HEADS[qkv_format]) for tensor in tensors)
        out = attend(query, key, value, limits, *arguments)
        out, *top = out if limits.wants_top else (out,)
        if limits.query_lengths is not None:
            out = _spoil(out, limits.fit(query.shape[2], key.shape[2]))
        out = out.permute(*_FROM_HEADS[qkv_format])
        return (out, *top) if top else out

    return run


def _spoil(out: Tensor, fit: Tensor) -> Tensor:
    """Make NaN of what is of sequences that do not fit [batch], and of their gradients likewise."""
    return out * torch.where(fit, 1.0, torch.nan).to(out.dtype)[:, None, None, None]


def _run_padded(
    run: Callable,
    tensors: tuple[Tensor, Tensor, Tensor],
    limits: Limits,
    *arguments: float,
) -> Any:
    """Run a backend that takes no packed sequences."""
    query, key, value = tensors
    (queries, keys), tokens = limits.packed, query.shape[0]
    of_queries, of_keys = queries.rows(tokens), keys.rows(key.shape[0])
    padded = to_padded(query, of_queries), to_padded(key, of_keys), to_padded(value, of_keys)
    lengths = {"query_lengths": queries.ends(), "key_lengths": keys.ends()}
    out = run(Heads(padded), "bshd", limits.but(packed=None, **lengths), *arguments)
    out, *top = out if limits.wants_top else (out,)
    fit = queries.fit(tokens) & keys.fit(key.shape[0])
    out = to_packed(_spoil(out, fit), of_queries, tokens)
    return (out, *top) if top else out
