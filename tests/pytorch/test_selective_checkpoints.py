# SPDX-License-Identifier: Apache-2.0
"""Selective checkpoints of torch: whatever a policy saves, the bits of a run without one."""

import functools
import itertools

import pytest
import torch
from pytorch.helpers import assert_same_bits, states_of
from thinning import pairs, pairs_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.custom_recipes import quantizer_factories

WIDTH, FFN, HEADS, TOKENS, BATCH, STEPS = 32, 64, 2, 16, 2, 2
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
NO_DROPS = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
SAVE, REPEAT = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
MM = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def is_ours(op):
    return op.namespace == "transformer_engine"


POLICIES = {
    "none": lambda ctx, op, *args, **kwargs: REPEAT,
    "ours": lambda ctx, op, *args, **kwargs: SAVE if is_ours(op) else REPEAT,
    "all": lambda ctx, op, *args, **kwargs: SAVE,
    "mm": lambda ctx, op, *args, **kwargs: SAVE if op in MM else REPEAT,
    "others": lambda ctx, op, *args, **kwargs: REPEAT if is_ours(op) else SAVE,
}
RECIPES = {
    "none": lambda: None,
    "delayed": lambda: DelayedScaling(amax_history_len=3),
    "measured": lambda: DelayedScaling(amax_history_len=3, measure_first=True),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "row": Float8RowScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "custom": lambda: CustomRecipe(qfactory=quantizer_factories.current_scaling_factory),
}


class Block(torch.nn.Module):
    """A module, operators of torch behind it, whose dropout has to draw the same numbers."""

    def __init__(self, module, dropout):
        super().__init__()
        self.module = module
        self.last = torch.nn.Linear(WIDTH, WIDTH, device=next(module.parameters()).device)
        self.dropout = dropout

    def forward(self, x, **more):
        y = self.module(x, **more)
        if self.dropout:  # not in place, unlike torch's on the CPU: a policy may save it
            y = y * (torch.rand_like(y) < 0.5)
        y = self.last(y.float())
        if self.dropout:
            y = y * (torch.rand_like(y) < 0.5)
        return y


MODULES = {
    "linear": lambda **o: te.Linear(WIDTH, WIDTH, **o),
    "norm-linear": lambda **o: te.LayerNormLinear(WIDTH, WIDTH, **o),
    "mlp": lambda **o: te.LayerNormMLP(WIDTH, FFN, **o),
    "mlp-checkpoint": lambda **o: te.LayerNormMLP(WIDTH, FFN, checkpoint=True, **o),
    "norm": lambda **o: te.RMSNorm(WIDTH, **o),
    "attention": lambda **o: te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.2, **o),
    "layer": lambda **o: te.TransformerLayer(WIDTH, FFN, HEADS, **NO_DROPS, **o),
    "layer-dropout": lambda **o: te.TransformerLayer(WIDTH, FFN, HEADS, **DROPS, **o),
}


def model_of(kind, device, dropout=True, blocks=2, **options):
    return torch.nn.ModuleList(
        [Block(MODULES[kind](device=device, **options), dropout) for _ in range(blocks)]
    )


def selected(policy, checkpoint=torch_checkpoint):
    """A selective checkpoint, as ``run(function, *args)``."""
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


