# SPDX-License-Identifier: Apache-2.0
"""Float8BlockScaling and Float8RowScaling: every module, in every way that a module is run."""

import copy
import math
import pickle

import numpy as np
import pytest
import reference
import torch
from comparators import assert_nmse
from device_kinds import every_device
from pytorch.helpers import FP8, assert_same_bits, captured, counted, same_draws, sum_bound
from pytorch.module_cases import KINDS, count_of, gemms_of, make, region, step
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
)

SCALED = {
    "block": Float8BlockScaling,
    "block-f32": lambda: Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
    "block-1d": lambda: Float8BlockScaling(w_block_scaling_dim=1),
    "block-x": lambda: Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "block-grad": lambda: Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
    "row": Float8RowScaling,
    "row-power2": lambda: Float8RowScaling(use_power_2_scales=True, fp8_format=Format.E4M3),
}
TWO = ("block", "row")


def modes_of(recipe):
    """Scaling modes of input, weight and gradient."""
    if recipe.float8_row_scaling():
        return ["row"] * 3
    dims = (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim)
    return [f"block_{dim}d" for dim in dims]


def scalings():
    """How many GEMMs ran with which scaling modes of their operands, on any device."""
    found = {}
    for name, count in _core.counters().items():
        kind, _, *modes = name.split(".")
        if kind == "scaling":
            found[tuple(modes)] = found.get(tuple(modes), 0) + count
    return found


