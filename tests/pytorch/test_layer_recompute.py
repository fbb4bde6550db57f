# SPDX-License-Identifier: Apache-2.0
"""Layers under checkpoints: one plan in the forward, its repetition and the backward.

All kinds of checkpoints give the bits of the same layer that calls its modules, and leave the same
scaling state and random states; how many plans ran is counted.
"""

import contextlib
import copy
import warnings

import pytest
import torch
from pytorch.fp8_attention_cases import attentions
from pytorch.helpers import assert_same_bits, same_draws, states_of
from pytorch.layer_microbatches import accumulate
from pytorch.layer_ways import (
    DROPS,
    HEADS,
    HIDDEN,
    LAYER,
    LENGTH,
    assert_whole,
    both_ways,
    by_branches,
    by_modules,
    gradients,
    inputs_of,
    make_attention,
    make_layer,
    states,
    watched,
)
from pytorch.recompute_cases import CHECKPOINTS, PROGRAMS
from tols import BF16, F32
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker
from transformer_engine.pytorch.module.call import LayerCall, ModuleCall
from transformer_engine.pytorch.module.layer_call import LayerCalls

RECIPES = {
    "none": None,
    "delayed": lambda **o: DelayedScaling(amax_history_len=3, **o),
    "measured": lambda **o: DelayedScaling(amax_history_len=3, measure_first=True, **o),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
recipes = pytest.mark.parametrize("recipe", RECIPES)
few = pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
kinds = pytest.mark.parametrize("kind", PROGRAMS)

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def region(recipe, **options):
    made = RECIPES[recipe]
    return contextlib.nullcontext() if made is None else te.autocast(recipe=made(**options))


def of_dtype(device, recipe):
    return F32 if device == "cpu" and recipe == "none" else BF16


@contextlib.contextmanager
def plans_run():
    """Note of each plan that runs the class of its call."""
    found, run = [], ModuleCall._run

    def noted(call, *given, **options):
        found.append(type(call))
        return run(call, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleCall, "_run", noted)
        yield found


def called(layer, given):
    """A function of the tensors among named arguments that want gradients, and these."""
    names = [name for name, value in given.items() if getattr(value, "requires_grad", False)]
    others = {name: value for name, value in given.items() if name not in names}

    def function(*tensors):
        return layer(**dict(zip(names, tensors, strict=True)), **others)

    return function, [given[name] for name in names]


def step(layer, given, run, recipe, **options):
    """A step under a checkpoint: results and gradients."""
    layer.zero_grad()
    fresh = {
        name: value.detach().clone().requires_grad_() if value.requires_grad else value
        for name, value in given.items()
    }
    function, tensors = called(layer, fresh)
    with region(recipe, **options):
        out = run(function, *tensors)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))
    found = [out.detach(), *[t.grad for t in tensors], *[p.grad for p in layer.parameters()]]
    return [None if t is None else t.clone() for t in found]


def assert_one_plan(layer, kind, recipe, given=None, *, steps=3, **options):
    """Assert that a layer is one plan in each pass under a checkpoint, with the bits of modules."""
    given = [given or inputs_of(layer) for _ in range(steps)]

    def run(own):
        with plans_run() as ran:
            found = [step(own, each, PROGRAMS[kind], recipe, **options) for each in given]
        return found, ran

    results, seed = [], int(torch.randint(2**31, ()))
    for way in (contextlib.nullcontext, by_modules):
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        with way(), watched() as calls:
            found, ran = run(own)
        results.append((found, states_of(own), torch.get_rng_state()))
        if way is contextlib.nullcontext:
            assert {taken for _, taken in calls} == {True}, calls
            assert len(calls) == 2 * steps  # a forward and its repetition
            others = 3 * steps * getattr(layer, "output_layernorm", False)
            assert sorted(map(str, ran)) == sorted(
                map(str, [LayerCall] * 3 * steps + [ModuleCall] * others)
            )
    assert_same_bits(*results)
    return results[0][0]


# ---- kinds of checkpoints, recipes and layers ----------------------------------------------------


