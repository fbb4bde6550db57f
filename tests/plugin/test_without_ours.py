# SPDX-License-Identifier: Apache-2.0
"""Policies under which nothing of this library's own runs: by an order of all, and strict."""

import pytest
import torch
from plugged import FFN, HIDDEN, MODULES, RECIPES, data, made, native, ran, register

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.plugin import adapters, core as plugin

pytestmark = pytest.mark.usefixtures("manager")

VENDORS = plugin.SelectionPolicy(per_op_order=(("*", ("vendor",)),))


def order(**others):
    orders = {"*": ["vendor"], **others}
    return plugin.policy_context(plugin.SelectionPolicy.from_dict(per_op_order=orders))


def test_an_order_of_every_operator():
    registry = plugin.OpRegistry()
    for op in ("one", "two"):
        for name, kind in (("default.d", plugin.BackendImplKind.DEFAULT),
                           ("vendor.v", plugin.BackendImplKind.VENDOR)):  # fmt: skip
            registry.register(plugin.OpImpl(op, name, kind, lambda name=name: name, "v"))
    manager = plugin.OpManager(registry)
    one, two = manager.operator("one"), manager.operator("two")
    with order(two=["flagos"]):
        assert (one(), two()) == ("vendor.v", "default.d")
        registry.unregister("one", "vendor.v")
        with pytest.raises(RuntimeError, match="one: no implementation can be called"):
            one()
        assert two() == "default.d"
    assert one() == "default.d"
    assert VENDORS.get_per_op_order("any") == ["vendor"] and VENDORS.per_op_order_dict.keys() == {
        "*"
    }


@pytest.mark.parametrize("name", list(MODULES))
@pytest.mark.parametrize("strict", [False, True])
def test_modules_raise_where_nobody_has_their_operators(name, strict, device):
    module, x = made(name, device), data(device)
    wanted = module(x).detach()
    policy = plugin.SelectionPolicy(strict=strict, per_op_order=VENDORS.per_op_order)
    with plugin.policy_context(policy), pytest.raises(RuntimeError, match="no implementation can"):
        module(x)
    assert torch.equal(module(x), wanted)


def forward(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered):
    rsigma = (input.float().square().mean(-1) + eps).rsqrt()
    return (input * rsigma[:, None] * (weight + zero_centered)).to(otype), None, rsigma


def backward(dz, x, rsigma, gamma, sm_margin, zero_centered):
    return dz, gamma


def test_modules_run_what_others_have(device):
    """The results are theirs, forward and backward."""
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    register("rmsnorm_fwd", forward)
    register("rmsnorm_bwd", backward)
    before = plugins.counts()
    with order():
        module(x).sum().backward()
    assert ran(before) == {"rmsnorm_fwd/vendor.test": 1, "rmsnorm_bwd/vendor.test": 1}
    assert bool((x.grad == 1).all())


def test_what_is_not_expressed_raises(device):
    """The norm of heads has no operator, and te_fill none but in C."""
    x = torch.randn(8, HIDDEN, device=device)
    obeying = _core.obeying("norm")
    out = torch.empty_like(x)
    with order(), pytest.raises(RuntimeError, match="te_norm: no implementation"):
        obeying(x, _core.NORM_L2, wide=out, eps=1e-5)
    with order(), pytest.raises(RuntimeError, match="te_fill: no implementation"):
        _core.obeying("fill")(out, 1.0)
    with order(te_fill=["vendor", "flagos"]):
        _core.obeying("fill")(out, 1.0)
    assert bool((out == 1).all())
    obeying(x, _core.NORM_L2, wide=out, eps=1e-5)


def test_an_operator_may_admit_ours(device):
    """`te_norm` runs where one of the operators that it is mapped to admits this library's own."""
    x = data(device)
    with order(rmsnorm_fwd=["vendor", "impl:default.native"]):
        assert made("RMSNorm", device)(x).shape == x.shape
        with pytest.raises(RuntimeError, match="layernorm_fwd: no implementation"):
            made("LayerNorm", device)(x)


# ---- dropout -------------------------------------------------------------------------------------


def layer(device):
    return te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.5, attention_dropout=0.0, device=device
    )


@pytest.mark.parametrize("recipe", ["plain", "delayed"])
def test_dropout_under_strict(recipe, device):
    """Where another one's dropout is selected strictly, modules do not run ours unsaid."""
    register("dropout_fwd", native("dropout_fwd"))
    module, x = layer(device), data(device)
    make = RECIPES[recipe]
    with plugin.with_preference("vendor"):
        module(x)  # its mask can not be told, so ours runs
        with (
            plugin.with_strict_mode(),
            te.autocast(enabled=make is not None, recipe=make and make()),
            pytest.raises(NotImplementedError, match=r"dropout_fwd.*vendor\.test.*not express it"),
        ):
            module(x)
        with plugin.with_strict_mode():
            module.eval()(x)  # nothing is dropped
    assert plugins.counts().get("dropout_fwd/vendor.test", 0) == 0


def test_the_gradient_of_dropout_under_strict(device):
    register("dropout_bwd", native("dropout_bwd"))
    module, x = layer(device), data(device)
    with plugin.with_preference("vendor"), plugin.with_strict_mode():
        y = module(x.requires_grad_())
        with pytest.raises(NotImplementedError, match=r"dropout_bwd.*vendor\.test"):
            y.sum().backward()


def test_dropout_by_an_order(device):
    module, x = layer(device), data(device)
    policy = plugin.SelectionPolicy.from_dict(per_op_order={"dropout_fwd": ["vendor"]})
    with plugin.policy_context(policy), pytest.raises(RuntimeError, match="dropout_fwd: no impl"):
        module(x)


def test_dropout_asks_nobody_who_is_not_strict(device):
    """No selection is made of operators that can take no call."""
    register("dropout_fwd", native("dropout_fwd"))
    with plugin.with_preference("vendor"):
        layer(device)(data(device))
        assert _core.selection_number() == 0
    assert "dropout_fwd" not in adapters.OPERATORS
