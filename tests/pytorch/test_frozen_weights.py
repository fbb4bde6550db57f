# SPDX-License-Identifier: Apache-2.0
"""Quantized weights that are held once: which forms parameters have, and who can read them so."""

import math

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.module_cases import batch, make, region, step, weights_of
from pytorch.quantized_cases import FORMATS, WEIGHT_RECIPES, made, source_of, twins

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

SIZES = (512, 256)
RECIPES = {"current": Float8CurrentScaling, **WEIGHT_RECIPES}
ONCE = ("current", "block", "block f32", "mx squares", "nv", "nv 4over6", "nv rows")
"""Whose column-wise form is made of the row-wise one."""
TWICE = tuple(name for name in RECIPES if name not in ONCE)
COUNT = math.prod(SIZES)
SCALES = {"current": 8, "block": 4 * COUNT // 128**2, "row": 2 * 4 * SIZES[1], "mx": COUNT // 32}
SCALES |= {"nv": COUNT // 16 + 4, "block lines": 4 * COUNT // 128}
"""Bytes of the scales of a form, by the name of a recipe or its first word."""


def bytes_of(name, forms=1):
    """Bytes that a weight takes in so many forms."""
    kind = name.split()[0]
    one = COUNT // (2 if kind == "nv" else 1) + SCALES.get(name, SCALES[kind])
    more = 2 * 4 * (SIZES[0] - SIZES[1]) if kind == "row" else 0  # scales of rows, and of columns
    return one if forms == 1 else 2 * one + more


def bytes_held(weight):
    tensors = [t for t in weight.get_data_tensors() if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def linear(device, **options):
    return te.Linear(*SIZES, device=device, **options)


def for_inference(kind, *recipes):
    """Modules as of `twins`, made where no gradients are recorded."""
    with torch.no_grad():
        return twins(kind, *recipes)


def columns_of(module):
    return [w.get_usages()["columnwise"] for w in weights_of(module).values()]


# ---- what parameters take ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONCE)
def test_weights_that_can_be_turned_are_held_once(device, name):
    """Trained and frozen ones, and no step leaves a second form behind."""
    module, plain = twins(lambda: linear(device), RECIPES[name](), None)
    assert bytes_held(module.weight) == bytes_of(name)
    x = torch.randn(32, SIZES[0], device=device)
    for frozen in (False, True):
        for m in (module, plain):
            m.weight.requires_grad_(not frozen)
        for _ in range(2):
            found, expected = (step(m, x, RECIPES[name]()) for m in (module, plain))
            assert_same_bits(found, expected)
            assert columns_of(module) == [False]
    assert bytes_held(module.weight) == bytes_of(name)


@pytest.mark.parametrize("name", TWICE)
def test_weights_that_gradients_pass_are_held_twice(device, name):
    """Their column-wise form is a cast of its own of the first values."""
    weight = made(lambda: linear(device), RECIPES[name]()).weight
    assert bytes_held(weight) == bytes_of(name, 2)
    weight.update_usage(columnwise_usage=False)
    assert bytes_held(weight) == bytes_of(name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", RECIPES)
def test_weights_for_inference_are_held_once(device, name, mode):
    with mode():
        module, plain = twins(lambda: linear(device), RECIPES[name](), None)
        assert bytes_held(module.weight) == bytes_of(name)
        for _ in range(3):
            x = torch.randn(32, SIZES[0], device=device)
            with region(RECIPES[name]()):
                assert_same_bits(module(x), plain(x))
    assert columns_of(module) == [False]


def test_where_the_module_is_made_counts(device):
    """Not where it gets its memory: frameworks that defer that do so without gradients."""
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            module = made(lambda: linear("meta"), MXFP8BlockScaling())
        module.to_empty(device=device)
        with torch.set_grad_enabled(not gradients):
            module.reset_parameters()
        assert columns_of(module) == [gradients]


def test_weights_of_the_quantizers_of_a_program(device):
    recipe = CustomRecipe(qfactory=lambda role: te.Float8RowQuantizer(te.DType.kFloat8E4M3))
    assert columns_of(made(lambda: linear(device), recipe)) == [True]
    module, plain = for_inference(lambda: linear(device), recipe, None)
    assert columns_of(module) == [False]
    x = torch.randn(32, SIZES[0], device=device)
    with torch.no_grad(), region(recipe):
        assert_same_bits(module(x), plain(x))


# ---- what reads them -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("kind", ["linear", "norm-linear", "swiglu"])
def test_a_gradient_through_them_is_an_error(device, kind, name):
    """The first call and those that are found again; no other numbers take its place."""
    recipe = RECIPES[name]()
    (module,) = for_inference(lambda: make(kind, device), recipe)
    module.requires_grad_(False)
    x = batch(device)
    with region(recipe):
        for _ in range(3):
            expected = module(x)
            with pytest.raises(RuntimeError, match="no column-wise data. The gradient of"):
                module(x.clone().requires_grad_())
        with torch.no_grad():
            assert_same_bits(module(x), expected)


@pytest.mark.parametrize("name", TWICE)
def test_a_form_that_is_dropped_between_calls_is_missed(device, name):
    module, x = made(lambda: make("linear", device), RECIPES[name]()), batch(device)
    for _ in range(3):
        step(module, x, RECIPES[name]())
    module.weight.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="no column-wise data. The gradient of"):
        step(module, x, RECIPES[name]())


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_that_do_not_pass_them(device, name):
    """Of the weight itself, and of the bias."""
    module, plain = for_inference(lambda: make("linear", device), RECIPES[name](), None)
    x, grads = batch(device), []
    for _ in range(3):
        for m in (module, plain):
            m.zero_grad()
            with region(RECIPES[name]()):
                out = m(x)
            out.square().sum().backward()
            grads.append([out.detach(), m.weight.grad, m.bias.grad])
        assert_same_bits(*grads[-2:])
        for m in (module, plain):
            m.weight.requires_grad_(False)


@pytest.mark.parametrize(
    "make_recipe", [MXFP8BlockScaling, Float8RowScaling, Float8BlockScaling, NVFP4BlockScaling]
)
def test_a_backward_in_high_precision_reads_row_wise_weights(device, make_recipe):
    """So gradients pass frozen weights of every format that are held once, to an adapter."""
    recipe = make_recipe(backward_override="dequantized")
    module, plain = twins(lambda: make("swiglu", device), recipe, None)
    assert columns_of(module) == [False, False]
    for m in (module, plain):
        m.requires_grad_(False)
    for _ in range(3):
        x = batch(device)
        found, expected = (step(m, x, recipe) for m in (module, plain))
        assert found[1].abs().max() > 0
        assert_same_bits(found, expected)


def test_nothing_is_turned_where_no_gradient_passes(device):
    recipe = Float8BlockScaling()
    kinds = lambda: linear(device), lambda: te.TransformerLayer(64, 128, 4, device=device)
    for kind, shape in zip(kinds, ((32, SIZES[0]), (8, 2, 64)), strict=True):
        layer = made(kind, recipe).requires_grad_(False)
        for _ in range(5):
            for gradient in (False, True):
                x = torch.randn(shape, device=device, requires_grad=gradient)
                with counted(), region(recipe):
                    out = layer(x)
                names = [name for name in _core.counters() if name.endswith(".transpose")]
                turned = sum(_core.counters()[name] for name in names)
                assert out.requires_grad == gradient
                assert (turned > 0) == gradient


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_without_column_wise_forms(device, name, fused):
    """As one plan, and module by module; with gradients enabled, too."""

    def layer():
        return te.TransformerLayer(64, 128, 4, fuse_qkv_params=fused, device=device).eval()

    # Parts of a weight are cast by themselves, which plain ones are not.
    module, other = twins(layer, RECIPES[name](), None if fused else RECIPES[name]())
    for m in (module, other):
        m.requires_grad_(False)
    for parameter in module.parameters():
        if isinstance(parameter, te.QuantizedTensor):
            parameter.update_usage(columnwise_usage=False)
    x = torch.randn(32, 2, 64, device=device)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), region(RECIPES[name]()):
            for _ in range(4):
                assert_same_bits(module(x), other(x))


# ---- values from elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_copies_of_a_form_are_copies_of_codes(device, name):
    """From a tensor that has both: a cast of its values may choose other codes for them."""
    source = FORMATS[name]()(source_of(device, (64, 96)))
    into = FORMATS[name](columnwise=False)(source_of(device, (64, 96)))
    with torch.no_grad():
        into.copy_(source)
    assert not into.get_usages()["columnwise"]
    for form in source._TENSORS:
        if "row" in form and getattr(source, form) is not None:
            assert_same_bits(getattr(into, form), getattr(source, form), form)


@pytest.mark.parametrize("name", TWICE)
def test_states_of_training_are_loaded_for_inference(device, name):
    trained = made(lambda: make("swiglu", device), RECIPES[name]())
    (module,) = for_inference(lambda: make("swiglu", device), RECIPES[name]())
    module.load_state_dict(trained.state_dict())
    assert columns_of(module) == [False, False]
    for label, weight in weights_of(trained).items():
        assert_same_bits(weights_of(module)[label]._rowwise_data, weight._rowwise_data)
    x = batch(device)
    with torch.no_grad(), region(RECIPES[name]()):
        assert_same_bits(module(x), trained(x))
