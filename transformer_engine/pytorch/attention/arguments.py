# SPDX-License-Identifier: Apache-2.0
"""Arguments of `DotProductAttention`: what is refused, and descriptions of tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.options import AttentionOptions
from transformer_engine.pytorch.attention.packed import sizes_of
from transformer_engine.pytorch.attention.problem import check_format
from transformer_engine.pytorch.module.operands import DEVICES, DTYPES
from transformer_engine.pytorch.module.parameters import one_of

_NAME = "DotProductAttention"
_SMALLEST_CAP = torch.finfo(torch.float32).tiny
_LARGEST_CAP = torch.finfo(torch.float32).max


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

    def _reshaped(self, shape: Sequence[int]) -> "Described":
        return Described(shape, self.dtype, self.device, self.requires_grad)

    def transpose(self, one: int, other: int) -> "Described":
        """As of a tensor."""
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return self._reshaped(shape)

    def flatten(self, first: int, last: int) -> "Described":
        """As of a tensor, of the dims from the first to the last."""
        shape = self.shape
        return self._reshaped((*shape[:first], shape[first : last + 1].numel(), *shape[last + 1 :]))

    def unbind(self, dim: int) -> tuple["Described", ...]:
        """As of a tensor."""
        shape = list(self.shape)
        count = shape.pop(dim)
        return (self._reshaped(shape),) * count

    def stride(self, dim: int) -> int:
        """As of a dense tensor."""
        return self.shape[dim % self.dim() + 1 :].numel()


_TENSORS = (Tensor, Described)


def check_splits(num_splits: Any) -> None:
    """Raise for what is no number of splits: None, or an integer of at least 0 (ValueError).

    It says how flash-attn's kernels share their work, which changes no result; there are none here.
    """
    if num_splits is None or (isinstance(num_splits, int) and num_splits >= 0):
        return
    raise ValueError(f"{_NAME}: num_splits={num_splits!r}, expected None or an integer from 0 on")


def check_dispatch(dispatch: Any) -> None:
    """Raise for no way to run packed sequences with policies (ValueError), be there some or not."""
    one_of(_NAME, ("auto", "grouped"), thd_attention_policy_dispatch=dispatch)


def check_softcap(softcap: Any) -> float:
    """The bound of the scores as given; ValueError for what is none: 0 switches it off.

    Scores are capped in fp32, which would round a smaller number to 0, and so to no cap.
    """
    is_number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if is_number and (softcap == 0.0 or _SMALLEST_CAP <= softcap <= _LARGEST_CAP):
        return float(softcap)
    raise ValueError(
        f"{_NAME}: softcap={softcap!r}, expected a finite number of at least 0, which is none; "
        f"a cap is a normal number of fp32, {_SMALLEST_CAP:.3g} to {_LARGEST_CAP:.3g}"
    )


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
