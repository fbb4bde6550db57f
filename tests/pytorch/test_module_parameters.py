# SPDX-License-Identifier: Apache-2.0
"""Weights of linear modules that are replaced, shared, computed, split or no parameters at all."""

import copy

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, assert_same_gemm, counted, state_of
from pytorch.module_cases import (
    FEW,
    IN,
    PIECES,
    RECIPE_NAMES,
    SPLIT,
    WIDTH,
    batch,
    copy_values,
    count_of,
    expected_gemms,
    gemms_of,
    has_norm,
    last_weight,
    make,
    outputs_of,
    region,
    step,
    trained,
    weights_of,
    whole,
)

import transformer_engine.pytorch as te

pytestmark = every_device

kinds = pytest.mark.parametrize("kind", FEW)
recipes = pytest.mark.parametrize("recipe", RECIPE_NAMES)

# ---- replaced ------------------------------------------------------------------------------------


@kinds
@recipes
def test_reassigned_parameters(device, kind, recipe):
    """``mlp.fc1_weight = other.weight``: the next call computes with it, and its grad is there."""
    module, other = make(kind, device), make(kind, device)
    x = batch(device)
    for _ in range(2):
        step(module, x, recipe)
    for name, parameter in other.named_parameters():
        setattr(module, name, parameter)
        assert module.get_parameter(name) is parameter
        te.reset()
        twin = copy.deepcopy(module)
        for _ in range(2):
            te.reset()
            expected = step(twin, x, recipe)
            te.reset()
            assert_same_bits(step(module, x, recipe), expected)
        assert parameter.grad is not None


@kinds
def test_reassigned_parameters_keep_the_state(device, kind):
    """The scales are those that the module has found; nothing holds on to an earlier weight."""
    module, other = trained(kind, device), make(kind, device)
    other.set_extra_state(module.get_extra_state())
    for name, parameter in other.named_parameters():
        setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    x = batch(device)
    assert_same_bits(step(module, x, "delayed"), step(other, x, "delayed"))


@kinds
def test_torch_sees_what_is_assigned(device, kind):
    """Its hooks may put another parameter in; what is no parameter is refused."""
    module = make(kind, device)
    name, old = next(iter(module.named_parameters()))
    seen, other = [], torch.nn.Parameter(old.detach().clone())
    hooked = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda owner, key, given: seen.append((owner, key, given)) or other
    )
    try:
        setattr(module, name, torch.nn.Parameter(old.detach().clone()))
    finally:
        hooked.remove()
    assert module.get_parameter(name) is other
    assert [(owner, key) for owner, key, _ in seen] == [(module, name)]
    with pytest.raises(TypeError, match="as parameter"):
        setattr(module, name, old.detach())
    assert module.get_parameter(name) is other


@recipes
def test_weights_of_other_modules(device, recipe):
    """An MLP on the parameters of a norm and two linear layers, shared with them."""
    mlp = make("relu", device)
    norm = te.LayerNorm(IN, device=device)
    first, second = te.Linear(IN, WIDTH, device=device), te.Linear(WIDTH, IN, device=device)
    mlp.layer_norm_weight, mlp.layer_norm_bias = norm.weight, norm.bias
    mlp.fc1_weight, mlp.fc1_bias = first.weight, first.bias
    mlp.fc2_weight, mlp.fc2_bias = second.weight, second.bias
    x = batch(device)
    out, dx, grads = step(mlp, x, recipe)
    found = [grads["layer_norm_weight"], grads["fc1_weight"]]
    assert_same_bits([norm.weight.grad, first.weight.grad], found)
    if recipe is None:  # the same operators one by one
        inp = x.clone().requires_grad_()
        single = second(torch.relu(first(norm(inp))))
        assert_same_bits(single.detach(), out)
        single.backward(torch.ones_like(single))
        assert_same_bits(inp.grad, dx)
    with torch.no_grad():
        second.weight.add_(1.0)
    te.reset()
    assert not torch.equal(step(mlp, x, recipe)[0], out)


