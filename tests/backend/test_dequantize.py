# SPDX-License-Identifier: Apache-2.0
"""dequantize: q / scale from row- or column-wise data."""

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
    floats,
    laid_out,
    name_of,
    op_count,
)
from comparators import assert_bits, assert_repeats
from hypothesis import given, strategies as st
from operands import operand
from reference import dequantize, to_torch
from refusals import check_refused
from tols import BF16, E4M3, E5M2, F16, F32

from transformer_engine import _core

INVERSES = [1.0, 0.37109375, 2.0**-130, 1.0e-40, 3.0e38, float("inf")]
UNUSED = 12345.0  # the scale in scales[1], which dequantize must not use


def random_codes(rng, shape, dtype):
    """FP8 values of every kind, NaN and Inf left out."""
    table = every_value(dtype).flatten()
    finite = table[table.float().isfinite()]
    chosen = rng.integers(0, finite.numel(), shape)
    return finite.view(torch.uint8)[torch.from_numpy(chosen)].view(dtype)


def check_dequantize(codes, dtype, device, inverse, usage="row", layout="dense", extra=0):
    """Run one call on codes [rows, columns] and compare; `extra` columns of padding stay unread."""
    rows, columns = codes.shape
    stored = codes if usage == "row" else codes.t().contiguous()
    padded = torch.full((stored.shape[0], stored.shape[1] + extra), 0x7F, dtype=torch.uint8)
    padded[:, : stored.shape[1]] = stored.view(torch.uint8)
    output = Poisoned((rows, columns), dtype, device, layout=layout)
    placed = laid_out(padded.view(codes.dtype), layout, device)
    scales = floats(device, inverse, UNUSED)
    _core.dequantize(output.tensor, **operand(scales=scales, **{usage: placed}))
    assert_bits(output.tensor, dequantize(codes, inverse, dtype), any_nan=True)
    assert output.untouched()


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("usage", ["row", "column"])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", FP8, ids=name_of)
def test_every_code(device, source, dtype, usage, inverse):
    check_dequantize(every_value(source), dtype, device, inverse, usage)


def test_codes_by_hand(device):
    """Values from the definition of the formats, so that ml_dtypes is not the only witness."""
    cases = {
        E4M3: {
            0x00: 0.0,
            0x01: 2.0**-9,
            0x07: 7 * 2.0**-9,
            0x08: 2.0**-6,
            0x38: 1.0,
            0x7E: 448.0,
            0xFE: -448.0,
        },
        E5M2: {
            0x00: 0.0,
            0x01: 2.0**-16,
            0x03: 3 * 2.0**-16,
            0x04: 2.0**-14,
            0x3C: 1.0,
            0x7B: 57344.0,
            0x7C: float("inf"),
            0xFC: -float("inf"),
        },
    }
    for dtype, codes in cases.items():
        stored = to_torch(np.array([list(codes)], dtype=np.uint8), dtype).to(device)
        output = torch.empty(1, len(codes), device=device)
        _core.dequantize(output, **operand(row=stored, scales=floats(device, 1.0, UNUSED)))
        assert_bits(output, torch.tensor([list(codes.values())]))


