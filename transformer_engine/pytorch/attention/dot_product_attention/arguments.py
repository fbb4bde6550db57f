# SPDX-License-Identifier: Apache-2.0
"""Arguments of `DotProductAttention`: what is refused, and descriptions of tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.dot_product_attention.packed import sizes_of
from transformer_engine.pytorch.attention.options import AttentionOptions
from transformer_engine.pytorch.module.operands import DEVICES, DTYPES
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


_TENSORS = (Tensor, Described)


def refuse_unbuilt(**given: Any) -> None:
    """Raise for arguments of the forward that are not built (NotImplementedError)."""
    named = {name: (given[name], default) for name, default in _DEFAULTS.items() if name in given}
    if named.get("num_splits") == (None, 1):
        del named["num_splits"]
    refuse_options(_NAME, **named)


def check_format(qkv_format: str) -> None:
    """Raise for what is no format (ValueError)."""
    if qkv_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"{_NAME}: qkv_format={qkv_format!r}, expected 'sbhd', 'bshd' or 'thd'")


def check_tensors(
    core: Any, query: Any, key: Any, value: Any, qkv_format: str, options: AttentionOptions
) -> tuple[int, ...]:
    """(batch, heads, queries, keys) of a call of `core`, a `DotProductAttention`.

    TypeError or ValueError for tensors that do not go together.
    """
    if not (
        isinstance(query, _TENSORS) and isinstance(key, _TENSORS) and isinstance(value, _TENSORS)
    ):
        found = tuple(type(t).__name__ for t in (query, key, value))
        raise TypeError(f"{_NAME}: query, key, value are {found}, expected three tensors")
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    check_format(qkv_format)
    packed = qkv_format == "thd"
    s, b = (0, 1) if qkv_format == "sbhd" else (1, 0)
    heads, groups = core.num_attention_heads, core.num_gqa_groups
    k, v = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    fits = len(of_query) == len(of_key) == 4 - packed
    if fits:
        lead = of_key[:-2]
        fits = (
            (of_query[-2], of_query[-1]) == (heads, k)
            and (packed or lead[b] == of_query[b])
            and of_key == (*lead, groups, k)
            and of_value == (*lead, groups, v)
        )
    if not fits:
        raise ValueError(
            f"{_NAME}: query {tuple(of_query)}, key {tuple(of_key)}, value {tuple(of_value)}: "
            f"expected {qkv_format} with {heads} heads of {k}, {groups} of {k} and {groups} of "
            f"{v}, one batch size and one length of keys and values"
        )
    dtype = query.dtype
    if key.dtype is not dtype or value.dtype is not dtype or dtype not in DTYPES:
        raise TypeError(
            f"{_NAME}: query is {dtype}, key {key.dtype}, value {value.dtype}: expected one of "
            "torch.float32, torch.float16 and torch.bfloat16 for all"
        )
    device = query.device
    if device.type not in DEVICES or key.device != device or value.device != device:
        raise ValueError(
            f"{_NAME}: query is on {device}, key on {key.device}, value on {value.device}: "
            "expected the CPU or one CUDA device"
        )
    if packed:
        batch, queries, keys = sizes_of(options, of_query[0], of_key[0])
        return batch, heads, queries, keys
    return of_query[b], heads, of_query[s], of_key[s]
