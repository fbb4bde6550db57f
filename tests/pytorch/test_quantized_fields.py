# SPDX-License-Identifier: Apache-2.0
"""Tensors and storages that programs make of their own data: names, and shapes that must agree."""

import importlib
import pickle

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import E4M3, FORMATS, assert_same_tensor, current, delayed, source_of

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import HybridQuantizedTensor, IdentityTensor

pytestmark = every_device

SHAPES = [(32, 48), (3, 7, 130), (160, 37)]
QUANTIZERS = {"current": current, **FORMATS}


def arguments_of(tensor):
    """What its class is given to make it again."""
    if not isinstance(tensor, te.Float8Tensor):
        return {name[1:]: value for name, value in tensor._fields().items()}
    fields = {"data": tensor._data, "data_transpose": tensor._transpose}
    return {**fields, "fp8_scale_inv": tensor._scale_inv, "fp8_dtype": tensor._fp8_dtype}


def kinds_of(tensor):
    """Both classes, and what else they are told."""
    yield type(tensor), {"shape": tuple(tensor.shape), "dtype": tensor.dtype}
    if tensor.dim() == 2:
        yield type(tensor)._STORAGE, {"fake_dtype": tensor.dtype}


def alone(tensor, form):
    """The tensor with one form."""
    made = tensor.detach()
    made.update_usage(rowwise_usage=form == "rowwise", columnwise_usage=form == "columnwise")
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_is_made_again_of_its_fields(device, name, shape):
    tensor = QUANTIZERS[name]()(source_of(device, shape))
    arguments = arguments_of(tensor)
    for kind, options in kinds_of(tensor):
        found = kind(**options, **arguments)
        assert tuple(found.shape) == shape and found.get_usages() == tensor.get_usages()
        assert_same_bits(found.dequantize(), tensor.dequantize())
        if isinstance(found, torch.Tensor) and name != "current":  # which divides anew
            assert_same_tensor(found, tensor)
    for form in ("data", "data_transpose", "rowwise_data", "columnwise_data"):
        if arguments.get(form) is not None and len(shape) > 2 and not name.startswith("nv"):
            first = form in ("data_transpose", "columnwise_data") and not name.startswith("mx")
            rows = (shape[-1], -1) if first else (-1, shape[-1])
            matrix = {**arguments, form: arguments[form].reshape(rows)}
            found = type(tensor)(shape, tensor.dtype, **matrix)
            assert_same_bits(found.dequantize(), tensor.dequantize())
            found.update_usage(rowwise_usage=False)
            assert_same_bits(found.dequantize(), alone(tensor, "columnwise").dequantize())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_other_shapes_are_refused(device, name, shape):
    """Each tensor that has a row, column or element more or less, or is missing."""
    tensor = QUANTIZERS[name]()(source_of(device, shape))
    arguments, refused = arguments_of(tensor), 0
    for field, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        wrong = [torch.cat((value, value.narrow(i, 0, 1)), i) for i in range(value.dim())]
        wrong += [value.narrow(i, 0, value.shape[i] - 1) for i in range(value.dim())]
        if value.shape[0] != value.shape[-1]:
            wrong.append(value.transpose(0, -1))
        for other in wrong:
            for kind, options in list(kinds_of(tensor))[:1]:
                with pytest.raises(ValueError, match=r"shape .*, expected \("):
                    kind(**options, **{**arguments, field: other})
                refused += 1
        if "data" not in field and field != "fp8_scale_inv":
            with pytest.raises(ValueError, match=f"{field}: shape None, expected"):
                type(tensor)(shape, **{**arguments, field: None})
        if "data" in field:
            with pytest.raises(TypeError, match="expected torch.uint8"):
                type(tensor)(shape, **{**arguments, field: value.float()})
    with pytest.raises(ValueError, match="shape"):
        type(tensor)((*shape[:-1], shape[-1] + 16), **arguments)
    assert refused >= 8


