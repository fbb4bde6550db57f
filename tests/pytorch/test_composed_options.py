# SPDX-License-Identifier: Apache-2.0
"""Arguments of LayerNormLinear and LayerNormMLP, one by one: what each changes and refuses."""

import contextlib

import pytest
import torch
from comparators import assert_grad64, assert_nmse
from layer_reference import wide
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of
from pytorch.module_reference import (
    ACTIVATIONS,
    KINDS,
    Step,
    definition,
    make,
    region,
    values_of,
)
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import Float8CurrentScaling

FP8 = [None, "delayed", "current"]
BOTH = ["linear", "swiglu"]
NAMES = {
    "linear": ("weight", "bias"),
    "swiglu": ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
}


def recipe_of(name):
    return None if name is None else RECIPES[name]()


def outputs_of(module):
    return module._sizes()[-1][1]


def run(module, x, recipe, *grads):
    """Forward and backward: (outputs, gradient of the input)."""
    inp = x.detach().clone().requires_grad_()
    module.zero_grad()
    with region(recipe_of(recipe)):
        outputs = module(inp)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    torch.autograd.backward(*zip(*wanted, strict=True))
    return [o.detach() for o in outputs], inp.grad


def parameters_of(module):
    return {n: p.grad for n, p in module.named_parameters()}


@pytest.fixture
def x(device):
    return torch.randn(24, 48, device=device)


# ---- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("used", ["both", "output", "norm"])
@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
def test_return_layernorm_output(device, kind, recipe, used, again, x):
    """The output is as without; the gradient of the norm's output joins the other one."""
    options = {"checkpoint": True} if again and kind != "linear" else {}
    module = make(kind, device, return_layernorm_output=True, **options)
    plain = make(kind, device)
    plain.load_state_dict(module.state_dict())
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
        assert_same_bits([dx, parameters_of(module)], [base, parameters_of(plain)])
        return
    # What the norm's own output adds is the same in FP8: no GEMM is passed.
    norm = {"x": x, "layer_norm_weight": module.layer_norm_weight}
    norm["layer_norm_bias"] = module.layer_norm_bias
    found = {"x": dx.double() - base.double()}
    for name in list(norm)[1:]:
        found[name] = (
            module.get_parameter(name).grad.double() - plain.get_parameter(name).grad.double()
        )
    assert_grad64(found, lambda x, **v: definition(module, x, values | v)[1], norm, grads[1], bound)
    for name in NAMES[kind]:
        assert_same_bits(module.get_parameter(name).grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm-output"])
def test_return_bias(device, kind, recipe, normed, x):
    """The last bias comes back in the output's dtype and is not added; its place is second."""
    module = make(kind, device, return_bias=True, return_layernorm_output=normed)
    name = NAMES[kind][-1]
    bias = module.get_parameter(name)
    grad = torch.randn(24, outputs_of(module), device=device)
    outputs, dx = run(module, x, recipe, *[grad, None, None][: 2 + normed])
    assert len(outputs) == 2 + normed
    assert_same_bits(outputs[1], bias.detach())
    assert bias.grad is None  # its gradient is the caller's
    te.reset()
    plain = make(kind, device)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        plain.get_parameter(name).zero_()
    expected, base = run(plain, x, recipe, grad)
    assert_same_bits([outputs[0], dx], [expected[0], base])
    module(x)[1].sum().backward()
    assert (bias.grad == 1).all()
    with torch.autocast(device, dtype=torch.bfloat16):
        out, given, *_ = module(x)
    assert out.dtype == given.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bias", [True, False])
def test_return_bias_under_a_reentrant_checkpoint(device, kind, bias, x):
    """What a checkpoint returns becomes an output of its node: not the module's own tensor."""
    module = make(kind, device, return_bias=True, bias=bias)
    own = getattr(module, NAMES[kind][-1])
    results = []
    for call in (module, lambda inp: te.checkpoint(module, inp)):
        inp = x.detach().clone().requires_grad_()
        module.zero_grad()
        out, given = call(inp)
        assert own.is_leaf and own.requires_grad is bias
        (out + given if bias else out).square().sum().backward()
        results.append([out.detach(), inp.grad, parameters_of(module)])
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm-output"])
def test_no_bias(device, kind, recipe, normed, x):
    """Empty tensors in the place of biases; the numbers of biases of zero."""
    module = make(kind, device, bias=False, return_layernorm_output=normed, return_bias=True)
    weights, biases = NAMES[kind][::2], NAMES[kind][1::2]
    norm = ["layer_norm_weight", "layer_norm_bias"]
    assert sorted(dict(module.named_parameters())) == sorted([*norm, *weights])
    assert all(getattr(module, name).numel() == 0 for name in biases)
    full = make(kind, device)
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
@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("recipe", FP8)
def test_zero_centered_gamma(device, kind, norm, recipe, x):
    """Gamma begins at 0; 1 + gamma has the numbers of a plain gamma that is larger by 1."""
    centred = make(kind, device, normalization=norm, zero_centered_gamma=True)
    assert (
        type(centred)(48, 32, zero_centered_gamma=True, device=device).layer_norm_weight == 0
    ).all()
    plain = make(kind, device, normalization=norm)
    plain.load_state_dict(centred.state_dict())
    with torch.no_grad():  # exact in both: eighths
        gamma = (plain.layer_norm_weight * 8).round() / 8
        centred.layer_norm_weight.copy_(gamma)
        plain.layer_norm_weight.copy_(gamma + 1)
    grad = torch.randn(24, outputs_of(plain), device=device)
    results = []
    for module in (centred, plain):
        te.reset()
        results.append([*run(module, x, recipe, grad), parameters_of(module)])
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", BOTH)
def test_normalization(device, kind, x):
    module = make(kind, device, normalization="RMSNorm")
    assert module.layer_norm_bias is None and "layer_norm_bias" not in module.state_dict()
    assert (type(module)(48, 32, device=device).layer_norm_weight == 1).all()
    assert (type(module)(48, 32, device=device).layer_norm_bias == 0).all()
    with pytest.raises(
        ValueError, match="normalization='BatchNorm', expected one of LayerNorm, RMS"
    ):
        make(kind, device, normalization="BatchNorm")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["eps", "zero_centered_gamma", "return_layernorm_output"])
