# SPDX-License-Identifier: Apache-2.0
"""gemm: products of all dtypes, shapes and layouts. The rest is in test_gemm_epilogue.py."""

import numpy as np
import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, Poisoned, floats, fp8_gemms, laid_out, name_of, names_of
from comparators import assert_bits
from gemm_problem import COMBOS, FP8_COMBOS, HIGH_COMBOS, Problem, fp8_operands
from hypothesis import given, strategies as st
from operands import operand
from reference import narrow
from refusals import check_refused
from thinning import case_id, in_turns
from tols import BF16, E4M3, E5M2, F16, F32

from transformer_engine import _core

TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]
SIZES = [(1, 1, 16), (16, 32, 64), (17, 33, 48), (65, 127, 320), (200, 40, 32), (3, 300, 16)]


def check_whole(problem, **changes):
    """Sums of small integers have one right answer, bit for bit."""
    problem.run(**changes)
    expected = narrow(problem.exact().numpy(), problem.combo[2])
    assert_bits(problem.d.tensor + 0.0, expected + 0.0)  # the sign of a zero sum is free
    assert problem.d.untouched()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_random(device, combo, sizes, rng):
    problem = Problem(rng, device, combo, sizes)
    problem.run()
    problem.check(problem.exact())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_whole_numbers(device, combo, sizes, rng):
    check_whole(Problem(rng, device, combo, sizes, whole=True))


@pytest.mark.parametrize(
    ("combo", "transposed", "sizes"),
    in_turns(HIGH_COMBOS, TRANSPOSES, [(1, 1, 1), (33, 65, 47), (13, 8, 300)]),
    ids=case_id,
)
def test_transposes(device, combo, transposed, sizes, rng):
    check_whole(Problem(rng, device, combo, sizes, transposed=transposed, whole=True))
    problem = Problem(rng, device, combo, sizes, transposed=transposed)
    problem.run()
    problem.check(problem.exact())


@pytest.mark.parametrize(
    ("combo", "layout", "transposed"), in_turns(HIGH_COMBOS, LAYOUTS, TRANSPOSES), ids=case_id
)
def test_layouts(device, combo, layout, transposed, rng):
    check_whole(
        Problem(rng, device, combo, (34, 50, 70), transposed=transposed, layout=layout, whole=True)
    )


@pytest.mark.parametrize(
    ("combo", "layout", "sizes"),
    in_turns(FP8_COMBOS, LAYOUTS, [(34, 50, 80), (7, 3, 16)]),
    ids=case_id,
)
def test_fp8_layouts(device, combo, layout, sizes, rng):
    check_whole(Problem(rng, device, combo, sizes, layout=layout, whole=True))


@pytest.mark.parametrize("transposed", TRANSPOSES)
@pytest.mark.parametrize("combo", FP8_COMBOS, ids=names_of)
def test_fp8_forms(device, combo, transposed, rng):
    """That form is read whose rows run along k, with its own scales; the other may be anything."""
    problem, nan = Problem(rng, device, combo, (34, 50, 80), whole=True), float("nan")
    arguments = {"a_transposed": transposed[0], "b_transposed": transposed[1]}
    by_rows = not transposed[0], transposed[1]
    operands = zip("ab", problem.operands, problem.inverses, by_rows, strict=True)
    for name, data, inverse, by_row in operands:
        read, other = ("row", "column") if by_row else ("column", "row")
        junk = torch.full(data.shape[::-1], nan, device=device).to(data.dtype)
        arguments |= operand(f"{name}_", **{read: data, other: junk})
        arguments[f"{name}_{read}_scales"] = floats(device, inverse, nan)
        arguments[f"{name}_{other}_scales"] = floats(device, nan, nan)
    _core.gemm(problem.d.tensor, **arguments)
    assert_bits(problem.d.tensor + 0.0, narrow(problem.exact().numpy(), combo[2]) + 0.0)


