# SPDX-License-Identifier: Apache-2.0
"""Other parameters, scaling state and recipes count from the next call of a layer on."""

import contextlib
import copy
import pickle

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, states_of
from pytorch.layer_ways import (
    LAYER,
    RECIPE_NAMES,
    assert_counts,
    both_ways,
    by_modules,
    dtype_of,
    inputs_of,
    make_layer,
    set_of,
    states,
    train,
    watched,
)
from tols import BF16

import transformer_engine.pytorch as te

DROPS = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


# ---- parameters ----------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("way", ["assigned", "data", "in place", "deleted and set"])
def test_parameters_that_are_replaced(device, way, recipe):
    names = ("self_attention.proj.weight", "layernorm_mlp.fc1_weight",
             "layernorm_mlp.layer_norm_weight", "self_attention.proj.bias")  # fmt: skip

    def change(layer):
        for path in names:
            path, _, name = path.rpartition(".")
            module = layer.get_submodule(path)
            parameter = getattr(module, name)
            new = (parameter.detach() * 0.5).clone()
            if way == "assigned":
                setattr(module, name, torch.nn.Parameter(new))
            elif way == "data":
                parameter.data = new
            elif way == "in place":
                with torch.no_grad():
                    parameter.copy_(new)
            else:
                delattr(module, name)
                setattr(module, name, torch.nn.Parameter(new))

    assert_counts(make_layer(device, dtype_of(device, recipe)), change, True, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_gradients_that_are_switched(device, recipe):
    def change(layer):
        layer.layernorm_mlp.requires_grad_(False)
        layer.self_attention.proj.bias.requires_grad_(False)

    def undo(layer, _):
        layer.requires_grad_(True)

    layer = make_layer(device, dtype_of(device, recipe), **DROPS)
    assert_counts(layer, change, True, undo=undo, recipe=recipe)


def test_a_layer_that_is_converted(device):
    layer = make_layer(device, BF16)
    wide, narrow = states(layer, dtype=torch.float16), states(layer)
    results = []
    for way in (contextlib.nullcontext, by_modules):
        own = copy.deepcopy(layer)
        with way(), watched() as taken:
            found = train(own, {"hidden_states": narrow}, None, 2)
            found += train(own.half(), {"hidden_states": wide}, None, 2)
            found += train(own.to(BF16), {"hidden_states": narrow}, None, 2)
        assert way is by_modules or taken == [(LAYER, True)] * 6
        results.append(found)
    assert_same_bits(*results)
    with pytest.raises(TypeError) as ours:
        layer(wide.to(torch.complex64))
    with by_modules(), pytest.raises(TypeError) as theirs:
        layer(wide.to(torch.complex64))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.gpu
def test_a_layer_that_is_moved():
    layer = make_layer("cpu", BF16)
    train(layer, inputs_of(layer), None, 2)
    layer.cuda()
    x = states(layer)
    with watched() as found:
        out = layer(x)
    assert found == [(LAYER, True)] and out.is_cuda
    with by_modules():
        assert_same_bits(out, layer(x))
    layer.cpu()
    assert layer(states(layer)).device.type == "cpu"


def test_parameters_that_are_set_to_none(device):
    layer = make_layer(device, dtype_of(device))
    given = inputs_of(layer)
    layer(**given)
    layer.layernorm_mlp.fc1_bias = None
    found = []
    for way in (contextlib.nullcontext, by_modules):
        with way(), pytest.raises(TypeError) as error:
            layer(**given)
        found.append(str(error.value))
    assert found[0] == found[1] and "fc1_bias" in found[0]


# ---- scaling state -------------------------------------------------------------------------------


def _reset(layer):
    layer.reset_fp8_meta_tensors()


def _load(layer):
    other = make_layer(next(layer.parameters()).device, next(layer.parameters()).dtype)
    train(other, inputs_of(other), "delayed", 2)
    layer.load_state_dict(other.state_dict())


def _load_own(layer):
    layer.load_state_dict({name: value.clone() if isinstance(value, torch.Tensor) else value
                           for name, value in layer.state_dict().items()})  # fmt: skip


def _forget(_):
    te.reset()


STATES = {
    "reset": _reset,
    "loaded": _load,
    "loaded own": _load_own,
    "all forgotten": _forget,
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
}


@every_device
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("how", STATES)
def test_scaling_state(device, how, recipe):
    layer = make_layer(device, dtype_of(device, recipe))
    assert_counts(layer, STATES[how], True, recipe=recipe)


def test_copies_keep_no_calls(device):
    layer = make_layer(device, dtype_of(device))
    train(layer, inputs_of(layer))
    assert layer._calls.calls
    for other in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._calls is None


def test_recipes_by_turns(device):
    """With other amax histories too; each step has the bits of the modules."""
    layer = make_layer(device, BF16, **DROPS)
    given = inputs_of(layer)
    order = ["delayed", None, "current", "delayed-e4m3", "delayed", "current-power2", None] * 2
    both_ways(layer, lambda own: [train(own, given, recipe, 1) for recipe in order])


@pytest.mark.parametrize("name", ["hidden_", "self_attention.core_attention.attention_"])
def test_kept_calls_are_few(device, name):
    """Calls of sixteen keys, whatever a program does."""
    layer = make_layer(device, dtype_of(device))
    x = states(layer)
    for step in range(40):
        set_of(f"{name}dropout", step / 100)(layer)
        layer(x)
    assert 0 < len(layer._calls.calls) <= 16 and 0 < len(layer.self_attention._kept_attending) <= 16


def test_calibration(device):
    """Amaxes are recorded by the modules; FP8 afterwards starts from them."""
    layer = make_layer(device, BF16)
    given = inputs_of(layer)
    seed, results = int(torch.randint(2**31, ())), []
    for way in (contextlib.nullcontext, by_modules):
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        with way():
            found = train(own, given, None, 1)
            with te.autocast(enabled=False, calibrating=True), watched() as taken:
                found += [own(given["hidden_states"]).detach(), states_of(own)]
            assert taken[0] == (LAYER, False)
            found += train(own, given, "delayed", 2)
        results.append(found)
    assert_same_bits(*results)
