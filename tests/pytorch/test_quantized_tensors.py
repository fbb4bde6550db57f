# SPDX-License-Identifier: Apache-2.0
"""Quantizers and quantized tensors: codes, forms, updates, what is kept of them and how."""

import copy
import io
import pickle
import pickletools

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import (
    E4M3,
    E5M2,
    FP8,
    assert_same_tensor,
    codes_of,
    current,
    delayed,
    parameter,
    quantized,
    scale_of,
    values_of,
)

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import IdentityTensor

pytestmark = every_device

SHAPES = [(16, 32), (3, 5, 48), (7, 9), (2, 3, 13), (24,), (0, 16), (1, 1)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def source_of(device, shape, dtype=torch.bfloat16, spread=1.0):
    return (torch.randn(shape, device=device) * spread).to(dtype)


# ---- casts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_definition(device, shape, kind, dtype):
    source = source_of(device, shape, dtype)
    found = current(kind)(source)
    assert found.dtype == dtype and found.shape == shape and found.device == source.device
    scale = scale_of(source, kind) if source.numel() else torch.ones((), device=device)
    assert_same_bits(found._data, codes_of(source, scale, kind))
    assert_same_bits(found._scale_inv, scale.reciprocal().reshape(1))
    assert_same_bits(found.dequantize(), values_of(found._data, scale, kind, dtype))
    rows = found._data.reshape(-1, shape[-1])
    assert_same_bits(found._transpose.reshape(shape[-1], -1), rows.t().contiguous())
    assert found._transpose.shape == (shape[-1], *shape[:-1])


@pytest.mark.parametrize("kind", FP8)
def test_delayed_casts_with_its_scale_and_raises_its_amax(device, kind):
    quantizer = delayed(device, 8.0, kind)
    sources = [source_of(device, (16, 32), spread=s) for s in (100.0, 1.0)]
    for source in sources:
        found = quantizer(source)
        assert_same_bits(found._data, codes_of(source, quantizer.scale, kind))
        assert found._scale_inv.item() == 0.125
    assert quantizer.amax.item() == max(s.float().abs().max().item() for s in sources)
    quantizer.calibrate(sources[1])
    assert quantizer.amax.item() == sources[1].float().abs().max().item()


@pytest.mark.parametrize(("power_2", "epsilon"), [(True, 0.0), (False, 3e4), (True, 3e4)])
def test_options_of_the_scale(device, power_2, epsilon):
    source = source_of(device, (16, 32), torch.float32)
    found = current(E4M3, force_pow_2_scales=power_2, amax_epsilon=epsilon)(source)
    scale = scale_of(source, E4M3, power_2, epsilon)
    assert_same_bits(found._scale_inv, scale.reciprocal().reshape(1))
    assert_same_bits(found._data, codes_of(source, scale, E4M3))


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 1e-40, 3e38])
def test_values_at_the_ends(device, value):
    source = source_of(device, (16, 32), torch.float32)
    source[3, 5] = value
    found = current()(source).dequantize()
    others = torch.ones_like(source, dtype=torch.bool)
    others[3, 5] = False
    assert found[others].isfinite().all()
    zeros = current()(torch.zeros(16, 32, device=device))
    assert zeros.dequantize().abs().max() == 0 and zeros._scale_inv.item() == 1


def test_doubles_are_read_in_fp32(device):
    source = torch.randn(16, 32, device=device, dtype=torch.float64)
    found = current()(source)
    assert found.dtype is torch.float64
    assert_same_bits(found._data, current()(source.float())._data)


# ---- quantizers ----------------------------------------------------------------------------------


def test_usages_say_which_forms_are_made(device):
    source = source_of(device, (16, 32))
    quantizer = current(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    row = quantizer(source)
    assert row._transpose is None and row.get_usages() == quantizer.get_usages()
    quantizer.set_usage(rowwise=False, columnwise=True)
    column = quantizer(source)
    assert column._data is None and column.get_usages() == {"rowwise": False, "columnwise": True}
    assert_same_bits(column.dequantize(), row.dequantize())
    quantizer.set_usage(columnwise=False)
    with pytest.raises(ValueError, match="neither usage is set"):
        quantizer(source)


def test_forms_are_made_and_dropped(device):
    tensor = quantized(device, columnwise=False)
    tensor.update_usage(columnwise_usage=True)
    assert_same_bits(tensor._transpose, tensor._data.t().contiguous())
    assert not tensor._transpose_invalid
    values = tensor.dequantize()
    tensor.update_usage(rowwise_usage=False)
    assert tensor._data is None
    assert_same_bits(tensor.dequantize(), values)
    with pytest.raises(RuntimeError, match="row-wise data were dropped"):
        tensor.update_usage(rowwise_usage=True)
    tensor.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="it has no data"):
        tensor.dequantize()


