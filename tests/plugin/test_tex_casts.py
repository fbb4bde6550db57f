# SPDX-License-Identifier: Apache-2.0
"""Casts and scaling state of `transformer_engine_torch`: bits of the quantizers, float64."""

import numpy as np
import pytest
import torch
from buffers import normal
from comparators import assert_bits
from reference import delayed_update
from tex_cases import (
    FORMATS,
    Operators,
    assert_near,
    assert_same_data,
    each_implementation,
    quantizers,
)
from tols import BF16, E4M3, E5M2, F16, F32

import transformer_engine.pytorch.tensor as tensors
from transformer_engine.pytorch.constants import DType

native = Operators("default.native")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_quantize(rng, device, kind, dtype):
    x = normal(rng, (64, 96), dtype, device)
    make, again = quantizers(device)[kind], quantizers(device)[kind]
    expected = again(x)
    found = native.quantize(x, make)
    assert_same_data(found, expected)
    if kind == "delayed":
        assert_bits(make.amax, again.amax)
    into = make(torch.ones_like(x))
    assert native.quantize(x, make, into) is into
    assert_same_data(into, expected)
    for dtype_wanted in (F32, BF16, DType.kFloat16):
        plain = native.dequantize(found, dtype_wanted)
        torch_dtype = F16 if dtype_wanted == DType.kFloat16 else dtype_wanted
        assert_bits(plain, expected.dequantize(dtype=torch_dtype))
    sums, made = native.bgrad_quantize(x, make)
    assert sums.dtype == dtype
    assert_near(sums, x.double().sum(0), 64)
    assert_same_data(made, expected)


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


def test_lists(rng, device):
    x = normal(rng, (96, 64), BF16, device)
    makers = [quantizers(device)[kind] for kind in ("current", "mxfp8", "tiles")]
    parts = [x[:32], x[32:64], x[64:]]
    for found in (
        native.split_quantize(x, [32, 32, 32], makers),
        native.multi_tensor_quantize(parts, makers),
    ):
        for one, make, part in zip(found, makers, parts, strict=True):
            assert_same_data(one, make(part.contiguous()))
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
@pytest.mark.parametrize("shape", [(3, 5, 7), (16, 32), (1, 1)])
def test_fp8_transpose(rng, device, tex, shape):
    data = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).to(device)
    expected = data.movedim(-1, 0).contiguous()
    into = torch.empty_like(expected)
    tex.fp8_transpose(data, DType.kFloat8E4M3, out=into)
    assert_bits(into, expected)
    assert_bits(tex.fp8_transpose(data, DType.kFloat8E4M3, out=None), expected)


@each_implementation
@pytest.mark.parametrize("shape", [(4, 5, 6), (5, 6), (17,), (0, 4), (0,)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_compute_amax(rng, device, tex, shape, dtype):
    x = normal(rng, shape, dtype, device)
    amax = torch.full((1,), 7.0, device=device)
    if x.numel():
        x.view(-1)[:-1:9] = torch.nan
        expected = x.nan_to_num(nan=0.0).abs().max().float().view(1)
    else:
        expected = torch.zeros(1, device=device)
    tex.compute_amax(x, amax)
    assert_bits(amax, expected)


@each_implementation
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("given", [False, True])
def test_update_of_delayed_scaling(rng, device, tex, algo, given):
    sizes, margin = (3, 5), 2
    histories = [abs(normal(rng, (4, n), F32, device)) for n in sizes]
    scales = [abs(normal(rng, (n,), F32, device)) for n in sizes]
    histories[1][:, 1] = 0.0
    histories[1][:, 2] = torch.inf
    buffer = abs(normal(rng, (sum(sizes) * given,), F32, device))
    buffer[:1] = 0.0
    histories[1][2, 3] = torch.nan
    expected = []
    for scale, history, newest in zip(
        scales, histories, buffer.split(sizes) if given else (None, None), strict=True
    ):
        history = history.clone()
        if newest is not None:
            history[0] = torch.where(newest != 0, newest, history[0])
        top = np.float32(torch.finfo(E5M2).max * 2.0**-margin)
        state = scale.cpu().numpy(), history.cpu().numpy()
        expected.append(delayed_update(*state, top, algo == "most_recent"))
    tex.fused_amax_and_scale_update_after_reduction(
        buffer, histories, scales, algo, DType.kFloat8E5M2, margin
    )
    for scale, history, new in zip(scales, histories, expected, strict=True):
        for one, other in zip((scale, history), new, strict=True):
            assert_bits(one, torch.as_tensor(other, dtype=F32))


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


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_partial_casts(rng, device, block, kind):
    """Slices of ranks, one after the other, give what the whole gives."""
    h, w = 19, 26
    weight = normal(rng, (h, w), BF16, device)
    tiles = (-(-h // block), -(-w // block))
    padded = torch.zeros(tiles[0] * block, tiles[1] * block, device=device)
    padded[:h, :w] = weight.float()
    of_tiles = padded.view(tiles[0], block, tiles[1], block)
    exact = of_tiles.abs().amax((1, 3))
    amax = torch.zeros(tiles, device=device)
    cuts = [0, 5, 200, 201, h * w]
    for first, end in zip(cuts, cuts[1:], strict=False):
        part = torch.full(tiles, -1.0, device=device)
        native.fp8_block_scaling_compute_partial_amax(
            weight.flatten()[first:end], part, h, w, first, block
        )
        assert (part >= 0).all()
        amax = torch.maximum(amax, part)
    assert_bits(amax, exact)
    scale = 300.0 / exact * (1.0 if kind == E5M2 else 2.0)  # e4m3 saturates
    codes = torch.zeros(h * w, dtype=torch.uint8, device=device)
    for first, end in zip(cuts, cuts[1:], strict=False):
        native.fp8_block_scaling_partial_cast(
            weight.flatten()[first:end], codes[first:end], scale, h, w, first, block,
            DType.kFloat8E4M3 if kind == E4M3 else kind,
        )  # fmt: skip
    top = torch.finfo(kind).max
    wide = (of_tiles * scale[:, None, :, None]).clamp(-top, top).reshape(padded.shape)[:h, :w]
    assert_bits(codes.view(h, w), wide.contiguous().to(kind).view(torch.uint8))
    with pytest.raises(ValueError, match="start_offset=500"):
        native.fp8_block_scaling_compute_partial_amax(weight, amax, h, w, 500, block)
    with pytest.raises(ValueError, match="amax of 1 elements"):
        native.fp8_block_scaling_compute_partial_amax(weight, amax[:1, :1], h, w, 0, block)
