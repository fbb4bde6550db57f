# SPDX-License-Identifier: Apache-2.0
"""Savers of client packages x loaders x layers: all comes back bit for bit, and is written once.

Those of torch itself are in tests/pytorch/test_savers.py.
"""

import copy
import json
import struct

import pytest
from clients.released import client
from pytorch.helpers import RECIPES
from saved_layers import LAYERS, USES, Model, assert_came_back, content, made

import transformer_engine.pytorch as te

accelerate, transformers = client("accelerate"), client("transformers")
client("safetensors")

import safetensors.torch  # noqa: E402

matrix = pytest.mark.parametrize("use", USES, ids=["unused", "FP8"])
layers = pytest.mark.parametrize("kind", LAYERS)


def written(*files):
    """Bytes of each tensor in safetensors files, by key; no key twice."""
    sizes = {}
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for key, entry in header.items():
            if key != "__metadata__":
                assert key not in sizes
                sizes[key] = entry["data_offsets"][1] - entry["data_offsets"][0]
    return sizes


# ---- safetensors ---------------------------------------------------------------------------------


@matrix
@layers
@pytest.mark.parametrize("save", ["save_model", "save_file"])
@pytest.mark.parametrize("load", ["load_model", "load_file"])
def test_safetensors(device, tmp_path, kind, use, save, load):
    model = made(kind, use, device)
    expected, file = copy.deepcopy(model), tmp_path / "model.safetensors"
    if save == "save_model":
        safetensors.torch.save_model(model, file)
    else:
        safetensors.torch.save_file(model.state_dict(), file)
    assert written(file) == content(model)
    te.reset()
    fresh = Model(kind, device)
    if load == "load_model":
        safetensors.torch.load_model(fresh, file)
    else:
        fresh.load_state_dict(safetensors.torch.load_file(file), strict=True)
    assert_came_back(fresh, expected, use)


# ---- accelerate ----------------------------------------------------------------------------------


@pytest.fixture
def accelerator(device):
    """Begin without the state that accelerate shares between its objects."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=device == "cpu")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@matrix
@layers
@pytest.mark.parametrize(("strict", "full"), [(False, False), (True, True)], ids=str)
def test_accelerate_save_model(accelerator, device, tmp_path, kind, use, strict, full):
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    accelerator.save_model(model, tmp_path)
    assert written(*tmp_path.glob("*.safetensors")) == content(model)
    te.reset()
    fresh = Model(kind, device)
    accelerate.load_checkpoint_in_model(fresh, tmp_path, strict=strict, full_state_dict=full)
    assert_came_back(fresh, expected, use)


@matrix
@pytest.mark.parametrize("kind", ["LayerNormLinear-split", "TransformerLayer"])
def test_accelerate_save_model_in_several_files(accelerator, device, tmp_path, kind, use):
    """A file that has no scales of a module leaves those alone that another file had."""
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    accelerator.save_model(model, tmp_path, max_shard_size=4200)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and written(*files) == content(model)
    te.reset()
    fresh = Model(kind, device)
    accelerate.load_checkpoint_in_model(fresh, tmp_path)
    assert_came_back(fresh, expected, use)


@matrix
@layers
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_accelerate_save_state(accelerator, device, tmp_path, kind, use, safe):
    model = made(kind, use, device)
    expected = copy.deepcopy(model)
    prepared = accelerator.prepare(model)
    accelerator.save_state(tmp_path, safe_serialization=safe)
    if safe:
        assert written(*tmp_path.glob("*.safetensors")) == content(model)
    accelerator.free_memory()
    del prepared
    te.reset()
    fresh = accelerator.prepare(Model(kind, device))
    accelerator.load_state(tmp_path)
    assert_came_back(accelerator.unwrap_model(fresh), expected, use)


# ---- transformers --------------------------------------------------------------------------------


class Config(transformers.PretrainedConfig):
    """Which layer the model has."""

    model_type = "saved-layer"

    def __init__(self, kind="Linear", **options):
        self.kind = kind
        super().__init__(**options)


class Pretrained(transformers.PreTrainedModel):
    """`Model` as a model of transformers."""

    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Model(config.kind)
        self.post_init()

    def _init_weights(self, module):
        """Leave it: every weight is loaded."""

    def forward(self, x):
        """Run the layer."""
        return self.model(x)


@matrix
@layers
@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "several"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_save_pretrained(device, tmp_path, kind, use, shards, inside):
    model = Pretrained(Config(kind)).to(device)
    model.model = made(kind, use, device)
    expected = copy.deepcopy(model.model)
    model.save_pretrained(tmp_path, **({"max_shard_size": 4000} if shards else {}))
    assert written(*tmp_path.glob("*.safetensors")) == content(model)
    te.reset()
    with te.autocast(enabled=inside, recipe=RECIPES[use or "delayed"]()):
        fresh, report = Pretrained.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_came_back(fresh.to(device).model, expected, use)
