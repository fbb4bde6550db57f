# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and NVFP4 tensors: data and scales, by their definition; inputs."""

import microscaled
import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits
from pytorch.module_cases import make, quantized, region, step
from pytorch.quantized_cases import FP8, SMALL, WEIGHT_RECIPES, source_of
from reference import as_f32

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

pytestmark = every_device

SHAPES = [(32, 48), (3, 7, 130), (129, 36), (300,), (160, 272)]
FORMS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("shape", SHAPES)
def test_mxfp8_is_that_of_the_definition(device, squares, kind, shape):
    source = source_of(device, shape)
    quantizer = te.MXFP8Quantizer(kind, with_2d_quantization=squares)
    tensor = quantizer(source)
    matrix = source.reshape(-1, shape[-1])
    dtype = TE_DType_To_Torch[kind]
    expected = microscaled.mxfp8(as_f32(matrix), dtype, square=squares)
    for name, form in zip(FORMS, expected, strict=True):
        found = getattr(tensor, f"_{name}")
        if name.endswith("data"):
            assert found.shape == shape
            found = found.reshape(form.shape)
        assert_same_bits(found, form.view(torch.uint8))
    assert quantizer.get_scale_shape(shape) == tensor._rowwise_scale_inv.shape
    assert quantizer.get_scale_shape(shape, True) == tensor._columnwise_scale_inv.shape
    values = microscaled.mxfp8_values(*expected[:2], 1, source.dtype)
    assert_same_bits(tensor.dequantize(), values.view(shape))
    tensor.update_usage(rowwise_usage=False)
    values = microscaled.mxfp8_values(*expected[2:], 0, source.dtype)
    assert_same_bits(tensor.dequantize(), values.view(shape))


OF_DEFINITION = {
    "nv": {},
    "nv squares": {"square": True},
    "nv rht": {"rht": True},
    "nv rht unsigned": {"rht": 2},
    "nv 4over6": {"err_mode": "MAE", "to_256": True},
    "nv rows": {"err_mode": "MSE", "row_scaled": True},
}


@pytest.mark.parametrize("name", OF_DEFINITION)
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_that_of_the_definition(device, name, shape):
    source = source_of(device, shape)
    quantizer = SMALL[name]()
    tensor = quantizer(source)
    matrix = source.reshape(-1, shape[-1])
    expected = microscaled.nvfp4(as_f32(matrix), **OF_DEFINITION[name])
    for form, (data, scales, amax) in zip(
        ("rowwise", "columnwise"), (expected[:3], expected[3:]), strict=True
    ):
        found = getattr(tensor, f"_{form}_data")
        assert_same_bits(found.reshape(data.shape), data)
        assert_same_bits(getattr(tensor, f"_{form}_scale_inv"), scales)
        assert_same_bits(getattr(tensor, f"_amax_{form}"), amax)
    to_256 = OF_DEFINITION[name].get("to_256", False)
    values = microscaled.nvfp4_values(*expected[:3], source.dtype, to_256)
    assert_same_bits(tensor.dequantize(), values[:, : shape[-1]].reshape(shape).contiguous())
    assert tensor._fp4_dtype is DType.kFloat4E2M1 and tensor.shape == shape


def test_four_bits_a_value(device):
    tensor = te.NVFP4Quantizer(columnwise=False)(source_of(device, (256, 512)))
    total = sum(t.untyped_storage().nbytes() for t in tensor.get_data_tensors() if t is not None)
    assert total == 256 * 512 // 2 + 256 * 512 // 16 + 4


def test_stochastic_rounding_follows_the_generator(device):
    source, found = source_of(device, (64, 64)), []
    quantizer = te.NVFP4Quantizer(stochastic_rounding=True)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(quantizer(source)._rowwise_data)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_what_can_not_be():
    with pytest.raises(ValueError, match="fp8_dtype: 7, expected DType.kFloat4E2M1"):
        te.NVFP4Quantizer(7)
    with pytest.raises(ValueError, match="with_rht and with_2d_quantization: give one"):
        te.NVFP4Quantizer(with_rht=True, with_2d_quantization=True)
    for one, other in (
        ("row_scaled_nvfp4", "with_2d_quantization"),
        ("with_rht", "nvfp4_use_4over6"),
        ("stochastic_rounding", "nvfp4_use_4over6"),
    ):
        with pytest.raises(ValueError, match=f"{one} and {other}: give one"):
            te.NVFP4Quantizer(**{one: True, other: True})
    for name, value in (("nvfp4_e4m3_max", 255), ("nvfp4_4over6_err_mode", "mae")):
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            te.NVFP4Quantizer(**{name: value})
    with pytest.raises(ValueError, match="margin=127"):
        te.MXFP8Quantizer(FP8[0], margin=127)
    tensor = te.NVFP4Quantizer(with_rht=True)(torch.ones(16, 16))
    tensor.update_usage(rowwise_usage=False)
    with pytest.raises(RuntimeError, match="column-wise data are of transformed values"):
        tensor.dequantize()


@pytest.mark.parametrize("name", ["mx", "nv"])
def test_scales_in_another_order_are_refused(device, name):
    """They would be read in the wrong one."""
    tensor = SMALL[name]()(source_of(device, (128, 128)))
    fields = {k[1:]: v for k, v in tensor._fields().items()}
    assert fields["with_gemm_swizzled_scales"] is False
    fields["with_gemm_swizzled_scales"] = True
    for kind, options in ((type(tensor), {"shape": tensor.shape}), (type(tensor)._STORAGE, {})):
        with pytest.raises(NotImplementedError, match="with_gemm_swizzled_scales=True"):
            kind(**options, **fields)
    with pytest.raises(NotImplementedError, match="with_gemm_swizzled_scales=True"):
        tensor._with_gemm_swizzled_scales = True
    fields["with_gemm_swizzled_scales"] = False
    found = type(tensor)(tensor.shape, torch.bfloat16, **fields)
    assert_same_bits(found.dequantize(), tensor.dequantize())


# ---- parameters and inputs -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "recipe"), [("mx", "mx"), ("nv", "nv lines"), ("nv rht", "nv")])
def test_inputs_are_not_cast_again(device, name, recipe):
    module, recipe = make("linear", device), WEIGHT_RECIPES[recipe]()
    x = torch.randn(2, 16, 32, device=device)
    expected = step(module, x, recipe)
    grad = module.weight.grad.clone()
    module.zero_grad()
    inp = x.clone().requires_grad_()
    tensor = SMALL[name]()(inp)
    _core.reset_counters()
    with region(recipe):
        out = module(tensor)
    out.backward(torch.ones_like(out))
    assert quantized() == 3
    assert_same_bits([out.detach(), inp.grad, module.weight.grad], [*expected[:2], grad])