@kinds
@recipes
def test_one_plan(device, kind, recipe):
    """Dropout, and steps that fill the history: the repetition casts and drops as its forward."""
    assert_one_plan(make_layer(device, of_dtype(device, recipe), **DROPS), kind, recipe, steps=4)


@recipes
def test_bits_are_those_without_a_checkpoint(device, recipe):
    layer, results = make_layer(device, of_dtype(device, recipe), **DROPS), []
    given = [inputs_of(layer) for _ in range(3)]
    for run in (lambda f, *a: f(*a), *PROGRAMS.values()):
        own = copy.deepcopy(layer)
        te.reset()
        with same_draws(device):
            results.append([step(own, each, run, recipe) for each in given])
            results[-1].append(states_of(own))
    for other in results[1:]:
        assert_same_bits(results[0], other)


LAYERS = {
    "decoder": lambda d, t: make_layer(d, t, layer_type="decoder", **DROPS),
    "parallel": lambda d, t: make_layer(d, t, parallel_attention_mlp=True, **DROPS),
    "post-residual": lambda d, t: make_layer(d, t, apply_residual_connection_post_layernorm=True),
    "output norm": lambda d, t: make_layer(d, t, output_layernorm=True, normalization="RMSNorm"),
    "norms of heads": lambda d, t: make_layer(d, t, qk_norm_type="RMSNorm", activation="swiglu"),
    "attention": lambda d, t: make_attention(d, t, input_layernorm=True, return_bias=True),
    "cross": lambda d, t: make_attention(d, t, attention_type="cross", fuse_qkv_params=True),
}


@pytest.mark.parametrize("kind", ["te-reentrant", "torch-saved"])
@few
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(device, layer, recipe, kind):
    assert_one_plan(LAYERS[layer](device, of_dtype(device, recipe)), kind, recipe)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_masks_and_angles(device, kind):
    layer = make_layer(device, of_dtype(device, "delayed"), self_attn_mask_type="arbitrary")
    mask = torch.rand(2, 1, LENGTH, LENGTH, device=device) < 0.3
    angles = torch.randn(LENGTH, 1, 1, HIDDEN // HEADS, device=device)
    given = inputs_of(layer, attention_mask=mask, rotary_pos_emb=angles)
    assert_one_plan(layer, kind, "delayed", given)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_packed_sequences(device, kind):
    layer = make_layer(device, BF16, attn_input_format="thd", self_attn_mask_type="padding_causal")
    ends = torch.tensor([0, 5, 2 * LENGTH], dtype=torch.int32, device=device)
    given = inputs_of(layer, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=LENGTH + 1)
    given["max_seqlen_kv"] = LENGTH + 1
    tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
    plain = {n: v for n, v in given.items() if n not in tensors}

    def with_sizes(own):
        return lambda **named: own(**named, **plain)

    def run(own):
        function = with_sizes(own)
        found = []
        for _ in range(2):
            own.zero_grad()
            x = tensors["hidden_states"].detach().clone().requires_grad_()
            with region("current"):
                out = PROGRAMS[kind](lambda x: function(**{**tensors, "hidden_states": x}), x)
            found += gradients(own, x, out)
        return found

    both_ways(layer, run)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@few
def test_branches(device, kind, recipe):
    """A large layer is one call for each branch."""
    layer = make_layer(device, of_dtype(device, recipe), layer_type="decoder", **DROPS)
    given = inputs_of(layer)

    def run(own):
        with by_branches():
            return [step(own, given, PROGRAMS[kind], recipe) for _ in range(3)]

    both_ways(layer, run)


class Stack(te.PlannedModule):
    """Two layers and a sum, the second one twice: its scaling state is in the plan twice."""

    def __init__(self, device, dtype):
        super().__init__()
        like = {"params_dtype": dtype, "device": device}
        self.first = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **like)
        self.second = te.Linear(HIDDEN, HIDDEN, **like)

    def emit(self, nodes, x):
        y = nodes.run(self.first, x)
        y = nodes.run(self.second, nodes.run(self.second, y))
        return nodes.add(y, x, dropout=0.2)


