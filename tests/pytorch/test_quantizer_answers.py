# SPDX-License-Identifier: Apache-2.0
"""What quantizers and their tensors answer, and what they make of data that they are given."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from device_kinds import every_device, our_kernels
from pytorch.helpers import assert_same_bits
from pytorch.own_quantizers import Columns, Doubled, HalvesQuantizer, Writes
from pytorch.quantized_cases import (
    E4M3,
    E5M2,
    FORMATS,
    assert_same_tensor,
    current,
    delayed,
    source_of,
)

import transformer_engine.pytorch as te
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.module import _common
from transformer_engine.pytorch.tensor import HybridQuantizedTensor, IdentityTensor

pytestmark = every_device

SHAPES = [(32, 48), (3, 5, 40), (7, 130)]
PAIRS = {
    "hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=current(E5M2)
    ),
    "hybrid of rows": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.NVFP4Quantizer(),
        columnwise_quantizer=te.Float8BlockQuantizer(E4M3),
        columnwise_source="rowwise_dequantized",
    ),
}
QUANTIZERS = {
    **FORMATS,
    "current": current,
    "current e5m2": functools.partial(current, E5M2),
    "identity": te.IdentityQuantizer,
    "identity bf16": functools.partial(te.IdentityQuantizer, dtype=torch.bfloat16),
    **PAIRS,
}


def quantizer_of(name, device):
    return delayed(device, 3.0) if name == "delayed" else QUANTIZERS[name]()


EVERY = [*QUANTIZERS, "delayed"]
PER_TENSOR = ["current", "current e5m2", "delayed"]


def any_bytes(device, shape, kind=E4M3):
    """Codes of finite numbers."""
    codes = torch.randint(256, shape, device=device, dtype=torch.uint8)
    return codes.masked_fill_(~numbers(codes, kind).isfinite(), 0)


def numbers(codes, kind=E4M3):
    """What codes of scale 1 stand for."""
    return codes.view(TE_DType_To_Torch[kind]).float()


# ---- tensors of data -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_data_of_current_scaling(device, kind, shape):
    """Its scale is 1 until the program says another one."""
    codes = any_bytes(device, shape, kind)
    made = current(kind).create_tensor_from_data(codes, torch.bfloat16)
    assert type(made) is te.Float8Tensor and not made.requires_grad
    assert (made.shape, made.dtype) == (torch.Size(shape), torch.bfloat16)
    assert_same_bits(made.dequantize(), numbers(codes, kind).bfloat16())
    assert_same_bits(made._scale_inv, torch.ones(1, device=device))
    made._scale_inv = torch.full((1,), 0.3, device=device)
    assert_same_bits(made.dequantize(dtype=torch.float32), numbers(codes, kind) * made._scale_inv)
    made.update_usage(columnwise_usage=True)
    assert_same_bits(made._transpose, codes.permute(-1, *range(codes.dim() - 1)).contiguous())
    values = source_of(device, shape)
    made.copy_(values)
    assert_same_bits(made._data, current(kind)(values)._data)


@pytest.mark.parametrize("scale", [0.25, 3.7])
def test_data_of_delayed_scaling(device, scale):
    """They were cast with its scale, as new values are."""
    quantizer, codes = delayed(device, scale), any_bytes(device, (32, 48))
    made = quantizer.create_tensor_from_data(codes, torch.float16, requires_grad=True)
    assert made.requires_grad and made.dtype is torch.float16
    inverse = torch.full((1,), scale, device=device).reciprocal()
    assert_same_bits(made.detach().dequantize(), (numbers(codes) * inverse).half())
    values = source_of(device, (32, 48))
    made.detach().copy_(values)
    assert_same_bits(made._data, delayed(device, scale)(values)._data)
    assert_same_bits(quantizer.amax, values.abs().max().float().reshape(1))


@pytest.mark.parametrize("make", [current, lambda: delayed("cpu")])
def test_data_in_a_storage(make):
    codes = any_bytes("cpu", (16, 32))
    inside = make()
    inside.internal = True
    for made in (make().create_tensor_from_data(codes, internal=True),
                 inside.create_tensor_from_data(codes.view(torch.float8_e4m3fn))):  # fmt: skip
        assert type(made) is te.Float8TensorStorage and made.dtype is torch.float32
        assert made._data.data_ptr() == codes.data_ptr()
        assert_same_bits(made._data, codes)
    for wrong in (codes.float(), codes.tolist()):
        with pytest.raises(TypeError, match="create_tensor_from_data: data: .*, expected"):
            make().create_tensor_from_data(wrong)
    with pytest.raises(TypeError, match="create_tensor_from_data: fake_dtype: torch.int8"):
        make().create_tensor_from_data(codes, torch.int8)


@our_kernels
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_data_of_mxfp8(device, kind):
    """A value is its code times two to its group's exponent."""
    quantizer, shape = te.MXFP8Quantizer(E4M3, margin=1), (40, 96)
    codes = any_bytes(device, shape, kind)
    exponents = torch.zeros(quantizer.get_scale_shape(shape), dtype=torch.uint8, device=device)
    exponents[:40, :3] = torch.randint(107, 147, (40, 3), device=device, dtype=torch.uint8)
    made = quantizer.create_tensor_from_data(codes, exponents, torch.float32, kind)
    assert made.get_usages() == {"rowwise": True, "columnwise": False}
    power = torch.ldexp(torch.ones(40, 3, device=device), exponents[:40, :3].int() - 127)
    assert_same_bits(made.dequantize(), numbers(codes, kind) * power.repeat_interleave(32, 1))
    values = source_of(device, shape)
    expected = te.MXFP8Quantizer(kind, margin=1)(values)
    assert_same_bits(made.copy_(values)._rowwise_data, expected._rowwise_data)
    with pytest.raises(ValueError, match=r"rowwise_scale_inv: shape \(4,\), expected"):
        quantizer.create_tensor_from_data(codes, exponents.view(-1)[:4], torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_of_other_columns(device, shape):
    """`make_like(data_transpose=)`: with the same scale, alone or beside data of a program."""
    tensor = current()(source_of(device, shape))
    codes = any_bytes(device, shape)
    turned = codes.permute(-1, *range(codes.dim() - 1)).contiguous()
    wanted = numbers(codes) * tensor._scale_inv
    alone = te.Float8Tensor.make_like(tensor, data_transpose=turned)
    assert alone.get_usages() == {"rowwise": False, "columnwise": True}
    both = te.Float8Tensor.make_like(
        tensor, data=codes, data_transpose=turned, dtype=torch.float32, requires_grad=True
    )
    assert both.requires_grad and both.get_usages() == {"rowwise": True, "columnwise": True}
    for made in (alone, both):
        assert made.shape == tensor.shape and made._transpose.data_ptr() == turned.data_ptr()
        assert_same_bits(made.detach().dequantize(dtype=torch.float32), wanted)
        assert_same_bits(made._scale_inv, tensor._scale_inv)
    assert alone.dtype is tensor.dtype and both.dtype is torch.float32
    for wrong in (codes, turned[:-1]):
        with pytest.raises(ValueError, match="data_transpose: shape .*, expected"):
            te.Float8Tensor.make_like(tensor, data=codes, data_transpose=wrong)


@pytest.mark.parametrize("shape", SHAPES)
def test_caches_that_are_removed(device, shape):
    """The transpose, which is made again of the data; without data it is no cache."""
    tensor = current()(source_of(device, shape))
    values, turned = tensor.dequantize(), tensor._transpose.clone()
    tensor.remove_caches()
    assert tensor._transpose is None
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
    assert_same_bits(tensor.dequantize(), values)
    tensor.update_usage(columnwise_usage=True)
    assert_same_bits(tensor._transpose, turned)
    tensor.update_usage(rowwise_usage=False)
    tensor.remove_caches()
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert_same_bits(tensor.dequantize(), values)


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EVERY)
def test_arguments_beside_the_parts(device, name, shape):
    """Of a tensor and of a storage: with the parts of a cast they make its values again."""
    quantizer = quantizer_of(name, device)
    tensor = quantizer(source_of(device, shape))
    options = quantizer.create_metadata(shape, dtype=torch.bfloat16, requires_grad=True)
    parts = {key: given for key, given in tensor.get_metadata().items() if key not in options}
    assert parts.keys() == quantizer.alloc_tensors(shape, device=device).keys()
    made = quantizer.TENSOR(**parts, **options)
    assert made.requires_grad and made.dtype is torch.bfloat16
    if name in PER_TENSOR:  # whose scale is the inverse of its inverse
        found, expected = ((t._data, t._transpose, t._scale_inv) for t in (made.detach(), tensor))
        assert_same_bits(found, expected)
    else:
        assert_same_tensor(made.detach(), tensor)
    assert_same_bits(made.detach().dequantize(), tensor.dequantize())
    options = quantizer.storage_metadata(torch.float16)
    storage = quantizer.STORAGE(**parts, **options)
    assert type(storage) is quantizer.STORAGE and storage.dtype is torch.float16
    assert storage.shape == shape or name.startswith("nv")  # whose bytes do not say all of it
    wide = tensor.dequantize(dtype=torch.float32)
    found = storage.dequantize(dtype=torch.float32)
    assert_same_bits(found.reshape(-1, found.shape[-1])[:, : shape[-1]], wide.flatten(0, -2))
    quantizer.internal = True
    inner = quantizer.STORAGE(**parts, **quantizer.create_metadata(shape, dtype=torch.float16))
    assert inner.dtype is torch.float16 and inner.shape == shape
    assert_same_bits(inner.dequantize(dtype=torch.float32), wide)


