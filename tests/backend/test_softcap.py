# SPDX-License-Identifier: Apache-2.0
"""softcap: values and gradients against float64; FP8 forms against casts of the fp32 values."""

import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, RAGGED, Poisoned, laid_out, name_of, normal, op_count
from comparators import assert_bits, assert_within
from fp8_output import (
    SCALE_OPTIONS,
    USAGES,
    check_codes,
    check_current,
    check_delayed,
    check_nothing,
    check_repeats,
    fp32_of,
    padding,
)
from layer_reference import wide
from micro_output import (
    MICRO,
    check_micro,
    check_no_rows,
    each_cast_and_shape,
    each_source_and_layout,
)
from refusals import check_refused
from scaled_output import MODES, check_scaled
from tols import BF16, E4M3, E5M2, F32

from transformer_engine import _core

INF, NAN = float("inf"), float("nan")
DIRECTIONS = ["forward", "backward"]


class Problem:
    """An input, its gradient's where it is one, and one call (see fp8_output)."""

    result = "wide"

    def __init__(self, rng, device, direction, shape, dtype=F32, *, layout="dense", cap=2.5):
        self.device, self.shape, self.cap = device, shape, cap
        self.x = normal(rng, shape, dtype, scale=2 * cap)
        self.grad = normal(rng, shape, dtype) if direction == "backward" else None
        self.placed = laid_out(self.x, layout, device)
        self.arguments = {}
        if self.grad is not None:
            self.arguments["grad_output"] = laid_out(self.grad, layout, device)

    def call(self, **results):
        _core.softcap(self.placed, self.cap, **self.arguments, **results)

    def exact(self):
        """Values and their terms: the slope is known as well as 1 - tanh^2 from e^-2|u| can be."""
        u = wide(self.x) / self.cap
        if self.grad is None:
            values = self.cap * torch.tanh(u)
            return values, values.abs()
        values = wide(self.grad) / torch.cosh(u) ** 2
        return values, values.abs() * (2 + 2 * u.abs())

    def check(self, output):
        assert_within(output, *self.exact())


@pytest.fixture(params=DIRECTIONS)
def direction(request):
    return request.param


@pytest.mark.parametrize("columns", RAGGED)
@pytest.mark.parametrize("rows", [1, 17, 64, 130])
def test_shapes(device, direction, rows, columns, rng):
    problem = Problem(rng, device, direction, (rows, columns), BF16)
    output = Poisoned(problem.shape, F32, device)
    problem.call(wide=output.tensor)
    problem.check(output.tensor)
    assert output.untouched()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_dtypes_and_layouts(device, direction, source, dtype, layout, rng):
    problem = Problem(rng, device, direction, (33, 264), source, layout=layout)
    output = Poisoned(problem.shape, dtype, device, layout=layout)
    problem.call(wide=output.tensor)
    problem.check(output.tensor)
    assert output.untouched()


@pytest.mark.parametrize("cap", [1e-3, 1.0, 30.0, 1e4])
def test_caps(device, direction, cap, rng):
    problem = Problem(rng, device, direction, (20, 200), cap=cap)
    problem.check(fp32_of(problem))


def test_values_by_hand(device):
    """Small numbers are kept, large ones are the cap; slopes go from 1 to 0; NaN stays."""
    x = torch.tensor([[0.0, 1e-6, 1e30, -1e30, INF, -INF, NAN]], device=device)
    values, slopes = torch.empty_like(x), torch.empty_like(x)
    _core.softcap(x, 50.0, wide=values)
    _core.softcap(x, 50.0, grad_output=torch.ones_like(x), wide=slopes)
    for found, small, large in (
        (values, [0.0, 1e-6], [50.0, -50.0, 50.0, -50.0, NAN]),
        (slopes, [1.0, 1.0], [0.0, 0.0, 0.0, 0.0, NAN]),
    ):
        small = torch.tensor([small]).double()
        assert_within(found[:, :2], small, small)
        assert_bits(found[:, 2:], torch.tensor([large]), any_nan=True)


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_in_place(device, direction, dtype, rng):
    """The result may be the memory of what is read."""
    problem = Problem(rng, device, direction, (70, 130), dtype)
    apart = torch.empty(problem.shape, dtype=dtype, device=device)
    problem.call(wide=apart)
    target = problem.arguments.get("grad_output", problem.placed)
    problem.call(wide=target)
    assert_bits(target, apart)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (17, 1), (16, 64), (65, 130)])
