# SPDX-License-Identifier: Apache-2.0
"""Casts to MXFP8 and NVFP4, and back; see `scales` for what they get and return.

The operations, and their order, are those of `csrc/core/microscale.h`. Groups at the ragged ends of
a matrix are filled up with zeros.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.definitions import philox
from transformer_engine.plugin.definitions.codes import (
    at_most_largest,
    decode,
    decode_e2m1,
    decode_e8m0,
    encode,
    encode_e2m1,
    encode_e8m0,
    largest_of,
    limited,
    magnitudes,
    quotient,
    reciprocal,
    rounded_e4m3,
)
from transformer_engine.plugin.definitions.scales import (
    dtype_of,
    largest_partial,
    numbers,
    padded,
    round_up,
)

_SIGNS = 0xD7E8  # bit i: value i of a group is negated by the signed transform
_SIGNED = 1  # te_hadamard
_SQUARES = 2  # te_four_over_six: by the sum of squares
_LARGEST_BF16 = largest_of(torch.bfloat16)


# ---- MXFP8 ---------------------------------------------------------------------------------------


def mxfp8(values: Tensor, fields: Mapping[str, Any], top: float) -> dict[str, Tensor]:
    """Cast groups of 32 values of a row, and of a column, with a power of two each."""
    del top
    (rows, columns), dtype = values.shape, dtype_of(fields)
    high, wide = round_up(rows, 32), round_up(columns, 32)
    tiles = padded(values, (high, wide)).reshape(high // 32, 32, wide // 32, 32)
    sizes = magnitudes(tiles)
    amax_of_row, amax_of_column = (sizes.amax(dim, keepdim=True) for dim in (3, 1))
    if fields["square"]:
        shared = amax_of_row.amax(1, keepdim=True)
        amax_of_row, amax_of_column = shared.expand(-1, 32, -1, -1), shared.expand(-1, -1, -1, 32)
    made = {}
    for form, amax in (("row", amax_of_row), ("column", amax_of_column)):
        if fields[form] is None:
            continue
        exponents = encode_e8m0(amax, largest_of(dtype), fields["margin"])
        codes = encode(tiles * decode_e8m0(254 - exponents), dtype).reshape(high, wide)
        made[form] = codes[:rows, :columns]
        if form == "row":
            made["row_scales"] = exponents.reshape(high, wide // 32)[:rows]
        else:
            made["column_scales"] = exponents.reshape(high // 32, wide)[:, :columns]
    return made


def mxfp8_numbers(data: Tensor, scales: Tensor, by_rows: bool, limit: float) -> Tensor:
    """Codes times the powers of two of their groups, in fp32 within +-limit; padding may lack."""
    rows, columns = data.shape
    powers = decode_e8m0(scales).repeat_interleave(32, 1 if by_rows else 0)[:rows, :columns]
    return limited(numbers(data[:, : powers.shape[1]]) * powers, limit)


# ---- NVFP4: scales -------------------------------------------------------------------------------


def _range_of(fields: Mapping[str, Any], prefix: str = "") -> float:
    """What the largest magnitude of a tensor stands for in units of its factor."""
    return 6.0 * (256.0 if fields[f"{prefix}scales_to_256"] else 448.0)


def _amax_of_form(form: str, values: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """The amax that a form is made with: [1], or of each row [rows]."""
    if form == "row" and fields["row_scaled"]:
        if not values.numel():
            return torch.zeros(values.shape[0], dtype=values.dtype, device=values.device)
        return at_most_largest(magnitudes(values).amax(1))
    partials = fields["partials"]
    if form == "column" and fields["column_partials"] is not None:
        partials = fields["column_partials"]
    return at_most_largest(largest_partial(partials))


class _Factors(NamedTuple):
    """What groups of a form are made with; tensors broadcast to [lines, groups]."""

    amax: Tensor
    encode: Tensor  # what all values are multiplied by before their groups are looked at
    range: float


def _factors(amax: Tensor, fields: Mapping[str, Any]) -> _Factors:
    of_tensor = _range_of(fields)
    amax = amax[:, None]
    scale = at_most_largest(quotient(torch.full_like(amax, of_tensor), amax))
    return _Factors(amax, torch.where(amax == 0.0, 1.0, scale), of_tensor)


def _group_scales(tops: Tensor, factors: _Factors, fours: Tensor | None) -> Tensor:
    """Scales of groups before they are rounded, by which `tops` become 4 where `fours`, or 6.

    None: all become 6, which is rounded otherwise than where that is a choice.
    """
    tops = at_most_largest(tops)
    if fours is None:
        sixth = reciprocal(torch.full_like(factors.encode, 6.0))
        return tops * (factors.encode * sixth)
    scales = quotient(tops, 6.0) * factors.encode
    return torch.where(fours, scales * 1.5, scales)


def _multipliers(factors: _Factors, group_scales: Tensor) -> Tensor:
    """What the values of groups are multiplied by."""
    return at_most_largest(reciprocal(group_scales * reciprocal(factors.encode)))


# ---- NVFP4: four over six ------------------------------------------------------------------------


def _losses(groups: Tensor, tops: Tensor, factors: _Factors, four: bool, squared: bool) -> Tensor:
    """What groups [lines, groups, 16] lose where `tops` become 4, or 6."""
    fours = torch.full_like(tops, four, dtype=torch.bool)
    _, scales = rounded_e4m3(_group_scales(tops, factors, fours))
    codes = encode_e2m1(groups * _multipliers(factors, scales)[..., None])
    meant = decode_e2m1(codes) * scales[..., None] * factors.amax[..., None]
    errors = quotient(meant, factors.range) - groups
    errors = errors * errors if squared else errors.abs()
    total = errors[..., 0]
    for i in range(1, 16):
        total = total + errors[..., i]
    return total


def _fours(
    groups: Tensor, tops: Tensor, factors: _Factors, fields: Mapping[str, Any]
) -> Tensor | None:
    """Which groups lose less where their largest magnitude becomes 4, [lines, groups].

    None where that is no choice.
    """
    if not fields["four_over_six"]:
        return None
    squared = fields["four_over_six"] == _SQUARES
    of_four, of_six = (_losses(groups, tops, factors, four, squared) for four in (True, False))
    if fields["square"]:
        of_four, of_six = _sums_of_squares(of_four), _sums_of_squares(of_six)
    return of_four < of_six


def _sums_of_squares(losses: Tensor) -> Tensor:
    """Sums of each 16 lines as a tree, i and i + 8, of these i and i + 4, ..; for each line."""
    sums = losses.reshape(losses.shape[0] // 16, 16, losses.shape[1])
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0].repeat_interleave(16, 0)


# ---- NVFP4: the transform ------------------------------------------------------------------------


def _round_bf16(values: Tensor) -> Tensor:
    """To the nearest bf16 number, but not to Inf."""
    return limited(values.to(torch.bfloat16).to(torch.float32), _LARGEST_BF16)


def transformed(values: Tensor, hadamard: int) -> Tensor:
    """Groups of 16 rows times H16 / 4, negated by signs first: [rows filled up to 16, columns]."""
    rows, columns = round_up(values.shape[0], 16), values.shape[1]
    v = _round_bf16(padded(values, (rows, columns))) * 0.0625
    v = v.reshape(rows // 16, 16, columns)
    if hadamard == _SIGNED:
        v = torch.stack([-v[:, i] if _SIGNS >> i & 1 else v[:, i] for i in range(16)], 1)
    for step in (1, 2, 4, 8):
        pairs = v.reshape(rows // 16, 8 // step, 2, step, columns)
        v = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
    return _round_bf16(limited(v.reshape(rows, columns) * 4.0, _LARGEST_BF16))


# ---- NVFP4: casts --------------------------------------------------------------------------------


def nvfp4(values: Tensor, fields: Mapping[str, Any], top: float) -> dict[str, Tensor]:
    """Cast groups of 16 values of a row, and of a column that may be transformed first."""
    del top
    rows, columns = values.shape
    full = padded(values, (round_up(rows, 16), round_up(columns, 16)))
    turned = transformed(full, fields["hadamard"]) if fields["hadamard"] else full
    made = {}
    for form, lines, count, first in (
        ("row", full, rows, 0),
        ("column", turned.t(), columns, rows * full.shape[1]),
    ):
        if fields[form] is None:
            continue
        amax = _amax_of_form(form, values, fields)
        factors = _factors(amax, fields)
        groups = lines[:count].reshape(count, lines.shape[1] // 16, 16)
        if fields["square"]:
            tops, fours = (_of_lines(form, each, count) for each in _squares(full, factors, fields))
        else:
            tops = groups.abs().amax(2)  # a NaN stays
            fours = _fours(groups, tops, factors, fields)
        random = None
        if fields["rng"] is not None:
            random = philox.uniforms(fields["rng"], first, groups.numel()).view(groups.shape)
        scales, rounded = rounded_e4m3(_group_scales(tops, factors, fours))
        codes = encode_e2m1(groups * _multipliers(factors, rounded)[..., None], random)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        made |= {form: pairs.reshape(count, lines.shape[1] // 2), f"{form}_scales": scales}
        made[f"{form}_amax"] = amax
    return made


def _squares(
    full: Tensor, factors: _Factors, fields: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Largest magnitudes of squares, and `_fours` of these, for each row [rows, groups]."""
    rows, columns = full.shape
    groups = full.reshape(rows, columns // 16, 16)
    tops = groups.abs().amax(2).reshape(rows // 16, 16, columns // 16).amax(1)
    tops = tops.repeat_interleave(16, 0)
    return tops, _fours(groups, tops, factors, fields)


def _of_lines(form: str, of_rows: Tensor | None, count: int) -> Tensor | None:
    """What squares have for each row, for each line of a form."""
    if of_rows is None or form == "row":
        return None if of_rows is None else of_rows[:count]
    return of_rows[::16].t().repeat_interleave(16, 0)[:count]


def nvfp4_factor(amax: Tensor, fields: Mapping[str, Any], prefix: str) -> Tensor:
    """What a tensor's codes times the scales of their groups are to be multiplied by, as `amax`."""
    return quotient(amax, _range_of(fields, prefix))


def nvfp4_numbers(data: Tensor, scales: Tensor, factor: Tensor | None, limit: float) -> Tensor:
    """Codes times the scales of their groups times `factor`, [1] or of each row.

    In fp32 within +-limit; padding may lack.
    """
    codes = torch.stack((data & 15, data >> 4), -1).reshape(data.shape[0], 2 * data.shape[1])
    of_groups = decode(scales, torch.float8_e4m3fn).repeat_interleave(16, 1)
    of_groups = of_groups[: codes.shape[0], : codes.shape[1]]
    values = decode_e2m1(codes[:, : of_groups.shape[1]]) * of_groups
    return limited(values if factor is None else values * factor[:, None], limit)
