# SPDX-License-Identifier: Apache-2.0
"""Layers in `torch.autocast`: one plan per direction, with the dtypes and bits of their modules.

A module reads its input in the dtype of the region, or as it is where it casts to FP8; the residual
stream keeps the dtype of the input, so a value may be there in two.
"""

import contextlib
import copy

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.layer_microbatches import accumulate
from pytorch.layer_recompute import RECIPES, plans_run, region as region_of, step
from pytorch.layer_ways import (
    DROPS,
    FUSED,
    HIDDEN,
    LENGTH,
    SOURCE,
    assert_modules,
    assert_whole,
    both_ways,
    by_branches,
    gradients,
    make_attention,
    make_layer,
    region,
    states,
    watched,
)
from pytorch.recompute_cases import CHECKPOINTS
from tols import BF16, F16, F32

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.call import LayerCall

LAYERS = {
    "dropout": DROPS,
    "decoder": {"layer_type": "decoder", **DROPS},
    "parallel": {"parallel_attention_mlp": True, **FUSED},
    "post-residual": {"apply_residual_connection_post_layernorm": True, **FUSED},
    "gated": {"activation": "swiglu", "normalization": "RMSNorm", "drop_path_rate": 0.3},
    "no biases": {"bias": False},
}
DTYPES = {  # of the parameters, of the input, of the region
    "usual": (F32, F32, BF16),
    "16-bit input": (F32, BF16, BF16),
    "16-bit weights": (BF16, F32, BF16),
    "two of 16 bits": (F32, F16, BF16),
    "fp16": (F32, F32, F16),
}
recipes = pytest.mark.parametrize("recipe", ["none", "delayed", "current"])


def plain(function, *args):
    return function(*args)


def given_to(layer, kind, dtype):
    given = {"hidden_states": states(layer, dtype=dtype)}
    if kind == "decoder":
        given["encoder_output"] = states(layer, SOURCE, dtype=F32)
    return given


def assert_one_plan(layer, given, dtype, recipe, run=plain, passes=2):
    """Assert that steps are a plan in each direction, and have the bits of the modules."""
    device, ways = next(layer.parameters()).device.type, []

    def steps(own):
        with torch.autocast(device, dtype), plans_run() as ran:
            found = [step(own, given, run, recipe) for _ in range(3)]
        ways.append(ran)
        return found

    found = both_ways(layer, steps, True, type(layer).__name__)
    assert ways[0] == [LayerCall] * 3 * passes
    assert len(ways[1]) > len(ways[0])
    return found


# ---- dtypes, layers, recipes ---------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_one_plan(device, kind, dtypes, recipe):
    parameters, inp, dtype = DTYPES[dtypes]
    layer = make_layer(device, parameters, **LAYERS[kind])
    found = assert_one_plan(layer, given_to(layer, kind, inp), dtype, recipe)
    # the sum of a branch and the residual stream, which a norm may have made
    residual = dtype if kind == "post-residual" else inp
    assert found[0][0].dtype is torch.promote_types(residual, dtype)
    assert {grad.dtype for grad in found[0][2:] if grad is not None} <= {parameters, F32}


@recipes
@pytest.mark.parametrize("rates", [{}, DROPS])
@pytest.mark.parametrize("inp", [F32, BF16])
def test_a_branch_without_a_norm(device, inp, rates, recipe):
    """The first residual is the input as it was given, whatever the projection reads it in."""
    options = {"apply_residual_connection_post_layernorm": True, "output_layernorm": True}
    layer = make_layer(device, F32, **options, **rates)
    given = {"hidden_states": states(layer, dtype=inp)}

    def steps(own):
        with torch.autocast(device, BF16):
            return [step(own, given, plain, recipe) for _ in range(3)]

    both_ways(layer, steps, True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(device, recipe):
    layer = make_layer(device, F32, **DROPS)
    given = given_to(layer, "", F32)
    assert_one_plan(layer, given, BF16, recipe)


@recipes
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_attention(device, kind, recipe):
    """With a bias and a norm output that are returned: in the dtype of the region."""
    options = {"input_layernorm": True, "return_layernorm_output": True, "return_bias": True}
    layer = make_attention(device, F32, attention_type=kind, **options)
    x = torch.randn(LENGTH, 2, HIDDEN, device=device).requires_grad_()
    source = {"encoder_output": torch.randn(SOURCE, 2, HIDDEN, device=device).requires_grad_()}

    def run(own):
        found = []
        for _ in range(2):
            with torch.autocast(device, BF16), region_of(recipe):
                out, bias, normed = own(x, **(source if kind == "cross" else {}))
            assert out.dtype is bias.dtype is normed.dtype is BF16
            loss = out.float().square().sum() + (normed.float() * 3).sum() + bias.float().sum()
            found += [*torch.autograd.grad(loss, [x, *own.parameters()]), out.detach(), normed]
        return found

    both_ways(layer, run, True, "MultiheadAttention")


@recipes
def test_branches(device, recipe):
    """A large layer is one call for each branch."""
    layer = make_layer(device, F32, layer_type="decoder", **DROPS)
    given = given_to(layer, "decoder", F32)

    def run(own):
        with by_branches(), torch.autocast(device, BF16):
            return [step(own, given, plain, recipe) for _ in range(2)]

    both_ways(layer, run)


class Block(te.PlannedModule):
    """Norms by themselves, linear layers and an attention."""

    def __init__(self, device):
        super().__init__()
        self.norms = torch.nn.ModuleList(
            [te.LayerNorm(HIDDEN, device=device), te.RMSNorm(HIDDEN, device=device)]
        )
        self.attention = te.MultiheadAttention(HIDDEN, 4, attention_dropout=0.0, device=device)
        self.linear = te.Linear(HIDDEN, HIDDEN, device=device)
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, device=device)

    def emit(self, nodes, x):
        # Not before a linear layer: its FP8 is made of what the norm has computed, not rounded.
        y = nodes.run(self.linear, nodes.run(self.attention, x))
        x = nodes.add(nodes.run(self.norms[0], y), x, dropout=0.2)
        y = nodes.run(self.mlp, nodes.run(self.norms[1], x))
        return nodes.add(y, x)


