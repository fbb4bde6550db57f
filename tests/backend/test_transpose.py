# SPDX-License-Identifier: Apache-2.0
"""transpose: bytes of FP8 or u8, padding zeroed."""

import pytest
import torch
from buffers import FP8, LAYOUTS, RAGGED, Poisoned, laid_out, name_of, op_count
from comparators import assert_bits
from hypothesis import given, strategies as st
from tols import BF16, E4M3, E5M2

from transformer_engine import _core

BYTES = (*FP8, torch.uint8)


def random_bytes(rng, shape, dtype):
    return torch.from_numpy(rng.integers(0, 256, shape, dtype="uint8")).view(dtype)


def check_transpose(values, device, *, pad=0, layout="dense", output_layout=None):
    """Run one call on [rows, columns] and compare every byte."""
    rows, columns = values.shape
    output = Poisoned((columns, rows + pad), values.dtype, device, layout=output_layout or layout)
    _core.transpose(laid_out(values, layout, device), output.tensor)
    assert_bits(output.tensor[:, :rows], values.t().contiguous())
    assert (output.tensor[:, rows:].view(torch.uint8) == 0).all(), "padding"
    assert output.untouched()


@pytest.mark.parametrize("columns", RAGGED)
@pytest.mark.parametrize("rows", RAGGED)
def test_shapes(device, rows, columns, rng):
    check_transpose(random_bytes(rng, (rows, columns), torch.uint8), device, pad=-rows % 16)


@pytest.mark.parametrize("output_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", BYTES, ids=name_of)
def test_layouts(device, dtype, layout, output_layout, rng):
    values = random_bytes(rng, (130, 200), dtype)
    check_transpose(values, device, pad=30, layout=layout, output_layout=output_layout)


@given(data=st.data())
def test_any_shape(device, data):
    shape = data.draw(st.tuples(st.integers(0, 200), st.integers(0, 200)))
    seed = data.draw(st.integers(0, 2**31))
    values = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
    check_transpose(
        values.to(torch.uint8),
        device,
        pad=data.draw(st.integers(0, 100)),
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        output_layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
    )


def test_large(device, rng):
    """Several blocks in every direction, and threads."""
    check_transpose(random_bytes(rng, (700, 500), E4M3), device, pad=68)


def test_views_are_read(device, rng):
    values = random_bytes(rng, (40, 60), torch.uint8).to(device)
    output = torch.empty(40, 60, dtype=torch.uint8, device=device)
    _core.transpose(values.t(), output)
    assert_bits(output, values)


def test_twice_back(device, rng):
    values = random_bytes(rng, (33, 47), E5M2).to(device)
    once = torch.empty(47, 33, dtype=E5M2, device=device)
    back = torch.empty(33, 47, dtype=E5M2, device=device)
    _core.transpose(values, once)
    _core.transpose(once, back)
    assert_bits(back, values)


def test_strided_output_is_refused(device):
    memory = torch.zeros(4, 8, dtype=torch.uint8, device=device)
    values = torch.ones(4, 4, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="transpose: output: its strides .* contiguous"):
        _core.transpose(values, memory[:, ::2])
    assert (memory == 0).all()


def test_counted(device, counters, rng):
    check_transpose(random_bytes(rng, (5, 6), E4M3), device)
    assert op_count(device, "transpose") == 1


WRONG = {
    "two bytes": (
        TypeError,
        "input: dtype bf16, expected one-byte elements",
        BF16,
        BF16,
        (6, 4),
    ),
    "two dtypes": (TypeError, "output: dtype e5m2, expected e4m3", E4M3, E5M2, (6, 4)),
    "untransposed": (
        ValueError,
        r"output: shape \[4, 6\], expected \[6, >= 4\]",
        E4M3,
        E4M3,
        (4, 6),
    ),
    "few columns": (
        ValueError,
        r"output: shape \[6, 3\], expected \[6, >= 4\]",
        E4M3,
        E4M3,
        (6, 3),
    ),
    "many rows": (ValueError, r"output: shape \[7, 4\], expected \[6, >= 4\]", E4M3, E4M3, (7, 4)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    exception, text, source, dtype, shape = WRONG[case]
    output = Poisoned(shape, dtype, device)
    with pytest.raises(exception, match=f"transpose: {text}"):
        _core.transpose(torch.zeros(4, 6, device=device).to(source), output.tensor)
    assert output.unwritten()


@pytest.mark.gpu
def test_mixed_devices():
    values = torch.zeros(2, 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="transpose: output: it is on cpu:0"):
        _core.transpose(values, values.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (1000, 777), (4096, 2048)])
def test_cuda_equals_cpu(shape, rng):
    values = random_bytes(rng, shape, E4M3)
    outputs = []
    for device in ("cpu", "cuda"):
        outputs.append(torch.empty(shape[1], shape[0] + 9, dtype=E4M3, device=device))
        _core.transpose(values.to(device), outputs[-1])
    assert_bits(outputs[1], outputs[0])