def test_settings_changed_after_calls(device, kind, name, x):
    """They count from the next call on."""
    value = 0.5 if name == "eps" else True
    module, other = make(kind, device), make(kind, device, **{name: value})
    other.load_state_dict(module.state_dict())
    for _ in range(2):
        module(x)
    setattr(module, name, value)
    assert_same_bits(module(x), other(x))


# ---- the activation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_shapes(name):
    module = te.LayerNormMLP(48, 32, activation=name, device="cpu")
    gated = name.endswith("glu")
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert shapes == {
        "layer_norm_weight": (48,),
        "layer_norm_bias": (48,),
        "fc1_weight": (64 if gated else 32, 48),
        "fc1_bias": (64 if gated else 32,),
        "fc2_weight": (48, 32),
        "fc2_bias": (48,),
    }


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize(
    "params", [{"limit": 0.75}, {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25}], ids=str
)
def test_activation_params(device, recipe, params):
    """Limits that cut about half of the values off."""
    options = {"activation_params": params, "delay_wgrad_compute": True}
    module = make("clamped_swiglu", device, **options)
    names = {"glu_linear_offset": "linear_offset"}
    numbers = {names.get(n, n): value for n, value in params.items()}
    x = torch.randn(40, 48, device=device)
    step = Step(module, x, torch.randn_like(x), recipe_of(recipe), **numbers)
    step.check_forward()
    step.check_backward()


def test_wrong_activations():
    with pytest.raises(
        NotImplementedError, match="LayerNormMLP: activation='tanh'; there are gelu"
    ):
        te.LayerNormMLP(48, 32, activation="tanh", device="cpu")
    with pytest.raises(ValueError, match="clamped_swiglu takes limit, alpha, glu_linear_offset"):
        te.LayerNormMLP(
            48, 32, activation="clamped_swiglu", activation_params={"bound": 1}, device="cpu"
        )
    with pytest.raises(ValueError, match="activation_params=.*gelu takes none"):
        te.LayerNormMLP(48, 32, activation_params={"limit": 1.0}, device="cpu")


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("split", [("query_", "key_"), {"q": 24, "kv_": 8}], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_parameters_split(device, recipe, split, bias, x):
    names = [n.rstrip("_") for n in split]
    module = make("linear", device, parameters_split=split, bias=bias)
    kinds = ("weight", "bias")[: 1 + bias]
    assert {n for n, _ in module.named_parameters() if "layer_norm" not in n} == {
        f"{n}_{kind}" for n in names for kind in kinds
    }
    whole = make("linear", device, bias=bias)
    with torch.no_grad():
        for kind in kinds:
            rows = [getattr(module, f"{n}_{kind}") for n in names]
            getattr(whole, kind).copy_(torch.cat(rows))
        for name in ("layer_norm_weight", "layer_norm_bias"):
            getattr(whole, name).copy_(getattr(module, name))
    grad = torch.randn(24, 32, device=device)
    results = []
    for layer in (module, whole):
        te.reset()
        results.append(run(layer, x, recipe, grad))
    assert_same_bits(*results)
    for kind in kinds:
        grads = [getattr(module, f"{n}_{kind}").grad for n in names]
        assert_same_bits(torch.cat(grads), getattr(whole, kind).grad)
    for name in ("layer_norm_weight", "layer_norm_bias"):
        assert_same_bits(getattr(module, name).grad, getattr(whole, name).grad)
    with pytest.raises(AttributeError, match="LayerNormLinear: weight is split into"):
        module.weight = whole.weight


def test_initial_values(device):
    layer, mlp = (
        te.LayerNormLinear(256, 512, device=device),
        te.LayerNormMLP(256, 512, device=device),
    )
    for module, names in ((layer, ("weight",)), (mlp, ("fc1_weight", "fc2_weight"))):
        for name, parameter in module.named_parameters():
            if name not in names:
                assert (parameter == float(name == "layer_norm_weight")).all()
                continue
            deviation = float(parameter.detach().double().std())
            # The sample deviation of n values is itself within 1/sqrt(2 n) of it; 6 times here.
            assert abs(deviation / 0.023 - 1) * (2 * parameter.numel()) ** 0.5 < 6


def test_init_methods(device):
    def constant(value):
        return lambda weight: torch.nn.init.constant_(weight, value)

    mlp = te.LayerNormMLP(
        48, 32, init_method=constant(2.0), output_layer_init_method=constant(3.0), device=device
    )
    assert (mlp.fc1_weight == 2).all() and (mlp.fc2_weight == 3).all()
    assert (mlp.fc1_bias == 0).all() and (mlp.fc2_bias == 0).all()
    layer = te.LayerNormLinear(48, 32, init_method=constant(2.0), device=device)
    assert (layer.weight == 2).all() and (layer.bias == 0).all()
    assert (layer.layer_norm_weight == 1).all()


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
def test_rng_tracker(kind):
    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name="default"):
            forks.append(name)
            state = torch.get_rng_state()
            torch.manual_seed(7)
            yield
            torch.set_rng_state(state)

    before = torch.get_rng_state()
    modules = [kind(32, 48, get_rng_state_tracker=Tracker, device="cpu") for _ in range(2)]
    assert_same_bits(torch.get_rng_state(), before)
    assert_same_bits(*[dict(m.named_parameters()) for m in modules])
    assert set(forks) == {"default"}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["reset", "to_empty"])
