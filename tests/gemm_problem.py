# SPDX-License-Identifier: Apache-2.0
"""One GEMM for the tests of the operator: operands, poisoned outputs, call, and what is exact."""

import numpy as np
import torch
from buffers import FP8, Poisoned, floats, fp8_gemms, laid_out, name_of
from comparators import assert_bits, assert_nmse
from operands import operand
from reference import as_f32, quantize
from tols import BF16, E4M3, E5M2, F16, F32, tol

from transformer_engine import _core

HIGH_COMBOS = [
    *((F32, F32, d) for d in (F32, F16, BF16)),
    *((F16, F16, d) for d in (F32, F16, BF16)),
    *((BF16, BF16, d) for d in (F32, F16, BF16)),
]
FP8_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
FP8_COMBOS = [(a, b, d) for a, b in FP8_PAIRS for d in (F32, F16, BF16)]
COMBOS = HIGH_COMBOS + FP8_COMBOS


def bias_dtype(combo):
    """The dtype that the operator wants for its bias."""
    a, _, d = combo
    if a in FP8:
        return F16 if d == F16 else BF16
    return d


def sum_bound(device, dtype, k, *, fast=False, tf32=False):
    """Error of the sums over k: plain fp32, or what the tensor cores of the device do."""
    if device == "cpu":
        return tol("sum", F32, k)
    if dtype in FP8:
        return tol("sum_fast" if fast else "sum_split", dtype, k)
    return tol("sum_tf32" if tf32 and dtype == F32 else "sum", F32, k)


def fp8_operands(device, operands, inverses):
    """Keywords of a and b [n, k]: both are read row by row. A GEMM does not look at the scale."""
    found = {"b_transposed": True}
    for prefix, data, inverse in zip(("a_", "b_"), operands, inverses, strict=True):
        found |= operand(prefix, row=data, scales=floats(device, inverse, float("nan")))
    return found


class Problem:
    """d[m, n] = a[m, k] b[k, n] of one combination of dtypes, with random operands.

    Parameters
    ----------
    rng : numpy.random.Generator
    device : str
    combo : tuple
        dtypes of a, b and d.
    sizes : tuple of int
        m, n, k.
    transposed : tuple of bool
        How a and b are stored; FP8 always has (False, True).
    layout : str
        Of operands and outputs, one of LAYOUTS.
    whole : bool
        Operands of -1, 0 and 1, so that all sums are exact. Otherwise normal, and without signs
        where d is so small that cancellation in single elements would count.
    """

    def __init__(self, rng, device, combo, sizes, *, transposed=None, layout="dense", whole=False):
        self.device, self.combo, self.layout = device, combo, layout
        self.m, self.n, self.k = sizes
        fp8 = combo[0] in FP8
        self.transposed = (False, True) if fp8 or transposed is None else transposed
        shapes = [(self.m, self.k), (self.k, self.n)]
        self.inverses = [0.25, 2.0] if fp8 else [1.0, 1.0]
        self.values, self.operands = [], []
        for shape, dtype, flipped in zip(shapes, combo, self.transposed, strict=False):
            if whole:
                numbers = rng.integers(-1, 2, shape).astype(np.float64)
            else:
                numbers = rng.standard_normal(shape) * max(self.k, 1) ** -0.25
                numbers = np.abs(numbers) if self.m * self.n < 256 else numbers
            plain = torch.from_numpy(numbers).float()
            stored = quantize(plain, 1.0 if whole else 16.0, dtype) if fp8 else plain.to(dtype)
            self.values.append(stored)
            stored = stored.t().contiguous() if flipped else stored
            self.operands.append(laid_out(stored, layout, device))
        if fp8 and not whole:
            self.inverses = [2.0**-4, 2.0**-4]
        self.rng = rng
        self.d = self.output((self.m, self.n), combo[2])

    def output(self, shape, dtype):
        """Poisoned memory in the problem's layout."""
        return Poisoned(shape, dtype, self.device, layout=self.layout)

    def vector(self, length, dtype):
        """Random numbers in the problem's layout: (on the device, as float64)."""
        values = torch.from_numpy(self.rng.standard_normal(length)).to(dtype)
        return laid_out(values, self.layout, self.device), values.double()

    def run(self, **changes):
        """The call; asserts that exactly this GEMM ran, once, and in FP8 if its operands are."""
        a, b = self.operands
        arguments = {"a_transposed": self.transposed[0], "b_transposed": self.transposed[1]}
        if self.combo[0] in FP8:
            arguments |= fp8_operands(self.device, (a, b), self.inverses)
        else:
            arguments |= {"a": a, "b": b}
        _core.reset_counters()
        _core.gemm(self.d.tensor, **{**arguments, **changes})
        name = f"gemm.{self.device}.{name_of(self.combo[0])}.{name_of(self.combo[1])}"
        runs = 1 if self.m * self.n * self.k > 0 else 0
        if runs:  # a helper of the backend may run another GEMM, but never in FP8
            assert _core.counters().get(name, 0) >= 1
        if self.combo[0] not in FP8:
            assert fp8_gemms() == 0
        elif self.k > 0 or self.device == "cpu":
            assert fp8_gemms() == runs
        else:  # a bias alone may go through a product of zeros
            assert fp8_gemms() <= 1

    def check_repeats(self, **changes):
        """Two runs give the same bits."""
        self.run(**changes)
        first = self.d.tensor.clone()
        self.run(**changes)
        assert_bits(self.d.tensor, first)

    def exact(self, bias=None):
        """The product in float64."""
        a, b = (as_f32(values).astype(np.float64) for values in self.values)
        product = torch.from_numpy(a @ b) * (self.inverses[0] * self.inverses[1])
        return product if bias is None else product + bias

    def bound(self, dtype=None, **flags):
        """Allowed error of an output of `dtype` (that of d where None)."""
        rounding = tol("round", self.combo[2] if dtype is None else dtype)
        return rounding + sum_bound(self.device, self.combo[0], self.k, **flags)

    def check(self, exact, **flags):
        """Compare d with the float64 result."""
        assert_nmse(self.d.tensor, exact, self.bound(**flags))
        assert self.d.untouched()
