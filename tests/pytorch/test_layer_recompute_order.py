# SPDX-License-Identifier: Apache-2.0
"""Layers under checkpoints of any order: nested, repeated, stopped, changed in between."""

import contextlib
import warnings

import pytest
import torch
from pytorch.helpers import assert_same_bits, states_of
from pytorch.layer_recompute import (
    IGNORED,
    few,
    kinds,
    recipes,
    region,
    step,
)
from pytorch.layer_ways import (
    DROPS,
    LAYER,
    assert_whole,
    both_ways,
    gradients,
    inputs_of,
    make_layer,
    states,
    watched,
)
from pytorch.recompute_cases import CHECKPOINTS, PROGRAMS
from thinning import pairs
from tols import BF16
from torch.utils.checkpoint import checkpoint as torch_checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from transformer_engine.pytorch.module.layer_call import LayerRunner

pytestmark = IGNORED


# ---- checkpoints in checkpoints, pipelines, stops ------------------------------------------------


# The recipe counts in what a checkpoint repeats, one by one.
@pairs(outer=CHECKPOINTS, inner=CHECKPOINTS, recipe=["none", "delayed", "current"])
def test_nested(device, outer, inner, recipe):
    """Around two layers, of which one has a checkpoint of its own."""
    pair = torch.nn.ModuleList([make_layer(device, BF16, **DROPS) for _ in range(2)])
    x = states(pair[0])

    def both(x):
        return CHECKPOINTS[inner](own[1], own[0](x))

    def run(found):
        nonlocal own
        own, results = found, []
        for _ in range(3):
            with region(recipe), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = CHECKPOINTS[outer](both, x)
            results += gradients(own, x, out)
        return results

    own = pair
    both_ways(pair, run)


@pytest.mark.parametrize("recipe", ["delayed", "measured"])
@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", CHECKPOINTS)
def test_a_checkpoint_around_a_checkpoint(device, outer, inner, recipe):
    """The first module of the region is repeated twice: backward scales are updated once."""
    layer = make_layer(device, BF16)
    x = states(layer)

    def run(own):
        results = []
        for _ in range(3):
            with region(recipe), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = CHECKPOINTS[outer](lambda x: CHECKPOINTS[inner](own, x), x)
            results += gradients(own, x, out)
            results.append([module["backward"] for module in states_of(own)])
        assert (results[-1][0][0] != 1).any()
        return results

    both_ways(layer, run)


@few
@pytest.mark.parametrize("stops", [True, False])
def test_a_repetition_that_stops_early(device, recipe, stops):
    """Torch stops it once it has what the backward reads: inside of the last module that saves."""
    pair = torch.nn.Sequential(make_layer(device, BF16, **DROPS), make_layer(device, BF16))
    x = states(pair[0])

    def run(own):
        found = []
        for _ in range(3):
            with set_checkpoint_early_stop(stops), region(recipe):
                out = torch_checkpoint(lambda x: own(x) + 1, x, use_reentrant=False)
            found += gradients(own, x, out)
        return found

    both_ways(pair, run)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@few
@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_a_pipeline(device, kind, recipe, order):
    """Forwards of three microbatches in regions of their own, then their backwards."""
    layer = make_layer(device, BF16, **DROPS)
    inputs = [states(layer) for _ in range(3)]

    def run(own):
        found = []
        for _ in range(2):
            own.zero_grad()
            outs = []
            for x in inputs:
                x.grad = None
                with region(recipe):
                    outs.append(PROGRAMS[kind](own, x))
            pairs = list(zip(outs, inputs, strict=True))
            for out, x in pairs if order.startswith("first") else reversed(pairs):
                out.sum().backward()
                found.append(x.grad.clone())
            found += [p.grad.clone() for p in own.parameters()]
        return found

    both_ways(layer, run)


@pytest.mark.parametrize("reentrant", [True, False])
@few
def test_a_backward_that_is_run_twice(device, reentrant, recipe):
    """A second backward repeats the forward again, from the scales of the first."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        with region(recipe):
            out = torch_checkpoint(own, x, use_reentrant=reentrant)
        found = []
        for _ in range(2):
            x.grad = None
            own.zero_grad()
            out.sum().backward(retain_graph=True)
            found += [x.grad.clone(), *[p.grad.clone() for p in own.parameters()]]
        if recipe != "delayed":  # whose gradients have other scales by now
            assert_same_bits(found[: len(found) // 2], found[len(found) // 2 :])
        return found

    both_ways(layer, run)


# ---- one way and then the other ------------------------------------------------------------------


@few
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_repetition_follows_its_forward(device, kind, recipe):
    """A mode watches the forward alone, whose modules are called: they are called again."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        found = []
        for number in range(4):
            mode = FlopCounterMode(display=False) if number % 2 else contextlib.nullcontext()
            with region(recipe):
                with mode:
                    out = CHECKPOINTS[kind](own, x)
            found += gradients(own, x, out)
        return found

    with watched() as calls:
        both_ways(layer, run, None)
    taken = [taken for name, taken in calls if name == LAYER]
    followed = recipe != "none" or kind != "torch-reentrant"  # which leaves no entry
    assert taken[:4] == [True, True, False, not followed]


