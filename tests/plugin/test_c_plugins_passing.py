# SPDX-License-Identifier: Apache-2.0
"""Layers whose every operator is a plug-in's, which has the library's own run it: the same bits."""

import threading
from contextlib import nullcontext

import pytest
import torch
from c_plugins import build, needs_compiler
from comparators import assert_bits
from plugged import RECIPES
from torch.utils.checkpoint import checkpoint

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.plugin import core as plugin

pytestmark = [needs_compiler, pytest.mark.usefixtures("passing")]

HIDDEN, FFN, SHAPE = 64, 128, (8, 2, 64)
RUN = {"norm", "gemm", "activation", "attention", "dropout_add"}
RUN |= {f"{op}_backward" for op in ("norm", "activation", "attention")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passing")
    return build(folder, "passing", source="c_plugins_passing.c")


@pytest.fixture
def passing(path, manager):
    plugin.register_library(manager.registry, path)


def layer(**options):
    torch.manual_seed(1)
    return te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.1, attention_dropout=0.0, device="cpu", **options
    )


def step(module, recipe=None, call=lambda module, x: module(x)):
    """Outputs and gradients of two steps."""
    results = []
    torch.manual_seed(2)
    for _ in range(2):
        x = torch.randn(SHAPE, requires_grad=True)
        with nullcontext() if recipe is None else te.autocast(enabled=True, recipe=recipe):
            y = call(module, x)
        results += [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]
    return [result.detach() for result in results]


def ran():
    return {
        name.removeprefix("te_").removesuffix("/vendor.passing")
        for name in plugins.counts()
        if name.endswith("/vendor.passing")
    }


def same(own, passed):
    for a, b in zip(own, passed, strict=True):
        assert_bits(b, a)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", ["plain", "delayed", "current", "block", "mxfp8"])
def test_layers(name, activation, repeated):
    options = dict(normalization="RMSNorm", activation=activation)
    recipe = None if RECIPES[name] is None else RECIPES[name]()

    def again(module, x):
        return checkpoint(module, x, use_reentrant=False)

    call = again if repeated else (lambda module, x: module(x))
    own = step(layer(**options), recipe, call)
    assert not ran()
    with plugin.with_preference("vendor"):
        passed = step(layer(**options), recipe, call)
    same(own, passed)
    assert ran() >= RUN | (set() if recipe is None else {"quantize"})


def test_compiled():
    own = step(layer())
    with plugin.with_preference("vendor"):
        passed = step(torch.compile(layer(), backend="aot_eager"))
    same(own, passed)
    assert ran() >= RUN


def test_threads():
    """Eight threads of two policies with one module."""
    module, x, wrong = layer().eval(), torch.randn(SHAPE), []
    wanted = module(x)

    def work(preference):
        with plugin.with_preference(preference):
            for _ in range(5):
                if not torch.equal(module(x), wanted):
                    wrong.append(preference)

    threads = [
        threading.Thread(target=work, args=(preference,)) for preference in ("flagos", "vendor") * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and plugins.counts()["te_attention/vendor.passing"] == 20