@pytest.mark.parametrize("name", EVERY)
def test_a_view_of_a_storage(device, name):
    """Over the same data, of the same values; ValueError where scales would be of other values."""
    quantizer, shape = quantizer_of(name, device), (6, 8, 48)
    quantizer.internal = True
    storage = quantizer(source_of(device, shape))
    values = storage.dequantize()
    if name in PAIRS:
        with pytest.raises(ValueError, match=r"view: shape \(48, 48\) of \(6, 8, 48\)"):
            storage.view(48, 48)
        return
    for given in ((48, 48), ((48, 48),), (torch.Size((48, 48)),), (-1, 48)):
        made = storage.view(*given)
        assert type(made) is type(storage) and made.shape == (48, 48)
        assert made.dtype is storage.dtype
        assert_same_bits(made.dequantize(), values.view(48, 48))
    mine = [t for t in storage.get_data_tensors() if t is not None]
    assert {t.untyped_storage().data_ptr() for t in made.get_data_tensors() if t is not None} <= {
        t.untyped_storage().data_ptr() for t in mine
    }
    if name in PER_TENSOR or name.startswith("identity"):
        assert_same_bits(storage.view(96, 24).dequantize(), values.view(96, 24))
    else:
        with pytest.raises(ValueError, match=r"view: shape \(96, 24\) of \(6, 8, 48\)"):
            storage.view(96, 24)