def dequantized(values, mode, dtype, power_2):
    """An operand as a GEMM along its rows reads it, in float64."""
    matrix = reference.as_f32(values)
    codes, scales = reference.scaled_quantize(matrix, mode, dtype, values.dtype, power_2=power_2)
    rows, columns = np.indices(matrix.shape)
    stored = scales.numpy()
    if mode == "row":
        inverse = stored[0][rows]
    elif mode == "block_1d":
        inverse = stored[columns // 128, rows]
    else:
        inverse = stored[rows // 128, columns // 128]
    return torch.from_numpy(reference.as_f32(codes).astype(np.float64) * inverse)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("sizes", [(128, 256), (200, 136), (48, 72)], ids=str)
@pytest.mark.parametrize("rows", [(2, 128), (3, 43)], ids=str)
def test_linear_multiplies_dequantized_operands(device, name, dtype, sizes, rows):
    recipe = SCALED[name]()
    layer = make("linear", device, dtype, sizes)
    x = torch.randn(*rows, sizes[0], device=device).to(dtype)
    grad = torch.randn(*rows, sizes[1], device=device).to(dtype)
    _core.reset_counters()
    out, dx, grads = step(layer, x, recipe, grad)
    of_x, of_w, of_g = modes_of(recipe)
    wanted = {}
    for pair in ((of_x, of_w), (of_g, of_w), (of_g, of_x)):
        wanted[pair] = wanted.get(pair, 0) + 1
    assert scalings() == wanted
    forward, backward = (FP8[recipe.fp8_format.dtype_name(d)] for d in ("fwd", "bwd"))
    power_2 = recipe.fp8_quant_fwd_inp.power_2_scale
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    weight = layer.weight.detach()

    def cast(values, mode, kind):
        return dequantized(values.contiguous(), mode, kind, power_2)

    half = layer.bias.detach().bfloat16().double().cpu()
    exact = cast(x, of_x, forward) @ cast(weight, of_w, forward).T + half
    fast = not recipe.fp8_gemm_fprop.use_split_accumulator
    assert_nmse(out.flatten(0, -2), exact, sum_bound(device, dtype, sizes[0], fast), "output")
    exact = cast(grad, of_g, backward) @ cast(weight.T, of_w, forward).T
    assert_nmse(dx.flatten(0, -2), exact, sum_bound(device, dtype, sizes[1]), "input gradient")
    exact = cast(grad.T, of_g, backward) @ cast(x.T, of_x, forward).T
    assert_nmse(grads["weight"], exact, sum_bound(device, dtype, len(x)), "weight gradient")
    assert_nmse(grads["bias"], grad.double().sum(0), sum_bound(device, dtype, len(x)), "bias")


# ---- every module, every way ---------------------------------------------------------------------

SIZES = (128, 192)


def data(device, module, dtype, rows=(2, 70)):
    """Input and gradient of the output of a module."""
    out = module._sizes()[-1][1]
    x = torch.randn(*rows, SIZES[0], device=device, dtype=dtype)
    return x, torch.randn(*rows, out, device=device, dtype=dtype)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", KINDS)
def test_close_to_high_precision(device, kind, name):
    """All GEMMs run with these scales, and gradients point where those without FP8 do."""
    module = make(kind, device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    recipe = SCALED[name]()
    exact = step(module, x, None, grad)
    with counted() as gemms:
        found = step(module, x, recipe, grad)
    assert count_of(gemms, recipe) == gemms_of(module) == sum(scalings().values())
    for got, wanted in zip(
        [*found[:2], *found[2].values()], [*exact[:2], *exact[2].values()], strict=True
    ):
        similar = torch.nn.functional.cosine_similarity(got.double(), wanted.double(), dim=-1)
        assert similar.mean() > 0.99


@every_device
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("kind", KINDS)
def test_run_twice_gives_the_same_bits(device, kind, name):
    module = make(kind, device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    assert_same_bits(step(module, x, SCALED[name](), grad), step(module, x, SCALED[name](), grad))


@every_device
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint(device, kind, name):
    """A recompute makes the scales again, to the same bits."""
    module = make(kind, device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    expected = step(module, x, SCALED[name](), grad)
    module.zero_grad()
    inp = x.clone().requires_grad_()
    with region(SCALED[name]()):
        out = te.checkpoint(module, inp)
    out.backward(grad)
    grads = {n: p.grad for n, p in module.named_parameters()}
    assert_same_bits([out.detach(), inp.grad, grads], expected)


@every_device
@pytest.mark.parametrize("name", TWO)
def test_mlp_that_keeps_nothing(device, name):
    plain = make("swiglu", device, BF16, SIZES)
    kept = make("swiglu checkpoint", device, BF16, SIZES)
    kept.load_state_dict(plain.state_dict())
    x, grad = data(device, plain, BF16)
    assert_same_bits(step(kept, x, SCALED[name](), grad), step(plain, x, SCALED[name](), grad))


@every_device
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_share_the_cast_weight(device, kind, name):
    module = make(kind, device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    expected = step(module, x, SCALED[name](), grad)
    for first in (True, False, False):
        _core.reset_counters()
        assert_same_bits(step(module, x, SCALED[name](), grad, is_first_microbatch=first), expected)
        casts = sum(v for n, v in _core.counters().items() if n.endswith(".quantize"))
        parts = len(module.LINEARS)
        assert casts <= (2 * parts + 1 if first else parts + 1), (first, casts)


WAYS = {
    "deferred": {"delay_wgrad_compute": True},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "input saved as it is": {"save_original_input": True},
}


@every_device
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("way", WAYS)
def test_weight_gradients_of_every_way(device, name, way):
    """An input that is cast again has the bits and scales of the first time."""
    plain = make("linear", device, BF16, SIZES)
    other = make("linear", device, BF16, SIZES, **WAYS[way])
    other.load_state_dict(plain.state_dict())
    x, grad = data(device, plain, BF16)
    expected = step(plain, x, SCALED[name](), grad)
    if way == "main_grad":
        other.weight.main_grad = torch.zeros_like(other.weight)
    found = step(other, x, SCALED[name](), grad)
    if way == "deferred":
        other.backward_dw()
    found[2]["weight"] = other.weight.main_grad if way == "main_grad" else other.weight.grad
    assert_same_bits(found, expected)


@every_device
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 0)], ids=str)
def test_few_rows(device, name, rows):
    """Gradients of no rows are 0."""
    module = make("swiglu", device, BF16, SIZES)
    x, grad = data(device, module, BF16, rows)
    out, dx, grads = step(module, x, SCALED[name](), grad)
    assert out.shape == grad.shape and dx.shape == x.shape
    for value in [out, dx, *grads.values()]:
        assert value.isfinite().all()
    if x.numel() == 0:
        assert all((value == 0).all() for value in grads.values())


@pytest.mark.parametrize("name", TWO)
def test_compile(device, name):
    module = make("norm-linear", device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    expected = step(module, x, SCALED[name](), grad)
    torch._dynamo.reset()
    module.zero_grad()
    inp = x.clone().requires_grad_()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with region(SCALED[name]()):
        out = compiled(inp)
    out.backward(grad)
    grads = {n: p.grad for n, p in module.named_parameters()}
    torch._dynamo.reset()
    assert_same_bits([out.detach(), inp.grad, grads], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("kind", KINDS)
def test_graph_capture(kind, name):
    module = make(kind, "cuda", BF16, SIZES)
    x, grad = data("cuda", module, BF16)
    expected = step(module, x, SCALED[name](), grad)
    inp = torch.zeros_like(x).requires_grad_()

    def run():
        with region(SCALED[name]()):
            out = module(inp)
        return out.detach(), *torch.autograd.grad(out, [inp, *module.parameters()], grad)

    graph, results = captured(run, warm_ups=1)
    with torch.no_grad():
        inp.copy_(x)
    graph.replay()
    names = [n for n, _ in module.named_parameters()]
    found = [*results[:2], dict(zip(names, results[2:], strict=True))]
    assert_same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [(2, 70), (1, 5)], ids=str)
def test_devices_agree(kind, name, rows):
    on_cpu = make(kind, "cpu", BF16, SIZES)
    on_cuda = copy.deepcopy(on_cpu).cuda()
    x, grad = data("cpu", on_cpu, BF16, rows)
    expected = step(on_cpu, x, SCALED[name](), grad)
    found = step(on_cuda, x.cuda(), SCALED[name](), grad.cuda())
    for got, wanted in zip(
        [*found[:2], *found[2].values()], [*expected[:2], *expected[2].values()], strict=True
    ):
        # An element that is rounded another way once changes a code of a later cast by a step. If
        # it is the largest of its block, the whole block is rounded anew: two independent errors,
        # of a third of the bound of one each on average. Of many rows few have such a block, of
        # five it may be all.
        anew = 2.0**-11 if math.prod(rows) > 100 else 2 * tol("round", torch.float8_e4m3fn) / 3
        assert_nmse(got, wanted.double(), sum_bound("cuda", BF16, SIZES[1], True) + anew)


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TWO)
def test_layer_is_its_submodules(device, name):
    """One plan per direction has the bits of calls of the submodules."""
    options = {"device": device, "params_dtype": BF16, "hidden_dropout": 0, "attention_dropout": 0}
    layer = te.TransformerLayer(128, 256, 4, **options)
    x = torch.randn(70, 2, 128, device=device, dtype=BF16)
    grad = torch.randn_like(x)
    _core.reset_counters()
    expected = step(layer, x, SCALED[name](), grad)
    assert sum(scalings().values()) == 12  # four linear layers
    hook = layer.layernorm_mlp.register_forward_hook(lambda module, given, out: None)
    found = step(layer, x, SCALED[name](), grad)
    hook.remove()
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", TWO)
def test_attention(device, name):
    module = te.MultiheadAttention(128, 4, device=device, params_dtype=BF16, attention_dropout=0)
    x = torch.randn(70, 2, 128, device=device, dtype=BF16)
    _core.reset_counters()
    step(module, x, SCALED[name]())
    assert sum(scalings().values()) == 6


# ---- recipes beside each other -------------------------------------------------------------------


@every_device
def test_switching_in_the_middle_of_training(device):
    """Each step has the bits that it has in a model that knows no other recipe."""
    module = make("swiglu", device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    recipes = [
        SCALED["block"],
        DelayedScaling,
        SCALED["row"],
        lambda: None,
        SCALED["block-f32"],
        Float8CurrentScaling,
        SCALED["block"],
    ]
    for make_recipe in recipes:
        recipe = make_recipe()
        alone = make("swiglu", device, BF16, SIZES)
        alone.load_state_dict(module.state_dict())
        assert_same_bits(step(module, x, recipe, grad), step(alone, x, recipe, grad))


@every_device
def test_nested_and_per_layer(device):
    layers = [make("linear", device, BF16, (128, 128)) for _ in range(3)]
    x = torch.randn(64, 128, device=device, dtype=BF16)
    with te.autocast(recipe=SCALED["block"]()):
        y = layers[0](x)
        with te.autocast(recipe=SCALED["row"]()):
            y = layers[1](y)
        out = layers[2](y)
    alone = x
    for layer, name in zip(layers, ("block", "row", "block"), strict=True):
        with te.autocast(recipe=SCALED[name]()):
            alone = layer(alone)
    assert_same_bits(out, alone)


@every_device
@pytest.mark.parametrize("name", TWO)
def test_nothing_in_a_state_dict(device, name):
    module = make("gelu", device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    before = {key: value for key, value in module.state_dict().items() if "extra" in key}
    step(module, x, SCALED[name](), grad)
    after = {key: value for key, value in module.state_dict().items() if "extra" in key}
    assert pickle.dumps(before) == pickle.dumps(after)


@pytest.mark.parametrize("name", TWO)
def test_report_and_observe(device, name, capsys):
    module = make("swiglu", device, BF16, SIZES)
    x, grad = data(device, module, BF16)
    plain = step(module, x, SCALED[name](), grad)
    with te.observe(module) as seen:
        found = step(module, x, SCALED[name](), grad)
    assert_same_bits(found, plain)
    layers = te.report(module, seen)
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    assert [tensor.name for tensor in tensors] == 2 * ["input", "weight", "grad_output"]
    for tensor in tensors:
        assert tensor.saturated == 0
        assert 0 < tensor.amax * tensor.scale <= reference.FP8_MAX[FP8[tensor.dtype]] * 1.001
    gemms = {gemm.precision for layer in layers for gemm in layer.gemms}
    hybrid = name == "row"
    assert gemms == {"e4m3 x e4m3", "e5m2 x e4m3"} if hybrid else {"e4m3 x e4m3"}
    te.report(module)
    assert "fc1" in capsys.readouterr().out
    te.explain(module, x)


@pytest.mark.parametrize("name", TWO)
def test_training_lowers_the_loss(device, name):
    """As far as it does without FP8."""
    x = torch.randn(256, SIZES[0], device=device)
    target = torch.tanh(x @ torch.randn(SIZES[0], SIZES[0], device=device) / 8)
    losses = {}
    for recipe in (None, SCALED[name]()):
        with same_draws(device):
            module = make("gelu", device, F32, SIZES)
        optimizer = torch.optim.Adam(module.parameters(), 1e-3)
        for _ in range(60):
            optimizer.zero_grad()
            with region(recipe):
                loss = (module(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses[recipe is None] = float(loss.detach())
    assert losses[False] < 1.1 * losses[True]
