# SPDX-License-Identifier: Apache-2.0
"""Options of linear modules: what each changes in a call, and what it refuses.

How they are made, and with which parameters: test_module_construction.py.
"""

import pytest
import torch
from comparators import assert_grad64, assert_nmse
from device_kinds import every_device
from layer_reference import wide
from pytorch.helpers import RECIPES, assert_same_bits, counted
from pytorch.module_cases import (
    FEW,
    RECIPE_NAMES,
    batch,
    copy_values,
    count_of,
    gemms_of,
    has_norm,
    make,
    outputs_of,
    region,
    weights_of,
    whole,
)
from pytorch.module_reference import ACTIVATIONS, KINDS as NORMS, Step, definition, values_of
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MMParams

pytestmark = every_device

BOTH = FEW[1:]
SIZES = (48, 32)
recipes = pytest.mark.parametrize("recipe", RECIPE_NAMES)
# With the norm's output and without it, where there is a norm.
normed_or_not = pytest.mark.parametrize(
    ("kind", "normed"),
    [(kind, normed) for kind in FEW for normed in (False, True) if not normed or has_norm(kind)],
    ids=lambda v: {True: "norm-output", False: ""}.get(v, v),
)


def run(module, x, recipe, *grads):
    """Forward and backward: (outputs, gradient of the input)."""
    inp = x.detach().clone().requires_grad_()
    module.zero_grad()
    with region(recipe):
        outputs = module(inp)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward(*zip(*wanted, strict=True))
    return [o.detach() for o in outputs], inp.grad


def grads_of(module):
    return {n: p.grad for n, p in module.named_parameters()}


def biases_of(module):
    """Names of the biases of the linear layers."""
    return [f"{prefix}bias" for prefix in module.LINEARS]


def made(kind, device, normed=False, **options):
    """A module of the sizes of `x`."""
    options |= {"return_layernorm_output": True} if normed else {}
    return make(kind, device, sizes=SIZES, **options)


@pytest.fixture
def x(device):
    return torch.randn(24, 48, device=device)


# ---- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", (*BOTH, "swiglu checkpoint"))
@recipes
@pytest.mark.parametrize("used", ["both", "output", "norm"])
def test_return_layernorm_output(device, kind, recipe, used, x):
    """The output is as without; the gradient of the norm's output joins the other one."""
    module = made(kind, device, normed=True)
    plain = made(kind.removesuffix(" checkpoint"), device)
    copy_values(plain, module)
    grads = [torch.randn(24, n, device=device) for n in (outputs_of(module), 48)]
    given = [
        g if used in ("both", name) else None
        for g, name in zip(grads, ("output", "norm"), strict=True)
    ]
    outputs, dx = run(module, x, recipe, *given)
    te.reset()
    first = grads[0] if used != "norm" else torch.zeros_like(grads[0])
    expected, base = run(plain, x, recipe, first)
    values = values_of(module)
    assert_same_bits(outputs[0], expected[0])
    bound = tol("chain", torch.float32, 64)
    assert_nmse(outputs[1], definition(module, wide(x), values)[1], bound)
    if used == "output":
        assert_same_bits([dx, grads_of(module)], [base, grads_of(plain)])
        return
    # What the norm's own output adds is the same in FP8: no GEMM is passed.
    norm = {"x": x, "layer_norm_weight": module.layer_norm_weight}
    norm["layer_norm_bias"] = module.layer_norm_bias
    found = {"x": dx.double() - base.double()}
    for name in list(norm)[1:]:
        mine, theirs = (m.get_parameter(name).grad.double() for m in (module, plain))
        found[name] = mine - theirs
    assert_grad64(found, lambda x, **v: definition(module, x, values | v)[1], norm, grads[1], bound)
    for name in (*weights_of(module), *biases_of(module)):
        assert_same_bits(module.get_parameter(name).grad, plain.get_parameter(name).grad)