def test_meta_device(device, kind, bias, how):
    with torch.device("meta"):
        module = type(make(kind, "cpu"))(48, 32, bias=bias, device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.layer_norm_weight.mark = "kept"
    module.reset_parameters(defer_init=True)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    if how == "to_empty":
        module.to_empty(device=device)
    module.reset_parameters()
    assert how == "to_empty" or module.layer_norm_weight.mark == "kept"
    module.to(device)
    assert all(p.isfinite().all() for p in module.parameters())
    with counted() as gemms:
        grad = torch.ones(16, outputs_of(module), device=device)
        run(module, torch.randn(16, 48, device=device), "delayed", grad)
    assert gemms.fp8 == (3 if kind == "linear" else 6)


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_params_dtype(device, kind, dtype):
    module = kind(32, 48, params_dtype=dtype, device=device)
    assert {p.dtype for p in module.parameters()} == {dtype}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert {p.dtype for p in kind(32, 48).parameters()} == {torch.bfloat16}
    finally:
        torch.set_default_dtype(torch.float32)


# ---- what is refused, and what is shown ----------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_output", "fp8_grad"])
def test_forward_arguments_name_themselves(device, name, x):
    layer = make("linear", device)
    with te.autocast(), pytest.raises(NotImplementedError, match=f"LayerNormLinear: {name}=True"):
        layer(x, **{name: True})
    assert state_of(layer) is None


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("field", ["fp8_dpa", "backward_override"])
def test_recipe_fields_name_themselves(device, kind, field, x):
    made = Float8CurrentScaling(**{field: "dequantized" if field == "backward_override" else True})
    with te.autocast(recipe=made), pytest.raises(NotImplementedError, match=field):
        make(kind, device)(x)


@pytest.mark.parametrize("kind", [te.LayerNormLinear, te.LayerNormMLP])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4), (4, 2.0), ("4", 4)], ids=str)
def test_wrong_sizes(kind, sizes):
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*expected a positive int"):
        kind(*sizes, device="cpu")


def test_accepted_and_without_effect(device, x):
    options = {"seq_length": 8, "micro_batch_size": 3, "set_parallel_mode": True, "name": "mlp"}
    module = make("gelu", device, **options)
    plain = make("gelu", device)
    plain.load_state_dict(module.state_dict())
    assert_same_bits(module(x), plain(x))
    assert module.name == "mlp"


def test_extra_repr():
    shown = repr(te.LayerNormLinear(32, 48, zero_centered_gamma=True, device="cpu"))
    for part in ("in_features=32", "out_features=48", "LayerNorm", "zero_centered_gamma=True"):
        assert part in shown
    shown = repr(te.LayerNormMLP(32, 48, activation="swiglu", checkpoint=True, device="cpu"))
    for part in ("hidden_size=32", "ffn_hidden_size=48", "activation=swiglu", "checkpoint=True"):
        assert part in shown
    assert "zero_centered" not in shown


def test_every_activation_has_a_name():
    assert set(ACTIVATIONS) == set(_core.activation_names())