def test_a_transpose_is_of_the_data_as_they_are(device):
    """A program that writes bytes leaves no transpose of older ones behind."""
    tensor = quantized(device)
    tensor._data.copy_(quantized(device)._data)
    assert tensor._transpose_invalid and not tensor.get_usages()["columnwise"]
    tensor.update_usage(columnwise_usage=True)
    assert_same_bits(tensor._transpose, tensor._data.t().contiguous())
    alias = tensor.detach()
    alias.update_usage(columnwise_usage=False)
    alias.zero_()
    assert tensor._transpose_invalid and tensor.dequantize().abs().max() == 0


def test_an_update_writes_all_forms(device):
    tensor, source = quantized(device), source_of(device, (32, 48), spread=5.0)
    places = tensor._data.data_ptr(), tensor._transpose.data_ptr(), tensor._scale_inv.data_ptr()
    version = tensor._version
    assert tensor.quantize_(source) is tensor
    assert_same_tensor(tensor, current()(source))
    now = tensor._data.data_ptr(), tensor._transpose.data_ptr(), tensor._scale_inv.data_ptr()
    assert now == places and tensor._data._version > 0 and tensor._version >= version
    with pytest.raises(ValueError, match=r"src: shape \(3,\), expected that of dst, \(32, 48\)"):
        tensor.quantize_(source[0, :3])


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_noop_flag_keeps_everything(device, recipe):
    source = source_of(device, (32, 48))
    quantizer = current() if recipe == "current" else delayed(device)
    tensor = quantizer(source)
    before, amax = copy.deepcopy(tensor), getattr(quantizer, "amax", torch.zeros(1)).clone()
    flag = torch.ones(1, device=device)
    tensor.quantize_(4 * source, noop_flag=flag)
    assert_same_tensor(tensor, before)
    assert_same_bits(getattr(quantizer, "amax", amax), amax)
    tensor.quantize_(4 * source, noop_flag=flag.zero_())
    assert_same_tensor(tensor, (current() if recipe == "current" else delayed(device))(4 * source))


def test_out_and_empty_tensors(device):
    quantizer = current()
    out = quantizer.make_empty((32, 48), dtype=torch.float16, device=device, requires_grad=True)
    assert out.dtype is torch.float16 and out.requires_grad and out.device.type == device
    source = source_of(device, (32, 48), torch.float16)
    with torch.no_grad():
        assert quantizer(source, out=out) is out
    assert_same_bits(out._data, quantizer(source)._data)
    assert quantizer(source, dtype=torch.bfloat16).dtype is torch.bfloat16
    several = quantizer.multi_quantize([source, source[:8]])
    assert [tuple(t.shape) for t in several] == [(32, 48), (8, 48)]
    assert quantizer.is_quantizable(source) and not quantizer.is_quantizable(source.int())
    assert quantizer.get_columnwise_shape((2, 3, 4)) == (4, 2, 3)


def test_gradients_pass_unchanged(device):
    source = source_of(device, (16, 32)).requires_grad_()
    tensor = current()(source)
    assert tensor.requires_grad and not tensor.is_leaf
    weights = torch.randn(16, 32, device=device, dtype=torch.bfloat16)
    (tensor.dequantize() * weights).sum().backward()
    assert_same_bits(source.grad, weights)
    source.grad = None
    (current()(source) * weights).sum().backward()
    assert_same_bits(source.grad, weights)


def test_bytes_of_a_program(device):
    """Data that a program has cast itself, with or without padding that plans want."""
    for shape in ((16, 32), (6, 10)):
        source = source_of(device, shape, torch.float32)
        known = current()(source)
        given = {"data": known._data.contiguous(), "fp8_scale_inv": known._scale_inv.clone()}
        tensor = te.Float8Tensor(shape=shape, dtype=torch.float32, fp8_dtype=E4M3, **given)
        assert_same_bits(tensor.dequantize(), known.dequantize())
        tensor.copy_(2 * source)  # it has no quantizer: it is cast as fits
        assert_same_bits(tensor.dequantize(), current()(2 * source).dequantize())
    quantizer = delayed(device)
    tensor = quantizer.create_tensor_from_data(known._data, torch.bfloat16, requires_grad=True)
    assert tensor.requires_grad and tensor._scale_inv.item() == 0.125
    other = te.Float8Tensor.make_like(known, dtype=torch.float16)
    assert other.dtype is torch.float16 and other._data is known._data
    with pytest.raises(ValueError, match="fp8_dtype: 6, expected DType.kFloat8E4M3"):
        te.Float8Tensor(shape=(1, 16), fp8_dtype=6, **given)
    with pytest.raises(TypeError, match="data: torch.float32, expected torch.uint8"):
        te.Float8Tensor(shape=(16, 32), data=source, fp8_scale_inv=known._scale_inv)
    with pytest.raises(ValueError, match="data and data_transpose are None"):
        te.Float8TensorStorage(fp8_scale_inv=known._scale_inv, fp8_dtype=E4M3)


