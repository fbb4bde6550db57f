# SPDX-License-Identifier: Apache-2.0
"""Casts and scaling state of `transformer_engine_torch`: where they go, and what they refuse."""

import pytest
import torch
from buffers import normal
from comparators import assert_bits
from tex_cases import (
    FORMATS,
    Operators,
    assert_same_data,
    each_implementation,
    quantizers,
)
from tols import BF16, E4M3, F16, F32

import transformer_engine.pytorch.tensor as tensors
from transformer_engine.pytorch.constants import DType

native = Operators("default.native")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_where_casts_go(rng, device, kind, dtype):
    x = normal(rng, (64, 96), dtype, device)
    make = quantizers(device)[kind]
    expected = make(x)
    into = make(torch.ones_like(x))
    assert native.quantize(x, make, into) is into
    assert_same_data(into, expected)
    assert_bits(native.dequantize(into, DType.kFloat16), expected.dequantize(dtype=F16))


def test_noop(rng, device):
    x = normal(rng, (32, 32), F32, device)
    make = quantizers(device)["current"]
    into = make(x)
    kept = into.dequantize()
    assert native.quantize(2 * x, make, into, torch.ones(1, device=device)) is into
    assert_bits(into.dequantize(), kept)
    native.quantize(-x, make, into, torch.zeros(1, device=device))
    assert_bits(into.dequantize(), make(-x).dequantize())
    made = native.quantize(-x, make, None, torch.zeros(1, device=device))
    assert_bits(made.dequantize(), make(-x).dequantize())


def test_storages(rng, device):
    """What is made internally is a storage, and storages are read."""
    make = quantizers(device)["current"]
    make.internal = True
    x = normal(rng, (16, 32), BF16, device)
    found = native.quantize(x, make)
    assert type(found) is tensors.Float8TensorStorage
    make.internal = False
    assert_bits(native.dequantize(found, BF16), make(x).dequantize())


def test_refused_lists(rng, device):
    x = normal(rng, (96, 64), BF16, device)
    makers = [quantizers(device)[kind] for kind in ("current", "mxfp8", "tiles")]
    parts = [x[:32], x[32:64], x[64:]]
    with pytest.raises(ValueError, match=r"split_quantize: split_sections=\[32, 32\]"):
        native.split_quantize(x, [32, 32], makers)
    with pytest.raises(ValueError, match="multi_tensor_quantize: 3 tensors .* 2 quantizers"):
        native.multi_tensor_quantize(parts, makers[:2])
    with pytest.raises(TypeError, match="quantize: quantizer: NoneType"):
        native.quantize(x, None)
    with pytest.raises(TypeError, match="dequantize: input: Tensor"):
        native.dequantize(x, F32)
    with pytest.raises(TypeError, match="dequantize: otype="):
        native.dequantize(makers[0](x), "fp32")


@each_implementation
def test_refused_updates(device, tex):
    update = tex.fused_amax_and_scale_update_after_reduction
    scale, history = torch.ones(2, device=device), torch.ones(3, 2, device=device)
    none = torch.empty(0, device=device)
    with pytest.raises(ValueError, match="amax_compute_algo='mean'"):
        update(none, [history], [scale], "mean", DType.kFloat8E4M3, 0)
    with pytest.raises(TypeError, match="fp8_dtype="):
        update(none, [history], [scale], "max", DType.kFloat32, 0)
    with pytest.raises(ValueError, match="expected as many of each"):
        update(torch.ones(3, device=device), [history], [scale], "max", E4M3, 0)


def test_refused_slices(device):
    weight, amax = torch.ones(19, 26, device=device), torch.zeros(5, 7, device=device)
    with pytest.raises(ValueError, match="start_offset=500"):
        native.fp8_block_scaling_compute_partial_amax(weight, amax, 19, 26, 500, 4)
    with pytest.raises(ValueError, match="amax of 1 elements"):
        native.fp8_block_scaling_compute_partial_amax(weight, amax[:1, :1], 19, 26, 0, 4)
