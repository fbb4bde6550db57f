# SPDX-License-Identifier: Apache-2.0
"""Layers in graphs of `torch.compile`, and the same layers in eager mode."""

import contextlib
import copy

import torch
import torch._dynamo.utils
from functorch.compile import make_boxed_func
from pytorch.helpers import same_draws, states_of
from pytorch.layer_ways import (
    EVERY_RECIPE,
    LENGTH,
    make_layer,
    states,
)
from tols import BF16
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

RECIPES = {
    **EVERY_RECIPE,
    "wide": lambda: Float8CurrentScaling(backward_override="high_precision"),
}
STEPS = 3


def region(recipe):
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)


class Graphs:
    """A backend that runs graphs as they are, and lists the operators of this library in them."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, _: self._note(graph, self.forward),
            bw_compiler=lambda graph, _: self._note(graph, self.backward),
        )

    def compile(self, function, **options):
        return torch.compile(function, fullgraph=True, backend=self.backend, **options)

    @staticmethod
    def _note(graph, found):
        names = []
        for module in graph.modules():
            for node in getattr(getattr(module, "graph", None), "nodes", ()):
                name = str(
                    node.args[0] if "auto_functionalized" in str(node.target) else node.target
                )
                if name.startswith("transformer_engine."):
                    names.append(name.split(".")[1].rstrip("_0123456789"))
        found.append(sorted(names))
        return make_boxed_func(graph.forward)

    def plans(self):
        """(runs of plans in each forward, in each backward)."""
        runs = ("run", "run_with_state", "run_recorded")
        return tuple(
            [sum(n in runs for n in one) for one in way] for way in (self.forward, self.backward)
        )


def unique_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def watches_frozen_parameters():
    """Whether this version of torch traces anew when a parameter has been frozen."""
    module = torch.nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    compiled(torch.ones(1, 1))
    before = unique_graphs()
    module.requires_grad_(False)
    compiled(torch.ones(1, 1))
    return unique_graphs() > before


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin() * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def repeats_functions_of_autograd():
    """Whether a checkpoint in a graph of this torch repeats what a function of autograd runs.

    Before version 2.12 or 2.13 it saves that: torch loses the mark of what is to be repeated.
    """
    marked = []

    def note(graph, _):
        marked.extend(
            node.meta.get("recompute") is not None
            for node in graph.graph.nodes
            if node.target is torch.ops.aten.sin.default
        )
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda x: checkpoint(_Doubled.apply, x, use_reentrant=False),
        backend=aot_autograd(fw_compiler=note),
    )
    compiled(torch.ones(1, requires_grad=True))
    return marked == [True]


def model_of(count, device="cpu", **options):
    layers = [make_layer(device, options.pop("dtype", BF16), **options) for _ in range(count)]
    return torch.nn.Sequential(*layers)


def train(model, forward, make_recipe, where="outside", lengths=(LENGTH,) * STEPS, **given):
    """Outputs, gradients and scaling state of a few steps."""
    found = []
    for step, length in enumerate(lengths):
        model.zero_grad()
        x = (states(model[0], length).detach() * 2.0**step).requires_grad_()
        with contextlib.nullcontext() if where == "inside" else region(make_recipe()):
            out = forward(x, **given)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    return found, states_of(model)


def both_ways(model, compiled, make_recipe, where="outside", call=None, **given):
    """`train` in eager mode and compiled; `compiled` makes a function of a model.

    `call` are further arguments of the one layer.
    """
    results, given = [], {**given, **(call or {})}
    for make in (lambda own: own[0] if call else own, compiled):
        own = copy.deepcopy(model)
        te.reset()
        with same_draws("cpu"):
            results.append(train(own, make(own), make_recipe, where, **given))
    return results


def entered(make_recipe):
    """Make functions that enter a region themselves."""
    recipe = make_recipe()

    def make(model):
        def function(x):
            with region(recipe):
                return model(x)

        return function

    return make
