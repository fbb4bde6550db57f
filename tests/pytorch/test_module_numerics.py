# SPDX-License-Identifier: Apache-2.0
"""What the linear modules compute, in high precision and in FP8. Shapes: test_module_shapes.py."""

import itertools

import pytest
import torch
from comparators import assert_grad64, assert_nmse
from device_kinds import every_device
from layer_reference import wide
from pytorch.helpers import (
    RECIPES,
    Fp8Linear,
    assert_same_bits,
    assert_same_gemm,
    counted,
    high_precision_bound,
    state_of,
    sum_bound,
)
from pytorch.module_cases import (
    KINDS,
    RECIPE_NAMES,
    count_of,
    gemms_of,
    has_norm,
    make,
    outputs_of,
    region,
    step,
)
from pytorch.module_reference import (
    ACTIVATIONS,
    KINDS as NORMS,
    Step,
    definition,
    rows_off_kinks,
    values_of,
)
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = every_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MODULES = ("norm-linear", *ACTIVATIONS)
COMPOSED = KINDS[1:]
EACH = ("gelu", "swiglu", "clamped_swiglu")
SIZES = (48, 32)
# One output alone would have gradients of one number, which may cancel to nearly nothing.
FEATURES = [(48, 80), (17, 31), (1, 16)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def counted_step(module, x, grad, recipe=None):
    """Names to output and gradients, and the GEMMs of the step."""
    with counted() as gemms:
        out, dx, grads = step(module, x, recipe, grad)
    return {"out": out, "x": dx, **grads}, count_of(gemms, recipe)


# ---- against float64 -----------------------------------------------------------------------------

CASES = [
    *(("linear", sizes, {"bias": bias}) for sizes in FEATURES for bias in (True, False)),
    *(
        (kind, SIZES, {"normalization": norm, "zero_centered_gamma": norm == "RMSNorm"})
        for kind in MODULES
        for norm in NORMS
    ),
]


@pytest.mark.parametrize(("kind", "sizes", "options"), CASES, ids=lambda v: str(v).replace("'", ""))
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_high_precision(device, kind, sizes, options, dtype):
    """Output and all gradients against float64 autograd of the definition."""
    module = make(kind, device, dtype, sizes, **options)
    x = torch.randn(256, sizes[0], device=device, dtype=dtype)
    x = rows_off_kinks(module, x, dtype)[:24]
    assert x.shape[0] >= 8, "no rows without a value near 0: draw more"
    grad = torch.randn(x.shape[0], outputs_of(module), device=device, dtype=dtype)
    found, gemms = counted_step(module, x, grad)
    assert gemms == gemms_of(module)
    assert {value.dtype for value in found.values()} == {dtype}
    bounds = [tol("chain", dtype, 64)] * 2
    if not has_norm(kind):
        bounds = [high_precision_bound(dtype, depth) for depth in (sizes[0], max(24, sizes[1]))]
    out = found.pop("out")
    assert out.shape == grad.shape
    assert_nmse(out, definition(module, wide(x), values_of(module))[0], bounds[0])
    inputs = {"x": x} | dict(module.named_parameters())
    assert_grad64(found, lambda x, **v: definition(module, x, v)[0], inputs, grad, bounds[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_fp8_is_near_the_definition(device, dtype):
    """Current scaling, against float64 without any cast: the error of two roundings to FP8."""
    module = make("linear", device, dtype, (48, 80))
    x = torch.randn(64, 48, device=device, dtype=dtype)
    grad = torch.randn(64, 80, device=device, dtype=dtype)
    found, gemms = counted_step(module, x, grad, Float8CurrentScaling())
    assert gemms == 3
    # Two relative errors in one product: the square of their sum is at most twice their squares.
    operands = 2 * (tol("quantize", E4M3) + tol("quantize", E4M3))
    bound = operands + sum_bound(device, dtype, 48, True) + tol("round", dtype)
    assert_nmse(found.pop("out"), definition(module, wide(x), values_of(module))[0], bound)
    operands = 2 * (tol("quantize", E5M2) + tol("quantize", E4M3))
    inputs = {"x": x} | dict(module.named_parameters())
    bound = operands + sum_bound(device, dtype, 80)
    assert_grad64(found, lambda x, **v: definition(module, x, v)[0], inputs, grad, bound)


# ---- against the very operands -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("features", "bias"),
    [(FEATURES[0], True), (FEATURES[0], False), (FEATURES[1], True), (FEATURES[2], False)],
    ids=lambda v: {True: "bias", False: "no-bias"}.get(v, str(v)),
)
def test_fp8_equals_gemms_of_dequantized_operands(device, recipe, dtype, bias, features):
    made = RECIPES[recipe]()
    layer = make("linear", device, dtype, features, bias=bias)
    forward = backward = None
    for number in range(2):  # the second step of delayed scaling has scales other than 1
        x = torch.randn(3, 7, features[0], device=device, dtype=dtype)
        grad = torch.randn(3, 7, features[1], device=device, dtype=dtype)
        if made.delayed() and number:
            forward, backward = (state_of(layer)[d][0] for d in ("forward", "backward"))
        found, gemms = counted_step(layer, x, grad, made)
        assert gemms == 3
    exact = Fp8Linear(layer, made, forward, backward).run(x, grad)
    assert found.keys() == exact.keys()
    for name, (expected, depth, fast) in exact.items():
        assert found[name].dtype == dtype
        bound = sum_bound(device, dtype, depth, fast)
        assert_nmse(found[name].reshape(expected.shape), expected, bound)


# Every activation in every way of scaling; what else recipes say, with one module of each make.
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*itertools.product(MODULES, RECIPE_NAMES)]
    + [(k, r) for k, r in itertools.product(COMPOSED, RECIPES) if r not in RECIPE_NAMES],
)
def test_every_operator_on_its_own_inputs(device, kind, recipe):
    """Casts by their codes, GEMMs by their dequantized operands, slots by scales and amaxes."""
    dtype = DTYPES[len(kind) % 3]
    norm = tuple(NORMS)[len(kind) % 2]
    check_steps(device, kind, recipe, dtype, normalization=norm)


