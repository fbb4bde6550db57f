# SPDX-License-Identifier: Apache-2.0
"""Views and copies of quantized tensors: they are of the values as these are now, not as they were.

Against plain tensors, on which the same happens; values are few multiples of a unit, which the
format holds.
"""

import copy
import pickle

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import E4M3, current, delayed

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.tensor import IdentityQuantizer

QUANTIZERS = {
    "current": lambda device: current(force_pow_2_scales=True),
    "delayed": delayed,
    "tiles": lambda device: te.Float8BlockQuantizer(E4M3),
    "lines": lambda device: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "rows": lambda device: te.Float8RowQuantizer(E4M3, force_pow_2_scales=True),
    "mxfp8": lambda device: te.MXFP8Quantizer(E4M3),
    "nvfp4": lambda device: te.NVFP4Quantizer(),
    "identity": lambda device: IdentityQuantizer(),
}
VIEWS = {
    "row": lambda t: t[3],
    "rows": lambda t: t[2:9],
    "columns": lambda t: t[:, 16:48],
    "strided": lambda t: t[:, ::2],
    "element": lambda t: t[1, 2],
    "of a part": lambda t: t[4:12][1:3],
    "of a strided part": lambda t: t[:, ::2][2:6],
    "split": lambda t: t.split(8)[1],
    "unbound": lambda t: t.unbind(0)[5],
    "flat": lambda t: t.view(-1)[30:100],
    "transposed": lambda t: t.t(),
    "of a transposed part": lambda t: t[4:12].permute(1, 0)[3:9, 2:],
    "diagonal": lambda t: t.diagonal(1),
    "by strides": lambda t: t[2:9].as_strided((3, 4), (70, 2)),
    "unfolded": lambda t: t.unfold(1, 4, 4)[:, 3],
    "detached": lambda t: t.detach()[7:9].detach(),
}
SHAPE = (32, 64)


def unit_of(name):
    """NVFP4 has multiples of its largest magnitude over 2688, which is 21 times a power of two."""
    return 1.75 if name == "nvfp4" else 1.0


def both_of(device, name):
    """A quantized tensor, and the same values in a plain one."""
    values = torch.randint(-3, 4, SHAPE, device=device).float() / 2
    values[:, ::16] = 3.0  # all groups have one scale
    values *= unit_of(name)
    return QUANTIZERS[name](device)(values), values


def assert_same(found, expected):
    assert torch.equal(found.dequantize(), expected)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_is_written_to_a_view_is_read_from_it(device, name, view):
    pair = both_of(device, name)
    views = [view(whole) for whole in pair]
    for part in views:
        part.zero_()
        part.add_(1.5 * unit_of(name)).mul_(2)
    assert_same(*views)
    assert_same(views[0] * 2, views[1] * 2)
    assert_same(*pair)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_follows_the_whole(device, name, view):
    pair = both_of(device, name)
    views = [view(whole) for whole in pair]
    assert_same(*views)
    others = torch.randint(-1, 2, SHAPE, device=device).float() * 3 * unit_of(name)
    for whole in pair:
        whole.copy_(others)
    assert_same(*views)
    for whole in pair:
        whole[0:16].fill_(1.5 * unit_of(name))
        whole[:, ::16] = 3.0 * unit_of(name)
    assert_same(*views)
    assert_same(copy.deepcopy(views[0]), views[1])
    assert_same(views[0].clone(), views[1])
    assert_same(pickle.loads(pickle.dumps(views[0])), views[1])


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("kind", ["row", "rows", "columns", "strided", "split", "line"])
def test_a_view_takes_values_when_it_is_read(device, name, kind, monkeypatch):
    """FSDP2 keeps each weight as a line, too, and reads none."""
    view = {**VIEWS, "line": lambda t: t.view(-1)}[kind]
    whole, values = both_of(device, name)
    reads, read = [], type(whole)._dequantized
    monkeypatch.setattr(type(whole), "_dequantized", lambda *given: reads.append(1) or read(*given))
    found, expected = view(whole), view(values)
    assert not reads
    assert (found.shape, found.stride(), found.dtype) == (
        expected.shape, expected.stride(), expected.dtype,
    )  # fmt: skip
    assert_same(found, expected)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_copied_to_a_view(device, name, view):
    """Both have the values of their wholes; they share no memory with these."""
    into, source = both_of(device, name), both_of(device, name)
    for whole, other in zip(into, source, strict=True):
        view(whole).copy_(view(other))
    assert_same(*into)
    for whole, other in zip(into, source, strict=True):
        whole[0:2] = other[2:4]
    assert_same(*into)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_copied_codes_count_as_a_write(device, name):
    """Through whatever stands for the whole: views of it see them, and so does autograd."""
    for alias in (lambda t: t, torch.Tensor.detach, lambda t: t.data, lambda t: t.unsqueeze(0)):
        whole, (source, values) = both_of(device, name)[0], both_of(device, name)
        part, version = whole[3:5], whole.get_data_tensors()[0]._version
        assert_same(part, whole.dequantize()[3:5])
        alias(whole).copy_(alias(source))
        assert whole.get_data_tensors()[0]._version > version
        assert_same(whole, values)
        assert_same(part, values[3:5])


