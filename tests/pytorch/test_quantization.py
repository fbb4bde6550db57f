# SPDX-License-Identifier: Apache-2.0
"""What is in force and what modules know, under the names that programs ask by."""

import copy
import io
import threading

import pytest
import torch
from device_kinds import every_device, our_kernels
from pytorch.helpers import RECIPES, assert_same_bits, state_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

pytestmark = every_device

WIDTH, ROWS = 32, 16


def step(layer, device, recipe, scale=1.0, **region):
    x = torch.randn(ROWS, WIDTH, device=device) * scale
    with te.autocast(recipe=recipe, **region):
        out = layer(x)
    out.sum().backward()


# ---- FP8GlobalStateManager -----------------------------------------------------------------------


def test_manager_outside_every_region():
    assert not Manager.is_fp8_enabled() and not Manager.is_fp8_calibration()
    assert Manager.get_fp8_recipe() == te.get_default_recipe()
    assert Manager.get_fp8_group() is None
    assert not Manager.with_fp8_parameters() and not Manager.with_high_precision_init_val()
    assert not Manager.fp8_graph_capturing()
    assert Manager.get_skip_fp8_weight_update_tensor() is None


def test_manager_inside_regions():
    recipe, inner, group = DelayedScaling(margin=1), Float8CurrentScaling(), object()
    state = Manager.quantization_state
    with te.autocast(recipe=recipe, amax_reduction_group=group):
        assert Manager.is_fp8_enabled() and state.fp8_enabled
        assert Manager.get_fp8_recipe() is recipe and state.fp8_recipe is recipe
        assert Manager.get_fp8_group() is group and state.fp8_distributed_group is group
        with te.autocast(recipe=inner):
            assert Manager.get_fp8_recipe() is inner and state.autocast_depth == 2
        with te.autocast(enabled=False, calibrating=True):
            assert not Manager.is_fp8_enabled() and Manager.is_fp8_calibration()
            assert state.fp8_calibration
        assert Manager.get_fp8_recipe() is recipe
    assert not Manager.is_fp8_enabled() and state.autocast_depth == 0


