# SPDX-License-Identifier: Apache-2.0
"""activation_backward: gradients against torch's float64 autograd of the definition."""

import itertools

import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, Poisoned, laid_out, name_of, names_of, normal
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
from layer_reference import ACTIVATIONS, GATED, activation, activation_grad_terms, wide
from micro_output import (
    MICRO,
    SHAPES_OF_GROUPS,
    check_micro,
    check_no_rows,
    each_source_and_layout,
)
from operands import operand
from refusals import check_refused
from scaled_output import MODES, SHAPES_OF_TILES, check_scaled
from thinning import case_id, in_turns, pairs
from tols import BF16, E4M3, E5M2, F16, F32

from transformer_engine import _core

# Of grad_output; a gated activation has twice the columns in its input and the gradient of it.
SHAPES = [(1, 1), (5, 1), (7, 3), (300, 64), (33, 17), (129, 127), (9, 1000), (2, 4099)]
# (input, grad_output, grad_input, bias_grad)
DTYPES = [
    (F32, F32, F32, F32),
    (BF16, BF16, BF16, BF16),
    (F16, F16, F16, F16),
    (BF16, F32, F32, BF16),
    (F32, BF16, F16, F32),
]


class Problem:
    """An input with an output gradient, and one call.

    Its arguments are those of the forward one in test_activation.py, but for `shape`, which is that
    of the output gradient, and `dtypes`, of the input and of the output gradient.
    """

    result = "wide"

    def __init__(self, rng, device, name, shape, dtypes=(F32, F32), *, layout="dense", **numbers):
        self.name, self.numbers = name, numbers
        self.shape = (shape[0], shape[1] * (2 if name in GATED else 1))
        self.x = normal(rng, self.shape, dtypes[0], scale=3.0)
        self.grad = normal(rng, shape, dtypes[1])
        self.place(device, layout)

    def place(self, device, layout="dense"):
        self.device = device
        self.placed = [laid_out(t, layout, device) for t in (self.grad, self.x)]

    def call(self, **results):
        kind = ACTIVATIONS[self.name]
        _core.activation_backward(*self.placed, kind=kind, **self.numbers, **results)

    def exact(self):
        """Gradient of the input and its terms."""
        x, grad = wide(self.x).requires_grad_(True), wide(self.grad)
        output = activation(self.name, x, **self.numbers)
        (exact,) = torch.autograd.grad(output, x, grad)
        return exact, activation_grad_terms(self.name, wide(self.x), grad, **self.numbers)

    def check(self, wide, bias_grad=None):
        exact, terms = self.exact()
        if wide is not None:
            assert_within(wide, exact, terms)
        if bias_grad is not None:
            assert_within(bias_grad, exact.sum(0), terms.sum(0), self.shape[0])


def check_gradient(rng, device, name, shape, dtypes=DTYPES[0], layout="dense", **numbers):
    """Compare one call with float64."""
    problem = Problem(rng, device, name, shape, dtypes[:2], layout=layout, **numbers)
    result = Poisoned(problem.shape, dtypes[2], device, layout=layout)
    sums = Poisoned(problem.shape[1:], dtypes[3], device, layout=layout)
    problem.call(wide=result.tensor, bias_grad=sums.tensor)
    problem.check(result.tensor, sums.tensor)
    assert result.untouched() and sums.untouched()


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "dtypes"), in_turns(ACTIVATIONS, SHAPES, DTYPES[:2]), ids=case_id
)
def test_shapes(device, name, shape, dtypes, rng):
    check_gradient(rng, device, name, shape, dtypes)