@kinds
@recipes
def test_planned_modules(device, kind, recipe):
    dtype = of_dtype(device, recipe)
    x = torch.randn(LENGTH, 2, HIDDEN).to(device, dtype).requires_grad_()
    assert_one_plan(Stack(device, dtype), kind, recipe, {"x": x})


# ---- attention in FP8, weights in FP8, microbatches ----------------------------------------------


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("options", [{"fp8_dpa": True}, {"fp8_dpa": True, "fp8_mha": True}])
def test_attention_in_fp8(device, kind, recipe, options, monkeypatch, counters):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    layer = make_layer(device, BF16, fuse_qkv_params=True)
    te.reset_counters()
    assert_one_plan(layer, kind, recipe, **options)
    assert attentions()["attention.e4m3"] == 2 * 3 * 2  # both ways, 3 steps, and repeated


@kinds
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_microbatches(device, kind, recipe):
    """The repetition of a first one, which comes after others or not, reads the weights it cast."""
    layer = make_layer(device, BF16, fuse_qkv_params=True, **DROPS)

    def run(own):
        accumulate(own)
        found = []
        for number in range(3):
            for first in (True, False, False):
                given = {**inputs, "is_first_microbatch": first}
                found.append(_microbatch(own, given, number, kind, recipe))
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.mul_(0.75)
        found.append([p.main_grad for p in own.parameters() if hasattr(p, "main_grad")])
        return found

    inputs = inputs_of(layer)
    both_ways(layer, run)


def _microbatch(own, given, number, kind, recipe):
    x = (given.pop("hidden_states").detach() * (1 + number)).requires_grad_()
    with region(recipe):
        out = PROGRAMS[kind](lambda x: own(x, **given), x)
    return gradients(own, x, out)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_in_fp8(device, kind, recipe):
    with te.quantized_model_init(recipe=RECIPES[recipe]()):
        layer = te.TransformerLayer(
            HIDDEN, 2 * HIDDEN, HEADS, params_dtype=BF16, device=device, fuse_qkv_params=True,
            hidden_dropout=0.1, attention_dropout=0.0,
        )  # fmt: skip
    given = inputs_of(layer)

    def run(own):
        first = step(own, given, PROGRAMS[kind], recipe)  # quantizers get slots
        with watched() as calls:
            found = [first, *[step(own, given, PROGRAMS[kind], recipe) for _ in range(3)]]
        ways.append({taken for _, taken in calls})
        return found

    ways = []
    both_ways(layer, run, None)
    assert ways == [{True}, {False}]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_cached_weights(device, kind):
    layer = make_layer(device, BF16)
    for module in layer.modules():
        if hasattr(module, "cache_weights"):
            module.cache_weights = True
    assert_one_plan(layer, kind, "current")


# ---- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_tracker_of_random_states(device, reentrant, monkeypatch):
    if device == "cpu":  # it swaps the CPU's state where there is no CUDA device
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 98)
    layer = make_layer(device, BF16, get_rng_state_tracker=lambda: tracker, **DROPS)
    x, results = states(layer), []

    def run(own):
        tracker.reset()
        tracker.add("model-parallel-rng", 99)
        found = []
        for _ in range(3):
            with region("delayed"):
                out = te.checkpoint(
                    own, x, get_rng_state_tracker=lambda: tracker, use_reentrant=reentrant
                )
            found.append(gradients(own, x, out))
        return found, tracker.get_states()

    for way in (contextlib.nullcontext, by_modules):
        own = copy.deepcopy(layer)
        te.reset()
        with way(), same_draws(device), watched() as calls:
            results.append((*run(own), states_of(own)))
        assert way is by_modules or {taken for _, taken in calls} == {True}
    assert_same_bits(*results)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("frozen", ["layernorm_mlp", "self_attention.layernorm_qkv", "fc1"])
def test_pairs_that_nobody_reads(device, kind, frozen):
    """NVFP4 rounds gradients by random pairs: a first forward draws as many as its repetition."""
    layer = make_layer(device, BF16, hidden_dropout=0.2)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert_one_plan(layer, kind, "nvfp4")
    x = states(layer).detach()
    assert_one_plan(layer, "te-saved", "nvfp4", {"hidden_states": x})


