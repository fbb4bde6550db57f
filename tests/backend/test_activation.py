# SPDX-License-Identifier: Apache-2.0
"""activation: values against float64; FP8 forms against casts of the fp32 values."""

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
from layer_reference import ACTIVATIONS, GATED, activation, activation_terms, wide
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

# Of the result; a gated activation reads twice the columns.
SHAPES = [(1, 1), (5, 1), (7, 3), (40, 64), (33, 17), (129, 127), (9, 1000), (2, 4099)]
# (input, output)
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16), (F16, BF16)]


class Problem:
    """An input, and one call.

    Parameters
    ----------
    rng, device :
        Of the data.
    name : str
        Of ACTIVATIONS.
    shape : tuple of int
        Of the result.
    dtype : torch.dtype
        Of the input.
    layout : str
        Of LAYOUTS.
    numbers :
        limit, alpha and linear_offset, where they are not the defaults.
    """

    result = "wide"

    def __init__(self, rng, device, name, shape, dtype=F32, *, layout="dense", **numbers):
        self.name, self.shape, self.numbers = name, shape, numbers
        columns = shape[1] * (2 if name in GATED else 1)
        self.x = normal(rng, (shape[0], columns), dtype, scale=3.0)
        self.place(device, layout)

    def place(self, device, layout="dense"):
        self.device, self.placed = device, laid_out(self.x, layout, device)

    def call(self, **results):
        _core.activation(self.placed, kind=ACTIVATIONS[self.name], **self.numbers, **results)

    def exact(self):
        """Values and their terms."""
        x = wide(self.x)
        return (
            activation(self.name, x, **self.numbers),
            activation_terms(self.name, x, **self.numbers),
        )

    def check(self, output):
        assert_within(output, *self.exact())


def check_activation(rng, device, name, shape, dtypes=(F32, F32), layout="dense", **numbers):
    """Compare one call with float64."""
    problem = Problem(rng, device, name, shape, dtypes[0], layout=layout, **numbers)
    output = Poisoned(shape, dtypes[1], device, layout=layout)
    problem.call(wide=output.tensor)
    problem.check(output.tensor)
    assert output.untouched()


# ---- values --------------------------------------------------------------------------------------


def test_names_are_those_of_the_constants():
    for name, number in ACTIVATIONS.items():
        assert getattr(_core, f"ACTIVATION_{name.upper()}") == number
    assert len(ACTIVATIONS) == len(set(ACTIVATIONS.values())) == 12


@pytest.mark.parametrize(
    ("name", "shape", "dtypes"), in_turns(ACTIVATIONS, SHAPES, DTYPES[:2]), ids=case_id
)
def test_shapes(device, name, shape, dtypes, rng):
    check_activation(rng, device, name, shape, dtypes)


@pytest.mark.parametrize("dtypes", DTYPES, ids=names_of)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dtypes(device, name, dtypes, rng):
    check_activation(rng, device, name, (65, 260), dtypes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_layouts(device, name, dtype, layout, rng):
    check_activation(rng, device, name, (37, 264), (dtype, dtype), layout)


@pytest.mark.parametrize("numbers", [
    {"limit": 2.0}, {"alpha": 0.5}, {"linear_offset": -0.75}, {"limit": 0.0},
    {"limit": 1.5, "alpha": -1.0, "linear_offset": 3.0}, {"limit": float("inf")},
], ids=str)  # fmt: skip
def test_numbers_of_clamped_swiglu(device, numbers, rng):
    check_activation(rng, device, "clamped_swiglu", (33, 130), **numbers)


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "clamped_swiglu"])
def test_the_others_ignore_those_numbers(device, name, rng):
    problem = Problem(rng, device, name, (20, 40))
    plain = fp32_of(problem)
    problem.numbers = {"limit": 0.5, "alpha": 9.0, "linear_offset": 4.0}
    assert_bits(fp32_of(problem), plain)