@given(data=st.data())
def test_any_problem(device, data):
    combo = data.draw(st.sampled_from(COMBOS))
    size, depth = st.integers(0, 50), st.integers(0, 70)
    k = data.draw(st.integers(0, 4)) * 16 if combo[0] in FP8 else data.draw(depth)
    sizes = data.draw(size), data.draw(size), k
    problem = Problem(
        np.random.default_rng(data.draw(st.integers(0, 2**31))),
        device,
        combo,
        sizes,
        transposed=data.draw(st.sampled_from(TRANSPOSES)),
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        whole=True,
    )
    check_whole(problem)


@pytest.mark.parametrize(
    "combo", [(F32, F32, F32), (BF16, BF16, BF16), (E4M3, E5M2, BF16)], ids=names_of
)
def test_several_blocks_and_threads(device, combo, rng):
    problem = Problem(rng, device, combo, (390, 530, 592))
    problem.check_repeats()
    problem.check(problem.exact())


@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_twice_the_same(device, combo, rng):
    Problem(rng, device, combo, (70, 90, 128)).check_repeats()


@pytest.mark.parametrize("sizes", [(0, 8, 16), (8, 0, 16), (0, 0, 0), (8, 24, 0), (8, 3, 0)])
@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_empty(device, combo, sizes, rng):
    """Nothing to do without rows or columns; a product over nothing is 0."""
    problem = Problem(rng, device, combo, sizes, whole=True)
    check_whole(problem)
    assert not _core.counters().get("gemm.cpu.f32.f32", 0)


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("combo", FP8_COMBOS, ids=names_of)
def test_fast_and_split_accumulation(device, combo, fast, rng):
    problem = Problem(rng, device, combo, (80, 96, 512))
    problem.run(fast_accumulation=fast)
    problem.check(problem.exact(), fast=fast)


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32(device, tf32, rng):
    problem = Problem(rng, device, (F32, F32, F32), (80, 96, 500))
    problem.run(allow_tf32=tf32)
    problem.check(problem.exact(), tf32=tf32)


@pytest.mark.parametrize("flag", ["fast_accumulation", "allow_tf32"])
def test_cpu_has_one_precision(flag, rng):
    combo = (E4M3, E4M3, F32) if flag == "fast_accumulation" else (F32, F32, F32)
    problem = Problem(rng, "cpu", combo, (20, 30, 320))
    problem.run()
    first = problem.d.tensor.clone()
    problem.run(**{flag: True})
    assert_bits(problem.d.tensor, first)


# ---- values that are not finite ------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [*HIGH, *FP8], ids=name_of)
def test_not_finite(device, dtype, value, rng):
    """NaN and Inf reach their own row and nothing else (e4m3 has no Inf: it is left out)."""
    if dtype == E4M3 and value == value:
        value = float("nan")
    combo = (dtype, E4M3 if dtype in FP8 else dtype, F32)
    problem = Problem(rng, device, combo, (40, 24, 32))
    problem.values[0][7, 5] = value
    problem.values[1] = problem.values[1].float().abs().to(combo[1])
    if dtype == E5M2 and value == value:  # a saturating cast makes no Inf: write its code
        problem.values[0].view(torch.uint8)[7, 5] = 0x7C if value > 0 else 0xFC
    b = problem.values[1].t().contiguous() if dtype in FP8 else problem.values[1]
    problem.operands = [laid_out(t, "dense", device) for t in (problem.values[0], b)]
    problem.transposed = (False, dtype in FP8)
    problem.run()
    d = problem.d.tensor.cpu()
    column_is_zero = problem.values[1].float()[5] == 0
    expected = torch.full((24,), value).where(~column_is_zero, torch.tensor(float("nan")))
    assert_bits(d[7], expected, any_nan=True)
    others = torch.arange(40) != 7
    assert d[others].isfinite().all() and (d[others] != 0).any()


# ---- refusals ------------------------------------------------------------------------------------