# ---- checkpoints in checkpoints, pipelines, stops ------------------------------------------------


@few
@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", CHECKPOINTS)
def test_nested(device, outer, inner, recipe):
    """Around two layers, of which one has a checkpoint of its own."""
    pair = torch.nn.ModuleList([make_layer(device, BF16, **DROPS) for _ in range(2)])
    x = states(pair[0])

    def both(x):
        return CHECKPOINTS[inner](own[1], own[0](x))

    def run(found):
        nonlocal own
        own, results = found, []
        for _ in range(3):
            with region(recipe), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = CHECKPOINTS[outer](both, x)
            results += gradients(own, x, out)
        return results

    own = pair
    both_ways(pair, run)


@pytest.mark.parametrize("recipe", ["delayed", "measured"])
@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", CHECKPOINTS)
def test_a_checkpoint_around_a_checkpoint(device, outer, inner, recipe):
    """The first module of the region is repeated twice: backward scales are updated once."""
    layer = make_layer(device, BF16)
    x = states(layer)

    def run(own):
        results = []
        for _ in range(3):
            with region(recipe), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = CHECKPOINTS[outer](lambda x: CHECKPOINTS[inner](own, x), x)
            results += gradients(own, x, out)
            results.append([module["backward"] for module in states_of(own)])
        assert (results[-1][0][0] != 1).any()
        return results

    both_ways(layer, run)


@few
@pytest.mark.parametrize("stops", [True, False])
def test_a_repetition_that_stops_early(device, recipe, stops):
    """Torch stops it once it has what the backward reads: inside of the last module that saves."""
    pair = torch.nn.Sequential(make_layer(device, BF16, **DROPS), make_layer(device, BF16))
    x = states(pair[0])

    def run(own):
        found = []
        for _ in range(3):
            with set_checkpoint_early_stop(stops), region(recipe):
                out = torch_checkpoint(lambda x: own(x) + 1, x, use_reentrant=False)
            found += gradients(own, x, out)
        return found

    both_ways(pair, run)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@few
@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
def test_a_pipeline(device, kind, recipe, order):
    """Forwards of three microbatches in regions of their own, then their backwards."""
    layer = make_layer(device, BF16, **DROPS)
    inputs = [states(layer) for _ in range(3)]

    def run(own):
        found = []
        for _ in range(2):
            own.zero_grad()
            outs = []
            for x in inputs:
                x.grad = None
                with region(recipe):
                    outs.append(PROGRAMS[kind](own, x))
            pairs = list(zip(outs, inputs, strict=True))
            for out, x in pairs if order.startswith("first") else reversed(pairs):
                out.sum().backward()
                found.append(x.grad.clone())
            found += [p.grad.clone() for p in own.parameters()]
        return found

    both_ways(layer, run)


@pytest.mark.parametrize("reentrant", [True, False])
@few
def test_a_backward_that_is_run_twice(device, reentrant, recipe):
    """A second backward repeats the forward again, from the scales of the first."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        with region(recipe):
            out = torch_checkpoint(own, x, use_reentrant=reentrant)
        found = []
        for _ in range(2):
            x.grad = None
            own.zero_grad()
            out.sum().backward(retain_graph=True)
            found += [x.grad.clone(), *[p.grad.clone() for p in own.parameters()]]
        if recipe != "delayed":  # whose gradients have other scales by now
            assert_same_bits(found[: len(found) // 2], found[len(found) // 2 :])
        return found

    both_ways(layer, run)


# ---- one way and then the other ------------------------------------------------------------------


@few
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_repetition_follows_its_forward(device, kind, recipe):
    """A mode watches the forward alone, whose modules are called: they are called again."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        found = []
        for step in range(4):
            mode = FlopCounterMode(display=False) if step % 2 else contextlib.nullcontext()
            with region(recipe):
                with mode:
                    out = CHECKPOINTS[kind](own, x)
            found += gradients(own, x, out)
        return found

    with watched() as calls:
        both_ways(layer, run, None)
    taken = [taken for name, taken in calls if name == LAYER]
    followed = recipe != "none" or kind != "torch-reentrant"  # which leaves no entry
    assert taken[:4] == [True, True, False, not followed]


