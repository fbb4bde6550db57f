# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and NVFP4 from their definitions, in numpy, and groups of values that try a cast.

Formats come from ml_dtypes, powers of two and products with them from float64, where they are
exact. fp32 stands where the definition rounds to it: the quotients that scales are made of.
"""

import ml_dtypes
import numpy as np
import torch
from reference import FLT_MAX, as_f32, encode, quiet, to_numpy, to_torch
from tols import BF16, E4M3, F32

from transformer_engine import _core

BF16_MAX = float(torch.finfo(BF16).max)
SIGNS = np.float32([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
GROUP = {_core.SCALING_MXFP8: 32, _core.SCALING_NVFP4: 16}
MODES = {"mxfp8": _core.SCALING_MXFP8, "nvfp4": _core.SCALING_NVFP4}
KINDS = ("random", "wide", "denormal", "zero", "inf", "nan", "outlier", "all_nan")


def round_up(size, to):
    """The next multiple."""
    return -(-size // to) * to


# ---- values --------------------------------------------------------------------------------------


@quiet
def groups_of_kinds(rng, shape, dtype, kinds=KINDS):
    """A matrix whose groups of 32 values of a row are each of a random kind, ragged ends too."""
    rows, columns = shape
    groups = -(-columns // 32)
    x = rng.standard_normal((rows, groups, 32))
    kind = rng.choice(kinds, (rows, groups))[..., None]
    one = np.arange(32) == rng.integers(0, 32, (rows, groups, 1))
    sign = rng.choice([-1.0, 1.0], (rows, groups, 1))
    tiny = float(torch.finfo(dtype).tiny)
    x = np.where(kind == "wide", x * 2.0 ** rng.uniform(-60, 60, x.shape), x)
    x = np.where(kind == "denormal", x * tiny / 64, x)
    x = np.where(kind == "zero", 0.0 * sign, x)
    x = np.where((kind == "inf") & one, sign * np.inf, x)
    x = np.where(((kind == "nan") & one) | (kind == "all_nan"), np.nan, x)
    x = np.where((kind == "outlier") & one, sign * 2.0 ** rng.uniform(0, 100, sign.shape), x)
    x = x.reshape(rows, groups * 32)[:, :columns]
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


# ---- MXFP8 ---------------------------------------------------------------------------------------


@quiet
def e8m0(amax, largest, margin=0):
    """The byte of groups with these largest magnitudes: an exponent, rounded up, and a margin."""
    value = np.float32(amax) * (np.float32(1) / np.float32(largest))
    mantissa, exponent = np.frexp(value.astype(np.float64))
    biased = exponent - 1 + 127
    biased = np.where(mantissa == 0.5, biased, biased + 1)
    biased = np.where(exponent - 1 < -126, 1, biased)  # a subnormal's exponent is 0
    biased = np.where(value >= 2.0**127, 0xFE, np.clip(biased + margin, 0, 0xFE))
    biased = np.where(value == 0, 0, biased)
    return np.where(np.isinf(value), 0xFE, np.clip(biased, 0, 0xFE)).astype(np.uint8)


@quiet
def _amax(x, axis):
    return np.fmax.reduce(np.fmax(np.abs(x), 0), axis=axis, initial=0)


@quiet
def mxfp8(x, dtype=E4M3, *, square=False, margin=0):
    """Codes and scales by rows and by columns of fp32 numbers [rows, columns]."""
    rows, columns = x.shape
    high, wide = round_up(rows, 128), round_up(columns, 128)
    full = np.zeros((high, wide), np.float32)
    full[:rows, :columns] = x
    by_row = _amax(full.reshape(high, wide // 32, 32), 2)
    by_column = _amax(full.reshape(high // 32, 32, wide), 1)
    if square:
        tile = _amax(by_row.reshape(high // 32, 32, wide // 32), 1)
        by_row, by_column = tile.repeat(32, 0), tile.repeat(32, 1)
        inside = np.arange(high) < rows, np.arange(wide) < columns
        by_row = np.where(inside[0][:, None], by_row, 0)
        by_column = np.where(inside[1], by_column, 0)
    largest = float(torch.finfo(dtype).max)
    results = []
    for amax, axis in ((by_row, 1), (by_column, 0)):
        scales = e8m0(amax, largest, margin)
        factor = np.ldexp(1.0, 127 - scales.astype(np.int64)).repeat(32, axis)
        codes = encode((full * factor)[:rows, :columns].astype(np.float32), dtype)
        results += [to_torch(codes, dtype), torch.from_numpy(scales)]
    return tuple(results)


@quiet
def mxfp8_values(codes, scales, axis, dtype=F32):
    """What MXFP8 data stands for: no Inf."""
    rows, columns = codes.shape
    e = scales.numpy().astype(np.int64).repeat(32, axis)[:rows, :columns]
    values = to_numpy(codes).astype(np.float64) * np.ldexp(1.0, e - 127)
    limit = float(torch.finfo(dtype).max)
    return torch.from_numpy(np.clip(values, -limit, limit)).to(dtype)


# ---- NVFP4 ---------------------------------------------------------------------------------------


@quiet
def hadamard(x, signs=SIGNS):
    """Groups of 16 rows transformed: bf16 in and out, fp32 sums in the order of the butterflies."""
    rows, columns = x.shape
    full = np.zeros((round_up(rows, 16), columns), np.float32)
    full[:rows] = x
    to_bf16 = lambda v: np.clip(  # noqa: E731
        v.astype(ml_dtypes.bfloat16).astype(np.float32), -np.float32(BF16_MAX), np.float32(BF16_MAX)
    )
    v = to_bf16(full).reshape(full.shape[0] // 16, 16, columns) * signs[:, None] / np.float32(16)
    for step in (1, 2, 4, 8):
        pairs = v.reshape(full.shape[0] // 16, 8 // step, 2, step, columns)
        v = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
    v = np.clip(v.reshape(full.shape).astype(np.float64) * 4, -BF16_MAX, BF16_MAX)
    return to_bf16(v.astype(np.float32))


@quiet
def largest_of(x):
    """The amax of an NVFP4 tensor: NaN is none, Inf the largest number."""
    return np.minimum(_amax(np.asarray(x).reshape(-1), 0), FLT_MAX).astype(np.float32)


@quiet
def e2m1(values, random=None):
    """Codes 0 to 15 of fp32 numbers; with `random` rounded stochastically. NaN is 0."""
    grid = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    x = np.minimum(np.abs(values.astype(np.float64)), 6)
    if random is None:
        codes = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    else:
        below = np.clip(np.searchsorted(grid, np.nan_to_num(x), side="right") - 1, 0, 6)
        codes = below + (random < (x - grid[below]) / (grid[below + 1] - grid[below]))
    codes = codes | np.where(np.signbit(values), 8, 0)
    return np.where(np.isnan(values), 0, codes).astype(np.uint8)


@quiet
def _sum_of_squares(lines):
    """Sums of the last axis, 16 long: i and i + 8, of these i and i + 4, and so on."""
    while lines.shape[-1] > 1:
        half = lines.shape[-1] // 2
        lines = lines[..., :half] + lines[..., half:]
    return lines[..., 0]


@quiet
def _sum_of_lines(errors):
    """Sums of the last axis, one after the other."""
    return np.add.accumulate(errors, -1, dtype=np.float32)[..., -1]


@quiet
def _cast_groups(groups, scales, encode_scale, random):
    """Codes and E4M3 scales of groups, given their exact scales, and codes times scales."""
    scales = encode(scales, E4M3)
    decoded = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    multiplier = np.minimum(np.float32(1) / (decoded * (np.float32(1) / encode_scale)), FLT_MAX)
    codes = e2m1(groups * multiplier.astype(np.float32)[..., None], random)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * decoded[..., None]
    return codes, scales, values


@quiet
def _nvfp4_form(x, amax, squares, random, err_mode, turned, largest=448):
    """Codes and scales of rows of whole groups.

    `amax` is that of each row, or of all; `squares` the amaxes of squares [rows, groups], or None;
    `turned`: `x` are columns, whose squares count row by row.
    """
    rows, columns = x.shape
    groups = x.reshape(rows, columns // 16, 16)
    top = np.max(np.abs(groups), 2) if squares is None else squares  # a NaN stays
    top = np.minimum(top, FLT_MAX)
    encode_scale = np.where(amax > 0, np.float32(6 * largest) / amax, np.float32(1))
    encode_scale = np.minimum(encode_scale, FLT_MAX).astype(np.float32).reshape(-1, 1)
    random = None if random is None else random.reshape(groups.shape)
    if err_mode is None:
        exact = top * (encode_scale * (np.float32(1) / np.float32(6)))
        codes, scales, _ = _cast_groups(groups, exact, encode_scale, random)
    else:
        exact = (top / np.float32(6)) * encode_scale
        six = _cast_groups(groups, exact, encode_scale, None)
        four = _cast_groups(groups, exact * np.float32(1.5), encode_scale, None)
        losses = []
        for _, _, values in (four, six):
            meant = values * amax.reshape(-1, 1, 1) / np.float32(6 * largest)
            error = meant - groups
            error = np.abs(error) if err_mode == "MAE" else error * error
            losses.append(_losses_of(error, squares is not None, turned))
        better = losses[0] < losses[1]
        codes, scales = six[:2]
        codes = np.where(better[..., None], four[0], codes)
        scales = np.where(better, four[1], scales)
    codes = codes.reshape(rows, columns)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    padded = np.zeros((round_up(rows, 128), round_up(columns // 16, 4)), np.uint8)
    padded[:rows, : columns // 16] = scales
    return torch.from_numpy(packed), torch.from_numpy(padded)


@quiet
def _losses_of(error, by_squares, turned):
    """Losses [rows, groups] of errors [rows, groups, 16]; those of squares are the same in each."""
    if not by_squares:
        return _sum_of_lines(error)
    rows, groups, _ = error.shape
    full = np.zeros((round_up(rows, 16), groups, 16), np.float32)
    full[:rows] = error
    tiles = full.reshape(full.shape[0] // 16, 16, groups, 16).transpose(0, 2, 1, 3)
    if turned:
        tiles = tiles.swapaxes(2, 3)
    return _sum_of_squares(_sum_of_lines(tiles)).repeat(16, 0)[:rows]


@quiet
def nvfp4(
    x,
    *,
    square=False,
    rht=False,
    random=(None, None),
    err_mode=None,
    to_256=False,
    row_scaled=False,
):
    """(codes, scales, amax) by rows, and the same by columns; `random`: uniform numbers of each.

    Operations and their order are those of arXiv:2509.25149, appendix C, and of arXiv:2512.02010.
    `err_mode`: "MAE" or "MSE" of groups whose largest code is 4 or 6. `to_256`: scales of groups go
    up to 256. `rht`: 1 with the signs of the recipe, 2 without.
    """
    rows, columns = x.shape
    full = np.zeros((round_up(rows, 16), round_up(columns, 16)), np.float32)
    full[:rows, :columns] = x
    turned = full
    if rht:
        turned = hadamard(full, SIGNS if rht == 1 else np.abs(SIGNS))
    squares = None
    if square:
        squares = np.abs(full).reshape(full.shape[0] // 16, 16, full.shape[1] // 16, 16)
        squares = squares.max((1, 3))
    results = []
    for values, count, tops in (
        (full, rows, squares),
        (turned.T, columns, None if squares is None else squares.T),
    ):
        by_column = len(results) == 3
        amax = np.float32([largest_of(values)])
        if row_scaled and not by_column:
            amax = np.minimum(_amax(values[:count], 1), FLT_MAX).astype(np.float32)
        tops = None if tops is None else tops.repeat(16, 0)[:count]
        how = random[int(by_column)], err_mode, by_column, 256 if to_256 else 448
        results += [*_nvfp4_form(values[:count], amax, tops, *how), torch.from_numpy(amax)]
    return tuple(results)


@quiet
def nvfp4_values(packed, scales, amax=None, dtype=F32, to_256=False):
    """What NVFP4 data [rows, columns / 2] stands for; without the amax in units of its part."""
    codes = packed.numpy()
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(rows, columns)
    values = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    decoded = scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = values * decoded.repeat(16, 1)[:rows, :columns]
    if amax is not None:
        values = values * (amax.numpy() / np.float32(6 * (256 if to_256 else 448))).reshape(-1, 1)
    limit = np.float32(torch.finfo(dtype).max)
    return torch.from_numpy(np.clip(values, -limit, limit)).to(dtype)


# ---- random numbers ------------------------------------------------------------------------------


def _uniform_of(seed, offset, first, count):
    """The uniform numbers of elements first .. first + count - 1, from the definition of Philox."""
    counter = np.uint64(offset) + np.arange(first // 4, (first + count) // 4, dtype=np.uint64)
    c = [counter & 0xFFFFFFFF, counter >> np.uint64(32), np.zeros_like(counter), 0 * counter]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        low = [v & np.uint64(0xFFFFFFFF) for v in p]
        high = [v >> np.uint64(32) for v in p]
        c = [high[1] ^ c[1] ^ np.uint64(keys[0]), low[1], high[0] ^ c[3] ^ np.uint64(keys[1])]
        c.append(low[0])
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return (np.stack(c, -1).reshape(-1) >> np.uint64(8)).astype(np.float64) * 2.0**-24


def uniform_numbers(seed, offset, shape):
    """Those that round the elements of a matrix stochastically, by rows and by columns."""
    rows, columns = shape
    wide, high = round_up(columns, 16), round_up(rows, 16)
    by_row = _uniform_of(seed, offset, 0, rows * wide).reshape(rows, wide)
    by_column = _uniform_of(seed, offset, rows * wide, columns * high).reshape(columns, high)
    return by_row, by_column


# ---- buffers -------------------------------------------------------------------------------------


def forms(mode, shape, device, dtype=E4M3, row_scaled=False):
    """Empty results of a cast as keywords of ``_core.quantize``."""
    rows, columns = shape
    empty = lambda *size, of=torch.uint8: torch.full(  # noqa: E731
        size, 0x55, dtype=torch.uint8, device=device
    ).view(of)
    if mode == _core.SCALING_MXFP8:
        return {
            "mode": mode,
            "row": empty(rows, columns, of=dtype),
            "row_scales": empty(round_up(rows, 128), round_up(-(-columns // 32), 4)),
            "column": empty(rows, columns, of=dtype),
            "column_scales": empty(round_up(-(-rows // 32), 4), round_up(columns, 128)),
        }
    return {
        "mode": mode,
        "row": empty(rows, round_up(columns, 16) // 2),
        "row_scales": empty(round_up(rows, 128), round_up(-(-columns // 16), 4)),
        "row_amax": torch.empty(rows if row_scaled else 1, device=device),
        "column": empty(columns, round_up(rows, 16) // 2),
        "column_scales": empty(round_up(columns, 128), round_up(-(-rows // 16), 4)),
        "column_amax": torch.empty(1, device=device),
    }


SETTINGS = ("mode", "scales_to_256")
"""Of the keywords of a cast's results, what is no tensor."""


