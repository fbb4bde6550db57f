# SPDX-License-Identifier: Apache-2.0
"""amax: partial maxima of |x|."""

import pytest
import torch
from buffers import (
    HIGH,
    LAYOUTS,
    RAGGED,
    Poisoned,
    every_value,
    floats,
    laid_out,
    name_of,
    normal,
    op_count,
)
from comparators import assert_bits
from hypothesis import given, strategies as st
from reference import amax
from tols import BF16, E4M3, F16, F32

from transformer_engine import _core

INF, NAN = float("inf"), float("nan")
SMALLEST = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps


def check_amax(placed, values):
    """The maximum is the amax, every entry is written, none exceeds it, nothing else is touched."""
    partials = Poisoned((_core.AMAX_PARTIALS,), F32, placed.device)
    partials.put(torch.full((_core.AMAX_PARTIALS,), NAN))
    _core.amax(placed, partials.tensor)
    found = partials.tensor.cpu()
    assert not found.isnan().any() and not found.signbit().any()
    assert_bits(found.max(), torch.tensor(amax(values)))
    assert partials.untouched()


@pytest.mark.parametrize("columns", [0, *RAGGED])
@pytest.mark.parametrize("rows", [0, 1, 17, 130])
def test_shapes(device, rows, columns, rng):
    values = normal(rng, (rows, columns), BF16)
    check_amax(values.to(device), values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_layouts(device, source, layout, rng):
    values = normal(rng, (37, 301), source)
    check_amax(laid_out(values, layout, device), values)


@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 70_001), (70_001, 1), (1030, 67)])
def test_every_element_counts(device, shape, source, rng):
    """Large enough that all partial maxima work; the largest one anywhere, corners included."""
    values = normal(rng, shape, source)
    inside = (int(rng.integers(shape[0])), int(rng.integers(shape[1])))
    for place in ((0, 0), (shape[0] - 1, shape[1] - 1), inside):
        changed = values.clone()
        changed[place] = -1000.0
        check_amax(changed.to(device), changed)


@given(data=st.data())
def test_any_matrix(device, data):
    shape = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
    number = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
    some = data.draw(st.lists(number, min_size=1, max_size=10))
    count = shape[0] * shape[1]
    values = torch.tensor(some).repeat(count // len(some) + 1)[:count].reshape(shape)
    check_amax(values.to(device), values)


@pytest.mark.parametrize("source", [F16, BF16], ids=name_of)
def test_every_16_bit_value(device, source):
    """Row by row, so that small values are not hidden by large ones."""
    for row in every_value(source).split(16):
        check_amax(row.to(device), row)


@pytest.mark.parametrize(
    ("special", "expected"),
    [(NAN, 2.0), (-NAN, 2.0), (INF, INF), (-INF, INF), (-3.0, 3.0), (SMALLEST, 2.0)],
)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_special_values(device, source, special, expected, rng):
    values = torch.full((20, 50), -2.0, dtype=source)
    values[int(rng.integers(20)), int(rng.integers(50))] = special
    partials = torch.empty(_core.AMAX_PARTIALS, device=device)
    _core.amax(values.to(device), partials)
    assert partials.max().item() == expected


@pytest.mark.parametrize("value", [NAN, 0.0, -0.0, SMALLEST, -SMALLEST])
def test_one_value_everywhere(device, value):
    values = torch.full((9, 11), value)
    check_amax(values.to(device), values)


@pytest.mark.parametrize("view", ["transposed", "step", "negative"])
def test_any_view_is_read(device, view, rng):
    values = normal(rng, (30, 40), F32, device)
    viewed = {
        "transposed": lambda x: x.t(),
        "step": lambda x: x[:, ::3],
        "negative": torch._neg_view,
    }[view](values)
    check_amax(viewed, viewed.resolve_neg())


def test_counted(device, counters, rng):
    _core.amax(normal(rng, (4, 4), F32, device), torch.empty(_core.AMAX_PARTIALS, device=device))
    assert op_count(device, "amax") == 1


WRONG = {
    "integer input": (
        TypeError,
        "input: dtype i64, expected f32, f16 or bf16",
        torch.zeros(2, 2, dtype=torch.int64),
        1024,
    ),
    "FP8 input": (TypeError, "input: dtype e4m3, expected f32", torch.zeros(2, 2).to(E4M3), 1024),
    "few partials": (
        ValueError,
        "partials: 1023 elements, expected at least 1024",
        torch.zeros(2, 2),
        1023,
    ),
    "scalar": (ValueError, "input: it has 0 dims", torch.tensor(0.0), 1024),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    exception, text, values, count = WRONG[case]
    partials = Poisoned((count,), F32, device)
    with pytest.raises(exception, match=f"amax: {text}"):
        _core.amax(values.to(device), partials.tensor)
    assert partials.unwritten()


def test_wrong_partials(device):
    values = torch.ones(2, 2, device=device)
    with pytest.raises(TypeError, match="amax: partials: dtype bf16, expected f32"):
        _core.amax(values, torch.zeros(_core.AMAX_PARTIALS, dtype=BF16, device=device))
    with pytest.raises(ValueError, match="amax: partials: expected a dense tensor of one dim"):
        _core.amax(values, torch.zeros(2 * _core.AMAX_PARTIALS, device=device)[::2])
    with pytest.raises(TypeError, match="amax: partials: expected a torch.Tensor, got None"):
        _core.amax(values, None)


@pytest.mark.gpu
def test_mixed_devices():
    with pytest.raises(ValueError, match="amax: partials: it is on cpu:0"):
        _core.amax(torch.ones(2, 2, device="cuda"), torch.zeros(_core.AMAX_PARTIALS))


@pytest.mark.gpu
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (777, 1025), (8192, 512)])
def test_cuda_equals_cpu(shape, source, rng):
    """The maximum is the same; which part found it is each backend's own affair."""
    values = normal(rng, shape, source)
    found = []
    for device in ("cpu", "cuda"):
        partials = torch.empty(_core.AMAX_PARTIALS, device=device)
        _core.amax(values.to(device), partials)
        found.append(partials.max().cpu())
    assert_bits(found[1], found[0])
    assert_bits(found[0].reshape(1), floats("cpu", float(amax(values))))
