# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of quantizers and of constructors of quantized tensors, one text each.

`label` says whose argument it is. All raise TypeError but where they say more.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.constants import DType, TE_DType
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)


def checked_tensor(label: str, given: Any) -> Tensor:
    """A tensor, or a storage of quantized data."""
    if not hasattr(type(given), "_dequantized"):
        expect_tensor(label, given)
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


def fp8_type(label: str, given: Any, kinds: tuple[DType, ...] = FP8) -> DType:
    """An element type as a `DType`, given as one, as its number or a torch dtype; ValueError."""
    found = TE_DType.get(given) if isinstance(given, torch.dtype | None) else given
    if found not in kinds:
        known = " or ".join(f"DType.{kind.name}" for kind in kinds)
        raise ValueError(f"{label}: {given!r}, expected {known}")
    return DType(found)


def as_bytes(label: str, data: Tensor) -> Tensor:
    """Codes as uint8; TypeError for elements of another size, and for what is no tensor."""
    if checked_tensor(label, data).element_size() != 1:
        raise TypeError(f"{label}: {data.dtype}, expected torch.uint8")
    return data.view(torch.uint8)


def fitted(label: str, given: Tensor | None, expected: tuple[int, ...]) -> Tensor:
    """A tensor of an expected shape; a matrix in the shape of data that have more dims.

    ValueError where it is missing, or has another shape.
    """
    shape = None if given is None else tuple(checked_tensor(label, given).shape)
    if shape == expected:
        return given
    if shape is not None and len(shape) == 2 < len(expected):
        same = shape[0] == expected[0] or shape[-1] == expected[-1]
        if same and given.numel() == math.prod(expected):
            return given.view(expected)
    raise ValueError(f"{label}: shape {shape}, expected {expected}")
