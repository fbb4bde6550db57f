# SPDX-License-Identifier: Apache-2.0
"""Linear modules under autograd and in regions: second backwards, threads, calibration."""

import threading

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of
from pytorch.module_cases import (
    FEW,
    RECIPE_NAMES,
    ROWS,
    batch,
    count_of,
    gemms_of,
    last_weight,
    make,
    outputs_of,
    region,
    step,
)
from tols import tol
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te

kinds = pytest.mark.parametrize("kind", FEW)
recipes = pytest.mark.parametrize("recipe", RECIPE_NAMES)

# ---- derivatives ---------------------------------------------------------------------------------


@kinds
@recipes
def test_create_graph_without_a_double_backward(device, kind, recipe):
    module = make(kind, device)
    x = batch(device)
    out, *expected = step(module, x, recipe)
    te.reset()
    inp = x.clone().requires_grad_()
    with region(recipe):
        out = module(inp)
    wanted = [inp, *module.parameters()]
    dx, *grads = torch.autograd.grad(out, wanted, torch.ones_like(out), create_graph=True)
    names = dict(module.named_parameters())
    found = {n: g.detach() for n, g in zip(names, grads, strict=True)}
    assert_same_bits([dx.detach(), found], expected)


@kinds
@recipes
def test_double_backward_is_a_clear_error(device, kind, recipe):
    module = make(kind, device)
    inp = batch(device).requires_grad_()
    with region(recipe):
        out = module(inp)
    for loss in (out.square().sum(), out.sum()):  # the latter depends on the weight alone
        (dx,) = torch.autograd.grad(loss, inp, create_graph=True)
        with pytest.raises(NotImplementedError, match="a second derivative is not supported"):
            dx.square().sum().backward()
    with pytest.raises(NotImplementedError, match="a second derivative is not supported"):
        torch.autograd.functional.hessian(lambda x: module(x).square().sum(), inp.detach())


@kinds
@recipes
def test_second_backward_needs_retain_graph(device, kind, recipe):
    module = make(kind, device)
    with region(recipe):
        out = module(batch(device).requires_grad_())
    out.sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    with counted() as gemms:
        out.sum().backward()
    assert count_of(gemms, recipe) == gemms_of(module) - len(module.LINEARS)
    if recipe != "delayed":  # its second backward has another scale
        assert_same_bits([p.grad for p in module.parameters()], [g + g for g in first])
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@kinds
@recipes
def test_a_backward_that_failed_is_not_run_again(device, kind, recipe):
    """Torch frees nothing then, but the backward may have written over what was saved for it."""
    module = make(kind, device)
    x = batch(device)
    inp = x.clone().requires_grad_()
    with region(recipe):
        out = module(inp)
    packed = any(t.dtype is torch.uint8 and t.dim() == 1 for t in out.grad_fn.saved_tensors)
    assert packed or recipe is None

    def failing(*grads):
        raise ValueError("in vain")

    hook = out.grad_fn.register_hook(failing)
    with pytest.raises(ValueError, match="in vain"):
        out.backward(torch.ones_like(out))
    hook.remove()
    if packed:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward(torch.ones_like(out))
        return
    out.backward(torch.ones_like(out))
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    assert_same_bits([inp.grad, found], step(module, x, recipe)[1:])


@kinds
@recipes
def test_detached_and_partial_graphs(device, kind, recipe):
    """A gradient of None, and `autograd.grad` of some inputs only."""
    a, b = make(kind, device), make(kind, device)
    inp = batch(device).requires_grad_()
    with region(recipe):
        used, unused = a(inp), b(inp)
    wanted = a.get_parameter(last_weight(a))
    (dw,) = torch.autograd.grad(used.sum() + 0 * unused.detach().sum(), [wanted])
    assert (dw != 0).any() and inp.grad is None
    assert all(p.grad is None for p in (*a.parameters(), *b.parameters()))


@kinds
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["constant", "input"])
def test_backward_in_another_thread(device, kind, recipe, needs_grad):
    module = make(kind, device)
    x = batch(device)
    expected = step(module, x, recipe)
    te.reset()
    module.zero_grad()
    inp = x.clone().requires_grad_(needs_grad)
    with region(recipe):
        out = module(inp)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    found = {n: p.grad for n, p in module.named_parameters()}
    assert_same_bits([inp.grad, found], [expected[1] if needs_grad else None, expected[2]])


