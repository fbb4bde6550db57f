# SPDX-License-Identifier: Apache-2.0
"""`cache_weights`: weights are cast again only when they have changed, and no bit differs."""

import copy

import numpy as np
import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, captured, counted
from pytorch.module_cases import CHECKPOINTED, SPLIT, batch, make, quantized, region, step

import transformer_engine.pytorch as te

STATELESS = ("current", "current-power2")


def twins(kind, device):
    """A module that caches its weights, and the same one that does not."""
    module = make(kind, device)
    plain = copy.deepcopy(module)
    module.cache_weights = True
    return module, plain


def casts_of(call):
    """What a call gave, and how many casts it made."""
    with counted():
        found = call()
    return found, quantized()


@pytest.mark.parametrize("kind", [*CHECKPOINTED, *SPLIT])
@pytest.mark.parametrize("recipe", STATELESS)
def test_training_casts_weights_once_a_change(device, kind, recipe):
    module, plain = twins(kind, device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
    parts = len(module.LINEARS)
    for i in range(5):
        x = batch(device)
        found, casts = casts_of(lambda: step(module, x, recipe))  # noqa: B023
        expected, usual = casts_of(lambda: step(plain, x, recipe))  # noqa: B023
        assert_same_bits(found, expected)
        again = usual - casts
        if i in (0, 2, 4):  # new, or changed by the optimizer
            assert again >= parts
        else:
            assert again >= 2 * parts
        if i in (1, 3):
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_inference_casts_each_weight_once(device, recipe, grad):
    module, plain = twins("linear", device)
    x = batch(device)
    for m in (module, plain):
        step(m, x, recipe)
    casts = []
    for _ in range(4):
        x = batch(device)
        with grad(), region(recipe):
            found, count = casts_of(lambda: module(x))  # noqa: B023
            assert_same_bits(found, plain(x))
        casts.append(count)
    first = 1 if recipe == "current" and grad is torch.no_grad else 2
    assert casts == [first, 1, 1, 1]


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_weights_of_inference_mode_are_cast_at_each_call(device, kind, recipe):
    """They have no version: a change would go unseen."""
    with torch.inference_mode():
        module, plain = twins(kind, device)
        for _ in range(4):
            x = batch(device)
            with region(recipe):
                assert_same_bits(module(x), plain(x))
            for m in (module, plain):
                for weight in m.parameters():
                    weight.mul_(0.5)


def test_scales_that_moved_are_cast_with(device):
    """Of delayed scaling: a frozen weight between steps of training."""
    module, plain = twins("linear", device)
    for m in (module, plain):
        m.weight.requires_grad_(False)
    for i in range(6):
        x, y = batch(device), batch(device)
        results = []
        for m in (module, plain):
            with torch.no_grad(), region("delayed"):
                results.append([m(y), m(y)])
            results[-1] += step(m, x * 2**i, "delayed")
        assert_same_bits(*results)


def test_delayed_training_records_each_amax(device):
    module, plain = twins("linear", device)
    for _ in range(4):
        x = batch(device)
        found, casts = casts_of(lambda: step(module, x, "delayed"))  # noqa: B023
        expected, usual = casts_of(lambda: step(plain, x, "delayed"))  # noqa: B023
        assert casts == usual
        assert_same_bits(found, expected)
    one, other = (m._state_values()["forward"] for m in (module, plain))
    assert_same_bits(one[1], other[1])  # histories: the last update was of one module alone


@pytest.mark.parametrize("first", [True, False])
def test_on_top_of_microbatches(device, first):
    """True casts a weight that has not changed no more than False does."""
    module, plain = twins("linear", device)
    x = batch(device)
    step(module, x, "current", is_first_microbatch=True)
    found, casts = casts_of(lambda: step(module, x, "current", is_first_microbatch=first))
    assert casts == 2
    assert_same_bits(found, step(plain, x, "current"))


@pytest.mark.parametrize("change", ["copy", "assign", "recipe", "dtype", "load"])
def test_changes_are_seen(device, change):
    module, plain = twins("linear", device)
    x, recipe = batch(device), "current"
    for m in (module, plain):
        step(m, x, recipe)
    new = torch.randn_like(module.weight)
    for m in (module, plain):
        if change == "copy":
            with torch.no_grad():
                m.weight.copy_(new)
        elif change == "assign":
            m.weight = torch.nn.Parameter(new.clone())
        elif change == "load":
            m.load_state_dict({**m.state_dict(), "weight": new})
        elif change == "dtype":
            m.bfloat16()
    if change == "recipe":
        recipe = "current-power2"
    x = x.to(module.weight.dtype)
    assert_same_bits(step(module, x, recipe), step(plain, x, recipe))


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("way", ["data", "set_", "assign", "swap_tensors", "attribute"])
def test_another_storage_at_the_same_address_is_seen(device, way, explicit):
    """An allocator gives the memory that was freed last: neither address nor version changes."""
    module, plain = twins("linear", device)
    module.cache_weights = not explicit
    x, memory = batch(device), torch.empty_like(module.weight)

    def kept():
        given = {"is_first_microbatch": False} if explicit else {}
        return step(module, x, "current", **given)

    module.weight = torch.nn.Parameter(torch.from_dlpack(memory))
    for _ in range(4):
        versions = module.weight._version
        memory.normal_()
        new = torch.from_dlpack(memory)  # a storage of its own
        if way == "data":
            module.weight.data = new
        elif way == "set_":
            with torch.no_grad():
                module.weight.set_(new)
        elif way == "assign":
            module.load_state_dict({**module.state_dict(), "weight": new}, assign=True)
        elif way == "swap_tensors":
            before = torch.__future__.get_swap_module_params_on_conversion()
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                module.load_state_dict({**module.state_dict(), "weight": new}, assign=True)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(before)
        else:
            module.weight = torch.nn.Parameter(new)
        assert module.weight.data_ptr() == memory.data_ptr()
        assert module.weight._version == versions or way == "set_"
        with torch.no_grad():
            plain.weight.copy_(memory)
        assert_same_bits(kept(), step(plain, x, "current"))
        found, casts = casts_of(kept)
        assert casts == 2  # input and gradient
        assert_same_bits(found, step(plain, x, "current"))


def test_a_weight_that_is_turned_where_it_lies_is_seen(device):
    module, plain = (make("linear", device, sizes=(32, 32)) for _ in range(2))
    module.cache_weights = True
    x = batch(device)
    for _ in range(3):
        module.weight.data = module.weight.data.t()
        with torch.no_grad():
            plain.weight.copy_(module.weight)
            plain.bias.copy_(module.bias)
        assert_same_bits(step(module, x, "current"), step(plain, x, "current"))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_later_microbatches_of_delayed_scaling_cast_no_weight(device, kind, own):
    """Whatever scales the backwards between them have moved, and whether the module caches, too."""
    module, plain = twins(kind, device)
    module.cache_weights = own
    counts = {}
    for first in (True, False, False, None, True, False, np.False_):
        x = batch(device)
        call = {"is_first_microbatch": first}
        found, casts = casts_of(lambda: step(module, x, "delayed", **call))  # noqa: B023
        counts.setdefault(first, set()).add(casts)
        assert_same_bits(found, step(plain, x, "delayed", **call))
    assert all(len(found) == 1 for found in counts.values())
    assert counts[True].pop() - counts[False].pop() == len(module.LINEARS)


def test_layers_cache_too(device):
    """As one plan, and module by module."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    module = te.TransformerLayer(64, 128, 4, **options)
    plain = copy.deepcopy(module)
    for part in module.modules():
        part.cache_weights = True
    x = torch.randn(8, 2, 64, device=device)
    counts = []
    for _ in range(5):
        found, casts = casts_of(lambda: step(module, x, "current"))
        expected, usual = casts_of(lambda: step(plain, x, "current"))
        assert_same_bits(found, expected)
        counts.append(usual - casts)
    assert counts[-1] == 8 and counts[-2] == 8 and counts[0] < 8


def test_the_default_keeps_nothing_and_the_environment_sets_it(device, monkeypatch):
    module = make("linear", device)
    with torch.no_grad(), te.autocast(recipe=RECIPES["current"]()):
        module(batch(device))
    assert module._weight_caches == (None,)
    monkeypatch.setenv("TE_CACHE_WEIGHTS", "1")
    assert make("linear", device).cache_weights and not module.cache_weights


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_reads_what_the_forward_read(device, reentrant):
    module, plain = twins("linear", device)
    x = batch(device)
    for _ in range(2):
        results = []
        for m in (module, plain):
            inp = x.clone().requires_grad_()
            m.zero_grad()
            with region("current"):
                out = te.checkpoint(m, inp, use_reentrant=reentrant)
            out.backward(torch.ones_like(out))
            results.append([out.detach(), inp.grad, m.weight.grad.clone()])
        assert_same_bits(*results)


@pytest.mark.gpu
def test_captured_graphs_cast_at_each_replay():
    module = make("linear", "cuda")
    module.cache_weights = True
    x = batch("cuda")
    with torch.no_grad(), region("current"):
        module(x)
        graph, out = captured(lambda: module(x))
        module.weight.mul_(2)
        graph.replay()
        assert_same_bits(out, module(x))


def test_stages_that_are_overridden_cast_anew(device):
    """And what they cast goes with them."""
    module, plain = twins("linear", device)
    x = batch(device)

    def zeros(buffers):
        buffers["weight_row"].view(torch.uint8).zero_()
        buffers["weight_scales"].fill_(1.0)

    for stages in ({}, {"quantize_weight": zeros}, {}):
        for one in (module, plain):
            one.override_stages(**stages)
        for _ in range(2):
            assert_same_bits(evaluated(module, x), evaluated(plain, x))


def evaluated(module, x):
    with torch.no_grad(), region("current"):
        return module(x)
