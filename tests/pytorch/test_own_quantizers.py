# SPDX-License-Identifier: Apache-2.0
"""Quantizers and quantized tensors of programs: what they define is what is used."""

import copy

import pytest
import torch
from comparators import assert_within
from pytorch.helpers import assert_same_bits
from pytorch.own_quantizers import OWN, Doubled, Halves, HalvesQuantizer, custom, halves_of
from pytorch.quantized_cases import E4M3, FORMATS, current, delayed

import transformer_engine.pytorch as te


def test_a_quantizer_of_three_methods(device):
    quantizer, x = HalvesQuantizer(), torch.randn(4, 8, device=device, requires_grad=True)
    wanted = halves_of(x.detach())
    tensor = quantizer(x)
    assert_same_bits(tensor.dequantize().detach(), wanted)
    tensor.dequantize().sum().backward()
    assert_same_bits(x.grad, torch.ones_like(x))
    for twin in (tensor.detach().clone(), copy.deepcopy(tensor.detach()), tensor.detach() + 0):
        assert_same_bits((twin + 0).detach(), wanted)
    y = torch.randn(4, 8, device=device)
    into = quantizer.make_empty((4, 8), device=device)
    quantizer.update_quantized(y, into)
    assert_same_bits(into.dequantize(), halves_of(y))
    made = quantizer(y)
    assert_same_bits(made.add_(1).dequantize(), halves_of(y) + 1)


def test_values_that_are_assigned(device):
    """A parameter that is given plain values casts them, and those that come later."""
    weight = torch.nn.Parameter(HalvesQuantizer()(torch.randn(4, 8, device=device)))
    weight.main_grad = torch.zeros(4, 8, device=device)
    for shape in ((4, 8), (2, 6)):
        values = torch.randn(shape, device=device)
        weight.data = values
        assert type(weight) is Halves and weight.shape == shape
        assert_same_bits(weight.detach().dequantize(), halves_of(values))
        with torch.no_grad():
            weight.copy_(2 * values)
        assert_same_bits(weight.detach().dequantize(), halves_of(2 * values))
    assert not hasattr(weight.detach().clone(), "main_grad")


class Plain(HalvesQuantizer):
    """What it makes is no quantized tensor."""

    def quantize_impl(self, tensor):
        return tensor.clone()

    def make_empty(self, shape, **options):
        return torch.zeros(shape)


def test_what_is_no_quantized_tensor(device):
    x = torch.randn(4, 16, device=device)
    pair = te.HybridQuantizer(rowwise_quantizer=Plain(), columnwise_quantizer=current())
    weight = Halves.of(x, torch.float32)
    weight.update_quantizer(Plain())
    for method, call in (
        ("quantize_impl", lambda: Plain()(x)),
        ("make_empty", lambda: pair(x)),
        ("make_empty", lambda: setattr(weight, "data", x)),
    ):
        with pytest.raises(TypeError, match=f"Plain.{method}: it returned a Tensor, expected a Qu"):
            call()


def test_an_override_is_obeyed_wherever_it_casts(device):
    """By the call, by writes of torch, into a tensor; of bits that twice the values have."""
    quantizer, plain = Doubled(E4M3, device), current()
    x = torch.randn(16, 32, device=device)
    wanted = plain(x * 2)
    assert_same_bits(quantizer(x)._data, wanted._data)
    into = quantizer.make_empty(x.shape, device=device)
    for write in (lambda: quantizer.update_quantized(x, into), lambda: into.copy_(x)):
        into._data.zero_()
        write()
        assert_same_bits(into._data, wanted._data)
        assert_same_bits(into._scale_inv, wanted._scale_inv)
    quantizer.update_quantized(x * 3, into, noop_flag=torch.ones(1, device=device))
    assert_same_bits(into._data, wanted._data)


