# SPDX-License-Identifier: Apache-2.0
"""Unusual lives of a te.Linear: weights that are no parameters, late settings, threads, tracers."""

import copy
import gc
import threading

import pytest
import torch
from pytorch.helpers import assert_same_bits, assert_same_gemm, counted, state_of
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import scaling


def step(layer, x, recipe, **options):
    with te.autocast(recipe=recipe):
        out = layer(x, **options)
    out.sum().backward()
    return out


def plain_weight(layer):
    """A frozen layer whose weight is a buffer."""
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.register_buffer("weight", weight)
    return layer


def replica(layer):
    """What `torch.nn.parallel.replicate` makes: tensors in the place of parameters."""
    made = layer._replicate_for_data_parallel()
    made._parameters = {}
    for name, parameter in layer._parameters.items():
        setattr(made, name, parameter.detach().clone().requires_grad_())
    return made


@pytest.mark.parametrize("change", [plain_weight, replica])
def test_a_layer_without_parameters_runs(device, change):
    layer = te.Linear(16, 32, bias=change is replica, device=device)
    odd = change(copy.deepcopy(layer))
    assert not list(odd.parameters())
    x = torch.randn(16, 16, device=device, requires_grad=True)
    with counted() as gemms:
        expected = step(layer, x, Float8CurrentScaling())
    assert gemms.fp8 == 3
    with counted() as gemms:
        assert_same_bits(step(odd, x, Float8CurrentScaling()), expected)
    assert gemms.fp8 == (3 if change is replica else 2)


def test_settings_changed_after_calls_apply_to_the_next(device):
    layer = te.Linear(16, 16, device=device)
    x = torch.randn(16, 16, device=device)
    for _ in range(2):
        step(layer, x, Float8CurrentScaling())
    expected = layer.weight.grad / 2
    layer.weight.grad = None
    layer.weight.main_grad = torch.zeros(16, 16, device=device)
    layer.fuse_wgrad_accumulation = True
    with counted() as gemms:
        step(layer, x, Float8CurrentScaling())
    assert gemms.fp8 == 2
    assert layer.weight.grad is None
    assert_same_bits(layer.weight.main_grad, expected)


def test_a_delayed_gradient_survives_a_call_that_raises(device):
    layer = te.Linear(16, 16, delay_wgrad_compute=True, fuse_wgrad_accumulation=True, device=device)
    layer.weight.main_grad = main_grad = torch.zeros(16, 16, device=device)
    with counted() as gemms:
        step(layer, torch.randn(16, 16, device=device), Float8CurrentScaling())
        layer.weight.main_grad = None
        with pytest.raises(RuntimeError, match="main_grad"):
            layer.backward_dw()
        layer.weight.main_grad = main_grad
        layer.backward_dw()
    assert gemms.fp8 == 2 and main_grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="no weight gradient is pending"):
        layer.backward_dw()


@pytest.mark.parametrize("split", [5, "qkv"])
def test_a_split_that_is_no_collection_of_names(split):
    with pytest.raises(TypeError, match="parameters_split=.*expected a sequence of names"):
        te.Linear(16, 48, parameters_split=split)


@pytest.mark.parametrize("grad", [True, False])
def test_jit_trace_is_refused(device, grad):
    """It would record the output as a constant."""
    layer = te.Linear(16, 16, device=device)
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="jit.trace"):
        torch.jit.trace(layer, torch.randn(4, 16, device=device))


