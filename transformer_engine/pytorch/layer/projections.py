# SPDX-License-Identifier: Apache-2.0
"""Where queries, keys and values lie in the projections of a `MultiheadAttention`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Projections(NamedTuple):
    """Layout of the projections: one of all three, or one of queries and one of keys and values."""

    heads: int  # of queries
    groups: int  # heads of keys and values
    k: int  # channels of a head of queries and keys
    v: int  # channels of a head of values
    interleaved: bool
    """A group's queries, key and value lie side by side; else all queries do, then all keys."""
    crossed: bool  # keys and values are a projection of another sequence

    def rows(self) -> dict[str, int]:
        """Outputs of each of them: rows of the weights."""
        return {"query": self.heads * self.k, "key": self.groups * self.k,
                "value": self.groups * self.v}  # fmt: skip

    def slices(self) -> tuple[tuple[int, ...], ...]:
        """The same as slices of a graph (see `attention_graphs.AttentionSpec`)."""
        heads, groups, k, v = self[:4]
        if self.crossed:
            query, before = (heads, k, 0, k), 0
        elif not self.interleaved:
            query, before = (heads, k, 0, k), heads * k
        else:
            each = heads // groups
            before, stride = each * k, (each + 1) * k + v
            query = (heads, k, 0, stride) if each == 1 else (heads, k, 0, stride, each)
            return query, (groups, k, before, stride), (groups, v, before + k, stride)
        if self.interleaved:
            return query, (groups, k, 0, k + v), (groups, v, k, k + v)
        return query, (groups, k, before, k), (groups, v, before + groups * k, v)

    def split(self, query: Tensor, key_value: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values [..., heads, channels] as views of the projections.

        `query` is the projection of the hidden states; `key_value`, that of another sequence, is
        None unless it is `crossed`.
        """
        if key_value is None:
            return self._split(query, self.heads)
        return query.unflatten(-1, (self.heads, self.k)), *self._split(key_value, 0)

    def _split(self, mixed: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Queries (of `heads` heads; 0: there are none), keys and values of one projection.

        One split, so that its backward is one pass that writes the gradient of the projection.
        """
        _, groups, k, v, *_ = self
        each = heads // groups
        lead = mixed.shape[:-1]
        sizes = [each * k, k, v] if heads else [k, v]
        if self.interleaved:
            parts = torch.split_with_sizes(mixed.view(*lead, groups, sum(sizes)), sizes, -1)
            if each <= 1:
                return parts
            return parts[0].reshape(*lead, heads, k), parts[1], parts[2]
        if k == v:
            counts = [heads, groups, groups] if heads else [groups, groups]
            return torch.split_with_sizes(mixed.view(*lead, sum(counts), k), counts, -2)
        parts = torch.split_with_sizes(mixed, [groups * size for size in sizes], -1)
        key, value = parts[-2].view(*lead, groups, k), parts[-1].view(*lead, groups, v)
        return (parts[0].view(*lead, heads, k), key, value) if heads else (key, value)
