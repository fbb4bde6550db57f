# SPDX-License-Identifier: Apache-2.0
"""cast: conversion between high-precision dtypes, copies of any dtype, between strided matrices."""

import numpy as np
import pytest
import torch
from buffers import (
    FP8,
    HIGH,
    LAYOUTS,
    RAGGED,
    Poisoned,
    every_value,
    laid_out,
    name_of,
    normal,
    op_count,
)
from comparators import assert_bits, bits
from hypothesis import given, strategies as st
from reference import as_f32, narrow
from tols import BF16, E4M3, E5M2, F16, F32

from transformer_engine import _core

ALL = (*HIGH, *FP8, torch.uint8, torch.int32, torch.int64)


def check_cast(values, dtype, device, *, shape=None, layout="dense", output_layout=None):
    """Run one call; beyond the input the output is zero, beyond the output nothing is written."""
    shape = tuple(values.shape) if shape is None else shape
    output = Poisoned(shape, dtype, device, layout=output_layout or layout)
    _core.cast(laid_out(values, layout, device), output.tensor)
    rows, columns = (min(a, b) for a, b in zip(values.shape, shape, strict=True))
    shared = values[:rows, :columns].contiguous()
    same = values.dtype == dtype
    assert_bits(
        output.tensor[:rows, :columns],
        shared if same else narrow(as_f32(shared), dtype),
        any_nan=not same,
    )
    rest = output.tensor.cpu().clone()
    bits(rest)[:rows, :columns] = 0
    rest.view(torch.uint8)[:rows, : columns * dtype.itemsize] = 0
    assert (bits(rest) == 0).all(), "beyond the input"
    assert output.untouched()


def random_bits(rng, shape, dtype):
    """Any bits at all: every kind of NaN, subnormals, Inf."""
    raw = rng.integers(0, 256, (shape[0], shape[1] * dtype.itemsize), dtype="uint8")
    return torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", [F16, BF16], ids=name_of)
def test_every_16_bit_value(device, source, dtype):
    check_cast(every_value(source), dtype, device)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_boundaries_of_rounding(device, dtype):
    """Each number of the format, the midpoint above it, and the fp32 neighbours of both."""
    numbers = as_f32(every_value(dtype)).flatten()
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    top = numbers[-1] + (numbers[-1] - numbers[-2]) / 2  # half way to what would come next
    points = np.concatenate([numbers, middles, [top, -top]]).astype(np.float32)
    sides = [np.nextafter(points, np.float32(far)) for far in (np.inf, -np.inf)]
    for values in (points, *sides):
        check_cast(torch.from_numpy(values).reshape(1, -1), dtype, device)


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_random_bits(device, source, dtype, rng):
    check_cast(random_bits(rng, (100, 333), source), dtype, device)


@pytest.mark.parametrize("dtype", ALL, ids=name_of)
def test_same_dtype_keeps_bits(device, dtype, rng):
    values = random_bits(rng, (70, 130), dtype)
    check_cast(values, dtype, device, layout="ragged", output_layout="misaligned")


@pytest.mark.parametrize("output_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pair", [(F32, BF16), (BF16, F32), (F16, BF16), (E4M3, E4M3)])
def test_layouts(device, pair, layout, output_layout, rng):
    values = random_bits(rng, (19, 300), pair[0])
    check_cast(values, pair[1], device, layout=layout, output_layout=output_layout)


@pytest.mark.parametrize("columns", RAGGED)
@pytest.mark.parametrize("rows", [1, 16, 65])
def test_shapes(device, rows, columns, rng):
    check_cast(normal(rng, (rows, columns), F32), BF16, device)


@pytest.mark.parametrize("pair", [(F32, F32), (F32, BF16), (BF16, F32), (E5M2, E5M2)])
@pytest.mark.parametrize(
    "shape", [(40, 50), (33, 50), (40, 47), (20, 30), (37, 60), (1, 1), (64, 9)]
)
def test_other_output_size(device, shape, pair, rng):
    check_cast(random_bits(rng, (37, 49), pair[0]), pair[1], device, shape=shape, layout="ragged")


@pytest.mark.parametrize(
    "sizes", [((0, 5), (3, 4)), ((5, 0), (3, 4)), ((3, 4), (0, 4)), ((0, 0), (0, 0))]
)
def test_empty(device, sizes, counters):
    check_cast(torch.ones(sizes[0]), BF16, device, shape=sizes[1])
    assert op_count(device, "cast") == 1


@given(data=st.data())
def test_any_matrix(device, data):
    size = st.integers(0, 90)
    source = data.draw(st.sampled_from(ALL))
    dtype = data.draw(st.sampled_from(HIGH)) if source in HIGH else source
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    check_cast(
        random_bits(rng, data.draw(st.tuples(size, size)), source),
        dtype,
        device,
        shape=data.draw(st.tuples(size, size)),
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        output_layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
    )


@pytest.mark.parametrize("view", ["transposed", "step", "expanded", "negative"])
def test_any_view_is_read(device, view, rng):
    values = normal(rng, (30, 40), F32, device)
    viewed = {
        "transposed": lambda x: x.t(),
        "step": lambda x: x[:, ::3],
        "expanded": lambda x: x[:1].expand(7, -1),
        "negative": torch._neg_view,
    }[view](values)
    output = torch.empty(viewed.shape, dtype=BF16, device=device)
    _core.cast(viewed, output)
    assert_bits(output, viewed.resolve_neg().contiguous().to(BF16))


def test_twice_the_same_and_large(device, rng):
    values = normal(rng, (400, 600), F32, device)
    for _ in range(2):
        output = torch.empty(400, 600, dtype=F16, device=device)
        _core.cast(values, output)
        assert_bits(output, values.to(F16))


def test_strided_output_is_refused(device):
    memory = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="cast: output: its strides .* contiguous"):
        _core.cast(torch.ones(4, 4, device=device), memory[:, ::2])
    assert (memory == 0).all()


WRONG = {
    "FP8 to bf16": (
        TypeError,
        "input: dtype e4m3, expected f32, f16 or bf16",
        torch.zeros(2, 2).to(E4M3),
        BF16,
    ),
    "bf16 to FP8": (
        TypeError,
        "output: dtype e5m2, expected f32, f16 or bf16",
        torch.zeros(2, 2),
        E5M2,
    ),
    "bytes to ints": (
        TypeError,
        "input: dtype u8, expected",
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.int32,
    ),
    "float64": (
        TypeError,
        "input: dtype torch.float64 is not supported",
        torch.zeros(2, 2, dtype=torch.float64),
        F32,
    ),
    "scalar": (ValueError, "input: it has 0 dims", torch.tensor(0.0), F32),
    "no input": (TypeError, "input: expected a torch.Tensor, got None", None, F32),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    exception, text, values, dtype = WRONG[case]
    output = Poisoned((2, 2), dtype, device)
    with pytest.raises(exception, match=f"cast: {text}"):
        _core.cast(values if values is None else values.to(device), output.tensor)
    assert output.unwritten()


@pytest.mark.gpu
def test_mixed_devices():
    with pytest.raises(ValueError, match="cast: output: it is on cpu:0"):
        _core.cast(torch.zeros(2, 2, device="cuda"), torch.zeros(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_cuda_equals_cpu(source, dtype, rng):
    values = random_bits(rng, (1000, 777), source)
    outputs = []
    for device in ("cpu", "cuda"):
        outputs.append(torch.empty(1003, 800, dtype=dtype, device=device))
        _core.cast(values.to(device), outputs[-1])
    assert_bits(outputs[1], outputs[0], any_nan=source != dtype)
