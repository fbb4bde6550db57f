# SPDX-License-Identifier: Apache-2.0
"""What quantizers and the constructors of quantized tensors are given: checks with one text each.

`label` says whose argument it is. All raise TypeError but where they say more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_flag", "checked_dtype", "checked_shape", "checked_tensor", "positional"]


def checked_tensor(label: str, given: Any) -> Tensor:
    """A tensor, or a storage of quantized data."""
    if not isinstance(given, Tensor) and not hasattr(type(given), "_dequantized"):
        raise TypeError(f"{label}: {type(given).__name__}, expected a tensor")
    return given


def checked_shape(label: str, given: Any) -> tuple[int, ...]:
    """A shape of whole numbers; those that a compiler has symbols for are such, too."""
    try:
        shape = tuple(given)
        wrong = [size for size in shape if not isinstance(size, int | torch.SymInt)]
    except TypeError:
        wrong = [given]
    if wrong:
        raise TypeError(f"{label}: shape: {given!r}, expected a sequence of int")
    return shape


def checked_dtype(label: str, given: Any) -> torch.dtype:
    """A floating dtype, which values in high precision have."""
    if not isinstance(given, torch.dtype) or not given.is_floating_point:
        raise TypeError(f"{label}: {given!r}, expected a floating dtype")
    return given


def check_flag(label: str, flag: Any, device: torch.device) -> None:
    """A `noop_flag`: one element of fp32 on a device; ValueError for another tensor."""
    checked_tensor(f"{label}: noop_flag", flag)
    if (flag.numel(), flag.dtype, flag.device) != (1, torch.float32, device):
        raise ValueError(
            f"{label}: noop_flag: {tuple(flag.shape)}, {flag.dtype}, "
            f"{flag.device}, expected one element, torch.float32, {device}"
        )


def positional(
    label: str, given: tuple, shape: Sequence[int] | None, dtype: torch.dtype
) -> tuple[tuple[int, ...] | None, torch.dtype]:
    """Shape and nominal dtype of a constructor, which may have them as positional arguments."""
    if len(given) > 2:
        raise TypeError(
            f"{label}: {len(given)} positional arguments, expected shape and dtype: name the others"
        )
    if given:
        shape, dtype = (*given, dtype)[:2]
    known = None if shape is None else checked_shape(label, shape)
    return known, checked_dtype(f"{label}: dtype", dtype)
