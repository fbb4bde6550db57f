# SPDX-License-Identifier: Apache-2.0
"""fill: one value everywhere, rounded once to any dtype."""

import math

import numpy as np
import pytest
import torch
from buffers import LAYOUTS, RAGGED, Poisoned, name_of, op_count
from comparators import assert_bits, bits
from hypothesis import given, strategies as st
from reference import nearest
from thinning import case_id, in_turns
from tols import BF16, E4M3, E5M2, F16, F32

from transformer_engine import _core

INTEGERS = (torch.uint8, torch.int32, torch.int64)
ALL = (F32, F16, BF16, E4M3, E5M2, *INTEGERS)
INF, NAN = float("inf"), float("nan")


def expected(value, dtype):
    """The element that a finite value becomes, as a tensor of one."""
    if dtype == F32:
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.array([value], np.float64).astype(np.float32))
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        whole = min(max(value, info.min), info.max)
        return torch.tensor([round(whole)], dtype=dtype)
    code = nearest(value, dtype)
    plain = {1: np.uint8, 2: np.uint16}[dtype.itemsize]
    signed = {1: np.uint8, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(np.array([code], plain).view(signed)).view(dtype)


def check_fill(shape, value, dtype, device, layout="dense"):
    output = Poisoned(shape, dtype, device, layout=layout)
    _core.fill(output.tensor, value)
    element = bits(expected(value, dtype))
    assert (bits(output.tensor) == element).all(), f"{bits(output.tensor).flatten()[:3]} {element}"
    assert output.untouched()


@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    in_turns([(1, 1), (17, 33), (3, 1000), (1000, 3)], ALL, LAYOUTS),
    ids=case_id,
)
def test_dtypes_and_layouts(device, shape, dtype, layout, rng):
    check_fill(shape, float(rng.integers(1, 100)) + 0.25, dtype, device, layout)


@pytest.mark.parametrize("columns", RAGGED)
@pytest.mark.parametrize("dtype", ALL, ids=name_of)
def test_ragged(device, dtype, columns):
    check_fill((5, columns), -3.0 if dtype != torch.uint8 else 3.0, dtype, device, "misaligned")


def test_large(device):
    check_fill((300, 500), 1.0e-3, BF16, device)


# A double rounding (fp64 to fp32 to the dtype) turns these into ties that are not.
TWICE = [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 1.0625 + 2.0**-40, 1.0625 - 2.0**-40]
VALUES = [0.0, -0.0, 1.0, -1.0, 0.1, 447.0, 464.0, -500.0, 1e6, -1e300, 5e-324, 2.0**-150, *TWICE]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, E5M2], ids=name_of)
def test_values(device, dtype, value):
    check_fill((2, 9), value, dtype, device)


@given(data=st.data())
def test_any_value(device, data):
    dtype = data.draw(st.sampled_from(ALL))
    wide = st.floats(allow_nan=False, allow_infinity=False)
    value = data.draw(wide | st.floats(-1000, 1000) | st.integers(-(10**6), 10**6).map(float))
    check_fill((2, 3), value, dtype, device)


@pytest.mark.parametrize(
    ("value", "dtype", "element"),
    [
        (INF, F32, INF),
        (-INF, BF16, -INF),
        (INF, F16, INF),
        (1e5, F16, INF),
        (INF, E4M3, 448.0),
        (-INF, E5M2, -57344.0),
        (1e300, E4M3, 448.0),
        (1e10, torch.int32, 2**31 - 1),
        (-1e10, torch.int32, -(2**31)),
        (1e30, torch.int64, 2**63 - 1),
        (-5.0, torch.uint8, 0),
        (300.0, torch.uint8, 255),
        (2.5, torch.int64, 2),
        (3.5, torch.int64, 4),
        (INF, torch.uint8, 255),
        (NAN, torch.int32, 0),
    ],
)
def test_saturation(device, value, dtype, element):
    output = torch.zeros(3, 5, dtype=dtype, device=device)
    _core.fill(output, value)
    assert_bits(output, torch.full((3, 5), element).to(dtype))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, E5M2], ids=name_of)
def test_nan(device, dtype):
    output = torch.zeros(4, 4, dtype=dtype, device=device)
    _core.fill(output, NAN)
    assert output.cpu().float().isnan().all()
    if dtype in (E4M3, E5M2):
        assert (bits(output) == 0x7F).all()


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0)])
def test_empty(device, shape, counters):
    check_fill(shape, 1.0, F32, device)
    assert op_count(device, "fill") == 1


def test_strided_output_is_refused(device):
    memory = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="fill: output: its strides .* contiguous"):
        _core.fill(memory[:, ::2], 1.0)
    with pytest.raises(ValueError, match="fill: output: its negative bit is set"):
        _core.fill(torch._neg_view(memory), 1.0)
    assert (memory == 0).all()


@pytest.mark.parametrize(
    ("output", "value", "exception", "text"),
    [
        (torch.zeros(2, 2), "1", TypeError, "value: expected a float, got <class 'str'>"),
        (torch.zeros(2, 2), None, TypeError, "value: expected a float, got <class 'NoneType'>"),
        (torch.zeros(2, 2, dtype=torch.bool), 1.0, TypeError, "output: dtype torch.bool"),
        (torch.zeros(2, 2, dtype=torch.float64), 1.0, TypeError, "output: dtype torch.float64"),
        (torch.tensor(0.0), 1.0, ValueError, "output: it has 0 dims, expected at least 1"),
        (None, 1.0, TypeError, "output: expected a torch.Tensor, got None"),
    ],
)
def test_wrong_argument(device, output, value, exception, text):
    placed = output if output is None else output.clone().to(device)
    with pytest.raises(exception, match=f"fill: {text}"):
        _core.fill(placed, value)
    assert placed is None or (placed == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL, ids=name_of)
def test_cuda_equals_cpu(dtype, rng):
    for value in (*VALUES[2:], rng.standard_normal(), math.pi):
        outputs = [torch.zeros(3, 65, dtype=dtype, device=device) for device in ("cpu", "cuda")]
        for output in outputs:
            _core.fill(output, float(value))
        assert_bits(outputs[1], outputs[0])
