# SPDX-License-Identifier: Apache-2.0
"""Compiled layers: one operator per direction, the bits of eager code, and graphs no more than due.

What a layer is in a graph of `torch.compile` is counted in the graphs that AOT autograd hands on.
"""

import copy

import pytest
import torch
import torch._dynamo.utils
from pytorch.compiled_layers import (
    RECIPES,
    Graphs,
    entered,
    model_of,
    region,
    train,
    unique_graphs,
)
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_ways import (
    BATCH,
    FUSED,
    HEADS,
    HIDDEN,
    LENGTH,
    make_attention,
)
from thinning import one_each
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ---- one operator per direction ------------------------------------------------------------------


# Where a region begins is not the business of its recipe.
@one_each(recipe=RECIPES, where=["outside", "inside"])
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


# A kind is of the graph of nodes, a recipe of its products.
@one_each(kind=KINDS, recipe=["none", "delayed"])
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


class Reader(te.PlannedModule):
    """A module that hands its tensors on to attentions, or has a function of its own."""

    def __init__(self, function, mask_type):
        super().__init__()
        options = {"input_layernorm": True, "attn_mask_type": mask_type}
        self.attention = make_attention("cpu", BF16, **options)
        self.reading = make_attention("cpu", BF16, attention_type="cross", **options)
        self.mlp = te.LayerNormMLP(HIDDEN, 64, params_dtype=BF16, device="cpu")
        self.function = function

    def emit(self, nodes, x, source, mask=None, angles=None):
        made = nodes.run(self.attention, x, attention_mask=mask, rotary_pos_emb=angles)
        x = nodes.add(made, x)
        if self.function is not None:
            x = nodes.function(self.function, x)
        masks = None if mask is None else (mask, mask)
        read = nodes.run(self.reading, x, encoder_output=source, attention_mask=masks)
        return nodes.run(self.mlp, nodes.add(read, x))


@pytest.mark.parametrize(
    ("recipe", "function"),
    [("none", None), ("delayed", None), ("attention", None), ("delayed", torch.tanh)],
)
def test_tensors_and_functions_of_a_program(recipe, function):
    """Tensors are inputs of the one operator; a function is traced between operators of modules."""
    in_fp8 = recipe == "attention"
    graphs, module = Graphs(), Reader(function, "no_mask" if in_fp8 else "padding")
    x, source = torch.randn(2, LENGTH, BATCH, HIDDEN, dtype=BF16).unbind()
    mask = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    mask[0, :, :, LENGTH - 2 :] = True
    mask = None if in_fp8 else mask
    angles = te.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH)
    results = []
    for compile in (lambda f: f, graphs.compile):
        own, found = copy.deepcopy(module), []
        te.reset()
        run, made = compile(own), DelayedScaling(fp8_dpa=True) if in_fp8 else RECIPES[recipe]()
        for _ in range(2):
            for call in (dict(), dict(angles=angles)):
                own.zero_grad()
                given = [tensor.clone().requires_grad_() for tensor in (x, source)]
                with region(made):
                    out = run(*given, mask=mask, **call)
                out.square().sum().backward()
                grads = [p.grad for p in own.parameters()]
                found.append([out.detach(), *[each.grad for each in given], *grads])
        results.append([found, states_of(own)])
    assert_same_bits(*results)
    forward, backward = graphs.plans()
    assert ({*forward, *backward} == {1}) == (function is None)
