# SPDX-License-Identifier: Apache-2.0
"""Tensors with scales of tiles and of rows: codes, forms, operators, files, parameters, inputs."""

import copy
import io
import pickle

import pytest
import reference
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.module_cases import make, quantized, region, step, weights_of
from pytorch.quantized_cases import E4M3, E5M2, FP8, assert_same_tensor, made

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8RowScaling
from transformer_engine.pytorch.constants import TE_DType_To_Torch

MAKE = {
    "tiles": te.Float8BlockQuantizer,
    "tiles f32": lambda *a, **o: te.Float8BlockQuantizer(*a, force_pow_2_scales=False, **o),
    "lines": lambda *a, **o: te.Float8BlockQuantizer(*a, block_scaling_dim=1, **o),
    "rows": te.Float8RowQuantizer,
    "rows power 2": lambda *a, **o: te.Float8RowQuantizer(*a, force_pow_2_scales=True, **o),
}
MODES = {"tiles": "block_2d", "lines": "block_1d", "rows": "row"}
RECIPES = {
    "block": Float8BlockScaling,
    "block f32": lambda: Float8BlockScaling(use_f32_scales=True),
    "block lines": lambda: Float8BlockScaling(w_block_scaling_dim=1, x_block_scaling_dim=2),
    "row": Float8RowScaling,
}
SHAPES = [(32, 48), (3, 7, 130), (129, 36), (300,), (260, 400)]


def source_of(device, shape, dtype=torch.bfloat16):
    return (torch.randn(shape, device=device) * torch.rand(shape[-1], device=device)).to(dtype)


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


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_are_those_of_the_definition(device, name, shape, kind, dtype):
    source = source_of(device, shape, dtype)
    quantizer = MAKE[name](kind)
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
        tensor = MAKE[name](E4M3, columnwise=False)(source)
        with pytest.raises(RuntimeError, match="it has no column-wise data, which are not made"):
            tensor.update_usage(columnwise_usage=True)


@pytest.mark.parametrize("name", MAKE)
def test_operators_of_torch(device, name):
    quantizer = MAKE[name](E4M3)
    source = source_of(device, (144, 160))
    tensor = quantizer(source)
    values = tensor.dequantize()
    for found in (tensor.detach(), tensor.clone(), tensor.view(12, 12, 160), tensor[None]):
        assert type(found) is type(tensor)
        assert_same_bits(found.dequantize(), values.view(found.shape))
    for view in (lambda t: t[3:9], lambda t: t.view(-1), lambda t: t.chunk(3)[1]):
        assert_same_bits(view(tensor).dequantize(), view(values))
    assert type(tensor + 1) is torch.Tensor
    place = tensor._rowwise_data.data_ptr()
    for write in (
        lambda t: t.mul_(3),
        lambda t: t[5:9].zero_(),
        lambda t: t.view(-1)[77:99].fill_(2),
        lambda t: t.__setitem__((slice(1, 3), 7), 8.0),
        lambda t: torch._foreach_add_([t], [torch.ones_like(source)]),
    ):
        values = tensor.dequantize()
        write(tensor)
        write(values)
        assert_same_tensor(tensor, quantizer(values))
    assert tensor._rowwise_data.data_ptr() == place
    before = copy.deepcopy(tensor)
    tensor.quantize_(source, noop_flag=torch.ones(1, device=device))
    assert_same_tensor(tensor, before)
    tensor.copy_(quantizer(source))
    assert_same_tensor(tensor, quantizer(source))


@pytest.mark.parametrize("name", MAKE)
def test_files_and_copies(device, name):
    tensor = MAKE[name](E5M2, amax_epsilon=0.5)(source_of(device, (20, 130)))
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for found in (loaded, pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert_same_tensor(found, tensor)
        assert found._mode() == tensor._mode()
        found.zero_()
        assert tensor.dequantize().abs().max() > 0
        assert found._quantizer._own_settings() == tensor._quantizer._own_settings()
    assert type(tensor).__name__ in repr(tensor)


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


@pytest.mark.parametrize("kind", ["linear", "norm-linear", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [(32, 48), (144, 272), (36, 130)])
def test_parameters_have_the_bits_of_a_cast_at_each_call(device, kind, recipe, sizes):
    recipe = RECIPES[recipe]()
    module, plain = (made(lambda: make(kind, device, sizes=sizes), r) for r in (recipe, None))
    assert len([w for w in module.parameters() if isinstance(w, te.QuantizedTensor)]) == len(
        weights_of(plain)
    )
    x = torch.randn(160, sizes[0], device=device)
    with counted() as gemms:
        expected = step(plain, x, recipe)
    usual = quantized()
    with counted() as gemms:
        found = step(module, x, recipe)
    assert_same_bits(found, expected)
    assert gemms.other == 0 and usual - quantized() == 2 * len(weights_of(plain))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    values = {
        name: torch.add(weight.dequantize().detach(), weight.grad, alpha=-0.1)
        for name, weight in weights_of(module).items()
    }
    optimizer.step()
    for name, weight in weights_of(module).items():
        assert_same_tensor(weight.detach(), weight._quantizer(values[name]))


def test_square_tiles_take_one_byte_an_element(device):
    module = made(lambda: te.Linear(256, 512, device=device), Float8BlockScaling())
    step(module, torch.randn(16, 256, device=device), Float8BlockScaling())
    tensors = [t for t in module.weight.get_data_tensors() if t is not None]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 256 * 512 + 4 * 4 * 4


@pytest.mark.parametrize("one", ["block", "row"])
@pytest.mark.parametrize("other", ["block lines", "row", "block"])
def test_another_recipe_is_an_error(device, one, other):
    if one == other:
        other = "block lines"
    module = made(lambda: make("linear", device), RECIPES[one]())
    with pytest.raises(RuntimeError, match="which Float8.* does not read"):
        step(module, torch.randn(16, 32, device=device), RECIPES[other]())


@pytest.mark.parametrize("recipe", ["block", "row"])
@pytest.mark.parametrize("columnwise", [True, False])
def test_inputs_are_read_where_both_forms_are_there(device, recipe, columnwise):
    """With one alone a backward could not be computed: it is read in high precision then."""
    name = {"block": "lines", "row": "rows"}[recipe]
    quantizer = MAKE[name](E4M3, columnwise=columnwise)
    module, recipe = make("linear", device), RECIPES[recipe]()
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


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", ["block", "row"])
def test_compiled_modules(place, recipe):
    results = []
    recipe = RECIPES[recipe]()
    for compiled in (False, True):
        torch._dynamo.reset()
        module = made(lambda: make("linear", place), recipe)
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        torch.manual_seed(5)
        x = torch.randn(16, 32, device=place).requires_grad_()
        with region(recipe):
            out = call(x)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), x.grad, module.weight.grad])
    assert_same_bits(*results)