# ---- shared --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "norm-linear", "gelu"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_tied_weights(device, kind, recipe):
    """Two modules with one weight: its gradient is the sum; their scaling state is their own."""
    a, b = (make(kind, device, sizes=(IN, IN)) for _ in range(2))
    for name in weights_of(a):
        setattr(b, name, a.get_parameter(name))
    separate = copy.deepcopy(a), copy.deepcopy(b)
    x = batch(device)
    parameters = set(dict(a.named_parameters()))
    count = expected_gemms(a, parameters) + expected_gemms(b, {"x", *parameters})
    results = []
    for first, second in ((a, b), separate):
        te.reset()
        with counted() as gemms:
            with region(recipe):
                out = second(first(x) * 9)
            out.sum().backward()
        assert count_of(gemms, recipe) == count
        results.append([out.detach(), state_of(first), state_of(second)])
    assert_same_bits(*results)
    for name in weights_of(a):  # autograd adds that of the later module first
        parts = [m.get_parameter(name).grad for m in separate]
        assert_same_bits(a.get_parameter(name).grad, parts[1] + parts[0])


@recipes
def test_one_tensor_for_both_weights(device, recipe):
    """fc1 and fc2 of a square MLP tied to each other: one gradient, the sum of both."""
    mlp = make("silu", device, sizes=(IN, IN))
    twin = copy.deepcopy(mlp)
    mlp.fc2_weight = mlp.fc1_weight
    with torch.no_grad():
        twin.fc2_weight.copy_(mlp.fc1_weight)
    x = batch(device)
    te.reset()
    found = step(mlp, x, recipe)
    te.reset()
    expected = step(twin, x, recipe)
    assert_same_bits(found[:2], expected[:2])
    total = twin.fc1_weight.grad + twin.fc2_weight.grad
    assert_same_bits(mlp.fc1_weight.grad, total)


# ---- computed ------------------------------------------------------------------------------------


@kinds
@recipes
def test_functional_call(device, kind, recipe):
    module, other = make(kind, device), make(kind, device)
    x = batch(device)
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    values = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    inp = x.clone().requires_grad_()
    with counted() as gemms:
        with region(recipe):
            out = torch.func.functional_call(module, values, (inp,))
        out.backward(torch.ones_like(out))
    assert count_of(gemms, recipe) == gemms_of(module)
    te.reset()
    found = [out.detach(), inp.grad, {n: v.grad for n, v in values.items()}]
    assert_same_bits(found, step(other, x, recipe))
    assert_same_bits({n: p.detach() for n, p in module.named_parameters()}, kept)
    assert all(p.grad is None for p in module.parameters())


@kinds
@recipes
def test_parametrized_weights(device, kind, recipe):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    module = make(kind, device)
    twin = copy.deepcopy(module)
    names = [last_weight(module), *(["layer_norm_weight"] if has_norm(kind) else [])]
    for name in names:
        torch.nn.utils.parametrize.register_parametrization(module, name, Twice())
        with torch.no_grad():
            twin.get_parameter(name).mul_(2)
    x = batch(device)
    found = step(module, x, recipe)
    te.reset()
    expected = step(twin, x, recipe)
    assert_same_bits(found[:2], expected[:2])
    for name, gradient in expected[2].items():
        if name in names:
            mine = found[2][f"parametrizations.{name}.original"]
            assert_same_bits(mine, 2 * gradient, name)
        else:
            assert_same_bits(found[2][name], gradient, name)


@kinds
def test_weight_norm_trains(device, kind):
    module = make(kind, device)
    count = len(list(module.parameters()))
    torch.nn.utils.parametrizations.weight_norm(module, last_weight(module))
    grads = step(module, batch(device), "delayed")[2]
    assert len(grads) == count + 1 and all((g != 0).any() for g in grads.values())