def check_steps(device, kind, recipe, dtype, sizes=SIZES, rows=(3, 21), **options):
    """Two steps, of a module that delays its weight gradients and of one that does not."""
    module = make(kind, device, dtype, sizes, delay_wgrad_compute=True, **options)
    twin = make(kind, device, dtype, sizes, **options)
    twin.load_state_dict(module.state_dict())
    made = None if recipe is None else RECIPES[recipe]()
    for _ in range(2):  # the second step of delayed scaling has scales other than 1
        x = torch.randn(*rows, sizes[0], device=device, dtype=dtype)
        grad = torch.randn(*rows, outputs_of(module), device=device, dtype=dtype)
        expected, gemms = counted_step(twin, x, grad, made)
        assert gemms == gemms_of(twin)
        found = Step(module, x, grad, made)
        found.check_forward()
        found.check_backward()
        assert_same_bits(found.out.detach(), expected.pop("out"))
        for name, gradient in expected.items():  # in high precision a bias is summed up elsewhere
            assert_same_gemm(found.grads[name], gradient, device, recipe, 64, name)
        if made is not None:
            found.check_scaling()
            assert_same_bits(state_of(module), state_of(twin))


@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize(
    ("sizes", "dtype"), [((17, 31), torch.float32), ((33, 8), torch.bfloat16)], ids=str
)
def test_odd_sizes(device, kind, recipe, sizes, dtype):
    check_steps(device, kind, recipe, dtype, sizes, (29,))


