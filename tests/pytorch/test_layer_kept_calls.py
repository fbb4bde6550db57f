# SPDX-License-Identifier: Apache-2.0
"""Calls that a layer keeps: found again only where they fit, few, and no longer than the layer."""

import copy
import gc
import weakref

import pytest
import torch
from pytorch.helpers import assert_same_bits, same_draws
from pytorch.layer_ways import (
    LENGTH,
    SOURCE,
    assert_counts,
    assert_whole,
    by_modules,
    dtype_of,
    inputs_of,
    make_attention,
    make_layer,
    set_of,
    states,
    train,
)
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.plans import plans_of
from transformer_engine.pytorch.module.call_key import KEPT
from transformer_engine.pytorch.module.norm import L2Normalization


def assert_same_step(layer, inp, **given):
    """Assert that a call gives the bits of the modules, in output and gradients."""

    def step():
        leaf = inp.detach().requires_grad_()
        layer.zero_grad()
        out = layer(leaf, **given)
        out.backward(torch.ones_like(out))
        return [out.detach(), leaf.grad, *(p.grad for p in layer.parameters())]

    ours = step()
    with by_modules():
        assert_same_bits(ours, step())


# ---- what a kept call depends on -----------------------------------------------------------------


def test_a_bias_that_is_made_for_a_length(device):
    """That of ALiBi; a call of one token has one that broadcasts to any length."""
    layer = make_layer(device, dtype_of(device))
    with torch.inference_mode():
        layer(states(layer).detach(), core_attention_bias_type="alibi")
    for length in (1, LENGTH, LENGTH + 3, 2):
        assert_same_step(layer, states(layer, length), core_attention_bias_type="alibi")


KEPT_WAYS = {
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
    "off-by-one": ({"softmax_type": "off-by-one"}, {}),
    "learnable": ({"softmax_type": "learnable"}, {}),
}


@pytest.mark.parametrize("kind", KEPT_WAYS)
def test_slopes_and_sinks_are_found_once(device, kind, monkeypatch):
    """They are the same in each call; a learnable one as long as the parameter is."""
    options, given = KEPT_WAYS[kind]
    layer = make_attention(device, dtype_of(device), **options)
    core, found = layer.core_attention, []
    limits_for = core.limits_for
    monkeypatch.setattr(core, "limits_for", lambda *args: found.append(1) or limits_for(*args))
    for _ in range(4):
        assert_whole(layer, hidden_states=states(layer), **given).sum().backward()
    assert len(found) == 1
    for length in (1, LENGTH + 3):
        assert_same_step(layer, states(layer, length), **given)
    found.clear()
    if kind != "learnable":
        return
    for change in (
        lambda: core.softmax_offset.data.add_(1.0),
        lambda: setattr(core, "softmax_offset", torch.nn.Parameter(core.softmax_offset + 1.0)),
        lambda: core.softmax_offset.requires_grad_(False),
        lambda: core.softmax_offset.requires_grad_(True),
        lambda: setattr(core, "softmax_scale", 0.3),
    ):
        change()
        assert_whole(layer, hidden_states=states(layer))
        assert_same_step(layer, states(layer))


def test_norms_of_queries_and_keys_that_are_set(device):
    def change(layer):
        layer.q_norm = layer.k_norm = L2Normalization(1e-6)

    def undo(layer, _):
        layer.q_norm = layer.k_norm = None

    assert_counts(make_attention(device, dtype_of(device)), change, True, undo=undo)


def test_a_window_that_is_set_as_a_list(device):
    layer = make_layer(device, dtype_of(device))
    change = set_of("self_attention.core_attention.window_size", [2, 0])
    assert_counts(layer, change, True)


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({}, "parallel_attention_mlp", True),
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
            False,
        ),
    ],
)
def test_how_branches_are_put_together(device, options, name, value):
    layer = make_layer(device, dtype_of(device), **options)
    assert_counts(layer, set_of(name, value), True)


def test_sums_of_lengths_that_nothing_reads(device):
    """They find the call of the ones before."""
    layer = make_attention(device, dtype_of(device))
    inp = states(layer)
    for length in range(3):
        sums = torch.tensor([0, length, LENGTH], device=inp.device)
        layer(inp, cu_seqlens_q_padded=sums, max_seqlen_q=length)
    assert len(layer._calls.calls) == 1


