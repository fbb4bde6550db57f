# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors of the tests, and their definition by torch's own casts."""

import torch
from pytorch.helpers import RECIPES, assert_same_bits
from pytorch.module_cases import make

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.tensor import HybridQuantizedTensor

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FP8 = (E4M3, E5M2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

TILED = {
    "tiles": te.Float8BlockQuantizer,
    "tiles f32": lambda *a, **o: te.Float8BlockQuantizer(*a, force_pow_2_scales=False, **o),
    "lines": lambda *a, **o: te.Float8BlockQuantizer(*a, block_scaling_dim=1, **o),
    "rows": te.Float8RowQuantizer,
    "rows power 2": lambda *a, **o: te.Float8RowQuantizer(*a, force_pow_2_scales=True, **o),
}
"""Quantizers with scales of tiles or rows, of an FP8 dtype."""
SMALL = {
    "mx": lambda **o: te.MXFP8Quantizer(E4M3, **o),
    "mx squares": lambda **o: te.MXFP8Quantizer(E4M3, with_2d_quantization=True, **o),
    "nv": te.NVFP4Quantizer,
    "nv squares": lambda **o: te.NVFP4Quantizer(with_2d_quantization=True, **o),
    "nv rht": lambda **o: te.NVFP4Quantizer(with_rht=True, **o),
    "nv rht unsigned": lambda **o: te.NVFP4Quantizer(
        with_rht=True, with_random_sign_mask=False, **o
    ),
    "nv 4over6": lambda **o: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, **o),
    "nv rows": lambda **o: te.NVFP4Quantizer(
        row_scaled_nvfp4=True, nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE", **o
    ),
    "mx margin": lambda **o: te.MXFP8Quantizer(E5M2, margin=2, **o),
}
"""Quantizers with scales of groups."""
FORMATS = {
    **{name: lambda make=make, **o: make(E4M3, **o) for name, make in TILED.items()},
    "rows e5m2": lambda **o: te.Float8RowQuantizer(E5M2, amax_epsilon=0.5, **o),
    "tiles e5m2": lambda **o: te.Float8BlockQuantizer(E5M2, amax_epsilon=0.5, **o),
    **SMALL,
}
"""Quantizers of which each tensor has scales of its own parts, by name."""
WEIGHT_RECIPES = {
    "block": Float8BlockScaling,
    "block f32": lambda: Float8BlockScaling(use_f32_scales=True),
    "block lines": lambda: Float8BlockScaling(w_block_scaling_dim=1, x_block_scaling_dim=2),
    "row": Float8RowScaling,
    "mx": MXFP8BlockScaling,
    "mx squares": lambda: MXFP8BlockScaling(enable_2d_quantization=True),
    "nv": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nv lines": lambda: NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_2d_quantization=True, disable_rht=True
    ),
    "nv 4over6": lambda: NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_rht=True, nvfp4_4over6="all"
    ),
    "nv rows": lambda: NVFP4BlockScaling(
        disable_stochastic_rounding=True,
        row_scaled_activation=True,
        nvfp4_4over6="weights",
        nvfp4_4over6_err_mode="MSE",
    ),
    "mx margin": lambda: MXFP8BlockScaling(margin=2),
}
"""Recipes whose weights are tensors of these formats, and whose bits repeat."""


def source_of(device, shape, dtype=torch.bfloat16):
    """Normal numbers whose columns differ in size."""
    return (torch.randn(shape, device=device) * torch.rand(shape[-1], device=device)).to(dtype)


def scale_of(source, kind, power_2=False, epsilon=0.0):
    """The scale of current scaling: the largest code over the largest magnitude, in fp32."""
    amax = torch.clamp(source.detach().float().abs().max(), min=epsilon)
    scale = torch.tensor(LARGEST[kind], device=source.device) / amax
    if power_2:
        exponent = torch.frexp(scale.cpu())[1]  # not every torch has `ldexp` on every device
        scale = torch.ldexp(torch.tensor(0.5), exponent).to(scale.device)
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
    """Same class, forms, codes and scales; of hybrid ones in the formats of both forms."""
    assert type(found) is type(expected) and found.dtype == expected.dtype
    assert found.shape == expected.shape and found.get_usages() == expected.get_usages()
    if isinstance(expected, HybridQuantizedTensor):
        assert found._kind() == expected._kind()
    else:
        assert getattr(found, "_fp8_dtype", None) == getattr(expected, "_fp8_dtype", None)
    theirs = expected._flat()[0]
    for name, tensor in theirs.items():
        assert_same_bits(getattr(found, name), tensor.to(found.device), name)


def made(kind, recipe, preserve=False):
    """A module of `kind()`, its weights quantized for a recipe; None: plain."""
    if recipe is None:
        return kind()
    recipe = RECIPES[recipe]() if isinstance(recipe, str) else recipe
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return kind()


def twins(kind, *recipes, preserve=False):
    """Modules as `made` makes them, of the same values: one for each of the recipes."""
    seed, seed_of_the_rest = torch.randint(2**31, (2,)).tolist()
    modules = []
    for recipe in recipes:
        torch.manual_seed(seed)
        modules.append(made(kind, recipe, preserve))
    torch.manual_seed(seed_of_the_rest)
    return modules


PER_TENSOR = ("current", "delayed")
"""Recipes whose weights are `Float8Tensor`s, by their names."""


def pair(kind, device, recipe, **options):
    """A module with quantized weights, and the same one with plain weights."""
    return twins(lambda: make(kind, device, **options), recipe, None)


def fp8_weights(module):
    return [w for w in module.parameters() if isinstance(w, te.Float8Tensor)]
