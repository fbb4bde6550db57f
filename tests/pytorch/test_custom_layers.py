# SPDX-License-Identifier: Apache-2.0
"""`CustomRecipe` in layers: quantizers at stages of one plan, with the bits of the modules."""

import contextlib
import copy

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.layer_recompute import IGNORED, PROGRAMS
from pytorch.layer_ways import (
    assert_modules,
    assert_whole,
    both_ways,
    by_branches,
    gradients,
    inputs_of,
    make_attention,
    make_layer,
)
from pytorch.own_quantizers import OWN
from pytorch.planned_modules import KINDS as PLANNED, inputs
from tols import BF16, F32

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.linear_base import LinearBase

E4M3 = DType.kFloat8E4M3
LAYERS = {
    "encoder": lambda device, **o: make_layer(device, dtype_of(device), **o),
    "decoder": lambda device, **o: make_layer(
        device, dtype_of(device), layer_type="decoder", fuse_qkv_params=True, **o
    ),
    "parallel": lambda device, **o: make_layer(
        device, dtype_of(device), parallel_attention_mlp=True, **o
    ),
    "attention": lambda device, **o: make_attention(
        device, dtype_of(device), input_layernorm=True, **o
    ),
}


class Drawn(te.Float8CurrentScalingQuantizer):
    """A cast of values that it has drawn a part of."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor * (1 + 0.1 * torch.rand_like(tensor)))


def dtype_of(device):
    return F32 if device == "cpu" else BF16


def request():
    return DelayedScalingRequest(amax_history_len=3)


def native():
    return te.Float8CurrentScalingQuantizer(E4M3, "cpu")


def recipe_of(name, device):
    """A recipe by its name, whose function is asked anew."""
    made = {own: make for own, (make, _) in OWN.items()}

    def factory(role):
        kind, last = role.tensor_type, role.name.split(".")[-1]
        if name in made:
            return made[name](device)
        if name == "drawn":
            return Drawn(E4M3, device)
        if name == "native":
            return native()
        if name == "state":
            return request()
        if name == "pair":
            return te.HybridQuantizer(
                rowwise_quantizer=native(), columnwise_quantizer=te.MXFP8Quantizer(E4M3)
            )
        if name == "inputs":
            return made["current"](device) if kind == "input" else te.IdentityQuantizer()
        if name == "some":  # a module in high precision, one with state, others called in part
            if last in ("proj", "fc1", "linear_kv"):
                return te.IdentityQuantizer()
            if last == "fc2":
                return request() if kind != "weight" else made["three methods"](device)
            return native() if kind == "weight" else made["current"](device)
        return te.IdentityQuantizer()

    return CustomRecipe(factory)


RECIPES = [*OWN, "drawn", "native", "state", "pair", "inputs", "some", "nothing"]


def given_to(layer, dtype=None):
    given = inputs_of(layer)
    return given if dtype is None else {n: t.detach().to(dtype) for n, t in given.items()}


def told(layer):
    """What `te.report` says of the GEMMs of a layer's modules, as a tensor."""
    reports = [te.report(m) for m in layer.modules() if isinstance(m, LinearBase)]
    texts = [str(g.precision) for report in reports for part in report for g in part.gemms]
    return torch.tensor(list(" ".join(texts).encode()))


def train(layer, recipe, given, around=contextlib.nullcontext, steps=2, **options):
    """Steps: results and gradients of each, and which GEMMs ran."""
    found = []
    for number in range(steps):
        fresh = {n: (t.detach() * (1 + number)).requires_grad_() for n, t in given.items()}
        with counted() as gemms:
            with around(), te.autocast(recipe=recipe):
                out = layer(**fresh, **options)
            found.append(gradients(layer, fresh["hidden_states"], out))
        found[-1] += [t.grad for t in fresh.values()]
        found[-1] += [torch.tensor([gemms.fp8, gemms.other]), told(layer)]
    return found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_plan_has_the_bits_of_the_modules(device, kind, name):
    layer = LAYERS[kind](device)
    given = given_to(layer)
    both_ways(
        layer,
        lambda own: train(own, recipe_of(name, device), given),
        kind=type(layer).__name__,
    )


@pytest.mark.parametrize("name", ["three methods", "tiles", "some"])
@pytest.mark.parametrize("kind", PLANNED)
def test_modules_of_programs(device, kind, name):
    layer = PLANNED[kind](params_dtype=dtype_of(device), device=device)
    given = inputs(kind, device, dtype_of(device))

    def run(own):
        found = []
        for _ in range(2):
            fresh = [t.detach().clone().requires_grad_() for t in given]
            with te.autocast(recipe=recipe_of(name, device)):
                out = own(*fresh)
            found.append([*gradients(own, fresh[0], out), *[t.grad for t in fresh]])
        return found

    both_ways(layer, run, kind=type(layer).__name__)


WAYS = {
    "frozen": lambda layer: [
        p.requires_grad_(i % 3 == 0) for i, p in enumerate(layer.parameters())
    ],
    "main gradients": lambda layer: [
        setattr(p, "main_grad", torch.ones(p.shape, device=p.device))
        for m in layer.modules()
        if isinstance(m, LinearBase)
        for p in (setattr(m, "fuse_wgrad_accumulation", True), *m.parameters())
        if p is not None and p.dim() == 2
    ],
    "original inputs": lambda layer: [
        setattr(m, "save_original_input", True) for m in layer.modules() if type(m) is te.Linear
    ],
    "one weight": lambda layer: None,
    "dropout": lambda layer: None,
}


