# SPDX-License-Identifier: Apache-2.0
"""Compiled layers that write to more than histories of their linear modules: main gradients."""

import copy

import pytest
import torch
from pytorch.compiled_layers import RECIPES, Graphs, model_of, region, unique_graphs
from pytorch.helpers import assert_same_bits, states_of
from pytorch.layer_ways import BATCH, FUSED, HIDDEN, LENGTH, make_attention, make_layer
from tols import BF16, F32

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.linear_base import LinearBase

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MAIN = {**FUSED, "fuse_wgrad_accumulation": True}


def weights_of(model):
    linears = [module for module in model.modules() if isinstance(module, LinearBase)]
    return [part.weights[0] for module in linears for part in module._linear_tensors()]


class Twice(te.PlannedModule):
    """A module that is run twice, and so adds to its main gradients twice."""

    def __init__(self):
        super().__init__()
        options = {"params_dtype": BF16, "device": "cpu", "fuse_wgrad_accumulation": True}
        self.mlp = te.LayerNormMLP(HIDDEN, 64, **options)
        self.linear = te.Linear(HIDDEN, HIDDEN, **options)

    def emit(self, nodes, x):
        made = nodes.add(nodes.run(self.mlp, x), x)
        return nodes.add(nodes.run(self.mlp, made), nodes.run(self.linear, x))


LAYERS = {
    "layers": lambda: model_of(2, **MAIN),
    "attention": lambda: torch.nn.Sequential(make_attention("cpu", BF16, **MAIN)),
    "twice": lambda: torch.nn.Sequential(Twice()),
}


class Pair:
    """A model in eager mode and a copy of it, compiled, with main gradients of the same values."""

    def __init__(self, model, dtypes=(F32,)):
        self.graphs, self.models = Graphs(), (model, copy.deepcopy(model))
        self.runs = model, self.graphs.compile(self.models[1])
        self.x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16)
        for i, weights in enumerate(zip(*map(weights_of, self.models), strict=True)):
            start = torch.randn(weights[0].shape).to(dtypes[i % len(dtypes)])
            for weight in weights:
                weight.main_grad = start.clone()

    def change(self, function):
        """Change the weights of both, each by `function`."""
        for weights in zip(*map(weights_of, self.models), strict=True):
            seed = int(torch.randint(2**31, ()))
            for weight in weights:
                torch.manual_seed(seed)
                function(weight)

    def step(self, recipe, **given):
        """A step of both, which has the same bits; how many graphs there are then."""
        results = []
        for model, run in zip(self.models, self.runs, strict=True):
            model.zero_grad()
            x = self.x.clone().requires_grad_()
            with region(recipe):
                out = run(x, **given)
            out.square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            main = [weight.main_grad.clone() for weight in weights_of(model)]
            results.append([out.detach(), x.grad, *gradients, *main])
        assert_same_bits(*results)
        return unique_graphs()

    def assert_same_state(self):
        assert_same_bits(*map(states_of, self.models))


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("layers", LAYERS)
def test_main_gradients(layers, recipe):
    """One operator adds to all of them, of two dtypes."""
    pair = Pair(LAYERS[layers](), (F32, BF16))
    made, before = RECIPES[recipe](), [w.main_grad.clone() for w in weights_of(pair.models[1])]
    for _ in range(3):
        pair.step(made)
    pair.assert_same_state()
    for weight, start in zip(weights_of(pair.models[1]), before, strict=True):
        assert weight.grad is None and not torch.equal(weight.main_grad, start)
    assert pair.graphs.plans() == ([len(pair.models[0])],) * 2


def set_overwrite(to):
    return lambda weight: setattr(weight, "overwrite_main_grad", to)


def other_main_grad(dtype):
    return lambda weight: setattr(weight, "main_grad", torch.randn(weight.shape).to(dtype))


def test_what_becomes_of_main_gradients_counts():
    """That one is overwritten, and its dtype; not which tensor it is."""
    pair, made = Pair(make_layer("cpu", BF16, **MAIN)), RECIPES["delayed"]()
    steps = [
        (set_overwrite(False), 1),
        (other_main_grad(F32), 1),
        (set_overwrite(True), 2),
        (set_overwrite(False), 2),
        (other_main_grad(BF16), 3),
        (other_main_grad(F32), 3),
    ]
    for change, graphs in steps:
        pair.change(change)
        assert pair.step(made) == graphs
    pair.models[1].self_attention.proj.weight.overwrite_main_grad = True  # of one of them
    pair.models[0].self_attention.proj.weight.overwrite_main_grad = True
    assert pair.step(made) == 4
    for model in pair.models:
        model.self_attention.proj.fuse_wgrad_accumulation = False
    assert pair.step(made) == 5
    pair.assert_same_state()
    assert {*pair.graphs.plans()[0], *pair.graphs.plans()[1]} == {1}


def test_first_microbatch_overwrites_main_gradients():
    pair = Pair(make_layer("cpu", BF16, **MAIN))
    for first in (True, False, True):
        pair.step(None, is_first_microbatch=first)
    assert pair.graphs.plans() == ([1, 1],) * 2


def test_main_gradients_in_one_buffer():
    """By modules, as Inductor copies what one operator writes to twice."""
    pair, made = Pair(make_layer("cpu", BF16, **MAIN)), RECIPES["delayed"]()
    for model in pair.models:
        weights = weights_of(model)
        buffer = torch.ones(sum(weight.numel() for weight in weights))
        sizes = [weight.numel() for weight in weights]
        for weight, part in zip(weights, buffer.split(sizes), strict=True):
            weight.main_grad = part.view(weight.shape)
    for _ in range(2):
        pair.step(made)
    pair.assert_same_state()
    assert pair.graphs.plans()[0] == [4]


def test_a_weight_without_main_gradient():
    pair = Pair(make_layer("cpu", BF16, **MAIN))
    pair.models[1].layernorm_mlp.fc2_weight.main_grad = None
    with pytest.raises(RuntimeError, match="the weight has no main_grad: assign a"):
        pair.runs[1](pair.x)
