# SPDX-License-Identifier: Apache-2.0
"""What `Linear` computes, in high precision and in FP8, for every layout of its tensors."""

import pytest
import torch
from comparators import assert_grad64, assert_nmse
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
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def layer_on(device, features=(48, 80), dtype=torch.float32, **options):
    layer = te.Linear(*features, device=device, params_dtype=dtype, **options)
    if layer.use_bias:
        with torch.no_grad():
            layer.bias.normal_()
    return layer


def grads_of(layer, x):
    grads = {"x": x.grad, "weight": layer.weight.grad}
    return grads | ({"bias": layer.bias.grad} if layer.use_bias else {})


def linear64(x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
# One output alone would have gradients of one number, which may cancel to nearly nothing.
@pytest.mark.parametrize("features", [(48, 80), (17, 31), (1, 16)], ids=str)
def test_high_precision(device, dtype, bias, features):
    layer = layer_on(device, features, dtype, bias=bias)
    x = torch.randn(24, features[0], device=device, dtype=dtype, requires_grad=True)
    with counted() as gemms:
        out = layer(x)
        grad = torch.randn_like(out)
        out.backward(grad)
    assert gemms.fp8 == 0 and gemms.other == 3
    inputs = {"x": x, "weight": layer.weight} | ({"bias": layer.bias} if bias else {})
    exact = linear64(*(t.detach().cpu().double() for t in inputs.values()))
    assert out.dtype == dtype
    assert_nmse(out, exact, high_precision_bound(dtype, features[0]))
    grads = grads_of(layer, x)
    assert all(g.dtype == dtype for g in grads.values())
    assert_grad64(grads, linear64, inputs, grad, high_precision_bound(dtype, max(24, features[1])))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
# One output alone would have gradients of one number, which may cancel to nearly nothing.
@pytest.mark.parametrize("features", [(48, 80), (17, 31), (1, 16)], ids=str)
def test_fp8_equals_gemms_of_dequantized_operands(device, recipe, dtype, bias, features):
    made = RECIPES[recipe]()
    layer = layer_on(device, features, dtype, bias=bias)
    forward = backward = None
    for step in range(2):  # the second step of delayed scaling has scales other than 1
        x = torch.randn(3, 7, features[0], device=device, dtype=dtype).requires_grad_()
        layer.zero_grad()
        if made.delayed() and step:
            forward, backward = (state_of(layer)[d][0] for d in ("forward", "backward"))
        with counted() as gemms:
            with te.autocast(recipe=made):
                out = layer(x)
            grad = torch.randn_like(out)
            out.backward(grad)
        assert (gemms.fp8, gemms.other) == (3, 0)
    exact = Fp8Linear(layer, made, forward, backward).run(x, grad)
    found = {"out": out, **grads_of(layer, x)}
    assert found.keys() == exact.keys()
    for name, (expected, depth, fast) in exact.items():
        assert found[name].dtype == dtype
        bound = sum_bound(device, dtype, depth, fast)
        assert_nmse(found[name].reshape(expected.shape), expected, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_fp8_is_near_the_definition(device, dtype):
    """Current scaling, against float64 without any cast: the error of two roundings to FP8."""
    layer = layer_on(device, dtype=dtype)
    x = torch.randn(64, 48, device=device, dtype=dtype, requires_grad=True)
    with counted() as gemms:
        with te.autocast(recipe=Float8CurrentScaling()):
            out = layer(x)
        grad = torch.randn_like(out)
        out.backward(grad)
    assert gemms.fp8 == 3
    inputs = {"x": x, "weight": layer.weight, "bias": layer.bias}
    exact = linear64(*(t.detach().cpu().double() for t in inputs.values()))
    # Two relative errors in one product: the square of their sum is at most twice their squares.
    operands = 2 * (tol("quantize", E4M3) + tol("quantize", E4M3))
    assert_nmse(out, exact, operands + sum_bound(device, dtype, 48, True) + tol("round", dtype))
    operands = 2 * (tol("quantize", E5M2) + tol("quantize", E4M3))
    bound = operands + sum_bound(device, dtype, 80)
    assert_grad64(grads_of(layer, x), linear64, inputs, grad, bound)


# ---- shapes and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("leading", [(), (1,), (16,), (3, 5), (2, 3, 4)], ids=str)
def test_leading_dims(device, recipe, leading):
    """The same numbers as for the flattened tokens, in the shape of the input."""
    layer = layer_on(device)
    x = torch.randn(*leading, 48, device=device, requires_grad=True)
    flat = x.detach().reshape(-1, 48).requires_grad_()
    results = []
    for inp in (x, flat):
        te.reset()
        layer.zero_grad()
        with counted() as gemms:
            with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
                out = layer(inp)
            if not results:
                grad = torch.randn_like(out)
            out.backward(grad.reshape(out.shape))
        assert (gemms.fp8 if recipe else gemms.other) == 3
        results.append((out, inp.grad, layer.weight.grad, layer.bias.grad))
    (out, dx, dw, db), (flat_out, flat_dx, *flat_rest) = results
    assert out.shape == (*leading, 80) and dx.shape == x.shape
    assert_same_bits([out.reshape(-1, 80), dx.reshape(-1, 48), dw, db],
                     [flat_out, flat_dx, *flat_rest])  # fmt: skip


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
def test_zero_tokens(device, recipe, leading):
    layer = layer_on(device)
    x = torch.randn(*leading, 48, device=device, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        out = layer(x)
    assert out.shape == (*leading, 80)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert (layer.weight.grad == 0).all() and (layer.bias.grad == 0).all()


def expand(t):
    return t[:1].expand(t.shape)


LAYOUTS = {
    "expanded-rows": expand,
    "expanded-scalar": lambda t: t[:1, :1].expand(t.shape),
    "transposed": lambda t: t.t().contiguous().t(),
    "every-second-column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "row-slice": lambda t: torch.cat([t, t])[::2],
    "column-slice": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "offset-by-one": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "flipped-3d": lambda t: t.view(4, -1, t.shape[1]).transpose(0, 1),
    "negative": lambda t: torch._neg_view(t),
}


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("which", ["input", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_strides(device, recipe, which, layout, dtype):
    """Any layout of the input or of the gradient gives the bits of a contiguous copy."""
    layer = layer_on(device, dtype=dtype)
    x = torch.randn(24, 48, device=device, dtype=dtype)
    grad = torch.randn(24, 80, device=device, dtype=dtype)
    if which == "input":
        x = LAYOUTS[layout](x)
        grad = grad.view(*x.shape[:-1], 80)
    else:
        grad = LAYOUTS[layout](grad)
        x = x.view(*grad.shape[:-1], 48)
    results = []
    for copy in (False, True):
        te.reset()
        layer.zero_grad()
        inp = (x.resolve_neg().contiguous() if copy else x).detach().requires_grad_()
        with counted() as gemms:
            with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
                out = layer(inp)
            out.backward(grad.resolve_neg().contiguous() if copy else grad)
        assert (gemms.fp8 if recipe else gemms.other) == 3
        results.append([out, inp.grad.contiguous(), layer.weight.grad, layer.bias.grad])
    for depth, found, expected in zip((48, 80, 24, 24), *results, strict=True):
        assert_same_gemm(found, expected, device, recipe, depth)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_run_twice_gives_the_same_bits(device, recipe):
    layer = layer_on(device, (100, 37))
    x, grad = torch.randn(50, 100, device=device), torch.randn(50, 37, device=device)
    results = []
    for _ in range(2):
        te.reset()
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            out = layer(inp)
        out.backward(grad)
        results.append([out, inp.grad, layer.weight.grad, layer.bias.grad])
    assert_same_bits(*results)


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


# ---- how much runs, and what is kept -------------------------------------------------------------

NEEDS = [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)]


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("needs", NEEDS, ids=lambda n: "".join("xwb"[i] for i in range(3) if n[i]))
def test_no_work_for_what_needs_no_gradient(device, recipe, needs):
    layer = layer_on(device)
    layer.weight.requires_grad_(bool(needs[1]))
    layer.bias.requires_grad_(bool(needs[2]))
    x = torch.randn(16, 48, device=device, requires_grad=bool(needs[0]))
    with counted() as gemms:
        with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            out = layer(x)
        assert out.requires_grad == any(needs)
        if any(needs):
            out.sum().backward()
    expected = 1 + needs[0] + needs[1]
    assert (gemms.fp8, gemms.other) == ((expected, 0) if recipe else (0, expected))
    for tensor, needed in zip((x, layer.weight, layer.bias), needs, strict=True):
        assert (tensor.grad is not None) == bool(needed)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_gradients_do_not_depend_on_which_are_wanted(device, recipe):
    layer = layer_on(device)
    x, grad = torch.randn(16, 48, device=device), torch.randn(16, 80, device=device)
    results = {}
    for needs in NEEDS[1:]:
        te.reset()
        layer.weight.requires_grad_(bool(needs[1]))
        layer.bias.requires_grad_(bool(needs[2]))
        inp = x.clone().requires_grad_(bool(needs[0]))
        layer.weight.grad = layer.bias.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            out = layer(inp)
        out.backward(grad)
        results[needs] = (inp.grad, layer.weight.grad, layer.bias.grad)
    everything = results[1, 1, 1]
    for needs, grads in results.items():
        for needed, mine, full in zip(needs, grads, everything, strict=True):
            if not needed:
                continue
            if recipe is None and mine is grads[2]:  # another kernel sums it up
                assert_nmse(mine, full.double(), 2 * tol("sum", torch.float32, 16))
            else:
                assert_same_gemm(mine, full, device, recipe, 80)


PAIR = 256  # bytes that a pair of scales takes in the packed tensor, alignment included


def saved_by(layer, x, **region):
    """Tensors that a forward saves for its backward, the weight left out."""
    kept = []

    def pack(tensor):
        if tensor.data_ptr() != layer.weight.data_ptr():
            kept.append(tensor)
        return tensor

    first = region.pop("is_first_microbatch", None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with te.autocast(**region):
            out = layer(x, is_first_microbatch=first)
    return out, kept


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("rows", [64, 33])
def test_only_fp8_activations_are_saved(device, recipe, rows):
    layer = layer_on(device, (128, 80), torch.bfloat16)
    x = torch.randn(rows, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    with counted() as gemms:
        out, kept = saved_by(layer, x, recipe=RECIPES[recipe]())
        out.sum().backward()
    assert gemms.fp8 == 3
    assert [t.dtype for t in kept] == [torch.uint8]
    padded = -(-rows // 16) * 16
    assert 128 * padded < kept[0].numel() <= 128 * padded + 2 * PAIR
    assert kept[0].untyped_storage().nbytes() == kept[0].numel()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_frozen_weight_saves_nothing_of_the_input(device, recipe):
    layer = layer_on(device, (128, 80))
    layer.weight.requires_grad_(False)
    x = torch.randn(64, 128, device=device, requires_grad=True)
    _, kept = saved_by(layer, x, recipe=RECIPES[recipe]())
    assert sum(t.nbytes for t in kept) <= PAIR  # that of the weight's scales


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_weight_is_kept_only_where_caching_asks(device, recipe):
    layer = layer_on(device, (128, 80))
    x = torch.randn(16, 128, device=device, requires_grad=True)
    made = RECIPES[recipe]()
    _, kept = saved_by(layer, x, recipe=made)
    assert all(t.shape != (128, 80) for t in kept)
    _, kept = saved_by(layer, x, recipe=made, is_first_microbatch=True)
    weights = [t for t in kept if t.shape == (128, 80)]
    assert [t.dtype for t in weights] == [E4M3]


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_the_input_itself_is_kept_in_high_precision_only(device, recipe):
    layer = layer_on(device)
    inp = torch.randn(16, 48, device=device, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        out = layer(inp)
    saved = [t for t in out.grad_fn.saved_tensors if t.data_ptr() == inp.data_ptr()]
    assert len(saved) == (1 if recipe is None else 0)
