# SPDX-License-Identifier: Apache-2.0
"""Products by their definition in torch, of every pair of operands, against float64."""

import itertools

import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, Poisoned, floats, laid_out, normal
from comparators import assert_bits, assert_nmse, assert_within
from definitions import by_definition
from microscaled import MODES as MICRO, cast as cast_micro
from reference import amax as largest_magnitude, as_f32, encode, gelu
from scaled_output import MODES as TILES, Scaled
from thinning import pairs
from tols import BF16, E4M3, E5M2, F16, F32, tol

from transformer_engine import _core

PLAIN = {"f32": F32, "f16": F16, "bf16": BF16}
KINDS = (*PLAIN, "e4m3", "e5m2", *TILES, *MICRO, "nvfp4 rows")
WAYS = tuple(itertools.product((False, True), repeat=2))


class Operand:
    """One operand: keywords of the form that a product reads, and its values in float64.

    `shape` is that of the matrix before it is transposed: [m, k] or [k, n]. The values are those of
    the C code's `dequantize`.
    """

    def __init__(self, rng, name, kind, shape, transposed, layout="dense"):
        stored = shape[::-1] if transposed else shape
        x = normal(rng, stored, F32)
        by_rows = transposed == (name == "b")
        form = "row" if by_rows else "column"
        self.keywords = {f"{name}_transposed": int(transposed)}
        self.kind, values = kind, torch.empty(stored)
        if kind in PLAIN:
            given = laid_out(x.to(PLAIN[kind]), layout, "cpu")
            self.keywords[name], values = given, given.double()
        else:
            made = self._cast(rng, x, kind, form)
            _core.dequantize(values, **made)
            self.keywords |= {f"{name}_{key}": value for key, value in made.items()}
        self.values = values.double().t() if transposed else values.double()

    @staticmethod
    def _cast(rng, x, kind, form):
        if kind in MICRO or kind == "nvfp4 rows":
            mode, options = MICRO[kind.split()[0]], {"row_scaled": kind == "nvfp4 rows"}
            if form == "column":
                options = {}
            options |= {"to_256": True} if mode == MICRO["nvfp4"] and rng.random() < 0.5 else {}
            return cast_micro(x, mode, usage=form, **options)
        lines = tuple(x.shape) if form == "row" else tuple(x.shape[::-1])
        pad = -lines[1] % 16
        if kind in TILES:
            made = Scaled(kind, tuple(x.shape), E4M3, "cpu", form, pad=(pad, pad)).arguments()
            _core.quantize(x, **made)
            return made
        dtype = E4M3 if kind == "e4m3" else E5M2
        data = torch.empty(lines[0], lines[1] + pad, dtype=torch.uint8).view(dtype)
        made = {"mode": _core.SCALING_TENSOR, form: data, f"{form}_scales": torch.empty(2)}
        _core.quantize(x, **made, scale=floats("cpu", float(rng.uniform(8, 80))))
        return made


class Product:
    """Operands [m, k] and [k, n] of two kinds, and their product in float64."""

    def __init__(self, rng, kinds, sizes=(17, 24, 48), ways=(False, True), layout="dense"):
        m, n, self.k = sizes
        self.a = Operand(rng, "a", kinds[0], (m, self.k), ways[0], layout)
        self.b = Operand(rng, "b", kinds[1], (self.k, n), ways[1], layout)
        self.rng, self.shape, self.layout = rng, (m, n), layout
        self.exact = self.a.values @ self.b.values
        self.terms = self.a.values.abs() @ self.b.values.abs()

    def d(self, dtype, values=None):
        made = Poisoned(self.shape, dtype, "cpu", layout=self.layout)
        if values is not None:
            made.put(values)
        return made

    def run(self, d, **more):
        with by_definition("gemm"):
            self.run_natively(d, **more)

    def run_natively(self, d, **more):
        _core.gemm(d.tensor, **self.a.keywords, **self.b.keywords, **more)
        assert d.untouched()

    def bias(self, dtype):
        """A vector [n], in the dtype that a product to `dtype` takes."""
        kinds = self.a.kind, self.b.kind
        narrow = dtype if kinds[0] == kinds[1] and kinds[0] in PLAIN else BF16
        return normal(self.rng, self.shape[1:], F16 if dtype == F16 else narrow)


# ---- every pair of operands ----------------------------------------------------------------------


