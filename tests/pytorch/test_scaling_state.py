# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: scales and histories of both directions equal an independent float32 model."""

import copy
import itertools
import math

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device
from pytorch.helpers import (
    LinearModel,
    Watch,
    assert_same_bits,
    counted,
    state_of,
    states_of,
    sum_bound,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

RECIPES = {
    "max": dict(amax_history_len=3),
    "most-recent": dict(amax_history_len=2, amax_compute_algo="most_recent"),
    "length-1": dict(amax_history_len=1, margin=-1),
    "e4m3-margin": dict(amax_history_len=4, margin=3, fp8_format=Format.E4M3),
}
SIZES = (32, 48, 16, 64)


def recipe_of(**options):
    return DelayedScaling(**{"amax_history_len": 4, **options})


def layers_on(device, sizes=SIZES, **options):
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return torch.nn.Sequential(*[te.Linear(i, o, device=device, **options) for i, o in pairs])


def batch(device, features=SIZES[0], rows=16):
    """Input whose amax differs a lot from step to step."""
    x = torch.randn(rows, features, device=device) * 2.0 ** float(torch.randint(-6, 7, ()))
    return x.requires_grad_()


def upstream(out):
    """An output gradient of random size."""
    return torch.randn_like(out) * 2.0 ** float(torch.randint(-6, 7, ()))


def train_step(model, watch, recipe, x, expect):
    with counted() as gemms:
        with te.autocast(recipe=recipe):
            out = model(x)
        watch.leave_region()
        out.backward(upstream(out))
    assert (gemms.fp8, gemms.other) == (expect, 0)


@every_device
@pytest.mark.parametrize("name", RECIPES)
def test_steps_equal_the_model(device, name):
    recipe = DelayedScaling(**RECIPES[name])
    model = layers_on(device)
    watch = Watch(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        train_step(model, watch, recipe, batch(device), 9)
        watch.check()
        optimizer.step()
        optimizer.zero_grad()


@every_device
def test_first_iteration_has_scale_1(device):
    recipe = recipe_of()
    layer = te.Linear(32, 32, device=device)
    # Beyond the largest e4m3: with scale 1 it saturates, in the second step it does not.
    x = torch.zeros(16, 32, device=device)
    x[:, 0] = 1000.0
    with torch.no_grad():
        layer.weight.fill_(1.0)
    outputs = []
    with counted() as gemms:
        for _ in range(2):
            with te.autocast(recipe=recipe):
                outputs.append(layer(x).detach())
    assert gemms.fp8 == 2
    assert (outputs[0] == 448.0).all()
    assert_nmse(
        outputs[1], torch.full((16, 32), 1000.0), sum_bound(device, torch.float32, 32, True)
    )


@every_device
def test_state_before_the_first_exit(device):
    layer = te.Linear(32, 32, device=device)
    x = batch(device)
    with te.autocast(recipe=recipe_of()):
        layer(x)
        model = LinearModel(recipe_of())
        model.record("forward", 0, x)
        model.record("forward", 1, layer.weight)
        assert_same_bits(state_of(layer), model.values())


@every_device
def test_no_grad_forward_records_but_does_not_update(device):
    recipe = recipe_of()
    model = layers_on(device)
    watch = Watch(model, recipe)
    for _ in range(2):
        with torch.no_grad(), counted() as gemms, te.autocast(recipe=recipe):
            model(batch(device))
        assert gemms.fp8 == 3
        watch.check()
        train_step(model, watch, recipe, batch(device), 9)
        watch.check()


@every_device
def test_forward_alone_updates_the_forward_alone(device):
    recipe = recipe_of()
    model = layers_on(device)
    watch = Watch(model, recipe)
    for _ in range(3):
        with counted() as gemms, te.autocast(recipe=recipe):
            model(batch(device))
        assert gemms.fp8 == 3
        watch.leave_region()
        watch.check()


@every_device
def test_frozen_first_module(device):
    """It records no backward: the first module that does runs the backward update."""
    recipe = recipe_of()
    model = layers_on(device)
    model[0].requires_grad_(False)
    watch = Watch(model, recipe, updates_after=1)
    for _ in range(4):
        train_step(model, watch, recipe, batch(device).detach(), 3 + 3)  # no dgrad into layer 0
        watch.check()


def test_layer_that_needs_only_its_bias_gradient_still_updates(device):
    recipe = recipe_of()
    model = layers_on(device)
    model[0].weight.requires_grad_(False)
    watch = Watch(model, recipe)
    for _ in range(3):
        with counted() as gemms:
            with te.autocast(recipe=recipe):
                out = model(batch(device).detach())
            watch.leave_region()
            out.backward(upstream(out))
        assert gemms.fp8 == 3 + 4  # layer 0 has neither dgrad nor wgrad
        watch.models[0].history["backward"][:] = 0  # nothing is cast there
        watch.models[0].scale["backward"][:] = 1
        watch.check()


@every_device
def test_several_forwards_before_one_backward(device):
    recipe = recipe_of()
    model = layers_on(device)
    watch = Watch(model, recipe)
    for _ in range(3):
        outputs = []
        with counted() as gemms:
            for _ in range(3):
                with te.autocast(recipe=recipe):
                    outputs.append(model(batch(device)))
                watch.leave_region()
            watch.check()
            torch.autograd.backward(outputs, [upstream(out) for out in outputs])
        assert (gemms.fp8, gemms.other) == (27, 0)
        watch.check()


def test_several_forwards_in_one_region(device):
    """The layer whose call came first in the region updates after that call's backward."""
    recipe = recipe_of()
    layer = te.Linear(32, 32, device=device)
    watch = Watch([layer], recipe, updates_after=None)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            first = layer(batch(device))
            second = layer(batch(device))
        watch.leave_region()
        second.backward(upstream(second))
        watch.check()
        first.backward(upstream(first))
        watch.pending = True
        watch.check()


@every_device
def test_backward_uses_the_scales_of_its_own_forward(device):
    """Another forward moves the slots on; the gradients are those without it."""
    recipe = recipe_of()
    layer = te.Linear(32, 48, device=device)
    x, other = batch(device), batch(device)
    twin = te.Linear(32, 48, device=device)
    twin.load_state_dict(layer.state_dict())
    with te.autocast(recipe=recipe):
        out = layer(x)
    with te.autocast(recipe=recipe):
        layer(other * 1000)
    grad = upstream(out)
    out.backward(grad)
    mine = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = None
    with te.autocast(recipe=recipe):
        out = twin(x)
    out.backward(grad)
    assert_same_bits(mine, [x.grad, twin.weight.grad, twin.bias.grad])


def test_zero_nan_and_inf(device):
    """Steps with all-zero, NaN and Inf input: amax ignores NaN, Inf keeps scales and passes by."""
    recipe = recipe_of(amax_history_len=2)
    layer = te.Linear(32, 32, device=device)
    watch = Watch([layer], recipe)
    for special in (None, 0.0, math.nan, math.inf, None, None, 0.0, None):
        x = batch(device).detach()
        if special == 0.0:
            x.zero_()
        elif special is not None:
            x[3, 5] = special
        with te.autocast(recipe=recipe):
            layer(x)
        watch.leave_region()
        watch.check()
        assert state_of(layer)["forward"][0].isfinite().all()


@every_device
def test_zero_tokens_leave_the_state_alone(device):
    recipe = recipe_of()
    layer = te.Linear(32, 48, device=device)
    watch = Watch([layer], recipe)
    train_step(layer, watch, recipe, batch(device), 3)
    before = state_of(layer)
    with te.autocast(recipe=recipe):
        out = layer(torch.empty(0, 32, device=device, requires_grad=True))
    out.sum().backward()
    after = state_of(layer)
    assert_same_bits(
        [before["forward"][0][0], before["backward"]], [after["forward"][0][0], after["backward"]]
    )


# ---- idle steps ----------------------------------------------------------------------------------

USES = ("trained", "unused", "empty", "zeros", "evaluated")
SHORT = {
    "max": dict(amax_history_len=2),
    "most-recent": dict(amax_history_len=2, amax_compute_algo="most_recent"),
    "length-1": dict(amax_history_len=1),
}


def branches(device):
    return torch.nn.ModuleList([te.Linear(32, 32, device=device) for _ in range(2)])


def branched_step(model, recipe, use, x, grad):
    """Train; the second branch is used as said. Returns all that came of it."""
    trunk, branch = model
    x = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        out = trunk(x)
        if use == "evaluated":
            with torch.no_grad():
                found = branch(x)
            out = out + found
        elif use != "unused":
            given = {"trained": x, "empty": x[:0], "zeros": x * 0}[use]
            found = branch(given)
            out = out + (found if use != "empty" else found.sum())
    out.backward(grad)
    found = [out.detach(), x.grad, *[p.grad for p in model.parameters()]]
    for parameter in model.parameters():
        parameter.grad = None
    return [*found, states_of(model)]


def patterns_of(length):
    """Every pattern of trained and unused steps, and each other use between trained ones."""
    found = list(itertools.product(USES[:2], repeat=length))
    return found + [
        tuple(use if (number >> step) & 1 else "trained" for step in range(length))
        for use in USES[2:]
        for number in range(1, 2**length)
    ]


@pytest.mark.parametrize("name", SHORT)
def test_a_loaded_copy_beside_the_original(device, name):
    """Each is trained with idle steps while the other one is: as one that is trained alone."""
    recipe = DelayedScaling(**SHORT[name])
    start = branches(device).state_dict()
    for pattern in patterns_of(4):
        data = [(batch(device).detach(), upstream(torch.empty(16, 32))) for _ in range(6)]
        data = [(x, grad.to(device)) for x, grad in data]
        results = []
        for beside in (False, True):
            te.reset()
            model, copies = branches(device), []
            model.load_state_dict(start)
            for number, (use, step) in enumerate(
                zip(("trained", "trained", *pattern), data, strict=True)
            ):
                if beside and number == 2:
                    twin = branches(device)
                    twin.load_state_dict(model.state_dict())
                    copies = [twin, copy.deepcopy(model)]
                results.append(branched_step(model, recipe, use, *step))
                for other in copies:
                    assert_same_bits(branched_step(other, recipe, use, *step), results[-1])
        assert_same_bits(results[6:], results[:6], str(pattern))


def test_an_idle_step_keeps_the_scale(device):
    """The largest amax that the scale was made of has left the history by then."""
    recipe = recipe_of(amax_history_len=2)
    model = branches(device)
    watch = Watch(model, recipe)
    for size in (64.0, 1.0, None, None, 1.0):
        x = torch.randn(16, 32, device=device)
        with te.autocast(recipe=recipe):
            model[0](x)
            if size is not None:
                model[1](x * size)
        watch.leave_region()
        watch.check()
        if size is not None:
            before = state_of(model[1])
        assert_same_bits(state_of(model[1]), before)


# ---- callables and the unfused update ------------------------------------------------------------


def unfused(history, scale, fp8_max, amax=None):
    """The update in torch operations: every slot rolls, NaN reaches the maximum."""
    amax = history.amax(0) if amax is None else amax
    usable = amax.isfinite() & (amax > 0)
    scale = torch.where(usable, torch.full_like(amax, fp8_max) / amax, scale)
    rolled = torch.cat([history[1:], history[:1]])
    rolled[0] = 0
    return scale, rolled


def test_unfused_update(device, monkeypatch):
    monkeypatch.setenv("TE_UNFUSED_FP8_UPDATE", "1")
    recipe = recipe_of(amax_history_len=3)
    layer = te.Linear(32, 32, device=device)
    for step in range(5):
        x = batch(device).detach()
        if step == 3:
            x.zero_()  # the history rolls all the same
        with counted() as gemms, te.autocast(recipe=recipe):
            layer(x)
            scale, history = state_of(layer)["forward"]
        assert gemms.fp8 == 1
        assert_same_bits(state_of(layer)["forward"], unfused(history, scale, 448.0))


@pytest.mark.parametrize("which", ["amax", "scale"])
def test_a_callable_rolls_in_idle_steps_too(device, which):
    """So the largest amax leaves the window of a branch that is not used, and its scale follows."""
    fresh = torch.finfo(torch.float32).max
    options = {
        "amax": dict(amax_compute_algo=lambda history: history.amax(0)),
        "scale": dict(
            scaling_factor_compute_algo=lambda amax, old, top, recipe: torch.where(
                amax > 0, torch.full_like(amax, top) / amax, old
            ).clamp(max=fresh)
        ),
    }[which]
    recipe = recipe_of(amax_history_len=3, **options)
    model = branches(device)
    expected = None
    for number in range(8):
        use = (True, True, False, True, False, False, False, False)[number]
        with te.autocast(recipe=recipe):
            model[0](batch(device).detach())
            if use:
                model[1](batch(device).detach())
            scale, history = state_of(model[1])["forward"]
        if expected is not None and not use:
            assert_same_bits((scale, history), expected)  # nothing was recorded
        expected = unfused(history, scale, 448.0)
        assert_same_bits(state_of(model[1])["forward"], expected)
    assert (history == 0).all()


def test_callables_get_what_is_documented(device):
    seen = []

    def amax(history):
        seen.append(history.clone())
        return history.amax(dim=0) * 2

    def scale(amax, old, fp8_max, given):
        assert given is recipe and type(fp8_max) is float and fp8_max in (448.0, 57344.0)
        assert amax.shape == old.shape and amax.dtype == old.dtype == torch.float32
        return torch.where(amax > 0, fp8_max / (4 * amax), old + 1)

    recipe = recipe_of(
        amax_history_len=3, amax_compute_algo=amax, scaling_factor_compute_algo=scale
    )
    layer = te.Linear(32, 32, device=device)
    x = batch(device)
    with counted() as gemms:
        with te.autocast(recipe=recipe):
            out = layer(x)
        out.backward(upstream(out))
    assert gemms.fp8 == 3
    assert len(seen) == 2 and seen[0].shape[0] == 3
    assert seen[0][0].max() >= x.detach().abs().max()  # row 0 is the step that ends
    after = state_of(layer)
    assert after["forward"][0][0] == 448.0 / (8 * x.detach().abs().max())
    assert after["forward"][0][2] == 2.0  # the slot without a cast: old + 1
    assert after["forward"][1][2, 0] == x.detach().abs().max()


@pytest.mark.parametrize("which", ["amax", "scale"])
def test_one_callable_alone(device, which):
    options = {
        "amax": dict(amax_compute_algo=lambda history: history.amax(0) + 1),
        "scale": dict(scaling_factor_compute_algo=lambda amax, old, top, recipe: old * 2),
    }[which]
    recipe = recipe_of(**options)
    layer = te.Linear(32, 32, device=device)
    x = batch(device)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            layer(x)
    scale = state_of(layer)["forward"][0][0]
    amax = x.detach().abs().max() + 1
    assert scale == (4.0 if which == "scale" else torch.full_like(amax, 448.0) / amax)
