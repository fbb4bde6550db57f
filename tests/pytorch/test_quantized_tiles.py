# SPDX-License-Identifier: Apache-2.0
"""Tensors with scales of tiles and of rows: codes and forms, by their definition; inputs."""

import pytest
import reference
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.module_cases import make, quantized, region, step
from pytorch.quantized_cases import (
    E4M3,
    FP8,
    TILED,
    WEIGHT_RECIPES,
    assert_same_tensor,
    made,
    source_of,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.constants import TE_DType_To_Torch

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
        with pytest.raises(RuntimeError, match="it has no column-wise data, which are not made"):
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
