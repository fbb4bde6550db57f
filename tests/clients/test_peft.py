# SPDX-License-Identifier: Apache-2.0
"""peft: LoRA on every module with linear weights, whichever package is imported first."""

import subprocess
import sys

import pytest
import torch
from clients.released import client
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits, counted, same_draws
from tols import tol
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

peft = client("peft")
client("safetensors")

import safetensors.torch  # noqa: E402

WIDTH = 32
OPTIONS = {"hidden_dropout": 0.1, "attention_dropout": 0.0}
# name: (makes the module, names that LoRA takes, linear layers in it)
KINDS = {
    "Linear": (lambda: te.Linear(WIDTH, WIDTH), ["layer"], 1),
    "LayerNormLinear": (lambda: te.LayerNormLinear(WIDTH, WIDTH), ["layer"], 1),
    "LayerNormLinear-split": (
        lambda: te.LayerNormLinear(WIDTH, 2 * WIDTH, parameters_split=("a", "b")),
        ["layer"],
        1,
    ),
    "LayerNormMLP": (lambda: te.LayerNormMLP(WIDTH, 64), ["layer"], 2),
    "MultiheadAttention": (
        lambda: te.MultiheadAttention(WIDTH, 4, input_layernorm=True, attention_dropout=0.0),
        ["layernorm_qkv", "proj"],
        2,
    ),
    "TransformerLayer": (
        lambda: te.TransformerLayer(WIDTH, 64, 4, **OPTIONS),
        ["layernorm_qkv", "proj", "layernorm_mlp"],
        4,
    ),
    "TransformerLayer-parallel": (
        lambda: te.TransformerLayer(WIDTH, 64, 4, parallel_attention_mlp=True, **OPTIONS),
        ["layernorm_qkv", "proj", "layernorm_mlp"],
        4,
    ),
    "TransformerLayer-output-norm": (
        lambda: te.TransformerLayer(WIDTH, 64, 4, output_layernorm=True, **OPTIONS),
        ["qkv", "proj", "layernorm_mlp"],
        4,
    ),
}


class Model(nn.Module):
    """One layer on sequences."""

    def __init__(self, kind, device):
        super().__init__()
        self.layer = KINDS[kind][0]().to(device)

    def forward(self, x):
        return self.layer(x)


def adapted(kind, device):
    """A model with LoRA whose adapters do something."""
    config = peft.LoraConfig(r=4, target_modules=KINDS[kind][1], init_lora_weights=False)
    return peft.get_peft_model(Model(kind, device), config).to(device)


def batch(device):
    return torch.randn(16, 2, WIDTH, device=device)


kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("first", ["peft", "transformer_engine", "transformer_engine.pytorch"])
def test_either_package_may_be_imported_first(first, tmp_path):
    script = f"""
import {first}
import peft, torch
import transformer_engine
import transformer_engine.pytorch as te
from peft.tuners.lora.te import TeLinear
assert transformer_engine.pytorch is te
model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"))
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
assert isinstance(model.base_model.model[0], TeLinear)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


@kinds
def test_only_the_adapters_learn(device, kind):
    model = adapted(kind, device)
    assert sum("TeLinear" in type(m).__name__ for m in model.modules()) == len(KINDS[kind][1])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, target = batch(device), 0.1 * batch(device)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    with counted() as gemms:
        for _ in range(10):
            with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                out = model(x)
            loss = (out[..., :WIDTH] - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert gemms.fp8 >= 10 * KINDS[kind][2] and gemms.other == 0
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1] == ["layer"]])
def test_the_adapter_adds_its_product(device, kind):
    """What a module wrapped by LoRA gives is what it gave, and B A x."""
    model = adapted(kind, device).eval()
    wrapped = model.base_model.model.layer
    x = batch(device)
    a, b = (part.default.weight.double() for part in (wrapped.lora_A, wrapped.lora_B))
    with torch.no_grad():
        base = wrapped.base_layer(x)
        exact = base.double() + x.double() @ a.T @ b.T * wrapped.scaling["default"]
        assert_nmse(model(x), exact, 4 * tol("sum", torch.float32, WIDTH))


@kinds
def test_an_adapter_is_saved_and_loaded_alone(device, kind, tmp_path):
    model = adapted(kind, device).eval()
    x = batch(device)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)), torch.no_grad():
        model(x)  # so that there is scaling state, which is not the adapter's
    model.save_pretrained(tmp_path)
    keys = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors").keys()
    assert keys and all("lora_" in key for key in keys)
    base = Model(kind, device)
    with torch.no_grad():
        expected = model(x)
        other = model.unload()
        base.load_state_dict(other.state_dict(), strict=True)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path).to(device).eval()
        assert_same_bits(loaded(x), expected)


@kinds
def test_an_adapter_can_be_switched_off_and_taken_away(device, kind):
    with same_draws(device):
        plain = Model(kind, device).eval()
    model = adapted(kind, device).eval()
    x = batch(device)
    with torch.no_grad():
        expected = plain(x)
        assert not torch.equal(model(x), expected)
        with model.disable_adapter():
            switched_off = model(x)
        bound = 8 * tol("sum", torch.float32, WIDTH)  # a bias may be added in another place
        assert_nmse(switched_off, expected.double(), bound)
        assert_same_bits(model.unload()(x), switched_off)


def test_peft_does_not_merge_into_them_but_into_those_of_torch(device, tmp_path):
    model = adapted("Linear", device).eval()
    with pytest.raises(NotImplementedError, match="TeLinear does not support merge"):
        model.merge_adapter()
    model.save_pretrained(tmp_path)
    x = batch(device)
    with torch.no_grad():
        expected = model(x)
        plain = te.convert(model.unload(), to="torch")
        merged = peft.PeftModel.from_pretrained(plain, tmp_path).to(device).merge_and_unload()
        assert type(merged.layer) is nn.Linear
        bound = 4 * tol("sum", torch.float32, WIDTH)
        assert_nmse(merged(x), expected.double(), bound)
        assert_nmse(te.convert(merged)(x), expected.double(), bound)
