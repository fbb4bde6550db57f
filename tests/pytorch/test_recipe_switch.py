# SPDX-License-Identifier: Apache-2.0
"""Switching recipe in mid-training: what is told, and what the module does from then on."""

import copy
import warnings

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted, state_of
from pytorch.module_cases import batch, make, region, step

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

WORDS = "it has trained under"


@pytest.fixture
def told():
    """Texts of the warnings of a switch, as they come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=f".*{WORDS}")
        texts = []

        def take():
            texts[:] = [str(w.message) for w in caught if WORDS in str(w.message)]
            caught.clear()
            return texts

        yield take


def data(device):
    return torch.randn(32, 64, device=device), torch.randn(32, 96, device=device)


def run(module, x, grad, recipe):
    """Output and gradients of one step."""
    module.zero_grad()
    given = x.clone().requires_grad_()
    with region(recipe):
        y = module(given)
    y.backward(grad)
    return [y.detach(), given.grad, *[p.grad for p in module.parameters()]]


def test_told_once_for_each_pair(device, told):
    layers = [te.Linear(64, 96, device=device) for _ in range(2)]
    x, grad = data(device)
    for layer in layers:
        run(layer, x, grad, "delayed")
    assert told() == []
    for layer in layers:
        run(layer, x, grad, "current")
    (text,) = told()
    assert text.startswith("Linear: ")
    assert f"{WORDS} DelayedScaling" in text and "under Float8CurrentScaling" in text
    run(layers[0], x, grad, "current")
    assert told() == []
    run(layers[0], x, grad, "delayed")
    (text,) = told()
    assert f"{WORDS} Float8CurrentScaling" in text
    te.reset()
    run(layers[1], x, grad, "delayed")
    assert len(told()) == 1


def test_not_told(device, told):
    """Of settings, of high precision, of evaluation, and of what no module has trained."""
    layer = te.Linear(64, 96, device=device)
    x, grad = data(device)
    for recipe in ("delayed", None, DelayedScaling(amax_history_len=4), DelayedScaling(margin=1)):
        run(layer, x, grad, recipe)
    with torch.no_grad(), region("current"):
        layer(x)
    run(layer, x, grad, "delayed")
    run(te.Linear(64, 96, device=device), x, grad, "current")
    te.explain(layer, x)
    assert told() == []


def test_told_by_layers_and_copies(device, told):
    layer = te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device
    )
    x = torch.randn(16, 2, 64, device=device)
    for _ in range(2):
        run(layer, x, torch.ones_like(x), "delayed")
    twin = copy.deepcopy(layer)
    run(layer, x, torch.ones_like(x), "current")
    assert len(told()) >= 1
    te.reset()
    run(twin, x, torch.ones_like(x), "current")
    assert len(told()) >= 1


SWITCHES = [
    (DelayedScaling, Float8CurrentScaling),
    (DelayedScaling, Float8BlockScaling),
    (Float8CurrentScaling, DelayedScaling),
    (Float8RowScaling, MXFP8BlockScaling),
    (MXFP8BlockScaling, DelayedScaling),
    (NVFP4BlockScaling, Float8BlockScaling),
]


@pytest.mark.parametrize("kind", ["linear", "norm-linear", "gelu"])
@pytest.mark.parametrize(("before", "after"), SWITCHES)
def test_runs_as_a_module_that_never_trained_otherwise(device, kind, before, after, start):
    """The same bits and counts, and state that begins with fresh scales."""
    results = []
    for first in (before, None):
        start()
        module, x = make(kind, device), batch(device)
        if first is not None:
            step(module, x, first())
        with counted() as gemms:
            steps = [step(module, x, after()) for _ in range(2)]
        results.append((steps, state_of(module) if after is DelayedScaling else None, vars(gemms)))
    (switched, state, gemms), (fresh, fresh_state, fresh_gemms) = results
    assert gemms == fresh_gemms
    assert_same_bits(switched, fresh)
    if after is DelayedScaling:
        assert_same_bits(state, fresh_state)


def test_scales_wait_for_delayed_scaling(device):
    """What it has found is there when it comes back, and is not touched meanwhile."""
    layer = te.Linear(64, 96, device=device)
    x, grad = data(device)
    for _ in range(3):
        run(layer, 4 * x, grad, DelayedScaling())
    before = state_of(layer)
    run(layer, x, grad, Float8CurrentScaling())
    assert_same_bits(state_of(layer), before)
    run(layer, x, grad, DelayedScaling())
    scale, _ = state_of(layer)["forward"]
    assert_same_bits(scale[0], before["forward"][0][0])  # the larger amax is in its history


def test_cached_weights_are_made_anew(device):
    layer = te.Linear(64, 96, device=device)
    x, _ = data(device)
    with torch.no_grad():
        for recipe in (Float8CurrentScaling, Float8BlockScaling, Float8CurrentScaling):
            with te.autocast(recipe=recipe()):
                assert_same_bits(layer(x, is_first_microbatch=False), layer(x))