@normed_or_not
@recipes
def test_return_bias(device, kind, recipe, normed, x):
    """The last bias comes back in the output's dtype and is not added; its place is second."""
    module = made(kind, device, normed, return_bias=True)
    name = biases_of(module)[-1]
    bias = module.get_parameter(name)
    grad = torch.randn(24, outputs_of(module), device=device)
    outputs, dx = run(module, x, recipe, *[grad, None, None][: 2 + normed])
    assert len(outputs) == 2 + normed
    assert_same_bits(outputs[1], bias.detach())
    assert bias.grad is None  # its gradient is the caller's
    te.reset()
    plain = made(kind, device)
    copy_values(plain, module)
    with torch.no_grad():
        plain.get_parameter(name).zero_()
    expected, base = run(plain, x, recipe, grad)
    assert_same_bits([outputs[0], dx], [expected[0], base])
    module(x)[1].sum().backward()
    assert (bias.grad == 1).all()
    with torch.autocast(device, dtype=torch.bfloat16):
        out, given, *_ = module(x)
    assert out.dtype == given.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("bias", [True, False])
def test_return_bias_under_a_reentrant_checkpoint(device, kind, bias, x):
    """What a checkpoint returns becomes an output of its node: not the module's own tensor."""
    module = made(kind, device, return_bias=True, bias=bias)
    own = getattr(module, biases_of(module)[-1])
    results = []
    for call in (module, lambda inp: te.checkpoint(module, inp)):
        inp = x.detach().clone().requires_grad_()
        module.zero_grad()
        out, given = call(inp)
        assert own.is_leaf and own.requires_grad is bias
        (out + given if bias else out).square().sum().backward()
        results.append([out.detach(), inp.grad, grads_of(module)])
    assert_same_bits(*results)


@normed_or_not
@recipes
def test_no_bias(device, kind, recipe, normed, x):
    """Empty tensors in the place of biases; the numbers of biases of zero."""
    module = made(kind, device, normed, bias=False, return_bias=True)
    weights, biases = list(weights_of(module)), biases_of(module)
    norm = ["layer_norm_weight", "layer_norm_bias"] if has_norm(kind) else []
    assert sorted(dict(module.named_parameters())) == sorted([*norm, *weights])
    for name in biases:
        empty = getattr(module, name)
        assert isinstance(empty, torch.Tensor) and empty.numel() == 0
    full = made(kind, device)
    full.load_state_dict(module.state_dict(), strict=False)
    with torch.no_grad():
        for name in biases:
            full.get_parameter(name).zero_()
    grad = torch.randn(24, outputs_of(module), device=device)
    outputs, dx = run(module, x, recipe, *[grad, None, None][: 2 + normed])
    assert outputs[1].numel() == 0
    te.reset()
    expected, base = run(full, x, recipe, grad)
    assert_same_bits([outputs[0], dx], [expected[0], base])
    for name in (*norm, *weights):
        assert_same_bits(module.get_parameter(name).grad, full.get_parameter(name).grad)


# ---- the norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("norm", NORMS)
@recipes
def test_zero_centered_gamma(device, kind, norm, recipe, x):
    """Gamma begins at 0; 1 + gamma has the numbers of a plain gamma that is larger by 1."""
    centred = made(kind, device, normalization=norm, zero_centered_gamma=True)
    fresh = type(centred)(48, 32, zero_centered_gamma=True, device=device)
    assert (fresh.layer_norm_weight == 0).all()
    plain = made(kind, device, normalization=norm)
    copy_values(plain, centred)
    with torch.no_grad():  # exact in both: eighths
        gamma = (plain.layer_norm_weight * 8).round() / 8
        centred.layer_norm_weight.copy_(gamma)
        plain.layer_norm_weight.copy_(gamma + 1)
    grad = torch.randn(24, outputs_of(plain), device=device)
    results = []
    for module in (centred, plain):
        te.reset()
        results.append([*run(module, x, recipe, grad), grads_of(module)])
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", BOTH)
def test_normalization(device, kind):
    module = made(kind, device, normalization="RMSNorm")
    assert module.layer_norm_bias is None and "layer_norm_bias" not in module.state_dict()
    assert (type(module)(48, 32, device=device).layer_norm_weight == 1).all()
    assert (type(module)(48, 32, device=device).layer_norm_bias == 0).all()
    text = "normalization='BatchNorm', expected one of LayerNorm, RMS"
    with pytest.raises(ValueError, match=text):
        made(kind, device, normalization="BatchNorm")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["eps", "zero_centered_gamma", "return_layernorm_output"])
def test_settings_changed_after_calls(device, kind, name, x):
    """They count from the next call on."""
    value = 0.5 if name == "eps" else True
    module, other = made(kind, device), made(kind, device, **{name: value})
    copy_values(other, module)
    for _ in range(2):
        module(x)
    setattr(module, name, value)
    assert_same_bits(module(x), other(x))


# ---- the activation ------------------------------------------------------------------------------


