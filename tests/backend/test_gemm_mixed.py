# SPDX-License-Identifier: Apache-2.0
"""gemm of operands that no kernel reads together: the product of what each stands for, in fp32."""

import itertools

import microscaled
import pytest
import torch
from buffers import HIGH, name_of, normal
from comparators import assert_bits, assert_nmse, assert_repeats
from reference import scales_shape
from tols import BF16, E4M3, E5M2, F16, F32, tol

from transformer_engine import _core

LAYOUTS = {"forward": (0, 1), "grad_input": (0, 0), "grad_weight": (1, 0)}
MODES = ("none", "tensor", "row", "block_1d", "block_2d", "mxfp8", "nvfp4")
NATIVE = {("block_1d", "block_2d"), ("block_2d", "block_1d")}
PAIRS = [p for p in itertools.product(MODES, MODES) if p[0] != p[1] and p not in NATIVE]
SIZES = (33, 47, 65)


def padded(size):
    """What GEMMs want of k."""
    return -(-size // 16) * 16


def quantized(x, mode, usage, dtype):
    """One form of a matrix, as keywords of ``_core.dequantize``."""
    if mode in microscaled.MODES:
        return microscaled.cast(x, microscaled.MODES[mode], usage=usage, dtype=dtype)
    major, minor = x.shape if usage == "row" else x.shape[::-1]
    data = torch.empty(major, padded(minor), dtype=dtype, device=x.device)
    sizes = (2,) if mode == "tensor" else scales_shape(mode, *data.shape)
    scales = torch.empty(sizes, device=x.device)
    found = {"mode": getattr(_core, f"SCALING_{mode.upper()}"), usage: data}
    found[f"{usage}_scales"] = scales
    measured = microscaled.partials(x) if mode == "tensor" else None
    _core.quantize(x, partials=measured, **found)
    return found


def made(x, mode, usage, dtype=E4M3):
    """Keywords of an operand without their prefix, and its values in float64."""
    if mode == "none":
        return {"": x}, x.cpu().double()
    data = quantized(x, mode, usage, dtype)
    values = torch.empty(x.shape, device=x.device)
    _core.dequantize(values, **data)
    return data, values.cpu().double()


def named(prefix, data):
    return {f"{prefix}_{name}" if name else prefix: value for name, value in data.items()}


def run(rng, device, modes, how, *, sizes=SIZES, source=BF16, dtypes=(E4M3, E4M3)):
    """Keywords of a product, and what it is exactly."""
    m, n, k = sizes
    turned = LAYOUTS[how]
    shapes = ((k, m) if turned[0] else (m, k)), ((n, k) if turned[1] else (k, n))
    usages = ("column" if turned[0] else "row"), ("row" if turned[1] else "column")
    call, exact = {"a_transposed": turned[0], "b_transposed": turned[1]}, []
    for i, prefix in enumerate("ab"):
        x = normal(rng, shapes[i], source, device)
        data, values = made(x, modes[i], usages[i], dtypes[i])
        call |= named(prefix, data)
        exact.append(values.T if turned[i] else values)
    return call, exact[0] @ exact[1]


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("modes", PAIRS, ids="-".join)
def test_product(device, modes, how, rng):
    call, exact = run(rng, device, modes, how)
    d = torch.empty(SIZES[:2], device=device)
    _core.reset_counters()
    _core.gemm(d, **call)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, SIZES[2]))
    assert _core.counters()["emulated.mixed"] == 1
    if device != "cpu":
        assert _core.counters()[f"gemm.{device}.f32.f32"] == 1


@pytest.mark.parametrize("mode", ["tensor", "row", "block_1d"])
def test_two_e5m2(device, mode, rng):
    call, exact = run(rng, device, (mode, mode), "forward", dtypes=(E5M2, E5M2))
    d = torch.empty(SIZES[:2], device=device)
    _core.reset_counters()
    _core.gemm(d, **call)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, SIZES[2]))
    assert _core.counters()["emulated.mixed"] == 1


def test_squares_of_both(device, rng):
    call, exact = run(rng, device, ("block_2d", "block_2d"), "forward")
    d = torch.empty(SIZES[:2], device=device)
    _core.reset_counters()
    _core.gemm(d, **call)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, SIZES[2]))
    assert _core.counters()["emulated.mixed"] == 1


@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("target", HIGH, ids=name_of)
def test_dtypes_and_bias(device, source, target, rng):
    """The operand in high precision is of any dtype, and so is the result."""
    call, exact = run(rng, device, ("none", "tensor"), "forward", source=source)
    bias = normal(rng, SIZES[1], F16 if target is F16 else BF16, device)
    d = torch.empty(SIZES[:2], dtype=target, device=device)
    _core.gemm(d, bias=bias, **call)
    bound = tol("round", target) + tol("sum", F32, SIZES[2]) + tol("round", bias.dtype)
    assert_nmse(d, exact + bias.cpu().double(), bound)


@pytest.mark.parametrize("how", LAYOUTS)
def test_two_dtypes_of_high_precision(device, how, rng):
    m, n, k = SIZES
    turned = LAYOUTS[how]
    a = normal(rng, (k, m) if turned[0] else (m, k), F32, device)
    b = normal(rng, (n, k) if turned[1] else (k, n), BF16, device)
    exact = [x.T if t else x for x, t in zip((a.cpu(), b.cpu()), turned, strict=True)]
    d = torch.empty(m, n, device=device)
    _core.reset_counters()
    _core.gemm(d, a=a, b=b, a_transposed=turned[0], b_transposed=turned[1])
    bound = tol("round", F32) + tol("sum", F32, k)
    assert_nmse(d, exact[0].double() @ exact[1].double(), bound)
    assert _core.counters()["emulated.mixed"] == 1


@pytest.mark.parametrize("target", HIGH, ids=name_of)
@pytest.mark.parametrize("modes", [("tensor", "none"), ("nvfp4", "block_1d")], ids="-".join)
def test_accumulates(device, target, modes, rng):
    call, exact = run(rng, device, modes, "grad_weight")
    before = normal(rng, SIZES[:2], target, device)
    d = before.clone()
    _core.gemm(d, accumulate=True, **call)
    bound = tol("round", target) + tol("sum", F32, SIZES[2])
    assert_nmse(d, exact + before.cpu().double(), bound)


@pytest.mark.parametrize("sizes", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_empty(device, sizes, rng):
    call, _ = run(rng, device, ("none", "tensor"), "forward", sizes=sizes)
    d = torch.full(sizes[:2], torch.nan, device=device)
    _core.gemm(d, **call)
    assert_bits(d.cpu(), torch.zeros(sizes[:2]))


def test_strided_and_repeated(device, rng):
    call, exact = run(rng, device, ("none", "mxfp8"), "forward", sizes=(33, 47, 64))
    wide = torch.full((33, 100), torch.nan, dtype=BF16, device=device)
    wide[:, 3:67] = call["a"]
    call["a"] = wide[:, 3:67]
    d = torch.empty(33, 47, device=device)
    assert_repeats(lambda: [_core.gemm(d, **call) or d.clone()])
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, 64))


def test_high_precision_is_not_padded(device, rng):
    call, _ = run(rng, device, ("none", "tensor"), "forward", sizes=(8, 8, 40))
    call["a"] = torch.zeros(8, 48, dtype=BF16, device=device)
    call["b_row"] = call["b_row"][:, :32]
    with pytest.raises(ValueError, match="inner sizes must agree"):
        _core.gemm(torch.empty(8, 8, device=device), **call)