def ladder(dtype):
    """Numbers of every size up to the largest, of both signs, and both zeros."""
    top = torch.finfo(dtype).max
    sizes = torch.logspace(-30, 38, 545, dtype=torch.float64).clamp(max=top)
    sizes = torch.cat([torch.linspace(0, 120, 961, dtype=torch.float64), sizes])
    return torch.cat([sizes, -sizes]).to(dtype).reshape(1, -1)


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n not in ("srelu", "sreglu")])
def test_numbers_of_every_size(device, name, dtype, rng):
    """Where the exponential overflows the result has its limit: x or 0, never NaN."""
    problem = Problem(rng, device, name, (1, 1), dtype)
    a = ladder(dtype)
    problem.x = torch.cat([a, torch.ones_like(a)], dim=1) if name in GATED else a
    problem.shape = tuple(a.shape)
    problem.place(device)
    problem.check(fp32_of(problem))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_inf(device, name, rng):
    """NaN stays, in either half; at plus infinity the function is infinite or at its limit."""
    problem = Problem(rng, device, name, (6, 50))
    problem.placed[:, 0] = 1.0
    if name in GATED:
        problem.placed[:, 50] = 1.0
    problem.placed[1, 0], problem.placed[2, 0] = float("nan"), float("inf")
    if name in GATED:
        problem.placed[3, 50] = float("nan")
    output = fp32_of(problem)
    assert output[1, 0].isnan() and output[0].isfinite().all()
    if name in ("glu", "clamped_swiglu"):
        assert output[2, 0].isfinite() and output[2, 0] > 0
    else:
        assert output[2, 0] == float("inf")
    assert output[3, 0].isnan() == (name in GATED)
    assert output.isnan().sum() == (2 if name in GATED else 1)


def test_leading_dims_are_rows(device, rng):
    x = normal(rng, (3, 2, 5, 24), BF16, device)
    outputs = [torch.empty(30, 12, dtype=BF16, device=device) for _ in range(2)]
    for view, output in zip((x, x.reshape(30, 24)), outputs, strict=True):
        _core.activation(view, kind=_core.ACTIVATION_SWIGLU, wide=output)
    assert_bits(*outputs)


@pytest.mark.parametrize("name", ["gelu", "geglu"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 33), (33, 0)])
def test_empty_input(device, name, shape, rng):
    problem = Problem(rng, device, name, shape)
    check_nothing(problem, wide=torch.empty(shape, device=device))


# ---- FP8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 1), (16, 64), (65, 130)])
@pytest.mark.parametrize("name", ["relu", "gelu", "swiglu"])
def test_delayed_scaling_shapes(device, name, shape, usage, rng):
    problem = Problem(rng, device, name, shape, BF16)
    check_delayed(problem, E4M3, 90.0, usage=usage, pad=padding(shape))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_delayed_scaling(device, name, rng):
    problem = Problem(rng, device, name, (129, 40), BF16)
    check_delayed(problem, E4M3, 90.0, pad=(8, 15))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("name", ["srelu", "geglu"])
def test_delayed_scaling_layouts(device, name, source, dtype, layout, rng):
    problem = Problem(rng, device, name, (70, 300), source, layout=layout)
    check_delayed(problem, dtype, 37.0, layout=layout, pad=(7, 90))


# The cast takes fp32 values from whichever operator: code of its own.
@pairs(
    name=["gelu", "swiglu", "clamped_swiglu"],
    shape=SHAPES_OF_TILES,
    power_2=[False, True],
    mode=MODES,
)
def test_scales_of_rows_and_tiles(device, name, shape, power_2, mode, rng):
    problem = Problem(rng, device, name, shape, BF16)
    check_scaled(problem, mode, E5M2, 0.0, power_2, usages=USAGES, pad=(3, 5))


# As above.
@pairs(name=["gelu", "swiglu", "clamped_swiglu"], cast=MICRO, shape=SHAPES_OF_GROUPS)
def test_small_groups(device, name, cast, shape, rng):
    problem = Problem(rng, device, name, shape, BF16)
    check_micro(problem, cast, rng, usages=USAGES)


