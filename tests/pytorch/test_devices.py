# SPDX-License-Identifier: Apache-2.0
"""Where modules are made that are told no device: contexts, defaults, and frameworks' patches."""

import contextlib

import pytest
import torch
from device_kinds import every_device

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module import parameters

MAKERS = {
    "linear": lambda **o: te.Linear(16, 32, **o),
    "split": lambda **o: te.Linear(16, 32, bias=False, parameters_split=("a", "b"), **o),
    "layernorm-linear": lambda **o: te.LayerNormLinear(16, 32, **o),
    "mlp": lambda **o: te.LayerNormMLP(16, 32, bias=False, **o),
    "layernorm": lambda **o: te.LayerNorm(16, **o),
    "rmsnorm": lambda **o: te.RMSNorm(16, **o),
    "attention": lambda **o: te.MultiheadAttention(16, 2, qk_norm_type="RMSNorm", **o),
    "transformer": lambda **o: te.TransformerLayer(16, 32, 2, layer_type="decoder", **o),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(autouse=True)
def _no_default_device():
    yield
    torch.set_default_device(None)


def device_types(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


@contextlib.contextmanager
def by_default(device):
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


WAYS = {"context": torch.device, "default": by_default}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chosen", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_chosen_device(make, way, chosen):
    """Also "cpu" where a GPU is there, which modules take that nobody told anything."""
    with WAYS[way](chosen):
        assert device_types(make()) == {chosen}
        assert device_types(make(device="cpu")) == {"cpu"}  # an argument wins
    assert device_types(make()) == {"cuda" if torch.cuda.is_available() else "cpu"}


def test_inner_context_wins(make):
    with by_default("meta"), torch.device("cpu"):
        assert device_types(make()) == {"cpu"}


def test_chosen_cpu_is_told_from_no_choice(monkeypatch):
    """On a machine with a GPU; `torch.get_default_device` says "cpu" for both."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parameters.default_device() == torch.device("cuda")
    with torch.device("cpu"):
        assert parameters.default_device() == torch.device("cpu")
    with by_default("cpu"):
        assert parameters.default_device() == torch.device("cpu")

    class Other(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Other():
        assert parameters.default_device() == torch.device("cuda")


@pytest.mark.parametrize("way", WAYS)
def test_rotary_embedding(way):
    with WAYS[way]("meta"):
        assert te.RotaryPositionEmbedding(8).inv_freq.is_meta
    with WAYS[way]("cpu"):
        assert te.RotaryPositionEmbedding(8)(4).device.type == "cpu"


def reset(module):
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()


@every_device
def test_meta_module_gets_values_on_a_device(make, device):
    """By `to_empty`, by `reset_parameters` alone, and by loading."""
    source = make(device=device)
    with torch.device("meta"):
        emptied, materialised, loaded = make(), make(), make()
    emptied.to_empty(device=device)
    with torch.device(device):
        reset(materialised)
    loaded.load_state_dict(source.state_dict(), assign=True)
    for module in (emptied, loaded):
        reset(module)
    for module in (emptied, materialised, loaded):
        assert device_types(module) == {device}
        assert all(p.isfinite().all() for p in module.parameters())
        x = torch.randn(4, 2, 16, device=device)
        extra = {"encoder_output": x} if isinstance(module, te.TransformerLayer) else {}
        module(x, **extra).sum().backward()


@contextlib.contextmanager
def parameters_on_meta():
    """What accelerate's `init_empty_weights` does while a model is made."""
    register = torch.nn.Module.register_parameter

    def replace(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None:
            made = type(parameter)(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = made

    torch.nn.Module.register_parameter = replace
    yield
    torch.nn.Module.register_parameter = register


@every_device
def test_frameworks_that_patch_registration(make, device, monkeypatch):
    def no_values(*_, **__):
        raise AssertionError("a parameter on the meta device was given values")

    source = make(device=device)
    with monkeypatch.context() as patched, parameters_on_meta():
        patched.setattr(torch.nn.init, "normal_", no_values)
        module = make(device=device)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(4, 2, 16, device=device)
    extra = {"encoder_output": x} if isinstance(module, te.TransformerLayer) else {}
    source.eval(), module.eval()
    assert torch.equal(module(x, **extra), source(x, **extra))