@pairs(a=KINDS, b=KINDS, ways=WAYS, d=HIGH, layout=tuple(LAYOUTS))
def test_product(a, b, ways, d, layout, rng):
    sizes = *rng.choice((1, 16, 33, 130), 2).tolist(), int(rng.choice((16, 48, 144)))
    product = Product(rng, (a, b), sizes, ways, layout)
    result, bias = product.d(d), product.bias(d)
    product.run(result)
    assert_within(result.tensor, product.exact, product.terms, product.k)
    product.run(result, bias=bias)
    exact, terms = product.exact + bias.double(), product.terms + bias.double().abs()
    assert_within(result.tensor, exact, terms, product.k)


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("kind", [*PLAIN, "e4m3", "block_1d", "mxfp8", "nvfp4"])
def test_accumulates(kind, ways, rng):
    product = Product(rng, (kind, kind), ways=ways)
    for dtype in HIGH:
        before = normal(rng, product.shape, dtype)
        result = product.d(dtype, before)
        product.run(result, accumulate=True)
        terms = product.terms + before.double().abs()
        assert_within(result.tensor, product.exact + before.double(), terms, product.k)


@pytest.mark.parametrize("depth", [8, 24, 40])
@pytest.mark.parametrize(
    "kinds", [("bf16", "nvfp4"), ("nvfp4", "bf16"), ("mxfp8", "nvfp4"), ("nvfp4", "row")], ids=str
)
def test_padded_apart(kinds, depth, rng):
    """Rows of 16 are filled up in one operand, or in both."""
    for ways in WAYS:
        product = Product(rng, kinds, (5, 16, depth), ways)
        result = product.d(F32)
        product.run(result)
        assert_within(result.tensor, product.exact, product.terms, depth)


# ---- epilogues -----------------------------------------------------------------------------------


@pairs(kind=(*PLAIN, "e4m3", "row", "mxfp8", "nvfp4"), d=HIGH, with_bias=(False, True))
def test_gelu_and_what_is_before(kind, d, with_bias, rng):
    product = Product(rng, (kind, kind), (33, 40, 48))
    result, before = product.d(d), product.d(F32)
    bias = product.bias(d) if with_bias else None
    product.run(result, epilogue=1, aux=before.tensor, bias=bias)
    exact = product.exact if bias is None else product.exact + bias.double()
    assert_within(before.tensor, exact, product.terms + exact.abs(), product.k)
    through = torch.from_numpy(gelu(before.tensor.double().numpy()))
    assert_nmse(result.tensor, through, tol("round", d) + tol("gelu", F32))
    assert before.untouched()


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize("kind", PLAIN)
def test_bias_grad(kind, ways, rng):
    product = Product(rng, (kind, kind), (33, 16, 130), ways)
    sums = Poisoned((33,), PLAIN[kind], "cpu")
    product.run(product.d(F32), bias_grad=sums.tensor)
    assert_within(sums.tensor, product.a.values.sum(1), product.a.values.abs().sum(1), product.k)
    assert sums.untouched()


@pytest.mark.parametrize("recorded", [0.0, 1e6, float("nan")])
@pytest.mark.parametrize("d", FP8)
def test_fp8_output(d, recorded, rng):
    """Codes and amax are those of the fp32 values, which another call writes."""
    product = Product(rng, ("e4m3", "e5m2"), (33, 48, 64))
    scale, amax = floats("cpu", 3.0), floats("cpu", recorded)
    result, before = product.d(d), product.d(F32)
    product.run(before)
    product.run(result, d_scale=scale, d_amax=amax)
    codes = encode(as_f32(before.tensor) * 3, d)
    assert_bits(result.tensor.view(torch.uint8), torch.from_numpy(codes))
    found = largest_magnitude(before.tensor)
    assert amax.item() == (1e6 if recorded == 1e6 else float(found))
    product.run(result, d_scale=scale)  # the amax is not wanted
    assert_bits(result.tensor.view(torch.uint8), torch.from_numpy(codes))


