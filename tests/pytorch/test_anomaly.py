# SPDX-License-Identifier: Apache-2.0
"""Whose backward it was: autograd nodes, anomaly mode and profilers name the module."""

import pytest
import torch

import transformer_engine.pytorch as te

WIDTH, TOKENS = 16, 8

MAKERS = {
    "Linear": lambda **o: te.Linear(WIDTH, WIDTH, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(WIDTH, WIDTH, **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(WIDTH, 32, **o),
    "LayerNorm": lambda **o: te.LayerNorm(WIDTH, **o),
    "RMSNorm": lambda **o: te.RMSNorm(WIDTH, **o),
}


@pytest.fixture(params=MAKERS)
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["high-precision", "fp8"])
def fp8(request):
    return request.param


class Poison(torch.autograd.Function):
    """The identity, with a backward of NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.nan)


def test_nodes_have_the_name_of_the_class(device, kind, fp8):
    module = MAKERS[kind](device=device)
    for _ in range(3):
        with te.autocast(enabled=fp8):
            out = module(torch.randn(TOKENS, WIDTH, device=device))
        assert out.grad_fn.name() == f"{kind}Backward"


def test_nodes_have_the_name_of_a_subclass_and_of_the_instance(device):
    class Projection(te.Linear):
        pass

    x = torch.randn(TOKENS, WIDTH, device=device)
    layer = Projection(WIDTH, WIDTH, name="decoder.3.proj", device=device)
    assert layer(x).grad_fn.name() == "Projection[decoder.3.proj]Backward"
    assert layer(x).grad_fn.name() == "Projection[decoder.3.proj]Backward"  # a repeated call
    assert te.Linear(WIDTH, WIDTH, device=device)(x).grad_fn.name() == "LinearBackward"


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_names_the_module(device, kind, fp8):
    """The first backward that makes a NaN: that of the module whose weight is one."""
    first, sick = torch.nn.Linear(WIDTH, WIDTH, device=device), MAKERS[kind](device=device)
    with torch.no_grad():
        next(sick.parameters()).fill_(torch.nan)
    x = torch.randn(TOKENS, WIDTH, device=device)
    with torch.autograd.detect_anomaly():
        with te.autocast(enabled=fp8):
            out = torch.nan_to_num(sick(first(x)))
        with pytest.raises(RuntimeError, match=f"'{kind}Backward' returned nan"):
            out.sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_does_not_blame_the_next(device, kind):
    """NaN that arrive are of the function that made them."""
    module = MAKERS[kind](device=device)
    with torch.autograd.detect_anomaly():
        out = Poison.apply(module(torch.randn(TOKENS, WIDTH, device=device)))
        with pytest.raises(RuntimeError, match="'PoisonBackward' returned nan"):
            out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*clears events at the end of each cycle")
def test_profilers_name_the_module(device, kind):
    module = MAKERS[kind](device=device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {kind, f"{kind}Backward"} <= names


def test_functions_have_names_too(device):
    x = torch.randn(TOKENS, 2, 2, 8, device=device, requires_grad=True)
    angles = te.RotaryPositionEmbedding(8)(TOKENS).to(device)
    assert te.apply_rotary_pos_emb(x, angles).grad_fn.name() == "apply_rotary_pos_embBackward"
