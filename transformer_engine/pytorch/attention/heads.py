# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values as a caller has them: apart, or several in one tensor."""

from typing import Any, NamedTuple

from torch import Tensor

_NAME = "DotProductAttention"


class Heads(NamedTuple):
    """The tensors that a call is given, and gradients are wanted of.

    They are query, key and value; the query, and keys and values in one; or all three in one.
    """

    tensors: tuple[Tensor, ...]
    dim: int = 0  # -3 or -2: counts what is in one tensor; 0: they are apart

    @property
    def joined(self) -> int:
        """How many of query, key and value one tensor holds: 0, 2 or 3."""
        return 0 if self.dim == 0 else 4 - len(self.tensors)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, as views."""
        if self.dim == 0:
            return self.tensors
        *query, packed = self.tensors
        return (*query, *packed.unbind(self.dim))


def joined_shape(shape: tuple[int, ...], count: int, dim: int) -> list[int]:
    """The shape of a tensor that holds `count` of a shape, counted by its dim -3 or -2."""
    at = len(shape) + 1 + dim
    return [*shape[:at], count, *shape[at:]]


def heads_of(separate: tuple, qkv: Any = None, kv: Any = None, dim: int = -3) -> Heads:
    """What was given of query, key and value (`separate`), and of the packed tensors.

    Only the query goes beside `kv`, keys and values in one. `qkv` has all three; `dim`, -3 or -2,
    counts them. ValueError for tensors that exclude each other, or a shape or stride that can not
    be.
    """
    if qkv is None and kv is None:
        return Heads(separate)
    query, key, value = separate
    packed, count, label = (qkv, 3, "qkv_layer") if qkv is not None else (kv, 2, "kv_layer")
    if key is not None or value is not None or (qkv is not None) == (query is not None):
        raise ValueError(
            f"{_NAME}: {label} stands for separate tensors: give "
            + ("nothing else" if count == 3 else "query_layer beside it, and nothing else")
        )
    if qkv is not None and kv is not None:
        raise ValueError(f"{_NAME}: qkv_layer and kv_layer exclude each other")
    if dim not in (-3, -2):
        raise ValueError(f"{_NAME}: qkv_interleave_dim={dim}, expected -3 or -2")
    if packed.dim() < 4 or packed.shape[dim] != count:
        raise ValueError(
            f"{_NAME}: {label}: shape {tuple(packed.shape)}, expected {count} in dim {dim}"
        )
    if packed.stride(-1) != 1:
        raise ValueError(f"{_NAME}: {label}: last stride {packed.stride(-1)}, expected 1")
    return Heads((packed,) if count == 3 else (query, packed), dim)


def slices_of(heads: Heads) -> tuple:
    """Heads, channels, offset and stride of queries, keys and values (see `layer_graphs`)."""
    slices, at = [], 0
    for i, tensor in enumerate(heads.split()):
        count, channels = tensor.shape[-2:]
        if heads.dim == 0 or i < len(heads.tensors) - 1:
            slices.append((count, channels, 0, channels))
            continue
        if heads.dim == -3:
            slices.append((count, channels, at * count * channels, channels))
        else:
            slices.append((count, channels, at * channels, heads.joined * channels))
        at += 1
    return tuple(slices)
