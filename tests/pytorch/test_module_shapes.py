# SPDX-License-Identifier: Apache-2.0
"""Shapes and layouts that linear modules take, and what a forward keeps for its backward."""

import itertools

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    assert_same_gemm,
    counted,
    state_of,
)
from pytorch.module_cases import (
    CHECKPOINTED,
    FEW,
    RECIPE_NAMES,
    copy_values,
    count_of,
    gemms_of,
    make,
    outputs_of,
    region,
    step,
)

import transformer_engine.pytorch as te

pytestmark = every_device

DTYPES = (torch.float32, torch.bfloat16)

# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize(
    ("leading", "bias"),
    [((), True), ((1,), False), ((1,), True), ((16,), True), ((3, 5), True), ((2, 3, 4), False)],
    ids=str,
)
def test_leading_dims(device, kind, recipe, leading, bias):
    """The same numbers as for the flattened tokens, in the shape of the input."""
    normed = kind != "linear"
    options = {"return_layernorm_output": True} if normed else {}
    module = make(kind, device, bias=bias, **options)
    features, outputs = module._sizes()[0][0], outputs_of(module)
    x = torch.randn(*leading, features, device=device)
    widths = [outputs, features][: 1 + normed]
    grads = [torch.randn(*leading, n, device=device) for n in widths]
    results = []
    for shape in (leading, (-1,)):
        te.reset()
        inp = x.reshape(*shape, features).clone().requires_grad_()
        module.zero_grad()
        with counted() as gemms:
            with region(recipe):
                found = module(inp)
            found = found if normed else (found,)
            given = [g.reshape(*shape, g.shape[-1]) for g in grads]
            torch.autograd.backward(found, given)
        assert count_of(gemms, recipe) == gemms_of(module)
        assert [t.shape for t in found] == [(*inp.shape[:-1], n) for n in widths]
        assert inp.grad.shape == inp.shape
        flat = [t.reshape(-1, t.shape[-1]) for t in (*found, inp.grad)]
        results.append(flat + [p.grad.clone() for p in module.parameters()])
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)], ids=str)
def test_zero_tokens(device, kind, recipe, leading):
    module = make(kind, device)
    x = torch.randn(*leading, module._sizes()[0][0], device=device, requires_grad=True)
    with region(recipe):
        out = module(x)
    assert out.shape == (*leading, outputs_of(module))
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in module.parameters())


# ---- layouts -------------------------------------------------------------------------------------

LAYOUTS = {
    "expanded-rows": lambda t: t[:1].expand(t.shape),
    "expanded-scalar": lambda t: t[:1, :1].expand(t.shape),
    "transposed": lambda t: t.t().contiguous().t(),
    "every-second-column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "row-slice": lambda t: torch.cat([t, t])[::2],
    "column-slice": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "offset-by-one": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "flipped-3d": lambda t: t.view(4, -1, t.shape[1]).transpose(0, 1),
    "negative": lambda t: torch._neg_view(t),
}
ODD = [("linear", "input"), ("linear", "gradient"), *((kind, "both") for kind in FEW[1:])]


def strided_cases():
    """Both dtypes with every kind, layout and recipe, but not with each combination of the three.

    In high precision a chain of GEMMs has bf16, whose bound leaves their other orders room.
    """
    for number, ((kind, which), layout) in enumerate(itertools.product(ODD, LAYOUTS)):
        for shift, recipe in enumerate(RECIPE_NAMES):
            dtype = DTYPES[(number + shift) % 2]
            if recipe is None and which == "both":
                dtype = torch.bfloat16
            yield kind, which, layout, recipe, dtype