@pytest.mark.parametrize("kind", ["te-reentrant", "torch-reentrant"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_layer_that_is_repeated_by_modules(device, kind, recipe):
    """A hook that comes between the two: what the plan's call has left serves its modules."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        found = []
        for number in range(4):
            with region(recipe):
                out = CHECKPOINTS[kind](own, x)
            hook = own.layernorm_mlp.register_forward_hook(lambda *_: None)
            if number % 2 == 0:
                hook.remove()
            found += gradients(own, x, out)
            hook.remove()
        return found

    with watched() as calls:
        both_ways(layer, run, None)
    assert [taken for name, taken in calls if name == LAYER][:4] == [True, True, True, False]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_other_scaling_state_in_between(device, kind):
    """The modules ran under another recipe since: the repetition has the scales of its forward."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        found = []
        for _ in range(3):
            with region("delayed"):
                out = CHECKPOINTS[kind](own, x)
            with torch.no_grad(), region("delayed", margin=2):
                found.append(own(x))
            found += gradients(own, x, out)
        return found

    both_ways(layer, run)


@pytest.mark.parametrize("kind", ["torch-reentrant", "te-reentrant", "te-saved"])
def test_a_program_with_mistakes_is_told(device, kind):
    """A function that does something else the second time, as with modules."""
    layer = make_layer(device, BF16)
    x, count = states(layer), 0

    def function(x):
        nonlocal count
        count += 1
        out = layer(x)
        return layer(out) if count > 1 else out

    with region("delayed"):
        out = CHECKPOINTS[kind](function, x)
    with pytest.raises(RuntimeError, match="more than the 1 times|different"):
        out.sum().backward()


def test_fp8_in_a_backward_of_nobody(device):
    """A forward in a hook of a backward: the modules say that its scales are not known."""
    layer = make_layer(device, BF16)
    assert_whole(layer, hidden_states=states(layer))
    x = states(layer)
    y = x * 2

    def hook(grad):
        with region("delayed"):
            layer(x)

    y.register_hook(hook)
    with pytest.raises(RuntimeError, match="not under a known checkpoint"):
        y.sum().backward()


# ---- what is kept --------------------------------------------------------------------------------


@contextlib.contextmanager
def bound():
    """Note each call of a layer that is bound."""
    found, bind = [], LayerRunner._make_call

    def noted(calls, layer, *given):
        found.append(layer)
        return bind(calls, layer, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRunner, "_make_call", noted)
        yield found


@kinds
@recipes
def test_a_call_is_bound_once(device, kind, recipe):
    """For the forward and for its repetition; every later step finds both."""
    layer = make_layer(device, BF16, **DROPS)
    given = inputs_of(layer)
    for _ in range(3):
        step(layer, given, PROGRAMS[kind], recipe)
        if device == "cuda":  # the host learns of first scales when a copy has brought them
            torch.cuda.synchronize()
    with bound() as found:
        for _ in range(3):
            step(layer, given, PROGRAMS[kind], recipe)
    assert not found


def test_recipes_in_turn(device):
    """Two recipes with scaling state, for which modules have other slots: nothing is bound anew."""
    layer = make_layer(device, BF16, **DROPS)
    given = inputs_of(layer)

    def run(own):
        found = []
        for _ in range(4):
            for margin in (0, 2):
                found += step(own, given, lambda f, *a: f(*a), "delayed", margin=margin)
        return found

    with bound() as found:
        both_ways(layer, run)
    assert len(found) == 2


def test_a_call_that_is_not_planned_is_not_tried_again(device):
    layer = make_layer(device, BF16)
    layer.layernorm_mlp.checkpoint = True
    given = inputs_of(layer)
    with bound() as found:
        for _ in range(3):
            step(layer, given, CHECKPOINTS["torch-saved"], "delayed")
    assert found == [layer, layer.self_attention, layer.self_attention]  # that is repeated, too
