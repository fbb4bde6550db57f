# SPDX-License-Identifier: Apache-2.0
"""`general_gemm`: the bits of modules, and every combination of its arguments in float64."""

import random

import pytest
import torch
from buffers import normal
from comparators import assert_bits, assert_nmse
from device_kinds import every_device, our_kernels
from pytorch.helpers import assert_same_bits, assert_same_gemm, gemm_counts
from tex_cases import assert_same_data
from tols import BF16, E4M3, E5M2, F16, F32, tol

import transformer_engine.pytorch as te
import transformer_engine.pytorch.tensor as tensors
from transformer_engine import _core
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.plugin.core import BackendImplKind, OpImpl, get_registry, with_preference
from transformer_engine.pytorch.cpp_extensions.gemm import general_gemm, general_grouped_gemm
from transformer_engine.pytorch.custom_recipes.gemm import custom_gemm
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
    CurrentScalingQuantizerRef,
)
from transformer_engine.pytorch.tensor.recipes import cast_of, format_of

pytestmark = every_device

HIGH = (F32, F16, BF16)
LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
BOTH = {"rowwise": True, "columnwise": True}

# ---- beside modules ------------------------------------------------------------------------------

RECIPES = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "tiles": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
COUNTED = {"mxfp8": "emulated.mxfp8", "nvfp4": "emulated.nvfp4"}
TOKENS, IN, OUT = 64, 128, 96


def as_cast(recipe, device, role, values):
    """A tensor as a linear layer casts it for its GEMMs, in both forms."""
    cast = cast_of(quantization_of(recipe), role)
    quantizer = format_of(cast).make(cast, torch.device(device), False)
    quantizer.set_usage(**BOTH)
    return quantizer(values)