@pytest.mark.parametrize("shape", [(32, 64), (5, 48), (2, 3, 40), (7, 1), (3, 17), (96,), (0, 16)])
def test_shapes_in_four_bits(shape):
    """Two values to a byte, in lines of 16 values."""
    quantizer = te.NVFP4Quantizer(columnwise=False)
    found = quantizer.convert_shape_for_fp4(list(shape))
    assert found == (*shape[:-1], math.ceil(shape[-1] / 16) * 8) and isinstance(found, tuple)
    assert found == tuple(quantizer(torch.ones(shape))._rowwise_data.shape)
    with pytest.raises(ValueError, match=r"NVFP4Quantizer: shape \(\)"):
        quantizer.convert_shape_for_fp4(())
    with pytest.raises(TypeError, match=r"NVFP4Quantizer: shape: \[2.0\], expected"):
        quantizer.convert_shape_for_fp4([2.0])


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_answers_by_its_parts(name):
    quantizer, shape = PAIRS[name](), (48, 160)
    row, column = quantizer.rowwise_quantizer, quantizer.columnwise_quantizer
    assert quantizer.get_scale_shape(shape) == row.get_scale_shape(shape)
    assert quantizer.get_scale_shape(shape, True) == column.get_scale_shape(shape, True)
    assert quantizer.get_columnwise_shape(shape) == column.get_columnwise_shape(shape)
    assert quantizer.is_quantizable(torch.ones(shape))
    for wrong in (torch.ones(()), torch.ones(shape, dtype=torch.int32)):
        assert not quantizer.is_quantizable(wrong)
    with pytest.raises(NotImplementedError, match="ask rowwise_quantizer and columnwise_quantizer"):
        quantizer.inner_tensor_specs(shape)