@pytest.mark.parametrize("kind", ["te-reentrant", "torch-reentrant"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_layer_that_is_repeated_by_modules(device, kind, recipe):
    """A hook that comes between the two: what the plan's call has left serves its modules."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        found = []
        for step in range(4):
            with region(recipe):
                out = CHECKPOINTS[kind](own, x)
            hook = own.layernorm_mlp.register_forward_hook(lambda *_: None)
            if step % 2 == 0:
                hook.remove()
            found += gradients(own, x, out)
            hook.remove()
        return found

    with watched() as calls:
        both_ways(layer, run, None)
    assert [taken for name, taken in calls if name == LAYER][:4] == [True, True, True, False]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_other_scaling_state_in_between(device, kind):
    """The modules ran under another recipe since: the repetition has the scales of its forward."""
    layer = make_layer(device, BF16, **DROPS)
    x = states(layer)

    def run(own):
        found = []
        for _ in range(3):
            with region("delayed"):
                out = CHECKPOINTS[kind](own, x)
            with torch.no_grad(), region("delayed", margin=2):
                found.append(own(x))
            found += gradients(own, x, out)
        return found

    both_ways(layer, run)


@pytest.mark.parametrize("kind", ["torch-reentrant", "te-reentrant", "te-saved"])
def test_a_program_with_mistakes_is_told(device, kind):
    """A function that does something else the second time, as with modules."""
    layer = make_layer(device, BF16)
    x, count = states(layer), 0

    def function(x):
        nonlocal count
        count += 1
        out = layer(x)
        return layer(out) if count > 1 else out

    with region("delayed"):
        out = CHECKPOINTS[kind](function, x)
    with pytest.raises(RuntimeError, match="more than the 1 times|different"):
        out.sum().backward()


def test_fp8_in_a_backward_of_nobody(device):
    """A forward in a hook of a backward: the modules say that its scales are not known."""
    layer = make_layer(device, BF16)
    assert_whole(layer, hidden_states=states(layer))
    x = states(layer)
    y = x * 2

    def hook(grad):
        with region("delayed"):
            layer(x)

    y.register_hook(hook)
    with pytest.raises(RuntimeError, match="not under a known checkpoint"):
        y.sum().backward()


# ---- what is kept --------------------------------------------------------------------------------


@contextlib.contextmanager
def bound():
    """Note each call of a layer that is bound."""
    found, bind = [], LayerCalls._bind

    def noted(calls, layer, *given):
        found.append(layer)
        return bind(calls, layer, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCalls, "_bind", noted)
        yield found


@kinds
@recipes
def test_a_call_is_bound_once(device, kind, recipe):
    """For the forward and for its repetition; every later step finds both."""
    layer = make_layer(device, BF16, **DROPS)
    given = inputs_of(layer)
    for _ in range(2):
        step(layer, given, PROGRAMS[kind], recipe)
    with bound() as found:
        for _ in range(3):
            step(layer, given, PROGRAMS[kind], recipe)
    assert not found


def test_recipes_in_turn(device):
    """Two recipes with scaling state, for which modules have other slots: nothing is bound anew."""
    layer = make_layer(device, BF16, **DROPS)
    given = inputs_of(layer)

    def run(own):
        found = []
        for _ in range(4):
            for margin in (0, 2):
                found += step(own, given, lambda f, *a: f(*a), "delayed", margin=margin)
        return found

    with bound() as found:
        both_ways(layer, run)
    assert len(found) == 2


def test_a_call_that_is_not_planned_is_not_tried_again(device):
    layer = make_layer(device, BF16)
    layer.layernorm_mlp.checkpoint = True
    given = inputs_of(layer)
    with bound() as found:
        for _ in range(3):
            step(layer, given, CHECKPOINTS["torch-saved"], "delayed")
    assert found == [layer, layer.self_attention, layer.self_attention]  # that is repeated, too
