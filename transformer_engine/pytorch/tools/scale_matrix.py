# SPDX-License-Identifier: Apache-2.0
"""The scale of each element of a quantized matrix, whatever shares one."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import OperandCast

TILE = 128


def scaling_mode(cast: OperandCast) -> int:
    """``_core.SCALING_*`` of an operand that is cast so."""
    if cast.recipe == _core.RECIPE_BLOCK and cast.options & _core.CAST_TILES_2D:
        return _core.SCALING_BLOCK_2D
    modes = {
        _core.RECIPE_ROW: _core.SCALING_ROW,
        _core.RECIPE_BLOCK: _core.SCALING_BLOCK_1D,
        _core.RECIPE_MXFP8: _core.SCALING_MXFP8,
        _core.RECIPE_NVFP4: _core.SCALING_NVFP4,
    }
    return modes.get(cast.recipe, _core.SCALING_TENSOR)


def element_name(recipe: int, code: int) -> str:
    """Name of the element type of a recipe's data of a dtype."""
    return "e2m1" if recipe == _core.RECIPE_NVFP4 else _core.dtype_names()[code]


ONE_SCALE = (_core.RECIPE_DELAYED, _core.RECIPE_CURRENT)
_MULTIPLIED_OUT = {_core.RECIPE_MXFP8: "mxfp8", _core.RECIPE_NVFP4: "nvfp4"}


def emulation_of(one: OperandCast, other: OperandCast) -> str:
    """Remark on a GEMM that multiplies its operands out: " (emulated mxfp8)"."""
    recipes = {_core.RECIPE_DELAYED if c.recipe in ONE_SCALE else c.recipe for c in (one, other)}
    by_rows = (one.options | other.options) & _core.CAST_ROW_SCALED
    if len(recipes) > 1 or by_rows or _core.RECIPE_EXTERNAL in recipes:
        return " (emulated mixed)"
    name = _MULTIPLIED_OUT.get(recipes.pop())
    return "" if name is None else f" (emulated {name})"


def scale_matrix(
    cast: OperandCast, scales: Any, rows: int, columns: int, amax: Tensor | None = None
) -> Tensor:
    """Factors of the elements of [rows, columns], as a matrix that broadcasts to it.

    Exact under one scale per tensor and where scales are powers of two; else 1 / (1 / scale). Of
    NVFP4 with the amax of the tensor.
    """
    mode = scaling_mode(cast)
    if mode == _core.SCALING_TENSOR:
        return scales[1]
    if mode == _core.SCALING_ROW:
        return scales[0].reciprocal().unsqueeze(1)
    if mode == _core.SCALING_MXFP8:
        found = torch.exp2(127.0 - scales[:rows].float())
        return found.repeat_interleave(32, 1)[:, :columns]
    if mode == _core.SCALING_NVFP4:
        largest = 256.0 if cast.options & _core.CAST_TO_256 else 448.0
        tensor = (6.0 * largest / amax.reshape(-1, 1)).clamp(max=torch.finfo(torch.float32).max)
        found = tensor / scales[:rows].contiguous().view(torch.float8_e4m3fn).float()
        return found.repeat_interleave(16, 1)[:, :columns]
    found = scales.reciprocal()
    if mode == _core.SCALING_BLOCK_1D:
        return found.t()[:rows].repeat_interleave(TILE, 1)[:, :columns]
    lines = found.repeat_interleave(TILE, 0)[:rows]
    return torch.repeat_interleave(lines, TILE, 1)[:, :columns]
