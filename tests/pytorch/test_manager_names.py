# SPDX-License-Identifier: Apache-2.0
"""`FP8GlobalStateManager`: regions by calls, keys of scaling state, recompute by hand."""

import pytest
import torch
from pytorch import collective_programs as programs
from pytorch.helpers import assert_same_bits, counted, states_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

WIDTH = 32


def in_region(recipe, function):
    with te.autocast(recipe=recipe):
        return function()


def by_calls(recipe, function):
    Manager.autocast_enter(enabled=True, fp8_recipe=recipe)
    try:
        return function()
    finally:
        Manager.autocast_exit(True, _graph=False)


def step(layer, x, region, recipe):
    x = x.clone().requires_grad_()
    with counted() as gemms:
        out = region(recipe, lambda: layer(x))
        out.sum().backward()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return [out.detach(), grads, states_of(layer)], gemms.fp8


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=3), Float8CurrentScaling()])
def test_calls_enter_and_leave_a_region(device, start, recipe):
    """Bits, GEMMs and scales of a with block, over several steps."""
    found = []
    for region in (in_region, by_calls):
        start()
        layer = te.LayerNormMLP(WIDTH, WIDTH, device=device)
        inputs = [torch.randn(16, WIDTH, device=device) * 4**i for i in range(3)]
        found.append([step(layer, x, region, recipe) for x in inputs])
        assert not Manager.is_fp8_enabled() and current_state().depth == 0
    assert all(fp8 == 6 for _, fp8 in found[0])
    assert_same_bits([r for r, _ in found[1]], [r for r, _ in found[0]])
    assert [n for _, n in found[1]] == [n for _, n in found[0]]


def test_regions_by_calls_nest():
    first, second, group = DelayedScaling(), Float8CurrentScaling(), object()
    Manager.autocast_enter(True, fp8_recipe=first, fp8_group=group)
    Manager.autocast_enter(enabled=False, calibrating=True, fp8_recipe=second)
    assert Manager.is_fp8_calibration() and not Manager.is_fp8_enabled()
    with te.autocast(recipe=second):
        assert current_state().depth == 3
    with pytest.raises(RuntimeError, match=r"autocast_exit\(enabled=True\): the innermost .*False"):
        Manager.autocast_exit(True, False)
    Manager.autocast_exit(False, False)
    assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is first
    assert Manager.get_fp8_group() is group
    Manager.autocast_exit(enabled=True, _graph=False)
    assert not Manager.is_fp8_enabled() and current_state().depth == 0
    with pytest.raises(RuntimeError, match="no region is active; call autocast_enter first"):
        Manager.autocast_exit(True, False)
    with pytest.raises(TypeError, match="recipe"):
        Manager.autocast_enter(True, fp8_recipe="delayed")
    with pytest.raises(RuntimeError, match="no region is active"):
        Manager.autocast_exit(True, False)


def test_a_region_of_a_graph_updates_no_scales(device):
    """Programs that replay graphs update by `reduce_and_update_fp8_tensors`."""
    layer, x = te.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
    Manager.autocast_enter(True, fp8_recipe=DelayedScaling(), _graph=True)
    layer(4 * x)
    Manager.autocast_exit(True, True)
    assert te.scales(layer)["input"].scale == 1.0 and te.scales(layer)["input"].pending > 0
    Manager.reduce_and_update_fp8_tensors(forward=True)
    assert te.scales(layer)["input"].scale != 1.0 and te.scales(layer)["input"].pending == 0


def test_keys(device):
    recipe, group = DelayedScaling(amax_history_len=3), object()
    assert [Manager.get_fwd_bwd_key(f) for f in (True, False)] == ["forward", "backward"]
    key = Manager.get_key_in_buffer(True, recipe, group)
    unique = Manager.get_unique_autocast_key(recipe, group)
    assert Manager.split_key_in_buffer(key) == (True, unique)
    back = Manager.get_key_in_buffer(False, recipe, group)
    assert Manager.split_key_in_buffer(back) == (False, unique)
    assert Manager.get_unique_autocast_key(DelayedScaling(amax_history_len=3), group) == unique
    others = [
        Manager.get_unique_autocast_key(),
        Manager.get_unique_autocast_key(recipe),
        Manager.get_unique_autocast_key(DelayedScaling(amax_history_len=4), group),
        Manager.get_unique_autocast_key(recipe, object),
    ]
    assert len({unique, *others}) == 5 and others[0] == Manager.get_unique_autocast_key(None, None)
    assert others[0] == Manager.get_unique_autocast_key(DelayedScaling())
    for wrong in ("", "forward", "sideways_a:0", "forward_x", 3):
        with pytest.raises(ValueError, match="split_key_in_buffer: key="):
            Manager.split_key_in_buffer(wrong)


