# SPDX-License-Identifier: Apache-2.0
"""quantize: codes, layouts, padding, amax, column sums. Scales are in test_quantize_scale.py."""

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
    normal,
    op_count,
)
from comparators import assert_bits, assert_nmse, assert_repeats
from fp8_output import USAGES, Output, padding
from hypothesis import given, strategies as st
from operands import operand
from reference import amax, boundaries, to_numpy
from refusals import check_refused
from thinning import case_id, in_turns
from tols import BF16, E4M3, E5M2, F16, F32, tol

from transformer_engine import _core


def check_quantize(values, dtype, device, scale, usage="both", **layout):
    """Run one call and compare it with the reference."""
    output = Output(tuple(values.shape), dtype, device, usage, **layout)
    placed = laid_out(values, layout.get("layout", "dense"), device)
    _core.quantize(placed, scale=floats(device, scale), **output.arguments())
    output.check(values, scale)


# ---- codes ---------------------------------------------------------------------------------------

# 1; an ordinary one; ones that push everything into FP8's subnormals, fp32's subnormals, beyond the
# largest value; and a subnormal scale, whose inverse is Inf.
SCALES = [1.0, 0.37109375, 2.0**-16, 2.0**-120, 3.0e38, 1.0e-40]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("source", [F16, BF16], ids=name_of)
def test_every_16_bit_value(device, source, dtype, scale):
    check_quantize(every_value(source), dtype, device, scale)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_boundaries_of_rounding(device, dtype):
    values = boundaries(dtype)
    check_quantize(values.reshape(1, -1), dtype, device, 1.0)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_boundaries_of_rounding_of_the_product(device, dtype, rng):
    """The product with the scale is rounded to fp32 before it is cast."""
    scale = float(torch.tensor(rng.uniform(0.5, 2.0), dtype=F32))
    values = (boundaries(dtype).double() / scale).float()
    check_quantize(values.reshape(1, -1), dtype, device, scale)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("scale", SCALES[:3])
def test_random_fp32_bits(device, dtype, scale, rng):
    codes = rng.integers(0, 2**32, (181, 183), dtype="uint32")
    check_quantize(torch.from_numpy(codes.view("float32")), dtype, device, scale)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_nan_is_kept_and_inf_saturates(device, dtype):
    infinity = float("inf")
    values = torch.tensor([[float("nan"), infinity, -infinity, 0.0, -0.0]])
    output = Output((1, 5), dtype, device, "row")
    _core.quantize(values.to(device), scale=floats(device, 1.0), **output.arguments())
    top = 0x7E if dtype == E4M3 else 0x7B
    expected = torch.tensor([[0x7F, top, top | 0x80, 0x00, 0x80]], dtype=torch.uint8)
    assert torch.equal(output.row.tensor.cpu().view(torch.uint8), expected)


# ---- shapes and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "usage"), in_turns(RAGGED, RAGGED, USAGES), ids=case_id
)
def test_shapes(device, rows, columns, usage, rng):
    values = normal(rng, (rows, columns), BF16)
    check_quantize(values, E4M3, device, 64.0, usage, pad=padding((rows, columns)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_layouts(device, dtype, source, layout, rng):
    values = normal(rng, (70, 300), source, scale=20.0)
    check_quantize(values, dtype, device, 1.5, layout=layout, pad=(7, 90))


@given(data=st.data())
def test_any_shape_and_layout(device, data):
    size = st.integers(0, 140)
    shape = data.draw(st.tuples(size, size))
    source, dtype = data.draw(st.sampled_from(HIGH)), data.draw(st.sampled_from(FP8))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    pad = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 200)))
    usage = data.draw(st.sampled_from(sorted(USAGES)))
    scale = data.draw(st.floats(2.0**-20, 2.0**20, width=32))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    values = (torch.randn(shape, generator=generator) * 100).to(source)
    check_quantize(values, dtype, device, scale, usage, pad=pad, layout=layout)


