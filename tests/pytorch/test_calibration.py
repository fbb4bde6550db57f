# SPDX-License-Identifier: Apache-2.0
"""Calibration: high precision, while amaxes are collected for a later switch to FP8."""

import contextlib

import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import (
    Fp8Linear,
    LinearModel,
    assert_same_bits,
    counted,
    state_of,
    sum_bound,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling


def calibrating(recipe):
    return te.autocast(enabled=False, calibrating=True, recipe=recipe)


@pytest.fixture
def layer(device):
    return te.Linear(32, 48, device=device)


@pytest.fixture
def recipe():
    return DelayedScaling(amax_history_len=3)


def batch(device):
    return torch.randn(16, 32, device=device) * 2.0 ** float(torch.randint(-4, 5, ()))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_computes_in_high_precision_and_updates_at_exit(device, layer, recipe, mode):
    """With gradients and, as calibration mostly runs, without."""
    model = LinearModel(recipe)
    for _ in range(5):
        batches = [batch(device) for _ in range(2)]
        with counted() as gemms, mode():
            with calibrating(recipe):
                outputs = [layer(x) for x in batches]
                assert_same_bits(state_of(layer)["forward"][0].cpu(), model.values()["forward"][0])
            assert_same_bits([o.clone() for o in outputs], [layer(x).clone() for x in batches])
        assert (gemms.fp8, gemms.other) == (0, 4)
        for x in batches:  # amaxes of one region add up to their maximum
            model.record("forward", 0, x)
        model.record("forward", 1, layer.weight)
        model.update("forward")
        assert_same_bits(state_of(layer), model.values())


def test_fp8_starts_with_the_calibrated_scales(device, layer, recipe):
    x = batch(device)
    with torch.no_grad(), calibrating(recipe):
        layer(x)
    scales = state_of(layer)["forward"][0]
    assert (scales[:2] != 1).all()
    with torch.no_grad(), counted() as gemms, te.autocast(recipe=recipe):
        out = layer(x)
    assert gemms.fp8 == 1
    exact, depth, fast = Fp8Linear(layer, recipe, scales, torch.ones(2)).run(x, out)["out"]
    assert_nmse(out, exact, sum_bound(device, torch.float32, depth, fast))


def test_gradients_are_those_of_high_precision(device, layer, recipe):
    x = batch(device).requires_grad_()
    results = []
    for region in (contextlib.nullcontext(), calibrating(recipe)):
        layer.zero_grad()
        x.grad = None
        with counted() as gemms:
            with region:
                out = layer(x)
            out.square().sum().backward()
        assert (gemms.fp8, gemms.other) == (0, 3)
        results.append([out.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    assert_same_bits(*results)
    assert (state_of(layer)["backward"][1] == 0).all()


def test_left_by_an_exception_updates_nothing(device, layer, recipe):
    with pytest.raises(ZeroDivisionError), calibrating(recipe):
        layer(batch(device))
        raise ZeroDivisionError
    assert (state_of(layer)["forward"][0] == 1).all()


def test_default_recipe(device, layer):
    with te.autocast(enabled=False, calibrating=True):
        layer(batch(device))
    assert state_of(layer)["forward"][1].shape == (1024, 3)


def test_stateless_recipe_has_nothing_to_collect(device, layer):
    with counted() as gemms, calibrating(Float8CurrentScaling()):
        layer(batch(device))
    assert (gemms.fp8, gemms.other) == (0, 1) and state_of(layer) is None


def test_enabled_and_calibrating_is_enabled(device, layer, recipe):
    with counted() as gemms, te.autocast(enabled=True, calibrating=True, recipe=recipe):
        layer(batch(device))
    assert (gemms.fp8, gemms.other) == (1, 0)
    with torch.no_grad(), te.autocast(enabled=True, calibrating=True, recipe=recipe):
        before = state_of(layer)["forward"][0]
        layer(batch(device) * 100)
    assert_same_bits(state_of(layer)["forward"][0], before)


def test_calibrating_region_inside_an_enabled_one(device, layer, recipe):
    other = te.Linear(32, 48, device=device)
    with counted() as gemms, te.autocast(recipe=recipe):
        with calibrating(recipe):
            layer(batch(device))
        other(batch(device))
    assert (gemms.fp8, gemms.other) == (1, 1)
    assert all((state_of(m)["forward"][0][:2] != 1).all() for m in (layer, other))


def test_state_of_calibration_is_saved(device, layer, recipe):
    x = batch(device)
    with calibrating(recipe):
        layer(x)
    other = te.Linear(32, 48, device=device)
    other.load_state_dict(layer.state_dict())
    assert_same_bits(state_of(other), state_of(layer))
