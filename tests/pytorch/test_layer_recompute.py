# SPDX-License-Identifier: Apache-2.0
"""Layers under checkpoints: one plan in the forward, its repetition and the backward.

All kinds of checkpoints give the bits of the same layer that calls its modules, and leave the same
scaling state and random states; how many plans ran is counted.
"""

import contextlib
import copy

import pytest
import torch
from pytorch.fp8_attention_cases import attentions
from pytorch.helpers import assert_same_bits, same_draws, states_of, states_of_tracker
from pytorch.layer_microbatches import accumulate
from pytorch.layer_recompute import (
    IGNORED,
    RECIPES,
    assert_one_plan,
    few,
    kinds,
    of_dtype,
    recipes,
    region,
    step,
)
from pytorch.layer_ways import (
    DROPS,
    HEADS,
    HIDDEN,
    LENGTH,
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
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

pytestmark = IGNORED


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
    layer = make_layer(device, BF16, heads=2, fuse_qkv_params=True)  # cuDNN takes 16 channels
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
        return found, states_of_tracker(tracker)

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
