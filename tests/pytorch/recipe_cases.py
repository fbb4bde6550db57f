# SPDX-License-Identifier: Apache-2.0
"""Modules, recipes and steps of the tests of recipes without state, and of their backward."""

import pytest
import torch
from comparators import assert_bits
from pytorch.helpers import same_draws
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.tensor.recipes import cast_of, format_of

WIDTH, FFN, HEADS, TOKENS, BATCH = 64, 128, 4, 24, 2
ALIGNED = 256
"""Bytes; where members of a packed buffer begin."""
RECIPES = {
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "block-1d": lambda **o: Float8BlockScaling(w_block_scaling_dim=1, **o),
    "row": Float8RowScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
OVERRIDES = ("high_precision", "dequantized")
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Of each module: how it is made, and how many linear layers it has.
MODULES = {
    "Linear": (lambda **o: te.Linear(WIDTH, WIDTH, **o), 1),
    "Linear-split": (lambda **o: te.Linear(WIDTH, WIDTH, parameters_split=("a", "b"), **o), 1),
    "LayerNormLinear": (lambda **o: te.LayerNormLinear(WIDTH, WIDTH, **o), 1),
    "LayerNormMLP": (lambda **o: te.LayerNormMLP(WIDTH, FFN, **o), 2),
    "LayerNormMLP-checkpoint": (lambda **o: te.LayerNormMLP(WIDTH, FFN, checkpoint=True, **o), 2),
    "MultiheadAttention": (
        lambda **o: te.MultiheadAttention(
            WIDTH, HEADS, attention_dropout=0.0, input_layernorm=True, **o
        ),
        2,
    ),
    "TransformerLayer": (lambda **o: te.TransformerLayer(WIDTH, FFN, HEADS, **NO_DROPOUT, **o), 4),
}
FEW = ("current", "block-1d", "nvfp4")
"""A scale of the tensor, several, and amaxes besides."""
ONE = ("Linear", "Linear-split", "LayerNormLinear")
few = pytest.mark.parametrize("recipe", FEW)
recipes = pytest.mark.parametrize("recipe", RECIPES)
overrides = pytest.mark.parametrize("override", OVERRIDES)
modules = pytest.mark.parametrize("module", MODULES)


def made(module, device, dtype=BF16, **options):
    model = MODULES[module][0](params_dtype=dtype, device=device, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("layer_norm_weight" in name), 0.25)
    return model


def data(device, dtype=BF16, width=WIDTH):
    x = torch.randn(TOKENS, BATCH, width, device=device).to(dtype).requires_grad_()
    return x, torch.randn(TOKENS, BATCH, width, device=device).to(dtype)


def results(out, x, model):
    return [out.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def step(model, x, grad, recipe, run=None, **more):
    """Output and all gradients of a step, which draws what the step before it drew."""
    x.grad = None
    model.zero_grad()
    with same_draws(x.device):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = (run or model)(x, **more)
        out.backward(grad)
        if getattr(model, "delay_wgrad_compute", False):
            model.backward_dw()
    return results(out, x, model)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert_bits(x.cpu(), y.cpu())


def casts(counts):
    """How many operators measured or cast."""
    return sum(n for name, n in counts.items() if name.endswith((".quantize", ".amax")))


def quantizer_of(recipe, device, role):
    """What casts an operand of linear layers as a recipe does; a role is as of `cast_of`."""
    cast = cast_of(quantization_of(recipe), role)
    return format_of(cast).make(cast, device, False)


def read_again(quantizer, values, dtype):
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(values.detach().contiguous()).dequantize(dtype=dtype)
