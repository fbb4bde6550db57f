# SPDX-License-Identifier: Apache-2.0
"""Function transforms: first derivatives have the bits of autograd's, the others a message."""

import pytest
import torch
import torch.autograd.forward_ad
from pytorch.helpers import RECIPES, assert_same_bits, states_of
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import transformer_engine.pytorch as te

WIDTH, TOKENS, BATCH = 16, 6, 2

MAKERS = {
    "Linear": lambda d: te.Linear(WIDTH, 32, device=d),
    "split": lambda d: te.Linear(WIDTH, 32, parameters_split=("a", "b"), device=d),
    "LayerNormLinear": lambda d: te.LayerNormLinear(
        WIDTH, 32, return_layernorm_output=True, device=d
    ),
    "LayerNormMLP": lambda d: te.LayerNormMLP(WIDTH, 32, checkpoint=True, device=d),
    "RMSNorm": lambda d: te.RMSNorm(WIDTH, device=d),
    "transformer": lambda d: te.TransformerLayer(
        WIDTH, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, window_size=(2, 0), device=d
    ),
}


@pytest.fixture(params=MAKERS)
def name(request):
    return request.param


@pytest.fixture(params=[None, "delayed", "current"])
def recipe(request):
    return request.param


def loss_of(module, recipe):
    """Function of (parameters, input) that runs a module."""

    def loss(parameters, x):
        with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            out = functional_call(module, parameters, (x,))
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return loss


@pytest.fixture
def case(device, name, recipe):
    module = MAKERS[name](device)
    x = torch.randn(TOKENS, BATCH, WIDTH, device=device)
    return module, dict(module.named_parameters()), x, loss_of(module, recipe)


@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_first_derivatives(case, transform):
    module, parameters, x, loss = case
    results = []
    for transformed in (False, True):
        te.reset()
        for _ in range(3):  # scales move
            if not transformed:
                leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
                inp = x.clone().requires_grad_()
                loss(leaves, inp).backward()
                found = {name: p.grad for name, p in leaves.items()}, inp.grad
            elif transform == "grad":
                found = grad(loss, (0, 1))(parameters, x)
            else:
                value, pull = vjp(loss, parameters, x)
                found = pull(torch.ones_like(value))
        results.append((found, states_of(module)))
    assert_same_bits(*results)
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())


def test_functional_call(case):
    """Other parameters for one call; the module keeps its own."""
    module, parameters, x, _ = case
    others = {name: torch.randn_like(p) for name, p in parameters.items()}
    before = module(x)
    changed = functional_call(module, others, (x,))
    after = module(x)
    assert_same_bits(after, before)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(others[name])
    assert_same_bits(module(x), changed)


TRANSFORMS = {
    "vmap": ("vmap", lambda loss, p, x: vmap(loss, (None, 0))(p, torch.stack([x, x]))),
    "per sample": (
        "vmap",
        lambda loss, p, x: vmap(grad(loss), (None, 0))(p, torch.stack([x, x])),
    ),
    "jvp": ("jvp", lambda loss, p, x: jvp(lambda x: loss(p, x), (x,), (x,))),
    "jacfwd": ("(jvp|vmap)", lambda loss, p, x: jacfwd(lambda x: loss(p, x))(x)),
    "hessian": ("(jvp|vmap)", lambda loss, p, x: hessian(lambda x: loss(p, x))(x)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_not_supported_says_so(case, transform, gradients):
    module, parameters, x, loss = case
    what, run = TRANSFORMS[transform]
    if transform == "per sample" and not gradients:
        run = TRANSFORMS["vmap"][1]
    kinds = "Linear|LayerNormLinear|LayerNormMLP|RMSNorm"
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(NotImplementedError, match=rf"({kinds})\b.*{what}.*torch.func.grad"),
    ):
        run(loss, parameters, x)
    assert module(x) is not None  # and the next call is as ever


def test_dual_numbers(case):
    """Forward mode outside of torch.func: a tangent is not lost in silence."""
    module, parameters, x, loss = case
    for gradients in (True, False):
        module(x)
        with (
            torch.set_grad_enabled(gradients),
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(NotImplementedError, match=r"forward-mode differentiation \(jvp\)"),
        ):
            loss(parameters, torch.autograd.forward_ad.make_dual(x, x))


def test_second_derivatives(case):
    _, parameters, x, loss = case
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        grad(lambda x: grad(loss, 1)(parameters, x).sum())(x)


def test_backwards_of_a_batch(case):
    _, parameters, x, loss = case
    with pytest.raises(NotImplementedError, match="vmap is not supported, and with it"):
        jacrev(lambda x: loss(parameters, x))(x)


def test_transforms_of_something_else(device):
    """A module that is no part of what is batched or differentiated runs as ever."""
    layer = te.Linear(WIDTH, 32, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    expected = layer(x).detach()
    factors = torch.randn(3, device=device)
    assert torch.equal(vmap(lambda f: f * layer(x))(factors)[1], factors[1] * expected)
    assert torch.equal(
        grad(lambda f: (f * layer(x)).sum())(factors[0]), (layer(x) * 1.0).sum().detach()
    )


def test_modules_made_inside_of_a_transform(device):
    """Scaling state outlives the transform that its first call is in."""
    layer = te.Linear(WIDTH, 32, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    loss = loss_of(layer, "delayed")
    grad(loss)(dict(layer.named_parameters()), x)
    with te.autocast(recipe=RECIPES["delayed"]()):
        layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()