def test_names_of_nvfp4(device):
    tensor = te.NVFP4Quantizer()(source_of(device, (48, 40)))
    arguments = arguments_of(tensor)
    arguments["fp4_dtype"] = arguments.pop("fp8_dtype")
    shape = arguments.pop("logical_shape")
    found = te.NVFP4Tensor(shape, tensor.dtype, **arguments)
    assert found._logical_shape == shape
    assert_same_tensor(found, tensor)
    found = te.NVFP4Tensor(dtype=tensor.dtype, logical_shape=shape, **arguments)
    assert_same_tensor(found, tensor)
    storage = te.NVFP4TensorStorage(**arguments)  # all that is in the bytes
    assert storage.shape == shape and storage._fp4_dtype is te.DType.kFloat4E2M1
    assert_same_bits(storage.dequantize().to(tensor.dtype), tensor.dequantize())
    del arguments["columnwise_data"]
    storage = te.NVFP4TensorStorage(**arguments)
    assert storage.shape == (48, 48) and storage.dequantize()[:, 40:].abs().max() == 0


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_of_other_bytes(device, name):
    """Of so many rows, in the shape that they have: two values to a byte of NVFP4."""
    quantizer = QUANTIZERS[name]()
    tensor = quantizer(source_of(device, (32, 40)))
    data = tensor._data if name == "current" else tensor._rowwise_data
    found = type(tensor).make_like(tensor, data=data[:16].clone())
    assert found.shape == (16, 40) and found.get_usages() == {"rowwise": True, "columnwise": False}
    if name.startswith(("rows", "lines")) or name == "nv rows":  # it has scales of more rows
        with pytest.raises(ValueError, match="dequantize"):
            found.dequantize()
    else:
        assert_same_bits(found.dequantize(), tensor.dequantize()[:16])
    found = type(tensor).make_like(tensor, data=data.clone(), shape=(32, 40), dtype=torch.float32)
    assert_same_bits(found.dequantize(), tensor.dequantize(dtype=torch.float32))
    hybrid = te.HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=quantizer)
    other = hybrid(source_of(device, (32, 40)))
    with pytest.raises(NotImplementedError, match="make_like: data"):
        type(other).make_like(other, data=data)


# ---- files of the incumbent ----------------------------------------------------------------------


def pickled(kind, arguments):
    """What a file brings that names a function of a class."""

    class Theirs:
        def __reduce__(self):
            return kind._make_in_reduce_ex, arguments

    return pickle.loads(pickle.dumps(Theirs()))


def their_arguments(tensor):
    """In their order, as the classes of the incumbent give them."""
    shape, dtype, quantizer = tuple(tensor.shape), tensor.dtype, tensor._quantizer
    if isinstance(tensor, HybridQuantizedTensor):
        return (tensor._rowwise_storage, tensor._columnwise_storage, quantizer, dtype, shape)
    if isinstance(tensor, IdentityTensor):
        return (tensor._hp_data, quantizer, dtype, shape)
    forms = tensor._rowwise_data, tensor._rowwise_scale_inv
    forms += tensor._columnwise_data, tensor._columnwise_scale_inv
    if isinstance(tensor, te.MXFP8Tensor):
        return (*forms, tensor._fp8_dtype, dtype, shape, quantizer, False)
    if isinstance(tensor, te.NVFP4Tensor):
        amaxes = tensor._amax_rowwise, tensor._amax_columnwise
        rows, largest = tensor._row_scaled_nvfp4, tensor._nvfp4_e4m3_max
        kept = tensor._fp8_dtype, dtype, quantizer
        return (shape, *forms, *amaxes, *kept, False, rows, True, largest)
    return (shape, *forms, tensor._fp8_dtype, dtype, quantizer, tensor._is_2D_scaled, None)


