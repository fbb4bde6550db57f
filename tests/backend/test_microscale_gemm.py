# SPDX-License-Identifier: Apache-2.0
"""gemm of MXFP8 and NVFP4: the product of what the operands stand for, counted as emulated."""

import pytest
import torch
from buffers import HIGH, name_of, normal
from comparators import assert_bits, assert_nmse
from microscaled import MODES, SETTINGS, cast, mxfp8_values, nvfp4_values, one_usage
from tols import BF16, E4M3, E5M2, F16, F32, tol

from transformer_engine import _core

MXFP8, NVFP4 = MODES.values()
SHAPES = [(1, 1, 1), (16, 32, 48), (33, 17, 65), (130, 96, 257)]
LAYOUTS = {"forward": (0, 1), "grad_input": (0, 0), "grad_weight": (1, 0)}


def values_of(data, usage, shape):
    """What a cast operand stands for, in float64, as the matrix that was cast."""
    plain = {n: v.cpu() for n, v in data.items() if n not in (*SETTINGS, "shape")}
    codes, scales = plain[usage], plain[f"{usage}_scales"]
    if data["mode"] == MXFP8:
        return mxfp8_values(codes, scales, 1 if usage == "row" else 0).double()
    to_256 = bool(data["scales_to_256"])
    found = nvfp4_values(codes, scales, plain[f"{usage}_amax"], to_256=to_256)
    return (found if usage == "row" else found.T)[: shape[0], : shape[1]].double()


def operand(prefix, data):
    """Keywords of one operand of gemm."""
    return {prefix + name: value for name, value in data.items()}


def product(a, b, how, d, **more):
    """Multiply two matrices as cast; returns the exact product of what they stand for."""
    turned = LAYOUTS[how]
    usages = ("column" if turned[0] else "row"), ("row" if turned[1] else "column")
    exact = [values_of(x, usage, x["shape"]) for x, usage in zip((a, b), usages, strict=True)]
    exact = [x.T if t else x for x, t in zip(exact, turned, strict=True)]
    data = [
        one_usage({n: v for n, v in x.items() if n != "shape"}, u)
        for x, u in zip((a, b), usages, strict=True)
    ]
    _core.gemm(
        d,
        **operand("a_", data[0]),
        **operand("b_", data[1]),
        a_transposed=turned[0],
        b_transposed=turned[1],
        **more,
    )
    return exact[0] @ exact[1]


def made(rng, shape, mode, device, **how):
    """A random matrix, cast."""
    x = normal(rng, shape, BF16, device)
    return {**cast(x, mode, **how), "shape": shape}


def both(rng, mode, how, sizes, device, **options):
    """The operands of a product of these sizes."""
    m, n, k = sizes
    turned = LAYOUTS[how]
    a = made(rng, (k, m) if turned[0] else (m, k), mode, device, **options)
    b = made(rng, (n, k) if turned[1] else (k, n), mode, device, **options)
    return a, b


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_product(device, mode, how, sizes, rng):
    a, b = both(rng, MODES[mode], how, sizes, device)
    d = torch.empty(sizes[:2], dtype=F32, device=device)
    _core.reset_counters()
    exact = product(a, b, how, d)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, sizes[2] + 32))
    assert _core.counters()[f"emulated.{mode}"] == 1
    wide = "f32.f32" if device == "cpu" else "bf16.bf16"
    assert _core.counters()[f"gemm.{device}.{wide}"] == 1


@pytest.mark.parametrize("target", HIGH, ids=name_of)
@pytest.mark.parametrize("mode", MODES)
def test_bias_and_dtypes(device, mode, target, rng):
    sizes = (48, 40, 96)
    a, b = both(rng, MODES[mode], "forward", sizes, device)
    bias = normal(rng, 40, F16 if target is F16 else BF16, device)
    d = torch.empty(sizes[:2], dtype=target, device=device)
    exact = product(a, b, "forward", d, bias=bias) + bias.cpu().double()
    assert_nmse(d, exact, tol("round", target) + tol("sum", F32, 128))


@pytest.mark.parametrize("target", HIGH, ids=name_of)
@pytest.mark.parametrize("mode", MODES)
def test_accumulates(device, mode, target, rng):
    sizes = (32, 64, 64)
    a, b = both(rng, MODES[mode], "grad_weight", sizes, device)
    before = normal(rng, sizes[:2], target, device)
    d = before.clone()
    exact = product(a, b, "grad_weight", d, accumulate=True) + before.cpu().double()
    assert_nmse(d, exact, tol("round", target) + tol("sum", F32, 64))


@pytest.mark.parametrize("rows", ["a", "b", "both"])
def test_an_amax_for_each_row(device, rows, rng):
    """Multiplied out with their amaxes, in fp32."""
    sizes = (33, 48, 64)
    options = {"row_scaled": True}
    a = made(rng, (33, 64), NVFP4, device, **(options if rows != "b" else {}))
    b = made(rng, (48, 64), NVFP4, device, **(options if rows != "a" else {}))
    d = torch.empty(sizes[:2], device=device)
    _core.reset_counters()
    exact = product(a, b, "forward", d)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, 64))
    assert _core.counters()["emulated.mixed"] == 1


def test_e5m2_gradients(device, rng):
    sizes = (32, 48, 64)
    a = made(rng, (32, 64), MXFP8, device, dtype=E5M2)
    b = made(rng, (64, 48), MXFP8, device)
    d = torch.empty(sizes[:2], device=device)
    exact = product(a, b, "grad_input", d)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, 64))


def test_transform_leaves_the_product(device, rng):
    """A weight gradient of transformed operands is that of the operands, but for the casts."""
    x, y = (normal(rng, (64, 32), BF16, device) for _ in range(2))
    a, b = ({**cast(v, NVFP4, rht=True), "shape": (64, 32)} for v in (x, y))
    d = torch.empty(32, 32, device=device)
    product(a, b, "grad_weight", d)
    assert_nmse(d, x.cpu().double().T @ y.cpu().double(), 2 * tol("half_step_nvfp4", E4M3) ** 2)


@pytest.mark.parametrize("mode", MODES)
def test_depth_of_0(device, mode):
    a, b = (
        {**cast(torch.empty(shape, device=device), MODES[mode]), "shape": shape}
        for shape in ((16, 0), (32, 0))
    )
    d = torch.full((16, 32), torch.nan, device=device)
    product(a, b, "forward", d)
    assert_bits(d.cpu(), torch.zeros(16, 32))


@pytest.mark.parametrize("ranges", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("how", LAYOUTS)
def test_scales_to_256(device, how, ranges, rng):
    """Each operand is read by the largest scale that its groups may have."""
    m, n, k = sizes = SHAPES[-1]
    turned = LAYOUTS[how]
    shapes = ((k, m) if turned[0] else (m, k)), ((n, k) if turned[1] else (k, n))
    a, b = (
        made(rng, shape, NVFP4, device, to_256=to_256)
        for shape, to_256 in zip(shapes, ranges, strict=True)
    )
    d = torch.empty(sizes[:2], dtype=F32, device=device)
    exact = product(a, b, how, d)
    assert_nmse(d, exact, tol("round", F32) + tol("sum", F32, k + 32))
