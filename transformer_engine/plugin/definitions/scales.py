# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 with a scale for a tensor, for each row, or for each tile of 128 elements; and back.

A cast gets fp32 values [rows, columns] and the fields of a call, and returns by name of a field
what belongs there: codes in the place of FP8, and scales. What lies behind them is padding, which
is 0. The arithmetic is that of `csrc/core/scaling_math.h`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.definitions.codes import (
    LARGEST_F32,
    decode,
    encode,
    largest_of,
    limited,
    magnitudes,
    quotient,
    reciprocal,
)

_TILES = {_core.SCALING_BLOCK_1D: (1, 128), _core.SCALING_BLOCK_2D: (128, 128)}
"""Rows and columns of a form that share a scale, by mode."""
_EXPONENT = -(1 << 23)  # mask of the sign and the exponent


def dtype_of(fields: Mapping[str, Any], prefix: str = "") -> torch.dtype:
    """The dtype of the quantized forms; fp32 where there are none."""
    forms = (fields[f"{prefix}{form}"] for form in ("row", "column"))
    return next((form.dtype for form in forms if form is not None), torch.float32)


def largest(values: Tensor) -> Tensor:
    """The largest magnitude of a tensor, [1] fp32: NaN is none, 0 of nothing."""
    if not values.numel():
        return torch.zeros(1, dtype=values.dtype, device=values.device)
    return magnitudes(values).amax().reshape(1)


def largest_partial(partials: Tensor) -> Tensor:
    """The largest magnitude that partial maxima stand for, [1] fp32."""
    return torch.where(partials > 0.0, partials, 0.0).amax().reshape(1)


def padded(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A matrix with zeros behind its rows and columns."""
    rows, columns = (more - there for more, there in zip(shape, values.shape, strict=True))
    return torch.nn.functional.pad(values, (0, columns, 0, rows)) if rows or columns else values


def round_up(size: int, to: int) -> int:
    """The next multiple."""
    return -(-size // to) * to


# ---- scales --------------------------------------------------------------------------------------


def scale_of_amax(
    amax: Tensor,
    target: float,
    epsilon: float = 0.0,
    power_2: bool = False,
    top: float = LARGEST_F32,
) -> Tensor:
    """`target`, the largest of a dtype, / amax, at least `epsilon`; 1 where that is 0 or Inf.

    An infinite quotient becomes `top`; with `power_2` it is rounded down to a power of two.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    scale = quotient(torch.full_like(amax, target), amax)
    scale = torch.where(scale.isfinite(), scale, top)
    scale = torch.where(amax.isfinite() & (amax != 0.0), scale, 1.0)
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32) if power_2 else scale


def _made(amax: Tensor, fields: Mapping[str, Any], top: float = LARGEST_F32) -> Tensor:
    epsilon, power_2 = fields["amax_epsilon"], bool(fields["power_2_scale"])
    return scale_of_amax(amax, largest_of(dtype_of(fields)), epsilon, power_2, top)


def _scale_of_tensor(fields: Mapping[str, Any]) -> Tensor:
    """The scale of a tensor, [1]: a given one, unless it is 0 and there are partial maxima."""
    scale, partials = fields["scale"], fields["partials"]
    if partials is None:
        return scale
    made = _made(largest_partial(partials), fields)
    return made if scale is None else torch.where(scale != 0.0, scale, made)


# ---- casts ---------------------------------------------------------------------------------------


def by_tensor(values: Tensor, fields: Mapping[str, Any], top: float) -> dict[str, Tensor]:
    """Cast with one scale."""
    del top  # a scale of a tensor is at most the largest fp32 number
    scale = _scale_of_tensor(fields)
    scales = torch.cat((reciprocal(scale), scale))
    made = {"row_scales": scales, "column_scales": scales}
    if fields["row"] is not None or fields["column"] is not None:
        codes = encode(values * scale, dtype_of(fields))
        made |= {"row": codes, "column": codes.t()}
    return made


def by_tile(values: Tensor, fields: Mapping[str, Any], top: float) -> dict[str, Tensor]:
    """Cast the forms that are wanted, each with scales of its rows or tiles."""
    made = {}
    for form, lines in (("row", values), ("column", values.t())):
        if fields[form] is not None:
            made[form], made[f"{form}_scales"] = _cast_lines(lines, form, fields, top)
    return made


def _cast_lines(
    lines: Tensor, form: str, fields: Mapping[str, Any], top: float
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a form."""
    mode, (rows, columns) = fields["mode"], lines.shape
    if not lines.numel():
        codes = torch.zeros(lines.shape, dtype=torch.uint8, device=lines.device)
        return codes, torch.zeros_like(fields[f"{form}_scales"])
    high, wide = _TILES.get(mode, (1, columns))
    down, across = -(-rows // high), -(-columns // wide)
    tiles = padded(lines, (down * high, across * wide)).reshape(down, high, across, wide)
    amax = magnitudes(tiles).amax((1, 3))
    scale = _made(amax, fields, top)
    codes = encode(tiles * scale[:, None, :, None], fields[form].dtype)
    codes = codes.reshape(down * high, across * wide)[:rows, :columns]
    inverse = reciprocal(scale)
    if mode == _core.SCALING_ROW:
        return codes, torch.stack((inverse[:, 0], amax[:, 0]))
    return codes, inverse.t() if mode == _core.SCALING_BLOCK_1D else inverse


# ---- and back ------------------------------------------------------------------------------------


def numbers(data: Tensor) -> Tensor:
    """The fp32 numbers of FP8 data, without a scale."""
    return decode(data.view(torch.uint8), data.dtype)


def scaled_numbers(data: Tensor, scales: Tensor, mode: int, limit: float) -> Tensor:
    """Codes times inverse scales, in fp32; what is finite stays within +-limit."""
    codes = numbers(data)
    inverse = _inverse_of_each(scales, mode, *data.shape)
    values = codes * inverse
    return torch.where(codes.isfinite() & inverse.isfinite(), limited(values, limit), values)


def _inverse_of_each(scales: Tensor, mode: int, rows: int, columns: int) -> Tensor:
    """The inverse scales of elements, of a shape that broadcasts to theirs."""
    if mode == _core.SCALING_TENSOR:
        return scales[0]
    if mode == _core.SCALING_ROW:
        return scales[0][:, None]
    high, wide = _TILES[mode]
    tiles = scales.t() if mode == _core.SCALING_BLOCK_1D else scales
    return tiles.repeat_interleave(wide, 1)[:, :columns].repeat_interleave(high, 0)[:rows]