@pytest.mark.parametrize("make", [current, lambda **o: delayed("cpu", **o)])
def test_one_scale_holds_a_tensor_without_dims(make):
    x = torch.tensor(1.3)
    for usages in ({}, {"rowwise": False}, {"columnwise": False}):
        found, wanted = make(**usages)(x), make(**usages)(x.reshape(1))
        assert found.shape == () and found.dequantize().shape == ()
        assert_same_bits(found.dequantize().reshape(1), wanted.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_need_a_dim(name):
    quantizer = FORMATS[name]()
    for call in (
        lambda: quantizer(torch.ones(())),
        lambda: quantizer.make_empty((), device="cpu"),
        lambda: quantizer.get_scale_shape((), False),
        lambda: quantizer.inner_tensor_specs(()),
    ):
        with pytest.raises(ValueError, match=r"Quantizer: shape \(\): .*give tensor.reshape\(1\)"):
            call()
    assert not quantizer.is_quantizable(torch.ones(()))


@pytest.mark.parametrize("name", [*FORMATS, "current"])
def test_tensors_of_their_parts(name):
    quantizer = current() if name == "current" else FORMATS[name]()
    parts = quantizer.alloc_tensors((32, 40), device="cpu")
    specs = quantizer.inner_tensor_specs((32, 40))
    assert [(s.ctor_kwarg, s.shape, s.dtype) for s in specs] == [
        (n, tuple(t.shape), t.dtype) for n, t in parts.items()
    ]
    made = quantizer.TENSOR(**parts, **quantizer.create_metadata((32, 40), dtype=torch.bfloat16))
    assert made.shape == (32, 40) and made.dtype == torch.bfloat16
    assert quantizer.is_requantization_safe()
    tensor = quantizer(torch.randn(32, 40))
    again = type(tensor)(tensor.shape, tensor.dtype, **tensor.get_metadata())
    assert_same_bits(again.dequantize(), tensor.dequantize())
    other = tensor.to_dtype(torch.float16)
    assert other.dtype == torch.float16
    assert_same_bits(other.dequantize(dtype=torch.float32), tensor.dequantize())


@pytest.mark.parametrize("name", [*FORMATS, "current"])
def test_what_is_no_tensor(name):
    quantizer = current() if name == "current" else FORMATS[name]()
    tensor, x = quantizer(torch.ones(32, 32)), torch.ones(32, 32)
    for call in (
        lambda: quantizer([1.0]),
        lambda: quantizer.update_quantized([1.0], tensor),
        lambda: quantizer.update_quantized(x, x),
        lambda: quantizer.calibrate([1.0]),
        lambda: quantizer.multi_quantize(x),
        lambda: quantizer.make_empty(3),
        lambda: tensor.quantize_([1.0]),
        lambda: tensor.update_quantizer(3),
        lambda: te.Float8Tensor((4,), torch.float32, x),
        lambda: te.Float8Tensor(shape=(1,), data=[1], fp8_scale_inv=torch.ones(1)),
    ):
        with pytest.raises(TypeError, match="expected"):
            call()


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("name", OWN)
def test_modules_multiply_what_it_makes(device, name, role):
    """Output and gradients are products of its values, beside float64."""
    make, values = OWN[name]

    def factory(asked):
        return make(device) if asked.tensor_type == role else te.IdentityQuantizer()

    layer = te.Linear(32, 64, device=device)
    x = (torch.randn(128, 32, device=device) * 4).requires_grad_()
    grad = torch.randn(128, 64, device=device) * 4
    with te.autocast(recipe=te.recipe.CustomRecipe(qfactory=factory)):
        out = layer(x)
    out.backward(grad)
    parts = {"input": x.detach(), "weight": layer.weight.detach(), "grad_output": grad}
    parts[role] = values(parts[role])
    a, w, g = (parts[name].double() for name in ("input", "weight", "grad_output"))
    expected = a @ w.t() + layer.bias.detach().double(), g @ w, g.t() @ a
    terms = a.abs() @ w.abs().t() + 1, g.abs() @ w.abs(), g.abs().t() @ a.abs()
    for found, exact, size in zip((out, x.grad, layer.weight.grad), expected, terms, strict=True):
        assert_within(found, exact, size, 128)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("step", ["sgd", "adam", "fused sgd", "fused adam"])
def test_optimizers_write_by_it(device, name, step):
    make, values = OWN[name]
    start = torch.randn(64, 128, device=device)
    weight = torch.nn.Parameter(make(device)(start))
    assert_same_bits(weight.detach().dequantize(dtype=torch.float32), values(start))
    twin = torch.nn.Parameter(values(start))
    for param in (weight, twin):
        param.grad = torch.ones_like(twin)
        optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
            "adam": lambda p: torch.optim.AdamW(p, lr=0.5, weight_decay=0.0, foreach=False),
            "fused sgd": lambda p: te.optimizers.FusedSGD(p, lr=0.5),
            "fused adam": lambda p: te.optimizers.FusedAdam(p, lr=0.5),
        }[step]([param])
        optimizer.step()
    assert_same_bits(weight.detach().dequantize(dtype=torch.float32), values(twin.detach()))


