# SPDX-License-Identifier: Apache-2.0
"""Tensors with another format for each form: copies, files, operators and graphs of torch."""

import copy
import io
import pickle
import pickletools

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import E4M3, E5M2, assert_same_tensor, current, delayed, source_of

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import HybridQuantizedTensor
from transformer_engine.pytorch.tensor.pickling import rebuild_storage

PAIRS = {
    "current": (lambda d: current(E4M3), lambda d: current(E5M2)),
    "delayed": (delayed, lambda d: current(E5M2, force_pow_2_scales=True)),
    "tiles": (lambda d: current(), lambda d: te.Float8BlockQuantizer(E4M3)),
    "groups": (lambda d: te.MXFP8Quantizer(E4M3), lambda d: te.NVFP4Quantizer(with_rht=True)),
    "plain": (lambda d: te.Float8RowQuantizer(E4M3), lambda d: te.IdentityQuantizer()),
    "nested": (lambda d: hybrid(d, "current"), lambda d: te.MXFP8Quantizer(E4M3)),
}
"""Quantizers of the row-wise and of the column-wise form, for a device."""


def hybrid(device, name, source="original"):
    """A quantizer of one of these pairs."""
    row, column = PAIRS[name]
    return te.HybridQuantizer(
        rowwise_quantizer=row(device),
        columnwise_quantizer=column(device),
        columnwise_source=source,
    )


def cast(device, name, shape=(32, 48), **options):
    """A quantizer, and what it makes."""
    quantizer = hybrid(device, name, **options)
    return quantizer, quantizer(source_of(device, shape))


def settings_of(quantizer):
    """Settings as a pickle has them, tensors as numbers."""
    name, arguments = quantizer._as_plain()
    plain = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    for part in ("rowwise_quantizer", "columnwise_quantizer"):
        if part in plain:
            plain[part] = settings_of(getattr(quantizer, part))
    return name, plain


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("name", PAIRS)
def test_files_and_copies(device, name, source):
    quantizer, tensor = cast(device, name, (20, 130), source=source)
    quantizer.set_usage(columnwise=True)
    tensor.tag = [1]
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    values = source_of(device, (20, 130))
    copied = copy.deepcopy(tensor)
    for found in (loaded, pickle.loads(pickle.dumps(tensor)), copied):
        assert_same_tensor(found, tensor)
        assert settings_of(found._quantizer) == settings_of(tensor._quantizer)
        assert found.tag == [1] and found.tag is not tensor.tag
        for mine, other in zip(found._storages, tensor._storages, strict=True):
            assert settings_of(mine._quantizer) == settings_of(other._quantizer)
            assert mine._quantizer is not other._quantizer and mine._quantizer.internal
        found.copy_(values)  # cast anew, by a quantizer of its own
        assert_same_tensor(found, hybrid(device, name, source)(values))
        assert not torch.equal(found.dequantize(), tensor.dequantize())
    names = {
        argument
        for opcode, argument, _ in pickletools.genops(pickle.dumps(tensor, protocol=2))
        if opcode.name == "GLOBAL" and argument.startswith("transformer_engine")
    }
    assert names == {"transformer_engine.pytorch.tensors rebuild_quantized"}


@pytest.mark.parametrize("dropped", ["rowwise", "columnwise"])
def test_a_form_that_was_dropped_stays_away(device, dropped):
    _, tensor = cast(device, "groups")
    tensor.update_usage(**{f"{dropped}_usage": False})
    for found in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert found.get_usages() == tensor.get_usages()
        assert_same_tensor(found, tensor)


@pytest.mark.parametrize("name", PAIRS)
def test_a_column_wise_form_alone_is_cast_from_the_same(device, name):
    """Of what the row-wise form stands for, though nobody keeps that."""
    x = source_of(device, (32, 48))
    both = hybrid(device, name, "rowwise_dequantized")(x)
    quantizer = hybrid(device, name, "rowwise_dequantized")
    quantizer.set_usage(rowwise=False)
    alone = quantizer(x)
    both.update_usage(rowwise_usage=False)
    assert_same_tensor(alone, both)


def test_a_parameter_stays_one(device):
    weight = torch.nn.Parameter(cast(device, "tiles")[1])
    weight.grad = torch.ones_like(weight)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert isinstance(copied, torch.nn.Parameter) and isinstance(copied, HybridQuantizedTensor)
        assert copied.requires_grad and copied.is_leaf
        assert_same_tensor(copied, weight)
    assert_same_bits(copy.deepcopy(weight).grad, weight.grad)


def test_files_move_between_devices(device):
    _, tensor = cast(device, "groups")
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert_same_tensor(torch.load(file, weights_only=True, map_location="cpu"), tensor.cpu())


@pytest.mark.parametrize(
    "kind",
    ["Storage", "os", "Float8Tensor", "TwoFormStorage", "QuantizedTensorStorage", torch.Tensor],
)
def test_a_pickled_part_of_another_class_is_refused(kind):
    with pytest.raises(ValueError, match="is no class of storages"):
        rebuild_storage(kind, torch.float32, {}, None)


@pytest.mark.parametrize("name", PAIRS)
def test_a_copy_of_the_same_formats_copies_the_data(device, name):
    """A cast of the values would lose what the column-wise form has of the original."""
    quantizer, tensor = cast(device, name)
    other = quantizer(source_of(device, (32, 48)))
    before = tensor._version
    tensor.copy_(other)
    assert_same_tensor(tensor, other)
    assert tensor._version > before
    tensor.copy_(other.dequantize())
    assert_same_tensor(tensor, quantizer(other.dequantize()))
    other.update_usage(columnwise_usage=False)
    tensor.copy_(other)  # other forms
    assert_same_tensor(tensor, quantizer(other.dequantize()))