@pytest.mark.parametrize("shape", [(0, 0), (0, 33), (33, 0)])
def test_empty_input(device, shape, rng):
    """Scales are written, amax stays, column sums are 0, padding is zeroed."""
    output = Output(shape, E4M3, device, pad=(16, 16))
    largest, sums = floats(device, 3.0), Poisoned((shape[1],), F32, device)
    values = torch.empty(shape, device=device)
    _core.quantize(
        values, scale=floats(device, 8.0), amax=largest, bias_grad=sums.tensor, **output.arguments()
    )
    output.check(values, 8.0)
    assert_bits(largest, torch.tensor([3.0]))
    assert_bits(sums.tensor, torch.zeros(shape[1]))


def test_leading_dims_are_rows(device, rng):
    values = normal(rng, (3, 2, 5, 17), F32)
    output = Output((30, 17), E4M3, device)
    _core.quantize(values.to(device), scale=floats(device, 2.0), **output.arguments())
    output.check(values.reshape(30, 17), 2.0)


READS = {
    "transposed": lambda x: x.t(),
    "column_step": lambda x: x[:, ::2],
    "expanded_row": lambda x: x[:1].expand(9, -1),
    "negative_bit": torch._neg_view,
    "permuted": lambda x: x.reshape(5, 4, -1).permute(1, 0, 2),
    "flipped_copy": lambda x: x.flip(0),
}


@pytest.mark.parametrize("view", READS)
def test_any_view_is_read(device, view, rng):
    values = READS[view](normal(rng, (20, 24), F32, device))
    dense = values.resolve_neg().contiguous()
    dense = dense.reshape(-1, dense.shape[-1])
    output = Output(tuple(dense.shape), E5M2, device)
    _core.quantize(values, scale=floats(device, 2.0), **output.arguments())
    output.check(dense, 2.0)


