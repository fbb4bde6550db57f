# SPDX-License-Identifier: Apache-2.0
"""Savers of torch x loaders x layers: parameters and scales come back bit for bit, written once."""

import copy
import io
import re
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pytorch.helpers import RECIPES, assert_same_bits, states_of
from saved_layers import LAYERS, STATELESS, USES, Model, assert_came_back, content, made, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import transformer_engine.pytorch as te

ALONE = "ignore:torch.distributed is disabled:UserWarning"
matrix = pytest.mark.parametrize("use", USES, ids=["unused", "FP8"])
layers = pytest.mark.parametrize("kind", LAYERS)


def new_process():
    """What a new process knows: nothing of the FP8 calls made here."""
    te.reset()


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file


def storages(file):
    """Sizes of all storages in a file of torch.save, sorted."""
    with zipfile.ZipFile(file) as archive:
        return sorted(i.file_size for i in archive.infolist() if re.search(r"/data/\d", i.filename))


# ---- torch.save ----------------------------------------------------------------------------------


@matrix
@layers
def test_module(device, kind, use):
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    file = saved(model)
    tensors = [p.nbytes for p in model.parameters()]
    tensors += [
        t.nbytes for state in states_of(model) if state for pair in state.values() for t in pair
    ]
    assert storages(file) == sorted(tensors)
    new_process()
    file.seek(0)
    assert_came_back(torch.load(file, weights_only=False), expected, use)


@matrix
@layers
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict(device, kind, use, assign):
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    file = saved(model.state_dict())
    assert storages(file) == sorted(content(model).values())
    new_process()
    fresh = Model(kind, device)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True, assign=assign)
    assert_came_back(fresh, expected, use)


@matrix
@layers
def test_single_parameters(device, kind, use):
    """Each in a file of its own; the scales are no parameters and stay behind."""
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    fresh = Model(kind, device)
    for (name, parameter), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        file = saved(parameter)
        assert storages(file) == [parameter.nbytes], name
        file.seek(0)
        with torch.no_grad():
            other.copy_(torch.load(file, weights_only=True))
    plain = te.without_scaling_state(expected.state_dict())
    assert_same_bits(dict(te.without_scaling_state(fresh.state_dict())), dict(plain))


# ---- torch.distributed.checkpoint ----------------------------------------------------------------


