# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances: how large an error may be, by (family, dtype), and why.

An entry bounds a normalised mean squared error (sum of squared errors over sum of squared exact
values), but for families named `*_floor`, which are absolute errors relative to the largest exact
value, `terms`, which is one relative to the sum of the magnitudes of the terms of a value, and
`share`, which is the error of a share.
Contributions add up: an FP8 GEMM that writes bf16 is within
`tol("round", bf16) + tol("sum", f32, k)` of the float64 product of its dequantized operands.

eps is the distance from 1 to the next number (`torch.finfo(dtype).eps`), so bf16 has 2^-7; a
rounding to nearest errs by at most eps / 2 relative to its result.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

EPS = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7, E4M3: 2.0**-3, E5M2: 2.0**-2}
TF32_EPS = 2.0**-10
MMA_EPS = 2.0**-13  # accumulator of Hopper's FP8 tensor cores: 13 bits after the point, truncating
MMA_DEPTH = 32  # products that one FP8 tensor-core instruction adds per output
PROMOTION = 128  # products between two promotions to fp32 where accumulation is split

# What GELU makes of an error of its argument x: its slope is at most 1.13, and for the normal x of
# the tests the mean square of gelu(x) is at least 0.3 of that of x; 1.13^2 / 0.3 < 5.
GELU_GAIN = 5

# What becomes of the mean square of an error, relative to that of the values, on the way through
# the derivative of an activation or of a norm at normal data: both multiply each value by a number
# of its own, about as large for errors as for values, and a norm takes two directions out.
PASSED_ON = 4


class Tolerance(NamedTuple):
    """One bound: a function of the number of summands, and its derivation."""

    bound: Callable[[int], float]
    derivation: str


def _constant(value):
    return lambda depth: value


_ROUND = (
    "one rounding to nearest: every error is at most eps/2 of its own value, so the mean square is "
    "at most (eps/2)^2 of the mean square (a third of it on average)"
)
_SUM = (
    "fp32 sum of k products of random sign, in any order: after i of k steps the partial sum has "
    "i/k of the final variance and is rounded by at most eps/2 of it; the k errors are "
    "independent, mean square sum_i (i/k)(eps/2)^2/3 = k eps^2/24. c = 1 instead of 1/24 leaves "
    "room for products that are rounded too (no fused multiply-add) and for sums that come out "
    "small"
)
_TF32 = (
    "both operands cut to 10 bits: each product errs by at most 2 eps(tf32), independent of the "
    "others, so the sum's mean square is at most (2 eps)^2 of its own; and the fp32 sum"
)
_FAST = (
    "Hopper's FP8 accumulator keeps 13 bits and truncates: k/32 instructions, each losing at most "
    "2^-13 of the partial sum and its 32 products, all in one direction in the worst case: "
    "(2 k/32 2^-13)^2"
)
_SPLIT = (
    "as fast accumulation, but only within the 128 products between two promotions to fp32: "
    "(2 128/32 2^-13)^2; and the fp32 sum"
)
_GELU = (
    "tanh GELU in fp32: its argument errs by 3 eps (two products and a constant), e^x by 2 eps of "
    "an argument of at most 16, the quotient by 2: at most (32 eps)^2 with the hardware's tanh "
    "approximation aside"
)
_GELU_FAST = (
    "GELU epilogue of cuBLASLt: the hardware's tanh.approx errs by at most 2^-10.987 (PTX), half "
    "of which, times x, is the error of the result: (2^-11)^2 of x^2, which is on average at most "
    "3 times gelu(x)^2 for the normal inputs of the tests"
)


