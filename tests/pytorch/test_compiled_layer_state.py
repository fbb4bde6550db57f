# SPDX-License-Identifier: Apache-2.0
"""Compiled layers with more state: main gradients, FP8 attention, quantized weights."""

import copy
import itertools

import pytest
import torch
from pytorch.compiled_layers import (
    RECIPES,
    Graphs,
    both_ways,
    entered,
    model_of,
    region,
    train,
    unique_graphs,
)
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_ways import BATCH, FUSED, HIDDEN, LENGTH, make_attention, make_layer
from thinning import pairs
from tols import BF16, F32

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention import fp8
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


# ---- attention in FP8 ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("none", "wide")])
def test_quantized_parameters(recipe):
    """One operator reads them as they are at each call, so after a step of an optimizer too."""
    made, graphs, results = RECIPES[recipe](), Graphs(), []
    with te.quantized_model_init(recipe=made):
        layer = make_layer("cpu", BF16, **FUSED)
    x = torch.randn(32, BATCH, HIDDEN, dtype=BF16)
    for compile in (lambda own: own, graphs.compile):
        own = copy.deepcopy(layer)
        te.reset()
        run, optimizer, found = compile(own), torch.optim.SGD(own.parameters(), lr=0.5), []
        with same_draws("cpu"):
            for step in range(3):
                optimizer.zero_grad()
                given = (x * 1.5**step).requires_grad_()
                with te.autocast(recipe=made):
                    out = run(given)
                out.square().mean().backward()
                optimizer.step()
                values = [p.detach().float() for p in own.parameters()]
                found.append(
                    [out.detach(), given.grad, *[p.grad for p in own.parameters()], values]
                )
        results.append([found, states_of(own)])
    assert_same_bits(*results)
    assert not torch.equal(found[0][-1][0], found[1][-1][0])
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {1}


def attending_in_fp8(kind, **options):
    made = {"delayed": lambda **o: DelayedScaling(amax_history_len=3, **o)}
    return lambda: made.get(kind, Float8CurrentScaling)(**options)


KINDS = {
    "causal": {},
    "no mask": {"self_attn_mask_type": "no_mask", "kv_channels": 128},  # its gradients are in FP8
    "dropout": {"hidden_dropout": 0.3, "attention_dropout": 0.2},
}


# Fields of one node, and of a recipe.
@pairs(kind=KINDS, recipe=["delayed", "current"], asked=["fp8_dpa", "fp8_mha"])
def test_attention_in_fp8(kind, recipe, asked):
    graphs, make_recipe = Graphs(), attending_in_fp8(recipe, **{asked: True})
    te.reset_counters()
    results = both_ways(model_of(2, **FUSED, **KINDS[kind]), graphs.compile, make_recipe)
    assert_same_bits(*results)
    # Two layers, three steps, twice.
    assert te.counters()["attention.cpu.e4m3"] == 12
    assert graphs.plans() == ([2], [2])


def test_attention_in_fp8_in_a_region_of_the_graph():
    graphs, make_recipe = Graphs(), attending_in_fp8("delayed", fp8_mha=True)
    make = entered(make_recipe)
    model, results = model_of(1, **FUSED), []
    for compile in (make, lambda own: graphs.compile(make(own))):
        own = copy.deepcopy(model)
        te.reset()
        with same_draws("cpu"):
            results.append(train(own, compile(own), make_recipe, "inside"))
    assert_same_bits(*results)
    assert graphs.plans() == ([1], [1])


@pytest.mark.parametrize("own", ["DelayedScaling", "Float8CurrentScaling", "F16"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_attention_with_a_recipe_of_its_own(recipe, own, monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", own)
    graphs, make_recipe = Graphs(), attending_in_fp8(recipe, fp8_dpa=True)
    assert_same_bits(*both_ways(model_of(1, **FUSED), graphs.compile, make_recipe))
    assert graphs.plans() == ([1], [1])


def test_the_number_of_queries_counts_where_the_gradient_depends_on_it(monkeypatch):
    """As on a GPU, where the kernel takes whole blocks of them."""
    by_blocks = fp8.Clause("blocks", lambda f: not fp8.fills_blocks(f.queries))
    monkeypatch.setattr(fp8, "GRADIENT_RULE", (*fp8.GRADIENT_RULE, by_blocks))
    graphs, make_recipe = Graphs(), attending_in_fp8("delayed", fp8_dpa=True)
    model = model_of(1, **FUSED, **KINDS["no mask"])
    results = both_ways(
        model,
        lambda own: graphs.compile(own, dynamic=True),
        make_recipe,
        lengths=(64, 65, 128, 6),
    )
    assert_same_bits(*results)
    assert unique_graphs() == 2
    assert graphs.plans() == ([1, 1], [1, 1])


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_regions_that_attend_otherwise(recipe):
    """What the recipe says of attention counts; under a checkpoint the repetition attends alike."""
    asked = [{}, {"fp8_dpa": True}, {"fp8_mha": True}, {"fp8_dpa": True}, {}]
    recipes = itertools.cycle([attending_in_fp8(recipe, **one)() for one in asked])
    graphs, model = Graphs(), model_of(1, hidden_dropout=0.3, attention_dropout=0.2, **FUSED)

    def checkpointed(own):
        run = graphs.compile(own)
        return lambda x: te.checkpoint(run, x, use_reentrant=False)

    lengths = (LENGTH,) * len(asked)
    with torch._dynamo.config.patch(recompile_limit=64):
        results = both_ways(model, checkpointed, lambda: next(recipes), lengths=lengths)
    assert_same_bits(*results)
    assert unique_graphs() == 3
    assert {*graphs.plans()[0], *graphs.plans()[1]} == {1}