# ---- storages ------------------------------------------------------------------------------------


def test_an_internal_quantizer_makes_storages(device):
    quantizer = current()
    quantizer.internal = True
    source = source_of(device, (16, 32))
    storage = quantizer(source)
    assert isinstance(storage, te.QuantizedTensorStorage)
    assert not isinstance(storage, torch.Tensor) and storage.dtype is torch.bfloat16
    assert storage.size() == source.shape and storage.size(0) == 16
    assert storage.device == source.device
    assert_same_bits(storage.dequantize(), current()(source).dequantize())
    assert "Float8TensorStorage(fp8_dtype=kFloat8E4M3" in repr(storage)
    storage.quantize_(2 * source)
    assert_same_bits(storage.dequantize(), current()(2 * source).dequantize())


def test_what_autograd_functions_save(device):
    quantizer = current()
    quantizer.internal = True
    storage, plain, tensor = (
        quantizer(source_of(device, (16, 32))),
        torch.ones(3, device=device),
        quantized(device),
    )
    values = storage.dequantize()
    saved, objects = te.prepare_for_saving(plain, storage, None, tensor)
    assert storage._data is None and all(s is None or isinstance(s, torch.Tensor) for s in saved)
    found = te.restore_from_saved(objects, saved)
    assert found[0] is plain and found[1] is storage and found[2] is None and found[3] is tensor
    assert_same_bits(storage.dequantize(), values)
    saved, objects = te.prepare_for_saving(storage)
    found, rest = te.restore_from_saved(objects, [*saved, plain], return_saved_tensors=True)
    assert found == [storage] and rest == [plain]

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved, ctx.tensor_objects = te.prepare_for_saving(quantizer(x), x)
            ctx.save_for_backward(*saved)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            cast, x = te.restore_from_func_ctx(ctx)
            assert ctx.tensor_objects is None and x.shape == cast.shape
            return grad * cast.dequantize()

    x = source_of(device, (16, 32)).requires_grad_()
    Double.apply(x).sum().backward()
    assert_same_bits(x.grad, current()(x.detach()).dequantize())


# ---- other formats -------------------------------------------------------------------------------


def test_identity_keeps_the_values(device):
    source = source_of(device, (16, 32))
    tensor = te.IdentityQuantizer(dtype=torch.float32)(source)
    assert isinstance(tensor, IdentityTensor) and tensor.dtype is torch.bfloat16
    assert tensor._hp_data.dtype is torch.float32
    assert_same_bits(tensor.dequantize(), source)
    tensor.add_(1)
    assert_same_bits(tensor.dequantize(), source + 1)
    tensor.view(-1)[:3].zero_()
    assert tensor.dequantize().view(-1)[:3].abs().max() == 0
    tensor.quantize_(source, noop_flag=torch.ones(1, device=device))
    assert tensor.dequantize().view(-1)[:3].abs().max() == 0
    assert_same_bits(pickle.loads(pickle.dumps(tensor)).dequantize(), tensor.dequantize())


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_hybrid_has_a_format_for_each_form(device, source):
    values = source_of(device, (16, 32))
    quantizer = te.HybridQuantizer(
        rowwise_quantizer=current(E4M3),
        columnwise_quantizer=current(E5M2),
        columnwise_source=source,
    )
    tensor = quantizer(values)
    row, column = tensor._rowwise_storage, tensor._columnwise_storage
    assert_same_bits(tensor.dequantize(), current(E4M3)(values).dequantize())
    of = values if source == "original" else tensor.dequantize()
    assert_same_bits(column._transpose, current(E5M2)(of)._transpose)
    assert row._transpose is None and column._data is None
    copied = tensor.clone()
    tensor.zero_()
    assert tensor.dequantize().abs().max() == 0 and copied.dequantize().abs().max() > 0
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    with pytest.raises(RuntimeError, match="_rowwise_storage was dropped"):
        tensor.update_usage(rowwise_usage=True)
    with pytest.raises(ValueError, match="columnwise_source='both', expected 'original' or"):
        te.HybridQuantizer(
            rowwise_quantizer=current(), columnwise_quantizer=current(), columnwise_source="both"
        )