# ---- changes in place ----------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize(
    ("kind", "what"),
    [("linear", "weight")] + [(k, w) for k in FEW[1:] for w in ("input", "weight", "gamma")],
)
def test_changes_in_place_before_the_backward_are_detected(device, kind, recipe, what):
    module = make(kind, device)
    inp = batch(device).requires_grad_()
    x = inp * 1
    with region(recipe):
        out = module(x)
    names = {"weight": last_weight(module), "gamma": "layer_norm_weight"}
    with torch.no_grad():
        (x if what == "input" else module.get_parameter(names[what])).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_input_changed_in_place_before_the_backward_does_not_matter(device, recipe):
    """FP8 keeps its own copy."""
    layer = make("linear", device)
    x = batch(device)
    expected = step(layer, x, recipe)
    te.reset()
    layer.zero_grad()
    inp = x.clone()
    with region(recipe):
        out = layer(inp)
    inp.zero_()
    out.sum().backward()
    assert_same_bits({n: p.grad for n, p in layer.named_parameters()}, expected[2])


# ---- without gradients, and traced ---------------------------------------------------------------


@kinds
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@recipes
def test_without_gradients(device, kind, recipe, mode):
    """The output of training, nothing kept, no scale updated; parameters made there train later."""
    module = make(kind, device)
    x = batch(device)
    expected = step(module, x, recipe)
    te.reset()
    for _ in range(2):
        with mode(), counted() as gemms, region(recipe):
            out = module(x.clone().requires_grad_(mode is torch.no_grad))
        assert count_of(gemms, recipe) == len(module.LINEARS)
        assert not out.requires_grad
        assert_same_bits(out.clone(), expected[0])
    te.reset()
    assert_same_bits(step(module, x, recipe), expected)


@kinds
@pytest.mark.parametrize("grad", [True, False])
def test_jit_trace_is_refused(device, kind, grad):
    """It would record the output as a constant."""
    module = make(kind, device)
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="jit.trace"):
        torch.jit.trace(module, batch(device))


# ---- regions -------------------------------------------------------------------------------------


@kinds
def test_nested_regions(device, kind):
    """Each region has its recipe; a disabled one inside computes in high precision."""
    module = make(kind, device)
    x = batch(device)
    plain = module(x)
    with region("current"):
        current = module(x)
    with counted() as gemms, region("delayed"):
        first = module(x)
        with region("current"):
            assert_same_bits(module(x), current)
        with te.autocast(enabled=False):
            assert_same_bits(module(x), plain)
        again = module(x)  # the update is that of the outermost exit
    per_call = len(module.LINEARS)
    assert (gemms.fp8, gemms.other) == (3 * per_call, per_call)
    assert_same_bits(first, again)


@kinds
def test_calibration(device, kind):
    """High precision, but the amaxes of FP8: of inputs and weights, in the slots FP8 has."""
    module = make(kind, device)
    x = batch(device)
    expected = step(module, x)
    module.zero_grad()
    inp = x.clone().requires_grad_()
    with counted() as gemms:
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
            out = module(inp)
        out.backward(torch.ones_like(out))
    assert (gemms.fp8, gemms.other) == (0, gemms_of(module))
    found = [out.detach(), inp.grad, {n: p.grad for n, p in module.named_parameters()}]
    assert_same_bits(found, expected)
    collected = state_of(module)
    assert (collected["backward"][1] == 0).all()
    te.reset()
    fp8 = make(kind, device)
    fp8.load_state_dict({n: t for n, t in module.state_dict().items() if n != "_extra_state"})
    with te.autocast(recipe=RECIPES["delayed"]()):
        fp8(x.clone().requires_grad_())
    scale, history = state_of(fp8)["forward"]
    slots = range(3 * len(module.LINEARS))
    used = [slot for slot in slots if slot % 3 != 2]
    assert (history[-1, used] > 0).all()
    for slot in slots:
        if slot % 3 != 0:  # weights, and what no tensor has
            assert_same_bits(collected["forward"][1][:, slot], history[:, slot])
        else:  # inputs: not rounded on their way in FP8, and fc2's has other operands before it
            ratio = collected["forward"][0][slot] / scale[slot]
            assert abs(ratio - 1) <= tol("calibrated", torch.float8_e4m3fn)


@kinds
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_while_calibrating_records_nothing(device, kind, use_reentrant):
    module = make(kind, device)

    def calibrate(x):
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
            return module(x)

    x = batch(device).requires_grad_()
    with counted() as gemms:
        out = checkpoint(calibrate, x, use_reentrant=use_reentrant)
        before = state_of(module)
        out.backward(torch.randn(ROWS, outputs_of(module), device=device))
    assert gemms.fp8 == 0
    assert before["forward"][1][:, :2].amax() > 0
    assert_same_bits(state_of(module)["forward"], before["forward"])
