# SPDX-License-Identifier: Apache-2.0
"""gemm: bias, bias gradient, GELU with its input kept, accumulation, FP8 output with amax."""

import numpy as np
import pytest
import torch
from buffers import FP8, LAYOUTS, Poisoned, floats, name_of, names_of
from comparators import assert_bits, assert_nmse
from gemm_problem import (
    COMBOS,
    FP8_PAIRS,
    HIGH_COMBOS,
    Problem,
    bias_dtype,
    fp8_operands,
    sum_bound,
)
from reference import FP8_MAX, as_f32, encode, gelu, narrow, to_torch
from thinning import case_id, in_turns
from tols import BF16, E4M3, E5M2, F16, F32, GELU_GAIN, tol

from transformer_engine import _core

GELU = {"epilogue": _core.EPILOGUE_GELU}

SIZES = [(16, 32, 64), (33, 65, 48), (5, 19, 320)]
PLACES = ["dense", "ragged"]  # of LAYOUTS
FP8_OUTPUTS = [(a, b, d) for a, b in FP8_PAIRS for d in FP8]


def gelu_bound(device):
    """Error of the activation itself."""
    return tol("gelu" if device == "cpu" else "gelu_fast", F32)


def refused_on_cuda(device, combo):
    """e5m2 from e4m3 operands does not exist in cuBLASLt."""
    return device == "cuda" and combo == (E4M3, E4M3, E5M2)


# ---- bias ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("combo", "sizes", "layout"), in_turns(COMBOS, SIZES, PLACES), ids=case_id)
def test_bias(device, combo, sizes, layout, rng):
    problem = Problem(rng, device, combo, sizes, layout=layout)
    bias, wide = problem.vector(problem.n, bias_dtype(combo))
    problem.run(bias=bias)
    problem.check(problem.exact(wide))


@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_bias_is_all_where_k_is_0(device, combo, rng):
    problem = Problem(rng, device, combo, (9, 21, 0))
    bias, wide = problem.vector(21, bias_dtype(combo))
    problem.run(bias=bias)
    assert_bits(problem.d.tensor, narrow(wide.numpy(), combo[2]).expand(9, 21).contiguous())
    assert problem.d.untouched()


# ---- bias gradient -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combo", "sizes", "a_transposed", "layout"),
    in_turns(HIGH_COMBOS, [(16, 32, 64), (33, 17, 300), (130, 8, 1000)], [True, False], PLACES),
    ids=case_id,
)
def test_bias_grad(device, combo, sizes, layout, a_transposed, rng):
    """Sums of a over k, beside a product that is as good as without them."""
    problem = Problem(rng, device, combo, sizes, transposed=(a_transposed, False), layout=layout)
    sums = problem.output((problem.m,), combo[0])
    problem.run(bias_grad=sums.tensor)
    exact = torch.from_numpy(as_f32(problem.values[0]).astype(np.float64)).sum(1)
    bound = tol("round", combo[0]) + sum_bound(device, combo[0], problem.k)
    assert_nmse(sums.tensor, exact, bound)
    assert sums.untouched()
    problem.check(problem.exact())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("combo", HIGH_COMBOS, ids=names_of)
def test_bias_grad_beside_accumulation(device, combo, accumulate, rng):
    """The weight gradient adds to what is there, the bias gradient never."""
    problem = Problem(rng, device, combo, (40, 24, 100), transposed=(True, False))
    old = torch.from_numpy(rng.standard_normal((40, 24))).to(combo[2])
    problem.d.put(old)
    sums = problem.output((40,), combo[0])
    for _ in range(2):
        problem.d.put(old)
        problem.run(bias_grad=sums.tensor, accumulate=accumulate)
    exact = torch.from_numpy(as_f32(problem.values[0]).astype(np.float64)).sum(1)
    # cuBLASLt rounds parts of the sums of fp16, too.
    roundings = 4 if device == "cuda" and combo[0] is F16 else 1
    bound = roundings * tol("round", combo[0]) + sum_bound(device, combo[0], 100)
    assert_nmse(sums.tensor, exact, bound)
    problem.check(problem.exact() + (old.double() if accumulate else 0))


@pytest.mark.parametrize("a_transposed", [True, False])
@pytest.mark.parametrize("combo", HIGH_COMBOS, ids=names_of)
def test_bias_grad_of_nothing_is_0(device, combo, a_transposed, rng):
    problem = Problem(rng, device, combo, (9, 5, 0), transposed=(a_transposed, False))
    sums = problem.output((9,), combo[0])
    problem.run(bias_grad=sums.tensor)
    assert_bits(sums.tensor, torch.zeros(9, dtype=combo[0]))
    assert_bits(problem.d.tensor, torch.zeros(9, 5, dtype=combo[2]))
    assert sums.untouched()


# ---- accumulation --------------------------------------------------------------------------------


