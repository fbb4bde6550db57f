# SPDX-License-Identifier: Apache-2.0
"""Checkpoints inside of compiled functions: the bits and the state of a run without them."""

import copy

import pytest
import torch
from pytorch.compiled_layers import (
    RECIPES,
    Graphs,
    both_ways,
    model_of,
    region,
    repeats_functions_of_autograd,
    train,
)
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_ways import BATCH, FUSED, HIDDEN, LENGTH
from tols import BF16
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler looks at the attribute of every input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def each_in_one(functions):
    """A function that runs others, each under a checkpoint."""

    def function(x):
        for each in functions:
            x = checkpoint(each, x, use_reentrant=False)
        return x

    return function


def compiled(model):
    return Graphs().compile(each_in_one(model))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe):
    """The backward has the operators of the forward once more, where torch repeats such ones."""
    repeated, graphs = repeats_functions_of_autograd(), Graphs()
    found = both_ways(
        model_of(2, **FUSED), lambda own: graphs.compile(each_in_one(own)), RECIPES[recipe]
    )
    assert_same_bits(*found)
    forward, backward = graphs.plans()
    assert {*forward} == {2} and {*backward} == {2 + 2 * repeated}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("where", ["in the graph", "in the checkpoint"])
def test_regions(where, recipe):
    """The update of scales where a region ends is a part of what is not repeated."""
    model, made, results = model_of(2, **FUSED), RECIPES[recipe](), []

    def in_region(function):
        def run(x):
            with region(made):
                return function(x)

        return run

    for way in ("eager", "compiled"):
        own = copy.deepcopy(model)
        te.reset()
        functions = [*map(in_region, own)] if where == "in the checkpoint" else own
        run = torch.nn.Sequential(*own) if way == "eager" else each_in_one(functions)
        if where == "in the graph":
            run = in_region(run)
        elif way == "eager":
            run = lambda x, functions=functions: functions[1](functions[0](x))  # noqa: E731
        run = run if way == "eager" else Graphs().compile(run)
        with same_draws("cpu"):
            results.append(train(own, run, RECIPES[recipe], "inside"))
    assert_same_bits(*results)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_one_of_two_layers(recipe):
    """The other one writes to the same history; both draw random numbers."""
    found = both_ways(
        model_of(2, hidden_dropout=0.3),
        lambda own: Graphs().compile(lambda x: own[1](te.checkpoint(own[0], x))),
        RECIPES[recipe],
    )
    assert_same_bits(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_of_another_checkpoint(reentrant):
    """The outer one repeats the graph, the inner one a part of it: each by the first scales."""

    def checkpointed(own):
        function = compiled(own)
        return lambda x: te.checkpoint(function, x, use_reentrant=reentrant)

    assert_same_bits(*both_ways(model_of(2, **FUSED), checkpointed, RECIPES["delayed"]))


def test_modules():
    """Modules by themselves, each an operator of its own."""
    modules = [
        te.Linear(HIDDEN, HIDDEN, params_dtype=BF16, device="cpu"),
        te.LayerNormMLP(HIDDEN, HIDDEN, params_dtype=BF16, device="cpu"),
    ]
    x, results = torch.randn(LENGTH, HIDDEN, dtype=BF16), []
    for make in (lambda own: own, compiled):
        own = torch.nn.Sequential(*copy.deepcopy(modules))
        te.reset()
        function, found = make(own), []
        for step in range(3):
            own.zero_grad()
            given = (x * 2.0**step).requires_grad_()
            with region(RECIPES["delayed"]()):
                out = function(given)
            out.square().sum().backward()
            found += [out.detach(), given.grad, *[p.grad for p in own.parameters()]]
        results.append([found, states_of(own)])
    assert_same_bits(*results)


def test_attention_in_fp8():
    found = both_ways(model_of(2, **FUSED), compiled, lambda: DelayedScaling(fp8_dpa=True))
    assert_same_bits(*found)


def test_inductor():
    """Its partition of the graph is another one than that of `Graphs`."""

    def by_inductor(own):
        return torch.compile(each_in_one(own), fullgraph=True)

    assert_same_bits(*both_ways(model_of(2, **FUSED), by_inductor, RECIPES["delayed"]))


def test_forwards_before_their_backwards():
    """Scales change between a forward and its backward; each repetition has those of its own."""
    model, x, results = model_of(1, **FUSED), torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16), []
    for make in (lambda own: own, compiled):
        own, outs, given = copy.deepcopy(model), [], []
        te.reset()
        function = make(own)
        for step in range(3):
            given.append((x * 4.0**step).requires_grad_())
            with region(RECIPES["delayed"]()):
                outs.append(function(given[-1]))
        for out in outs[::-1]:
            out.square().sum().backward()
        found = [*[one.grad for one in given], *[p.grad for p in own.parameters()]]
        results.append([found, states_of(own)])
    assert_same_bits(*results)
