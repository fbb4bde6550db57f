# SPDX-License-Identifier: Apache-2.0
"""The quick-start helpers and script: five ways to build a layer are one function."""

import copy
import inspect
import math
from pathlib import Path

import pytest
import torch
from comparators import assert_nmse
from tols import E4M3, F32, GELU_GAIN, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HIDDEN, HEADS, SEQ, BATCH = 64, 4, 16, 2

# Every stage of a layer adds its error, and none but GELU magnifies what came before: weights as
# torch initialises them keep the variance or lower it. Norms, products and softmax in their order.
STAGES = [HIDDEN, HIDDEN, HIDDEN // HEADS, SEQ, SEQ, HIDDEN, HIDDEN, HIDDEN, 4 * HIDDEN]
LAYER = GELU_GAIN * (sum(tol("sum", F32, k) for k in STAGES) + tol("gelu", F32))
GRADIENT = 2 * LAYER  # what the forward left, and as many stages again
FP8_LAYER = GELU_GAIN * 4 * 2 * tol("quantize", E4M3)  # two operands of four products


@pytest.fixture
def utils(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import quickstart_utils

    return quickstart_utils


@pytest.fixture
def quickstart(utils):
    import quickstart

    return quickstart


@pytest.fixture
def flags(device):
    flags = {"device": device, "hidden": HIDDEN, "heads": HEADS, "seq": SEQ, "batch": BATCH,
             "iters": 1, "dtype": "float32"}  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def ways(quickstart, flags):
    """The five, without dropout."""
    return quickstart.build(quickstart.parse([*flags, "--dropout", "0"]))


def make_data(device):
    return (torch.randn(SEQ, BATCH, HIDDEN, device=device) for _ in range(2))


def test_script(quickstart, flags, capsys, counters):
    rows = quickstart.main(flags)
    printed = capsys.readouterr().out
    names = ["torch", "te.Linear, te.LayerNorm", "LayerNormLinear, LayerNormMLP",
             "TransformerLayer", "TransformerLayer in FP8"]  # fmt: skip
    assert [row["name"] for row in rows] == names
    assert all(f"{row['name']:30} {row['difference']:10.2e}" in printed for row in rows)
    assert rows[0]["difference"] == 0
    for row in rows[1:4]:
        assert row["difference"] <= math.sqrt(2 * LAYER)  # both err
    assert math.sqrt(LAYER) < rows[4]["difference"] <= math.sqrt(FP8_LAYER)
    assert all(row["ms"] > 0 for row in rows)
    # Of the last way: two untimed forwards, then a warm-up and a timed step.
    fp8 = {n: v for n, v in counters().items() if n.startswith("gemm.") and "e4m3" in n}
    assert sum(fp8.values()) == 4 * 2 + 3 * 4 * 2  # the norms' gradients need every dgrad


def test_gradients_are_those_of_the_baseline_in_float64(ways, device):
    x, dy = make_data(device)
    exact = copy.deepcopy(ways[0].module).double()
    wide = x.double().requires_grad_()
    exact(wide, **ways[0].forward_kwargs).backward(dy.double())
    for way in ways[:4]:
        narrow = x.clone().requires_grad_()
        y = way.module(narrow, **way.forward_kwargs)
        y.backward(dy)
        assert_nmse(narrow.grad, wide.grad, GRADIENT)


def test_parameters_are_shared_where_the_layout_allows(ways):
    basic, linears, fused, layer, _ = (way.module for way in ways)
    shared = dict(basic.named_parameters())
    assert dict(linears.named_parameters()).keys() == shared.keys()
    assert all(p is shared[name] for name, p in linears.named_parameters())
    objects = {id(p) for p in shared.values()}
    assert {id(p) for p in fused.parameters()} == objects
    copied = {n for n, p in layer.named_parameters() if id(p) not in objects}
    prefix = "self_attention.layernorm_qkv."
    kinds = ("weight", "bias")
    assert copied == {f"{prefix}{n}_{k}" for n in ("query", "key", "value") for k in kinds}


def test_fused_qkv_weight_is_shared(utils, quickstart, ways, device):
    basic = ways[0].module
    layer = te.TransformerLayer(
        HIDDEN, 4 * HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        fuse_qkv_params=True, device=device,
    )  # fmt: skip
    utils.share_parameters_with_transformerlayer_te_model(layer, basic)
    assert layer.self_attention.layernorm_qkv.weight is basic.qkv_projection.weight
    x, _ = make_data(device)
    with torch.no_grad():
        exact = copy.deepcopy(basic).double()(x.double(), **ways[0].forward_kwargs)
        assert_nmse(layer(x), exact, LAYER)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_its_definition(utils, device, masked):
    q, k, v = (torch.randn(SEQ, BATCH, HEADS, 8, device=device) for _ in range(3))
    mask = torch.rand(BATCH, 1, SEQ, SEQ, device=device) < 0.5 if masked else None
    if masked:
        mask[..., 0] = False  # a query that sees nothing has no definition
    got = utils.DotProductAttention(HEADS, 8, attention_dropout=0.1).eval()(q, k, v, mask)
    wide = [t.double().permute(1, 2, 0, 3) for t in (q, k, v)]
    seen = None if mask is None else ~mask
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
    exact = exact.permute(2, 0, 1, 3).reshape(SEQ, BATCH, HEADS * 8)
    assert_nmse(got, exact, tol("sum", F32, 8) + 2 * tol("sum", F32, SEQ))


def test_speedometer(utils, device, counters, capsys):
    names = ["module", "input", "output_grad", "forward_kwargs", "fp8_autocast_kwargs",
             "timing_iters", "warmup_iters"]  # fmt: skip
    parameters = inspect.signature(utils.speedometer).parameters
    assert list(parameters) == names
    defaults = [parameters[name].default for name in names[3:]]
    assert defaults == [{}, None, 50, 50]

    layer = te.Linear(32, 32, device=device)
    x, dy = (torch.randn(16, 32, device=device) for _ in range(2))
    region = {"enabled": True, "fp8_recipe": DelayedScaling()}
    utils.speedometer(layer, x, dy, {}, region, timing_iters=3, warmup_iters=2)
    printed = capsys.readouterr().out.split()
    assert printed[:2] == ["Mean", "time:"] and printed[3] == "ms" and float(printed[2]) > 0
    gemms = {n: v for n, v in counters().items() if n.startswith("gemm.") and v}
    # No gradient of the input is asked for: a forward and a weight gradient.
    assert sum(gemms.values()) == 2 * 5
    assert all("e4m3" in name for name in gemms)
    assert all(p.grad is None for p in layer.parameters())