THEIRS = {
    **{n: make for n, make in FORMATS.items() if not n.startswith("rows")},
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.NVFP4Quantizer()
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_pickles_of_the_incumbent_are_read(device, name):
    tensor = THEIRS[name]()(source_of(device, (32, 130)))
    given = their_arguments(tensor)
    found = pickled(type(tensor), given)
    assert_same_bits(found.dequantize(), tensor.dequantize())
    assert_same_tensor(found, tensor)
    found.copy_(values := source_of(device, (32, 130)))
    assert_same_tensor(found, THEIRS[name]()(values))
    place = next(i for i, one in enumerate(given) if isinstance(one, te.Quantizer))
    for wrong in (print, "os.system", {}):
        with pytest.raises(ValueError, match="quantizer: "):
            pickled(type(tensor), (*given[:place], wrong, *given[place + 1 :]))


def test_what_reads_otherwise_in_pickles_is_refused(device):
    mx, nv = (FORMATS[n]()(source_of(device, (32, 48))) for n in ("mx", "nv"))
    cases = [
        (mx, (*their_arguments(mx)[:-1], True), "with_gemm_swizzled_scales=True"),
        (nv, (*their_arguments(nv)[:-4], True), "with_gemm_swizzled_scales=True"),
    ]
    for tensor, given, text in cases:
        with pytest.raises(NotImplementedError, match=text):
            pickled(type(tensor), given)


@pytest.mark.parametrize("name", THEIRS)
def test_crafted_pickles_are_refused(device, name):
    """A file may put attributes on a tensor that the class has no name for, and nothing else."""
    tensor = THEIRS[name]()(source_of(device, (32, 48)))
    rebuild, (kind, shape, dtype, fields, recast, about) = tensor.__reduce_ex__(2)
    found = rebuild(kind, shape, dtype, fields, recast, (*about[:2], {"main_grad_scale": 3}))
    assert found.main_grad_scale == 3
    for taken in ("dequantize", "_write", "__torch_dispatch__", "shape", 3):
        with pytest.raises(ValueError, match="attributes .*: the class itself has these names"):
            rebuild(kind, shape, dtype, fields, recast, (*about[:2], {taken: print}))
    for wrong in ({**fields, "dequantize": print}, [], None):
        with pytest.raises(ValueError, match="fields .*, expected some of"):
            rebuild(kind, shape, dtype, wrong, recast, about)


# ---- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("float8_tensor", "Float8Tensor"),
        ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
        ("mxfp8_tensor", "MXFP8Tensor"),
        ("nvfp4_tensor", "NVFP4Tensor"),
        ("hybrid_tensor", "HybridQuantizedTensor"),
        ("identity_tensor", "IdentityTensor"),
    ],
)
def test_modules_of_classes(name, prefix):
    """Where programs import them from."""
    package = "transformer_engine.pytorch.tensor"
    of_tensor = importlib.import_module(f"{package}.{name}")
    of_storage = importlib.import_module(f"{package}.storage.{name}_storage")
    assert getattr(of_tensor, prefix) is getattr(te.tensor, prefix)
    storage = getattr(te.tensor, f"{prefix}Storage")
    assert getattr(of_storage, f"{prefix}Storage") is storage
    assert getattr(importlib.import_module(f"{package}.storage"), f"{prefix}Storage") is storage


@pytest.mark.parametrize("name", ["Float8CurrentScalingQuantizer", "Float8Quantizer"])
def test_a_file_may_name_a_quantizer_by_that_path(name):
    """It is where programs import it from, and where files of earlier versions say that it is."""
    quantizer = current() if "Current" in name else delayed("cpu")
    text, kind = pickle.dumps(quantizer, 0), type(quantizer)
    own = f"c{kind.__module__}\n{name}\n".encode()
    assert text.count(own) == 1
    path = "transformer_engine.pytorch.tensor.float8_tensor"
    made = pickle.loads(text.replace(own, f"c{path}\n{name}\n".encode()))
    assert type(made) is kind is getattr(importlib.import_module(path), name)
    source = source_of("cpu", (32, 48))
    assert_same_bits(made(source)._data, quantizer(source)._data)


def test_a_transpose_of_other_data_is_not_read(device):
    """As `transpose_invalid` says: it is made of the data where it is asked for."""
    tensor = current()(source_of(device, SHAPES[0]))
    tensor.update_usage(columnwise_usage=True)
    kind, stale = type(tensor)._STORAGE, torch.zeros_like(tensor._transpose)
    given = {**arguments_of(tensor), "data_transpose": stale}
    for told in (None, False):
        found = kind(**given, transpose_invalid=told)
        assert found._transpose.data_ptr() == stale.data_ptr() and found.get_usages()["columnwise"]
    found = kind(**given, transpose_invalid=True)
    assert found.get_usages() == {"rowwise": True, "columnwise": False}
    found.update_usage(columnwise_usage=True)
    assert_same_bits(found._transpose, tensor._transpose)
    alone = kind(**{**given, "data": None}, transpose_invalid=True)
    assert alone.get_usages() == {"rowwise": False, "columnwise": True}
