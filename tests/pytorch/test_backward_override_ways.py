# SPDX-License-Identifier: Apache-2.0
"""``backward_override`` in every way that a module is run, and with quantized tensors."""

import pytest
import torch
from comparators import assert_bits, assert_nmse
from pytorch.helpers import assert_same_gemm, captured, sum_bound
from pytorch.recipe_cases import (
    BATCH,
    FEW,
    FFN,
    MODULES,
    OVERRIDES,
    RECIPES,
    TOKENS,
    WIDTH,
    assert_same,
    casts,
    data,
    few,
    made,
    modules,
    overrides,
    quantizer_of,
    recipes,
    results,
    step,
)
from thinning import chosen, in_turns
from tols import BF16, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- every way -----------------------------------------------------------------------------------


@few
@overrides
@modules
@pytest.mark.parametrize("ours", [True, False], ids=["te", "torch"])
def test_recompute(device, recipe, override, module, ours):
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    if ours:
        found = step(model, x, grad, how, lambda x: te.checkpoint(model, x))
    else:
        again = torch.utils.checkpoint.checkpoint
        found = step(model, x, grad, how, lambda x: again(model, x, use_reentrant=False))
    assert_same(found, eager)


@recipes
@overrides
def test_mlp_that_keeps_nothing(device, recipe, override):
    how = RECIPES[recipe](backward_override=override)
    model, (x, grad) = made("LayerNormMLP", device), data(device)
    kept = made("LayerNormMLP-checkpoint", device)
    kept.load_state_dict(model.state_dict())
    assert_same(step(kept, x, grad, how), step(model, x, grad, how))


@few
@overrides
@modules
def test_microbatches(device, recipe, override, module):
    """A cached weight gives the bits of one that is cast at each call, and is row-wise alone."""
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    for first in (True, False, False):
        assert_same(step(model, x, grad, how, is_first_microbatch=first), eager)
    held = [part for m in model.modules() for part in getattr(m, "_weight_caches", ()) if part]
    assert len(held) == MODULES[module][1]
    assert all(part.tensors[0] is not None and part.tensors[1] is None for part in held)


@few
@overrides
@modules
def test_weights_cached_without_a_flag(device, recipe, override, module):
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    for part in model.modules():
        if hasattr(part, "cache_weights"):
            part.cache_weights = True
    for _ in range(3):
        assert_same(step(model, x, grad, how), eager)


WAYS = {
    "deferred": {"delay_wgrad_compute": True},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "both": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    "input": {"save_original_input": True},
}


@recipes
@overrides
@pytest.mark.parametrize("way", WAYS)
def test_weight_gradients_of_every_way(device, recipe, override, way):
    plain, other = made("Linear", device), made("Linear", device, **WAYS[way])
    other.load_state_dict(plain.state_dict())
    x, grad = data(device)
    how = RECIPES[recipe](backward_override=override)
    expected = step(plain, x, grad, how)
    if "fuse_wgrad_accumulation" in WAYS[way]:
        other.weight.main_grad = torch.zeros_like(other.weight, dtype=F32)
    other.zero_grad()
    x.grad = None
    with te.autocast(recipe=how):
        out = other(x)
    out.backward(grad)
    if "delay_wgrad_compute" in WAYS[way]:
        other.backward_dw()
    weight = other.weight.grad
    if "fuse_wgrad_accumulation" in WAYS[way]:
        weight = other.weight.main_grad.to(BF16)
    for a, b in zip([out.detach(), x.grad, weight, other.bias.grad], expected, strict=True):
        assert_same_gemm(a, b, device, None, TOKENS * BATCH)


@overrides
def test_main_grad_of_another_dtype(device, override):
    how = Float8CurrentScaling(backward_override=override)
    plain = made("Linear", device)
    model, (x, grad) = made("Linear", device, fuse_wgrad_accumulation=True), data(device)
    model.load_state_dict(plain.state_dict())
    *_, weight, _ = step(plain, x, grad, how)
    model.weight.main_grad = torch.zeros_like(model.weight, dtype=F16)
    with te.autocast(recipe=how):
        out = model(x)
    out.backward(grad)
    bound = tol("round", F16) + tol("round", BF16) + tol("sum", F32, TOKENS * BATCH)
    assert_nmse(model.weight.main_grad, weight.double(), bound)
    model.weight.main_grad = torch.zeros_like(model.weight, dtype=torch.float64)
    with te.autocast(recipe=how), pytest.raises(TypeError, match="main_grad is torch.float64"):
        model(x)


@recipes
@overrides
def test_deferred_mlp(device, recipe, override):
    how = RECIPES[recipe](backward_override=override)
    model, (x, grad) = made("LayerNormMLP", device), data(device)
    eager = step(model, x, grad, how)
    late = made("LayerNormMLP", device, delay_wgrad_compute=True)
    late.load_state_dict(model.state_dict())
    found = step(late, x, grad, how)
    for (name, _), a, b in zip(late.named_parameters(), found[2:], eager[2:], strict=True):
        if name == "fc2_bias":  # another operator sums it where the GEMM comes later
            assert_nmse(a, b.double(), 4 * sum_bound(device, BF16, TOKENS * BATCH))
        else:
            assert_same_gemm(a, b, device, None, FFN, name)