@pytest.mark.parametrize("usage", ["row", "column"])
@pytest.mark.parametrize("columns", RAGGED)
@pytest.mark.parametrize("rows", [1, 17, 63, 130])
def test_shapes(device, rows, columns, usage, rng):
    codes = random_codes(rng, (rows, columns), E4M3)
    check_dequantize(codes, BF16, device, 0.3, usage, extra=3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("usage", ["row", "column"])
def test_layouts(device, usage, dtype, layout, rng):
    codes = random_codes(rng, (75, 300), E5M2)
    check_dequantize(codes, dtype, device, 0.125, usage, layout, extra=16)


@given(data=st.data())
def test_any_shape(device, data):
    shape = data.draw(st.tuples(st.integers(0, 140), st.integers(0, 140)))
    source, dtype = data.draw(st.sampled_from(FP8)), data.draw(st.sampled_from(HIGH))
    usage = data.draw(st.sampled_from(["row", "column"]))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    inverse = data.draw(st.floats(2.0**-30, 2.0**30, width=32))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    codes = random_codes(rng, shape, source)
    check_dequantize(codes, dtype, device, inverse, usage, layout, data.draw(st.integers(0, 20)))


def test_row_goes_first(device):
    output = torch.empty(3, 5, device=device)
    _core.dequantize(
        output,
        **operand(
            row=torch.ones(3, 5, device=device).to(E4M3),
            column=torch.full((5, 3), 2.0, device=device).to(E4M3),
            scales=floats(device, 1.0, UNUSED),
        ),
    )
    assert (output == 1).all()


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_quantize_inverts_it(device, dtype):
    """Both ways: every code that is a number comes back."""
    table = every_value(dtype)
    codes = table.clone().view(torch.uint8)
    codes[~table.float().isfinite()] = 0
    for power in (-3, 0, 5):
        wide, again = torch.empty(16, 16, device=device), torch.empty_like(table).to(device)
        scales = floats(device, 2.0**-power, 2.0**power)
        _core.dequantize(wide, **operand(row=codes.view(dtype).to(device), scales=scales))
        _core.quantize(wide, **operand(row=again), scale=scales[1:])
        assert_bits(again, codes.view(dtype))


def test_twice_the_same(device, rng):
    codes = random_codes(rng, (400, 300), E4M3).to(device)

    def run():
        output = torch.empty(300, 400, dtype=F16, device=device)
        _core.dequantize(output, **operand(column=codes, scales=floats(device, 0.7, UNUSED)))
        return [output]

    assert_repeats(run)


def test_strided_output_is_refused(device):
    memory = torch.zeros(4, 8, device=device)
    codes = torch.ones(4, 4, device=device).to(E4M3)
    with pytest.raises(ValueError, match="dequantize: output: its strides .* contiguous"):
        _core.dequantize(memory[:, ::2], **operand(row=codes, scales=floats(device, 1.0, 1.0)))
    assert (memory == 0).all()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_empty(device, shape, counters):
    output = Poisoned(shape, BF16, device)
    codes = torch.empty(shape, dtype=E4M3, device=device)
    _core.dequantize(output.tensor, **operand(row=codes, scales=floats(device, 1.0, 1.0)))
    assert output.untouched() and op_count(device, "dequantize") == 1


WRONG = {
    "FP8 output": (
        TypeError,
        "output: dtype e4m3, expected f32, f16 or bf16",
        {"output": torch.zeros(2, 3).to(E4M3)},
    ),
    "no data": (ValueError, "row: is missing: and so is column", {"row": None}),
    "bf16 data": (
        TypeError,
        "row: dtype bf16, expected e4m3 or e5m2",
        {"row": torch.zeros(2, 3).to(BF16)},
    ),
    "few columns": (
        ValueError,
        r"row: shape \[2, 2\], expected \[2, >= 3\]",
        {"row": torch.zeros(2, 2).to(E4M3)},
    ),
    "column untransposed": (
        ValueError,
        r"column: shape \[2, 3\], expected \[3, >= 2\]",
        {"row": None, "column": torch.zeros(2, 3).to(E4M3)},
    ),
    "no mode": (ValueError, "mode: ", {"mode": _core.SCALING_NONE}),
    "no scales": (ValueError, "row_scales: ", {"row_scales": None}),
    "scale alone": (
        ValueError,
        r"row_scales: .*length 1, expected a vector of 2",
        {"row_scales": torch.ones(1)},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned((2, 3), F32, device)
    good = {
        "output": output.tensor,
        **operand(row=torch.zeros(2, 3).to(E4M3), scales=torch.ones(2)),
    }
    check_refused("dequantize", device, WRONG[case], good, output)


@pytest.mark.gpu
def test_mixed_devices():
    with pytest.raises(ValueError, match="dequantize: row: it is on cpu:0"):
        _core.dequantize(
            torch.zeros(2, 2, device="cuda"),
            **operand(row=torch.zeros(2, 2).to(E4M3), scales=torch.ones(2, device="cuda")),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("usage", ["row", "column"])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", FP8, ids=name_of)
def test_cuda_equals_cpu(source, dtype, usage, rng):
    codes = random_codes(rng, (1000, 777), source)
    outputs = []
    for device in ("cpu", "cuda"):
        shape = codes.shape if usage == "row" else codes.shape[::-1]
        outputs.append(torch.empty(shape, dtype=dtype, device=device))
        scales = floats(device, 0.29, UNUSED)
        _core.dequantize(outputs[-1], **operand(scales=scales, **{usage: codes.to(device)}))
    assert_bits(outputs[1], outputs[0])