@pytest.mark.parametrize(("kind", "which", "layout", "recipe", "dtype"), list(strided_cases()))
def test_strides(device, kind, which, layout, recipe, dtype):
    """Any layout of the input and of the gradient gives the bits of contiguous copies."""
    module = make(kind, device, dtype)
    sizes = {"input": module._sizes()[0][0], "gradient": outputs_of(module)}
    dense = {n: torch.randn(24, width, device=device, dtype=dtype) for n, width in sizes.items()}
    odd = {n: LAYOUTS[layout](t) if which in (n, "both") else t for n, t in dense.items()}
    shape = odd["gradient" if which == "gradient" else "input"].shape[:-1]
    given = [t.view(*shape, -1) if n != which and which != "both" else t for n, t in odd.items()]
    results = []
    for x, grad in (given, [t.resolve_neg().contiguous() for t in given]):
        te.reset()
        module.zero_grad()
        inp = x.detach().requires_grad_()
        with counted() as gemms:
            with region(recipe):
                out = module(inp)
            out.backward(grad)
        assert count_of(gemms, recipe) == gemms_of(module)
        grads = {n: p.grad for n, p in module.named_parameters()}
        results.append({"out": out.detach(), "x": inp.grad.contiguous(), **grads})
    for name, found in results[0].items():
        assert_same_gemm(found, results[1][name], device, recipe, 64, name)


# ---- what is kept --------------------------------------------------------------------------------

PAIR = 256  # bytes that a pair of scales takes in the packed tensor, alignment included


def saved_by(layer, x, recipe, **call):
    """Output, and the tensors that a forward saves for its backward, the weight left out."""
    kept = []

    def pack(tensor):
        if tensor.data_ptr() != layer.weight.data_ptr():
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), region(recipe):
        out = layer(x, **call)
    return out, kept


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("rows", [64, 33])
def test_only_fp8_activations_are_saved(device, recipe, rows):
    layer = make("linear", device, torch.bfloat16, (128, 80))
    x = torch.randn(rows, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    with counted() as gemms:
        out, kept = saved_by(layer, x, recipe)
        out.sum().backward()
    assert gemms.fp8 == 3
    assert [t.dtype for t in kept] == [torch.uint8]
    padded = -(-rows // 16) * 16
    assert 128 * padded < kept[0].numel() <= 128 * padded + 2 * PAIR
    assert kept[0].untyped_storage().nbytes() == kept[0].numel()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_frozen_weight_saves_nothing_of_the_input(device, recipe):
    layer = make("linear", device, sizes=(128, 80))
    layer.weight.requires_grad_(False)
    _, kept = saved_by(layer, torch.randn(64, 128, device=device, requires_grad=True), recipe)
    assert sum(t.nbytes for t in kept) <= PAIR  # that of the weight's scales


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_weight_is_kept_only_where_caching_asks(device, recipe):
    layer = make("linear", device, sizes=(128, 80))
    x = torch.randn(16, 128, device=device, requires_grad=True)
    _, kept = saved_by(layer, x, recipe)
    assert all(t.shape != (128, 80) for t in kept)
    _, kept = saved_by(layer, x, recipe, is_first_microbatch=True)
    weights = [t for t in kept if t.shape == (128, 80)]
    assert [t.dtype for t in weights] == [torch.float8_e4m3fn]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_the_input_itself_is_kept_in_high_precision_only(device, recipe):
    layer = make("linear", device)
    inp = torch.randn(16, 32, device=device, requires_grad=True)
    with region(recipe):
        out = layer(inp)
    saved = [t for t in out.grad_fn.saved_tensors if t.data_ptr() == inp.data_ptr()]
    assert len(saved) == (1 if recipe is None else 0)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_save_original_input_gives_the_same_bits(device, recipe, dtype):
    x = torch.randn(21, 33, device=device, dtype=dtype)
    grad = torch.randn(21, 48, device=device, dtype=dtype)
    results = []
    first = make("linear", device, dtype, (33, 48))
    for keep in (False, True):
        te.reset()
        layer = make("linear", device, dtype, (33, 48), save_original_input=keep)
        copy_values(layer, first)
        for _ in range(2):
            with counted() as gemms:
                found = step(layer, x, recipe, grad)
            assert gemms.fp8 == 3
        results.append([*found, state_of(layer)])
    assert_same_bits(*results)


def test_save_original_input_keeps_the_input_alone(device):
    layer = make("linear", device, save_original_input=True)
    x = torch.randn(16, 32, device=device, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]()):
        out = layer(x)
    saved = out.grad_fn.saved_tensors
    assert sum(t.data_ptr() == x.data_ptr() for t in saved) == 1
    others = [t for t in saved if t.data_ptr() not in (x.data_ptr(), layer.weight.data_ptr())]
    assert sum(t.nbytes for t in others) < x.nbytes // 2
