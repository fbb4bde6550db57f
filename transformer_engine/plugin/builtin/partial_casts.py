# SPDX-License-Identifier: Apache-2.0
"""Casts of a slice of a flat weight that one rank owns, with a scale for each square tile.

Plain torch: an optimizer calls them once for each weight and step.
"""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import checked, torch_dtype


def _tiles(op: str, part: Tensor, h: int, w: int, start_offset: int, block_len: int) -> Tensor:
    """Number of the tile of each element of a slice."""
    if start_offset < 0 or start_offset + part.numel() > h * w:
        raise ValueError(
            f"{op}: start_offset={start_offset} and {part.numel()} elements, of a matrix of "
            f"{h} x {w}"
        )
    at = torch.arange(start_offset, start_offset + part.numel(), device=part.device)
    return at // w // block_len * -(-w // block_len) + at % w // block_len


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Write the largest magnitudes of a slice, by tile.

    Parameters
    ----------
    tensor : Tensor
        Consecutive elements of a matrix [h, w], from element `start_offset` on; a floating dtype.
    amax : Tensor
        fp32 [ceil(h / block_len), ceil(w / block_len)]: written; 0 for tiles without elements here.
    h, w, start_offset, block_len : int
        The matrix, where the slice begins, and the side of a tile.

    Raises
    ------
    ValueError
        A slice that is none of the matrix, or another number of tiles.
    """
    op = "fp8_block_scaling_compute_partial_amax"
    part = checked(op, "tensor", tensor).reshape(-1)
    tiles = _tiles(op, part, h, w, start_offset, block_len)
    count = _count(op, "amax", amax, h, w, block_len)
    found = torch.zeros(count, dtype=torch.float32, device=amax.device)
    found.scatter_reduce_(0, tiles, part.float().abs(), "amax")
    amax.detach().copy_(found.view(amax.shape))


@operator
def fp8_block_scaling_partial_cast(call: Any) -> None:
    """Cast a slice with the scales of its tiles: codes of inp * scale, saturated.

    `out` is uint8 of as many elements as `inp`, `scale` fp32 as `amax` of
    `fp8_block_scaling_compute_partial_amax`, whose other arguments these are; `out_dtype` is the
    FP8 `DType` of the codes.
    """
    op, out, sizes = "fp8_block_scaling_partial_cast", call.out.detach(), (call.h, call.w)
    part = checked(op, "inp", call.inp).reshape(-1)
    dtype = torch_dtype(op, "out_dtype", call.out_dtype)
    if out.numel() != part.numel():
        raise ValueError(f"{op}: out of {out.numel()} elements, inp of {part.numel()}")
    _count(op, "scale", call.scale, *sizes, call.block_len)
    tiles = _tiles(op, part, *sizes, call.start_offset, call.block_len)
    values = part.float() * call.scale.reshape(-1)[tiles]
    largest = torch.finfo(dtype).max
    codes = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    out.view(torch.uint8).copy_(codes.view(out.shape))


def _count(op: str, name: str, by_tile: Tensor, h: int, w: int, block_len: int) -> int:
    expected = -(-h // block_len) * -(-w // block_len)
    if by_tile.numel() != expected:
        raise ValueError(f"{op}: {name} of {by_tile.numel()} elements, expected {expected} tiles")
    return expected
