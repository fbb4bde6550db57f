# SPDX-License-Identifier: Apache-2.0
"""Keys and values of tokens, into the pages of a cache and out of them, bits as they are.

Places that can not be are known on the device alone, as on a GPU: of tokens that have no room the
last one that has becomes NaN, pages that there are not are passed over, and read as zeros.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NAN_BYTE = 0xFF  # a number of any dtype whose bits are all set is NaN


class _Places(NamedTuple):
    """Where tokens lie in the pages; `known`: there is such a page."""

    page: Tensor
    place: Tensor
    known: Tensor


def _places_of(fields: Mapping[str, Any], sequence: Tensor, position: Tensor) -> _Places:
    """Places of positions >= 0 of sequences; there are pages, and tokens in them."""
    pages, size = fields["key_cache"].shape[:2]
    table, page = fields["page_table"], sequence
    entry = torch.div(position, size, rounding_mode="floor")
    if table is None:
        known = entry < 1
    else:
        known = entry < table.shape[1]
        page = table[sequence, entry.clamp(max=table.shape[1] - 1)].long()
    known = known & (page >= 0) & (page < pages)
    return _Places(torch.where(known, page, 0), position - entry * size, known)


def _room_of(fields: Mapping[str, Any]) -> int:
    """Tokens that the pages of a sequence have room for."""
    table, cache = fields["page_table"], fields["key_cache"]
    return cache.shape[1] * (1 if table is None else table.shape[1]) if cache.shape[0] else 0


def _bytes_of(tensor: Tensor) -> Tensor:
    """[.., channels] as bytes [.., channels, of an element], over the same memory."""
    return tensor.unsqueeze(-1).view(torch.uint8)


# ---- into the pages ------------------------------------------------------------------------------


class _Tokens(NamedTuple):
    """New tokens of sequences, in the order of the tensors' leading dims."""

    sequence: Tensor
    index: Tensor  # among the new ones of the sequence; below 0 before all sequences
    count: Tensor  # of new ones of the sequence


def _tokens_of(fields: Mapping[str, Any]) -> _Tokens:
    key, counts, limits = fields["key"], fields["counts"], fields["cu_seqlens"]
    if limits is None:
        batch, tokens = key.shape[:2]
        sequence = torch.arange(batch, device=key.device)[:, None].expand(batch, tokens)
        index = torch.arange(tokens, device=key.device).expand(batch, tokens)
        count = torch.full_like(sequence, tokens) if counts is None else counts.long()[sequence]
        return _Tokens(sequence, index, count)
    limits = limits.long()
    token = torch.arange(key.shape[0], device=key.device)
    sequence = ((limits[:-1] <= token[:, None]).sum(-1) - 1).clamp(min=0)
    count = limits[sequence + 1] - limits[sequence] if counts is None else counts.long()[sequence]
    return _Tokens(sequence, token - limits[sequence], count)


def cache_append(fields: Mapping[str, Any]) -> None:
    """Run `_core.cache_append`."""
    room = _room_of(fields)
    if not room or not fields["starts"].numel() or not fields["key"].shape[:-2].numel():
        return
    tokens = _tokens_of(fields)
    position = fields["starts"].long()[tokens.sequence] + tokens.index
    wanted = (tokens.index >= 0) & (tokens.index < tokens.count) & (position >= 0)
    # Beyond the end: the one token that has, or is nearest to, the last place spoils it.
    is_long = position - tokens.index + tokens.count > room
    spoils = wanted & is_long & (position >= room - 1)
    wanted = wanted & ~(is_long & (position >= room) & (tokens.index > 0))
    position = torch.where(spoils, room - 1, position).clamp(0, room - 1)
    at = _places_of(fields, tokens.sequence, position)
    for name in ("key", "value"):
        _put(fields[f"{name}_cache"], fields[name], at, wanted & at.known, spoils)


def _put(cache: Tensor, tokens: Tensor, at: _Places, wanted: Tensor, spoils: Tensor) -> None:
    """Write tokens to their places.

    What the bytes there differ by is added to them, and nothing where a token is not wanted: so no
    token needs a place of its own to be written to in vain.
    """
    wanted, spoils = wanted[..., None, None, None], spoils[..., None, None, None]
    kept = _bytes_of(cache)
    where = at.page, at.place
    new = torch.where(spoils, _NAN_BYTE, _bytes_of(tokens))
    kept.index_put_(where, torch.where(wanted, new - kept[where], 0), accumulate=True)


# ---- and out of them -----------------------------------------------------------------------------


def cache_gather(fields: Mapping[str, Any]) -> None:
    """Run `_core.cache_gather`."""
    key, lengths = fields["key"], fields["lengths"]
    batch, tokens = key.shape[:2]
    if not batch or not _room_of(fields):
        key.zero_(), fields["value"].zero_()
        return
    sequence = torch.arange(batch, device=key.device)[:, None].expand(batch, tokens)
    position = torch.arange(tokens, device=key.device).expand(batch, tokens)
    at = _places_of(fields, sequence, position)
    there = ((position < lengths[:, None]) & at.known)[..., None, None]
    for name in ("key", "value"):
        found = fields[f"{name}_cache"][at.page, at.place]
        fields[name].copy_(torch.where(there, found, 0.0))
