# SPDX-License-Identifier: Apache-2.0
"""FP8, E8M0 and E2M1 codes of fp32 numbers, and back, element by element.

The arithmetic, of integers, is that of `csrc/core/fp8.h` and `csrc/core/microscale.h`. Codes are
uint8. A number is never divided by one of Python, which some devices would multiply with
its reciprocal.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_F32 = torch.finfo(torch.float32).max
_INF_BITS = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN_CODE = 0x7F  # of either dtype, without a sign


class _Format(NamedTuple):
    """A float of eight bits."""

    mantissa: int  # bits of it
    bias: int  # of the exponent
    last: int  # code of the largest number
    infinity: int | None  # its code


_FORMATS = {
    torch.float8_e4m3fn: _Format(3, 7, 0x7E, None),
    torch.float8_e5m2: _Format(2, 15, 0x7B, 0x7C),
}


def is_fp8(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is E4M3 or E5M2."""
    return dtype in _FORMATS


def largest_of(dtype: torch.dtype) -> float:
    """The largest finite number of a float dtype."""
    return torch.finfo(dtype).max


def quotient(values: Tensor, divisor: Tensor | float) -> Tensor:
    """Fp32 quotients, rounded once."""
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=values.dtype, device=values.device)
    return torch.div(values, divisor)


def reciprocal(values: Tensor) -> Tensor:
    """1 / values in fp32, rounded once."""
    return torch.div(torch.ones_like(values), values)


def limited(values: Tensor, limit: float) -> Tensor:
    """Numbers beyond +-limit become that; NaN stays."""
    values = torch.where(values > limit, limit, values)
    return torch.where(values < -limit, -limit, values)


def at_most_largest(values: Tensor) -> Tensor:
    """Numbers beyond the largest one of fp32, Inf included, become that; NaN stays."""
    return torch.where(values > LARGEST_F32, LARGEST_F32, values)


def magnitudes(values: Tensor) -> Tensor:
    """|values|, 0 for NaN."""
    return torch.where(values.isnan(), 0.0, values.abs())


# ---- FP8 -----------------------------------------------------------------------------------------


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 codes of fp32 numbers: to nearest even; what is too large saturates, Inf included."""
    fp8 = _FORMATS[dtype]
    shift = 23 - fp8.mantissa
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    clamped = magnitude.clamp(max=_bits_of(largest_of(dtype)))
    # Subnormal codes are multiples of the last place of numbers from `large` on.
    large = 2.0 ** (24 - fp8.bias - fp8.mantissa)
    small = (clamped.view(torch.float32) + large).view(torch.int32) - _bits_of(large)
    rounded = clamped + (1 << shift - 1) - 1 + (clamped >> shift & 1)
    normal = (rounded >> shift) - (127 - fp8.bias << fp8.mantissa)
    codes = torch.where(clamped < _bits_of(2.0 ** (1 - fp8.bias)), small, normal)
    codes = codes | bits >> 24 & 0x80
    return torch.where(magnitude > _INF_BITS, _NAN_CODE, codes).to(torch.uint8)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 numbers of FP8 codes."""
    fp8 = _FORMATS[dtype]
    magnitude = (codes & 0x7F).to(torch.int32)
    bits = (magnitude << 23 - fp8.mantissa) + (127 - fp8.bias << 23)
    fraction = magnitude & (1 << fp8.mantissa) - 1
    small = fraction.to(torch.float32) * 2.0 ** (1 - fp8.bias - fp8.mantissa)
    values = torch.where(magnitude < 1 << fp8.mantissa, small, bits.view(torch.float32))
    values = torch.where(magnitude > fp8.last, torch.nan, values)
    if fp8.infinity is not None:
        values = torch.where(magnitude == fp8.infinity, torch.inf, values)
    return torch.where(codes >= 0x80, -values, values)


def _bits_of(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0]


# ---- E8M0 ----------------------------------------------------------------------------------------


def encode_e8m0(amax: Tensor, largest: float, margin: int) -> Tensor:
    """Exponents of amax / largest, rounded up, and `margin` more; 0 of 0, 0xfe of Inf."""
    inverse = reciprocal(torch.full_like(amax, largest))
    bits = (amax * inverse).contiguous().view(torch.int32)
    exponents = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32) + margin
    exponents = exponents.clamp(0, 0xFE)
    exponents = torch.where(bits >= 0x7F000000, 0xFE, exponents)
    return torch.where(bits == 0, 0, exponents).to(torch.uint8)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """2^(e - 127) in fp32; NaN for 0xff."""
    e = exponents.to(torch.int32)
    values = torch.where(e == 0, 0x00400000, e << 23)
    values = torch.where(e == 0xFF, 0x7FC00000, values)
    return values.view(torch.float32)


# ---- E2M1 ----------------------------------------------------------------------------------------


_MIDDLES = (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)
"""Between two numbers, and whether it is rounded up; the last one is 5."""
_NUMBERS = 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0


def encode_e2m1(values: Tensor, random: Tensor | None = None) -> Tensor:
    """Codes 0 .. 15 of fp32 numbers; beyond 6 saturates, NaN gives 0.

    To nearest even, or with `random`, uniform numbers in [0, 1): to the farther of the two numbers
    around a value with the probability of the distance to the nearer one.
    """
    x = values.abs()
    if random is None:
        steps = [x >= middle if up else x > middle for middle, up in _MIDDLES] + [x > 5.0]
        codes = sum(step.to(torch.uint8) for step in steps)
    else:
        codes = sum((x >= number).to(torch.uint8) for number in _NUMBERS)
        steps = torch.where(x < 4.0, torch.ones_like(x), 0.5)  # of 1 and 0.5, and of 2 below 2
        per_step = torch.where(x < 2.0, 2.0, steps)
        up = (codes < 7) & (random < (x - decode_e2m1(codes)) * per_step)
        codes = codes + up.to(torch.uint8)
    codes = codes | torch.signbit(values).to(torch.uint8) << 3
    return torch.where(values.isnan(), 0, codes)


def decode_e2m1(codes: Tensor) -> Tensor:
    """The fp32 numbers of codes 0 .. 15."""
    magnitude = (codes & 7).to(torch.int32)
    large = ((magnitude << 22) + 0x3F000000).view(torch.float32)
    values = torch.where(magnitude < 2, magnitude.to(torch.float32) * 0.5, large)
    return torch.where(codes >= 8, -values, values)


def rounded_e4m3(values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, the fp32 numbers that these are) of fp32 numbers."""
    codes = encode(values, torch.float8_e4m3fn)
    return codes, decode(codes, torch.float8_e4m3fn)