VIEWS = {
    "column_step": lambda memory: memory[:, ::2],
    "expanded": lambda memory: memory[:1, :16].expand(16, -1),
    "overlapping": lambda memory: memory.as_strided((16, 16), (8, 1)),
    "transposed": lambda memory: memory[:, :16].t(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["row", "column"])
def test_output_without_dense_rows_is_refused(device, which, view, rng):
    """A copy would hide where the data went."""
    values = normal(rng, (16, 16), F32, device)
    memory = torch.zeros(16, 32, dtype=E4M3, device=device)
    with pytest.raises(ValueError, match=f"quantize: {which}: its strides .* contiguous"):
        _core.quantize(values, scale=floats(device, 1.0), **operand(**{which: VIEWS[view](memory)}))
    assert (memory.view(torch.uint8) == 0).all()


# ---- amax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (7, 129), (300, 257)])
def test_amax_is_fused_and_accumulates(device, shape, source, casts, rng):
    values = normal(rng, shape, source)
    output = Output(shape, E4M3, device, "row")
    arguments = {"scale": floats(device, 4.0), **output.arguments()} if casts else {}
    found = float(amax(values))
    for before in (0.0, found / 2, found, found * 2):
        slot = Poisoned((1,), F32, device)
        slot.put(torch.tensor([before]))
        _core.quantize(values.to(device), amax=slot.tensor, **arguments)
        assert_bits(slot.tensor, torch.tensor([max(before, found)]))
        assert slot.untouched()


@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize(
    ("special", "expected"),
    [(float("nan"), None), (float("inf"), float("inf")), (-float("inf"), float("inf"))],
)
def test_amax_of_nan_and_inf(device, source, special, expected, rng):
    values = normal(rng, (33, 65), source)
    row, column = (int(rng.integers(n)) for n in values.shape)
    values[row, column] = special
    slot = floats(device, 0.0)
    _core.quantize(values.to(device), amax=slot)
    assert_bits(slot, torch.tensor([float(amax(values)) if expected is None else expected]))


def test_amax_of_nothing_but_nan(device):
    slot = floats(device, 1.25)
    _core.quantize(torch.full((40, 40), float("nan"), device=device), amax=slot)
    assert_bits(slot, torch.tensor([1.25]))


# ---- column sums ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "misaligned"])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 17), (65, 130), (1000, 33)])
def test_bias_grad(device, shape, source, dtype, layout, rng):
    values = normal(rng, shape, source)
    sums = Poisoned(shape[1:], dtype, device, layout=layout)
    output = Output(shape, E5M2, device)
    _core.quantize(
        laid_out(values, layout, device),
        scale=floats(device, 4.0),
        bias_grad=sums.tensor,
        **output.arguments(),
    )
    output.check(values, 4.0)
    exact = torch.from_numpy(to_numpy(values).astype("float64").sum(0))
    assert_nmse(sums.tensor, exact, tol("round", dtype) + tol("sum", F32, shape[0]))
    assert sums.untouched()


def test_bias_grad_without_a_cast(device, rng):
    values = normal(rng, (257, 40), BF16)
    sums, slot = Poisoned((40,), F32, device), floats(device, 0.0)
    _core.quantize(values.to(device), bias_grad=sums.tensor, amax=slot)
    exact = values.double().sum(0)
    assert_nmse(sums.tensor, exact, tol("round", F32) + tol("sum", F32, 257))
    assert_bits(slot, torch.from_numpy(amax(values).reshape(1)))


def test_bias_grad_keeps_nan_and_inf(device):
    values = torch.ones(100, 4, device=device)
    values[50, 1], values[60, 2] = float("nan"), float("inf")
    sums = torch.zeros(4, device=device)
    _core.quantize(values, bias_grad=sums)
    expected = torch.tensor([100.0, float("nan"), float("inf"), 100.0])
    assert_bits(sums, expected, any_nan=True)


def test_twice_the_same(device, rng):
    """Sums and maxima do not depend on which thread comes first."""
    values = normal(rng, (700, 530), F32, device)

    def run():
        output = Output((700, 530), E4M3, device)
        sums, slot = torch.zeros(530, device=device), floats(device, 0.0)
        _core.quantize(
            values, scale=floats(device, 50.0), amax=slot, bias_grad=sums, **output.arguments()
        )
        return output.row.tensor, output.column.tensor, sums, slot

    assert_repeats(run)


# ---- the skip flag -------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [1.0, -2.0, float("nan"), 0.0, -0.0])
def test_noop_leaves_outputs_untouched(device, flag, rng):
    values = normal(rng, (65, 70), BF16)
    output = Output((65, 70), E4M3, device, pad=(10, 15))
    sums, slot = Poisoned((70,), F32, device), Poisoned((1,), F32, device)
    slot.put(torch.tensor([0.5]))
    _core.quantize(
        values.to(device),
        scale=floats(device, 2.0),
        amax=slot.tensor,
        bias_grad=sums.tensor,
        noop=floats(device, flag),
        **output.arguments(),
    )
    if flag == 0:
        output.check(values, 2.0)
        assert_bits(slot.tensor, torch.from_numpy(amax(values).reshape(1)))
    else:
        for memory in (output.row, output.column, output.scales, sums):
            assert memory.unwritten()
        assert_bits(slot.tensor, torch.tensor([0.5]))


# ---- counters and refusals -----------------------------------------------------------------------


def test_counted_once(device, counters, rng):
    values = normal(rng, (16, 16), F32, device)
    _core.quantize(values, amax=floats(device, 0.0))
    assert counters() == {f"op.{device}.quantize": 1} and op_count(device, "quantize") == 1


WRONG = {
    "integer input": (
        TypeError,
        r"input: dtype i32, expected f32, f16 or bf16",
        {"input": torch.zeros(4, 6, dtype=torch.int32)},
    ),
    "FP8 input": (TypeError, r"input: dtype e4m3, expected", {"input": torch.zeros(4, 6).to(E4M3)}),
    "scalar input": (
        ValueError,
        r"input: it has 0 dims, expected at least 1",
        {"input": torch.tensor(1.0)},
    ),
    "bf16 output": (
        TypeError,
        r"row: dtype bf16, expected e4m3 or e5m2",
        {"row": torch.zeros(4, 6, dtype=BF16)},
    ),
    "few rows": (
        ValueError,
        r"row: shape \[3, 6\], expected \[4, >= 6\]",
        {"row": torch.zeros(3, 6).to(E4M3)},
    ),
    "few columns": (
        ValueError,
        r"row: shape \[4, 5\], expected \[4, >= 6\]",
        {"row": torch.zeros(4, 5).to(E4M3)},
    ),
    "column untransposed": (
        ValueError,
        r"column: shape \[4, 6\], expected \[6, >= 4\]",
        {"column": torch.zeros(4, 6).to(E4M3)},
    ),
    "two formats": (
        TypeError,
        r"column: dtype e5m2, expected e4m3",
        {"column": torch.zeros(6, 4).to(E5M2)},
    ),
    "short bias_grad": (
        ValueError,
        r"bias_grad: .*length 5, expected a vector of 6",
        {"bias_grad": torch.zeros(5)},
    ),
    "FP8 bias_grad": (
        TypeError,
        r"bias_grad: dtype e4m3, expected",
        {"bias_grad": torch.zeros(6).to(E4M3)},
    ),
    "matrix bias_grad": (
        ValueError,
        r"bias_grad: it has 2 dims, expected 1",
        {"bias_grad": torch.zeros(1, 6)},
    ),
    "no scale": (
        ValueError,
        r"mode: neither scale nor partials is given",
        {"scale": None},
    ),
    "bf16 scale": (
        TypeError,
        r"scale: dtype bf16, expected f32",
        {"scale": torch.ones(1, dtype=BF16)},
    ),
    "one of two scales": (
        ValueError,
        r"row_scales: .*length 1, expected a vector of 2",
        {"row_scales": torch.zeros(1)},
    ),
    "no mode": (ValueError, r"mode: ", {"mode": _core.SCALING_NONE}),
    "unknown mode": (ValueError, r"mode: .*99", {"mode": 99}),
    "few partials": (
        ValueError,
        r"partials: 5 elements, expected at least 1024",
        {"scale": None, "partials": torch.zeros(5)},
    ),
    "no tensor": (TypeError, r"amax: expected a torch.Tensor, got <class 'float'>", {"amax": 1.0}),
    "no input": (TypeError, r"input: expected a torch.Tensor, got None", {"input": None}),
    "text epsilon": (
        TypeError,
        r"amax_epsilon: expected a float, got <class 'str'>",
        {"amax_epsilon": "0"},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned((4, 6), E4M3, device)
    good = {"input": torch.ones(4, 6), **operand(row=output.tensor), "scale": torch.ones(1)}
    check_refused("quantize", device, WRONG[case], good, output)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["row", "column", "scale", "amax", "bias_grad", "noop"])
def test_mixed_devices(name):
    arguments = {
        "mode": _core.SCALING_TENSOR,
        "row": torch.zeros(4, 4, dtype=E4M3, device="cuda"),
        "column": torch.zeros(4, 4, dtype=E4M3, device="cuda"),
        **{n: torch.zeros(1, device="cuda") for n in ("scale", "amax", "noop")},
        "bias_grad": torch.zeros(4, device="cuda"),
    }
    arguments[name] = arguments[name].cpu()
    with pytest.raises(
        ValueError, match=rf"quantize: {name}: it is on cpu:0 .* \.to\(\"cuda:0\"\)"
    ):
        _core.quantize(torch.ones(4, 4, device="cuda"), **arguments)


# ---- CUDA against CPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "source", "dtype"),
    [((63, 1000), source, dtype) for source in HIGH for dtype in FP8]  # every kernel
    + in_turns([(1, 1), (1024, 4096), (5000, 70)], HIGH, FP8),
    ids=case_id,
)
def test_cuda_equals_cpu(shape, source, dtype, rng):
    values = normal(rng, shape, source, scale=30.0)
    results = []
    for device in ("cpu", "cuda"):
        output = Output(shape, dtype, device, pad=(3, 5))
        slot = floats(device, 0.0)
        _core.quantize(
            values.to(device), scale=floats(device, 7.3), amax=slot, **output.arguments()
        )
        results.append((output.row.tensor, output.column.tensor, output.scales.tensor, slot))
    for on_cpu, on_cuda in zip(*results, strict=True):
        assert_bits(on_cuda, on_cpu)
