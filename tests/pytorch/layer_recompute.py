# SPDX-License-Identifier: Apache-2.0
"""Layers under checkpoints, and how many plans ran: see `test_layer_recompute`."""

import contextlib
import copy

import pytest
import torch
from pytorch.helpers import assert_same_bits, states_of
from pytorch.layer_ways import (
    EVERY_RECIPE,
    by_modules,
    inputs_of,
    watched,
)
from pytorch.recompute_cases import PROGRAMS
from tols import BF16, F32

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.call import LayerCall, ModuleCall

RECIPES = EVERY_RECIPE
recipes = pytest.mark.parametrize("recipe", RECIPES)
few = pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
kinds = pytest.mark.parametrize("kind", PROGRAMS)

IGNORED = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def region(recipe, **options):
    if recipe == "none":
        return contextlib.nullcontext()
    return te.autocast(recipe=RECIPES[recipe](**options))


def of_dtype(device, recipe):
    return F32 if device == "cpu" and recipe == "none" else BF16


@contextlib.contextmanager
def plans_run():
    """Note of each plan that runs the class of its call."""
    found, run = [], ModuleCall._run

    def noted(call, *given, **options):
        found.append(type(call))
        return run(call, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleCall, "_run", noted)
        yield found


def called(layer, given):
    """A function of the tensors among named arguments that want gradients, and these."""
    names = [name for name, value in given.items() if getattr(value, "requires_grad", False)]
    others = {name: value for name, value in given.items() if name not in names}

    def function(*tensors):
        return layer(**dict(zip(names, tensors, strict=True)), **others)

    return function, [given[name] for name in names]


def step(layer, given, run, recipe, **options):
    """A step under a checkpoint: results and gradients."""
    layer.zero_grad()
    fresh = {
        name: value.detach().clone().requires_grad_() if value.requires_grad else value
        for name, value in given.items()
    }
    function, tensors = called(layer, fresh)
    with region(recipe, **options):
        out = run(function, *tensors)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))
    found = [out.detach(), *[t.grad for t in tensors], *[p.grad for p in layer.parameters()]]
    return [None if t is None else t.clone() for t in found]


def assert_one_plan(layer, kind, recipe, given=None, *, steps=3, **options):
    """Assert that a layer is one plan in each pass under a checkpoint, with the bits of modules."""
    given = [given or inputs_of(layer) for _ in range(steps)]

    def run(own):
        with plans_run() as ran:
            found = [step(own, each, PROGRAMS[kind], recipe, **options) for each in given]
        return found, ran

    results, seed = [], int(torch.randint(2**31, ()))
    for way in (contextlib.nullcontext, by_modules):
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        with way(), watched() as calls:
            found, ran = run(own)
        results.append((found, states_of(own), torch.get_rng_state()))
        if way is contextlib.nullcontext:
            assert {taken for _, taken in calls} == {True}, calls
            assert len(calls) == 2 * steps  # a forward and its repetition
            others = 3 * steps * getattr(layer, "output_layernorm", False)
            assert sorted(map(str, ran)) == sorted(
                map(str, [LayerCall] * 3 * steps + [ModuleCall] * others)
            )
    assert_same_bits(*results)
    return results[0][0]
