# SPDX-License-Identifier: Apache-2.0
"""Where the state of delayed scaling lies: other histories, resets, slots."""

import gc

import pytest
import torch
from pytorch.helpers import Watch, arenas, assert_same_bits, counted, state_of, states_of
from pytorch.test_scaling_state import (
    SIZES,
    batch,
    layers_on,
    recipe_of,
    train_step,
    upstream,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.scaling_state import scaling

# ---- state that moves ----------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 1), (1, 3)])
def test_history_length_change(device, old, new):
    layer = te.Linear(32, 32, device=device)
    for _ in range(5):
        with te.autocast(recipe=recipe_of(amax_history_len=old)):
            out = layer(batch(device))
        out.backward(upstream(out))
    before = state_of(layer)
    with counted() as gemms, torch.no_grad(), te.autocast(recipe=recipe_of(amax_history_len=new)):
        layer(torch.zeros(16, 32, device=device))
    assert gemms.fp8 == 1
    after = state_of(layer)
    for direction in ("forward", "backward"):
        history = before[direction][1]
        kept = min(old, new)
        expected = torch.zeros(new, history.shape[1], device=device)
        expected[:kept] = history[:kept]
        if direction == "forward":  # the forward just run recorded its amaxes
            expected[0, 1] = torch.maximum(expected[0, 1], layer.weight.detach().abs().max())
        assert_same_bits(after[direction], (before[direction][0], expected))


def test_recipe_change_carries_the_state(device):
    layer = te.Linear(32, 32, device=device)
    for _ in range(3):
        with te.autocast(recipe=recipe_of()):
            out = layer(batch(device))
        out.backward(upstream(out))
    before = state_of(layer)
    with te.autocast(recipe=Float8CurrentScaling()):  # has no state and touches none
        layer(batch(device)).sum().backward()
    assert_same_bits(state_of(layer), before)
    with torch.no_grad(), te.autocast(recipe=recipe_of(margin=2)):
        layer(torch.zeros(16, 32, device=device))
    after = state_of(layer)
    assert_same_bits(after["backward"], before["backward"])
    assert_same_bits(after["forward"][0], before["forward"][0])
    assert_same_bits(after["forward"][1][1:], before["forward"][1][1:])


def test_two_recipes_in_turn_update_each_other_s_modules(device):
    """An update touches every module of the process, whatever recipe is left."""
    a, b = te.Linear(32, 32, device=device), te.Linear(32, 32, device=device)
    with te.autocast(recipe=recipe_of()), te.autocast(recipe=recipe_of(margin=1)):
        a(batch(device))
    assert state_of(a)["forward"][0][0] != 1
    with torch.no_grad(), te.autocast(recipe=recipe_of(margin=1)):
        a(batch(device))
    with te.autocast(recipe=recipe_of()):
        b(batch(device))
    assert (state_of(a)["forward"][1][0] == 0).all()  # taken in by the exit of b's region


def test_reset_drops_the_state_of_every_module(device):
    model = layers_on(device)
    recipe = recipe_of()
    out = None
    for _ in range(2):
        with te.autocast(recipe=recipe):
            out = model(batch(device))
    te.reset()
    assert all(state_of(layer) is None for layer in model)
    out.backward(upstream(out))  # a pending backward still works
    watch = Watch(model, recipe)
    for _ in range(2):
        train_step(model, watch, recipe, batch(device), 9)
        watch.check()


def test_reset_of_one_module(device):
    model = layers_on(device)
    with te.autocast(recipe=recipe_of()):
        model(batch(device))
    kept = [state_of(layer) for layer in model]
    model[1].reset_fp8_meta_tensors()
    assert state_of(model[1]) is None
    assert_same_bits([state_of(model[0]), state_of(model[2])], [kept[0], kept[2]])
    with torch.no_grad(), te.autocast(recipe=recipe_of()):
        model[1](torch.zeros(16, SIZES[1], device=device))
    assert (state_of(model[1])["forward"][0] == 1).all()


# ---- slots ---------------------------------------------------------------------------------------


def chunks(direction="forward"):
    scaling.sweep()
    return [chunk for arena in arenas(direction) for chunk in arena.chunks]


def test_many_modules_span_chunks(device):
    """More modules than a chunk has room for; every one's state equals its own model."""
    count = scaling.SLOTS_PER_CHUNK // 3 + 6
    layers = [te.Linear(16, 16, device=device) for _ in range(count)]
    recipe = recipe_of(amax_history_len=2)
    watch = Watch(layers, recipe)
    for _ in range(2):
        with counted() as gemms:
            with te.autocast(recipe=recipe):
                out = batch(device, 16)
                for layer in layers:
                    out = layer(out) * 8
            watch.leave_region()
            out.backward(upstream(out))
        assert gemms.fp8 == 3 * count
        watch.check()
    assert len(chunks()) == 2 and len(chunks("backward")) == 1


@pytest.mark.parametrize("margins", [(0,), (0, 1)])
def test_state_that_comes_behind_an_update_in_a_graph(device, margins, start, monkeypatch):
    """A graph updates all state behind the backward of its first module, that of the last too."""
    monkeypatch.setattr("transformer_engine.pytorch.scaling_state.arenas.SLOTS_PER_CHUNK", 8)
    recipes, results = [recipe_of(margin=margin) for margin in margins], []

    def step(x, layers):
        for number, layer in enumerate(layers):
            with te.autocast(recipe=recipes[number % len(recipes)]):
                x = x + layer(x)
        return x

    for compiled in (False, True):
        start()
        layers = layers_on(device, (16,) * 10)
        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        found = []
        for _ in range(3):
            x = torch.randn(16, 16, device=device, requires_grad=True)
            with te.autocast(recipe=recipes[0]):
                run(x, layers).square().sum().backward()
            found += [x.grad, *states_of(layers)]
        results.append(found)
    assert_same_bits(*results)
    te.reset()  # chunks are as long as usual again


def test_slots_of_dead_modules_are_reused_fresh(device):
    recipe = recipe_of()
    kept = [te.Linear(16, 16, device=device) for _ in range(2)]
    dead = te.Linear(16, 16, device=device)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            for layer in (kept[0], dead, kept[1]):
                out = layer(batch(device, 16))
        out.backward(upstream(out))
    slot = dead._slots.forward_slot
    before = [state_of(layer) for layer in kept]
    del dead, layer
    gc.collect()
    young = te.Linear(16, 16, device=device)
    with te.autocast(recipe=recipe):
        out = young(torch.full((16, 16), 3.0, device=device))
        assert young._slots.forward_slot == slot
        scale, history = state_of(young)["forward"]
        assert (scale == 1).all() and (history[1:] == 0).all() and history[0, 0] == 3
    for layer, state in zip(kept, before, strict=True):
        assert_same_bits(state_of(layer)["backward"], state["backward"])


def test_pending_backward_keeps_the_slots_of_a_dead_module(device):
    recipe = recipe_of()
    layer = te.Linear(16, 16, device=device)
    x = batch(device, 16)
    with te.autocast(recipe=recipe):
        out = layer(x)
    slot = layer._slots.forward_slot
    del layer
    gc.collect()
    other = te.Linear(16, 16, device=device)
    with te.autocast(recipe=recipe):
        other(x)
    assert other._slots.forward_slot != slot
    out.backward(upstream(out))
    assert (state_of(other)["backward"][1] == 0).all()
    del out
    gc.collect()
    assert sum(sum(chunk.used) for chunk in chunks("backward")) == 2


def test_no_slot_is_left_when_all_modules_are_gone(device):
    layers = [te.Linear(16, 16, device=device) for _ in range(3)]
    with te.autocast(recipe=recipe_of()):
        for layer in layers:
            layer(batch(device, 16)).sum()
    assert chunks()
    del layers, layer
    gc.collect()
    assert not chunks() and not chunks("backward")