E4, E5 = (lambda *s: torch.zeros(*s).to(E4M3)), (lambda *s: torch.zeros(*s).to(E5M2))
ONE = torch.ones(1)
GELU = {"epilogue": _core.EPILOGUE_GELU}
FP8_CALL = {"a": None, "b": None} | fp8_operands("cpu", (E4(4, 16), E4(6, 16)), (1.0, 1.0))
WRONG = {
    "inner sizes": (
        ValueError,
        r"d: \[4, 6\] from a \[4, 5\] and b \[3, 6\]: inner sizes must agree",
        {"b": torch.zeros(3, 6)},
    ),
    "outer sizes": (ValueError, r"d: \[4, 6\] from a \[5, 5\]", {"a": torch.zeros(5, 5)}),
    "FP8 that is said to be none": (
        TypeError,
        "b: dtype e4m3, expected f32, f16 or bf16",
        {"b": E4(5, 6)},
    ),
    "integers": (
        TypeError,
        "a: dtype i32, expected f32, f16 or bf16",
        {"a": torch.zeros(4, 5, dtype=torch.int32), "b": torch.zeros(5, 6, dtype=torch.int32)},
    ),
    "no scale of a": (
        ValueError,
        "a_row_scales: is missing",
        {**FP8_CALL, "a_row_scales": None},
    ),
    "no scale of b": (
        ValueError,
        "b_row_scales: is missing",
        {**FP8_CALL, "b_row_scales": None},
    ),
    "FP8 k": (
        ValueError,
        "a: k = 15 of quantized operands, expected a multiple of 16",
        {**FP8_CALL, "a_row": E4(4, 15), "b_row": E4(6, 15)},
    ),
    "FP8 b": (
        ValueError,
        "b_column: is missing: .* say which is read",
        {**FP8_CALL, "b_transposed": False},
    ),
    "FP8 a": (
        ValueError,
        "a_column: is missing: .* say which is read",
        {**FP8_CALL, "a_transposed": True},
    ),
    "FP8 d of f32": (ValueError, "d: FP8 output e4m3 needs FP8 operands and d_scale", {"d": E4M3}),
    "FP8 d without scale": (
        ValueError,
        "d: FP8 output e4m3 needs FP8 operands and d_scale",
        {**FP8_CALL, "d": E4M3},
    ),
    "FP8 d accumulating": (
        ValueError,
        "d: FP8 output e4m3 .* can not accumulate",
        {**FP8_CALL, "d": E4M3, "d_scale": ONE, "accumulate": True},
    ),
    "FP8 d of what is multiplied out": (
        TypeError,
        "d: dtype e4m3 from operands that are multiplied out",
        {**FP8_CALL, "a_row": E5(4, 16), "b_row": E5(6, 16), "d": E4M3, "d_scale": ONE},
    ),
    "GELU of what is multiplied out": (
        ValueError,
        "epilogue: 1 with operands that are multiplied out",
        {**FP8_CALL, "a_row": E5(4, 16), "b_row": E5(6, 16), "epilogue": 1},
    ),
    "integer d": (TypeError, "d: dtype i32, expected f32, f16 or bf16", {"d": torch.int32}),
    "bf16 scale": (
        TypeError,
        "a_row_scales: dtype bf16, expected f32",
        {**FP8_CALL, "a_row_scales": torch.ones(2, dtype=BF16)},
    ),
    "short bias": (
        ValueError,
        "bias: .*length 5, expected a vector of 6",
        {"bias": torch.zeros(5)},
    ),
    "bf16 bias": (
        TypeError,
        "bias: dtype bf16, expected f32",
        {"bias": torch.zeros(6, dtype=BF16)},
    ),
    "f32 bias of FP8": (
        TypeError,
        "bias: dtype f32, expected bf16",
        {**FP8_CALL, "bias": torch.zeros(6)},
    ),
    "bf16 bias of f16": (
        TypeError,
        "bias: dtype bf16, expected f16",
        {**FP8_CALL, "d": F16, "bias": torch.zeros(6, dtype=BF16)},
    ),
    "long bias_grad": (
        ValueError,
        "bias_grad: .*length 6, expected a vector of 4",
        {"bias_grad": torch.zeros(6)},
    ),
    "bf16 bias_grad": (
        TypeError,
        "bias_grad: dtype bf16 with f32 operands, expected the same",
        {"bias_grad": torch.zeros(4, dtype=BF16)},
    ),
    "FP8 bias_grad": (
        TypeError,
        "bias_grad: dtype f32 with e4m3 operands",
        {**FP8_CALL, "bias_grad": torch.zeros(4)},
    ),
    "aux alone": (
        ValueError,
        "aux: there is no activation",
        {"aux": torch.zeros(4, 6)},
    ),
    "aux shape": (
        ValueError,
        r"aux: shape \[4, 5\], expected \[4, 6\]",
        {"aux": torch.zeros(4, 5), **GELU},
    ),
    "byte aux": (
        TypeError,
        "aux: dtype u8, expected f32, f16 or bf16",
        {"aux": torch.zeros(4, 6, dtype=torch.uint8), **GELU},
    ),
    "FP8 aux": (
        TypeError,
        "aux: dtype e4m3, expected f32, f16 or bf16",
        {"aux": E4(4, 6), **GELU},
    ),
    "bias accumulating": (
        ValueError,
        "accumulate: into f32: only without bias or activation",
        {"bias": torch.zeros(6), "accumulate": True},
    ),
    "gelu accumulating": (
        ValueError,
        "accumulate: into f32",
        {**GELU, "accumulate": True},
    ),
    "no operand": (ValueError, "a: ", {"a": None}),
    "number": (TypeError, "b: expected a torch.Tensor, got <class 'float'>", {"b": 1.0}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case, counters):
    exception, text, changes = WRONG[case]
    output = Poisoned((4, 6), changes.get("d", F32), device)
    good = {"d": output.tensor, "a": torch.zeros(4, 5), "b": torch.zeros(5, 6)}
    changes = {**changes, "d": output.tensor}
    check_refused("gemm", device, (exception, text, changes), good, output)
    assert counters() == {} and fp8_gemms() == 0


@pytest.mark.parametrize("which", ["d", "aux", "bias_grad"])
def test_strided_output_is_refused(device, which):
    a, b = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
    d, memory = torch.zeros(4, 4, device=device), torch.zeros(4, 8, device=device)
    bad = memory[0, ::2] if which == "bias_grad" else memory[:, ::2]
    keywords = {} if which == "d" else {which: bad, "epilogue": int(which == "aux")}
    with pytest.raises(ValueError, match=f"gemm: {which}: its strides .* contiguous"):
        _core.gemm(bad if which == "d" else d, a=a, b=b, **keywords)
    assert (memory == 0).all() and (d == 0).all()


def test_views_are_read(device, rng):
    """An expanded gradient, a transposed view, one with its negative bit set, a strided bias."""
    a = torch.from_numpy(rng.integers(-2, 3, (1, 12)).astype("float32")).to(device).expand(5, 12)
    b = torch._neg_view(torch.from_numpy(rng.integers(-2, 3, (7, 12)).astype("float32")).to(device))
    bias = torch.arange(14.0, device=device)[::2]
    d = torch.empty(5, 7, device=device)
    _core.gemm(d, a=a, b=b.t(), bias=bias)
    assert_bits(d + 0.0, a @ b.resolve_neg().t() + bias + 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["b", "d", "bias", "aux", "a_row"])
def test_mixed_devices(which):
    arguments = {name: torch.zeros(4, 4, device="cuda") for name in ("d", "a", "b")}
    arguments[which] = torch.zeros(4, 4)[0 if which == "bias" else slice(None)]
    other = "a" if which == "d" else which  # the first tensor says where the call runs
    with pytest.raises(ValueError, match=f"gemm: {other}: it is on c"):
        _core.gemm(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("combo", COMBOS, ids=names_of)
def test_cuda_equals_cpu(combo, rng):
    """Whole numbers: the same bits whatever the order of the sums."""
    host = Problem(rng, "cpu", combo, (500, 300, 784), whole=True)
    host.run()
    d = torch.empty(500, 300, dtype=combo[2], device="cuda")
    a, b = (data.cuda() for data in host.operands)
    if combo[0] in FP8:
        _core.gemm(d, **fp8_operands("cuda", (a, b), host.inverses))
    else:
        _core.gemm(d, a=a, b=b, b_transposed=host.transposed[1])
    assert_bits(d + 0.0, host.d.tensor + 0.0)
    assert fp8_gemms() == (2 if combo[0] in FP8 else 0)
