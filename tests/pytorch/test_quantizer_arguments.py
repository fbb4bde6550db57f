# SPDX-License-Identifier: Apache-2.0
"""What quantizers are given: empty tensors, scales and flags, dtypes that are none of theirs."""

import pickle

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import E4M3, FORMATS, assert_same_tensor, current, delayed, source_of

import transformer_engine.pytorch as te

QUANTIZERS = {
    **FORMATS,
    "current": current,
    "delayed": lambda: delayed("cpu"),
    "identity": te.IdentityQuantizer,
    "hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=te.Float8RowQuantizer(E4M3)
    ),
}
EMPTY = [(4, 0), (0, 4), (0,), (0, 16), (4, 0, 16), (4, 8, 0), (0, 8, 3), (0, 0)]


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_empty_tensors(device, name, shape):
    source = torch.empty(shape, device=device)
    quantizer = QUANTIZERS[name]()
    tensor = quantizer(source)
    quantizer.calibrate(source)
    for made in (
        tensor,
        tensor.clone(),
        pickle.loads(pickle.dumps(tensor)),
        tensor.add_(1),
        tensor.copy_(quantizer(source)),
        tensor.quantize_(source, noop_flag=torch.zeros(1, device=device)),
    ):
        assert made.shape == shape and made.dequantize().shape == shape and repr(made)
    for view in (
        lambda t: t.view(-1),
        lambda t: t.unsqueeze(0),
        lambda t: t.transpose(0, -1),
        lambda t: t[:0],
        lambda t: t.flatten(),
        lambda t: t.split(1)[-1],
    ):
        part = view(tensor)
        assert part.dequantize().shape == view(source).shape
        part.zero_()
    if not name.startswith("nv rht") and name != "identity":
        tensor.update_usage(rowwise_usage=False)
        assert tensor.dequantize().shape == shape


def test_calibration_of_nothing(device):
    """As of zeros: it overwrites the amax, which nothing has."""
    quantizer = delayed(device)
    quantizer.calibrate(torch.full((4, 4), -3.0, device=device))
    assert quantizer.amax.item() == 3.0
    quantizer.calibrate(current()(torch.full((4, 16), 2.0, device=device)))
    assert quantizer.amax.item() == 2.0
    quantizer.calibrate(torch.empty(0, 4, device=device))
    assert quantizer.amax.item() == 0.0


@pytest.mark.parametrize("columnwise", [True, False])
def test_a_scale_of_zero_stands_for_one(device, columnwise):
    """And not for its inverse, by which all values would be NaN."""
    source = source_of(device, (32, 48), torch.float32)
    found, expected = (
        delayed(device, scale, columnwise=columnwise)(source) for scale in (0.0, 1.0)
    )
    assert_same_tensor(found, expected)
    assert_same_bits(found._quantizer.amax, source.abs().max().reshape(1))
    data = delayed(device, 0.0).create_tensor_from_data(found._data)
    assert_same_bits(data.dequantize(), found.dequantize())
    scale = 3.7
    given = delayed(device, scale)(source)
    assert given._scale_inv.item() == torch.tensor(scale).reciprocal().item()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_flag_is_one_number(device, name):
    quantizer = QUANTIZERS[name]()
    tensor = quantizer(source_of(device, (32, 48)))
    values = tensor.dequantize()
    for flag in (
        torch.ones(2, device=device),
        torch.ones(0, device=device),
        torch.ones(1, device=device, dtype=torch.int32),
        torch.ones(1, device=device, dtype=torch.float64),
        torch.ones(1, device="meta"),
    ):
        for write in (
            lambda: tensor.quantize_(torch.zeros_like(values), noop_flag=flag),  # noqa: B023
            lambda: quantizer.update_quantized(values, tensor, noop_flag=flag),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="noop_flag: .*expected one element"):
                write()
    for flag in (torch.ones((), device=device), torch.ones(1, device=device)):
        tensor.quantize_(torch.zeros_like(values), noop_flag=flag)
        assert_same_bits(tensor.dequantize(), values)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8])
def test_integers_are_no_values(device, name, dtype):
    quantizer = QUANTIZERS[name]()
    source = torch.ones(32, 48, device=device).to(dtype)
    with pytest.raises(TypeError, match="expected a floating dtype"):
        quantizer(source)
    with pytest.raises(TypeError, match="expected a floating dtype"):
        quantizer(source.float(), dtype=dtype)
    with pytest.raises(TypeError, match="expected a floating dtype"):
        te.IdentityQuantizer(dtype=dtype)
    with pytest.raises(TypeError, match="expected a floating dtype"):
        quantizer.make_empty((32, 48), dtype=dtype, device=device)
    with pytest.raises(TypeError, match="expected a floating dtype"):
        quantizer(source.float()).data = source
    assert not quantizer.is_quantizable(source)