@pytest.mark.parametrize("kind", COMPOSED)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_torch_autocast(device, kind, recipe):
    """Parameters in fp32, computation in bf16: the numbers of a module in bf16, gradients in fp32.

    In FP8 the input, the norm and the casts see fp32; the results between are bf16.
    """
    module = make(kind, device, sizes=SIZES, normalization="RMSNorm")
    x = torch.randn(24, 48, device=device)
    grad = torch.randn(24, outputs_of(module), device=device, dtype=torch.bfloat16)
    made = None if recipe is None else RECIPES[recipe]()
    with torch.autocast(device, dtype=torch.bfloat16):
        for _ in range(2):
            found, gemms = counted_step(module, x, grad, made)
    assert gemms == gemms_of(module)
    out = found.pop("out")
    assert out.dtype == torch.bfloat16
    assert {g.dtype for g in found.values()} == {torch.float32}
    if recipe is None:
        bound = 2 * tol("chain", torch.bfloat16, 64)  # input and weights are rounded as well
        assert_nmse(out, definition(module, wide(x), values_of(module))[0], bound)
        inputs = {"x": x} | dict(module.named_parameters())
        assert_grad64(found, lambda x, **v: definition(module, x, v)[0], inputs, grad, bound)
        return
    late = make(kind, device, sizes=SIZES, normalization="RMSNorm", delay_wgrad_compute=True)
    late.load_state_dict(module.state_dict())
    with torch.autocast(device, dtype=torch.bfloat16):
        checked = Step(late, x, grad, made)
    checked.check_forward()
    checked.check_backward()
    checked.check_scaling()


def test_all_codes_survive_a_round_trip(device):
    """Values that FP8 has pass through an identity weight without a change."""
    layer = te.Linear(256, 256, bias=False, device=device)
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float().nan_to_num(0.0)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(256))
    x = codes.to(device).repeat(16, 1)
    with counted() as gemms, te.autocast(recipe=DelayedScaling()):
        out = layer(x)
    assert gemms.fp8 == 1
    assert (out == x).all()


# ---- the same numbers again ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_run_twice_gives_the_same_bits(device, kind, recipe):
    module = make(kind, device, sizes=(100, 37))
    x = torch.randn(50, 100, device=device)
    grad = torch.randn(50, outputs_of(module), device=device)
    results = []
    for _ in range(2):
        te.reset()
        results.append(step(module, x, recipe, grad))
    assert_same_bits(*results)


# Every activation once, and some in every way of scaling.
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [*itertools.product(EACH, RECIPE_NAMES)]
    + [
        (kind, RECIPE_NAMES[number % 3])
        for number, kind in enumerate(ACTIVATIONS)
        if kind not in EACH
    ],
)
def test_checkpoint_gives_the_same_bits(device, kind, recipe):
    """`checkpoint=True` keeps nothing between input and output, and runs fc1 once more."""
    dtype = torch.bfloat16 if recipe is None else torch.float32
    options = {"normalization": "RMSNorm", "return_layernorm_output": True}
    modules = [make(k, device, dtype, SIZES, **options) for k in (kind, f"{kind} checkpoint")]
    modules[1].load_state_dict(modules[0].state_dict())
    data = [torch.randn(19, 48, device=device, dtype=dtype) for _ in range(3)]
    results, kept = [], []
    for module, count in zip(modules, (6, 7), strict=True):
        trace = []
        for factor in (1.0, 3.0):
            module.zero_grad()
            inp = (data[0] * factor).requires_grad_()
            with counted() as gemms:
                with region(recipe):
                    outputs = module(inp)
                kept.append(sum(t.nbytes for t in outputs[0].grad_fn.saved_tensors if t.dim() == 1))
                torch.autograd.backward(outputs, data[1:])
            assert count_of(gemms, recipe) == count
            grads = [inp.grad, *(p.grad.clone() for p in module.parameters())]
            trace.append((outputs[0].detach(), grads, state_of(module) or {}))
        results.append(trace)
    assert kept[2] == kept[3] < kept[0]
    for (out, *rest), (out_again, *rest_again) in zip(*results, strict=True):
        assert_same_gemm(out_again, out, device, recipe, 64)  # its epilogue leaves GELU's input out
        assert_same_bits(rest_again, rest)
