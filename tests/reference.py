# SPDX-License-Identifier: Apache-2.0
"""What the operators must compute, written from their definitions in numpy.

fp32 arithmetic where the definition says fp32 (casts and scales are compared by bits), float64
where it does not. FP8 comes from ml_dtypes, with its input clamped first: the library saturates.
"""

import ml_dtypes
import numpy as np
import torch
from tols import BF16, E4M3, E5M2, F16, F32

FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
FLT_MAX = np.finfo(np.float32).max
NAN_CODE = 0x7F
_NUMPY = {
    F32: np.float32,
    F16: np.float16,
    BF16: ml_dtypes.bfloat16,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
quiet = np.errstate(all="ignore")  # NaN, Inf and overflow are values here
_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}


def to_numpy(tensor):
    """The elements as a numpy array of the same format (ml_dtypes' where numpy has none)."""
    plain = tensor.detach().cpu().contiguous()
    integers = plain.view(_BITS[plain.element_size()][0]).numpy()
    return integers.view(_NUMPY[plain.dtype])


def to_torch(array, dtype):
    """The tensor of a numpy array of the same format."""
    integers = np.ascontiguousarray(array).view(_BITS[dtype.itemsize][1])
    return torch.from_numpy(integers.copy()).view(dtype)


@quiet
def as_f32(tensor):
    """The elements as fp32; exact."""
    return to_numpy(tensor).astype(np.float32)


# ---- casts ---------------------------------------------------------------------------------------


@quiet
def encode(values, dtype):
    """fp32 numbers to FP8 codes: nearest even, beyond the largest saturates, NaN is 0x7f."""
    limit = np.float32(FP8_MAX[dtype])
    codes = np.clip(values, -limit, limit).astype(_NUMPY[dtype]).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(NAN_CODE), codes)


@quiet
def quantize(tensor, scale, dtype):
    """FP8 tensor of saturate(x * scale), the product in fp32."""
    product = as_f32(tensor) * np.float32(scale)
    return to_torch(encode(product, dtype), dtype)


@quiet
def narrow(values, dtype):
    """fp32 numbers to a tensor of f32, f16 or bf16, rounded to nearest even."""
    return to_torch(values.astype(np.float32).astype(_NUMPY[dtype]), dtype)


@quiet
def dequantize(tensor, scale_inv, dtype):
    """Decode FP8: q * scale_inv in fp32, rounded to dtype; finite numbers give finite ones."""
    codes, scale_inv = as_f32(tensor), np.float32(scale_inv)
    limit = np.float32(torch.finfo(dtype).max)
    values = codes * scale_inv
    finite = np.isfinite(codes) & np.isfinite(scale_inv)
    return narrow(np.where(finite, np.clip(values, -limit, limit), values), dtype)


@quiet
def nearest(value, dtype):
    """Code of the 16- or 8-bit float nearest to a float64, rounded once; FP8 saturates."""
    size = 8 * dtype.itemsize
    table = np.arange(2 ** (size - 1), dtype=np.uint64).astype(f"uint{size}").view(_NUMPY[dtype])
    table = table.astype(np.float64)
    finite = table[np.isfinite(table)]
    top = finite.size - 1
    magnitude = abs(float(value))
    low = min(int(np.searchsorted(finite, magnitude, side="right")) - 1, top)
    if low < top:
        down, up = magnitude - finite[low], finite[low + 1] - magnitude
        low += bool(up < down or (up == down and low % 2 == 1))
    elif size == 16 and magnitude >= finite[top] + (finite[top] - finite[top - 1]) / 2:
        low = top + 1  # Inf
    sign = int(np.signbit(value)) << (size - 1)
    return low | sign


@quiet
def boundaries(dtype):
    """fp32 numbers where rounding to FP8 decides: all values, all midpoints, and their neighbours.

    Values beyond the largest one, subnormals of fp32, Inf and NaN are among them; both signs.
    """
    codes = np.arange(256, dtype=np.uint8).view(_NUMPY[dtype]).astype(np.float32)
    values = np.unique(codes[np.isfinite(codes)])
    middles = (values[1:].astype(np.float64) + values[:-1]) / 2
    limit = np.float32(FP8_MAX[dtype])
    spacing = values[-1] - values[-2]
    tops = limit + np.arange(9, dtype=np.float32) * (spacing / 4)
    info = np.finfo(np.float32)
    tiny = np.array([0.0, info.smallest_subnormal, info.tiny, info.max, np.inf, np.nan], np.float32)
    exact = np.concatenate([values, middles.astype(np.float32), tops, -tops, tiny, -tiny])
    near = [np.nextafter(exact, np.float32(side), dtype=np.float32) for side in (-np.inf, np.inf)]
    return torch.from_numpy(np.concatenate([exact, *near]))