def test_a_transpose_that_was_made_apart_is_not_read_after_a_copy(device):
    whole = current(columnwise=False)(torch.randn(SHAPE, device=device))
    alias = whole.detach()
    whole.update_usage(columnwise_usage=True)
    alias.copy_(current(columnwise=False)(torch.randn(SHAPE, device=device)))
    assert whole._transpose_invalid


@pytest.mark.parametrize("name", QUANTIZERS)
def test_strides_are_those_of_plain_tensors(device, name):
    whole, values = both_of(device, name)
    for view in VIEWS.values():
        part, expected = view(whole), view(values)
        assert part.stride() == expected.stride()
        assert_same(part.reshape(-1), expected.reshape(-1))
        assert_same(part.contiguous(), expected)


# ---- random programs -----------------------------------------------------------------------------

SHAPES = [(32, 48), (5, 20), (3, 4, 16), (2, 7, 33), (130, 140), (40,), (1, 16), (16, 1)]
WRITES = [
    lambda t, v: t.zero_(),
    lambda t, v: t.fill_(1.3),
    lambda t, v: t.add_(v, alpha=0.5),
    lambda t, v: t.mul_(v.abs() + 0.5),
    lambda t, v: t.copy_(v),
    lambda t, v: t.masked_fill_(v > 0, 0.7),
    lambda t, v: t.clamp_(-0.5, 0.5),
    lambda t, v: torch._foreach_mul_([t], 0.9),
    lambda t, v: torch._foreach_addcdiv_([t], [v], [v.abs() + 1], value=0.1),
]


def some_view(rng, shape):
    """A function that makes a view of a tensor of this shape."""
    first = int(rng.integers(shape[0]))
    end = int(rng.integers(first, shape[0])) + 1
    at = int(rng.integers(shape[-1]))
    return [
        lambda t: t[first:end],
        lambda t: t[..., at:],
        lambda t: t[..., ::2],
        lambda t: t.unsqueeze(0),
        lambda t: t[first],
        lambda t: t.split(first + 1)[0],
        lambda t: t.chunk(2, -1)[0],
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.reshape(-1) if t.is_contiguous() else t,
        lambda t: t.transpose(0, -1),
        lambda t: t.unflatten(0, (1, -1)),
        lambda t: t.as_strided((shape[0],), (1,)),
    ][rng.integers(13)]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_random_programs_of_views_and_writes(device, name, rng):
    """After each write the tensor is the cast of what a plain one is then, and so are all views."""
    quantizer = QUANTIZERS[name](device)
    for _ in range(40):
        whole = quantizer(torch.randn(SHAPES[rng.integers(len(SHAPES))], device=device))
        values, alive = whole.dequantize(), []
        for _ in range(4):
            chain, part, expected = [], whole, values
            for _ in range(rng.integers(4)):
                if expected.dim() == 0 or expected.numel() == 0:
                    break
                view = some_view(rng, tuple(expected.shape))
                chain.append(view)
                part, expected = view(part), view(expected)
            assert_same(part, expected)
            alive.append((part, chain))
            write = WRITES[rng.integers(len(WRITES))]
            other = torch.randn(expected.shape, device=device)
            write(part, other)
            write(expected, other)
            again = quantizer(values)
            values.copy_(again.dequantize())
            assert_same(whole, values)
            for field, cast in again._fields().items():
                found = getattr(whole, field)
                stale = field == "_transpose" and whole._transpose_invalid  # an alias was written
                if isinstance(cast, torch.Tensor) and not stale:
                    assert torch.equal(found, cast)
            for seen, views in alive:
                expected = values
                for view in views:
                    expected = view(expected)
                assert_same(seen, expected)