def test_parameters_can_be_swapped_after_caching(device):
    """`torch.utils.swap_tensors` refuses a tensor that something refers to weakly."""
    layer = te.Linear(16, 16, device=device)
    with counted() as gemms:
        step(layer, torch.randn(16, 16, device=device), DelayedScaling(), is_first_microbatch=True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            layer.bfloat16()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        x = torch.randn(16, 16, device=device, dtype=torch.bfloat16)
        step(layer, x, DelayedScaling(), is_first_microbatch=False)
    assert gemms.fp8 == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_while_calibrating_records_nothing(device, use_reentrant):
    layer = te.Linear(16, 16, device=device)

    def calibrate(x):
        with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
            return layer(x)

    x = torch.randn(16, 16, device=device, requires_grad=True)
    with counted() as gemms:
        out = checkpoint(calibrate, x, use_reentrant=use_reentrant)
        before = state_of(layer)
        out.sum().backward()
    assert gemms.fp8 == 0
    assert before["forward"][1][:, :2].amax() > 0
    assert_same_bits(state_of(layer)["forward"], before["forward"])


def test_state_is_loaded_in_place(device):
    """Graphs, compiled or captured, read the chunk that the module has had."""
    layer = te.Linear(16, 16, device=device)
    recipe = DelayedScaling(amax_history_len=4)
    x = torch.randn(16, 16, device=device)
    with counted() as gemms:
        step(layer, x, recipe)
        kept, saved = state_of(layer), copy.deepcopy(layer.state_dict())
        step(layer, 8 * x, recipe)
    assert gemms.fp8 == 4
    slots = layer._slots
    layer.load_state_dict(saved)
    assert layer._slots is slots
    for direction in ("forward", "backward"):
        assert_same_bits(slots.values()[direction], kept[direction])


def test_modules_that_die_during_an_update(device, monkeypatch):
    """A garbage collection in the middle of an update frees slots, chunks and arenas."""
    layers = [te.Linear(16, 16, device=device) for _ in range(4)]
    x = torch.randn(16, 16, device=device)
    with counted() as gemms:
        for length, layer in enumerate(layers, 2):
            step(layer, x, DelayedScaling(amax_history_len=length))
    assert gemms.fp8 == 8
    survivor, native = layers.pop(), scaling.torch_ops.scaling_update
    del layer

    def update(*arguments):
        layers.clear()
        gc.collect()
        native(*arguments)

    monkeypatch.setattr(scaling.torch_ops, "scaling_update", update)
    scaling.update("forward")
    scaling._sweep()
    assert not layers and len(scaling._ARENAS["forward"]) == 1
    assert survivor._slots.live


def test_slots_freed_while_others_are_taken(device, monkeypatch):
    """The last module of a chunk dies while the next one takes slots: both keep their books."""
    recipe = DelayedScaling(amax_history_len=4)
    x = torch.randn(16, 16, device=device)
    old, young = te.Linear(16, 16, device=device), te.Linear(16, 16, device=device)
    with counted() as gemms:
        step(old, x, recipe)
        held = [old]
        del old
        take = scaling.Chunk.take

        def collect(chunk, count):
            held.clear()
            gc.collect()
            return take(chunk, count)

        monkeypatch.setattr(scaling.Chunk, "take", collect)
        step(young, x, recipe)
    assert gemms.fp8 == 4
    assert (state_of(young)["forward"][0][:2] != 1).all(), "its chunk was not updated"


def test_threads_with_modules_of_their_own(device):
    """Arenas come and go in other threads while one updates its scales."""
    failures = []

    def work(seed):
        try:
            for length in 2 * (2, 3, 4, 5, 6, 7):
                layer = te.Linear(16, 16, device=device)
                recipe = DelayedScaling(amax_history_len=length, margin=seed)
                for _ in range(3):
                    step(layer, torch.randn(16, 16, device=device), recipe)
                assert layer.weight.grad.isfinite().all()
        except BaseException as error:  # noqa: BLE001 - told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    with counted() as gemms:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert gemms.fp8 == 4 * 12 * 3 * 2


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
@pytest.mark.parametrize("what", ["main_grad", "bias", "input"])
def test_views_into_flat_buffers(device, recipe, what):
    """Neither aligned as libraries want it: one element into a flat tensor."""
    options = {"device": device, "params_dtype": torch.bfloat16}
    straight = te.Linear(64, 64, fuse_wgrad_accumulation=what == "main_grad", **options)
    shifted = copy.deepcopy(straight)
    x = torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    inputs = [x, x]
    if what == "main_grad":
        straight.weight.main_grad = torch.zeros(64, 64, device=device)
        shifted.weight.main_grad = torch.zeros(64 * 64 + 1, device=device)[1:].view(64, 64)
    elif what == "bias":
        bias = torch.randn(65, device=device, dtype=torch.bfloat16)
        straight.bias = torch.nn.Parameter(bias[1:].clone())
        shifted.bias = torch.nn.Parameter(bias[1:])
    else:
        inputs[1] = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(64, 64)
    results = []
    for layer, given in zip((straight, shifted), inputs, strict=True):
        with counted() as gemms:
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = layer(given)
            out.sum().backward()
        assert gemms.fp8 == (0 if recipe is None else 2)
        weight = layer.weight
        results.append([out, weight.main_grad if what == "main_grad" else weight.grad])
    for one, other in zip(*results, strict=True):
        assert_same_gemm(one, other, device, recipe, 64)
