# SPDX-License-Identifier: Apache-2.0
"""Casts with a scale per row, or per tile of 1 x 128 or 128 x 128, against numpy and ml_dtypes."""

import itertools

import numpy as np
import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, RAGGED, Poisoned, name_of, normal
from comparators import assert_bits, assert_nmse, assert_within
from gemm_problem import sum_bound
from reference import as_f32, quiet
from scaled_output import MODES, OPTIONS, Scaled
from thinning import case_id, in_turns, pairs_first, triples
from tols import BF16, E4M3, E5M2, F16, F32, tol

from transformer_engine import _core


def cast(values, mode, dtype, usage="both", *, pad=(0, 0), layout="dense", **options):
    """Cast and check; returns what was cast to."""
    made = Scaled(mode, tuple(values.shape), dtype, values.device, usage, pad=pad, layout=layout)
    epsilon, power_2 = options.get("epsilon", 0.0), options.get("power_2", False)
    _core.quantize(values, amax_epsilon=epsilon, power_2_scale=power_2, **made.arguments())
    made.check(values, epsilon, power_2)
    return made


def special(rng, shape, dtype, kind):
    """A matrix with what is hard for a scale: tiny, zero, Inf, NaN, or one outlier."""
    values = rng.standard_normal(shape).astype(np.float32)
    if kind == "subnormal":
        values *= float(torch.finfo(dtype).smallest_normal) / 4
    elif kind == "zero":
        values[rng.random(shape) < 0.9] = 0.0
        values[: shape[0] // 2] = 0.0
    elif kind == "large":
        values *= float(torch.finfo(dtype).max) / 8
    elif kind in ("inf", "nan") and values.size:
        values.flat[rng.integers(values.size, size=3)] = np.inf if kind == "inf" else np.nan
    elif kind == "outlier" and values.size:
        values.flat[rng.integers(values.size)] = 3e4
    return torch.from_numpy(values).to(dtype)


KINDS = ("normal", "subnormal", "zero", "large", "inf", "nan", "outlier")


@pytest.mark.parametrize(
    ("mode", "source", "dtype", "usage"),
    in_turns(MODES, HIGH, FP8, ("row", "column", "both")),
    ids=case_id,
)
@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (1, 16), (130, 200), (257, 129)], ids=str
)
def test_cast(device, mode, source, dtype, usage, shape, rng):
    for epsilon, power_2 in OPTIONS:
        values = normal(rng, shape, source, device, 3.0)
        cast(values, mode, dtype, usage, epsilon=epsilon, power_2=power_2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_values(device, mode, dtype, kind, rng):
    for source in HIGH:
        values = special(rng, (150, 300), source, kind).to(device)
        for power_2 in (False, True):
            made = cast(values, mode, dtype, power_2=power_2)
            data, _ = made.forms["row"]
            wrong = ~data.tensor.float().isfinite() & ~values.isnan()
            assert not wrong.any(), "NaN where the input had none"


@pytest.mark.parametrize("turns", [1000, pytest.param(4000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_small_matrices(device, mode, turns, rng):
    """Sizes around those of tiles and vectors, any contents."""
    sizes = np.array([*RAGGED, 2, 3, 5, 30, 100, 128])
    for turn in range(turns):
        shape = tuple(int(n) for n in rng.choice(sizes[sizes < 40], 2))
        if turn % 40 == 0:
            shape = tuple(int(n) for n in rng.choice(sizes, 2))
        source, dtype = HIGH[turn % 3], FP8[turn // 3 % 2]
        values = special(rng, shape, source, KINDS[turn % len(KINDS)]).to(device)
        epsilon = 0.25 if turn % 11 == 0 else 0.0
        cast(values, mode, dtype, pad=(turn % 5, turn % 3), epsilon=epsilon, power_2=turn % 2 == 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, mode, layout, rng):
    source = Poisoned((131, 261), BF16, device, layout=layout)
    values = source.put(normal(rng, (131, 261), BF16, device))
    cast(values, mode, E4M3, pad=(3, 13), layout=layout)
    assert source.untouched()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)], ids=str)
def test_nothing(device, mode, shape):
    made = Scaled(mode, shape, E4M3, device)
    _core.quantize(torch.zeros(shape, device=device), **made.arguments())
    for data, scales in made.forms.values():
        assert data.untouched() and scales.untouched()
        assert (scales.tensor == 0).all()  # those of lines without elements too


@pytest.mark.parametrize("mode", MODES)
def test_column_sums_and_noop(device, mode, rng):
    values = normal(rng, (300, 200), BF16, device)
    made, sums = Scaled(mode, (300, 200), E5M2, device), Poisoned((200,), F32, device)
    _core.quantize(values, bias_grad=sums.tensor, **made.arguments())
    made.check(values)
    exact = values.double()
    assert_within(sums.tensor, exact.sum(0), exact.abs().sum(0), 300)
    noop = torch.ones(1, device=device)
    poisoned = Scaled(mode, (300, 200), E5M2, device)
    _core.quantize(values, noop=noop, **poisoned.arguments())
    for data, scales in poisoned.forms.values():
        assert (data.tensor.view(torch.uint8) == 0xAA).all()
        assert (scales.tensor.view(torch.uint8) == 0xAA).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("target", HIGH, ids=name_of)
@quiet
def test_dequantize(device, mode, dtype, target, rng):
    shape = (130, 270)
    made = cast(normal(rng, shape, F32, device), mode, dtype, pad=(2, 14))
    for name, (data, scales) in made.forms.items():
        output = Poisoned(shape, target, device)
        keywords = {name: data.tensor, f"{name}_scales": scales.tensor}
        mode_code = made.arguments()["mode"]
        _core.dequantize(output.tensor, mode=mode_code, **keywords)
        assert output.untouched()
        used = shape[1] if name == "row" else shape[0]
        codes = as_f32(data.tensor[:, :used])
        rows, columns = np.indices(codes.shape)
        inverse = as_f32(scales.tensor)
        if mode == "row":
            factors = inverse[0][rows]
        elif mode == "block_1d":
            factors = inverse[columns // 128, rows]
        else:
            factors = inverse[rows // 128, columns // 128]
        wanted = torch.from_numpy(codes * factors)
        assert_bits(output.tensor, (wanted if name == "row" else wanted.T).contiguous().to(target))


def scaled_operand(prefix, values, mode, dtype, by_rows):
    """Keywords of a GEMM's operand, and its values as they were cast, in float64."""
    usage = "row" if by_rows else "column"
    rows, columns = values.shape
    fill = -(columns if by_rows else rows) % 16
    made = cast(values, mode, dtype, usage, pad=(fill, fill))
    data, scales = made.forms[usage]
    keywords = {
        f"{prefix}_{usage}": data.tensor,
        f"{prefix}_{usage}_scales": scales.tensor,
        f"{prefix}_mode": made.arguments()["mode"],
    }
    output = torch.empty(rows, columns, device=values.device)
    plain = {key.removeprefix(f"{prefix}_"): value for key, value in keywords.items()}
    _core.dequantize(output, **plain)
    return keywords, output.double()


PAIRS = [
    ("row", "row"),
    ("block_1d", "block_1d"),
    ("block_1d", "block_2d"),
    ("block_2d", "block_1d"),
]


# Operands are decoded, multiplied and stored by code of their own each.
@triples(
    pair=PAIRS,
    target=[F32, BF16, F16],
    dtypes=[(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)],
    sizes=[(128, 256, 384), (64, 96, 160), (17, 9, 200), (1, 130, 48), (40, 1, 129)],
)
def test_gemm(device, pair, target, dtypes, sizes, rng, counters):
    """D = a b, both as they are stored and transposed, with and without a bias."""
    m, n, k = sizes
    for a_transposed, b_transposed in itertools.product((0, 1), repeat=2):
        a = normal(rng, (k, m) if a_transposed else (m, k), F32, device)
        b = normal(rng, (n, k) if b_transposed else (k, n), F32, device)
        a_words, a_exact = scaled_operand("a", a, pair[0], dtypes[0], not a_transposed)
        b_words, b_exact = scaled_operand("b", b, pair[1], dtypes[1], bool(b_transposed))
        a_exact = a_exact.T if a_transposed else a_exact
        b_exact = b_exact.T if b_transposed else b_exact
        bias = normal(rng, (n,), F16 if target == F16 else BF16, device) if a_transposed else None
        d = Poisoned((m, n), target, device)
        _core.reset_counters()
        _core.gemm(
            d.tensor, a_transposed=a_transposed, b_transposed=b_transposed, bias=bias,
            **a_words, **b_words,
        )  # fmt: skip
        assert d.untouched()
        names = [name_of(dtype) for dtype in dtypes]
        assert counters()[f"gemm.{device}.{names[0]}.{names[1]}"] == 1
        exact, terms = a_exact @ b_exact, a_exact.abs() @ b_exact.abs()
        if bias is not None:
            exact, terms = exact + bias.double(), terms + bias.double().abs()
        check_product(d.tensor, exact, terms, k)


@pytest.mark.parametrize(
    ("pair", "with_bias", "sizes"),
    pairs_first(PAIRS, [True, False], [(16, 256, 8192), (72, 144, 16384), (1, 8, 24592)]),
    ids=case_id,
)
def test_long_sums_of_few_tiles(device, pair, with_bias, sizes, rng):
    """Where cuBLASLt would split k: it offers nothing for rows with a bias unless asked again."""
    m, n, k = sizes
    a = normal(rng, (m, k), F32, device)
    b = normal(rng, (n, k), F32, device)
    a_words, a_exact = scaled_operand("a", a, pair[0], E4M3, True)
    b_words, b_exact = scaled_operand("b", b, pair[1], E4M3, True)
    bias = normal(rng, (n,), BF16, device) if with_bias else None
    d = Poisoned((m, n), BF16, device)
    _core.gemm(d.tensor, b_transposed=1, bias=bias, **a_words, **b_words)
    assert d.untouched()
    exact, terms = a_exact @ b_exact.T, a_exact.abs() @ b_exact.abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    check_product(d.tensor, exact, terms, k)


def check_product(d, exact, terms, k):
    """Sums in fp32 on the CPU; on Hopper those of its accumulator, which cuBLASLt promotes."""
    if d.is_cuda:
        assert_nmse(d, exact, tol("round", d.dtype) + sum_bound("cuda", E4M3, k))
    else:
        assert_within(d, exact, terms, k)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("target", [F32, BF16], ids=name_of)
def test_gemm_accumulates(device, pair, target, rng):
    m, n, k = 72, 144, 272
    a = normal(rng, (m, k), F32, device)
    b = normal(rng, (n, k), F32, device)
    a_words, a_exact = scaled_operand("a", a, pair[0], E4M3, True)
    b_words, b_exact = scaled_operand("b", b, pair[1], E5M2, True)
    before = normal(rng, (m, n), target, device)
    d = before.clone()
    _core.gemm(d, b_transposed=1, accumulate=1, **a_words, **b_words)
    exact = before.double() + a_exact @ b_exact.T
    terms = before.double().abs() + a_exact.abs() @ b_exact.abs().T
    check_product(d, exact, terms, k + 1)


REFUSED = {
    "a scale": (r"scale: it is given", {"scale": torch.ones(1)}),
    "partials": (r"partials: it is given", {"partials": torch.ones(_core.AMAX_PARTIALS)}),
    "an amax": (r"amax: the mode measures", {"amax": torch.zeros(1)}),
    "no scales": (r"row_scales: is missing", {"row_scales": None}),
    "too few": (r"row_scales: ndim 2, shape \[1, 3\], expected", {"row_scales": torch.ones(1, 3)}),
    "a vector": (r"row_scales: ndim 1, shape", {"row_scales": torch.ones(8)}),
    "no data": (r"column_scales: there is no column", {"column_scales": torch.ones(1, 256)}),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_refused(mode, case):
    text, changes = REFUSED[case]
    made = Scaled(mode, (8, 256), E4M3, "cpu", "row")
    keywords = made.arguments()
    if case == "no data":
        shape = {"row": (2, 256), "block_1d": (1, 256), "block_2d": (2, 4)}[mode]
        changes = {"column_scales": torch.ones(shape)}
    with pytest.raises(ValueError, match=text):
        _core.quantize(torch.ones(8, 256), **{**keywords, **changes})


def test_no_fp8_output_of_rows():
    a, _ = scaled_operand("a", torch.ones(16, 16), "row", E4M3, True)
    b, _ = scaled_operand("b", torch.ones(16, 16), "row", E4M3, True)
    d = torch.empty(16, 16, dtype=E4M3)
    with pytest.raises(TypeError, match="scaled by rows or tiles"):
        _core.gemm(d, d_scale=torch.ones(1), b_transposed=1, **a, **b)