def test_views_of_inference_mode(device):
    """Versions do not tell there; outside, the values of then can not be written to."""
    with torch.inference_mode():
        whole, values = both_of(device, "tiles")
        part = whole[2:9]
        whole.mul_(0.5)
        values.mul_(0.5)
        assert_same(part, values[2:9])
    assert_same(part, values[2:9].clone())


# ---- forms ---------------------------------------------------------------------------------------

COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "to": lambda t: t.to(t.device, copy=True),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_transpose_of_other_data_is_not_copied(device, make):
    """Bytes that were put in place, by a gather say, have none until it is asked for."""
    tensor = current()(torch.randn(SHAPE, device=device))
    assert not make(tensor)._transpose_invalid
    tensor._data.copy_(tensor._data.flip(0))
    assert tensor._transpose_invalid
    made = make(tensor)
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    made.update_usage(columnwise_usage=True)
    assert_same_bits(made._transpose, tensor._data.t().contiguous())
    assert not make(made)._transpose_invalid


def test_a_transpose_of_data_that_were_replaced_is_not_read(device):
    """Other bytes may have the version that the old ones had."""
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        module = te.Linear(64, 32, bias=False, device=device)
    weight = module.weight
    weight.update_usage(columnwise_usage=True)
    for replace in (
        lambda data: setattr(weight, "_data", data),
        lambda data: weight._data.copy_(data),
        lambda data: setattr(weight._data, "data", data),
        lambda data: setattr(weight, "_data", weight._data),
    ):
        assert not weight._transpose_invalid
        data = weight._data.flip(0)
        kept = weight._data.clone()
        replace(data)
        assert weight._transpose_invalid == (not torch.equal(weight._data, kept))
        assert weight.get_usages()["columnwise"] != weight._transpose_invalid
        x = torch.randn(16, 64, device=device, requires_grad=True)
        expected = x.detach().clone().requires_grad_()
        other = copy.deepcopy(module)
        other.weight.update_usage(columnwise_usage=False)
        for one, given in ((module, x), (other, expected)):
            with te.autocast(recipe=recipe):
                out = one(given)
            out.backward(torch.arange(512, device=device).view(16, 32).to(out.dtype))
        assert_same_bits(x.grad, expected.grad)
        weight.update_usage(columnwise_usage=True)
        assert_same_bits(weight._transpose, weight._data.t().contiguous())


@pytest.mark.parametrize("make", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_storages_are_copied_with_their_transpose(device, make):
    quantizer = current()
    quantizer.internal = True
    storage = quantizer(torch.randn(SHAPE, device=device))
    made = make(storage)
    made.update_usage(columnwise_usage=True)
    assert_same_bits(made._transpose, storage._transpose)
    assert_same_bits(made.dequantize(), storage.dequantize())


def test_a_parameter_of_gathered_bytes_that_was_copied(device):
    """Its backward reads no transpose of the bytes before."""
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe):
        modules = [te.Linear(64, 32, bias=False, device=device) for _ in range(2)]
    modules[1].weight.update_usage(columnwise_usage=True)
    for module in modules:
        with torch.no_grad():
            module.weight._data.copy_(modules[0].weight._data.flip(0))
            module.weight._scales.copy_(modules[0].weight._scales)
    modules[1] = copy.deepcopy(modules[1])
    modules[1].weight._data.copy_(modules[0].weight._data)
    modules[1] = copy.deepcopy(modules[1])
    x = torch.randn(16, 64, device=device)
    grads = []
    for module in modules:
        leaf = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            out = module(leaf)
        out.backward(torch.ones_like(out))
        grads.append(leaf.grad)
    assert_same_bits(*grads)