def train(model, recipe, run, device, given=({},), region="outside", dtype=torch.float32):
    """Steps of microbatches: outputs, gradients and scaling state after each, weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trace = []

    def inside(block, x, **more):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return block(x, **more)

    for step in range(STEPS):
        for more in given:
            x = torch.randn(TOKENS, BATCH, WIDTH, device=device) * 4**step
            x = x.to(dtype).requires_grad_()
            y = x
            if region == "inside":
                for block in model:
                    y = run(inside, block, y, **more)
            else:
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    for block in model:
                        y = run(block, y, **more)
            trace += [y.detach().clone(), states_of(model)]
            y.backward(torch.randn_like(y))
            main = [getattr(weight, "main_grad", None) for weight in weights(model)]
            trace += [x.grad, states_of(model), [None if m is None else m.clone() for m in main]]
        trace.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return trace


def weights(model):
    return [p for p in model.parameters() if p.dim() > 1]


def compare(start, make, recipe, run, device, **how):
    """The bits of a run without checkpoints."""
    results = []
    for way in (plain, run):
        start()
        results.append(train(make(), recipe(), way, device, **how))
    assert_same_bits(results[1], results[0])


SITUATIONS = [(kind, recipe) for kind in ("linear", "mlp") for recipe in RECIPES]
SITUATIONS += [(kind, recipe) for kind in MODULES for recipe in ("delayed", "current")]
SITUATIONS = sorted({*SITUATIONS, ("layer-dropout", "nvfp4")})


# A policy names operators, whatever they hold.
@pairs_of(
    ("kind", "recipe", "policy"), [(*one, policy) for one in SITUATIONS for policy in POLICIES]
)
def test_every_recipe_and_module(device, start, kind, recipe, policy):
    make = functools.partial(model_of, kind, device)
    compare(start, make, RECIPES[recipe], selected(policy), device)


# As above.
@pairs(recipe=["none", "delayed", "current"], policy=POLICIES, region=["outside", "inside"])
def test_checkpoint_of_this_package(device, start, recipe, policy, region):
    make = functools.partial(model_of, "mlp", device)
    run = selected(policy, te.checkpoint)
    compare(start, make, RECIPES[recipe], run, device, region=region)


# As above; weights are kept or not by one flag of a call.
@pairs(kind=["linear", "mlp"], recipe=RECIPES, policy=POLICIES, cached=[False, True])
def test_microbatches(device, start, kind, recipe, policy, cached):
    """The repetition of a call that made or read the quantized weight runs what that one did."""

    def make():
        model = model_of(kind, device, fuse_wgrad_accumulation=not cached)
        for weight in weights(model):
            if not cached:
                weight.main_grad = torch.zeros(weight.shape, device=device)
        for block in model:
            block.module.cache_weights = cached
        return model

    given = [{}] * 3 if cached else [{"is_first_microbatch": i == 0} for i in range(3)]
    compare(start, make, RECIPES[recipe], selected(policy), device, given=given)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
def test_quantized_parameters(device, start, recipe, policy):
    def make():
        with te.quantized_model_init(recipe=RECIPES[recipe]()):
            return model_of("mlp", device)

    compare(start, make, RECIPES[recipe], selected(policy), device)


@pytest.mark.parametrize("emulated", ["0", "1"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
def test_attention_in_fp8(device, start, recipe, policy, emulated, monkeypatch):
    monkeypatch.setenv("TE_UNFUSED_DPA_EMULATE_FP8", emulated)
    # cuDNN has no dropout in FP8, and takes 16 bits.
    by_cudnn = device == "cuda" and emulated == "0"
    kind, dtype = ("layer", torch.bfloat16) if by_cudnn else ("layer-dropout", torch.float32)
    make = functools.partial(model_of, kind, device, params_dtype=dtype)
    compare(start, make, lambda: recipe(fp8_dpa=True), selected(policy), device, dtype=dtype)


# As above.
@pairs(recipe=["delayed", "current"], outer=["none", "ours", "plain", "reentrant"], inner=POLICIES)
def test_nested_checkpoints(device, start, outer, inner, recipe):
    """Selective ones in selective ones, and in others."""
    around = {
        "plain": functools.partial(torch_checkpoint, use_reentrant=False),
        "reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    }
    first = around[outer] if outer in around else selected(outer)

    def run(block, x):
        return first(functools.partial(selected(inner), block), x)

    compare(start, functools.partial(model_of, "mlp", device), RECIPES[recipe], run, device)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_module_several_times_and_several_regions(device, start, policy):
    """Each call repeats itself, in whichever region of its own it ran."""

    def make():
        return model_of("mlp", device, blocks=1)

    def run(block, x):
        with te.autocast(recipe=Float8CurrentScaling()):
            x = selected(policy)(block, x)
        with te.autocast(enabled=False):
            x = selected(policy)(block, x)
        return selected(policy)(block, selected(policy)(block, x))

    def bare(block, x):
        with te.autocast(recipe=Float8CurrentScaling()):
            x = block(x)
        with te.autocast(enabled=False):
            x = block(x)
        return block(block(x))

    results = []
    for way in (bare, run):
        start()
        results.append(train(make(), RECIPES["delayed"](), way, device))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_stages_in_python_are_parts_of_their_operator(device, start, policy):
    """What they run is neither saved nor counted: a policy sees the operator around them."""

    def product(buffers):
        source, out = buffers["input"], buffers["output"]
        product = torch.mm(source.flatten(0, -2), buffers["weight"].t())
        out.copy_(product.view(out.shape))

    def make():
        model = model_of("linear", device, bias=False)
        for block in model:
            block.module.override_stages(gemm_output=product)
        return model

    compare(start, make, RECIPES["none"], selected(policy), device)


# A policy names operators, whatever recipe they hold; in graphs there are the same operators.
@pairs_of(
    ("policy", "recipe", "whole"),
    [
        case
        for case in itertools.product(
            ["none", "ours", "mm"], ["none", "delayed", "current"], [True, False]
        )
        if case[1:]
        != ("delayed", False)  # torch takes none there: aot_eager makes a mutation of it
    ],
)
def test_compiled(device, start, recipe, policy, whole):
    """The checkpoint in a graph, and graphs in the checkpoint."""

    def run(block, x):
        if not whole:
            compiled = torch.compile(block, backend="aot_eager")
            return selected(policy, te.checkpoint)(compiled, x)
        return torch.compile(lambda x: selected(policy)(block, x), backend="aot_eager")(x)

    make = functools.partial(model_of, "mlp", device, dropout=False, blocks=1)
    compare(start, make, RECIPES[recipe], run, device)


# ---- what runs again ----------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes the operators that it sees; `detach` is torch's own business, as for its policies."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def repetitions():
    """Cases of the test below; a norm has no microbatches, weights of casts have a recipe."""
    recipes = ["none", "delayed", "measured", "current", "nvfp4", "custom"]
    for case in itertools.product(MODULES, recipes, [None, True, False], [False, True]):
        kind, recipe, first, quantized = case
        if quantized and (recipe == "none" or first is not None):
            continue
        if first is None or kind != "norm":
            yield case


# As above.
@pairs_of(("kind", "recipe", "first", "quantized"), list(repetitions()))
def test_the_repetition_runs_the_operators_of_its_forward(device, kind, recipe, first, quantized):
    more = {} if first is None else {"is_first_microbatch": first}
    seen = []

    def run(block, x, **kwargs):
        seen.append(([], []))
        contexts = [Seen(names) for names in seen[-1]]
        with set_checkpoint_early_stop(False):
            return torch_checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: contexts, **kwargs
            )

    with te.quantized_model_init(quantized, recipe=RECIPES[recipe]()):
        model = model_of(kind, device)
    train(model, RECIPES[recipe](), run, device, given=[more])
    assert len(seen) == 2 * STEPS
    for forward, again in seen:
        assert forward and again == forward


def operators_run(function):
    """Calls of native operators: {name: count}."""
    before = _core.counters()
    function()
    after = _core.counters()
    return {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
def test_counters_show_what_ran_again(device, recipe):
    """GEMMs of a step: 3 without a checkpoint or with a saved operator, else 4."""
    made, counts = RECIPES[recipe](), {}
    for policy in ("plain", *POLICIES):
        layer = te.Linear(WIDTH, WIDTH, bias=False, device=device)
        run = plain if policy == "plain" else selected(policy)

        def step(layer=layer, run=run):
            x = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
            with te.autocast(enabled=made is not None, recipe=made):
                run(layer, x).sum().backward()

        step()
        ran = operators_run(step)
        gemms = {k: n for k, n in ran.items() if k.startswith("gemm.")}
        if made is not None:
            assert all("e4m3" in name for name in gemms)
        counts[policy] = sum(gemms.values())
    assert counts == {"plain": 3, "none": 4, "ours": 3, "all": 3, "mm": 4, "others": 4}
