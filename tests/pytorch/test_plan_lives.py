# SPDX-License-Identifier: Apache-2.0
"""Plans live as long as somebody holds them: modules, backwards to come, graphs; few others do."""

import gc
import threading
import weakref

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common import plan_text, plans
from transformer_engine.common.graphs import Norm
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.module.call_key import KEPT

WIDTH, TOKENS = 16, 8
CACHES = (plans.plans_of, plan_text.plan_of)
OUTLIVE = plans.plans_of.cache_info().maxsize
NORM = Norm(_core.NORM_RMSNORM, _core.DTYPE_F32, 1e-3)
DTYPES = (_core.DTYPE_F32, _core.DTYPE_F32)


@pytest.fixture(autouse=True)
def fresh():
    """Nothing is held for modules to come, nor left in cycles."""
    clear()


def clear():
    gc.collect()
    for cache in CACHES:
        cache.cache_clear()


def others(device, count=OUTLIVE + 5, first=1):
    """Steps of as many modules of shapes of their own, which are dropped: none outlives them."""
    x = torch.randn(TOKENS, WIDTH, device=device)
    for i in range(first, first + count):
        layer = te.LayerNormLinear(WIDTH, i, eps=1e-4, device=device)
        norm = te.RMSNorm(WIDTH, eps=1e-5 * i, device=device)
        layer(norm(x)).sum().backward()


def layer_step(heads, device):
    layer = te.TransformerLayer(
        16 * heads, 32, heads, hidden_dropout=0.0, attention_dropout=0.0, device=device
    )
    x = torch.randn(4, 2, 16 * heads, device=device)
    layer(x).sum().backward()
    return layer


# ---- how many there are --------------------------------------------------------------------------


def test_plans_of_dropped_modules_are_bounded(device):
    before = _core.plan_count()
    others(device, OUTLIVE)
    full = _core.plan_count()
    assert full - before == 2 * OUTLIVE  # forward and backward of the last graphs
    for batch in range(1, 4):
        others(device, OUTLIVE, first=1 + batch * OUTLIVE)
        assert _core.plan_count() == full
    clear()
    assert _core.plan_count() == before


def test_plans_of_dropped_layers_are_bounded(device):
    before = _core.plan_count()
    for heads in range(1, 5):
        layer_step(heads, device)
    assert _core.plan_count() > before
    clear()
    assert _core.plan_count() == before


def test_layers_alike_share_their_plans(device):
    first = layer_step(2, device)
    made = _core.plan_count()
    clear()  # whatever else the second one could find them by
    second = layer_step(2, device)
    assert first is not second and _core.plan_count() == made > 0


def test_a_module_in_ever_new_situations_keeps_few(device):
    """And those that it comes back to have the same bits."""
    norm, linear = te.RMSNorm(WIDTH, device=device), te.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)

    def step(number):
        norm.eps = 1e-5 * (number + 1)
        with te.autocast(enabled=True, recipe=DelayedScaling(margin=number % 40)):
            linear(x.detach())
        out = norm(x)
        return out.detach(), *torch.autograd.grad(out.sum(), (x, norm.weight))

    first, counts = step(0), []
    for number in range(1, OUTLIVE + 4 * KEPT):
        step(number)
        counts.append(_core.plan_count())
        assert max(map(len, (norm._plans, linear._plans, linear._kept_calls))) <= KEPT
    assert max(counts) - counts[0] <= 2 * (OUTLIVE + KEPT) < 2 * len(counts)
    for ours, theirs in zip(step(0), first, strict=True):
        assert_same_bits(ours, theirs)


def test_threads_that_make_and_drop(device):
    before, failures = _core.plan_count(), []

    def work(first):
        try:
            others(device, 40, first)
        except BaseException as error:  # shown by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1 + 20 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    clear()
    assert _core.plan_count() == before


# ---- what is held runs on ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_a_backward_that_is_to_come(device, recipe, start):
    """Nobody but its graph holds the backward's plan: the module is gone."""
    results = []
    for flood in (False, True):
        start()
        layer = te.LayerNormMLP(WIDTH, 32, device=device)
        x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
        weight = layer.fc1_weight
        with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
            out = layer(x)
            held = [weakref.ref(plan) for _, plan in layer.plans_of(x)]
        del layer
        if flood:
            others(device)
            gc.collect()
            assert all(plan() is not None for plan in held)
        out.sum().backward()
        results.append((out.detach(), x.grad, weight.grad))
        del out
        clear()
        assert all(plan() is None for plan in held)
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


def test_a_compiled_graph(device):
    """It names its plans by their texts, and makes them again where they are gone."""
    layer = te.Linear(WIDTH, WIDTH, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)

    def step():
        out = compiled(x)
        return out.detach(), *torch.autograd.grad(out.sum(), (x, layer.weight))

    first = step()
    held = [weakref.ref(plan) for _, plan in layer.plans_of(x)]
    others(device)
    for other in range(KEPT + 1):  # the module drops its own
        with te.autocast(enabled=True, recipe=DelayedScaling(margin=other)):
            layer(x)
    for number in range(plan_text.plan_of.cache_info().maxsize):  # and the graph what it ran
        plan_text.plan_of(plans.norm_plans(WIDTH + number, NORM, DTYPES, 0).forward.text)
    gc.collect()
    assert all(plan() is None for plan in held)
    for _ in range(2):
        for ours, theirs in zip(step(), first, strict=True):
            assert_same_bits(ours, theirs)


def test_an_exported_program(device):
    """Of a module that is gone."""
    layer = te.LayerNormMLP(WIDTH, 48, device=device).eval()
    x = torch.randn(TOKENS, WIDTH, device=device)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), strict=True).module()
        first = program(x)
        held = [weakref.ref(plan_text.plan_of(text)) for text in texts_of(program)]
        assert held
        del layer
        torch._dynamo.reset()
        clear()
        assert all(plan() is None for plan in held)
        assert_same_bits(program(x), first)


def texts_of(program):
    return [node.args[0] for node in program.graph.nodes if "run" in str(node.target)]


def test_deferred_weight_gradients(device, start):
    """They wait in the module, over whatever else it runs."""
    results = []
    for flood in (False, True):
        start()
        layer = te.Linear(WIDTH, WIDTH, delay_wgrad_compute=True, device=device)
        x = torch.randn(TOKENS, WIDTH, device=device)
        layer(x).sum().backward()
        if flood:
            layer.override_stages()  # drops its plans
            others(device)
        layer.backward_dw()
        results.append(layer.weight.grad)
    assert_same_bits(*results)