def test_delayed_scaling(device, direction, shape, dtype, usage, rng):
    problem = Problem(rng, device, direction, shape, BF16)
    check_delayed(problem, dtype, 150.0, usage=usage, pad=padding(shape))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("usage", USAGES)
def test_scales_of_rows_and_tiles(device, direction, usage, mode, rng):
    problem = Problem(rng, device, direction, (129, 257), BF16)
    check_scaled(problem, mode, E5M2, usages=[usage], pad=(3, 5))


@each_cast_and_shape
def test_small_groups(device, direction, cast, shape, rng):
    problem = Problem(rng, device, direction, shape, BF16)
    check_micro(problem, cast, rng, usages=USAGES)


@each_source_and_layout
def test_small_groups_layouts(device, cast, source, layout, rng):
    problem = Problem(rng, device, "backward", (67, 130), source, layout=layout)
    check_micro(problem, cast, rng, pad=(3, 5), layout=layout)


@pytest.mark.parametrize("cast", MICRO)
def test_small_groups_of_no_rows(device, cast, rng):
    check_no_rows(Problem(rng, device, "forward", (0, 40)), cast, rng)


@pytest.mark.parametrize(("epsilon", "power_2"), SCALE_OPTIONS)
def test_current_scaling(device, direction, epsilon, power_2, rng):
    problem = Problem(rng, device, direction, (129, 257), BF16)
    check_current(problem, E5M2, epsilon, power_2, pad=(3, 5))


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
def test_codes_against_float64(device, direction, dtype, rng):
    problem = Problem(rng, device, direction, (65, 300), BF16)
    check_codes(problem, problem.exact(), dtype, 29.0)


@pytest.mark.parametrize("shape", [(0, 0), (0, 33), (33, 0)])
def test_empty_input(device, direction, shape, rng):
    check_nothing(Problem(rng, device, direction, shape), wide=torch.empty(shape, device=device))


def test_twice_the_same(device, direction, rng):
    check_repeats(Problem(rng, device, direction, (300, 530), BF16), E4M3)


def test_counted_once(device, counters):
    x = torch.ones(2, 2, device=device)
    _core.softcap(x, 1.0, wide=torch.empty_like(x))
    assert counters() == {f"op.{device}.softcap": 1} and op_count(device, "softcap") == 1


WRONG = {
    "no cap": (ValueError, r"cap: 0, expected a positive number", {"cap": 0.0}),
    "negative cap": (ValueError, r"cap: -1, expected a positive", {"cap": -1.0}),
    "NaN cap": (ValueError, r"cap: -?nan, expected a positive", {"cap": NAN}),
    "endless cap": (ValueError, r"cap: inf, expected a positive", {"cap": INF}),
    "integer input": (TypeError, r"input: dtype i32", {"input": torch.ones(4, 6).int()}),
    "other dtype": (
        TypeError,
        r"grad_output: dtype bf16, expected f32",
        {"grad_output": torch.ones(4, 6, dtype=BF16)},
    ),
    "other shape": (
        ValueError,
        r"grad_output: shape \[4, 5\], expected \[4, 6\]",
        {"grad_output": torch.ones(4, 5)},
    ),
    "no scale": (ValueError, r"mode: neither scale nor partials", {"mode": _core.SCALING_TENSOR}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned((4, 6), F32, device)
    good = {"input": torch.ones(4, 6), "cap": 2.0, "wide": output.tensor}
    check_refused("softcap", device, WRONG[case], good, output)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (63, 1000), (1024, 3072), (5000, 70)])
def test_cuda_large(direction, shape, dtype, rng):
    """Values and codes at sizes of many blocks."""
    problem = Problem(rng, "cuda", direction, shape, dtype)
    check_codes(problem, problem.exact(), E4M3, 60.0)
    problem.check(fp32_of(problem))