class TooFlat(HalvesQuantizer):
    def quantize_impl(self, tensor):
        return Halves.of(tensor[1:], tensor.dtype)


def test_a_quantizer_that_gives_another_shape(device):
    layer = te.Linear(32, 64, device=device)
    with (
        te.autocast(recipe=custom(TooFlat)),
        pytest.raises(ValueError, match="TooFlat: what it made has the shape"),
    ):
        layer(torch.randn(16, 32, device=device))


class Kept(te.QuantizedTensorStorage):
    """Values as they are; a storage, which has no shape but that of what it gives."""

    def __init__(self, values):
        self.values = values

    def dequantize(self, *, dtype=None):
        return self.values.to(dtype or self.values.dtype)


def of_a_storage(change):
    class Quantizer(te.Quantizer):
        def quantize_impl(self, tensor):
            return Kept(change(tensor))

    return Quantizer


def of_a_tensor(change):
    class Changed(Halves):
        def dequantize(self, *, dtype=None):
            return change(self.codes.float() / 2)

    class Quantizer(te.Quantizer):
        def quantize_impl(self, tensor):
            return Changed.of(tensor, tensor.dtype)

    return Quantizer


@pytest.mark.parametrize(
    ("make", "change", "error", "text"),
    [
        (of_a_storage, lambda v: v.t(), ValueError, r"made has the shape .*, expected"),
        (
            of_a_storage,
            lambda v: v[None],
            ValueError,
            r"made has the shape \(1, 16, 32\), expected",
        ),
        (of_a_storage, lambda v: v.view(8, 2, 32), ValueError, r"shape \(8, 2, 32\), expected"),
        (of_a_storage, lambda v: v[:8], ValueError, r"shape \(8, 32\), expected \(16, 32\)"),
        (of_a_storage, lambda v: v[0, 0], ValueError, r"made has the shape \(\), expected"),
        (of_a_tensor, lambda v: v.t(), ValueError, r"Changed.dequantize: it returned the shape"),
        (of_a_tensor, lambda v: v[None], ValueError, r"returned the shape \(1, 16, 32\), expected"),
        (of_a_tensor, lambda v: None, TypeError, r"Changed.dequantize: it returned a NoneType"),
        (of_a_tensor, lambda v: v.tolist(), TypeError, r"it returned a list, expected a plain"),
        (
            of_a_tensor,
            lambda v: HalvesQuantizer()(v),
            TypeError,
            r"it returned a Halves, expected a plain tensor",
        ),
    ],
)
def test_what_it_makes_is_checked(device, make, change, error, text):
    layer, x = te.Linear(32, 32, device=device), torch.randn(16, 32, device=device)
    kind = make(change)

    def factory(role):
        return kind() if role.tensor_type == "input" else te.IdentityQuantizer()

    expected, recipe = layer(x), te.recipe.CustomRecipe(qfactory=factory)
    with pytest.raises(error, match=text), te.autocast(recipe=recipe):
        layer(x)
    assert_same_bits(layer(x), expected)