@pytest.mark.parametrize(("combo", "sizes", "layout"), in_turns(COMBOS, SIZES, PLACES), ids=case_id)
def test_accumulate(device, combo, sizes, layout, rng):
    problem = Problem(rng, device, combo, sizes, layout=layout)
    old = torch.from_numpy(rng.standard_normal(sizes[:2])).to(combo[2])
    problem.d.put(old)
    problem.run(accumulate=True)
    problem.check(problem.exact() + old.double())


@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_accumulate_whole_numbers(device, combo, rng):
    """Twice the product: three exact sums, one rounding each."""
    problem = Problem(rng, device, combo, (34, 50, 80), whole=True)
    old = torch.from_numpy(rng.integers(-4, 5, (34, 50)).astype("float32"))
    problem.d.put(old)
    for _ in range(2):
        problem.run(accumulate=True)
        old = narrow((old.double() + problem.exact()).numpy(), combo[2]).float()
    assert_bits(problem.d.tensor + 0.0, old.to(combo[2]) + 0.0)


@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_accumulating_nothing_keeps_bits(device, combo, rng):
    problem = Problem(rng, device, combo, (12, 7, 0))
    old = torch.from_numpy(rng.standard_normal((12, 7))).to(combo[2])
    old[3, 4], old[5, 6] = float("nan"), -0.0
    problem.d.put(old)
    problem.run(accumulate=True)
    assert_bits(problem.d.tensor, old)
    assert problem.d.untouched()


# ---- GELU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combo", "sizes", "with_bias", "layout"),
    in_turns(COMBOS, SIZES, [False, True], PLACES),
    ids=case_id,
)
def test_gelu_and_aux(device, combo, sizes, with_bias, layout, rng):
    """The output, and what the activation was applied to."""
    problem = Problem(rng, device, combo, sizes, layout=layout)
    bias, wide = problem.vector(problem.n, bias_dtype(combo)) if with_bias else (None, None)
    aux = problem.output(sizes[:2], combo[2])
    arguments = {"bias": bias, "aux": aux.tensor, **GELU}
    if device == "cuda" and with_bias and combo[0] in FP8 and combo[2] == F32:
        with pytest.raises(NotImplementedError, match="gemm: aux and bias with FP8 operands"):
            problem.run(**arguments)
        return
    if device == "cuda" and combo in HIGH_COMBOS and combo[2] not in (combo[0], F32):
        with pytest.raises(NotImplementedError, match=r"made in f32: expected aux f32"):
            problem.run(**arguments)
        return
    problem.run(**arguments)
    before = problem.exact(wide)
    assert_nmse(aux.tensor, before, problem.bound())
    assert aux.untouched()
    exact = torch.from_numpy(gelu(before.numpy()))
    bound = (
        problem.bound() + GELU_GAIN * sum_bound(device, combo[0], problem.k) + gelu_bound(device)
    )
    assert_nmse(problem.d.tensor, exact, bound)
    assert problem.d.untouched()


@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_gelu_without_aux(device, combo, rng):
    problem = Problem(rng, device, combo, (33, 48, 64))
    problem.run(**GELU)
    exact = torch.from_numpy(gelu(problem.exact().numpy()))
    bound = problem.bound() + GELU_GAIN * sum_bound(device, combo[0], 64) + gelu_bound(device)
    assert_nmse(problem.d.tensor, exact, bound)


def test_gelu_of_numbers(device):
    """Far from 0 and at special values: x, 0, and no NaN from Inf - Inf."""
    infinity, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, 1.0, -1.0, 30.0, 1e4, infinity, -30.0, nan]], device=device)
    d = torch.empty(1, 8, device=device)
    _core.gemm(d, a=torch.ones(1, 1, device=device), b=x, **GELU)
    got = d.cpu()[0]
    near = torch.from_numpy(gelu(np.array([1.0, -1.0])))
    assert_nmse(got[1:3], near, gelu_bound(device) + tol("round", F32))
    assert got[0] == 0 and got[7].isnan()
    assert_bits(got[3:6], torch.tensor([30.0, 1e4, infinity]))
    assert got[6] == 0  # -30 has a result below the smallest float


# ---- FP8 output ----------------------------------------------------------------------------------


def fp8_scale(problem, values):
    """A scale that fills half of the range."""
    return 0.5 * FP8_MAX[problem.combo[2]] / float(values.abs().max())


@pytest.mark.parametrize(
    ("combo", "sizes", "activation", "layout"),
    in_turns(FP8_OUTPUTS, SIZES, [None, "bias", "bias gelu"], PLACES),
    ids=case_id,
)
def test_fp8_output(device, combo, sizes, activation, layout, rng):
    """Data and amax against float64; amax is that of the value before it is scaled."""
    problem = Problem(rng, device, combo, sizes, layout=layout)
    bias, wide = problem.vector(problem.n, BF16) if activation else (None, None)
    exact = problem.exact(wide)
    with_gelu = activation == "bias gelu"
    if with_gelu:
        exact = torch.from_numpy(gelu(exact.numpy()))
    scale = floats(device, fp8_scale(problem, exact))
    largest = Poisoned((1,), F32, device)
    largest.put(torch.zeros(1))
    arguments = {
        "bias": bias,
        "epilogue": int(with_gelu),
        "d_scale": scale,
        "d_amax": largest.tensor,
    }
    if refused_on_cuda(device, combo):
        with pytest.raises(NotImplementedError, match="gemm: d = e5m2 from e4m3 x e4m3"):
            problem.run(**arguments)
        return
    problem.run(**arguments)
    summed = GELU_GAIN * sum_bound(device, combo[0], problem.k) + (
        gelu_bound(device) if with_gelu else 0
    )
    decoded = problem.d.tensor.cpu().double() / scale.cpu().double()
    assert_nmse(decoded, exact, tol("round", combo[2]) + summed)
    assert_nmse(largest.tensor, exact.abs().max().reshape(1), tol("round", BF16) + summed)
    assert problem.d.untouched() and largest.untouched()


