# SPDX-License-Identifier: Apache-2.0
"""The table of tolerances and the comparators: what they mean, and that they can fail."""

import math

import numpy as np
import pytest
import torch
from buffers import GUARD, LAYOUTS, POISON, Poisoned, name_of
from comparators import assert_bits, assert_grad64, assert_nmse, assert_ref_ratio, nmse
from reference import NAN_CODE, encode, nearest, to_numpy, to_torch
from tols import BF16, E4M3, E5M2, EPS, F16, F32, TOLS, tol

# ---- eps -----------------------------------------------------------------------------------------


def test_eps_of_bf16():
    """Distance from 1 to the next number, not the rounding error, which is half of it."""
    assert EPS[BF16] == 2**-7
    assert torch.tensor(1 + 2**-7, dtype=BF16).item() == 1 + 2**-7
    assert torch.tensor(1 + 2**-8, dtype=BF16).item() == 1


@pytest.mark.parametrize("dtype", EPS, ids=name_of)
def test_eps_is_torchs(dtype):
    assert EPS[dtype] == torch.finfo(dtype).eps
    one = to_torch(np.ones(1).astype(to_numpy(torch.ones(1).to(dtype)).dtype), dtype)
    code = one.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
    assert (code + 1).view(dtype).float().item() == 1 + EPS[dtype]


@pytest.mark.parametrize("entry", TOLS, ids=lambda e: f"{e[0]}-{name_of(e[1])}")
def test_every_entry_is_derived(entry):
    """A positive bound that does not shrink with more terms, never above 1, and a reason.

    A share of n draws is the better known the more there are.
    """
    bounds = [tol(*entry, depth) for depth in (16, 256, 1024)]
    assert all(0 < bound <= 1 for bound in bounds)
    assert bounds == sorted(bounds, reverse=entry[0] == "share")
    assert len(TOLS[entry].derivation) > 30


def test_rounding_bound_holds_and_is_tight(rng):
    values = torch.from_numpy(rng.standard_normal(20_000))
    for dtype in (F32, F16, BF16):
        error = nmse(values.to(dtype), values)
        assert tol("round", dtype) / 10 < error < tol("round", dtype)


def test_sum_bound_holds_and_is_not_idle(rng):
    """Plain fp32 accumulation, one product after the other, in numpy."""
    k = 500
    a, b = (rng.standard_normal((k, 3000)).astype(np.float32) for _ in range(2))
    total = np.zeros(3000, np.float32)
    for x, y in zip(a, b, strict=True):
        total += x * y
    exact = (a.astype(np.float64) * b).sum(0)
    error = nmse(torch.from_numpy(total), torch.from_numpy(exact))
    assert tol("sum", F32, k) / 1000 < error < tol("sum", F32, k)


# ---- comparators ---------------------------------------------------------------------------------


def test_assert_bits(rng):
    values = torch.from_numpy(rng.standard_normal((5, 7)))
    for dtype in (F32, F16, BF16, E4M3, E5M2):
        tensor = values.to(dtype)
        assert_bits(tensor, tensor.clone())
        other = tensor.clone()
        other.view(torch.uint8)[3, 2] ^= 1
        with pytest.raises(AssertionError, match="1 of 35 elements differ"):
            assert_bits(other, tensor)
    with pytest.raises(AssertionError, match="float16, expected torch.float32"):
        assert_bits(values.to(F16), values.to(F32))
    with pytest.raises(AssertionError, match="expected torch.Size"):
        assert_bits(values[:4], values)


def test_assert_bits_of_zeros_and_nans():
    with pytest.raises(AssertionError, match="bits 0x0 "):
        assert_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    nans = torch.tensor([0x7FC00000, 0x7F800001], dtype=torch.int32).view(F32)
    with pytest.raises(AssertionError):
        assert_bits(nans[:1], nans[1:])
    assert_bits(nans[:1], nans[1:], any_nan=True)
    with pytest.raises(AssertionError):
        assert_bits(nans[:1], torch.ones(1), any_nan=True)