def runs(recipe):
    """Runs of a GEMM in the format since the counters were reset."""
    if recipe in COUNTED:
        return _core.counters().get(COUNTED[recipe], 0)
    return gemm_counts()[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_a_linear_layer(device, name, bias, rng):
    """Output and gradients of `te.Linear` are the products of the quantized tensors."""
    recipe = RECIPES[name]
    layer = te.Linear(IN, OUT, bias=bias, params_dtype=BF16, device=device)
    x = normal(rng, (2, TOKENS // 2, IN), BF16, device).requires_grad_()
    dy = normal(rng, (2, TOKENS // 2, OUT), BF16, device)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    sources = {"input": x.detach(), "weight": layer.weight.detach(), "gradient": dy}
    found = {role: as_cast(recipe, device, role, t) for role, t in sources.items()}
    fast = quantization_of(recipe).fast
    products = (
        ("TN", "weight", "input", y.detach(), _core.LINEAR_FAST_OUTPUT),
        ("NN", "weight", "gradient", x.grad, _core.LINEAR_FAST_GRAD_INPUT),
        ("NT", "input", "gradient", layer.weight.grad, _core.LINEAR_FAST_GRAD_WEIGHT),
    )
    for layout, a, b, expected, way in products:
        added = layer.bias.detach() if bias and layout == "TN" else None
        _core.reset_counters()
        made, *rest = general_gemm(
            found[a],
            found[b],
            out_dtype=BF16,
            layout=layout,
            bias=added,
            grad=layout != "TN",
            use_split_accumulator=not fast & way,
        )
        assert runs(name) == 1, layout
        assert rest == [None, None, None] and made.shape == expected.shape
        assert_same_bits(made, expected, layout)


@pytest.mark.parametrize("dtype", HIGH)
def test_bits_of_a_linear_layer_without_a_recipe(device, dtype, rng):
    layer = te.Linear(IN, OUT, params_dtype=dtype, device=device)
    x = normal(rng, (TOKENS, IN), dtype, device).requires_grad_()
    dy = normal(rng, (TOKENS, OUT), dtype, device)
    y = layer(x)
    y.backward(dy)
    made = general_gemm(layer.weight, x, bias=layer.bias)[0]
    dx = general_gemm(layer.weight, dy, layout="NN", grad=True)[0]
    dw, db, *_ = general_gemm(x, dy, layout="NT", grad=True, bias=layer.bias)
    pairs = ((made, y, IN), (dx, x.grad, OUT), (dw, layer.weight.grad, TOKENS))
    for ours, expected, depth in (*pairs, (db, layer.bias.grad, TOKENS)):
        assert not ours.requires_grad
        assert_same_gemm(ours, expected.detach(), device, None, depth)


# ---- every combination ---------------------------------------------------------------------------


def fp8(kind, code=E4M3, **options):
    return lambda device: kind(code, **BOTH, **options)


MAKERS = {
    "f32": lambda device: F32,
    "f16": lambda device: F16,
    "bf16": lambda device: BF16,
    "identity": lambda device: tensors.IdentityQuantizer(),
    "current": fp8(tensors.Float8CurrentScalingQuantizer),
    "current e5m2": fp8(tensors.Float8CurrentScalingQuantizer, E5M2),
    "delayed": lambda device: tensors.Float8Quantizer(
        torch.full((1,), 5.0, device=device), torch.zeros(1, device=device), E4M3
    ),
    "lines": fp8(tensors.Float8BlockQuantizer, block_scaling_dim=1),
    "squares": fp8(tensors.Float8BlockQuantizer, block_scaling_dim=2),
    "rows": fp8(tensors.Float8RowQuantizer),
    "mxfp8": fp8(tensors.MXFP8Quantizer),
    "nvfp4": lambda device: tensors.NVFP4Quantizer(),
    "hybrid": lambda device: tensors.HybridQuantizer(
        rowwise_quantizer=tensors.Float8CurrentScalingQuantizer(E4M3),
        columnwise_quantizer=tensors.MXFP8Quantizer(E5M2),
    ),
    "hybrid of one and none": lambda device: tensors.HybridQuantizer(
        rowwise_quantizer=tensors.Float8BlockQuantizer(E4M3, **BOTH, block_scaling_dim=1),
        columnwise_quantizer=tensors.IdentityQuantizer(),
    ),
}


def alone(quantizer, by_rows):
    """The same quantizer for one form."""
    made = quantizer.copy()
    made.set_usage(rowwise=by_rows, columnwise=not by_rows)
    return made


def operand(draw, values, kind, by_rows):
    """(operand, what a product reads of it in float64): with one form or both, a storage or not."""
    how = MAKERS[kind](values.device)
    if isinstance(how, torch.dtype):
        made = values.to(how)
        if draw.random() < 0.3:  # of other strides
            made = torch.empty((*made.shape[:-1], made.shape[-1] + 3), dtype=how).to(made.device)
            made = made[..., 1 : 1 + values.shape[-1]].copy_(values.to(how))
        return made, made.double()
    form = alone(how, by_rows)
    read = form(values).dequantize(dtype=F32).double()
    if draw.random() < 0.5:
        how = form
    how.internal = draw.random() < 0.5
    return how(values), read


def gelu64(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_gradient(grad, x):
    x = x.double().requires_grad_()
    gelu64(x).backward(grad)
    return x.grad


class Drawn:
    """One call, drawn at random, and what it is in float64."""

    def __init__(self, draw, rng, device):
        self.draw, self.layout = draw, draw.choice(list(LAYOUTS))
        transA, transB = LAYOUTS[self.layout]
        m, n, k = (draw.choice((1, 8, 16, 33, 48, 128)) for _ in range(3))
        shapes = (n, k) if transA else (k, n), (k, m) if transB else (m, k)
        kinds = [draw.choice(list(MAKERS)) for _ in range(2)]
        if draw.random() < 0.5:
            kinds[1] = kinds[0]
        sources = [normal(rng, shape, F32, device) / 2 for shape in shapes]
        if shapes[1][0] % 8 == 0 and draw.random() < 0.5:
            sources[1] = sources[1].view(4, -1, shapes[1][1])
        self.A, a = operand(draw, sources[0], kinds[0], transA)
        self.B, b = operand(draw, sources[1], kinds[1], not transB)
        b2, a = b.flatten(0, -2), a.flatten(0, -2)
        left, right = (b2.t() if transB else b2), (a.t() if transA else a)
        leading = (m,) if transB else tuple(b.shape[:-1])
        self.kinds, self.k = kinds, k
        self.left = left
        summed = self.B.dequantize(dtype=F32) if hasattr(type(self.B), "_dequantized") else b
        summed = summed.double().flatten(0, -2)
        self.summed = summed.t() if transB else summed
        self.shape = (*leading, n)
        self.exact = (left @ right).view(self.shape)
        self.terms = (left.abs() @ right.abs()).view(self.shape)
        self.options = {"layout": self.layout, "use_split_accumulator": draw.random() < 0.5}
        self.dtype = draw.choice(HIGH)
        self.arguments(rng, device)

    def maybe(self):
        return self.draw.random() < 0.5

    def arguments(self, rng, device):
        """Draw the others."""
        options, draw = self.options, self.draw
        options["out_dtype"] = self.dtype
        self.before = None
        factors = {}
        if self.maybe():
            factors["alpha"] = draw.choice((1.0, -0.5, 3.0))
        if self.maybe():
            out = normal(rng, self.shape, self.dtype, device)
            if len(self.shape) == 2 and self.maybe():
                wide = torch.empty(self.shape[0], self.shape[1] + 5, dtype=self.dtype).to(device)
                out = wide[:, 2:-3].copy_(out)
            options["out"] = out
            if self.maybe():
                options["accumulate"], self.before = True, out.double().clone()
                if self.maybe():
                    factors["beta"] = draw.choice((1.0, 0.25))
        options |= factors
        options["grad"], options["gelu"] = self.maybe(), self.maybe()
        if self.maybe():
            length = self.shape[-1]
            if options["grad"] and not options["gelu"]:
                length = self.left.shape[0]
            options["bias"] = normal(rng, length, draw.choice(HIGH), device)
        if options["gelu"] and (options["grad"] or self.maybe()):
            options["gelu_in"] = normal(rng, self.shape, self.dtype, device)

    def expected(self):
        """(result, gradient of the bias or None, what gelu was applied to or None), and terms."""
        given = self.options
        made = given.get("alpha", 1.0) * self.exact
        terms = abs(given.get("alpha", 1.0)) * self.terms
        if self.before is not None:
            made = made + given.get("beta", 1.0) * self.before
            terms = terms + given.get("beta", 1.0) * self.before.abs()
        bias, sums, pre = given.get("bias"), None, None
        if bias is not None and not given["grad"]:
            made, terms = made + bias.double(), terms + bias.double().abs()
        if given["gelu"] and given["grad"]:
            made, pre = gelu_gradient(made, given["gelu_in"]), given["gelu_in"].double()
        elif given["gelu"]:
            made, pre = gelu64(made), made
        if bias is not None and given["grad"]:
            sums = made.flatten(0, -2).sum(0) if given["gelu"] else self.summed.sum(1)
        return (made, sums, pre), terms

    def bound(self, dtype):
        """Roundings to the dtype, to those of bias and gelu, the sums, and the activation."""
        own = 2 * tol("round", dtype) + 2 * tol("round", self.dtype)
        sums = 16 * tol("sum", F32, max(self.k, *self.shape))
        fp8 = 4 * max(tol("sum_split", E4M3, self.k), tol("sum_fast", E4M3, self.k))
        return own + sums + (fp8 if self.exact.is_cuda else 0.0) + tol("gelu_fast", F32)


@our_kernels
@pytest.mark.parametrize("part", range(12))
def test_any_call(device, part, rng, request):
    """Drawn at random: formats, forms, layouts, dtypes, places, factors and epilogues."""
    draw = random.Random(int(rng.integers(2**31)) + part)
    for _ in range(60):
        case = Drawn(draw, rng, device)
        options = {name: t.clone() if name == "gelu_in" else t for name, t in case.options.items()}
        (made, sums, pre), terms = case.expected()
        found = general_gemm(case.A, case.B, **options)
        what = f"{case.kinds} {case.layout} {case.shape} {sorted(options)}"
        assert found[3] is None and found[0].dtype == case.dtype, what
        assert (found[0] is options.get("out")) == ("out" in options), what
        # Values that cancel: of the size of their terms, through gelu too.
        assert_nmse(found[0], made, case.bound(case.dtype), what, terms=terms)
        assert (found[1] is None) == (sums is None), what
        assert (found[2] is None) == (pre is None), what
        if sums is not None:
            size = case.summed.abs().sum(1) if not options["gelu"] else terms.flatten(0, -2).sum(0)
            bound = case.bound(options["bias"].dtype)
            assert_nmse(found[1], sums, bound, what, terms=size)
        if pre is not None and not options["grad"]:
            assert_nmse(found[2], pre, case.bound(case.dtype), what, terms=terms)
            if "gelu_in" in options:
                assert found[2] is options["gelu_in"], what


def test_random_calls_reach_everything(rng):
    """Each format with each other one, and each option, is drawn."""
    draw = random.Random(0)
    cases = [Drawn(draw, rng, "cpu") for _ in range(300)]
    assert {kind for case in cases for kind in case.kinds} == set(MAKERS)
    drawn = {name for case in cases for name, value in case.options.items() if value is not False}
    assert drawn >= {"alpha", "beta", "accumulate", "out", "grad", "gelu", "gelu_in", "bias"}


# ---- quantized results ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in MAKERS if k not in ("f32", "f16", "bf16")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_results(device, kind, layout, rng):
    """The bits that the quantizer makes of the result, in a new tensor or a given one."""
    transA, transB = LAYOUTS[layout]
    A = normal(rng, (64, 32) if transA else (32, 64), BF16, device)
    B = normal(rng, (32, 96) if transB else (96, 32), BF16, device)
    quantizer = MAKERS[kind](device)
    make = tensors.Float8CurrentScalingQuantizer(E4M3)
    for a, b in ((A, B), (make(A), make(B))):
        plain = general_gemm(a, b, BF16, layout=layout)[0]
        out = general_gemm(a, b, BF16, quantizer, layout=layout)[0]
        assert_same_data(out, quantizer(plain))
        into = quantizer(torch.zeros_like(plain))
        assert general_gemm(a, b, BF16, quantizer, layout=layout, out=into)[0] is into
        assert_same_data(into, quantizer(plain))


# ---- forms ---------------------------------------------------------------------------------------


@our_kernels
def test_each_form_is_multiplied_in_its_format(device, rng):
    """Of a tensor of two formats that of the form which the layout reads: in FP8, by counters."""
    current = tensors.Float8CurrentScalingQuantizer
    make = tensors.HybridQuantizer(
        rowwise_quantizer=current(E4M3), columnwise_quantizer=current(E5M2)
    )
    other = current(E4M3)
    codes = {"TN": ("e4m3", "e4m3"), "NN": ("e4m3", "e5m2"), "NT": ("e4m3", "e5m2")}
    for layout, (transA, transB) in LAYOUTS.items():
        A = normal(rng, (64, 32) if transA else (32, 64), BF16, device)
        B = normal(rng, (32, 96) if transB else (96, 32), BF16, device)
        _core.reset_counters()
        made = general_gemm(make(A), other(B), layout=layout)[0]
        assert _core.counters()[f"gemm.{device}.{'.'.join(codes[layout])}"] == 1
        assert "emulated.mixed" not in _core.counters()
        form = alone(current(E4M3 if transA else E5M2), transA)
        assert_bits(made, general_gemm(form(A), other(B), layout=layout)[0])


@our_kernels
def test_a_square_weight_is_turned(device, rng):
    """Tiles of 128 x 128 cast row-wise alone: the other form is made for the call, in FP8."""
    make = tensors.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=2)
    both = tensors.Float8BlockQuantizer(E4M3, **BOTH, block_scaling_dim=2)
    lines = tensors.Float8BlockQuantizer(E4M3, **BOTH, block_scaling_dim=1)
    weight, dy = (normal(rng, (128, n), BF16, device) for n in (256, 128))
    _core.reset_counters()
    found = general_gemm(make(weight), lines(dy), layout="NN")[0]
    assert _core.counters()[f"gemm.{device}.e4m3.e4m3"] == 1
    assert_bits(found, general_gemm(both(weight), lines(dy), layout="NN")[0])


@pytest.mark.parametrize("kind", ["mxfp8", "lines", "nvfp4", "rows", "hybrid"])
def test_a_form_that_is_not_there(device, kind, rng):
    """It is multiplied out from the other one, which counts."""
    quantizer = alone(MAKERS[kind](device), True)
    A, B = (normal(rng, shape, BF16, device) for shape in ((32, 64), (48, 32)))
    made = quantizer(A)
    _core.reset_counters()
    out = general_gemm(made, B, F32, layout="NN")[0]
    assert _core.counters()["emulated.mixed"] == 1
    exact = B.double() @ made.dequantize(dtype=F32).double()
    assert_nmse(out, exact, tol("round", F32) + tol("sum", F32, 32))


def test_references_are_multiplied_by_their_quantizer(device, rng):
    quantizer = CurrentScalingQuantizerRef(dtype=torch.float8_e4m3fn, **BOTH)
    A, B = (normal(rng, shape, BF16, device) for shape in ((64, 32), (48, 32)))
    a, b = quantizer.quantize(A), quantizer.quantize(B)
    out = general_gemm(a, b, BF16)[0]
    assert_bits(out, custom_gemm(a, b, None, BF16)[0])
    with pytest.raises(NotImplementedError, match="general_gemm: alpha"):
        general_gemm(a, b, BF16, alpha=2.0)
    with pytest.raises(TypeError, match="custom_gemm: A: Tensor"):
        general_gemm(A, b, BF16)


# ---- who computes it -----------------------------------------------------------------------------


@our_kernels
def test_plug_ins_are_asked(device, rng):
    """As modules ask them: for the product alone, and none for what `default.native` runs."""
    seen = []

    def mine(A, transA, B, transB, D, *rest, **more):
        seen.append((tuple(A.shape), transA, tuple(B.shape), transB))
        D.fill_(7.0)
        return D, None, None, None

    impl = OpImpl("generic_gemm", "vendor.seven", BackendImplKind.VENDOR, mine, vendor="seven")
    registry = get_registry()
    registry.register(impl)
    try:
        A, B = (normal(rng, (n, 16), F32, device) for n in (8, 4))
        with with_preference("vendor"):
            assert (general_gemm(A, B)[0] == 7).all()
        assert seen == [((8, 16), True, (4, 16), False)]
        assert not (general_gemm(A, B)[0] == 7).all()
    finally:
        registry.unregister("generic_gemm", "vendor.seven")


# ---- one for each pair ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "current", "lines", "mxfp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("single", [False, True])
def test_grouped(device, kind, layout, single, rng):
    """The bits of single products, of groups of any size, into single tensors or one."""
    transA, transB = LAYOUTS[layout]
    splits, n, k = [32, 0, 16, 48], 64, 96
    make = MAKERS[kind](device)
    make = (lambda t: t) if isinstance(make, torch.dtype) else make
    pairs = []
    for m in splits:
        rows, deep = (k, m) if layout == "NT" else (m, k)  # a weight's gradient sums over tokens
        A = normal(rng, (n, deep) if transA else (deep, n), BF16, device)
        B = normal(rng, (deep, rows) if transB else (rows, deep), BF16, device)
        pairs.append((make(A), make(B)))
    A, B = zip(*pairs, strict=True)
    grad = layout != "TN"
    lengths = [k if layout == "NT" else n for _ in splits]
    bias = [normal(rng, length, BF16, device) for length in lengths]
    options = {"layout": layout, "grad": grad, "use_split_accumulator": True}
    with_bias = layout != "NN"
    alone = [
        general_gemm(a, b, BF16, bias=one if with_bias else None, **options)
        for a, b, one in zip(A, B, bias, strict=True)
    ]
    sizes = [found[0].shape[0] for found in alone]
    if single:
        out = [torch.full((sum(sizes) + 5, n), 3.0, dtype=BF16, device=device)]
        options |= {"single_output": True, "m_splits": sizes}
    else:
        out = [None if i % 2 else torch.empty_like(found[0]) for i, found in enumerate(alone)]
    made, sums, inputs = general_grouped_gemm(
        A, B, out, [None] * 4, BF16, bias=bias, use_bias=with_bias, **options
    )
    assert inputs == [None] * 4
    if single:
        assert made is out and (out[0][sum(sizes) :] == 3).all()
        made = out[0][: sum(sizes)].split(sizes)
    for i, (found, expected) in enumerate(zip(made, alone, strict=True)):
        assert_same_gemm(found, expected[0], device, None, k)
        assert single or out[i] is None or found is out[i]
        if grad and with_bias:
            assert_bits(sums[i], expected[1])
        else:
            assert sums[i] is (bias[i] if with_bias else None)


def test_grouped_gradients_are_added(device, rng):
    """Weights' gradients in fp32 of bf16; an empty group changes nothing."""
    A, B = ([normal(rng, (m, n), BF16, device) for m in (16, 0, 48)] for n in (32, 64))
    out = [normal(rng, (64, 32), F32, device) for _ in A]
    before = [t.clone() for t in out]
    made, *_ = general_grouped_gemm(A, B, out, None, BF16, layout="NT", grad=True, accumulate=True)
    for a, b, old, found, place in zip(A, B, before, made, out, strict=True):
        assert found is place
        bound = tol("round", F32) + tol("sum", F32, max(len(a), 1))
        assert_nmse(found, old.double() + b.double().t() @ a.double(), bound)
    assert_bits(out[1], before[1])


def test_grouped_with_gelu_and_quantizers(device, rng):
    A, B = ([normal(rng, (m, 32), BF16, device) for m in (16, 48)] for _ in range(2))
    quantizers = [tensors.MXFP8Quantizer(E4M3), None]
    made, _, inputs = general_grouped_gemm(A, B, [None, None], quantizers, BF16, gelu=True)
    for a, b, how, found, pre in zip(A, B, quantizers, made, inputs, strict=True):
        expected, _, kept, _ = general_gemm(a, b, BF16, how, gelu=True)
        assert_bits(pre, kept)
        if how is None:
            assert_bits(found, expected)
        else:
            assert_same_data(found, expected)


def test_refused_groups(device):
    A = [torch.ones(16, 16, device=device)] * 2
    out = [None, None]
    with pytest.raises(ValueError, match="1 in B, expected 2"):
        general_grouped_gemm(A, A[:1], out, None, F32)
    with pytest.raises(ValueError, match="3 in out, expected 2"):
        general_grouped_gemm(A, A, [None] * 3, None, F32)
    with pytest.raises(ValueError, match="1 in bias, expected 2"):
        general_grouped_gemm(A, A, out, None, F32, bias=A[:1], use_bias=True)
    with pytest.raises(ValueError, match=r"m_splits=\[16, 8\], expected .* \[16, 16\]"):
        general_grouped_gemm(A, A, A[:1], None, F32, m_splits=[16, 8], single_output=True)
    with pytest.raises(ValueError, match=r"out of \[\(16, 16\)\], expected one of \[>= 32"):
        general_grouped_gemm(A, A, A[:1], None, F32, single_output=True)
    with pytest.raises(NotImplementedError, match="gelu: not built yet"):
        general_grouped_gemm(A, A, out, None, F32, gelu=True, grad=True)
    with pytest.raises(NotImplementedError, match="quantization_params: not built yet"):
        quantizers = [tensors.MXFP8Quantizer(E4M3)] * 2
        general_grouped_gemm(A, A, A[:1], quantizers, F32, single_output=True)


# ---- refusals ------------------------------------------------------------------------------------


def test_refused_arguments(device):
    a = torch.ones(16, 16, device=device)
    for option in ("ub", "ub_type", "extra_output", "bulk_overlap"):
        with pytest.raises(NotImplementedError, match=f"general_gemm: {option}: not built yet"):
            general_gemm(a, a, **{option: object()})
    for error, text, options in (
        (ValueError, "layout='TT', expected one of TN, NN, NT", {"layout": "TT"}),
        (ValueError, "accumulate=True needs out", {"accumulate": True}),
        (ValueError, "beta=0.5 without accumulate", {"beta": 0.5}),
        (ValueError, "needs gelu_in", {"gelu": True, "grad": True}),
        (ValueError, "out: shape", {"out": a[:3]}),
        (TypeError, "out: torch.float32, expected torch.float16", {"out": a, "out_dtype": F16}),
        (TypeError, "out_dtype='half'", {"out_dtype": "half"}),
        (TypeError, "quantizer: dict, expected a Quantizer", {"quantization_params": {}}),
        (TypeError, "bias: str, expected a tensor", {"bias": "none"}),
        (ValueError, r"bias: shape \(3,\), expected \[16\]", {"bias": a[0, :3]}),
        (ValueError, r"gelu_in: shape \(3,\)", {"gelu": True, "gelu_in": a[0, :3]}),
    ):
        with pytest.raises(error, match=f"general_gemm: .*{text}"):
            general_gemm(a, a, **options)
    for bad in (None, [1.0], 3.0):
        with pytest.raises(TypeError, match="general_gemm: A: .*, expected a tensor"):
            general_gemm(bad, a)
        with pytest.raises(TypeError, match="general_gemm: B: .*, expected a tensor"):
            general_gemm(a, bad)
    with pytest.raises(ValueError, match="summed dims differ"):
        general_gemm(a[:, :3], a)
    with pytest.raises(TypeError, match="gemm: d: dtype torch.float64"):
        general_gemm(a.double(), a.double())
    with pytest.raises(TypeError, match="dtype i32"):
        general_gemm(a.int(), a.int())