@pytest.mark.parametrize("name", ["encoder_output", "core_attention_bias"])
def test_tensors_that_want_a_gradient_by_turns(device, name):
    """The keys of calls with tensors tell whether these do."""
    layer = make_attention(device, dtype_of(device), attention_type="cross")
    given = inputs_of(layer)
    if name == "core_attention_bias":
        bias = torch.randn(1, 1, LENGTH, SOURCE, device=given["hidden_states"].device)
        given |= {name: bias, "core_attention_bias_type": "post_scale_bias"}
    for wants in (False, True, False, True):
        given[name] = given[name].detach().requires_grad_(wants)
        ours = train(layer, given, steps=1)
        with by_modules():
            assert_same_bits(ours, train(layer, given, steps=1))
        assert (ours[0]["inputs"][name] is not None) == wants


def test_diagonals_by_turns(device):
    """The same for the corner that the diagonal of each sequence ends in."""
    layer = make_attention(device, dtype_of(device), attention_type="cross")
    given = inputs_of(layer)
    for name, length in (("cu_seqlens_q", LENGTH), ("cu_seqlens_kv", SOURCE)):
        given[name] = torch.tensor(
            [0, length - 2, 2 * length - 3], device=given["hidden_states"].device
        )
        given[name] = given[name].int()
    found = []
    for kind in ("padding_causal", "padding_causal_bottom_right") * 2:
        given["attn_mask_type"] = kind
        ours = train(layer, given, steps=1)
        with by_modules():
            assert_same_bits(ours, train(layer, given, steps=1))
        found.append(ours[0]["outputs"][0])
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


# ---- whose parameters it reads -------------------------------------------------------------------


def _as_buffers(module):
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                delattr(part, name)
                part.register_buffer(name, parameter.detach() * 2)
    return module


def _replica(module):
    """What `torch.nn.parallel.replicate` makes: tensors in the place of parameters."""
    made = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        if parameter is None:
            made._parameters[name] = None
        else:
            object.__setattr__(made, name, (parameter * 2).detach())
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _replica(child)
    return made


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("change", [_as_buffers, _replica])
@pytest.mark.parametrize(
    "make", [make_layer, make_attention, lambda *of: te.Linear(32, 48, device=of[0]).to(of[1])]
)
def test_other_tensors_in_the_place_of_parameters(device, make, change, warm):
    module = make(device, dtype_of(device))
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter *= 2
    inp = torch.randn(LENGTH, 2, 32).to(device, dtype_of(device))
    expected = doubled(inp)
    for _ in range(2 * warm):
        module(inp)
    odd = change(module)
    for _ in range(2):
        assert torch.equal(odd(inp), expected)


# ---- how much is kept ----------------------------------------------------------------------------


def test_a_dropout_by_a_schedule_makes_few_plans(device):
    """They take long to make; and the bits are those of the modules all the same."""
    layer = make_layer(device, dtype_of(device), hidden_dropout=0.3)
    inp = states(layer)

    def steps(own):
        results = []
        with same_draws(device):
            for step in range(4 * KEPT):
                own.hidden_dropout = 0.1 + 0.01 * step / KEPT
                results += train(own, {"hidden_states": inp}, steps=1)
        return results

    before = plans_of.cache_info().misses
    ours = steps(copy.deepcopy(layer))
    made = plans_of.cache_info().misses - before
    # By themselves its attention and its three modules are more.
    assert 0 < made <= KEPT + 4
    with by_modules():
        theirs = steps(copy.deepcopy(layer))
    for step, pair in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(*pair, f"step {step}: ")


def test_a_key_that_comes_again_after_many_has_its_call(device):
    layer = make_layer(device, dtype_of(device))
    inp = states(layer)
    for step in range(2 * KEPT):
        layer.drop_path_rate = 0.01 * (step + 1)
        layer(inp)
    layer(inp)
    assert_whole(layer, hidden_states=inp)


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("make", [make_layer, make_attention])
def test_a_layer_is_freed_at_once(device, make, recipe):
    """Without the garbage collector, which may come late for so few objects of so much memory."""
    layer = make(device, dtype_of(device, recipe))
    train(layer, inputs_of(layer), recipe, 2)
    assert layer._calls is not None
    found = [weakref.ref(thing) for thing in (layer, *layer.parameters())]
    gc.collect()
    gc.disable()
    try:
        del layer
        assert not [ref for ref in found if ref() is not None]
    finally:
        gc.enable()


def test_report_says_which_attention_ran_last(device, monkeypatch):
    layer = make_attention(device, BF16)
    for fused in ("1", "0", "1"):
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        layer(states(layer))
        assert layer.core_attention._last_call.backend == ("native" if fused == "1" else "sdpa")
