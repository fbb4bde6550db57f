# SPDX-License-Identifier: Apache-2.0
"""What tensors of every format with scales of its parts do: operators, files, parameters."""

import copy
import io
import pickle

import pytest
import torch
from device_kinds import every_device, our_kernels
from pytorch.helpers import assert_same_bits, counted, same_draws
from pytorch.module_cases import make, quantized, region, step, weights_of
from pytorch.quantized_cases import (
    FORMATS,
    WEIGHT_RECIPES,
    assert_same_tensor,
    made,
    source_of,
    twins,
)

import transformer_engine.pytorch as te

pytestmark = every_device


def test_every_class_has_its_own_dequantize():
    """Writers of checkpoints look for it in the class itself."""
    import transformer_engine.pytorch.tensor as tensors

    found = [getattr(tensors, name) for name in tensors.__all__ if name.endswith("Tensor")]
    kinds = [kind for kind in found if issubclass(kind, tensors.QuantizedTensor)]
    assert len(kinds) >= 7
    for kind in kinds:
        assert "dequantize" in vars(kind) and kind.dequantize is tensors.QuantizedTensor.dequantize


@our_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_operators_of_torch(device, name):
    quantizer = FORMATS[name]()
    source = source_of(device, (144, 160))
    tensor = quantizer(source)
    values = tensor.dequantize()
    for found in (tensor.detach(), tensor.clone(), tensor.cpu()):
        assert_same_tensor(found, tensor)
    for found in (tensor.view(12, 12, 160), tensor[None]):
        assert type(found) is type(tensor) or isinstance(tensor, te.NVFP4Tensor)  # half bytes
        assert_same_bits(found.dequantize(), values.view(found.shape))
    for view in (lambda t: t[3:9], lambda t: t.view(-1), lambda t: t.chunk(3)[1]):
        assert_same_bits(view(tensor).dequantize(), view(values))
    assert type(tensor + 1) is torch.Tensor
    place = tensor._rowwise_data.data_ptr()
    for write in (
        lambda t: t.mul_(3),
        lambda t: t[5:9].zero_(),
        lambda t: t.view(-1)[77:99].fill_(2),
        lambda t: t.view(12, 12, 160)[2].fill_(2),
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


@pytest.mark.parametrize("name", FORMATS)
def test_files_and_copies(device, name):
    tensor = FORMATS[name]()(source_of(device, (20, 130)))
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


@pytest.mark.parametrize("kind", ["linear", "norm-linear", "swiglu"])
@pytest.mark.parametrize("recipe", WEIGHT_RECIPES)
@pytest.mark.parametrize("sizes", [(32, 48), (144, 272), (36, 130)])
def test_parameters_have_the_bits_of_a_cast_at_each_call(device, kind, recipe, sizes):
    recipe = WEIGHT_RECIPES[recipe]()
    module, plain = twins(lambda: make(kind, device, sizes=sizes), recipe, None)
    assert len([w for w in module.parameters() if isinstance(w, te.QuantizedTensor)]) == len(
        weights_of(plain)
    )
    x = torch.randn(160, sizes[0], device=device)
    with counted() as gemms:
        expected = step(plain, x, recipe)
    usual, all_gemms = quantized(), (gemms.fp8, gemms.other)
    with counted() as gemms:
        found = step(module, x, recipe)
    assert_same_bits(found, expected)
    assert (gemms.fp8, gemms.other) == all_gemms
    assert usual - quantized() == 2 * len(weights_of(plain))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    values = {
        name: torch.add(weight.dequantize().detach(), weight.grad, alpha=-0.1)
        for name, weight in weights_of(module).items()
    }
    optimizer.step()
    for name, weight in weights_of(module).items():
        assert_same_tensor(weight.detach(), weight._quantizer(values[name]))


OTHERS = [
    ("block", "block lines"),
    ("block", "row"),
    ("block", "mx"),
    ("row", "block lines"),
    ("row", "block"),
    ("mx", "nv"),
    ("mx", "row"),
    ("nv", "mx"),
    ("nv", "nv lines"),
]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_another_recipe_is_an_error(device, one, other):
    module = made(lambda: make("linear", device), WEIGHT_RECIPES[one]())
    with pytest.raises(RuntimeError, match="Scaling does not read"):
        step(module, torch.randn(16, 32, device=device), WEIGHT_RECIPES[other]())


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", ["block", "row", "mx", "nv"])
def test_compiled_modules(place, recipe):
    results = []
    recipe = WEIGHT_RECIPES[recipe]()
    for compiled in (False, True):
        torch._dynamo.reset()
        with same_draws(place):
            module = made(lambda: make("linear", place), recipe)
            x = torch.randn(16, 32, device=place).requires_grad_()
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        with region(recipe):
            out = call(x)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), x.grad, module.weight.grad])
    assert_same_bits(*results)
