# SPDX-License-Identifier: Apache-2.0
"""Cached FP8 weights of linear modules: is_first_microbatch saves casts and changes no bit."""

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, counted, state_of
from pytorch.module_cases import (
    CHECKPOINTED,
    FEW,
    SPLIT,
    batch,
    count_of,
    gemms_of,
    has_norm,
    last_weight,
    make,
    quantized,
    region,
    step,
    weights_of,
    whole,
)
from pytorch.module_pairs import Pair

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

pytestmark = every_device


@pytest.mark.parametrize("kind", [*CHECKPOINTED, *SPLIT])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_casts_are_saved_and_the_bits_stay(device, kind, recipe):
    """False leaves the casts of all weights out, forward and backward."""
    pair = Pair(kind, device)
    data = pair.batch()
    parts = len(pair.module.LINEARS)
    casts = {}
    for first in (None, True, False, False, None, False):
        te.reset()
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data, is_first_microbatch=first)
        casts.setdefault(first, quantized())
        assert count_of(gemms, recipe) == gemms_of(pair.module)
        assert quantized() == casts[first]
        te.reset()
        expected = pair.step(pair.plain, recipe, data)
        assert_same_bits(found, expected)
        for name in weights_of(pair.plain):
            found, expected = (whole(m, name, lambda p: p.grad) for m in (pair.module, pair.plain))
            assert_same_bits(found, expected)
    again = 2 if pair.module.checkpoint else 1  # fc1's weight is cast for its second GEMM, too
    assert casts[True] - casts[False] == parts
    assert casts[None] - casts[True] in (parts, again + parts - 1)
    if not has_norm(kind):  # input, weight and gradient; the weight once more in the backward
        assert casts == {None: 4, True: 3, False: 2}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_casts_are_saved_without_a_reset_between(device, recipe):
    layer = make("linear", device)
    x = batch(device)
    for first, casts in ((True, 3), (False, 2), (False, 2), (None, 4), (False, 2)):
        with counted() as gemms:
            step(layer, x, recipe, is_first_microbatch=first)
        assert count_of(gemms, recipe) == 3 and quantized() == casts


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_none_keeps_nothing(device, kind):
    module = make(kind, device)
    step(module, batch(device), "current")
    assert set(module._weight_caches) == {None}


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_false_without_a_cache_makes_one(device, kind):
    pair = Pair(kind, device)
    data = pair.batch()
    expected = pair.step(pair.plain, "current", data)
    casts = []
    for _ in range(2):
        with counted() as gemms:
            found = pair.step(pair.module, "current", data, is_first_microbatch=False)
        assert count_of(gemms, "current") == gemms_of(pair.module)
        assert_same_bits(found, expected)
        casts.append(quantized())
    assert casts[0] - casts[1] == len(pair.weights)
    assert has_norm(kind) or casts == [3, 2]


# ---- changed weights -----------------------------------------------------------------------------

CHANGES = ["in-place", "reassigned", "data", "recipe", "optimizer", "dtype"]


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_cast_again(device, kind, change):
    """False never computes with a weight that is not there any more: each has its own cache."""
    pair = Pair(kind, device)
    data, recipe = pair.batch(), "current"
    pair.step(pair.module, recipe, data, is_first_microbatch=True)
    last = list(pair.weights)[-1]
    new = torch.randn_like(pair.weights[last])
    if change == "in-place":
        with torch.no_grad():
            pair.weights[last].copy_(new)
    elif change == "reassigned":
        setattr(pair.module, last, torch.nn.Parameter(new))
    elif change == "data":
        pair.weights[last].data = new
    elif change == "optimizer":
        torch.optim.SGD(pair.module.parameters(), lr=1.0).step()
    elif change == "dtype":
        pair.module.bfloat16().float()
    else:
        recipe = "current-power2"
    pair.plain.load_state_dict(pair.module.state_dict())
    expected = pair.step(pair.plain, recipe, data)
    casts = []
    for _ in range(2):
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data, is_first_microbatch=False)
        assert_same_bits(found, expected)
        assert count_of(gemms, recipe) == gemms_of(pair.module)
        casts.append(quantized())
    everything = change in ("recipe", "dtype", "optimizer")
    assert casts[0] - casts[1] == (len(pair.weights) if everything else 1)
    assert has_norm(kind) or casts == [3, 2]