# ---- nothing to sum, nothing to write ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f32", "bf16", "e4m3"])
def test_no_depth(kind, rng):
    """The bias alone is written, or nothing; sums of nothing are 0."""
    product = Product(rng, (kind, kind), (5, 16, 0))
    d = F32 if kind == "e4m3" else PLAIN[kind]
    bias, before = product.bias(d), normal(rng, product.shape, d)
    before[0, 0] = -0.0
    for options in ({"bias": bias}, {}, {"accumulate": True}):
        sums = Poisoned((5,), PLAIN[kind], "cpu") if kind in PLAIN else None
        more = options | ({} if sums is None else {"bias_grad": sums.tensor})
        found, expected = product.d(d, before), product.d(d, before)
        product.run(found, **more)
        assert sums is None or not sums.tensor.any()
        product.run_natively(expected, **more)
        assert_bits(found.tensor, expected.tensor)


@pytest.mark.parametrize("sizes", [(0, 16, 16), (16, 0, 16), (0, 0, 0)], ids=str)
def test_no_rows_or_columns(sizes, rng, counters):
    product = Product(rng, ("bf16", "bf16"), sizes)
    product.run(product.d(F32))
    assert not [name for name in counters() if name.startswith(("gemm", "emulated"))]


@pytest.mark.parametrize("kinds", [("f32", "f32"), ("e5m2", "e4m3"), ("mxfp8", "bf16")], ids=str)
def test_nan_and_inf_go_where_they_go(kinds, rng):
    product = Product(rng, kinds, (16, 16, 32))
    if kinds[0] == "f32":
        product.a.keywords["a"][3, 5], product.a.keywords["a"][4, 1] = torch.nan, torch.inf
    else:
        product.a.keywords["a_row"].view(torch.uint8)[3, 5] = 0x7F
    found, expected = product.d(F32), product.d(F32)
    product.run(found)
    product.run_natively(expected)
    assert found.tensor.isnan()[3].all() and not found.tensor[5:].isnan().any()
    assert_bits(found.tensor.isnan(), expected.tensor.isnan())
    assert_bits(found.tensor.isinf(), expected.tensor.isinf())


# ---- counters ------------------------------------------------------------------------------------

COUNTED = {
    ("bf16", "bf16"): {"gemm.cpu.bf16.bf16"},
    ("f16", "f16"): {"gemm.cpu.f16.f16"},
    ("bf16", "f32"): {"gemm.cpu.f32.f32", "emulated.mixed"},
    ("e4m3", "e4m3"): {"gemm.cpu.f32.f32", "emulated.tensor"},
    ("e5m2", "e4m3"): {"gemm.cpu.f32.f32", "emulated.tensor"},
    ("e5m2", "e5m2"): {"gemm.cpu.f32.f32", "emulated.mixed"},
    ("row", "row"): {"gemm.cpu.f32.f32", "emulated.row"},
    ("block_1d", "block_1d"): {"gemm.cpu.f32.f32", "emulated.block_1d"},
    ("block_1d", "block_2d"): {"gemm.cpu.f32.f32", "emulated.block_1d"},
    ("block_2d", "block_2d"): {"gemm.cpu.f32.f32", "emulated.mixed"},
    ("mxfp8", "mxfp8"): {"gemm.cpu.f32.f32", "emulated.mxfp8"},
    ("nvfp4", "nvfp4"): {"gemm.cpu.f32.f32", "emulated.nvfp4"},
    ("nvfp4 rows", "nvfp4"): {"gemm.cpu.f32.f32", "emulated.mixed"},
    ("mxfp8", "bf16"): {"gemm.cpu.f32.f32", "emulated.mixed"},
    ("row", "block_1d"): {"gemm.cpu.f32.f32", "emulated.mixed"},
}


@pytest.mark.parametrize("kinds", COUNTED, ids=str)
def test_is_counted(kinds, rng, counters):
    """What ran, and what was multiplied out; mixed is what the C code calls so."""

    def counted():
        names = {n: v for n, v in counters().items() if n.startswith(("gemm", "emulated"))}
        _core.reset_counters()
        return names

    product = Product(rng, kinds)
    counted()
    product.run_natively(product.d(F32))
    is_mixed = "emulated.mixed" in counted()
    product.run(product.d(F32))
    found = counted()
    assert found == dict.fromkeys(COUNTED[kinds], 1)
    assert ("emulated.mixed" in found) == is_mixed
    product.run(product.d(F32), multiplied_out=True)
    emulated = {name for name in COUNTED[kinds] if name.startswith("emulated")}
    assert counted() == dict.fromkeys(COUNTED[kinds] | (emulated or {"emulated.mixed"}), 1)