def test_assert_nmse(rng):
    exact = torch.from_numpy(rng.standard_normal(1000))
    bound = tol("round", BF16)
    assert_nmse(exact.to(BF16), exact, bound)
    with pytest.raises(AssertionError, match="normalised error"):
        assert_nmse(exact.to(BF16) * 1.01, exact, bound)
    with pytest.raises(AssertionError, match="normalised error nan"):
        assert_nmse(torch.full((1000,), math.nan), exact, bound)
    with pytest.raises(AssertionError, match="not finite"):
        assert_nmse(exact, exact * math.inf, bound)
    with pytest.raises(AssertionError, match="normalised error"):
        assert_nmse(torch.ones(3), torch.zeros(3), bound)
    assert nmse(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 2.0])) == 8 / 5


def test_assert_ref_ratio(rng):
    exact = torch.from_numpy(rng.standard_normal(1000))
    naive = exact.to(BF16)
    assert_ref_ratio(exact + 1.9 * (naive - exact), naive, exact, BF16)
    with pytest.raises(AssertionError, match="exceeds 2 x naive"):
        assert_ref_ratio(exact + 20 * (naive - exact), naive, exact, BF16)
    with pytest.raises(AssertionError, match="error nan"):
        assert_ref_ratio(exact * math.nan, naive, exact, BF16)


def test_assert_grad64(rng):
    x, w, g = (torch.from_numpy(rng.standard_normal((6, 6))).float() for _ in range(3))
    inputs, bound = {"x": x, "w": w}, 2 * tol("sum", F32, 6)
    grads = {"w": g.t() @ x, "x": g @ w}
    assert_grad64(grads, _linear, inputs, g, bound)
    with pytest.raises(AssertionError, match="gradient of x"):
        assert_grad64({"x": grads["x"] * 1.001}, _linear, inputs, g, bound)


def _linear(x, w):
    return x @ w.t()


# ---- references and buffers ----------------------------------------------------------------------


def test_encode_by_hand():
    """Anchors for what everything else is compared with."""
    values = np.array([0.0, -0.0, 1.0, 448.0, 449.0, 1e9, -np.inf, np.nan, 2.0**-10, 1.5 * 2.0**-9])
    codes = encode(values.astype(np.float32), E4M3)
    assert codes.tolist() == [0, 0x80, 0x38, 0x7E, 0x7E, 0x7E, 0xFE, NAN_CODE, 0, 2]
    values = np.array([1.0, 57344.0, 61440.0, np.inf, -1e30, np.nan, 2.0**-17, 3 * 2.0**-17])
    codes = encode(values.astype(np.float32), E5M2)
    assert codes.tolist() == [0x3C, 0x7B, 0x7B, 0x7B, 0xFB, NAN_CODE, 0, 2]


def test_nearest_by_hand():
    assert nearest(1 + 2.0**-8, BF16) == 0x3F80 and nearest(1 + 3 * 2.0**-8, BF16) == 0x3F82
    assert nearest(1 + 2.0**-8 + 2.0**-50, BF16) == 0x3F81
    assert nearest(-65519.99, F16) == 0xFBFF and nearest(65520.0, F16) == 0x7C00
    assert nearest(1e9, E4M3) == 0x7E and nearest(-0.0, E5M2) == 0x80


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poisoned(layout, rng):
    skew, gap = LAYOUTS[layout]
    memory = Poisoned((3, 5), BF16, "cpu", layout=layout)
    assert memory.unwritten() and memory.untouched()
    assert memory.tensor.stride() == (5 + gap, 1)
    assert memory.tensor.storage_offset() == GUARD + skew
    memory.tensor.fill_(1.0)
    assert memory.untouched() and not memory.unwritten()
    assert (memory.memory.view(torch.uint8) == POISON).sum() == memory.memory.nbytes - 2 * 15
    start = 2 * (GUARD + skew)
    memory.memory.view(torch.uint8)[start - 1] = 0
    assert not memory.untouched()