@each_source_and_layout
def test_small_groups_layouts(device, cast, source, layout, rng):
    problem = Problem(rng, device, "swiglu", (67, 130), source, layout=layout)
    check_micro(problem, cast, rng, pad=(3, 5), layout=layout)


@pytest.mark.parametrize("cast", MICRO)
def test_small_groups_of_no_rows(device, cast, rng):
    check_no_rows(Problem(rng, device, "swiglu", (0, 40)), cast, rng)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize(("epsilon", "power_2"), SCALE_OPTIONS)
@pytest.mark.parametrize("shape", [(40, 64), (129, 257)])
@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
def test_current_scaling(device, name, shape, epsilon, power_2, usage, rng):
    problem = Problem(rng, device, name, shape, BF16)
    check_current(problem, E5M2, epsilon, power_2, usage=usage, pad=(3, 5))


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_codes_against_float64(device, name, dtype, rng):
    problem = Problem(rng, device, name, (65, 300), BF16)
    check_codes(problem, problem.exact(), dtype, 29.0)


def test_nan_and_inf_in_fp8(device, rng):
    """NaN is kept and ignored by amax, Inf saturates and is the amax."""
    problem = Problem(rng, device, "silu", (20, 64))
    problem.placed[3, 5], problem.placed[4, 6] = float("nan"), float("inf")
    check_delayed(problem, E4M3, 8.0)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_twice_the_same(device, name, rng):
    check_repeats(Problem(rng, device, name, (700, 530), BF16), E4M3)


# ---- refusals ------------------------------------------------------------------------------------

WRONG = {
    "kind": (ValueError, r"kind: 12 does not exist, expected 0 to 11", {"kind": 12}),
    "negative kind": (ValueError, r"kind: -1 does not exist, expected 0 to 11", {"kind": -1}),
    "huge kind": (ValueError, r"kind: 4294967296 is out of range", {"kind": 2**32}),
    "odd halves": (
        ValueError,
        r"input: 7 columns, expected an even number for the two halves of swiglu",
        {"input": torch.ones(4, 7)},
    ),
    "FP8 input": (TypeError, r"input: dtype e4m3, expected", {"input": torch.ones(4, 12).to(E4M3)}),
    "output of both halves": (
        ValueError,
        r"wide: shape \[4, 12\], expected \[4, 6\]",
        {"wide": torch.ones(4, 12)},
    ),
    "integer output": (
        TypeError,
        r"wide: dtype i32, expected f32, f16 or bf16",
        {"wide": torch.ones(4, 6, dtype=torch.int32)},
    ),
    "column untransposed": (
        ValueError,
        r"column: shape \[4, 6\], expected \[6, >= 4\]",
        {"column": torch.ones(4, 6).to(E4M3)},
    ),
    "no scale": (ValueError, r"mode: neither scale nor partials is given", {"scale": None}),
    "amax of no cast": (
        ValueError,
        r"amax: scaling mode none records none",
        {"mode": _core.SCALING_NONE, "row": None, "amax": torch.zeros(1)},
    ),
    "negative limit": (
        ValueError,
        r"limit: -1, expected a number from 0 on",
        {"kind": _core.ACTIVATION_CLAMPED_SWIGLU, "limit": -1.0},
    ),
    "few partials": (
        ValueError,
        r"amax_partials: 5 elements, expected at least 1024",
        {"amax_partials": torch.zeros(5)},
    ),
    "text alpha": (TypeError, r"alpha: expected a float, got <class 'str'>", {"alpha": "1"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned((4, 6), E4M3, device)
    good = {
        "input": torch.ones(4, 12), "kind": _core.ACTIVATION_SWIGLU, **operand(row=output.tensor),
        "scale": torch.ones(1),
    }  # fmt: skip
    check_refused("activation", device, WRONG[case], good, output)


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
    """Both within the margin of the same exact values; the FP8 codes too."""
    problem = Problem(rng, "cpu", name, shape, dtype)
    exact = problem.exact()
    for device in ("cpu", "cuda"):
        problem.place(device)
        values = torch.empty(shape, device=device)
        check_codes(problem, exact, E4M3, 60.0, wide=values)
        assert_within(values, *exact)