def test_every_activation_has_a_name():
    assert set(ACTIVATIONS) == set(_core.activation_names())


@recipes
@pytest.mark.parametrize(
    "params", [{"limit": 0.75}, {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25}], ids=str
)
def test_activation_params(device, recipe, params):
    """Limits that cut about half of the values off."""
    options = {"activation_params": params, "delay_wgrad_compute": True}
    module = made("clamped_swiglu", device, **options)
    names = {"glu_linear_offset": "linear_offset"}
    numbers = {names.get(n, n): value for n, value in params.items()}
    x = torch.randn(40, 48, device=device)
    step = Step(module, x, torch.randn_like(x), recipe and RECIPES[recipe](), **numbers)
    step.check_forward()
    step.check_backward()


# ---- split parameters ----------------------------------------------------------------------------

SPLITS = {
    "tuple": (("query_", "key_", "value"), {"query": 16, "key": 16, "value": 16}),
    "list": (["a", "b"], {"a": 24, "b": 24}),
    "dict": ({"q_": 32, "kv": 16}, {"q": 32, "kv": 16}),
}


@pytest.mark.parametrize("kind", ["linear", "norm-linear"])
@recipes
@pytest.mark.parametrize(
    ("split", "bias"),
    [("tuple", True), ("tuple", False), ("list", True), ("dict", True), ("dict", False)],
    ids=lambda v: {True: "bias", False: "no-bias"}.get(v, v),
)
def test_parameters_split(device, kind, recipe, split, bias):
    argument, parts = SPLITS[split]
    module = make(kind, device, parameters_split=argument, bias=bias)
    vectors = ("weight", "bias")[: 1 + bias]
    names = [f"{n}_{vector}" for vector in vectors for n in parts]
    norm = ["layer_norm_weight", "layer_norm_bias"] if has_norm(kind) else []
    assert sorted(dict(module.named_parameters())) == sorted([*names, *norm])
    assert sorted(module.state_dict()) == sorted([*names, *norm])
    for name, rows in parts.items():
        assert getattr(module, f"{name}_weight").shape == (rows, 32)
        assert getattr(module, f"{name}_bias").shape == (rows if bias else 0,)
    plain = make(kind, device, bias=bias)
    copy_values(plain, module, parts)
    x, grad = batch(device), torch.randn(16, 48, device=device)
    results = []
    for layer in (module, plain):
        te.reset()
        with counted() as gemms:
            found = run(layer, x, recipe, grad)
        assert count_of(gemms, recipe) == gemms_of(layer)
        grads = {n: whole(layer, n, lambda p: p.grad, parts) for n in (*vectors, *norm)}
        results.append([*found, grads])
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", ["linear", "norm-linear"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_assigning_a_name_that_the_split_replaced(device, kind, name):
    module = make(kind, device, parameters_split=("q_", "k_"))
    text = f"{type(module).__name__}: {name} is split into q_{name}, k_{name}"
    with pytest.raises(AttributeError, match=text):
        setattr(module, name, torch.nn.Parameter(torch.zeros(48, 32, device=device)))
    assert not hasattr(module, "weight")


# ---- accumulation --------------------------------------------------------------------------------

FAST = (
    _core.LINEAR_FAST_OUTPUT,
    _core.LINEAR_FAST_GRAD_INPUT,
    _core.LINEAR_FAST_GRAD_WEIGHT,
)


@pytest.mark.parametrize("split", [(True, True, False), (False, False, True), None], ids=str)
def test_accumulation_follows_the_recipe(split):
    """Fast in the forward alone by default; each GEMM of current scaling can be told otherwise."""
    if split is None:
        split, given = (False, True, True), [DelayedScaling(), Float8CurrentScaling()]
    else:
        names = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
        chosen = {name: MMParams(value) for name, value in zip(names, split, strict=True)}
        given = [Float8CurrentScaling(**chosen)]
    for recipe in given:
        flags = quantization_of(recipe).fast
        assert [bool(flags & flag) for flag in FAST] == [not value for value in split]


# ---- what is refused, or has no effect -----------------------------------------------------------


def test_accepted_and_without_effect(device, x):
    options = {"seq_length": 8, "micro_batch_size": 3, "set_parallel_mode": True, "name": "mlp"}
    module = made("gelu", device, **options)
    plain = made("gelu", device)
    copy_values(plain, module)
    assert_same_bits(module(x), plain(x))
    assert module.name == "mlp"