@pytest.mark.parametrize("dtypes", DTYPES, ids=names_of)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dtypes(device, name, dtypes, rng):
    check_gradient(rng, device, name, (65, 260), dtypes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_layouts(device, name, dtype, layout, rng):
    check_gradient(rng, device, name, (37, 264), (dtype,) * 4, layout)


@pytest.mark.parametrize("numbers", [
    {"limit": 2.0}, {"alpha": 0.5}, {"linear_offset": -0.75},
    {"limit": 1.5, "alpha": -1.0, "linear_offset": 3.0}, {"limit": float("inf")},
], ids=str)  # fmt: skip
def test_numbers_of_clamped_swiglu(device, numbers, rng):
    check_gradient(rng, device, "clamped_swiglu", (33, 130), **numbers)


@pytest.mark.parametrize("name", ["gelu", "geglu"])
@pytest.mark.parametrize("shape", [(5000, 8), (2500, 40), (1025, 1)])
def test_many_rows(device, name, shape, rng):
    """Column sums over many more rows than one block takes."""
    check_gradient(rng, device, name, shape, DTYPES[3])


@pytest.mark.parametrize("name", ["relu", "srelu", "reglu", "sreglu"])
def test_slope_of_relu_at_0_is_0(device, name):
    columns = 4 if name in GATED else 2
    x = torch.ones(1, columns, device=device)
    x[0, 0], x[0, 1] = 0.0, -0.0
    result = torch.full((1, columns), 5.0, device=device)
    _core.activation_backward(
        torch.ones(1, 2, device=device), x, kind=ACTIVATIONS[name], wide=result
    )
    assert (result[0, :2] == 0).all()


def test_slope_of_a_clamp_at_its_limit_is_1(device):
    """Inside and at the limit a value counts, beyond it does not."""
    limit, edge = 2.0, 2.0 + 2.0**-20
    a = torch.tensor([limit, edge, 0.5, 0.5, 0.5, 0.5])
    b = torch.tensor([0.5, 0.5, limit, edge, -limit, -edge])
    x = torch.cat([a, b]).reshape(1, 12).to(device)
    result = torch.empty(1, 12, device=device)
    _core.activation_backward(
        torch.ones(1, 6, device=device), x, kind=_core.ACTIVATION_CLAMPED_SWIGLU,
        wide=result, limit=limit,
    )  # fmt: skip
    of_a, of_b = result[0, :6], result[0, 6:]
    assert (of_a != 0).tolist() == [True, False, True, True, True, True]
    assert (of_b != 0).tolist() == [True, True, True, False, True, False]


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n not in ("srelu", "sreglu")])
def test_numbers_of_every_size(device, name, dtype, rng):
    """Slopes reach their limits, 0 and 1, without a NaN on the way."""
    problem = Problem(rng, device, name, (1, 1), (dtype, F32))
    sizes = torch.cat([torch.linspace(0, 60, 481), torch.logspace(-20, 4, 97)]).to(dtype)
    a = torch.cat([sizes, -sizes]).reshape(1, -1)
    problem.x = torch.cat([a, torch.ones_like(a)], dim=1) if name in GATED else a
    problem.grad, problem.shape = torch.ones(a.shape), tuple(problem.x.shape)
    problem.place(device)
    result = fp32_of(problem)
    assert result.isfinite().all()
    problem.check(result)


def test_nan_stays_in_its_place(device, rng):
    problem = Problem(rng, device, "swiglu", (9, 50))
    clean = fp32_of(problem)
    problem.placed[0][4, 7] = float("nan")
    sums = torch.empty(100, device=device)
    result = torch.empty(9, 100, device=device)
    problem.call(wide=result, bias_grad=sums)
    expected = torch.zeros(9, 100, dtype=torch.bool)
    expected[4, 7] = expected[4, 57] = True
    assert torch.equal(result.isnan().cpu(), expected)
    assert torch.equal(sums.isnan().cpu(), expected.any(0))
    assert_bits(result[:4], clean[:4])


@pytest.mark.parametrize("wanted", ["wide", "bias_grad"])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_one_of_the_results(device, name, wanted, rng):
    problem = Problem(rng, device, name, (130, 96), (BF16, BF16))
    shapes = {"wide": problem.shape, "bias_grad": problem.shape[1:]}
    alone = Poisoned(shapes[wanted], F32, device)
    problem.call(**{wanted: alone.tensor})
    problem.check(**({"wide": None} | {wanted: alone.tensor}))
    assert alone.untouched()


@pytest.mark.parametrize("name", ["gelu", "geglu"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 33), (33, 0)])
def test_empty_input(device, name, shape, rng):
    """Sums of nothing are 0."""
    problem = Problem(rng, device, name, shape)
    sums = Poisoned(problem.shape[1:], F32, device)
    check_nothing(problem, bias_grad=sums.tensor)
    assert_bits(sums.tensor, torch.zeros(problem.shape[1]))


# ---- FP8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 1), (16, 64), (65, 130)])
@pytest.mark.parametrize("name", ["relu", "gelu", "swiglu"])
def test_delayed_scaling_shapes(device, name, shape, usage, rng):
    problem = Problem(rng, device, name, shape, (BF16, BF16))
    check_delayed(problem, E5M2, 9e3, usage=usage, pad=padding(problem.shape))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_delayed_scaling(device, name, rng):
    problem = Problem(rng, device, name, (129, 40), (BF16, BF16))
    check_delayed(problem, E5M2, 9e3, pad=(8, 15))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_delayed_scaling_layouts(device, name, source, dtype, layout, rng):
    problem = Problem(rng, device, name, (70, 300), (source, source), layout=layout)
    check_delayed(problem, dtype, 37.0, layout=layout, pad=(7, 90))


# The cast takes fp32 values from whichever operator: code of its own.
@pairs(
    name=["gelu", "swiglu", "clamped_swiglu"],
    shape=SHAPES_OF_TILES,
    power_2=[False, True],
    mode=MODES,
)
def test_scales_of_rows_and_tiles(device, name, shape, power_2, mode, rng):
    problem = Problem(rng, device, name, shape, (BF16, BF16))
    check_scaled(problem, mode, E4M3, 0.0, power_2, usages=USAGES, pad=(3, 5))