def assert_current(module, call):
    """``call(first)`` computes with the values of this moment, cache or not."""
    outputs = []
    for first in (False, None):
        with counted() as gemms, region("current"):
            outputs.append(call(first))
        assert count_of(gemms, "current") == len(module.LINEARS)
    assert_same_bits(*outputs)


@pytest.mark.parametrize(
    ("kind", "how"),
    [(k, "split") for k in SPLIT] + [(k, h) for k in FEW for h in ("parametrized", "functional")],
)
def test_a_changed_source_of_a_computed_weight_is_cast_again(device, kind, how):
    """The weight of a call may be a new tensor each time, in the memory of the one before."""
    module = make(kind, device)
    if how == "parametrized":
        name = last_weight(module)
        torch.nn.utils.parametrize.register_parametrization(module, name, torch.nn.Identity())
    x = batch(device)
    values = dict(module.named_parameters())

    def call(first):
        if how != "functional":
            return module(x, is_first_microbatch=first)
        given = {n: p.detach().clone() for n, p in values.items()}
        return torch.func.functional_call(module, given, (x,), {"is_first_microbatch": first})

    for _ in range(3):
        with torch.no_grad():
            for parameter in values.values():
                parameter.normal_()
        assert_current(module, call)


@pytest.mark.parametrize("kind", FEW)
def test_another_weight_in_the_same_memory_is_cast_again(device, kind):
    """Same address, same version, other tensor: as when the allocator gives memory out again."""
    module = make(kind, device)
    x = batch(device)
    values = {n: p.detach() for n, p in module.named_parameters()}
    memory = torch.empty_like(values[last_weight(module)])

    def call(first):
        given = {**values, last_weight(module): memory.data}  # with a version counter of its own
        return torch.func.functional_call(module, given, (x,), {"is_first_microbatch": first})

    for _ in range(2):
        memory.normal_()
        assert_current(module, call)


# ---- beside other features -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW)
def test_cached_weight_feeds_no_amax(device, kind):
    """Only the calls that cast a weight record its amax: its scale and history stay put."""
    module = make(kind, device)
    histories = []
    for first in (True, False, False):
        with te.autocast(recipe=DelayedScaling(amax_history_len=3)):
            out = module(batch(device).requires_grad_(), is_first_microbatch=first)
        out.sum().backward()
        histories.append(state_of(module)["forward"][1])
    for part in range(len(module.LINEARS)):
        weights = [history[:, 3 * part + 1] for history in histories]
        assert (weights[0] != 0).sum() == 1
        assert_same_bits(weights[1], weights[0])
        assert_same_bits(weights[2], weights[0])
        assert (histories[-1][:, 3 * part] != 0).sum() == 2  # the input went on


@pytest.mark.parametrize("kind", FEW)
def test_cached_forwards_before_their_backwards(device, kind):
    """A later True rewrites the cache; the earlier graph keeps its own."""
    pair = Pair(kind, device)
    a, b = pair.batch(), pair.batch()
    x = a[0].clone().requires_grad_()
    with region("current"):
        early = pair.module(x, is_first_microbatch=True)
    expected = pair.step(pair.plain, "current", a)[1]
    with torch.no_grad():
        for weight in pair.weights.values():
            weight.add_(1.0)
    with region("current"):
        pair.module(b[0], is_first_microbatch=True)
    early.backward(a[1])
    assert_same_bits(x.grad, expected)


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_cache_without_gradients(device, kind):
    module = make(kind, device)
    x = batch(device)
    for mode in (torch.no_grad, torch.inference_mode):
        outputs = []
        for first in (True, False, None):
            with mode(), region("current"), counted() as gemms:
                outputs.append(module(x, is_first_microbatch=first).clone())
            assert count_of(gemms, "current") == len(module.LINEARS)
        assert_same_bits(outputs[1:], outputs[:1] * 2)


@pytest.mark.parametrize("kind", FEW)
def test_parameters_can_be_swapped_after_caching(device, kind):
    """`torch.utils.swap_tensors` refuses a tensor that something refers to weakly."""
    module = make(kind, device)
    with counted() as gemms:
        step(module, batch(device), "delayed", is_first_microbatch=True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.bfloat16()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        step(module, batch(device, torch.bfloat16), "delayed", is_first_microbatch=False)
    assert count_of(gemms, "delayed") == 2 * gemms_of(module)
