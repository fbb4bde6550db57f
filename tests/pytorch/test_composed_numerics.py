# SPDX-License-Identifier: Apache-2.0
"""What LayerNormLinear and LayerNormMLP compute, in high precision and in FP8."""

import pytest
import torch
from comparators import assert_grad64, assert_nmse
from layer_reference import wide
from pytorch.helpers import RECIPES, assert_same_bits, assert_same_gemm, counted, state_of
from pytorch.module_reference import (
    ACTIVATIONS,
    KINDS,
    Step,
    definition,
    make,
    region,
    rows_off_kinks,
    values_of,
)
from tols import tol

import transformer_engine.pytorch as te

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MODULES = ("linear", *ACTIVATIONS)
FEW = ("linear", "gelu", "swiglu")
GEMMS = {"linear": 3, "mlp": 6}


def gemms_of(kind):
    """GEMMs of a forward and a backward."""
    return GEMMS.get(kind, GEMMS["mlp"])


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def recipe_of(name):
    return None if name is None else RECIPES[name]()


def run(module, x, grad, recipe=None, **call):
    """Forward and backward: (output, gradients by name, counted GEMMs)."""
    module.zero_grad()
    inp = x.detach().clone().requires_grad_()
    with counted() as gemms:
        with region(recipe):
            out = module(inp, **call)
        out.backward(grad)
    grads = {"x": inp.grad} | {n: p.grad for n, p in module.named_parameters()}
    return out.detach(), grads, gemms


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("norm", KINDS)
def test_high_precision(device, kind, dtype, norm):
    """Output and all gradients against float64 autograd of the definition."""
    module = make(kind, device, dtype, normalization=norm, zero_centered_gamma=norm == "RMSNorm")
    x = torch.randn(256, 48, device=device, dtype=dtype)
    x = rows_off_kinks(module, x, dtype)[:24]
    assert x.shape[0] >= 8, "no rows without a value near 0: draw more"
    grad = torch.randn(x.shape[0], module._sizes()[-1][1], device=device, dtype=dtype)
    out, grads, gemms = run(module, x, grad)
    assert (gemms.fp8, gemms.other) == (0, gemms_of(kind))
    bound = tol("chain", dtype, 64)
    values = values_of(module)
    assert out.dtype == dtype and out.shape == grad.shape
    assert_nmse(out, definition(module, wide(x), values)[0], bound)
    assert all(g.dtype == dtype for g in grads.values())
    inputs = {"x": x} | dict(module.named_parameters())
    assert_grad64(grads, lambda x, **v: definition(module, x, v)[0], inputs, grad, bound)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_every_operator_on_its_own_inputs(device, kind, recipe):
    """Casts by their codes, GEMMs by their dequantized operands, slots by scales and amaxes."""
    dtype = DTYPES[len(kind) % 3]
    norm = tuple(KINDS)[len(kind) % 2]
    check_steps(device, kind, recipe, dtype, normalization=norm)