# As above.
@pairs(name=["gelu", "swiglu", "clamped_swiglu"], cast=MICRO, shape=SHAPES_OF_GROUPS)
def test_small_groups(device, name, cast, shape, rng):
    problem = Problem(rng, device, name, shape, (BF16, BF16))
    check_micro(problem, cast, rng, usages=USAGES, sums=True)


@each_source_and_layout
def test_small_groups_layouts(device, cast, source, layout, rng):
    problem = Problem(rng, device, "swiglu", (67, 192), (source, source), layout=layout)
    check_micro(problem, cast, rng, pad=(3, 5), layout=layout)


@pytest.mark.parametrize("cast", MICRO)
def test_small_groups_of_no_rows(device, cast, rng):
    check_no_rows(Problem(rng, device, "swiglu", (0, 40)), cast, rng)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize(("epsilon", "power_2"), SCALE_OPTIONS)
@pytest.mark.parametrize("shape", [(40, 64), (129, 257)])
@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
def test_current_scaling(device, name, shape, epsilon, power_2, usage, rng):
    problem = Problem(rng, device, name, shape, (BF16, BF16))
    check_current(problem, E4M3, epsilon, power_2, usage=usage, pad=(3, 5))


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_codes_and_sums_against_float64(device, name, dtype, rng):
    """The sums are those of the fp32 values, not of the codes beside them."""
    problem = Problem(rng, device, name, (65, 300), (BF16, BF16))
    sums = Poisoned(problem.shape[1:], F32, device)
    check_codes(problem, problem.exact(), dtype, 29.0, bias_grad=sums.tensor)
    problem.check(None, sums.tensor)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
@pytest.mark.parametrize("shape", [(700, 530), (3000, 16)])
def test_twice_the_same(device, name, shape, rng):
    problem = Problem(rng, device, name, shape, (BF16, BF16))
    check_repeats(problem, E5M2, bias_grad=problem.shape[1:])


# ---- refusals ------------------------------------------------------------------------------------

WRONG = {
    "kind": (ValueError, r"kind: 12 does not exist, expected 0 to 11", {"kind": 12}),
    "odd halves": (
        ValueError,
        r"input: 7 columns, expected an even number for the two halves of swiglu",
        {"input": torch.ones(4, 7)},
    ),
    "gradient of both halves": (
        ValueError,
        r"grad_output: shape \[4, 12\], expected \[4, 6\]",
        {"grad_output": torch.ones(4, 12)},
    ),
    "FP8 gradient": (
        TypeError,
        r"grad_output: dtype e4m3, expected",
        {"grad_output": torch.ones(4, 6).to(E4M3)},
    ),
    "result of one half": (
        ValueError,
        r"wide: shape \[4, 6\], expected \[4, 12\]",
        {"wide": torch.ones(4, 6)},
    ),
    "sums of one half": (
        ValueError,
        r"bias_grad: .*length 6, expected a vector of 12",
        {"bias_grad": torch.ones(6)},
    ),
    "FP8 sums": (
        TypeError,
        r"bias_grad: dtype e4m3, expected f32, f16 or bf16",
        {"bias_grad": torch.ones(12).to(E4M3)},
    ),
    "FP8 of one half": (
        ValueError,
        r"column: shape \[6, 4\], expected \[12, >= 4\]",
        {"column": torch.ones(6, 4).to(E4M3)},
    ),
    "no scale": (ValueError, r"mode: neither scale nor partials is given", {"scale": None}),
    "NaN limit": (
        ValueError,
        r"limit: -?nan, expected a number from 0 on",
        {"kind": _core.ACTIVATION_CLAMPED_SWIGLU, "limit": float("nan")},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned((4, 12), E4M3, device)
    good = {
        "grad_output": torch.ones(4, 6), "input": torch.ones(4, 12), "scale": torch.ones(1),
        "kind": _core.ACTIVATION_SWIGLU, **operand(row=output.tensor),
    }  # fmt: skip
    check_refused("activation_backward", device, WRONG[case], good, output)


# ---- CUDA against CPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        *itertools.product(ACTIVATIONS, HIGH, [(63, 1000)]),  # every kernel
        *in_turns(["relu", "gelu", "swiglu"], HIGH, [(1, 1), (1024, 3072), (5000, 70)]),
    ],
    ids=case_id,
)
def test_cuda_equals_cpu(name, shape, dtype, rng):
    """Both within the margin of the same exact gradients; the FP8 codes too."""
    problem = Problem(rng, "cpu", name, shape, (dtype, dtype))
    exact = problem.exact()
    for device in ("cpu", "cuda"):
        problem.place(device)
        sums = torch.empty(problem.shape[1], device=device)
        values = torch.empty_like(problem.placed[1])
        check_codes(problem, exact, E5M2, 60.0, wide=values, bias_grad=sums)
        problem.check(values, sums)
