# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a layer that runs as one call: weights kept in FP8, gradients in ``main_grad``.

Whole, by branches and by modules the bits are the same, and so is the number of casts.
"""

import contextlib
import copy
import io

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, captured, side_stream, states_of
from pytorch.layer_microbatches import (
    ATTENTIONS,
    KINDS,
    NORMED,
    STEP,
    accumulate,
    assert_microbatches_agree,
    linears_of,
    make,
    microbatch,
    run_steps,
    weights_of,
)
from pytorch.layer_ways import (
    ATTENTION,
    FUSED,
    RECIPE_NAMES,
    assert_modules,
    assert_same_error,
    backward,
    both_ways,
    by_modules,
    dtype_of,
    inputs_of,
    is_crossed,
    make_attention,
    make_layer,
    region,
    states,
    watched,
)
from thinning import chosen, in_turns, pairs
from tols import BF16, F32
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.layer_call import LayerRunner
from transformer_engine.pytorch.module.linear_base import LinearBase

# ---- weights kept in FP8 -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_microbatches(device, kind, recipe):
    """The later microbatches of a step quantize no weight; without a recipe there is none."""
    layer = make(kind, device, dtype_of(device, recipe))
    given = inputs_of(layer)
    del given["hidden_states"].grad
    found = assert_microbatches_agree(layer, lambda own: run_steps(own, recipe, given))
    casts, gemms, other = zip(*(step["counts"].tolist() for step in found), strict=True)
    weights = sum(len(module.LINEARS) for module in linears_of(layer))
    assert set(gemms if recipe else other) == {3 * weights}
    assert set(other if recipe else gemms) == {0}
    assert casts[1:3] == casts[4:] == (casts[0] - (weights if recipe else 0),) * 2
    assert casts[3] == casts[0]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_microbatches_among_calls_that_keep_nothing(device, recipe):
    layer = make("encoder, fused", device, BF16)
    firsts = (None, True, None, False, False, None, True, True, False)
    run = lambda own: run_steps(own, recipe, inputs, 1, firsts)  # noqa: E731
    inputs = inputs_of(layer)
    found = assert_microbatches_agree(layer, run)
    casts = {first: set() for first in (None, True, False)}
    for first, step in zip(firsts, found, strict=True):
        casts[first].add(int(step["counts"][0]))
    assert len(casts[True]) == len(casts[False]) == len(casts[None]) == 1
    (none,), (kept,), (read,) = casts.values()
    assert none - kept == kept - read == len(weights_of(layer))  # of each once forward, once back


CHANGES = {
    "one weight": lambda layer: layer.layernorm_mlp.fc1_weight.mul_(2),
    "another weight": lambda layer: setattr(
        layer.self_attention.proj,
        "weight",
        torch.nn.Parameter(layer.self_attention.proj.weight * 2),
    ),
    "data": lambda layer: setattr(
        layer.layernorm_mlp.fc2_weight, "data", layer.layernorm_mlp.fc2_weight * 2
    ),
    "all": lambda layer: [parameter.mul_(2) for parameter in layer.parameters()],
    "dtype": lambda layer: layer.float().bfloat16(),
    "loaded": lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
    "state": lambda layer: layer.reset_fp8_meta_tensors(),
}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("change", CHANGES)
def test_only_what_changed_is_quantized_again(device, change, recipe):
    layer = make("encoder, fused", device, BF16)
    given = inputs_of(layer)

    def run(own):
        found = [microbatch(own, 0, first, recipe, given) for first in (True, False)]
        with torch.no_grad():
            CHANGES[change](own)
        return found + [microbatch(own, 0, False, recipe, given) for _ in range(2)]

    found = assert_microbatches_agree(layer, run)
    casts = [int(step["counts"][0]) for step in found]
    assert casts[0] - casts[1] == 4 and casts[1] == casts[3]
    fresh = {"all": 4, "dtype": 4, "loaded": 4, "state": 0}.get(change, 1)
    assert casts[2] - casts[3] == fresh


def test_false_without_kept_weights_and_another_recipe(device):
    layer = make("encoder", device, BF16)
    given = inputs_of(layer)

    def run(own):
        recipes = ("delayed", "delayed", "current", "current", None, "delayed-e4m3", "delayed")
        return [microbatch(own, 0, False, recipe, given) for recipe in recipes]

    found = assert_microbatches_agree(layer, run)
    casts = [int(step["counts"][0]) for step in found]
    assert casts[0] - casts[1] == casts[2] - casts[3] == 4
    assert casts[5] == casts[6] == casts[0] and casts[4] == 0


@pytest.mark.parametrize("way", ["whole", "modules"])
def test_weights_that_another_thread_has_kept_meanwhile(device, way, monkeypatch):
    """Between the look for kept weights and the choice of plans; later calls are as ever."""
    layer = make("encoder", device, BF16)
    x = states(layer).detach()
    owner, name = (LayerRunner, "_make_call") if way == "whole" else (LinearBase, "_decide")
    choose, raced = getattr(owner, name), []

    def race(*given):
        if not raced:
            raced.append(True)
            with by_modules():
                layer(x, is_first_microbatch=True)
        return choose(*given)

    with region("current"), torch.no_grad():
        expected = copy.deepcopy(layer)(x)
        with by_modules() if way == "modules" else contextlib.nullcontext():
            layer(x)  # so that the parameters of each module are known
            monkeypatch.setattr(owner, name, race)
            for _ in range(3):
                assert_same_bits(layer(x, is_first_microbatch=False), expected)
                for weight in layer.parameters():
                    weight.mul_(1.0)  # none is kept for the next call
    assert raced


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_an_earlier_forward_has_its_own_weights(device, recipe):
    layer = make("encoder, fused", device, BF16)

    def run(own):
        found = []
        for first in (True, False, True, False):
            x = states(own)
            with region(recipe):
                found.append((x, own(x, is_first_microbatch=first)))
            for weight in weights_of(own) if first is False else ():
                weight.data = weight.data * 1.5
        for _, out in reversed(found):
            backward([out])
        return [x.grad for x, _ in found] + [p.grad for p in own.parameters()]

    assert_microbatches_agree(layer, run)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_that_an_evaluation_has_kept(device, mode, recipe):
    """Those of inference mode can not be saved for a backward: they are made again."""
    layer = make("encoder", device, dtype_of(device, recipe))
    x = states(layer).detach()

    def run(own):
        found = []
        for first in (True, False):
            with mode(), region(recipe):
                found.append(own(x, is_first_microbatch=first).clone())
        return found + [microbatch(own, 0, False, recipe, inputs_of(own, hidden_states=x))]

    assert_microbatches_agree(layer, run)


def test_frozen_weights_are_kept_too(device):
    layer = make("decoder, fused", device, BF16)
    for weight in weights_of(layer)[::2]:
        weight.requires_grad_(False)
    given = inputs_of(layer)
    assert_microbatches_agree(layer, lambda own: run_steps(own, "current", given))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", ["encoder", "decoder, fused"])
def test_each_microbatch_is_one_native_run_each_way(device, kind, recipe, native_runs):
    layer = make(kind, device, dtype_of(device, recipe))
    accumulate(layer)
    for first in (*STEP, *STEP):
        native_runs.clear()
        microbatch(layer, 0, first, recipe, inputs_of(layer))
        assert len(native_runs) == 2, native_runs


def test_plans_are_explained(device):
    """Of the microbatch that is asked for, and nothing is kept."""
    layer = make("encoder, fused", device, BF16)
    accumulate(layer)
    text = {}
    with te.autocast(recipe=RECIPES["delayed"]()):
        for kept in (False, True):
            for first in (None, True, False):
                file = io.StringIO()
                te.explain(layer, states(layer), is_first_microbatch=first, file=file)
                text[kept, first] = file.getvalue()
            layer(states(layer), is_first_microbatch=True)
            assert all(None not in m._weight_caches for m in linears_of(layer))
    cast, again, main = "quantize_weight", "requantize_weight", "main_grad_mlp_fc1_weight"
    assert all(main in explained for explained in text.values())
    assert again in text[False, None] and again not in text[True, True] + text[True, False]
    assert cast in text[False, False] and cast in text[True, True]
    assert cast not in text[True, False] and "mlp_fc1_weight_column" in text[True, False]


# ---- main gradients ------------------------------------------------------------------------------

MARKS = {
    "plain": {},
    "told": {"grad_added_to_main_grad": False, "zero_out_wgrad": True},
    "overwritten": {"overwrite_main_grad": True},
}


# What becomes of a main gradient is a flag of the product that makes it, in whatever layer.
@pairs(kind=KINDS, recipe=RECIPE_NAMES, marks=MARKS)
def test_main_grads(device, kind, recipe, marks):
    """Added to, overwritten by the first microbatch of a step, or by each."""
    dtype = dtype_of(device, recipe)
    layer = make(kind, device, dtype)
    given = inputs_of(layer)
    found = assert_microbatches_agree(
        layer,
        lambda own: run_steps(own, recipe, given, firsts=(None, *STEP)),
        lambda own: accumulate(own, **MARKS[marks]),
    )
    assert any(grad is not None for grad in found[0]["main"])
    told = set(found[0]["told"].tolist())
    assert told <= {-1, 1} if marks == "told" else told == {-1}


@pytest.mark.parametrize("main", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["of f32", "of bf16"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_dtypes_of_main_grads(device, recipe, dtype, main):
    layer = make("encoder, fused", device, dtype)
    given = inputs_of(layer)
    run = lambda own: run_steps(own, recipe, given)  # noqa: E731
    attends = device == "cpu" or dtype is not F32  # in a plan
    assert_microbatches_agree(layer, run, lambda own: accumulate(own, main), attends)


def test_main_grads_of_frozen_weights_stay(device):
    layer = make("encoder, fused", device, dtype_of(device))
    frozen = layer.self_attention.proj.weight
    frozen.requires_grad_(False)
    given = inputs_of(layer)
    found = assert_microbatches_agree(layer, lambda own: run_steps(own, None, given), accumulate)
    at = [weight is frozen for weight in weights_of(layer)].index(True)
    assert_same_bits(found[-1]["main"][at], found[0]["main"][at])
    other = 0 if at else 1
    assert not torch.equal(found[-1]["main"][other], found[0]["main"][other])


def change_main(own):
    for weight in weights_of(own):
        weight.main_grad = torch.zeros_like(weight, dtype=F32)


MAIN_CHANGES = {
    "another tensor": change_main,
    "another dtype": lambda own: accumulate(own, BF16),
    "overwritten": lambda own: accumulate(own, overwrite_main_grad=True),
    "another weight": lambda own: (CHANGES["another weight"](own), change_main(own)),
    "no more": lambda own: [
        setattr(module, "fuse_wgrad_accumulation", False) for module in linears_of(own)
    ],
    "a part no more": lambda own: setattr(own.layernorm_mlp, "fuse_wgrad_accumulation", False),
}


@pytest.mark.parametrize("change", MAIN_CHANGES)
def test_main_grads_that_change(device, change):
    """Between two steps; what a call found out is no longer so."""
    layer = make("encoder, fused", device, BF16)
    given = inputs_of(layer)

    def run(own):
        found = run_steps(own, "delayed", given, 1)
        MAIN_CHANGES[change](own)
        return found + run_steps(own, "delayed", given, 1)

    assert_microbatches_agree(layer, run, accumulate)


def test_a_main_grad_that_comes_between_forward_and_backward(device):
    """The backward adds to what the weight has then."""
    layer = make("encoder, fused", device, dtype_of(device))

    def run(own):
        out = own(states(own))
        change_main(own)
        backward([out])
        return [weight.main_grad for weight in weights_of(own)]

    assert_microbatches_agree(layer, run, accumulate)


def test_a_missing_main_grad(device):
    layer = make_layer(device, dtype_of(device), **FUSED)
    given = inputs_of(layer)
    weight = layer.layernorm_mlp.fc2_weight

    def call():
        layer.layernorm_mlp.fuse_wgrad_accumulation = True
        try:
            layer(**given)
        finally:
            layer.layernorm_mlp.fuse_wgrad_accumulation = False

    assert "has no main_grad" in assert_same_error(layer, call)
    layer.layernorm_mlp.fc1_weight.main_grad = torch.zeros_like(weight.T, dtype=F32)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float64)
    assert "main_grad is torch.float64" in assert_same_error(layer, call)


def test_deferred_weight_gradients_call_the_modules(device):
    layer = make("encoder, fused", device, dtype_of(device))
    layer.layernorm_mlp.delay_wgrad_compute = True
    accumulate(layer)
    assert_modules(layer, **inputs_of(layer))


# ---- beside other features -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_mode_around_the_backward(device, recipe):
    """It counts the GEMMs of main gradients, and of weights that were kept, too."""
    layer = make_layer(device, dtype_of(device, recipe), **FUSED)

    def run(own):
        accumulate(own)
        found = []
        for first in STEP:
            x = states(own)
            with region(recipe):
                out = own(x, is_first_microbatch=first)
            with FlopCounterMode(display=False) as counter:
                backward([out])
            assert counter.get_total_flops() > 0
            found += [torch.tensor(counter.get_total_flops()), x.grad]
            found += [weight.main_grad.clone() for weight in weights_of(own)]
        return found

    both_ways(layer, run)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(device, use_reentrant):
    layer = make("encoder, fused", device, BF16)

    def run(own):
        accumulate(own)
        found = []
        for first in STEP:
            x = states(own)
            with region("delayed"):
                out = torch_checkpoint(
                    lambda x, first=first: own(x, is_first_microbatch=first),
                    x,
                    use_reentrant=use_reentrant,
                )
            backward([out])
            found += [out.detach(), x.grad, *(w.main_grad.clone() for w in weights_of(own))]
        return found

    both_ways(layer, run, None)


def test_saved_for_a_backward_twice(device):
    layer = make("encoder, fused", device, BF16)

    def run(own):
        x = states(own)
        with region("current"):
            own(x, is_first_microbatch=True)
            out = own(x, is_first_microbatch=False)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        return [x.grad, *(weight.main_grad for weight in weights_of(own))]

    assert_microbatches_agree(layer, run, accumulate)


def test_one_weight_of_two_modules(device):
    """It is kept by both; what both add comes together."""
    layer = make("cross-attention, fused", device, BF16)
    given = inputs_of(layer)

    def tie(own):
        own.proj.weight = own.query_layer.weight
        accumulate(own)

    assert_microbatches_agree(layer, lambda own: run_steps(own, "delayed", given), tie)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_captured_step(recipe):
    """Replayed, the microbatches of a step give the bits of an eager step of the modules."""
    layer = make_layer("cuda", BF16, **FUSED)
    eager = copy.deepcopy(layer)
    static = states(layer)

    def step(own, x):
        found = []
        for first in STEP:
            with region(recipe):
                out = own(x, is_first_microbatch=first)
            found += [out, *torch.autograd.grad(out.float().sum(), [x])]
        return found

    accumulate(layer)
    accumulate(eager)
    with side_stream():
        for _ in range(3):
            step(layer, static)
    with watched() as found:
        graph, results = captured(lambda: step(layer, static))
    assert {whole for _, whole in found} == {True}
    graph.replay()
    main = [weight.main_grad.clone() for weight in weights_of(layer)]
    replayed = [result.detach().clone() for result in results]
    state = states_of(layer)
    te.reset()
    twin = static.detach().clone().requires_grad_()
    with by_modules():
        for _ in range(4):  # as many as have run of the other one: capturing runs nothing
            expected = step(eager, twin)
    assert_same_bits(replayed, [result.detach() for result in expected])
    assert_same_bits(main, [weight.main_grad for weight in weights_of(eager)])
    assert_same_bits(states_of(eager), state)


# ---- results that the loss does not use ----------------------------------------------------------


UNUSED = {
    "kind": ["attention, fused", "cross-attention"],
    "frozen": ["none", "norm", "input", "both", "proj"],
    "used": ["output", "norm", "both"],
    "recipe": RECIPE_NAMES,
}


# What is frozen or unused leaves steps out, by the kind; a recipe is of the steps that stay.
@chosen(in_turns(*UNUSED.values()), **UNUSED)
def test_results_that_are_not_used(device, kind, frozen, used, recipe):
    """What lies behind the norm has no gradient where its output alone is used: none, no zeros."""
    layer = make_attention(device, dtype_of(device, recipe), **{**ATTENTIONS[kind], **NORMED})
    for name, parameter in layer.named_parameters():
        if ("layer_norm" in name and frozen in ("norm", "both")) or name.startswith(frozen):
            parameter.requires_grad_(False)
    given = inputs_of(layer)
    given["hidden_states"].requires_grad_(frozen not in ("input", "both"))

    def run(own):
        found = []
        for first in (None, True, False):
            fresh = {n: v.detach().requires_grad_(v.requires_grad) for n, v in given.items()}
            with region(recipe):
                out, normed = own(is_first_microbatch=first, **fresh)
            backward({"output": [out], "norm": [normed], "both": [out, normed]}[used])
            found += [out.detach(), normed.detach(), torch.tensor(normed.requires_grad)]
            found += [v.grad for v in fresh.values()] + [p.grad for p in own.parameters()]
        return found

    found = both_ways(layer, run, kind=ATTENTION)
    names = [name for name, _ in layer.named_parameters()]
    grads = dict(zip(names, found[-len(names) :], strict=True))
    assert (grads["proj.bias"] is None) == (used == "norm" or frozen == "proj")
    of_source = found[3 + is_crossed(layer)] if is_crossed(layer) else None
    assert not is_crossed(layer) or (of_source is None) == (used == "norm")


@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_main_grads_behind_an_unused_result_stay(device, recipe, marks, first):
    layer = make("attention, fused", device, dtype_of(device, recipe))

    def run(own):
        proj = own.proj.weight
        before = proj.main_grad.clone()
        with region(recipe):
            _, normed = own(states(own), is_first_microbatch=first)
        backward([normed])
        assert_same_bits(proj.main_grad, before)
        told = [getattr(w, "grad_added_to_main_grad", None) for w in weights_of(own)]
        assert told == ([True, False] if marks == "told" else [None, None])
        return [*(w.main_grad for w in weights_of(own)), *(p.grad for p in own.parameters())]

    prepare = lambda own: accumulate(own, **MARKS[marks])  # noqa: E731
    assert_microbatches_agree(layer, run, prepare)