def amax(tensor):
    """Largest magnitude, NaN ignored; 0 of nothing."""
    magnitudes = np.abs(as_f32(tensor))
    return np.float32(np.max(magnitudes[~np.isnan(magnitudes)], initial=0.0))


# ---- scales --------------------------------------------------------------------------------------


@quiet
def current_scale(largest, fp8_max, epsilon=0.0, power_2=False):
    """Scale of current scaling from an amax."""
    largest, epsilon = np.float32(largest), np.float32(epsilon)
    if largest < epsilon:
        largest = epsilon
    if largest == 0 or not np.isfinite(largest):
        return np.float32(1.0)
    scale = np.float32(fp8_max) / largest
    if np.isinf(scale):
        scale = np.float32(FLT_MAX)
    if power_2:
        scale = np.ldexp(np.float32(1.0), int(np.frexp(scale)[1]) - 1)
    return scale


def scales_shape(mode, rows, columns):
    """Shape of the scales of FP8 data [rows, columns]: "row", "block_1d" or "block_2d"."""
    blocks = -(-columns // 128)
    if mode == "row":
        return (2, rows)
    if mode == "block_1d":
        return (blocks, -(-rows // 4) * 4)
    return (-(-rows // 128), -(-blocks // 4) * 4)


@quiet
def scaled_quantize(values, mode, dtype, top, *, epsilon=0.0, power_2=False):
    """FP8 of an fp32 matrix with a scale per row or tile: (codes, scales as they are stored).

    `top` is the dtype whose largest number an infinite scale becomes.
    """
    rows, columns = values.shape
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros(scales_shape(mode, rows, columns), np.float32)
    if codes.size:
        high, wide = {"row": (1, columns), "block_1d": (1, 128), "block_2d": (128, 128)}[mode]
        down, across = -(-rows // high), -(-columns // wide)
        tiles = np.zeros((down * high, across * wide), np.float32)
        tiles[:rows, :columns] = np.abs(values)
        tiles = tiles.reshape(down, high, across, wide)
        largest = np.fmax.reduce(tiles, axis=(1, 3), initial=0)  # NaN is ignored
        used = np.maximum(largest, np.float32(epsilon))
        quotient = np.float32(FP8_MAX[dtype]) / used
        quotient = np.where(np.isinf(quotient), np.float32(torch.finfo(top).max), quotient)
        if power_2:
            quotient = np.ldexp(np.float32(1.0), np.frexp(quotient)[1] - 1)
        scale = np.where((used > 0) & np.isfinite(used), quotient, np.float32(1.0))
        each = scale.repeat(high, 0).repeat(wide, 1)[:rows, :columns]
        codes = encode(values * each, dtype)
        inverse = np.float32(1.0) / scale
        if mode == "row":
            scales[:] = inverse[:, 0], largest[:, 0]
        elif mode == "block_1d":
            scales[:, :rows] = inverse.T
        else:
            scales[:down, :across] = inverse
    return to_torch(codes.view(_NUMPY[dtype]), dtype), torch.from_numpy(scales)


@quiet
def delayed_update(scale, history, fp8_max, most_recent=False):
    """One step of delayed scaling: (new scale [n], new history [length, n]) in fp32."""
    length, slots = history.shape
    new_scale, new_history = scale.copy(), history.copy()
    for slot in range(slots):
        column = [np.float32(v) for v in history[:, slot]]
        current = column[0]
        if current == 0:  # an idle step
            continue
        rolled = [column[i + 1] if i + 1 < length else current for i in range(length)]
        rolled[0] = np.float32(0.0)
        new_history[:, slot] = rolled
        window = [current] if most_recent else [current, *column[1:]]
        numbers = [v for v in window if not np.isnan(v)]
        if not numbers:
            continue
        largest = max(numbers)
        if largest > 0 and np.isfinite(largest):
            quotient = np.float32(fp8_max) / largest
            new_scale[slot] = FLT_MAX if np.isinf(quotient) else quotient
    return new_scale, new_history


# ---- products ------------------------------------------------------------------------------------


def gelu(values):
    """GELU by tanh, in float64."""
    inner = np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)
    return 0.5 * values * (1 + np.tanh(inner))


def gemm(a, b, *, a_transposed=False, b_transposed=False, scale=1.0, bias=None):
    """op(a) op(b) * scale + bias in float64, from tensors of any float format."""
    left, right = (to_numpy(t).astype(np.float64) for t in (a, b))
    product = (left.T if a_transposed else left) @ (right.T if b_transposed else right)
    product *= float(scale)
    return product if bias is None else product + to_numpy(bias).astype(np.float64)