def one_usage(kept, usage):
    """Keywords of a form alone ("row", "column"), or of both."""
    if usage == "both":
        return kept
    return {k: v for k, v in kept.items() if k in SETTINGS or k.startswith(usage)}


def partials(x, rht=False):
    """Partial maxima of a tensor, or of what its columns are transformed to."""
    found = torch.empty(_core.AMAX_PARTIALS, device=x.device)
    _core.amax(x, found, hadamard=int(rht))
    return found


ERR_MODES = {None: 0, "MAE": 1, "MSE": 2}
"""`four_over_six` of ``_core.quantize``."""


def cast(x, mode, *, dtype=E4M3, usage="both", square=False, rht=False, rng=None, **more):
    """Cast a tensor; the results as keywords of ``_core.dequantize``.

    Further options are those of `mxfp8` and `nvfp4`, and keywords of ``_core.quantize``.
    """
    row_scaled = more.pop("row_scaled", False)
    results = one_usage(forms(mode, x.shape, x.device, dtype, row_scaled), usage)
    if mode == _core.SCALING_NVFP4:
        more["partials"] = None if row_scaled and usage == "row" else partials(x)
        more["column_partials"] = partials(x, rht) if rht else None
        more.update(rng=rng, hadamard=int(rht), row_scaled=int(row_scaled))
        more["four_over_six"] = ERR_MODES[more.pop("err_mode", None)]
        results["scales_to_256"] = int(more.pop("to_256", False))
    _core.quantize(x, **results, square=int(square), **more)
    return results


def expected(x, mode, **options):
    """The same by the definition, as a dict of the names that both forms have."""
    names = ["row", "row_scales", "row_amax", "column", "column_scales", "column_amax"]
    if mode == _core.SCALING_MXFP8:
        names = [n for n in names if "amax" not in n]
        return dict(zip(names, mxfp8(as_f32(x), **options), strict=True))
    options.pop("dtype", None)
    return dict(zip(names, nvfp4(as_f32(x), **options), strict=True))
