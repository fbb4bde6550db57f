# SPDX-License-Identifier: Apache-2.0
"""The scale of each element of a quantized matrix, whatever shares one."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core

TILE = 128


def scaling_mode(recipe: int, tiles_2d: int, role: int) -> int:
    """``_core.SCALING_*`` of an operand under ``_core.RECIPE_*``."""
    if recipe == _core.RECIPE_ROW:
        return _core.SCALING_ROW
    if recipe == _core.RECIPE_BLOCK:
        return _core.SCALING_BLOCK_2D if tiles_2d >> role & 1 else _core.SCALING_BLOCK_1D
    micro = {_core.RECIPE_MXFP8: _core.SCALING_MXFP8, _core.RECIPE_NVFP4: _core.SCALING_NVFP4}
    return micro.get(recipe, _core.SCALING_TENSOR)


def element_name(recipe: int, code: int) -> str:
    """Name of the element type of a recipe's data of a dtype."""
    return "e2m1" if recipe == _core.RECIPE_NVFP4 else _core.dtype_names()[code]


def emulation_of(recipe: int) -> str:
    """What is said of GEMMs of a recipe that multiply their operands out: " (emulated mxfp8)"."""
    names = {_core.RECIPE_MXFP8: "mxfp8", _core.RECIPE_NVFP4: "nvfp4"}
    return f" (emulated {names[recipe]})" if recipe in names else ""


def scales_shape(mode: int, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of quantized data [rows, columns]."""
    tiles = -(-columns // TILE)
    return {
        _core.SCALING_MXFP8: (-(-rows // 128) * 128, -(-columns // 128) * 4),
        _core.SCALING_NVFP4: (-(-rows // 128) * 128, -(-columns // 64) * 4),
        _core.SCALING_TENSOR: (2,),
        _core.SCALING_ROW: (2, rows),
        _core.SCALING_BLOCK_1D: (tiles, -(-rows // 4) * 4),
        _core.SCALING_BLOCK_2D: (-(-rows // TILE), -(-tiles // 4) * 4),
    }[mode]


def scale_matrix(
    mode: int, scales: Any, rows: int, columns: int, amax: Tensor | None = None
) -> Tensor:
    """What elements of [rows, columns] were multiplied with, as a matrix that broadcasts to it.

    Exact under one scale per tensor and where scales are powers of two; else 1 / (1 / scale). Of
    NVFP4 with the amax of the tensor.
    """
    if mode == _core.SCALING_TENSOR:
        return scales[1]
    if mode == _core.SCALING_ROW:
        return scales[0].reciprocal().unsqueeze(1)
    if mode == _core.SCALING_MXFP8:
        found = torch.exp2(127.0 - scales[:rows].float())
        return found.repeat_interleave(32, 1)[:, :columns]
    if mode == _core.SCALING_NVFP4:
        tensor = (6.0 * 448.0 / amax).clamp(max=torch.finfo(torch.float32).max)
        found = tensor / scales[:rows].contiguous().view(torch.float8_e4m3fn).float()
        return found.repeat_interleave(16, 1)[:, :columns]
    found = scales.reciprocal()
    if mode == _core.SCALING_BLOCK_1D:
        return found.t()[:rows].repeat_interleave(TILE, 1)[:, :columns]
    lines = found.repeat_interleave(TILE, 0)[:rows]
    return torch.repeat_interleave(lines, TILE, 1)[:, :columns]