@pytest.mark.parametrize("name", ["three methods", "some", "state"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_parameters(device, way, name):
    options = {"dropout": {"hidden_dropout": 0.2}}.get(way, {})
    fused = way in ("main gradients", "one weight")
    layer = LAYERS["encoder"](device, fuse_qkv_params=fused, **options)
    given = given_to(layer)

    def run(own):
        WAYS[way](own)
        found = train(own, recipe_of(name, device), given)
        return found + [getattr(p, "main_grad", None) for p in own.parameters()]

    both_ways(layer, run)


@pytest.mark.parametrize("linear", ["three methods", "state", "some"])
@pytest.mark.parametrize("cast", [request, native])
def test_attention_in_fp8(device, cast, linear):
    """By quantizers of its own roles, between linear layers whose quantizers are called."""
    layer = make_layer(device, BF16, heads=2)
    given, others = given_to(layer), recipe_of(linear, device).qfactory

    def factory(role):
        if role.module_type != "dpa":
            return others(role)
        return te.IdentityQuantizer() if cast is native and "d" in role.tensor_type else cast()

    recipe = CustomRecipe(factory, fp8_dpa=True)
    both_ways(layer, lambda own: train(own, recipe, given))


@pytest.mark.parametrize("name", ["three methods", "some"])
def test_a_plan_for_each_branch(device, name):
    layer = LAYERS["decoder"](device)
    given = given_to(layer)
    with by_branches():
        both_ways(layer, lambda own: train(own, recipe_of(name, device), given))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["three methods", "tiles", "inputs"])
def test_backwards_in_high_precision(device, name, override):
    layer = LAYERS["encoder"](device)
    given, recipe = given_to(layer), recipe_of(name, device)
    recipe.backward_override = override
    both_ways(layer, lambda own: train(own, recipe, given))


@pytest.mark.parametrize("name", ["three methods", "native", "some", "state"])
def test_torch_autocast(device, name):
    layer = make_layer(device, F32)
    given = given_to(layer)

    def around():
        return torch.autocast(device, BF16)

    both_ways(layer, lambda own: train(own, recipe_of(name, device), given, around))


@pytest.mark.parametrize("name", ["three methods", "native", "some", "state", "nothing"])
def test_microbatches(device, name):
    """What is kept of weights that plans cast, and none of others."""
    layer = LAYERS["encoder"](device)
    given, recipe = given_to(layer), recipe_of(name, device)

    def run(own):
        found = []
        for _ in range(2):
            for first in (True, False, False, None):
                found += train(own, recipe, given, steps=1, is_first_microbatch=first)
                with torch.no_grad():
                    own.layernorm_mlp.fc1_weight.data.mul_(1.5)
        return found

    both_ways(layer, run)


@IGNORED
@pytest.mark.parametrize("name", ["three methods", "some", "state"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_checkpoints(device, program, name):
    layer = LAYERS["encoder"](device)
    given, recipe = given_to(layer), recipe_of(name, device)

    def run(own, program=PROGRAMS[program]):
        found = []
        for _ in range(3):
            x = given["hidden_states"].detach().clone().requires_grad_()
            with te.autocast(recipe=recipe):
                out = program(own, x)
            found.append(gradients(own, x, out))
        return found

    def run_plain_too(own):
        plain = run(copy.deepcopy(own), lambda layer, x: layer(x))
        te.reset()
        found = run(own)
        assert_same_bits(found, plain)
        return found

    both_ways(layer, run_plain_too)


def test_recipes_follow_each_other(device):
    """Each with state of its own, and that of a module that comes back to one."""
    layer = LAYERS["encoder"](device)
    given = given_to(layer)
    recipes = [
        recipe_of("some", device),
        DelayedScaling(amax_history_len=3),
        recipe_of("three methods", device),
        recipe_of("state", device),
        Float8CurrentScaling(),
    ]

    def run(own):
        return [train(own, recipe, given, steps=2) for recipe in [*recipes, *recipes]]

    both_ways(layer, run)


def halves(role):
    """The function of a program that has another one of this name later."""
    return OWN["three methods"][0](None)


def test_another_function_of_the_same_name_is_asked(device, monkeypatch):
    layer = LAYERS["encoder"](device)
    given, before = given_to(layer), CustomRecipe(halves)

    def again(role):
        return OWN["current"][0](device)

    again.__qualname__ = "halves"
    monkeypatch.setitem(globals(), "halves", again)
    after = CustomRecipe(again)
    assert repr(after) == repr(before)

    def run(own):
        return [train(own, recipe, given, steps=1) for recipe in (before, after, before)]

    first, second, third = both_ways(layer, run)
    assert_same_bits(first, third)
    assert not torch.equal(first[0][0], second[0][0])


def test_weights_that_are_kept_quantized(device):
    """Their stages read the parameter, so the modules are called."""
    recipe = recipe_of("three methods", device)
    with te.quantized_model_init(recipe=recipe):
        layer = LAYERS["encoder"](device)
    with te.autocast(recipe=recipe):
        assert_modules(layer, **inputs_of(layer))


def test_a_quantizer_that_fails(device):
    class Fails(te.Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor):
            if self.fails:
                raise RuntimeError("the quantizer fails")
            return super().quantize_impl(tensor)

    quantizer = Fails(E4M3, device)
    quantizer.fails = False
    layer = LAYERS["encoder"](device)
    given = inputs_of(layer)
    with te.autocast(recipe=CustomRecipe(lambda role: quantizer)):
        expected = assert_whole(layer, **given).detach()
        quantizer.fails = True
        with pytest.raises(RuntimeError, match="the quantizer fails"):
            layer(**given)
        quantizer.fails = False
        assert_same_bits(assert_whole(layer, **given).detach(), expected)
    with te.autocast(recipe=CustomRecipe(lambda role: None)):
        with pytest.raises(ValueError, match="LayerNormLinear: CustomRecipe.*gave None"):
            layer(**given)