# ---- split ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SPLIT)
@recipes
@pytest.mark.parametrize("change", ["reassigned", "loaded", "dtype", "optimizer", "frozen"])
def test_split_weights_change(device, kind, recipe, change):
    """However the parts of a split weight come to be, a call computes with their values."""
    module = make(kind, device, parameters_split=PIECES)
    plain = make(kind.removesuffix(" split"), device)
    x = batch(device)
    step(module, x, recipe)
    if change == "reassigned":
        module.b_weight = torch.nn.Parameter(torch.randn_like(module.b_weight))
    elif change == "loaded":
        module.load_state_dict(make(kind, device).state_dict())
    elif change == "dtype":
        module.bfloat16().float()
    elif change == "optimizer":
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    else:
        module.b_weight.requires_grad_(False)
    copy_values(plain, module)
    grad = torch.randn(x.shape[0], outputs_of(module), device=device)
    results = []
    for layer in (module, plain):
        te.reset()
        results.append(step(layer, x, recipe, grad))
    assert_same_bits(results[0][:2], results[1][:2])
    rows = plain.weight.grad.chunk(2)
    assert_same_bits(module.a_weight.grad, rows[0])
    assert (module.b_weight.grad is None) == (change == "frozen")
    if change != "frozen":
        assert_same_bits(whole(module, "weight", lambda p: p.grad), plain.weight.grad)


# ---- no parameters -------------------------------------------------------------------------------


def plain_tensors(module):
    """A frozen module whose weights, biases and the like are buffers."""
    for name, parameter in list(module.named_parameters()):
        delattr(module, name)
        module.register_buffer(name, parameter.detach().clone())
    return module


def replica(module):
    """What `torch.nn.parallel.replicate` makes: tensors in the place of parameters."""
    made = module._replicate_for_data_parallel()
    made._parameters = {}
    for name, parameter in module._parameters.items():
        setattr(made, name, parameter.detach().clone().requires_grad_())
    return made


@kinds
@pytest.mark.parametrize("change", [plain_tensors, replica])
def test_a_module_without_parameters_runs(device, kind, change):
    module = make(kind, device)
    odd = change(copy.deepcopy(module))
    assert not list(odd.parameters())
    x = batch(device)
    expected = step(module, x, "current")[:2]
    inp = x.clone().requires_grad_()
    with counted() as gemms:
        with region("current"):
            out = odd(inp)
        out.backward(torch.ones_like(out))
    assert_same_bits([out.detach(), inp.grad], expected)
    needs = {"x"} if change is plain_tensors else {"x", *dict(module.named_parameters())}
    assert count_of(gemms, "current") == expected_gemms(module, needs)


@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("what", ["main_grad", "bias", "input"])
def test_views_into_flat_buffers(device, recipe, what):
    """Neither aligned as libraries want it: one element into a flat tensor."""
    options = {"device": device, "params_dtype": torch.bfloat16}
    straight = te.Linear(64, 64, fuse_wgrad_accumulation=what == "main_grad", **options)
    shifted = copy.deepcopy(straight)
    x = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    inputs = [x, x]
    if what == "main_grad":
        straight.weight.main_grad = torch.zeros(64, 64, device=device)
        shifted.weight.main_grad = torch.zeros(64 * 64 + 1, device=device)[1:].view(64, 64)
    elif what == "bias":
        bias = torch.randn(65, device=device, dtype=torch.bfloat16)
        straight.bias = torch.nn.Parameter(bias[1:].clone())
        shifted.bias = torch.nn.Parameter(bias[1:])
    else:
        inputs[1] = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(64, 64)
    results = []
    for layer, given in zip((straight, shifted), inputs, strict=True):
        with counted() as gemms:
            with region(recipe):
                out = layer(given)
            out.sum().backward()
        assert count_of(gemms, recipe) == 2
        weight = layer.weight
        results.append([out, weight.main_grad if what == "main_grad" else weight.grad])
    for one, other in zip(*results, strict=True):
        assert_same_gemm(one, other, device, recipe, 64)
