# SPDX-License-Identifier: Apache-2.0
"""A layer as one call: any subset of gradients, none, sizes, and one native run each way."""

import pytest
import torch
from pytorch.layer_ways import (
    BATCH,
    DROPS,
    FUSED,
    HIDDEN,
    LENGTH,
    RECIPE_NAMES,
    assert_ways_agree,
    dtype_of,
    inputs_of,
    make_attention,
    make_layer,
    region,
)

# ---- what has a gradient -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "dropped", "parallel", "attention"])
def test_any_subset_of_parameters_is_frozen(device, rng, kind, recipe):
    """Each alone, all but each, and random ones; with a gradient of the input and without."""
    dtype = dtype_of(device, recipe)
    options = {
        "decoder": {"layer_type": "decoder"},
        "dropped": {**DROPS, **FUSED},
        "parallel": {"parallel_attention_mlp": True},
    }.get(kind, {})
    if kind == "attention":
        layer = make_attention(device, dtype, input_layernorm=True, **FUSED)
    else:
        layer = make_layer(device, dtype, **options)
    names = [name for name, _ in layer.named_parameters()]
    one = names[rng.integers(len(names))]
    subsets = [{one}, set(names) - {one}, set(), set(names)]
    subsets += [set(rng.choice(names, len(names) // 2, replace=False)) for _ in range(3)]
    for wanted in subsets:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in wanted)
        given = inputs_of(layer)
        for name in ("hidden_states", "encoder_output"):
            if name in given:
                given[name].requires_grad_(bool(rng.integers(2)))
        assert_ways_agree(layer, given, recipe=recipe, steps=2)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("wanted", [(), ("hidden_states",), ("encoder_output",)])
def test_gradients_of_the_inputs(device, wanted, recipe):
    layer = make_layer(device, dtype_of(device, recipe), layer_type="decoder")
    given = inputs_of(layer)
    for name in ("hidden_states", "encoder_output"):
        given[name].requires_grad_(name in wanted)
    found = assert_ways_agree(layer, given, recipe=recipe)
    for name in ("hidden_states", "encoder_output"):
        assert (found[-1]["inputs"][name] is not None) == (name in wanted)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, mode, recipe):
    layer = make_layer(device, dtype_of(device, recipe), **DROPS)
    given = inputs_of(layer)
    given["hidden_states"].requires_grad_(False)
    with mode():
        assert_ways_agree(layer, given, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_eval(device, layer_type, recipe):
    layer = make_layer(device, dtype_of(device, recipe), layer_type=layer_type, **DROPS).eval()
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe)


# ---- one native call each ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_one_native_run_forward_and_one_backward(device, layer_type, recipe, native_runs):
    options = {"layer_type": layer_type, **DROPS}
    layer = make_layer(device, dtype_of(device, recipe), **options)
    given = inputs_of(layer)
    for _ in range(2):
        native_runs.clear()
        with region(recipe):
            out = layer(**given)
        assert len(native_runs) == 1, native_runs
        out.sum().backward()
        assert len(native_runs) == 2, native_runs


@pytest.mark.parametrize("sizes", [(1, BATCH), (LENGTH, 1), (1, 1), (0, BATCH), (LENGTH, 0)])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_sizes(device, sizes, recipe):
    """Also none at all: then the modules say what comes out."""
    layer = make_layer(device, dtype_of(device, recipe), **DROPS)
    x = torch.randn(*sizes, HIDDEN, device=device, dtype=dtype_of(device, recipe))
    assert_ways_agree(layer, {"hidden_states": x.requires_grad_()}, recipe=recipe)
