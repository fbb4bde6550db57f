# SPDX-License-Identifier: Apache-2.0
"""Lives of linear modules outside of a step: checkpoints, copies, dtypes, devices, threads."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from pytorch.helpers import arenas, assert_same_bits, counted, state_of
from pytorch.module_cases import (
    FEW,
    IN,
    ROWS,
    batch,
    count_of,
    make,
    region,
    step,
    trained,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.scaling_state import scaling
from transformer_engine.pytorch.scaling_state.arenas import Chunk


def slots_of(module):
    """Slots of the forward and of the backward."""
    parts = len(module.LINEARS)
    return 3 * parts, 2 * parts


@pytest.fixture(params=FEW)
def kind(request):
    return request.param


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True], ids=["", "file"])
def test_state_dict_round_trip(device, kind, file):
    """Weights and delayed-scaling state of every slot; the other module goes on alike."""
    module, other = trained(kind, device), make(kind, device)
    saved = module.state_dict()
    assert saved.keys() == {*dict(module.named_parameters()), "_extra_state"}
    if file:
        stream = io.BytesIO()
        torch.save(saved, stream)
        stream.seek(0)
        saved = torch.load(stream, weights_only=True)
    other.load_state_dict(saved, strict=True)
    before = state_of(module)
    assert {d: v[1].shape for d, v in before.items()} == {
        d: (4, n) for d, n in zip(("forward", "backward"), slots_of(module), strict=True)
    }
    assert_same_bits(state_of(other), before)
    x = batch(device)
    assert_same_bits(step(other, x, "delayed"), step(module, x, "delayed"))


def test_state_dict_without_fp8_state(device, kind):
    """Nothing but the parameters, for modules that ran in high precision or current scaling."""
    module, other = make(kind, device), make(kind, device)
    for recipe in (None, "current"):
        step(module, batch(device), recipe)
        assert module.state_dict().keys() == dict(module.named_parameters()).keys()
        other.load_state_dict(module.state_dict(), strict=True)
        assert_same_bits(dict(other.named_parameters()), dict(module.named_parameters()))


def test_state_is_no_parameter_and_no_buffer(device, kind):
    module = trained(kind, device)
    assert sorted(dict(module.named_parameters())) == sorted(
        dict(make(kind, device).named_parameters())
    )
    assert not list(module.buffers())


def test_state_of_another_module_is_refused(device, kind):
    """The number of slots tells; weights stay what they were."""
    module = make(kind, device)
    wrong = trained("gelu" if len(module.LINEARS) == 1 else "linear", device)
    given = module.state_dict() | {"_extra_state": wrong.get_extra_state()}
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    with pytest.raises(ValueError, match=f"expected {slots_of(module)[0]} slots"):
        module.load_state_dict({n: t + 1 for n, t in given.items() if n in kept} | given)
    assert_same_bits({n: p.detach() for n, p in module.named_parameters()}, kept)
    assert state_of(module) is None


def test_reset_of_the_state(device, kind):
    module = trained(kind, device)
    module.reset_fp8_meta_tensors()
    assert state_of(module) is None
    fresh = make(kind, device)
    fresh.load_state_dict(module.state_dict())
    x = batch(device)
    assert_same_bits(step(module, x, "delayed"), step(fresh, x, "delayed"))


def test_state_is_loaded_in_place(device, kind):
    """Graphs, compiled or captured, read the chunk that the module has had."""
    module = trained(kind, device, 1)
    kept, saved = state_of(module), copy.deepcopy(module.state_dict())
    step(module, 8 * batch(device), "delayed")
    slots = module._slots
    module.load_state_dict(saved)
    assert module._slots is slots
    for direction in ("forward", "backward"):
        assert_same_bits(slots.values()[direction], kept[direction])


# ---- copies --------------------------------------------------------------------------------------


def copied(module, how):
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_goes_on_alone_from_the_same_state(device, kind, how):
    """Also one of a copy that never ran."""
    module = trained(kind, device)
    twin = copied(copied(module, how), how)
    assert repr(twin) == repr(module)
    assert_same_bits(state_of(twin), state_of(module))
    x = batch(device)
    # An update reaches every module that has slots.
    expected = [step(module, x, "delayed"), state_of(module)]
    assert_same_bits([step(twin, x, "delayed"), state_of(twin)], expected)
    slots = {(m._slots.forward_scale.data_ptr(), m._slots.forward_slot) for m in (module, twin)}
    assert len(slots) == 2
    kept = state_of(module)
    with torch.no_grad(), region("delayed"):
        twin(batch(device) * 100)
    assert_same_bits(state_of(module), kept)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_no_cache_and_nothing_pending(device, kind, how):
    module = make(kind, device, delay_wgrad_compute=True)
    with region("current"):
        out = module(batch(device), is_first_microbatch=True)
    out.sum().backward()
    twin = copied(module, how)
    assert set(twin._weight_caches) == {None} and None not in module._weight_caches
    with pytest.raises(RuntimeError, match="pending"):
        twin.backward_dw()
    module.backward_dw()
    assert all(p.grad is not None for p in module.parameters())


def test_a_copied_model_keeps_its_options(device, kind):
    options = {
        "linear": {"parameters_split": {"a": 16, "b": 32}, "save_original_input": True},
        "norm-linear": {"parameters_split": {"a": 16, "b": 32}, "zero_centered_gamma": True},
    }.get(kind, {"checkpoint": True, "normalization": "RMSNorm", "return_bias": False})
    module = trained(kind, device, **options)
    twin = copy.deepcopy(torch.nn.Sequential(module))[0]
    assert repr(twin) == repr(module)
    assert_same_bits(dict(twin.named_parameters()), dict(module.named_parameters()))


# ---- dtype and device ----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["half", "bfloat16", "to", "double-and-back"])
def test_changing_the_dtype(device, kind, change):
    """The state stays; the next step has the bits of a module made in the new dtype."""
    module = trained(kind, device)
    before = state_of(module)
    if change == "to":
        module.to(torch.float16)
    elif change == "double-and-back":
        module.double().float()
    else:
        getattr(module, change)()
    assert_same_bits(state_of(module), before)
    dtype = next(module.parameters()).dtype
    with torch.no_grad(), counted() as gemms, region("delayed"):
        module(torch.zeros(ROWS, IN, device=device, dtype=dtype))
    assert count_of(gemms, "delayed") == len(module.LINEARS)
    after = state_of(module)
    assert_same_bits(after["forward"][0], before["forward"][0])
    assert {t.dtype for values in after.values() for t in values} == {torch.float32}
    made = make(kind, device, dtype)
    made.load_state_dict(module.state_dict())
    x = batch(device, dtype)
    found = [step(module, x, "delayed"), state_of(module)]
    assert_same_bits(found, [step(made, x, "delayed"), state_of(made)])


@pytest.mark.gpu
def test_changing_the_device(kind):
    module = trained(kind, "cuda")
    before = state_of(module)
    for device in ("cpu", "cuda"):
        module.to(device)
        with torch.no_grad(), counted() as gemms, region("delayed"):
            module(torch.zeros(ROWS, IN, device=device))
        assert count_of(gemms, "delayed") == len(module.LINEARS)
        after = state_of(module)
        assert after["forward"][0].device.type == device
        assert_same_bits(after["backward"], before["backward"])
        assert_same_bits(after["forward"][0], before["forward"][0])


# ---- threads and garbage -------------------------------------------------------------------------


def test_modules_that_die_during_an_update(device, monkeypatch):
    """A garbage collection in the middle of an update frees slots, chunks and arenas."""
    layers = [te.Linear(16, 16, device=device) for _ in range(4)]
    x = torch.randn(16, 16, device=device)
    with counted() as gemms:
        for length, layer in enumerate(layers, 2):
            step(layer, x, DelayedScaling(amax_history_len=length))
    assert gemms.fp8 == 12
    survivor, native = layers.pop(), scaling.plan_ops.scaling_update
    del layer

    def update(*arguments):
        layers.clear()
        gc.collect()
        native(*arguments)

    monkeypatch.setattr(scaling.plan_ops, "scaling_update", update)
    scaling.update("forward", survivor._slots.domain)
    scaling.sweep()
    assert not layers and len(arenas("forward")) == 1
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
        take = Chunk.take

        def collect(chunk, count):
            held.clear()
            gc.collect()
            return take(chunk, count)

        monkeypatch.setattr(Chunk, "take", collect)
        step(young, x, recipe)
    assert gemms.fp8 == 6
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
                    with te.autocast(recipe=recipe):
                        out = layer(torch.randn(16, 16, device=device))
                    out.sum().backward()
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
