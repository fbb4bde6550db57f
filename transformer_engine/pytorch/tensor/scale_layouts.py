# SPDX-License-Identifier: Apache-2.0
"""The order in which GEMM libraries of Blackwell read the scales of MXFP8 and NVFP4."""

from torch import Tensor

_ROWS, _COLUMNS = 128, 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Put scales, one byte each, into tiles of 128 x 4, tiles in row-major order.

    Scale (i, j) of a tile is byte ``i % 32 * 16 + i // 32 * 4 + j`` of it. Takes and gives a matrix
    of rows along the dim that a GEMM sums over, padded as casts pad it: the row-wise scales, those
    of NVFP4's columns, and the transpose of the column-wise scales of MXFP8. A copy; ValueError
    where a dim is no multiple of 128 or 4.
    """
    rows, columns = _tiles_of(scales)
    tiles = scales.reshape(rows, 4, 32, columns, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape).contiguous()


def unswizzle_scales(scales: Tensor) -> Tensor:
    """Undo `swizzle_scales`."""
    rows, columns = _tiles_of(scales)
    tiles = scales.reshape(rows, columns, 32, 4, _COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape).contiguous()


def _tiles_of(scales: Tensor) -> tuple[int, int]:
    """Tiles below each other and side by side."""
    if scales.dim() != 2 or scales.shape[0] % _ROWS or scales.shape[1] % _COLUMNS:
        raise ValueError(
            f"scales of shape {tuple(scales.shape)}, expected a matrix of multiples of {_ROWS} and "
            f"{_COLUMNS}, as casts make it"
        )
    return scales.shape[0] // _ROWS, scales.shape[1] // _COLUMNS
