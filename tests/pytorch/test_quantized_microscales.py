# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and NVFP4 tensors: data and scales, operators, files, parameters, inputs."""

import copy
import io
import pickle

import microscaled
import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.module_cases import make, quantized, region, step, weights_of
from pytorch.quantized_cases import E4M3, FP8, assert_same_tensor, made
from reference import as_f32

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

MAKE = {
    "mx": lambda **o: te.MXFP8Quantizer(E4M3, **o),
    "mx squares": lambda **o: te.MXFP8Quantizer(E4M3, with_2d_quantization=True, **o),
    "nv": te.NVFP4Quantizer,
    "nv squares": lambda **o: te.NVFP4Quantizer(with_2d_quantization=True, **o),
    "nv rht": lambda **o: te.NVFP4Quantizer(with_rht=True, **o),
}
RECIPES = {
    "mx": MXFP8BlockScaling,
    "mx squares": lambda: MXFP8BlockScaling(enable_2d_quantization=True),
    "nv": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nv lines": lambda: NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_2d_quantization=True, disable_rht=True
    ),
}
SHAPES = [(32, 48), (3, 7, 130), (129, 36), (300,), (160, 272)]
FORMS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def source_of(device, shape, dtype=torch.bfloat16):
    return (torch.randn(shape, device=device) * torch.rand(shape[-1], device=device)).to(dtype)


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


@pytest.mark.parametrize("name", ["nv", "nv squares", "nv rht"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_that_of_the_definition(device, name, shape):
    source = source_of(device, shape)
    quantizer = MAKE[name]()
    tensor = quantizer(source)
    matrix = source.reshape(-1, shape[-1])
    options = {"square": name == "nv squares", "rht": name == "nv rht"}
    expected = microscaled.nvfp4(as_f32(matrix), **options)
    for form, (data, scales, amax) in zip(
        ("rowwise", "columnwise"), (expected[:3], expected[3:]), strict=True
    ):
        found = getattr(tensor, f"_{form}_data")
        assert_same_bits(found.reshape(data.shape), data)
        assert_same_bits(getattr(tensor, f"_{form}_scale_inv"), scales)
        assert_same_bits(getattr(tensor, f"_amax_{form}"), amax)
    values = microscaled.nvfp4_values(*expected[:3], source.dtype)
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


@pytest.mark.parametrize("name", MAKE)
def test_operators_of_torch(device, name):
    quantizer = MAKE[name]()
    source = source_of(device, (144, 160))
    tensor = quantizer(source)
    values = tensor.dequantize()
    for found in (tensor.detach(), tensor.clone(), tensor.cpu()):
        assert_same_tensor(found, tensor)
    for view in (lambda t: t[3:9], lambda t: t.view(-1), lambda t: t.view(12, 12, 160)):
        assert_same_bits(view(tensor).dequantize(), view(values))
    for write in (
        lambda t: t.mul_(3),
        lambda t: t[5:9].zero_(),
        lambda t: t.view(12, 12, 160)[2].fill_(2),
        lambda t: torch._foreach_add_([t], [torch.ones_like(source)]),
    ):
        values = tensor.dequantize()
        write(tensor)
        write(values)
        assert_same_tensor(tensor, quantizer(values))
    before = copy.deepcopy(tensor)
    tensor.quantize_(source, noop_flag=torch.ones(1, device=device))
    assert_same_tensor(tensor, before)
    tensor.copy_(quantizer(source))
    assert_same_tensor(tensor, quantizer(source))


@pytest.mark.parametrize("name", MAKE)
def test_files_and_copies(device, name):
    tensor = MAKE[name]()(source_of(device, (20, 130)))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for found in (loaded, pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert_same_tensor(found, tensor)
        assert found._quantizer._own_settings() == tensor._quantizer._own_settings()
        found.mul_(2)


def test_what_can_not_be():
    with pytest.raises(ValueError, match="fp8_dtype: 7, expected DType.kFloat4E2M1"):
        te.NVFP4Quantizer(7)
    with pytest.raises(ValueError, match="with_rht and with_2d_quantization: give one"):
        te.NVFP4Quantizer(with_rht=True, with_2d_quantization=True)
    for option in ("row_scaled_nvfp4", "nvfp4_use_4over6"):
        with pytest.raises(NotImplementedError, match=f"NVFP4Quantizer: {option} is not there"):
            te.NVFP4Quantizer(**{option: True})
    with pytest.raises(NotImplementedError, match="nvfp4_e4m3_max"):
        te.NVFP4Quantizer(nvfp4_e4m3_max=256)
    tensor = te.NVFP4Quantizer(with_rht=True)(torch.ones(16, 16))
    tensor.update_usage(rowwise_usage=False)
    with pytest.raises(RuntimeError, match="column-wise data are of transformed values"):
        tensor.dequantize()


# ---- parameters and inputs -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "norm-linear", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [(32, 48), (144, 272), (36, 130)])
def test_parameters_have_the_bits_of_a_cast_at_each_call(device, kind, recipe, sizes):
    recipe = RECIPES[recipe]()
    module, plain = (made(lambda: make(kind, device, sizes=sizes), r) for r in (recipe, None))
    x = torch.randn(160, sizes[0], device=device)
    _core.reset_counters()
    expected = step(plain, x, recipe)
    usual = quantized()
    _core.reset_counters()
    found = step(module, x, recipe)
    assert_same_bits(found, expected)
    assert usual - quantized() == 2 * len(weights_of(plain))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    values = {
        name: torch.add(weight.dequantize().detach(), weight.grad, alpha=-0.1)
        for name, weight in weights_of(module).items()
    }
    optimizer.step()
    for name, weight in weights_of(module).items():
        assert_same_tensor(weight.detach(), weight._quantizer(values[name]))


@pytest.mark.parametrize(("one", "other"), [("mx", "nv"), ("nv", "mx"), ("nv", "nv lines")])
def test_another_recipe_is_an_error(device, one, other):
    module = made(lambda: make("linear", device), RECIPES[one]())
    with pytest.raises(RuntimeError, match="BlockScaling does not read"):
        step(module, torch.randn(16, 32, device=device), RECIPES[other]())


@pytest.mark.parametrize(("name", "recipe"), [("mx", "mx"), ("nv", "nv lines"), ("nv rht", "nv")])
def test_inputs_are_not_cast_again(device, name, recipe):
    module, recipe = make("linear", device), RECIPES[recipe]()
    x = torch.randn(2, 16, 32, device=device)
    expected = step(module, x, recipe)
    grad = module.weight.grad.clone()
    module.zero_grad()
    inp = x.clone().requires_grad_()
    tensor = MAKE[name]()(inp)
    _core.reset_counters()
    with region(recipe):
        out = module(tensor)
    out.backward(torch.ones_like(out))
    assert quantized() == 3
    assert_same_bits([out.detach(), inp.grad, module.weight.grad], [*expected[:2], grad])
