# SPDX-License-Identifier: Apache-2.0
"""A layer's life outside of a step: copies, dtypes and devices, other weights, autograd."""

import copy
import io
import pickle

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of

import transformer_engine.pytorch as te

FP8 = [None, "delayed", "current"]


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


def step(layer, x, recipe="delayed", grad=None):
    """Forward and backward: everything that they leave."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with counted() as gemms:
        with region(recipe):
            out = layer(x)
        out.backward(torch.ones_like(out) if grad is None else grad)
    assert (gemms.fp8 if recipe else gemms.other) == 3
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def trained(device, steps=3, **options):
    layer = te.Linear(32, 48, device=device, **options)
    for _ in range(steps):
        step(layer, torch.randn(16, 32, device=device) * 5)
    return layer


def copied(layer, how):
    if how == "deepcopy":
        return copy.deepcopy(layer)
    if how == "pickle":
        return pickle.loads(pickle.dumps(layer))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_goes_on_alone_from_the_same_state(device, how):
    layer = trained(device)
    before = state_of(layer)
    twin = copied(layer, how)
    assert_same_bits(state_of(twin), before)
    x = torch.randn(16, 32, device=device)
    expected = [step(layer, x), state_of(layer)]  # an update reaches every module that has slots
    assert_same_bits([step(twin, x), state_of(twin)], expected)
    slots = {(m._slots.forward_scale.data_ptr(), m._slots.forward_slot) for m in (layer, twin)}
    assert len(slots) == 2
    kept = state_of(layer)
    with torch.no_grad(), region("delayed"):
        twin(torch.randn(16, 32, device=device) * 100)
    assert_same_bits(state_of(layer), kept)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_copy_that_never_ran(device, how):
    layer = trained(device)
    assert_same_bits(state_of(copied(copied(layer, how), how)), state_of(layer))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_no_cache_and_nothing_pending(device, how):
    layer = te.Linear(32, 48, delay_wgrad_compute=True, device=device)
    with region("current"):
        out = layer(torch.randn(16, 32, device=device), is_first_microbatch=True)
    out.sum().backward()
    twin = copied(layer, how)
    assert twin._weight_caches[0] is None and layer._weight_caches[0] is not None
    with pytest.raises(RuntimeError, match="pending"):
        twin.backward_dw()
    layer.backward_dw()
    assert layer.weight.grad is not None


def test_a_copied_model_keeps_its_options(device):
    layer = trained(device, parameters_split={"a": 16, "b": 32}, save_original_input=True)
    twin = copy.deepcopy(torch.nn.Sequential(layer))[0]
    assert repr(twin) == repr(layer)
    assert_same_bits(dict(twin.named_parameters()), dict(layer.named_parameters()))


# ---- dtype and device ----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["half", "bfloat16", "to", "double-and-back"])
def test_changing_the_dtype_keeps_the_state(device, change):
    layer = trained(device)
    before = state_of(layer)
    if change == "to":
        layer.to(torch.float16)
    elif change == "double-and-back":
        layer.double().float()
    else:
        getattr(layer, change)()
    assert_same_bits(state_of(layer), before)
    with torch.no_grad(), counted() as gemms, region("delayed"):
        layer(torch.zeros(16, 32, device=device, dtype=layer.weight.dtype))
    assert gemms.fp8 == 1
    after = state_of(layer)
    assert_same_bits(after["forward"][0], before["forward"][0])
    assert {t.dtype for values in after.values() for t in values} == {torch.float32}


@pytest.mark.gpu
def test_changing_the_device_keeps_the_state():
    layer = trained("cuda")
    before = state_of(layer)
    for device in ("cpu", "cuda"):
        layer.to(device)
        with torch.no_grad(), counted() as gemms, region("delayed"):
            layer(torch.zeros(16, 32, device=device))
        assert gemms.fp8 == 1
        after = state_of(layer)
        assert after["forward"][0].device.type == device
        assert_same_bits(after["backward"], before["backward"])
        assert_same_bits(after["forward"][0], before["forward"][0])


def test_state_is_no_parameter_and_no_buffer(device):
    layer = trained(device)
    assert sorted(dict(layer.named_parameters())) == ["bias", "weight"]
    assert not list(layer.buffers())


# ---- weights that are replaced -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_functional_call(device, recipe):
    layer = te.Linear(32, 48, device=device)
    other = te.Linear(32, 48, device=device)
    x, grad = torch.randn(16, 32, device=device), torch.randn(16, 48, device=device)
    kept = layer.weight.detach().clone()
    values = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    inp = x.clone().requires_grad_()
    with counted() as gemms:
        with region(recipe):
            out = torch.func.functional_call(layer, values, (inp,))
        out.backward(grad)
    assert (gemms.fp8 if recipe else gemms.other) == 3
    te.reset()
    found = [out.detach(), inp.grad, values["weight"].grad, values["bias"].grad]
    assert_same_bits(found, step(other, x, recipe, grad))
    assert_same_bits(layer.weight.detach(), kept)
    assert layer.weight.grad is None


@pytest.mark.parametrize("recipe", FP8)
def test_parametrize(device, recipe):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    layer = te.Linear(32, 48, device=device)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight *= 2
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    x, grad = torch.randn(16, 32, device=device), torch.randn(16, 48, device=device)
    found = step(layer, x, recipe, grad)
    te.reset()
    out, dx, dw, db = step(other, x, recipe, grad)
    grads = {n: p.grad for n, p in layer.named_parameters()}
    assert_same_bits(found[:2], [out, dx])
    assert_same_bits(grads["parametrizations.weight.original"], 2 * dw)
    assert_same_bits(grads["bias"], db)


def test_weight_norm_trains(device):
    layer = torch.nn.utils.parametrizations.weight_norm(te.Linear(32, 48, device=device))
    step(layer, torch.randn(16, 32, device=device))
    grads = [p.grad for p in layer.parameters()]
    assert len(grads) == 3 and all((g != 0).any() for g in grads)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_tied_weights(device, recipe):
    """Two layers with one weight: its gradient is the sum; their scaling state is their own."""
    a, b = (te.Linear(32, 32, bias=False, device=device) for _ in range(2))
    separate = copy.deepcopy(a), copy.deepcopy(a)
    b.weight = a.weight
    x = torch.randn(16, 32, device=device)
    results = []
    for first, second in ((a, b), separate):
        te.reset()
        with counted() as gemms:
            with region(recipe):
                out = second(first(x) * 9)
            out.sum().backward()
        assert gemms.fp8 == 5
        results.append([out.detach(), state_of(first), state_of(second)])
    assert_same_bits(*results)
    # Autograd adds the gradient of the later layer first.
    assert_same_bits(a.weight.grad, separate[1].weight.grad + separate[0].weight.grad)


def test_reassigned_parameters(device):
    """Nothing of the layer holds on to an earlier weight."""
    layer = trained(device)
    other = te.Linear(32, 48, device=device)
    other.set_extra_state(layer.get_extra_state())
    layer.weight = torch.nn.Parameter(other.weight.detach().clone())
    layer.bias = torch.nn.Parameter(other.bias.detach().clone())
    x = torch.randn(16, 32, device=device)
    assert_same_bits(step(layer, x), step(other, x))


# ---- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_create_graph_without_a_double_backward(device, recipe):
    layer = te.Linear(32, 48, device=device)
    x = torch.randn(16, 32, device=device)
    expected = step(layer, x, recipe)
    te.reset()
    inp = x.clone().requires_grad_()
    with region(recipe):
        out = layer(inp)
    wanted = [inp, layer.weight, layer.bias]
    grads = torch.autograd.grad(out, wanted, torch.ones_like(out), create_graph=True)
    assert_same_bits([g.detach() for g in grads], expected[1:])


@pytest.mark.parametrize("recipe", FP8)
def test_double_backward_is_a_clear_error(device, recipe):
    layer = te.Linear(32, 48, device=device)
    inp = torch.randn(16, 32, device=device, requires_grad=True)
    with region(recipe):
        out = layer(inp)
    (dx,) = torch.autograd.grad(out.sum(), inp, create_graph=True)  # it depends on the weight
    with pytest.raises(NotImplementedError, match="a second derivative is not supported"):
        dx.square().sum().backward()
    with pytest.raises(NotImplementedError, match="a second derivative is not supported"):
        torch.autograd.functional.hessian(lambda x: layer(x).square().sum(), inp.detach())


@pytest.mark.parametrize("recipe", FP8)
def test_weight_changed_in_place_before_the_backward_is_detected(device, recipe):
    layer = te.Linear(32, 48, device=device)
    with region(recipe):
        out = layer(torch.randn(16, 32, device=device, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_input_changed_in_place_before_the_backward_does_not_matter(device, recipe):
    """FP8 keeps its own copy."""
    layer = te.Linear(32, 48, device=device)
    x = torch.randn(16, 32, device=device)
    expected = step(layer, x, recipe)
    te.reset()
    layer.zero_grad()
    inp = x.clone()
    with region(recipe):
        out = layer(inp)
    inp.zero_()
    out.sum().backward()
    assert_same_bits([layer.weight.grad, layer.bias.grad], expected[2:])


@pytest.mark.parametrize("recipe", FP8)
def test_second_backward_needs_retain_graph(device, recipe):
    layer = te.Linear(32, 48, device=device)
    with region(recipe):
        out = layer(torch.randn(16, 32, device=device, requires_grad=True))
    out.sum().backward(retain_graph=True)
    first = layer.weight.grad.clone()
    with counted() as gemms:
        out.sum().backward()
    assert (gemms.fp8 if recipe else gemms.other) == 2
    if recipe != "delayed":  # its second backward has another scale
        assert_same_bits(layer.weight.grad, first + first)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@pytest.mark.parametrize("recipe", FP8)
def test_detached_and_partial_graphs(device, recipe):
    """A gradient of None, and `autograd.grad` of some inputs only."""
    a, b = te.Linear(32, 48, device=device), te.Linear(32, 48, device=device)
    inp = torch.randn(16, 32, device=device, requires_grad=True)
    with region(recipe):
        used, unused = a(inp), b(inp)
    (dw,) = torch.autograd.grad(used.sum() + 0 * unused.detach().sum(), [a.weight])
    assert (dw != 0).any() and inp.grad is None and b.weight.grad is None


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_backward_in_another_thread(device, recipe):
    import threading

    layer = te.Linear(32, 48, device=device)
    x = torch.randn(16, 32, device=device)
    expected = step(layer, x, recipe)
    te.reset()
    layer.zero_grad()
    with region(recipe):
        out = layer(x)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert_same_bits([layer.weight.grad, layer.bias.grad], expected[2:])