def test_a_class_that_does_not_say_what_it_makes():
    quantizer = HalvesQuantizer()
    for name, call in {
        "inner_tensor_specs": lambda: quantizer.inner_tensor_specs((4, 4)),
        "alloc_tensors": lambda: quantizer.alloc_tensors((4, 4)),
        "storage_metadata": lambda: quantizer.storage_metadata(torch.float32),
        "create_metadata": lambda: quantizer.create_metadata((4, 4), dtype=torch.float32),
    }.items():
        with pytest.raises(NotImplementedError, match=f"HalvesQuantizer: it defines no {name}"):
            call()


def test_parts_that_are_none(device):
    values = torch.ones(4, 16, device=device)
    part = current()(values)
    pair = {"rowwise_storage": part, "columnwise_storage": part}
    for error, text, call in (
        (TypeError, "hp_data: Float8Tensor, expected", lambda: IdentityTensor(hp_data=part)),
        (TypeError, "hp_data: list, expected a plain", lambda: IdentityTensor(hp_data=[1.0])),
        (TypeError, "hp_data: torch.int32", lambda: IdentityTensor(hp_data=values.int())),
        (ValueError, "hp_data: shape", lambda: IdentityTensor((4, 4), hp_data=values)),
        (TypeError, "columnwise_storage: Tensor, expected",
         lambda: HybridQuantizedTensor(**{**pair, "columnwise_storage": values})),
        (ValueError, "are None: give one", lambda: HybridQuantizedTensor((4, 16))),
        (ValueError, r"rowwise_storage: shape \(4, 16\), expected \(2, 16\)",
         lambda: HybridQuantizedTensor((2, 16), **pair)),
        (ValueError, r"columnwise_storage: shape \(2, 16\), expected \(4, 16\)",
         lambda: HybridQuantizedTensor(**{**pair, "columnwise_storage": current()(values[:2])})),
        (TypeError, "quantizer: int, expected a Quantizer",
         lambda: HybridQuantizedTensor(**pair, quantizer=3)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


# ---- what may be done ----------------------------------------------------------------------------

SAFE = {
    "current": (current, True),
    "tiles": (lambda: te.Float8BlockQuantizer(E4M3), True),
    "rows": (lambda: te.Float8RowQuantizer(E4M3), True),
    "mx": (lambda: te.MXFP8Quantizer(E4M3), True),
    "nv": (te.NVFP4Quantizer, True),
    "identity": (te.IdentityQuantizer, True),
    "delayed": (lambda: delayed("cpu"), False),
    "nv stochastic": (lambda: te.NVFP4Quantizer(stochastic_rounding=True), False),
    "other cast": (lambda: Doubled(E4M3, "cpu"), False),
    "other tiles": (lambda: Columns(E4M3), False),
    "other writes": (lambda: Writes(E4M3, "cpu"), False),
    "own": (HalvesQuantizer, False),
}


@pytest.mark.parametrize("name", SAFE)
def test_whether_values_may_be_cast_again(name):
    """Where it is said to be safe a second cast has the same bits, and no state has changed."""
    make, safe = SAFE[name]
    quantizer = make()
    assert quantizer.is_requantization_safe() is safe
    for row, column in ((quantizer, current()), (current(), quantizer)):
        pair = te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
        assert pair.is_requantization_safe() is safe
    x = source_of("cpu", (32, 48))
    if safe:
        assert_same_tensor(quantizer(x), quantizer(x))
        assert_same_tensor(quantizer(x).copy_(x), quantizer(x))
    elif name == "delayed":
        quantizer(x)
        assert quantizer.amax.item() > 0
    elif name == "nv stochastic":
        assert not torch.equal(quantizer(x)._rowwise_data, quantizer(x)._rowwise_data)


@pytest.mark.parametrize("name", EVERY)
def test_what_ranks_gather(device, name):
    """Where it is said that the row-wise data are enough, the column-wise ones are made of them."""
    quantizer, source = quantizer_of(name, device), source_of(device, (64, 128))
    enough = quantizer.supports_only_rowwise_all_gather()
    assert enough is (name in (*PER_TENSOR, "hybrid of rows"))
    _common.set_quantizer_usage_for_wgrad_all_gather(quantizer)
    assert quantizer.get_usages() == {"rowwise": enough, "columnwise": not enough}
    if not enough:
        return
    whole = quantizer_of(name, device)(source)
    alone = quantizer(source)
    assert alone.get_usages() == {"rowwise": True, "columnwise": False}
    alone.update_usage(columnwise_usage=True)
    assert_same_tensor(alone, whole)
    assert_same_bits(alone.dequantize(), whole.dequantize())


def test_ranks_gather_rows_of_one_scale(device):
    """Of parts that ranks have cast with one scale: the columns of the whole."""
    source = source_of(device, (64, 48))
    quantizer = delayed(device, 3.0)
    parts = [quantizer(half)._data for half in source.chunk(2)]
    made = quantizer.create_tensor_from_data(torch.cat(parts), torch.bfloat16)
    made.update_usage(columnwise_usage=True)
    assert_same_tensor(made, quantizer(source))


@pytest.mark.parametrize("column", [lambda: delayed("cpu"), HalvesQuantizer])
def test_a_pair_whose_columns_ranks_can_not_make_alike(column):
    """Of a cast that has state, or is not known to repeat; and of the original, whatever casts."""
    parts = {"rowwise_quantizer": current(), "columnwise_quantizer": column()}
    quantizer = te.HybridQuantizer(**parts, columnwise_source="rowwise_dequantized")
    assert not quantizer.supports_only_rowwise_all_gather()
    quantizer = te.HybridQuantizer(rowwise_quantizer=current(), columnwise_quantizer=current())
    assert not quantizer.supports_only_rowwise_all_gather()
    quantizer.set_usage(columnwise=False)
    tensor = quantizer(torch.ones(16, 16))
    with pytest.raises(RuntimeError, match="_columnwise_storage was dropped"):
        tensor.update_usage(columnwise_usage=True)


# ---- amaxes of ranks -----------------------------------------------------------------------------

REDUCING = {
    "current": lambda **o: current(**o),
    "current power 2": lambda **o: current(E5M2, force_pow_2_scales=True, **o),
    "nv": lambda **o: te.NVFP4Quantizer(**o),
    "nv rht": lambda **o: te.NVFP4Quantizer(with_rht=True, **o),
}


def _scales(tensor):
    """What the amax of the ranks decides."""
    amaxes = getattr(tensor, "_amax_rowwise", None), getattr(tensor, "_amax_columnwise", None)
    found = (*amaxes, getattr(tensor, "_scale_inv", None))
    return [t.clone() for t in found if t is not None]


def _rows_of(source, rank):
    """Rows of a rank, the larger ones with the first."""
    return source.chunk(2)[rank] * (1.0 if rank == 0 else 2.0**-6)


def reduced(device, source, name):
    """Casts of a rank's rows: over all ranks, over a group of its own, over none; by a pair."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([one]) for one in range(size)]
    mine = _rows_of(source.to(device), rank)
    whole, own = ({"with_amax_reduction": True, "amax_reduction_group": group}
                  for group in (dist.group.WORLD, groups[rank]))  # fmt: skip
    make = REDUCING[name]
    quantizer = make(**whole)
    tensor = quantizer(mine)
    found = [_scales(tensor), _scales(make(**own)(mine)), _scales(make()(mine))]
    assert quantizer.amax_reduction_group is dist.group.WORLD
    assert tensor.amax_reduction_group is None  # that belongs to one call
    tensor.copy_(mine)
    again = _scales(tensor)
    tensor.update_quantizer(quantizer)
    assert tensor.amax_reduction_group is dist.group.WORLD
    tensor.copy_(mine)
    pair = te.HybridQuantizer(
        rowwise_quantizer=make(), columnwise_quantizer=te.MXFP8Quantizer(E4M3)
    )
    _common.set_quantizer_amax_reduction_group(pair, dist.group.WORLD)
    of_pair = pair(mine)._rowwise_storage
    return [*found, again, _scales(tensor), _scales(of_pair)[:1]]


@pytest.mark.parametrize("name", REDUCING)
def test_the_largest_amax_of_a_group(ranks, name):
    source = source_of("cpu", (64, 48))
    make, mine = REDUCING[name], [_rows_of(source, rank) for rank in range(ranks.size)]
    together = _scales(make()(torch.cat(mine)))
    for rank, found in enumerate(ranks.run(reduced, source, name)):
        whole, own, alone, again, written, pair = ([t.cpu() for t in each] for each in found)
        known = _scales(make()(mine[rank]))
        assert_same_bits([own, alone, again], [known] * 3)
        assert_same_bits(written, whole)
        assert_same_bits(pair, whole[:1])
        assert_same_bits(whole, together)
        assert (rank == 0) == torch.equal(known[0], whole[0])