def check_steps(device, kind, recipe, dtype, sizes=(48, 32), rows=(3, 21), **options):
    """Two steps, of a module that delays its weight gradients and of one that does not."""
    module = make(kind, device, dtype, sizes, delay_wgrad_compute=True, **options)
    twin = make(kind, device, dtype, sizes, **options)
    twin.load_state_dict(module.state_dict())
    made = recipe_of(recipe)
    for _ in range(2):  # the second step of delayed scaling has scales other than 1
        x = torch.randn(*rows, sizes[0], device=device, dtype=dtype)
        grad = torch.randn(*rows, module._sizes()[-1][1], device=device, dtype=dtype)
        out, grads, gemms = run(twin, x, grad, made)
        found = (gemms.fp8, gemms.other) if made else (gemms.other, gemms.fp8)
        assert found == (gemms_of(kind), 0)
        step = Step(module, x, grad, made)
        step.check_forward()
        step.check_backward()
        assert_same_bits(step.out.detach(), out)
        for name, gradient in grads.items():  # in high precision a bias is summed up elsewhere
            assert_same_gemm(step.grads[name], gradient, device, recipe, 64, name)
        if made is not None:
            step.check_scaling()
            assert_same_bits(state_of(module), state_of(twin))


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("sizes", [(17, 31), (33, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=dtype_id)
def test_odd_sizes(device, kind, recipe, sizes, dtype):
    check_steps(device, kind, recipe, dtype, sizes, (29,))


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("leading", [(1,), (), (2, 3, 4)], ids=str)
def test_leading_dims(device, kind, recipe, bias, leading):
    """One token, none but the features, several dims: the shape of the input, the same numbers."""
    module = make(kind, device, bias=bias, return_layernorm_output=True)
    outputs = module._sizes()[-1][1]
    x = torch.randn(*leading, 48, device=device)
    grads = [torch.randn(*leading, n, device=device) for n in (outputs, 48)]
    results = []
    for shape in (leading, (-1,)):
        te.reset()
        inp = x.reshape(*shape, 48).clone().requires_grad_()
        module.zero_grad()
        with region(recipe_of(recipe)):
            out, normed = module(inp)
        torch.autograd.backward([out, normed], [g.reshape(*shape, g.shape[-1]) for g in grads])
        assert out.shape == (*inp.shape[:-1], outputs) and normed.shape == inp.shape
        given = [out.reshape(-1, outputs), normed.reshape(-1, 48), inp.grad.reshape(-1, 48)]
        results.append(given + [p.grad.clone() for p in module.parameters()])
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_zero_tokens(device, kind, recipe, checkpoint, leading):
    options = {"checkpoint": True} if checkpoint and kind != "linear" else {}
    module = make(kind, device, **options)
    x = torch.randn(*leading, 48, device=device, requires_grad=True)
    with region(recipe_of(recipe)):
        out = module(x)
    assert out.shape == (*leading, module._sizes()[-1][1])
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in module.parameters())


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every-second-column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "expanded-rows": lambda t: t[:1].expand(t.shape),
    "offset-by-one": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "flipped-3d": lambda t: t.view(4, -1, t.shape[1]).transpose(0, 1),
    "negative": lambda t: torch._neg_view(t),
}


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(device, kind, recipe, layout):
    """Any layout of the input and of the gradient gives the bits of contiguous copies."""
    module = make(kind, device, torch.bfloat16)
    x, grad = (torch.randn(24, n, device=device).bfloat16() for n in (48, module._sizes()[-1][1]))
    odd = [LAYOUTS[layout](t) for t in (x, grad)]
    results = []
    for given in (odd, [t.resolve_neg().contiguous() for t in odd]):
        te.reset()
        out, grads, gemms = run(module, *given, recipe_of(recipe))
        assert (gemms.fp8 if recipe else gemms.other) == gemms_of(kind)
        results.append({"out": out, **{n: g.contiguous() for n, g in grads.items()}})
    for name, found in results[0].items():
        assert_same_gemm(found, results[1][name], device, recipe, 64)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_checkpoint_gives_the_same_bits(device, kind, recipe):
    """`checkpoint=True` keeps nothing between input and output, and runs fc1 once more."""
    dtype = torch.bfloat16 if recipe is None else torch.float32
    options = {"normalization": "RMSNorm", "return_layernorm_output": True}
    modules = [make(kind, device, dtype, **options, checkpoint=again) for again in (False, True)]
    modules[1].load_state_dict(modules[0].state_dict())
    data = [torch.randn(19, 48, device=device, dtype=dtype) for _ in range(3)]
    results, kept = [], []
    for module, count in zip(modules, (6, 7), strict=True):
        trace = []
        for factor in (1.0, 3.0):
            module.zero_grad()
            inp = (data[0] * factor).requires_grad_()
            with counted() as gemms:
                with region(recipe_of(recipe)):
                    outputs = module(inp)
                kept.append(sum(t.nbytes for t in outputs[0].grad_fn.saved_tensors if t.dim() == 1))
                torch.autograd.backward(outputs, data[1:])
            assert (gemms.fp8 if recipe else gemms.other) == count
            grads = [inp.grad, *(p.grad.clone() for p in module.parameters())]
            trace.append((outputs[0].detach(), grads, state_of(module) or {}))
        results.append(trace)
    assert kept[2] == kept[3] < kept[0]
    for (out, *rest), (out_again, *rest_again) in zip(*results, strict=True):
        assert_same_gemm(out_again, out, device, recipe, 64)  # its epilogue leaves GELU's input out
        assert_same_bits(rest_again, rest)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_torch_autocast(device, kind, recipe):
    """Parameters in fp32, computation in bf16: the numbers of a module in bf16, gradients in fp32.

    In FP8 the input, the norm and the casts see fp32; the results between are bf16.
    """
    module = make(kind, device, normalization="RMSNorm")
    x = torch.randn(24, 48, device=device)
    grad = torch.randn(24, module._sizes()[-1][1], device=device, dtype=torch.bfloat16)
    made = recipe_of(recipe)
    with torch.autocast(device, dtype=torch.bfloat16):
        for _ in range(2):
            out, grads, gemms = run(module, x, grad, made)
    assert (gemms.fp8 if recipe else gemms.other) == gemms_of(kind)
    assert out.dtype == torch.bfloat16
    assert {g.dtype for g in grads.values()} == {torch.float32}
    if recipe is None:
        values = values_of(module)
        bound = 2 * tol("chain", torch.bfloat16, 64)  # input and weights are rounded as well
        assert_nmse(out, definition(module, wide(x), values)[0], bound)
        inputs = {"x": x} | dict(module.named_parameters())
        assert_grad64(grads, lambda x, **v: definition(module, x, v)[0], inputs, grad, bound)
        return
    late = make(kind, device, normalization="RMSNorm", delay_wgrad_compute=True)
    late.load_state_dict(module.state_dict())
    with torch.autocast(device, dtype=torch.bfloat16):
        step = Step(late, x, grad, made)
    step.check_forward()
    step.check_backward()
    step.check_scaling()