def test_keys_name_the_slots_of_a_module(device):
    recipe, layers = DelayedScaling(amax_history_len=3), []
    for _ in range(2):
        layers.append(te.Linear(WIDTH, WIDTH, device=device))
        assert Manager.get_buffer_info() not in layers[-1].fp8_meta
        with te.autocast(recipe=recipe):
            layers[-1](torch.randn(16, WIDTH, device=device)).sum().backward()
    for layer in layers:
        meta = layer.fp8_meta
        for forward, way in ((True, "forward"), (False, "backward")):
            key, slot = meta[Manager.get_buffer_info()][way]
            assert key == Manager.get_key_in_buffer(forward, recipe, None)
            view = meta[Manager.get_meta_tensor_key(forward)]
            scale, _, first = layer._slots.chunk(way)
            assert slot == first
            assert view.scale.data_ptr() == scale[slot:].data_ptr()
    slots = [layer.fp8_meta[Manager.get_buffer_info()]["forward"][1] for layer in layers]
    assert slots[0] != slots[1]


def test_one_process_reduces_to_itself(device):
    x = torch.randn(8, device=device)
    expected = x.clone()
    assert Manager.reduce_tensor_across_group_op_max(x, None) is None
    assert_same_bits(x, expected)


def test_ranks_have_the_maximum(ranks):
    tensors = [torch.randn(7, 3) for _ in range(ranks.size)]
    for found in ranks.run(programs.largest, tensors):
        assert_same_bits(found, torch.stack(tensors).amax(0))


def test_recompute_by_hand(device):
    """The oldest copy is in force for a repetition; then the newest state is again."""
    recipe = DelayedScaling(amax_history_len=3)
    layer = te.Linear(WIDTH, WIDTH, device=device)
    meta, inputs, outs = layer.fp8_meta, [], []
    for i in range(3):
        inputs.append(torch.randn(16, WIDTH, device=device) * 4**i)
        with te.autocast(recipe=recipe):
            if i:
                Manager.copy_forward_fp8_meta_tensors_for_recompute(meta)
            outs.append(layer(inputs[-1]).detach())
    newest = states_of(layer)
    for i in (1, 2):
        Manager.get_old_fp8_meta_tensors_for_recompute(meta)
        with torch.no_grad(), te.autocast(recipe=recipe):
            again = layer(inputs[i])
        with pytest.raises(RuntimeError, match="call restore_fp8_meta_tensors first"):
            Manager.get_old_fp8_meta_tensors_for_recompute(meta)
        Manager.restore_fp8_meta_tensors(meta)
        assert_same_bits(again, outs[i])
        assert_same_bits(states_of(layer), newest)
    with pytest.raises(RuntimeError, match="call copy_forward_fp8_meta_tensors_for_recompute in"):
        Manager.get_old_fp8_meta_tensors_for_recompute(meta)
    with pytest.raises(RuntimeError, match="restore_fp8_meta_tensors: no copy is in force"):
        Manager.restore_fp8_meta_tensors(meta)


def test_a_copy_of_another_history(device):
    """It is dropped, and the state stays as it is."""
    layer = te.Linear(WIDTH, WIDTH, device=device)
    meta, x = layer.fp8_meta, torch.randn(16, WIDTH, device=device)
    for length in (3, 5):
        with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
            layer(x * length)
        if length == 3:
            Manager.copy_forward_fp8_meta_tensors_for_recompute(meta)
    state = states_of(layer)
    with pytest.raises(RuntimeError, match="a history of 3 steps, the module one of 5"):
        Manager.get_old_fp8_meta_tensors_for_recompute(meta)
    assert_same_bits(states_of(layer), state)
    with pytest.raises(RuntimeError, match="no copy is left"):
        Manager.get_old_fp8_meta_tensors_for_recompute(meta)


NAMES = [
    "copy_forward_fp8_meta_tensors_for_recompute",
    "get_old_fp8_meta_tensors_for_recompute",
    "restore_fp8_meta_tensors",
]


@pytest.mark.parametrize("name", NAMES)
def test_recompute_by_hand_of_what_has_no_scaling_state(device, name):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    with te.autocast(recipe=Float8CurrentScaling()):
        layer(torch.randn(16, WIDTH, device=device))
    assert getattr(Manager, name)(layer.fp8_meta) is None
    for wrong in ({}, layer, None):
        with pytest.raises(TypeError, match=f"{name}: fp8_meta: .* expected the fp8_meta of a mod"):
            getattr(Manager, name)(wrong)