@pytest.mark.parametrize("transformed", [True, False])
def test_what_is_transformed_stays_so(device, transformed):
    """Whoever writes: the layout is the tensor's, and copies of another one are cast."""
    source, other = torch.randn(2, *SHAPE, device=device)
    own, foreign = (
        te.NVFP4Quantizer(with_rht=transformed),
        te.NVFP4Quantizer(with_rht=not transformed),
    )
    rows_alone = te.NVFP4Quantizer(with_rht=transformed, columnwise=False)
    expected = own(source)
    for write in (
        lambda t: foreign.update_quantized(source, t),
        lambda t: rows_alone.update_quantized(source, t),
        lambda t: own.update_quantized(source, t),
    ):
        tensor = own(other)
        write(tensor)
        assert tensor._with_rht == transformed
        assert_same_bits(tensor._columnwise_data, expected._columnwise_data)
        assert_same_bits(tensor._amax_columnwise, expected._amax_columnwise)
    tensor, of_another = own(other), foreign(source)
    tensor.copy_(of_another)
    assert_same_bits(tensor._columnwise_data, own(of_another.dequantize())._columnwise_data)


def test_squares_stay_squares(device):
    """The same of scales that 16 x 16 values share."""
    source = torch.randn(SHAPE, device=device)
    square, lines = te.NVFP4Quantizer(with_2d_quantization=True), te.NVFP4Quantizer()
    tensor = square(torch.ones_like(source))
    lines.update_quantized(source, tensor)
    assert_same_bits(tensor._rowwise_scale_inv, square(source)._rowwise_scale_inv)
    tensor.copy_(lines(source))
    expected = square(lines(source).dequantize())
    assert_same_bits(tensor._rowwise_scale_inv, expected._rowwise_scale_inv)


# ---- bytes of a program --------------------------------------------------------------------------


def test_bytes_between_others(device):
    """What lies where padding would is no part of the tensor: not in a GEMM either."""
    recipe = Float8CurrentScaling()
    source = torch.randn(32, 40, device=device)
    known = current(columnwise=False)(source)
    buffer = torch.full((32, 48), 0x7F, dtype=torch.uint8, device=device)  # NaN
    buffer[:, :40] = known._data
    given = {"fp8_scale_inv": known._scale_inv.clone(), "fp8_dtype": E4M3}
    tensor = te.Float8Tensor(shape=source.shape, data=buffer[:, :40], **given)
    assert_same_bits(tensor.dequantize(), known.dequantize())
    module = te.Linear(40, 16, bias=False, device=device)
    with torch.no_grad(), te.autocast(recipe=recipe):
        expected = module(known)
        assert_same_bits(module(tensor), expected)
        buffer[:, 40:] = 0
        padded = te.Float8Tensor(shape=source.shape, data=buffer[:, :40], **given)
        assert_same_bits(module(padded), expected)
    assert padded._data.data_ptr() == buffer.data_ptr()  # these are padding
    quantizer = delayed(device)
    buffer[:, 40:] = 0x7F
    made = quantizer.create_tensor_from_data(buffer[:, :40])
    assert not made._data.is_set_to(buffer[:, :40])
    rows = te.Float8RowTensor(
        shape=source.shape, rowwise_data=buffer[:, :40], fp8_dtype=E4M3,
        rowwise_scale_inv=torch.ones(2, 32, device=device),
    )  # fmt: skip
    assert rows._rowwise_data.is_contiguous()


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name != "identity"])
def test_what_is_no_matrix_of_numbers(device, name):
    quantizer = QUANTIZERS[name](device)
    label = type(quantizer).__name__
    with pytest.raises(TypeError, match=f"{label}: tensor: torch.int64, expected a floating dtype"):
        quantizer(torch.ones(4, 16, dtype=torch.int64, device=device))
    assert quantizer(torch.ones(4, 0, device=device)).dequantize().shape == (4, 0)
    with pytest.raises(ValueError, match="fp8_dtype: None, expected DType"):
        te.Float8BlockwiseQTensor(shape=(1, 16), rowwise_data=torch.zeros(1, 16).byte())
