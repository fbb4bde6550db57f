# SPDX-License-Identifier: Apache-2.0
"""Arguments of `DotProductAttention`: what is refused, packed tensors, descriptions of tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.parameters import refuse_options

_NAME = "DotProductAttention"

_DEFAULTS = {
    "fp8_output": False,
    "num_splits": 1,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
}
"""Arguments of the forward that are not built, with their defaults."""


class Described:
    """Stands for a tensor of a call that is asked about and not run."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: Any, requires_grad: bool = False
    ) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)
        self.requires_grad = requires_grad

    def dim(self) -> int:
        """Count the dims."""
        return len(self.shape)


def refuse_unbuilt(**given: Any) -> None:
    """Raise for arguments of the forward that are not built (NotImplementedError)."""
    named = {name: (given[name], default) for name, default in _DEFAULTS.items() if name in given}
    if named.get("num_splits") == (None, 1):
        del named["num_splits"]
    refuse_options(_NAME, **named)


def refuse_fp8(recipe: Any) -> None:
    """Raise for a recipe that runs attention in FP8 (NotImplementedError)."""
    for option in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, option, False):
            raise NotImplementedError(f"{_NAME}: {option}=True")


def check_format(qkv_format: str) -> None:
    """Raise for what is no format (ValueError) and for thd (NotImplementedError)."""
    if qkv_format == "thd":
        raise NotImplementedError(f"{_NAME}: qkv_format='thd'")
    if qkv_format not in ("sbhd", "bshd"):
        raise ValueError(f"{_NAME}: qkv_format={qkv_format!r}, expected 'sbhd', 'bshd' or 'thd'")


def unpack(
    separate: tuple, qkv: Tensor | None, kv: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of packed tensors.

    `separate` are query, key and value as they were given; only the query beside `kv`, keys and
    values in one. `qkv` has all three; `dim`, -3 or -2, counts them. ValueError for tensors that
    exclude each other, or a shape or stride that can not be.
    """
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
    parts = packed.unbind(dim)
    return parts if count == 3 else (query, *parts)