# Graphs hold one operator with a plan; what the plan holds is compared in eager mode, so recipes
# take turns. What is saved for a backward is of module and override.
@chosen(in_turns(MODULES, OVERRIDES, FEW), module=MODULES, override=OVERRIDES, recipe=FEW)
def test_compiled(device, module, recipe, override):
    torch.compiler.reset()
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")
    assert_same(step(model, x, grad, how, compiled), eager)
    torch.compiler.reset()


@pytest.mark.gpu
@few
@overrides
@modules
def test_captured(recipe, override, module):
    model, (x, grad) = made(module, "cuda"), data("cuda")
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)

    def run():
        with te.autocast(recipe=how):
            out = model(x)
        return (out, *torch.autograd.grad(out, [x, *model.parameters()], grad))

    graph, found = captured(run, warm_ups=1)
    graph.replay()
    torch.cuda.synchronize()
    assert_same([t.detach() for t in found], eager)


@recipes
@overrides
def test_layer_is_its_submodules(device, recipe, override):
    """One plan per direction has the bits of calls of the submodules."""
    model, (x, grad) = made("TransformerLayer", device), data(device)
    how = RECIPES[recipe](backward_override=override)
    expected = step(model, x, grad, how)
    with model.layernorm_mlp.register_forward_hook(lambda module, given, out: None):
        assert_same(step(model, x, grad, how), expected)


@recipes
@modules
def test_switching_between_calls(device, recipe, module):
    """A call has the backward that was in force when it ran forward."""
    model, (x, grad) = made(module, device), data(device)
    ways = [RECIPES[recipe](), *(RECIPES[recipe](backward_override=how) for how in OVERRIDES)]
    if recipe == "nvfp4":
        ways[0].disable_stochastic_rounding = True
    expected = [step(model, x, grad, how) for how in ways]
    for i in (2, 0, 1, 0, 2, 1):
        assert_same(step(model, x, grad, ways[i]), expected[i])
    assert not torch.equal(expected[1][1], expected[2][1])
    outs = []
    for how in ways:
        with te.autocast(recipe=how):
            outs.append(model(x))
    for out, wanted in zip(reversed(outs), reversed(expected), strict=True):
        x.grad = None
        model.zero_grad()
        out.backward(grad)
        assert_same(results(out, x, model), wanted)


def test_the_environment_says_so(device, monkeypatch):
    model, (x, grad) = made("LayerNormLinear", device), data(device)
    plain = step(model, x, grad, None)
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert_same(step(model, x, grad, Float8CurrentScaling())[1:], plain[1:])


# ---- quantized tensors ---------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_quantized_parameters(device, recipe, module):
    """Of a parameter there is no high precision: both read what it stands for."""
    how = {name: RECIPES[recipe](backward_override=name) for name in OVERRIDES}
    with te.quantized_model_init(recipe=how["dequantized"]):
        model = MODULES[module][0](params_dtype=BF16, device=device)
    wide = MODULES[module][0](params_dtype=BF16, device=device)
    with torch.no_grad():
        for ours, theirs in zip(wide.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs.dequantize() if hasattr(theirs, "dequantize") else theirs)
    x, grad = data(device)
    for name in OVERRIDES:
        with te.counting() as counts:
            found = step(model, x, grad, how[name])
        layers = MODULES[module][1]
        wanted = layers * (2 if name == "dequantized" else 1)
        assert counts.get(f"op.{device}.dequantize", 0) == wanted
        if module == "LayerNormMLP":
            continue
        if name == "high_precision":
            assert_same(found[1:], step(wide, x, grad, None)[1:])
        else:
            assert_bits(found[1].cpu(), step(wide, x, grad, None)[1].cpu())
        for first in (True, False):
            assert_same(step(model, x, grad, how[name], is_first_microbatch=first), found)


@recipes
@overrides
def test_quantized_input(device, recipe, override):
    """Row-wise data are enough, whose values both read."""
    how = RECIPES[recipe](backward_override=override)
    model, (x, grad) = made("Linear", device), data(device)
    quantizer = quantizer_of(how, x.device, "input")
    quantizer.set_usage(rowwise=True, columnwise=False)
    given = quantizer(x.detach())
    with te.counting() as counts, te.autocast(recipe=how):
        out = model(given)
    assert casts(counts) <= 2  # of the weight alone
    out.backward(grad)
    wide = given.dequantize(dtype=BF16).flatten(0, 1)
    other = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=BF16, device=device)
    other(wide).backward(grad.flatten(0, 1))
    assert_same_gemm(model.weight.grad, other.weight.grad, device, None, TOKENS * BATCH)