def test_storages_of_other_forms_are_not_copied(device):
    _, tensor = cast(device, "tiles")
    other = tensor.clone()
    other.update_usage(columnwise_usage=False)
    with pytest.raises(ValueError, match="src lacks a form that this tensor has"):
        tensor.copy_from_storage(other)


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_update_in_place(device, name):
    weight = torch.nn.Parameter(cast(device, name)[1])
    master = weight.dequantize().detach().requires_grad_()
    grad = source_of(device, (32, 48))
    for tensor in (weight, master):
        tensor.grad = grad.clone()
        torch.optim.SGD([tensor], lr=0.5).step()
    assert_same_tensor(weight.detach(), hybrid(device, name)(master.detach()))


def test_a_quantizer_copies_those_of_its_parts(device):
    quantizer = hybrid(device, "delayed")
    copied = quantizer.copy()
    assert copied.rowwise_quantizer is not quantizer.rowwise_quantizer
    assert copied.rowwise_quantizer.scale is quantizer.rowwise_quantizer.scale
    copied.columnwise_quantizer.set_usage(rowwise=False)
    assert quantizer.columnwise_quantizer.rowwise_usage


def test_what_is_no_part():
    with pytest.raises(TypeError, match="columnwise_quantizer: int, expected a quantizer"):
        te.HybridQuantizer(rowwise_quantizer=current(), columnwise_quantizer=3)


def test_parts_by_their_public_names(device):
    _, tensor = cast(device, "groups")
    assert tensor.rowwise_sub_storage is tensor._rowwise_storage
    tensor.update_usage(columnwise_usage=False)
    assert tensor.columnwise_sub_storage is None


def test_reductions_are_those_of_the_parts():
    """A format whose scales are of groups of powers of two has none."""
    row, column = current(), te.MXFP8Quantizer(E4M3)
    quantizer = te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
    assert not quantizer.with_amax_reduction and quantizer.amax_reduction_group is None
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, "ranks"
    assert row.with_amax_reduction and row.amax_reduction_group == "ranks"
    assert quantizer.with_amax_reduction and quantizer.amax_reduction_group == "ranks"
    assert not hasattr(column, "with_amax_reduction")


class Safe(te.Float8CurrentScalingQuantizer):
    """A quantizer of a program that says whether its casts repeat."""

    safe = True

    def is_requantization_safe(self):
        return self.safe


def test_requantization_is_safe_where_it_is_for_both_parts():
    parts = Safe(E4M3), Safe(E5M2)
    quantizer = te.HybridQuantizer(rowwise_quantizer=parts[0], columnwise_quantizer=parts[1])
    assert quantizer.is_requantization_safe()
    for part in parts:
        part.safe = False
        assert not quantizer.is_requantization_safe()
        part.safe = True


def test_attributes_that_it_has_not(device):
    _, tensor = cast(device, "tiles")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tensor.nothing
    with pytest.raises(AttributeError):
        _ = tensor._rowwise_storage_nothing


COMPILERS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("place", COMPILERS)
@pytest.mark.parametrize("name", [name for name in PAIRS if name != "delayed"])
def test_in_and_out_of_a_graph(place, name):
    """No graph casts by a scale that a quantizer of delayed scaling holds, alone or in a pair."""
    torch._dynamo.reset()
    quantizer = hybrid(place, name)
    x = source_of(place, (16, 64))

    def make(x):
        return quantizer(2 * x)

    def inside(x):
        return quantizer(2 * x).dequantize() + 1

    tensor = torch.compile(make, fullgraph=True, backend="aot_eager")(x)
    assert_same_tensor(tensor, make(x))
    read = torch.compile(lambda t: t.dequantize() + 1, fullgraph=True, backend="aot_eager")
    assert_same_bits(read(tensor), tensor.dequantize() + 1)
    inp, ours = (x.clone().requires_grad_() for _ in range(2))
    out = torch.compile(inside, fullgraph=True, backend="aot_eager")(inp)
    assert_same_bits(out.detach(), inside(x))
    out.sum().backward()
    inside(ours).sum().backward()
    assert_same_bits(inp.grad, ours.grad)


@pytest.mark.parametrize("place", COMPILERS)
def test_graphs_are_those_of_the_formats(place):
    """One that was made for some formats does not run for others."""
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph

    read = torch.compile(lambda t: t.dequantize() + 1, fullgraph=True, backend=backend)
    for name, graphs in (("current", 1), ("current", 1), ("groups", 2), ("tiles", 3)):
        _, tensor = cast(place, name)
        assert_same_bits(read(tensor), tensor.dequantize() + 1)
        assert len(made) == graphs
    tensor.update_usage(rowwise_usage=False)
    assert_same_bits(read(tensor), tensor.dequantize() + 1)


def test_a_transformed_form_is_not_multiplied(device):
    """Of its values there are no others than the transformed ones; the error says which option."""

    def quantizer(role):
        return hybrid(device, "groups") if role.tensor_type == "input" else current()

    module = te.Linear(64, 32, device=device)
    x = torch.randn(32, 64, device=device)
    recipe = te.recipe.CustomRecipe(quantizer)
    with (
        te.autocast(recipe=recipe),
        pytest.raises(NotImplementedError, match=r"NVFP4Quantizer\(with_rht=True\)"),
    ):
        module(x)
