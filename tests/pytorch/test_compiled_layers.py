# SPDX-License-Identifier: Apache-2.0
"""Compiled layers: one operator per direction, the bits of eager code, and graphs no more than due.

What a layer is in a graph of `torch.compile` is counted in the graphs that AOT autograd hands on.
"""

import contextlib
import copy

import pytest
import torch
import torch._dynamo.utils
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_ways import BATCH, FUSED, HIDDEN, LENGTH, make_attention, make_layer, states
from tols import BF16, F32
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "measured": lambda: DelayedScaling(amax_history_len=2, measure_first=True),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "wide": lambda: Float8CurrentScaling(backward_override="high_precision"),
}
STEPS = 3


@pytest.fixture(autouse=True)
def _fresh_compiler():
    te.reset()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


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
                name = str(node.args[0] if "auto_functionalized" in str(node.target) else node.target)
                if name.startswith("transformer_engine."):
                    names.append(name.split(".")[1].rstrip("_0123456789"))
        found.append(sorted(names))
        return make_boxed_func(graph.forward)

    def plans(self):
        """(runs of plans in each forward, in each backward)."""
        runs = ("run", "run_with_state")
        return tuple([sum(n in runs for n in one) for one in way] for way in (self.forward, self.backward))


def unique_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


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


def both_ways(model, compiled, make_recipe, where="outside", **given):
    """`train` in eager mode and compiled; `compiled` makes a function of a model."""
    results = []
    for make in (lambda own: own, compiled):
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


# ---- one operator per direction ------------------------------------------------------------------


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_operator_for_a_layer(recipe, where):
    graphs, make_recipe = Graphs(), RECIPES[recipe]
    model = model_of(2, **(FUSED if where == "inside" else {}))
    inside = entered(make_recipe) if where == "inside" else lambda own: own
    results = []
    for compiled in (False, True):
        own = copy.deepcopy(model)
        te.reset()
        function = inside(own)
        with same_draws("cpu"):
            results.append(
                train(own, graphs.compile(function) if compiled else function, make_recipe, where)
            )
    assert_same_bits(*results)
    assert set(graphs.plans()[0]) == set(graphs.plans()[1]) == {2}


KINDS = {
    "dropout": {"hidden_dropout": 0.3, "attention_dropout": 0.2, "drop_path_rate": 0.25},
    "swiglu": {"activation": "swiglu", "normalization": "RMSNorm", "bias": False, **FUSED},
    "parallel": {"parallel_attention_mlp": True},
    "groups": {"num_gqa_groups": 2, "window_size": (3, 0)},
    "post-layernorm": {"apply_residual_connection_post_layernorm": True, "hidden_dropout": 0.1},
    "output-layernorm": {"output_layernorm": True},
    "qk-norm": {"qk_norm_type": "RMSNorm", "attn_input_format": "bshd"},
    "named": {"name": "block"},
    "alibi": {},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "softcap": {"softcap": 8.0},
}


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers(kind, recipe):
    graphs, given = Graphs(), {}
    model = model_of(1, **KINDS[kind])
    if kind == "alibi":
        given["core_attention_bias_type"] = "alibi"
    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(model)
        te.reset()
        with same_draws("cpu"):
            results.append(train(own, compile(own[0]), RECIPES[recipe], **given))
    assert_same_bits(*results)
    assert graphs.plans()[0][0] == 1 + (kind == "output-layernorm")
    assert unique_graphs() == 1


# ---- other layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
@pytest.mark.parametrize("options", [{}, {"return_bias": True, "input_layernorm": True}])
def test_attention_by_itself(options, recipe):
    graphs, module = Graphs(), make_attention("cpu", BF16, **options)
    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(module)
        te.reset()
        run = compile(own)

        def forward(x, run=run):
            out = run(x)
            return out[0] + out[1] if isinstance(out, tuple) else out

        with same_draws("cpu"):
            results.append(train(torch.nn.Sequential(own), forward, RECIPES[recipe]))
    assert_same_bits(*results)
    assert graphs.plans() == ([1], [1])


class Stack(te.PlannedModule):
    """A module of modules, with a setting and an argument of its own."""

    def __init__(self, twice=False):
        super().__init__()
        self.twice = twice
        self.attention = make_attention("cpu", BF16, input_layernorm=True)
        self.mlp = te.LayerNormMLP(HIDDEN, 64, params_dtype=BF16, device="cpu")

    def emit(self, nodes, x, scale=1):
        made = nodes.add(nodes.run(self.attention, x), nodes.run(self.mlp, x))
        return nodes.add(made, nodes.run(self.mlp, made) if self.twice or scale > 1 else x)


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_modules_of_a_program(recipe):
    graphs, module = Graphs(), Stack()
    results = []
    for compile in (lambda f: f, graphs.compile):
        own = copy.deepcopy(module)
        te.reset()
        run, found = compile(own), []
        for change in (dict(), dict(scale=2), dict(scale=1)):
            for own.twice in (False, True):
                with region(RECIPES[recipe]()):
                    x = torch.ones(LENGTH, BATCH, HIDDEN, dtype=BF16, requires_grad=True)
                    out = run(x, **change)
                out.sum().backward()
                found += [out.detach(), x.grad]
        results.append(found)
    assert_same_bits(*results)
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {1}