def sizes_in(folder):
    """Bytes of each tensor in a distributed checkpoint, by key."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        key: entry.size.numel() * entry.properties.dtype.itemsize
        for key, entry in metadata.state_dict_metadata.items()
    }


@pytest.mark.filterwarnings(ALONE)
@matrix
@layers
@pytest.mark.parametrize("through", ["module", "functions"])
def test_distributed_checkpoint(device, tmp_path, kind, use, through):
    """Into a fresh module of a new process, inside the region that will train it."""
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    assert sizes_in(tmp_path) == content(model)
    new_process()
    fresh = Model(kind, device)
    with te.autocast(enabled=use is not None, recipe=use and RECIPES[use]()):
        state = fresh.state_dict() if through == "module" else get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=tmp_path)
        if through == "module":
            fresh.load_state_dict(state)
        else:
            set_model_state_dict(fresh, state)
    assert_came_back(fresh, expected, use)


@matrix
@layers
@pytest.mark.parametrize("full", [False, True], ids=["local", "full"])
def test_functions_of_distributed_checkpoint(device, kind, use, full):
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    state = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    new_process()
    fresh = Model(kind, device)
    set_model_state_dict(fresh, state, options=StateDictOptions(full_state_dict=full))
    assert_came_back(fresh, expected, use)


# ---- resuming from a distributed checkpoint ------------------------------------------------------


@pytest.fixture
def checkpoint(device, tmp_path):
    """(expected model, folder) of FP8 training; the process knows nothing of it any more."""
    model = made("TransformerLayer", "delayed", device)
    expected = copy.deepcopy(model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    del model
    new_process()
    return expected, tmp_path


def resumed(device, folder, **options):
    fresh = Model("TransformerLayer", device)
    state = fresh.state_dict()
    dcp.load(state, checkpoint_id=folder, **options)
    fresh.load_state_dict(state)
    return fresh


@pytest.mark.filterwarnings(ALONE)
def test_a_program_that_has_trained_offers_the_state_of_fresh_modules(device, checkpoint):
    """As one that goes back to an earlier checkpoint does; no region is active then."""
    expected, folder = checkpoint
    train(made("Linear", None, device), "delayed", 1)
    assert_same_bits(states_of(resumed(device, folder)), states_of(expected))


@pytest.mark.filterwarnings(ALONE)
def test_scales_that_stay_behind_are_told_of_once(device, checkpoint):
    """The first FP8 call says so, in a message that names the fix."""
    _, folder = checkpoint
    fresh = resumed(device, folder)
    fresh(torch.randn(16, 2, 32, device=device))  # high precision has no scales to miss
    with pytest.warns(UserWarning, match=r"scale 1\..*inside `with autocast\(recipe=") as told:
        train(fresh, "delayed")
    assert len(told) == 1
    train(resumed(device, folder), "delayed")


@pytest.mark.filterwarnings(ALONE)
def test_a_checkpoint_of_other_than_fp8_training(device, tmp_path, monkeypatch):
    """TE_EXTRA_STATE=ignore: nothing is offered, so nothing is missing, and nobody is told."""
    model = made("TransformerLayer", None, device)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    with te.autocast(recipe=RECIPES["delayed"]()):
        with pytest.raises(dcp.CheckpointException, match=r"Missing key.*_extra_state"):
            resumed(device, tmp_path)
        partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
        told = resumed(device, tmp_path, planner=partial)
    with pytest.warns(UserWarning, match="scale 1"):
        train(told, "delayed")
    monkeypatch.setenv("TE_EXTRA_STATE", "ignore")
    new_process()
    with te.autocast(recipe=RECIPES["delayed"]()):
        fresh = resumed(device, tmp_path)
    assert_same_bits(dict(fresh.named_parameters()), dict(model.named_parameters()))
    monkeypatch.delenv("TE_EXTRA_STATE")
    train(fresh, "delayed")


@pytest.mark.filterwarnings(ALONE)
def test_a_recipe_of_another_history_length_is_an_error(device, checkpoint):
    """Tensors of a distributed checkpoint have fixed sizes: resume in the recipe that saved."""
    expected, folder = checkpoint
    with te.autocast(recipe=RECIPES["delayed-e4m3"]()):
        with pytest.raises(dcp.CheckpointException, match=r"Size mismatch.*_extra_state"):
            resumed(device, folder)
    with te.autocast(recipe=RECIPES["delayed"]()):
        fresh = resumed(device, folder)
    assert_same_bits(states_of(fresh), states_of(expected))
    train(fresh, "delayed-e4m3")


# ---- what is offered -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in LAYERS if k not in STATELESS])
def test_fresh_and_used_state_have_one_size(device, kind):
    """And one that was loaded and not used yet: all that a recipe and a layer decide."""
    fresh, used = Model(kind, device), made(kind, "delayed", device)
    trained = content(used)
    new_process()
    assert not [key for key in content(fresh) if key.endswith("_extra_state")]
    with te.autocast(recipe=RECIPES["delayed"]()):
        assert content(fresh) == trained
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]()):
        assert content(fresh) == trained
    with te.autocast(recipe=RECIPES["current"]()):
        assert content(fresh) != trained


def test_offered_state_that_was_not_filled_is_no_state(device):
    fresh = Model("TransformerLayer", device)
    with te.autocast(recipe=RECIPES["delayed"]()):
        state = fresh.state_dict()
    fresh.load_state_dict(state, strict=True)
    assert set(states_of(fresh)) == {None}


# ---- to torch.nn and back ------------------------------------------------------------------------

PAIRS = {
    "Linear": lambda: torch.nn.Linear(32, 48),
    "LayerNorm": lambda: torch.nn.LayerNorm(32),
    "RMSNorm": lambda: torch.nn.RMSNorm(32),
}


@matrix
@pytest.mark.parametrize("kind", PAIRS)
def test_torch_modules_load_it_strictly_both_ways(device, kind, use):
    model = made(kind, use, device)
    theirs = torch.nn.Module()
    theirs.body = torch.nn.ModuleList([PAIRS[kind]()])
    state = model.state_dict()
    plain = te.without_scaling_state(state)
    assert type(plain) is type(state) and plain._metadata is state._metadata
    assert list(plain) == list(theirs.state_dict())
    theirs.load_state_dict(plain, strict=True)
    back = Model(kind, device)
    assert not any(back.load_state_dict(theirs.state_dict(), strict=True))
    assert_same_bits(dict(back.named_parameters()), dict(model.named_parameters()))
    assert ("body.0._extra_state" in state) is (use is not None and kind not in STATELESS)
    if "body.0._extra_state" in state:  # the given one is left as it was
        with pytest.raises(RuntimeError, match=r"Unexpected key.*_extra_state"):
            theirs.load_state_dict(state, strict=True)


def test_without_scaling_state_takes_no_more_than_that():
    foreign = torch.tensor(list(b"\x80\x04."), dtype=torch.uint8)
    state = {
        "_extra_state": made("Linear", "delayed").state_dict()["body.0._extra_state"],
        "a.b._extra_state": torch.empty(0, dtype=torch.uint8),
        "c._extra_state": foreign,
        "d._extra_state": None,
        "e._extra_state": {"epoch": 3},
        "f._extra_state": torch.ones(3),
        "g._extra_state": torch.tensor([1, 2], dtype=torch.uint8),
        "no_extra_state": foreign,
        "weight": torch.ones(2),
        7: 7,
    }
    plain = te.without_scaling_state({"model": state, **state})
    assert list(plain) == [
        "model", "e._extra_state", "f._extra_state", "g._extra_state", "no_extra_state", "weight", 7
    ]  # fmt: skip
    for wrong in (torch.nn.Linear(2, 2), None, [("weight", 1)]):
        with pytest.raises(TypeError, match=f"state_dict: {type(wrong).__name__} object"):
            te.without_scaling_state(wrong)
