# SPDX-License-Identifier: Apache-2.0
"""Lives of LayerNormLinear and LayerNormMLP: checkpoints, copies, dtypes, other weights."""

import copy
import io
import pickle
import threading

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of
from pytorch.module_reference import make, region
from tols import tol

import transformer_engine.pytorch as te

FP8 = [None, "delayed", "current"]
KINDS = ["linear", "gelu", "swiglu"]
GEMMS = {"linear": 3, "gelu": 6, "swiglu": 6}
SLOTS = {"linear": (3, 2), "gelu": (6, 4), "swiglu": (6, 4)}
ROWS, IN, WIDTH = 16, 32, 48


def recipe_of(name):
    return None if name is None else RECIPES[name]()


def module_of(kind, device, **options):
    return make(kind, device, sizes=(IN, WIDTH), **options)


def step(module, x, recipe="delayed", grad=None):
    """Forward and backward: everything that they leave."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with region(recipe_of(recipe)):
        out = module(x)
    out.backward(torch.ones_like(out) if grad is None else grad)
    return [out.detach(), x.grad, [p.grad.clone() for p in module.parameters()]]


def batch(device):
    return torch.randn(ROWS, IN, device=device)


def trained(kind, device, steps=3, **options):
    module = module_of(kind, device, **options)
    with counted() as gemms:
        for _ in range(steps):
            step(module, batch(device) * 5)
    assert gemms.fp8 == steps * GEMMS[kind]
    return module


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True], ids=["", "file"])
def test_state_dict_round_trip(device, kind, file):
    """Weights and delayed-scaling state of every slot; the other module goes on alike."""
    module, other = trained(kind, device), module_of(kind, device)
    saved = module.state_dict()
    assert saved.keys() == {*dict(module.named_parameters()), "_extra_state"}
    if file:
        stream = io.BytesIO()
        torch.save(saved, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
    other.load_state_dict(saved, strict=True)
    before = state_of(module)
    assert {d: v[1].shape for d, v in before.items()} == {
        d: (4, n) for d, n in zip(("forward", "backward"), SLOTS[kind], strict=True)
    }
    assert_same_bits(state_of(other), before)
    x = batch(device)
    assert_same_bits(step(other, x), step(module, x))


def test_state_dict_without_fp8_state(device, kind):
    """Nothing but the parameters, for modules that ran in high precision or current scaling."""
    module, other = module_of(kind, device), module_of(kind, device)
    for recipe in (None, "current"):
        step(module, batch(device), recipe)
        assert module.state_dict().keys() == dict(module.named_parameters()).keys()
        other.load_state_dict(module.state_dict(), strict=True)
        assert_same_bits(dict(other.named_parameters()), dict(module.named_parameters()))


def test_state_of_another_module_is_refused(device, kind):
    """The number of slots tells; weights stay what they were."""
    module = module_of(kind, device)
    wrong = trained("gelu" if kind == "linear" else "linear", device)
    given = module.state_dict() | {"_extra_state": wrong.get_extra_state()}
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    with pytest.raises(ValueError, match=f"expected {SLOTS[kind][0]} slots"):
        module.load_state_dict({n: t + 1 for n, t in given.items() if n in kept} | given)
    assert_same_bits({n: p.detach() for n, p in module.named_parameters()}, kept)
    assert state_of(module) is None


def test_reset_of_the_state(device, kind):
    module = trained(kind, device)
    module.reset_fp8_meta_tensors()
    assert state_of(module) is None
    fresh = module_of(kind, device)
    fresh.load_state_dict(module.state_dict())
    x = batch(device)
    assert_same_bits(step(module, x), step(fresh, x))


# ---- copies --------------------------------------------------------------------------------------


def copied(module, how):
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_goes_on_alone_from_the_same_state(device, kind, how):
    module = trained(kind, device)
    twin = copied(copied(module, how), how)
    assert repr(twin) == repr(module)
    assert_same_bits(state_of(twin), state_of(module))
    x = batch(device)
    expected = [step(module, x), state_of(module)]  # an update reaches all modules with slots
    assert_same_bits([step(twin, x), state_of(twin)], expected)
    kept = state_of(module)
    with torch.no_grad(), region(recipe_of("delayed")):
        twin(batch(device) * 100)
    assert_same_bits(state_of(module), kept)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_no_cache_and_nothing_pending(device, kind, how):
    module = module_of(kind, device, delay_wgrad_compute=True)
    with region(recipe_of("current")):
        out = module(batch(device), is_first_microbatch=True)
    out.sum().backward()
    twin = copied(module, how)
    assert set(twin._weight_caches) == {None} and None not in module._weight_caches
    with pytest.raises(RuntimeError, match="pending"):
        twin.backward_dw()
    module.backward_dw()


# ---- dtype and device ----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["half", "bfloat16", "to", "double-and-back"])
def test_changing_the_dtype(device, kind, change):
    """The state stays; the next step has the bits of a module made in the new dtype."""
    module = trained(kind, device)
    before = state_of(module)
    if change == "to":
        module.to(torch.float16)
    elif change == "double-and-back":
        module.double().float()
    else:
        getattr(module, change)()
    assert_same_bits(state_of(module), before)
    dtype = module.layer_norm_weight.dtype
    made = module_of(kind, device, dtype=dtype)
    made.load_state_dict(module.state_dict())
    x = batch(device).to(dtype)
    assert_same_bits([step(module, x), state_of(module)], [step(made, x), state_of(made)])


@pytest.mark.gpu
def test_changing_the_device(kind):
    module = trained(kind, "cuda")
    before = state_of(module)
    for device in ("cpu", "cuda"):
        module.to(device)
        with torch.no_grad(), counted() as gemms, region(recipe_of("delayed")):
            module(torch.zeros(16, IN, device=device))
        assert gemms.fp8 == GEMMS[kind] // 3
        after = state_of(module)
        assert after["forward"][0].device.type == device
        assert_same_bits(after["backward"], before["backward"])


# ---- weights that are replaced -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_reassigned_parameters(device, kind, recipe):
    """``mlp.fc1_weight = other.weight``: the next call computes with it, and its grad is there."""
    module, other = module_of(kind, device), module_of(kind, device)
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


@pytest.mark.parametrize("recipe", FP8)
def test_weights_of_other_modules(device, recipe):
    """An MLP on the parameters of a norm and two linear layers, shared with them."""
    mlp = module_of("relu", device)
    norm = te.LayerNorm(IN, device=device)
    first, second = te.Linear(IN, WIDTH, device=device), te.Linear(WIDTH, IN, device=device)
    mlp.layer_norm_weight, mlp.layer_norm_bias = norm.weight, norm.bias
    mlp.fc1_weight, mlp.fc1_bias = first.weight, first.bias
    mlp.fc2_weight, mlp.fc2_bias = second.weight, second.bias
    x = batch(device)
    out, dx, grads = step(mlp, x, recipe)
    assert_same_bits([norm.weight.grad, first.weight.grad], [grads[0], grads[2]])
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


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_tied_weights(device, recipe):
    """Two modules with one weight: its gradient is the sum; their scaling state is their own."""
    a, b = (make("gelu", device, sizes=(IN, WIDTH)) for _ in range(2))
    for name in ("fc1_weight", "fc2_weight"):
        setattr(b, name, a.get_parameter(name))
    separate = copy.deepcopy(a), copy.deepcopy(b)
    x = batch(device)
    results = []
    for first, second in ((a, b), separate):
        te.reset()
        with counted() as gemms:
            with region(recipe_of(recipe)):
                out = second(first(x) * 9)
            out.sum().backward()
        assert gemms.fp8 == 12
        results.append([out.detach(), state_of(first) or 0, state_of(second) or 0])
    assert_same_bits(*([t for t in r if not isinstance(t, int)] for r in results))
    for name in ("fc1_weight", "fc2_weight"):  # autograd adds that of the later module first
        parts = [m.get_parameter(name).grad for m in separate]
        assert_same_bits(a.get_parameter(name).grad, parts[1] + parts[0])


@pytest.mark.parametrize("recipe", FP8)
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


@pytest.mark.parametrize("recipe", FP8)
def test_functional_call(device, kind, recipe):
    module, other = module_of(kind, device), module_of(kind, device)
    x = batch(device)
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    values = {n: p.detach().clone().requires_grad_() for n, p in other.named_parameters()}
    inp = x.clone().requires_grad_()
    with region(recipe_of(recipe)):
        out = torch.func.functional_call(module, values, (inp,))
    out.backward(torch.ones_like(out))
    te.reset()
    found = [out.detach(), inp.grad, [v.grad for v in values.values()]]
    assert_same_bits(found, step(other, x, recipe))
    assert_same_bits({n: p.detach() for n, p in module.named_parameters()}, kept)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("recipe", FP8)
def test_parametrized_weights(device, kind, recipe):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    module = module_of(kind, device)
    twin = copy.deepcopy(module)
    name = f"{module.PARTS[-1]}weight"
    with torch.no_grad():
        twin.get_parameter(name).mul_(2)
    torch.nn.utils.parametrize.register_parametrization(module, name, Twice())
    torch.nn.utils.parametrize.register_parametrization(module, "layer_norm_weight", Twice())
    with torch.no_grad():
        twin.layer_norm_weight.mul_(2)
    x = batch(device)
    found = step(module, x, recipe)
    grads = {n: p.grad for n, p in module.named_parameters()}
    te.reset()
    expected = step(twin, x, recipe)
    assert_same_bits(found[:2], expected[:2])
    for parameter in (name, "layer_norm_weight"):
        gradient = grads[f"parametrizations.{parameter}.original"]
        assert_same_bits(gradient, 2 * twin.get_parameter(parameter).grad)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("change", ["reassigned", "loaded", "dtype", "optimizer", "frozen"])
def test_split_weights_change(device, recipe, change):
    """However the parts of a split weight come to be, a call computes with their values."""
    split = {"q": 16, "k": 16, "v": 16}
    module = module_of("linear", device, parameters_split=split)
    whole = module_of("linear", device)
    x = batch(device)
    step(module, x, recipe)
    if change == "reassigned":
        module.k_weight = torch.nn.Parameter(torch.randn(16, IN, device=device))
    elif change == "loaded":
        module.load_state_dict(module_of("linear", device, parameters_split=split).state_dict())
    elif change == "dtype":
        module.bfloat16().float()
    elif change == "optimizer":
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    else:
        module.v_weight.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if name.startswith("layer_norm"):
                parameter.copy_(getattr(module, name))
            else:
                parameter.copy_(torch.cat([getattr(module, f"{n}_{name}") for n in split]))
    grad = torch.randn(ROWS, WIDTH, device=device)
    results = []
    for layer in (module, whole):
        te.reset()
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with region(recipe_of(recipe)):
            out = layer(inp)
        out.backward(grad)
        results.append([out.detach(), inp.grad])
    assert_same_bits(*results)
    rows = whole.weight.grad.split(16)
    assert_same_bits(module.q_weight.grad, rows[0])
    assert (module.v_weight.grad is None) == (change == "frozen")


# ---- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_double_backward_is_a_clear_error(device, kind, recipe):
    module = module_of(kind, device)
    inp = batch(device).requires_grad_()
    with region(recipe_of(recipe)):
        out = module(inp)
    (dx,) = torch.autograd.grad(out.square().sum(), inp, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative is not supported"):
        dx.square().sum().backward()


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("what", ["input", "weight", "gamma"])
def test_changes_in_place_before_the_backward_are_detected(device, kind, recipe, what):
    module = module_of(kind, device)
    inp = batch(device).requires_grad_()
    x = inp * 1
    with region(recipe_of(recipe)):
        out = module(x)
    weight = module.get_parameter(f"{module.PARTS[-1]}weight")
    tensors = {"input": x, "weight": weight, "gamma": module.layer_norm_weight}
    with torch.no_grad():
        tensors[what].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_backward_in_another_thread(device, kind, recipe):
    module = module_of(kind, device)
    x = batch(device)
    expected = step(module, x, recipe)
    te.reset()
    module.zero_grad()
    inp = x.clone().requires_grad_()
    with region(recipe_of(recipe)):
        out = module(inp)
    thread = threading.Thread(target=lambda: out.sum().backward())
    thread.start()
    thread.join()
    assert_same_bits([inp.grad, [p.grad for p in module.parameters()]], expected[1:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", FP8)
def test_without_gradients(device, kind, recipe, mode):
    """The output of training, nothing kept, no scale updated; parameters made there train later."""
    module = module_of(kind, device)
    x = batch(device)
    expected = step(module, x, recipe)
    te.reset()
    for _ in range(2):
        with mode(), counted() as gemms, region(recipe_of(recipe)):
            out = module(x.clone().requires_grad_(mode is torch.no_grad))
        assert (gemms.fp8 if recipe else gemms.other) == GEMMS[kind] // 3
        assert not out.requires_grad
        assert_same_bits(out.clone(), expected[0])
    te.reset()
    assert_same_bits(step(module, x, recipe), expected)


# ---- regions -------------------------------------------------------------------------------------


def test_nested_regions(device, kind):
    """Each region has its recipe; a disabled one inside computes in high precision."""
    module = module_of(kind, device)
    x = batch(device)
    plain = module(x)
    with region(recipe_of("current")):
        current = module(x)
    with counted() as gemms, te.autocast(recipe=recipe_of("delayed")):
        first = module(x)
        with te.autocast(recipe=recipe_of("current")):
            assert_same_bits(module(x), current)
        with te.autocast(enabled=False):
            assert_same_bits(module(x), plain)
        again = module(x)  # the update is that of the outermost exit
    per_call = GEMMS[kind] // 3
    assert (gemms.fp8, gemms.other) == (3 * per_call, per_call)
    assert_same_bits(first, again)


def test_calibration(device, kind):
    """High precision, but the amaxes of FP8: of inputs and weights, in the slots FP8 has."""
    module = module_of(kind, device)
    x = batch(device)
    expected = step(module, x, None)
    module.zero_grad()
    inp = x.clone().requires_grad_()
    with counted() as gemms:
        with te.autocast(enabled=False, calibrating=True, recipe=recipe_of("delayed")):
            out = module(inp)
        out.backward(torch.ones_like(out))
    assert (gemms.fp8, gemms.other) == (0, GEMMS[kind])
    found = [out.detach(), inp.grad, [p.grad for p in module.parameters()]]
    assert_same_bits(found, expected)
    collected = state_of(module)
    assert (collected["backward"][1] == 0).all()
    te.reset()
    fp8 = module_of(kind, device)
    fp8.load_state_dict({n: t for n, t in module.state_dict().items() if n != "_extra_state"})
    with region(recipe_of("delayed")):
        fp8(x.clone().requires_grad_())
    scale, history = state_of(fp8)["forward"]
    used = [slot for slot in range(SLOTS[kind][0]) if slot % 3 != 2]
    assert (history[-1, used] > 0).all()
    for slot in range(SLOTS[kind][0]):
        if slot % 3 == 1 or slot == 2 or slot == 5:  # weights, and what no tensor has
            assert_same_bits(collected["forward"][1][:, slot], history[:, slot])
        else:  # inputs: not rounded on their way in FP8, and fc2's has other operands before it
            ratio = collected["forward"][0][slot] / scale[slot]
            assert abs(ratio - 1) <= tol("calibrated", torch.float8_e4m3fn)
