# SPDX-License-Identifier: Apache-2.0
"""Dispatch modes around layers: what they see and count, where a layer ran as one call too.

Around a forward a layer calls its modules, each of which shows its operators. A mode around the
backward alone finds one operator for each plan, and what Python functions run inside of it. All
counts are those of the modules, and bits are the same.
"""

import contextlib
import threading

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.layer_ways import (
    ATTENTION,
    DROPS,
    FUSED,
    HIDDEN,
    LAYER,
    LENGTH,
    assert_whole,
    both_ways,
    by_branches,
    dtype_of,
    inputs_of,
    is_crossed,
    make_attention,
    make_layer,
    region,
)
from pytorch.test_flops import Log
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from transformer_engine.pytorch.torchside.modes import active_modes

LAYERS = {
    "encoder": {},
    "fused": {**FUSED, **DROPS},
    "groups": {"num_gqa_groups": 2},
    "bshd": {"attn_input_format": "bshd"},
    "parallel": {"parallel_attention_mlp": True},
    "gated": {"activation": "swiglu", "normalization": "RMSNorm", "self_attn_mask_type": "causal"},
    "decoder": {"layer_type": "decoder"},
    "decoder, fused": {"layer_type": "decoder", **FUSED, **DROPS},
    "decoder, groups": {"layer_type": "decoder", "num_gqa_groups": 1, "bias": False},
}
ATTENTIONS = {
    "self": {},
    "norm": {"input_layernorm": True, "return_layernorm_output": True},
    "cross": {"attention_type": "cross", "attn_mask_type": "no_mask"},
}


def leaves_of(layer, given):
    found = [given["hidden_states"], *layer.parameters()]
    return [*found, given["encoder_output"]] if is_crossed(layer) else found


def step(layer, recipe, mode, when="backward"):
    """Gradients of a step; the mode is active in its forward, its backward or both."""
    given = inputs_of(layer)
    leaves = leaves_of(layer, given)
    layer.zero_grad()
    with contextlib.ExitStack() as stack:
        if when != "backward":
            stack.enter_context(mode)
        with region(recipe):
            outs = layer(**given)
        outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
        grads = [torch.randn_like(out) for out in outs]
        if when == "forward":
            stack.close()
        elif when == "backward":
            stack.enter_context(mode)
        torch.autograd.backward(outs, grads)
    return [leaf.grad for leaf in leaves]


def counted_step(layer, recipe, when):
    """Operations that a counter sees of a part of a step, and the gradients of the step."""
    counter = FlopCounterMode(display=False)
    found = step(layer, recipe, counter, when)
    return torch.tensor(counter.get_total_flops()), found


def assert_counts(layer, recipe, kind):
    """Assert that a counter counts what it does of the modules, whatever part of a step it sees."""
    counts = {}
    for when in ("forward", "backward", "both"):

        def run(layer, when=when):
            return [counted_step(layer, recipe, when) for _ in range(2)]

        ((counts[when], _), (again, _)) = both_ways(layer, run, when == "backward", kind)
        assert counts[when] == again
    assert counts["forward"] + counts["backward"] == counts["both"]
    assert counts["backward"] > counts["forward"] > 0
    return counts["backward"]


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("name", LAYERS)
def test_counted_operations(device, name, recipe):
    layer = make_layer(device, dtype_of(device, recipe), **LAYERS[name])
    assert_counts(layer, recipe, LAYER)


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_counted_operations_of_main_gradients(device, recipe):
    """Which the operator says it writes."""
    layer = make_layer(device, dtype_of(device, recipe), fuse_wgrad_accumulation=True, **FUSED)

    def run(layer):
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        found = [counted_step(layer, recipe, "backward") for _ in range(2)]
        return *found, [parameter.main_grad for parameter in layer.parameters()]

    ((count, _), *_) = both_ways(layer, run)
    plain = make_layer(device, dtype_of(device, recipe))
    assert count == counted_step(plain, recipe, "backward")[0]


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_counted_operations_of_attention(device, name, recipe):
    layer = make_attention(device, dtype_of(device, recipe), **ATTENTIONS[name])
    count = assert_counts(layer, recipe, ATTENTION)
    if name == "self":  # four projections of two GEMMs each, five products
        rows = 2 * LENGTH
        assert count == 2 * (2 * 4 * rows * HIDDEN * HIDDEN + 5 * rows * LENGTH * HIDDEN)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_counted_operations_by_branches(device, name):
    """Of a large layer, which is a call for each branch."""
    layer = make_layer(device, dtype_of(device), **LAYERS[name])
    with by_branches():
        assert_counts(layer, None, LAYER)


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_several_modes_around_the_backward(device, recipe):
    """Each sees everything once; all are as they were behind it."""
    layer = make_layer(device, dtype_of(device, recipe))
    counts = []
    for _ in range(2):
        given = inputs_of(layer)
        with region(recipe):
            out = assert_whole(layer, **given).sum()
        with FlopCounterMode(display=False) as counter, Log() as outer, Log() as inner:
            before = active_modes()
            out.backward()
            assert active_modes() == before
        assert outer.seen == inner.seen
        seen = [name.split(".")[1] for name in outer.seen]
        assert sum(name.startswith("run") for name in seen) == 1
        counts.append(counter.get_total_flops())
    assert counts == [int(counted_step(layer, recipe, "backward")[0])] * 2


def test_a_second_backward_under_a_mode(device):
    """Of the same forward: the first one without, with the same bits."""
    layer = make_layer(device, dtype_of(device), layer_type="decoder", **DROPS)
    given = inputs_of(layer)
    leaves, out = leaves_of(layer, given), assert_whole(layer, **given).float().square().sum()
    with Log() as log:
        seen = torch.autograd.grad(out, leaves, retain_graph=True)
    assert [name for name in log.seen if name.startswith("transformer_engine")] == [
        "transformer_engine.run.default"
    ]
    assert_same_bits(seen, torch.autograd.grad(out, leaves))


def test_fake_tensors_of_the_backward_alone(device):
    """Gradients without values, of the right shapes."""
    layer = make_layer(device, dtype_of(device), layer_type="decoder")
    given = inputs_of(layer)
    leaves, out = leaves_of(layer, given), assert_whole(layer, **given)
    ones = torch.ones_like(out)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = torch.autograd.grad(out, leaves, ones, retain_graph=True)
    for grad, leaf in zip(found, leaves, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (leaf.shape, leaf.dtype, leaf.device)
    torch.autograd.grad(out, leaves, ones)


def test_modes_of_threads(device):
    """A mode sees the backwards of its thread alone."""
    layers = [make_layer(device, dtype_of(device), layer_type=t) for t in ("encoder", "decoder")]
    expected, counts, barrier = [], {}, threading.Barrier(2, timeout=60)
    for layer in layers:
        assert_whole(layer, **inputs_of(layer))
        expected.append(int(counted_step(layer, None, "backward")[0]))

    def train(number):
        barrier.wait()
        steps = [counted_step(layers[number], None, "backward") for _ in range(5)]
        counts[number] = [int(count) for count, _ in steps]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [counts[number] for number in range(2)] == [[count] * 5 for count in expected]
    assert expected[1] > expected[0] > 0
