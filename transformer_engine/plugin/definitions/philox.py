# SPDX-License-Identifier: Apache-2.0
"""The random numbers of dropouts and of stochastic rounding: Philox4x32-10 in int64 arithmetic.

The counters, keys and words are those of `csrc/core/philox.h`. Halves of 16 bits are multiplied,
so that no product or sum leaves 63 bits: devices differ in what they make of an overflow.
"""

import ctypes

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def words(rng: Tensor, first: int, count: int) -> Tensor:
    """Random words of elements `first` .. `first + count - 1`: [count] int64, below 2^32.

    Parameters
    ----------
    rng : Tensor
        int64 [2] {seed, offset}; the words are made on its device.
    first, count : int
        Element i has word i % 4 of the counter offset + i // 4, which wraps at 2^64.
    """
    groups = torch.arange(first // 4, (first + count + 3) // 4, device=rng.device)
    seed_low, seed_high = rng[0] & _WORD, rng[0] >> 32 & _WORD
    low = (rng[1] & _WORD) + groups
    high = (rng[1] >> 32 & _WORD) + (low >> 32) & _WORD
    zeros = torch.zeros_like(low)
    c = low & _WORD, high, zeros, zeros
    for step in range(_ROUNDS):
        keys = [
            k + step * n & _WORD for k, n in zip((seed_low, seed_high), _KEY_STEPS, strict=True)
        ]
        (high0, low0), (high1, low1) = (_product(m, c[2 * i]) for i, m in enumerate(_MULTIPLIERS))
        c = high1 ^ c[1] ^ keys[0], low1, high0 ^ c[3] ^ keys[1], low0
    return torch.stack(c, -1).flatten()[first % 4 :][:count]


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of the product of two words."""
    of_low, of_high = (b & 0xFFFF) * a, (b >> 16) * a
    return of_high + (of_low >> 16) >> 16, ((of_high & 0xFFFF) << 16) + of_low & _WORD


def uniforms(rng: Tensor, first: int, count: int) -> Tensor:
    """The words as numbers in [0, 1), multiples of 2^-24: [count] fp32."""
    return (words(rng, first, count) >> 8).float() * 2.0**-24


def kept(rng: Tensor, first: int, count: int, probability: float) -> Tensor:
    """Which elements a dropout keeps, [count] bool; `probability` is an fp32 number."""
    return uniforms(rng, first, count) >= probability


def keep_factor(probability: float) -> float:
    """What a kept element is multiplied by, 1 / (1 - probability) in fp32; 0 for probability 1."""
    if probability >= 1.0:
        return 0.0
    return ctypes.c_float(1.0 / ctypes.c_float(1.0 - probability).value).value