@pytest.mark.parametrize("with_gelu", [False, True])
@pytest.mark.parametrize("combo", FP8_OUTPUTS, ids=names_of)
def test_cpu_fp8_output_is_the_cast_of_the_f32_output(combo, with_gelu, rng):
    """Bit for bit: no rounding between the sum and the cast, amax of the unscaled value."""
    problem = Problem(rng, "cpu", combo, (37, 53, 320))
    wide = torch.empty(37, 53)
    operands = fp8_operands("cpu", problem.operands, problem.inverses)
    _core.gemm(wide, epilogue=int(with_gelu), **operands)
    scale = np.float32(fp8_scale(problem, wide) * 3)  # half of what is above saturates
    largest = floats("cpu", 0.0)
    problem.run(d_scale=floats("cpu", float(scale)), d_amax=largest, epilogue=int(with_gelu))
    assert_bits(problem.d.tensor, to_torch(encode(wide.numpy() * scale, combo[2]), combo[2]))
    assert_bits(largest, wide.abs().max().reshape(1))


@pytest.mark.parametrize("before", [0.0, 1.0e6])
def test_d_amax_accumulates(device, before, rng):
    problem = Problem(rng, device, (E4M3, E4M3, E4M3), (16, 16, 32), whole=True)
    largest = floats(device, before)
    problem.run(d_scale=floats(device, 1.0), d_amax=largest)
    assert_bits(largest, torch.maximum(torch.tensor([before]), problem.exact().abs().max().float()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("combo", FP8_OUTPUTS, ids=names_of)
def test_fp8_output_of_whole_numbers(device, combo, layout, rng):
    problem = Problem(rng, device, combo, (21, 35, 48), layout=layout, whole=True)
    if refused_on_cuda(device, combo):
        with pytest.raises(NotImplementedError, match="gemm: d = e5m2"):
            problem.run(d_scale=floats(device, 1.0))
        return
    problem.run(d_scale=floats(device, 64.0))
    expected = encode(problem.exact().numpy().astype(np.float32) * np.float32(64), combo[2])
    got = problem.d.tensor.cpu().view(torch.uint8)
    zero = (expected & 0x7F) == 0
    assert torch.equal(got[~zero], torch.from_numpy(expected)[~zero])
    assert ((got[zero] & 0x7F) == 0).all()
    assert problem.d.untouched()


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_fp8_output_of_nothing(device, dtype, rng):
    """K = 0: the bias alone, cast; amax is its largest magnitude."""
    combo = (E4M3, E5M2, dtype)
    problem = Problem(rng, device, combo, (5, 12, 0))
    bias, wide = problem.vector(12, BF16)
    largest = floats(device, 0.0)
    problem.run(bias=bias, d_scale=floats(device, 32.0), d_amax=largest)
    codes = to_torch(encode(wide.numpy().astype(np.float32) * np.float32(32), dtype), dtype)
    assert_bits(problem.d.tensor, codes.view(torch.uint8).expand(5, 12).contiguous().view(dtype))
    assert_bits(largest, wide.abs().max().float().reshape(1))


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
def test_aux_of_fp8_output(device, dtype, rng):
    """What the activation saw, in high precision, beside its FP8 result."""
    problem = Problem(rng, device, (E4M3, E4M3, E4M3), (32, 48, 64))
    aux = problem.output((32, 48), dtype)
    arguments = {"aux": aux.tensor, **GELU, "d_scale": floats(device, 16.0)}
    if device == "cuda" and dtype == F32:
        with pytest.raises(NotImplementedError, match="gemm: aux of dtype f32 with d e4m3"):
            problem.run(**arguments)
        return
    problem.run(**arguments)
    assert_nmse(aux.tensor, problem.exact(), problem.bound(dtype))
    assert aux.untouched()


# ---- all at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("combo", [*COMBOS, (E4M3, E4M3, E4M3)], ids=names_of)
def test_twice_the_same(device, combo, rng):
    problem = Problem(rng, device, combo, (70, 90, 128))
    bias, _ = problem.vector(90, bias_dtype(combo))
    arguments = {"bias": bias, **GELU}
    if combo[2] in FP8:
        arguments |= {"d_scale": floats(device, 8.0), "d_amax": floats(device, 0.0)}
    problem.check_repeats(**arguments)