@recipes
@pytest.mark.parametrize("inp", [F32, BF16])
def test_planned_modules(device, recipe, inp):
    x = torch.randn(LENGTH, 2, HIDDEN).to(device, inp).requires_grad_()
    assert_one_plan(Block(device), {"x": x}, BF16, recipe)


class Function(Block):
    """With a function of the program, whose operators have dtypes of their own in a region."""

    def emit(self, nodes, x):
        y = nodes.run(self.linear, x)
        return nodes.add(nodes.function(lambda y: y @ y.t() @ y, y), x)


def test_functions_of_programs_are_called(device):
    layer = Function(device)
    x = torch.randn(LENGTH, 2, HIDDEN, device=device)
    with torch.autocast(device, BF16):
        assert assert_modules(layer, x=x).dtype is F32
    if device == "cpu":
        assert_whole(layer, x=x)


# ---- with all else that a call may be ------------------------------------------------------------


@pytest.mark.parametrize("kind", CHECKPOINTS)
@recipes
def test_checkpoints(device, kind, recipe):
    layer = make_layer(device, F32, **DROPS)
    given = given_to(layer, "", F32)
    assert_one_plan(layer, given, BF16, recipe, CHECKPOINTS[kind], passes=3)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_microbatches(device, recipe, accumulates):
    layer = make_layer(device, F32, **FUSED, **DROPS)
    inputs = [states(layer) for _ in range(3)]

    def run(own):
        if accumulates:
            accumulate(own)
        found = []
        for _ in range(2):
            for number, x in enumerate(inputs):
                with torch.autocast(device, BF16), region(recipe):
                    out = own(x, is_first_microbatch=number == 0)
                found.append(gradients(own, x, out))
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.mul_(0.75)
        return found, [p.main_grad for p in own.parameters() if hasattr(p, "main_grad")]

    both_ways(layer, run)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_attention_in_fp8(device, recipe, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    layer = make_layer(device, F32, heads=2, **FUSED)  # cuDNN's kernels take 16 channels or more
    x = states(layer)

    def run(own):
        found = []
        for _ in range(3):
            with torch.autocast(device, BF16), region_of(recipe, fp8_dpa=True, fp8_mha=True):
                out = own(x)
            found += gradients(own, x, out)
        return found

    both_ways(layer, run)


@recipes
def test_frozen_parameters_and_inputs(device, recipe):
    """Gradients of what is wanted alone, and no backward at all."""
    layer = make_layer(device, F32, **DROPS)
    for number, parameter in enumerate(layer.parameters()):
        parameter.requires_grad_(number % 3 == 0)
    x = states(layer).detach()

    def run(own):
        found = []
        for grad in (True, False, True):
            with torch.autocast(device, BF16), region_of(recipe), torch.set_grad_enabled(grad):
                out = own(x)
            found.append(out.detach())
            if grad:
                wanted = [p for p in own.parameters() if p.requires_grad]
                found += torch.autograd.grad(out.sum(), wanted, allow_unused=True)
        return found

    both_ways(layer, run)


def test_regions_in_turn(device):
    """The dtype of a region is part of what a call is found by."""
    layer = make_layer(device, F32)
    x, found = states(layer), {}
    with watched() as calls:
        for _ in range(3):
            for dtype in (BF16, F16):
                with torch.autocast(device, dtype), counted() as gemms:
                    out = layer(x)
                assert gemms.fp8 == 0 and gemms.other == 4
                assert_same_bits(out, found.setdefault(dtype, out))
    assert {taken for _, taken in calls} == {True}
    assert not torch.equal(*found.values())


def test_explained(device):
    """A plan says where values are converted."""
    layer = make_layer(device, F32)
    x = states(layer)
    with torch.autocast(device, BF16):
        plans = dict(layer.plans_of(x))
        layer(x)
    names = {way: [stage.name for stage in plan.stages] for way, plan in plans.items()}
    assert [n for n in names["forward"] if "convert" in n] == [
        "attn_qkv_convert", "attn_convert_input", "mlp_convert", "mlp_convert_input",
    ]  # fmt: skip
    assert {"attn_qkv_convert_grad", "mlp_convert_grad"} <= {*names["backward"]}


def test_copies_have_their_own(device):
    layer = make_layer(device, F32)
    x = states(layer)
    with torch.autocast(device, BF16), contextlib.ExitStack():
        expected = layer(x)
        assert_same_bits(copy.deepcopy(layer)(x), expected)
