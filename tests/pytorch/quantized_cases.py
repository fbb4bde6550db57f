# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors of the tests, and their definition by torch's own casts."""

import torch
from pytorch.helpers import RECIPES, assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FP8 = (E4M3, E5M2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def scale_of(source, kind, power_2=False, epsilon=0.0):
    """The scale of current scaling: the largest code over the largest magnitude, in fp32."""
    amax = torch.clamp(source.detach().float().abs().max(), min=epsilon)
    scale = torch.tensor(LARGEST[kind], device=source.device) / amax
    if power_2:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def codes_of(source, scale, kind):
    """Bytes of the saturated values, row-wise."""
    wide = (source.detach().float() * scale).clamp(-LARGEST[kind], LARGEST[kind])
    return wide.to(TE_DType_To_Torch[kind]).view(torch.uint8)


def values_of(codes, scale, kind, dtype):
    """What the codes stand for."""
    return (codes.view(TE_DType_To_Torch[kind]).float() * scale.reciprocal()).to(dtype)


def current(kind=E4M3, **options):
    """A quantizer of current scaling."""
    return te.Float8CurrentScalingQuantizer(kind, None, **options)


def delayed(device, scale=8.0, kind=E4M3, **options):
    """A quantizer with a scale of its own."""
    given = torch.full((1,), scale, device=device), torch.zeros(1, device=device)
    return te.Float8Quantizer(*given, kind, **options)


def quantized(device, shape=(32, 48), dtype=torch.bfloat16, **options):
    """A fresh quantized tensor."""
    return current(**options)(torch.randn(shape, device=device).to(dtype))


def parameter(device, shape=(32, 48), dtype=torch.bfloat16):
    """A fresh quantized parameter, row-wise."""
    return torch.nn.Parameter(quantized(device, shape, dtype, columnwise=False))


def assert_same_tensor(found, expected):
    """Same class, forms, codes and scales."""
    assert type(found) is type(expected) and found.dtype == expected.dtype
    assert found.shape == expected.shape and found._fp8_dtype == expected._fp8_dtype
    assert found.get_usages() == expected.get_usages()
    for name in expected._TENSORS:
        if getattr(expected, name) is not None:
            assert_same_bits(getattr(found, name), getattr(expected, name).to(found.device), name)


def made(kind, recipe, preserve=False, seed=0):
    """A module of `kind()`, its weights quantized for a recipe; None: plain."""
    torch.manual_seed(seed)
    if recipe is None:
        return kind()
    recipe = RECIPES[recipe]() if isinstance(recipe, str) else recipe
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return kind()
