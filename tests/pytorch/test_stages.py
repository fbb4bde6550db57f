# SPDX-License-Identifier: Apache-2.0
"""External stages: Python functions and collectives inside a plan."""

import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import quantize_like_the_library, same_draws
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.graphs import CallSpec, LinearFlags, LinearSpec
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.plans import call_plans
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.execution.stages import Staged, external_steps

RECIPES = {"delayed": lambda: DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling}


def run_layer(device, recipe, stages, steps=3):
    te.reset()
    layer = te.Linear(40, 24, device=device)
    layer.override_stages(**stages)
    seen = []
    for _ in range(steps):
        x = torch.randn(7, 40, device=device, requires_grad=True)
        with te.autocast(recipe=recipe):
            out = layer(x)
        out.square().sum().backward()
        seen += [out.detach().clone(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]
        layer.zero_grad()
    if layer._slots is not None:
        for scale, history in layer._slots.values().values():
            seen += [scale, history]
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_python_quantizer_takes_part(device, recipe):
    calls = []

    def quantize_input(buffers):
        calls.append("input")
        quantize_like_the_library(buffers["input"], buffers, "input", buffers.slot)

    def quantize_weight(buffers):
        calls.append("weight")
        quantize_like_the_library(buffers["weight"], buffers, "weight", buffers.slot + 1)

    with same_draws(device):
        expected = run_layer(device, RECIPES[recipe](), {})
    _core.reset_counters()
    stages = {"quantize_input": quantize_input, "quantize_weight": quantize_weight}
    got = run_layer(device, RECIPES[recipe](), stages)
    assert calls == ["input", "weight"] * 3
    gemms = {n: c for n, c in _core.counters().items() if n.startswith("gemm.")}
    assert sum(gemms.values()) == 9 and all(".e" in name for name in gemms)
    for reference, value in zip(expected, got, strict=True):
        assert torch.equal(reference, value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_operator_overridden_by_python(device, recipe):
    """A GEMM in float64 that adds 1 replaces the library's."""
    calls = []

    def gemm_output(buffers):
        calls.append(buffers.rows)
        a = buffers["input_row"].double() * buffers["input_scales"][0].double()
        b = buffers["weight_row"].double() * buffers["weight_scales"][0].double()
        buffers["output"].copy_(a @ b.t() + buffers["bias_cast"].double() + 1.0)

    with same_draws(device):
        expected = run_layer(device, RECIPES[recipe](), {})
    _core.reset_counters()
    got = run_layer(device, RECIPES[recipe](), {"gemm_output": gemm_output})
    assert calls == [7, 7, 7]
    assert sum(c for n, c in _core.counters().items() if n.startswith("gemm.")) == 6
    bound = tol("round", torch.float32) + tol("sum_fast", torch.float8_e4m3fn, 48)
    assert_nmse(got[0].double() - 1.0, expected[0].double(), 2 * bound)


def test_unknown_stage_and_missing_function(device):
    layer = te.Linear(16, 16, device=device)
    with pytest.raises(ValueError, match="quantise_input"):
        layer.override_stages(quantise_input=print)
    spec = LinearSpec(
        16,
        16,
        *[_core.DTYPE_F32] * 5,
        quantization_of(DelayedScaling()),
        LinearFlags(weight=_core.VALUE_PARAMETER),
        external=external_steps({"gemm_output": None})[0],
    )
    plan = call_plans(CallSpec((spec,))).forward
    x, w = torch.randn(4, 16, device=device), torch.randn(16, 16, device=device)
    scale, history = torch.ones(256, device=device), torch.zeros(4, 256, device=device)
    with pytest.raises(RuntimeError, match="external"):
        _core.run(plan.native, 0, 0, x, w, scale, history)
    with pytest.raises(RuntimeError, match="gemm_output"):
        _core.run_staged(plan.native, 0, 0, *Staged({}).of(plan), x, w, scale, history)