def test_manager_sees_the_thread_that_asks():
    seen = []
    with te.autocast():
        thread = threading.Thread(target=lambda: seen.append(Manager.is_fp8_enabled()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_is_first_fp8_module_takes_the_flag(device):
    """Who took it updates the backward scales by itself."""
    layer = te.Linear(WIDTH, WIDTH, device=device)
    with te.autocast():
        assert Manager.quantization_state.is_first_fp8_module
        assert Manager.is_first_fp8_module()
        assert not Manager.is_first_fp8_module()
        out = layer(torch.randn(ROWS, WIDTH, device=device))
    out.sum().backward()
    scale, history = state_of(layer)["backward"]
    assert scale[0] == 1 and history[0, 0] == 1
    Manager.reduce_and_update_fp8_tensors(forward=False)
    scale, history = state_of(layer)["backward"]
    assert scale[0] == Format.HYBRID.fp8_max("bwd") and history[0, 0] == 0 and history[-1, 0] == 1


def test_update_of_the_forward_on_demand(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    with te.autocast():
        layer(torch.full((ROWS, WIDTH), 2.0, device=device))
        assert state_of(layer)["forward"][0][0] == 1
        Manager.reduce_and_update_fp8_tensors()
        assert state_of(layer)["forward"][0][0] == 224


@pytest.mark.parametrize("get", ["get_autocast_state", "get_fp8_autocast_state"])
def test_autocast_state_goes_from_one_place_to_another(get, device):
    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        state = getattr(Manager, get)()
    assert not Manager.is_fp8_enabled()
    before = getattr(Manager, get)()
    getattr(Manager, get.replace("get", "set"))(state)
    try:
        assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is recipe
    finally:
        getattr(Manager, get.replace("get", "set"))(before)
    assert not Manager.is_fp8_enabled()


def test_reset_drops_the_scaling_state(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    step(layer, device, RECIPES["delayed"]())
    assert state_of(layer) is not None
    Manager.reset()
    assert state_of(layer) is None


def test_calls_that_need_do_nothing(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    step(layer, device, RECIPES["delayed"]())
    before = state_of(layer)
    Manager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
    Manager.set_skip_fp8_weight_update_tensor(False)
    assert_same_bits(state_of(layer), before)


# ---- questions -----------------------------------------------------------------------------------


def test_support_is_a_pair(device):
    answers = [quantization.check_fp8_support(), Manager.is_fp8_available()]
    assert answers[0] == answers[1] == te.is_fp8_available(return_reason=True)
    assert te.is_fp8_available() is answers[0][0]


def test_recipes_that_exist_are_supported(device):
    for make in RECIPES.values():
        quantization.check_recipe_support(make())
    with pytest.raises(TypeError, match="expected a recipe"):
        quantization.check_recipe_support("delayed")


def test_recipes_on_a_device_without_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(RuntimeError, match=r"Float8CurrentScaling: .*8\.9.*\(8, 0\)"):
        quantization.check_recipe_support(Float8CurrentScaling())


@pytest.mark.parametrize("make", [Float8BlockScaling, Float8RowScaling])
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)], ids=str)
def test_scales_of_tiles_and_rows_are_those_of_hopper(monkeypatch, make, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert te.is_fp8_available() and not te.is_fp8_block_scaling_available()
    with pytest.raises(RuntimeError, match=rf"{make.__name__}: .*9\.0.*\({capability[0]}, "):
        quantization.check_recipe_support(make())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert te.is_fp8_block_scaling_available(return_reason=True) == (True, "")
    quantization.check_recipe_support(make())


def test_formats_of_a_recipe():
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3)
    assert quantization.get_fp8_torch_dtype(hybrid) is torch.float8_e4m3fn
    assert quantization.get_fp8_torch_dtype(hybrid, False) is torch.float8_e5m2
    assert quantization.get_fp8_te_dtype(hybrid, fprop_tensor=False) == te.DType.kFloat8E5M2
    assert quantization.get_fp8_max(hybrid, False) == 57344
    assert quantization.get_fp8_torch_dtype(e4m3, False) is torch.float8_e4m3fn
    assert quantization.get_align_size_for_quantization(hybrid) == 16
    assert quantization.get_align_size_for_quantization(MXFP8BlockScaling()) == 32
    assert quantization.get_align_size_for_quantization(NVFP4BlockScaling()) == 128
    custom = CustomRecipe(lambda role: None, quantization_alignment=64)
    assert quantization.get_align_size_for_quantization(custom) == 64
    assert quantization.get_fp8_torch_dtype(custom, False) is torch.float8_e5m2


# ---- fp8_meta ------------------------------------------------------------------------------------


def test_meta_of_a_module_that_never_ran_in_fp8(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    layer(torch.ones(ROWS, WIDTH, device=device))
    assert dict(layer.fp8_meta) == {"fp8_checkpoint": False, "fp8_group": None, "num_gemms": 1}
    assert not layer.fp8 and not layer.fp8_initialized and not layer.primary_weights_in_fp8
    with pytest.raises(KeyError):
        layer.fp8_meta["scaling_fwd"]


@pytest.mark.parametrize(
    ("make", "gemms"),
    [
        (lambda **o: te.Linear(WIDTH, WIDTH, **o), 1),
        (lambda **o: te.LayerNormLinear(WIDTH, WIDTH, **o), 1),
        (lambda **o: te.LayerNormMLP(WIDTH, 2 * WIDTH, **o), 2),
    ],
    ids=["linear", "norm-linear", "mlp"],
)
def test_meta_reads_the_state(device, make, gemms):
    layer, recipe = make(device=device), DelayedScaling(amax_history_len=4)
    meta = layer.fp8_meta
    forward = None
    for number in range(1, 4):
        step(layer, device, recipe, scale=number)
        assert meta["recipe"] is recipe and meta["num_gemms"] == gemms and meta["fp8_checkpoint"]
        assert (meta["fp8_max_fwd"], meta["fp8_max_bwd"]) == (448, 57344)
        assert layer.fp8_initialized and not layer.fp8
        for key, direction, slots in (
            ("scaling_fwd", "forward", 3 * gemms),
            ("scaling_bwd", "backward", 2 * gemms),
        ):
            view, (scale, history) = meta[key], state_of(layer)[direction]
            assert scale.shape == (slots,) and history.shape == (4, slots)
            assert_same_bits([view.scale, view.amax_history], [scale, history])
            assert_same_bits(view.scale_inv, 1 / scale)
        if forward is not None:  # one view shows what is, not what was
            assert_same_bits(forward.scale, state_of(layer)["forward"][0])
        forward = meta["scaling_fwd"]
    assert meta["scaling_fwd"].scale[0] != 1 and meta["scaling_bwd"].scale[0] != 1
    assert "ScalingView" in repr(meta)


def test_meta_of_a_recipe_without_state(device):
    layer, recipe = te.Linear(WIDTH, WIDTH, device=device), Float8CurrentScaling()
    step(layer, device, recipe)
    assert layer.fp8_meta["recipe"] is recipe and "scaling_fwd" not in layer.fp8_meta
    other = DelayedScaling()
    with te.autocast(recipe=other):
        assert layer.fp8 and layer.fp8_meta["recipe"] is other
    with te.autocast(enabled=False, calibrating=True):
        assert layer.fp8_calibration and not layer.fp8


def test_meta_of_what_was_loaded_or_copied(device):
    layer, recipe = te.Linear(WIDTH, WIDTH, device=device), DelayedScaling(amax_history_len=4)
    step(layer, device, recipe)
    expected = layer.fp8_meta["scaling_fwd"]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = te.Linear(WIDTH, WIDTH, device=device)
    loaded.load_state_dict(torch.load(file))
    for other in (loaded, copy.deepcopy(layer)):
        assert other.fp8_initialized
        found = other.fp8_meta["scaling_fwd"]
        assert_same_bits([found.scale, found.amax_history], [expected.scale, expected.amax_history])


def test_meta_is_a_view(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    step(layer, device, DelayedScaling())
    meta = layer.fp8_meta
    meta["recipe"] = DelayedScaling()  # what is there already: programs that replay graphs do it
    meta["fp8_group"] = Manager.get_fp8_group()
    for key, value in (("recipe", Float8CurrentScaling()), ("scaling_fwd", 1), ("new", 1)):
        with pytest.raises(TypeError, match=rf"Linear\.fp8_meta\['{key}'\].*view"):
            meta[key] = value
    view = meta["scaling_fwd"]
    with pytest.raises(AttributeError):
        view.scale = torch.ones(3)
    te.reset()
    assert "scaling_fwd" not in meta
    with pytest.raises(RuntimeError, match="reset"):
        view.scale  # noqa: B018


@our_kernels
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_meta_of_a_compiled_module(device, recipe):
    layer, made = te.Linear(WIDTH, WIDTH, device=device), RECIPES[recipe]()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with te.autocast(recipe=made):
        run(torch.randn(ROWS, WIDTH, device=device)).sum().backward()
    assert layer.fp8_meta["recipe"] is made
    assert ("scaling_fwd" in layer.fp8_meta) is (recipe == "delayed")


# ---- around a capture ----------------------------------------------------------------------------


def test_state_is_put_back_after_a_warm_up(device):
    layers = torch.nn.Sequential(
        te.Linear(WIDTH, WIDTH, device=device),
        torch.nn.ReLU(),
        te.Linear(WIDTH, WIDTH, device=device),
    )
    recipe = DelayedScaling(amax_history_len=4)
    step(layers, device, recipe)
    before = [state_of(layers[0]), state_of(layers[2])]
    memory = layers[0].fp8_meta["scaling_fwd"].scale.data_ptr()
    saved = te.graph.save_fp8_tensors([layers], recipe)
    for _ in range(2):
        step(layers, device, recipe, scale=9.0)
    te.graph.restore_fp8_tensors([layers], saved)
    assert_same_bits([state_of(layers[0]), state_of(layers[2])], before)
    assert layers[0].fp8_meta["scaling_fwd"].scale.data_ptr() == memory


def test_a_module_without_state_starts_again_after_a_warm_up(device):
    layer, recipe = te.Linear(WIDTH, WIDTH, device=device), DelayedScaling(amax_history_len=4)
    saved = te.graph.save_fp8_tensors([layer], recipe)
    step(layer, device, recipe)
    memory = layer.fp8_meta["scaling_fwd"].scale.data_ptr()
    te.graph.restore_fp8_tensors([layer], saved)
    for scale, history in state_of(layer).values():
        assert (scale == 1).all() and (history == 0).all()
    assert layer.fp8_meta["scaling_fwd"].scale.data_ptr() == memory
    with pytest.raises(RuntimeError, match="has the state of 1 modules, the modules given have 2"):
        te.graph.restore_fp8_tensors([layer, layer], saved)
    assert te.graph.save_fp8_tensors([layer], Float8CurrentScaling()) is None
    te.graph.restore_fp8_tensors([layer], None)


def test_marks_of_a_capture():
    te.graph.set_capture_start()
    try:
        assert Manager.fp8_graph_capturing() and Manager.quantization_state.fp8_graph_capturing
    finally:
        te.graph.set_capture_end()
    assert not Manager.fp8_graph_capturing()
