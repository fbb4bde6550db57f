# SPDX-License-Identifier: Apache-2.0
"""The public counters say what ran; `scales` the state of delayed scaling by path and tensor."""

import pytest
import torch
from pytorch.helpers import RECIPES, state_of

import transformer_engine.pytorch as te
from transformer_engine import _core


def step(layer, recipe=None, rows=16):
    x = torch.randn(rows, 32, device=next(layer.parameters()).device, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x)
    out.sum().backward()
    return x


def test_counting_is_a_difference(device):
    layer = te.Linear(32, 48, device=device)
    te.reset_counters()
    assert te.counters() == {}
    step(layer)
    before = te.counters()
    assert (before.fp8_gemms, before.other_gemms) == (0, 3)
    with te.counting() as outer:
        step(layer, RECIPES["delayed"]())
        with te.counting() as inner:
            step(layer, RECIPES["current"]())
        assert outer == {}
    assert (inner.fp8_gemms, inner.other_gemms) == (3, 0)
    assert (outer.fp8_gemms, outer.other_gemms) == (6, 0)
    assert inner[f"gemm.{device}.e4m3.e4m3"] == 1
    assert te.counters() == _core.counters()
    assert te.counters().fp8_gemms == 6 and before.fp8_gemms == 0
    te.reset_counters()
    assert te.counters() == {}


def test_counts_of_a_block_that_raises(device):
    layer = te.Linear(32, 48, device=device)
    with pytest.raises(KeyError), te.counting() as ran:
        step(layer)
        raise KeyError
    assert ran.other_gemms == 3


def test_scales_by_path_and_tensor(device):
    model = torch.nn.ModuleDict({
        "lin": te.Linear(32, 32, device=device),
        "mlp": te.LayerNormMLP(32, 64, device=device),
        "plain": torch.nn.Linear(32, 32, device=device),
    })  # fmt: skip
    assert te.scales(model) == {}
    recipe = RECIPES["delayed"]()
    amaxes = [step(model["lin"], recipe).abs().max().item() for _ in range(2)]
    step(model["mlp"], recipe)
    found = te.scales(model)
    names = ["input", "weight", "grad_output"]
    assert list(found) == [f"lin.{n}" for n in names] + [
        f"mlp.fc{part}_{n}" for part in (1, 2) for n in names
    ]
    scaling = found["lin.input"]
    assert scaling.history[:2] == tuple(reversed(amaxes)) and len(scaling.history) == 3
    assert scaling.amax == max(amaxes) and scaling.pending == 0.0
    state = state_of(model["mlp"])
    for part in (0, 1):
        for slot, name in enumerate(names[:2]):
            scale = state["forward"][0][3 * part + slot].item()
            assert found[f"mlp.fc{part + 1}_{name}"].scale == scale
        scale = state["backward"][0][2 * part].item()
        assert found[f"mlp.fc{part + 1}_grad_output"].scale == scale
    assert te.scales(model["lin"]) == {n: found[f"lin.{n}"] for n in names}
    te.reset()
    assert te.scales(model) == {}