# ---- copies and files ----------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", [current, lambda: delayed("cpu")])
def test_copies_have_their_own_memory(quantizer):
    tensor = quantizer()(torch.randn(32, 48))
    tensor.tag = [1]
    for copied in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), tensor.clone()):
        assert_same_tensor(copied, tensor)
        assert copied._data.data_ptr() != tensor._data.data_ptr()
        assert type(copied._quantizer) is type(tensor._quantizer)
        copied.zero_()
        assert tensor.dequantize().abs().max() > 0
    assert copy.deepcopy(tensor).tag == [1] and copy.deepcopy(tensor).tag is not tensor.tag


def test_a_parameter_stays_one(device):
    weight = parameter(device)
    weight.grad = torch.ones_like(weight)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert isinstance(copied, torch.nn.Parameter) and isinstance(copied, te.Float8Tensor)
        assert copied.requires_grad and copied.is_leaf
        assert_same_tensor(copied, weight)
    assert_same_bits(copy.deepcopy(weight).grad, weight.grad)


def test_files_are_read_without_executing_anything(device):
    tensors = {
        "a": quantized(device),
        "p": parameter(device),
        "d": delayed(device)(torch.ones(9, 5, device=device)),
    }
    file = io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    for name, tensor in tensors.items():
        assert_same_tensor(found[name], tensor)
    file.seek(0)
    moved = torch.load(file, weights_only=True, map_location="cpu")
    assert moved["a"].device.type == "cpu"
    assert_same_bits(moved["a"].dequantize(), tensors["a"].dequantize().cpu())
    names = {
        argument
        for opcode, argument, _ in pickletools.genops(pickle.dumps(tensors["a"], protocol=2))
        if opcode.name == "GLOBAL" and argument.startswith("transformer_engine")
    }
    assert names == {"transformer_engine.pytorch.tensors rebuild_quantized"}


def test_pickles_of_the_incumbent_are_read(device):
    """They name a function of the class, and give it row-wise data, their scale and a shape."""
    tensor = quantized(device, columnwise=False)
    given = (tensor._data, tensor._fp8_dtype, tensor._scale_inv, tensor.dtype, tensor.shape)

    class Theirs:
        def __reduce__(self):
            return te.Float8Tensor._make_in_reduce_ex, given

    found = pickle.loads(pickle.dumps(Theirs()))
    assert type(found) is te.Float8Tensor and found.get_usages() == tensor.get_usages()
    assert_same_bits(found._data, tensor._data)
    assert_same_bits(found.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("kind", ["Quantizer", "os", "prepare_for_saving", "current"])
def test_a_pickle_of_another_class_is_refused(kind):
    from transformer_engine.pytorch.tensor.pickling import rebuild_quantized, rebuild_quantizer

    with pytest.raises(ValueError, match="is no class of quantized tensors"):
        rebuild_quantized(kind, (1,), torch.float32, {}, None, (False, False, {}))
    if kind != "Quantizer":
        with pytest.raises(ValueError, match="is no class of quantizers"):
            rebuild_quantizer(kind, {})


CRAFTED = {  # by place of an argument: what a file may not say
    1: (None, "ab", {"a": 1}, 5, ("4", 4)),
    2: (None, "float32", torch.int8),
    4: ("ab", {}, ["Float8Quantizer", {}], ("Float8Quantizer",), (1, {})),
    5: (None, (), (False, False), (False, False, [])),
}


@pytest.mark.parametrize("place", CRAFTED)
def test_a_pickle_of_other_parts_is_refused(device, place):
    rebuild, parts = quantized(device).__reduce_ex__(2)[:2]
    for wrong in CRAFTED[place]:
        given = [*parts]
        given[place] = wrong
        with pytest.raises((TypeError, ValueError), match="a pickled Float8Tensor: .*, expected"):
            rebuild(*given)


def test_printing(device):
    text = repr(quantized(device))
    assert text.startswith("Float8Tensor(fp8_dtype=kFloat8E4M3, scale_inv=")
    assert "dtype=torch.bfloat16" in text and "requires_grad=True" in repr(parameter(device))
    assert (
        repr(current())
        == "Float8CurrentScalingQuantizer(dtype=kFloat8E4M3, rowwise=True, columnwise=True)"
    )
    tensor = quantized(device)
    tensor.clear()
    assert repr(tensor) == "Float8Tensor(shape=(32, 48), dtype=torch.bfloat16)"
