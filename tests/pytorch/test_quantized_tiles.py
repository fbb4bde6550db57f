# SPDX-License-Identifier: Apache-2.0
"""Tensors with scales of tiles and of rows: codes and forms, by their definition; inputs."""

import pytest
import reference
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, counted
from pytorch.module_cases import make, quantized, region, step
from pytorch.quantized_cases import (
    E4M3,
    E5M2,
    FP8,
    SMALL,
    TILED,
    WEIGHT_RECIPES,
    assert_same_tensor,
    made,
    source_of,
)
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.constants import TE_DType_To_Torch

pytestmark = every_device

MODES = {"tiles": "block_2d", "lines": "block_1d", "rows": "row"}
SHAPES = [(32, 48), (3, 7, 130), (129, 36), (300,), (260, 400)]


def expected_of(source, name, kind, columnwise):
    """Codes and scales of one form, by the definition."""
    values = reference.as_f32(source.reshape(-1, source.shape[-1]))
    power_2 = name in ("tiles", "lines", "rows power 2")
    return reference.scaled_quantize(
        values.T if columnwise else values,
        MODES[name.split()[0]],
        TE_DType_To_Torch[kind],
        source.dtype,
        power_2=power_2,
    )


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_are_those_of_the_definition(device, name, shape, kind, dtype):
    source = source_of(device, shape, dtype)
    quantizer = TILED[name](kind)
    tensor = quantizer(source)
    assert tensor.dtype == dtype and tensor.shape == shape
    codes, scales = expected_of(source, name, kind, False)
    assert_same_bits(tensor._rowwise_data.reshape(codes.shape), codes.view(torch.uint8))
    assert_same_bits(tensor._rowwise_scale_inv, scales)
    assert tensor._rowwise_scale_inv.shape == quantizer.get_scale_shape(shape)
    codes, scales = expected_of(source, name, kind, True)
    assert_same_bits(tensor._columnwise_data.reshape(codes.shape), codes.view(torch.uint8))
    assert_same_bits(tensor._columnwise_scale_inv, scales)
    assert tensor._columnwise_scale_inv.shape == quantizer.get_scale_shape(shape, True)
    error = (tensor.dequantize().double() - source.double()).abs()
    largest = source.double().abs().max()
    assert error.max() <= largest * 2.0 ** (-3 if kind == E4M3 else -2)
    tensor.update_usage(rowwise_usage=False)
    assert (tensor.dequantize().double() - source.double()).abs().max() <= largest * 2.0**-2


@pytest.mark.parametrize("shape", SHAPES)
def test_square_tiles_are_turned_and_others_are_not(device, shape):
    source = source_of(device, shape)
    tensor = te.Float8BlockQuantizer(E4M3, columnwise=False)(source)
    assert tensor._columnwise_data is None
    tensor.update_usage(columnwise_usage=True)
    assert_same_tensor(tensor, te.Float8BlockQuantizer(E4M3)(source))
    for name in ("lines", "rows"):
        tensor = TILED[name](E4M3, columnwise=False)(source)
        with pytest.raises(
            RuntimeError, match="it has no column-wise data, and they can not be made"
        ):
            tensor.update_usage(columnwise_usage=True)


def test_what_can_not_be():
    with pytest.raises(ValueError, match="block_scaling_dim=3, expected 1 or 2"):
        te.Float8BlockQuantizer(E4M3, block_scaling_dim=3)
    with pytest.raises(ValueError, match="Float8RowQuantizer: amax_epsilon=-1"):
        te.Float8RowQuantizer(E4M3, amax_epsilon=-1)
    with pytest.raises(ValueError, match="rowwise_data and columnwise_data are None"):
        te.Float8BlockwiseQTensor(shape=(1, 16), fp8_dtype=E4M3, is_2D_scaled=True)
    with pytest.raises(TypeError, match=r"unexpected arguments \['data'\]"):
        te.Float8RowTensor(shape=(1, 16), fp8_dtype=E4M3, data=None)
    known = te.Float8BlockQuantizer(E4M3, columnwise=False)(torch.ones(2, 16))
    given = {"rowwise_data": known._rowwise_data, "rowwise_scale_inv": known._rowwise_scale_inv}
    tensor = te.Float8BlockwiseQTensor(
        shape=(2, 16), dtype=torch.bfloat16, fp8_dtype=E4M3, is_2D_scaled=True, **given
    )
    assert_same_bits(tensor.dequantize(), torch.ones(2, 16, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="it has no quantizer"):
        tensor.zero_()


# ---- parameters and inputs -----------------------------------------------------------------------


def test_square_tiles_take_one_byte_an_element(device):
    module = made(lambda: te.Linear(256, 512, device=device), Float8BlockScaling())
    step(module, torch.randn(16, 256, device=device), Float8BlockScaling())
    tensors = [t for t in module.weight.get_data_tensors() if t is not None]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 256 * 512 + 4 * 4 * 4


@pytest.mark.parametrize("recipe", ["block", "row"])
@pytest.mark.parametrize("columnwise", [True, False])
def test_inputs_are_read_where_both_forms_are_there(device, recipe, columnwise):
    """With one alone a backward could not be computed: it is read in high precision then."""
    name = {"block": "lines", "row": "rows"}[recipe]
    quantizer = TILED[name](E4M3, columnwise=columnwise)
    module, recipe = make("linear", device), WEIGHT_RECIPES[recipe]()
    x = torch.randn(32, 32, device=device)
    expected = step(module, x, recipe)
    grad = module.weight.grad.clone()
    module.zero_grad()
    inp = x.clone().requires_grad_()
    tensor = quantizer(inp)
    with counted():
        with region(recipe):
            out = module(tensor)
        out.backward(torch.ones_like(out))
    assert quantized() == (3 if columnwise else 4)
    if columnwise:
        assert_same_bits([out.detach(), inp.grad, module.weight.grad], [*expected[:2], grad])
    with torch.no_grad(), region(recipe), counted():
        module(quantizer(x))
    assert quantized() == 2


EXTREMES = {
    **{name: lambda make=make, **o: make(E4M3, **o) for name, make in TILED.items()},
    "tiles e5m2": lambda **o: te.Float8BlockQuantizer(E5M2, **o),
    "current": lambda **o: te.Float8CurrentScalingQuantizer(E4M3, **o),
    "current power 2": lambda **o: te.Float8CurrentScalingQuantizer(
        E4M3, force_pow_2_scales=True, **o
    ),
    "current e5m2": lambda **o: te.Float8CurrentScalingQuantizer(E5M2, **o),
    "mx": SMALL["mx"],
    "nv": SMALL["nv"],
    "nv 4over6": SMALL["nv 4over6"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_ends_of_a_dtype_stand_for_finite_numbers(device, name, dtype, columnwise):
    """The largest numbers may be rounded up, but to no Inf; subnormals to zeros, but to no NaN."""
    info = torch.finfo(dtype)
    near = torch.linspace(0.5, 1, 128 * 128, device=device, dtype=torch.float64)
    signs = torch.ones_like(near)
    signs[::2] = -1
    for largest in (info.max, info.tiny, info.tiny / 64):
        source = (near * signs * largest).view(128, 128).to(dtype)
        tensor = EXTREMES[name](rowwise=not columnwise, columnwise=columnwise)(source)
        values = tensor.dequantize()
        assert values.isfinite().all()
        assert (values.double() * source.double() >= 0).all()
        if largest == info.max:
            kind = torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn
            bound = tol("half_step_nvfp4" if name.startswith("nv") else "half_step", kind)
            error = (values.double() - source.double()).abs() / largest
            assert (error <= 2 * bound).all()