_TERMS = (
    "an fp32 expression of terms that may cancel, one of them a sum of k: at most 8 roundings and "
    "functions (exp, tanh, division, square root) of 2 eps each, relative to the terms: 16 eps; "
    "and the sum's k roundings of at most eps/2 of its magnitude, independent of each other, have "
    "a standard deviation of sqrt(k) eps/(2 sqrt 3), of which 2 sqrt(k) eps is nearly 7"
)
_SOFTMAX_GRAD = (
    "p (dp - sum(p dp)) with p rounded to the dtype: a relative error of at most eps/2 in the "
    "factor, one in each term of the sum, which is on average the smaller of the two, and one in "
    "the result: at most 3 eps/2, here 4 eps/2, squared"
)
_SHARE = (
    "share of n independent decisions that fall one way: its standard deviation is at most "
    "1/(2 sqrt n), of which 3/sqrt n is six"
)

_ATTENTION = (
    "softmax(q k^T) v and its gradients: an error of eps/2 of a score, whose magnitude is at most "
    "8 for the normal data of the tests, is one of 8 eps/2 of its probability; rounding the "
    "probability, its gradient, the score's gradient and the result adds eps/2 each. 12 eps/2, "
    "all in one direction: (6 eps)^2; and the fp32 sums"
)
_ATTENTION_STEPS = (
    "as attention, of steps that are merged in fp32: each rounds its result once more, by eps/2, "
    "and is weighted by e to the difference of two logarithms of at most 8 + log 256 < 16 in "
    "fp32, with an error of 16 eps(fp32) of the weight: 13 eps/2 and that, all in one direction"
)
_CHAIN = (
    "norm, linear layer, activation and linear layer, or their gradients: at most 8 roundings of "
    "eps/2 one after the other, each passed on with a gain of at most 5 (as GELU's; the gated and "
    "the squared ones have less at normal data): 8 * 5 (eps/2)^2; and the fp32 sums likewise"
)
_RECAST = (
    "to be divided by n: of n numbers that are known up to a small error, three are cast to the "
    "neighbour of their code, where the error carries them over a boundary of rounding: off by a "
    "quantum, at most eps of a value whose square is 4 times the mean: 3 * 4 eps^2"
)
_AMAX = (
    "the largest of the numbers errs as they do: by eps/2 where they are rounded to the dtype, and "
    "by less for their sums; twice that"
)
_CALIBRATED = (
    "an amax of sums of products, with and without the operands' casts: each product errs by at "
    "most eps, so the standard deviation of a sum does by at most eps/sqrt 6 of that of the sums, "
    "of which the largest is at least 2: 2 eps is ten times that"
)
_LAYER = (
    "a residual sum of two branches, each a chain of at most 16 roundings with those of attention "
    "(norm, projection, attention, projection, GELU, dropout, or their gradients): eps/2 each and "
    "all in one direction are 8 eps, doubled for gradients that cancel in a norm: (16 eps)^2; and "
    "the fp32 sums"
)
_FP8_LAYER = (
    "the branches of a layer, two chained GEMMs each: both operands of each of the four are "
    "rounded to FP8, every rounding adds its mean square: 8 (eps/2)^2; attention and GELU pass "
    "errors on with a gain of at most 2 in mean square"
)


def _sum(depth):
    return depth * EPS[F32] ** 2


TOLS: dict[tuple[str, torch.dtype], Tolerance] = {
    **{("round", d): Tolerance(_constant((EPS[d] / 2) ** 2), _ROUND) for d in EPS},
    ("sum", F32): Tolerance(_sum, _SUM),
    ("sum_tf32", F32): Tolerance(lambda k: (2 * TF32_EPS) ** 2 + _sum(k), _TF32),
    **{
        ("sum_fast", d): Tolerance(
            lambda k: (2 * math.ceil(k / MMA_DEPTH) * MMA_EPS) ** 2 + _sum(k), _FAST
        )
        for d in (E4M3, E5M2)
    },
    **{
        ("sum_split", d): Tolerance(
            lambda k: (2 * PROMOTION / MMA_DEPTH * MMA_EPS) ** 2 + _sum(k), _SPLIT
        )
        for d in (E4M3, E5M2)
    },
    ("gelu", F32): Tolerance(_constant((32 * EPS[F32]) ** 2), _GELU),
    ("gelu_fast", F32): Tolerance(_constant(3 * 2.0**-22), _GELU_FAST),
    ("terms", F32): Tolerance(lambda k: (16 + 2 * math.sqrt(k)) * EPS[F32], _TERMS),
    **{
        ("softmax_grad", d): Tolerance(_constant(4 * EPS[d] ** 2), _SOFTMAX_GRAD)
        for d in (F32, F16, BF16)
    },
    ("share", F32): Tolerance(lambda n: 3 / math.sqrt(n), _SHARE),
    **{
        ("attention", d): Tolerance(lambda k, e=EPS[d]: (6 * e) ** 2 + _sum(k), _ATTENTION)
        for d in (F32, F16, BF16)
    },
    **{
        ("attention_steps", d): Tolerance(
            lambda k, e=EPS[d]: (6.5 * e + 16 * EPS[F32]) ** 2 + _sum(k), _ATTENTION_STEPS
        )
        for d in (F32, F16, BF16)
    },
    ("attention_steps", torch.float64): Tolerance(
        _constant(1e-12),
        "of single elements, in float64: 23 roundings of eps = 2^-52, as above, relative to terms "
        "that are at most 2^7 times their sum in the data of the tests: 2^-40",
    ),
    **{
        ("layer", d): Tolerance(lambda k, e=EPS[d]: (16 * e) ** 2 + _sum(k), _LAYER)
        for d in (F32, F16, BF16)
    },
    **{
        ("chain", d): Tolerance(
            lambda k, e=EPS[d]: 8 * GELU_GAIN * ((e / 2) ** 2 + _sum(k)), _CHAIN
        )
        for d in (F32, F16, BF16)
    },
    **{("recast", d): Tolerance(_constant(12 * EPS[d] ** 2), _RECAST) for d in (E4M3, E5M2)},
    ("calibrated", E4M3): Tolerance(_constant(2 * EPS[E4M3]), _CALIBRATED),
    ("amax", F32): Tolerance(_constant(64 * EPS[F32]), "fp32 terms: " + _AMAX),
    ("amax", BF16): Tolerance(_constant(EPS[BF16]), _AMAX),
    # ---- FP8 training, against the same computation without quantization ----
    **{
        ("quantize", d): Tolerance(
            _constant((EPS[d] / 2) ** 2),
            "one rounding to FP8 with a scale that keeps the data in the normal range; "
            "subnormals lose at most half a quantum, which is smaller than that on average",
        )
        for d in (E4M3, E5M2)
    },
    **{
        ("half_step", d): Tolerance(
            _constant(EPS[d] / 2),
            "MXFP8: a group's largest magnitude lies between half of the largest number and that, "
            "where half a step is at most eps/2 of it",
        )
        for d in (E4M3, E5M2)
    },
    ("half_step_nvfp4", E4M3): Tolerance(
        _constant((1 + EPS[E4M3] / 2) / 6 + EPS[E4M3] / 16),
        "NVFP4: half of the step from 4 to 6, of a group whose largest magnitude is 6 times its "
        "scale; the scale is rounded to E4M3, which makes the step larger or saturates",
    ),
    **{
        ("casts_in_a_row", d): Tolerance(
            _constant(6 * EPS[d] / 2),
            "norms: each of the six casts behind a gradient of two linear layers moves its operand "
            "by at most half a step of it, and random products by as much of themselves",
        )
        for d in (E4M3, E5M2)
    },
    ("quantized_layer", E4M3): Tolerance(_constant(2 * 8 * (EPS[E4M3] / 2) ** 2), _FP8_LAYER),
    # ---- floors of assert_ref_ratio: where the naive error happens to vanish ----
    **{
        ("ratio_floor", d): Tolerance(_constant(EPS[d] / 2), "one rounding of the largest value")
        for d in EPS
    },
}


def tol(family, dtype, depth=1):
    """Bound of (family, dtype) for sums of `depth` terms."""
    return TOLS[family, dtype].bound(depth)
