# SPDX-License-Identifier: Apache-2.0
"""norm: values and statistics against float64; FP8 forms against casts of the fp32 values."""

import numpy as np
import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, Poisoned, laid_out, name_of, names_of, normal
from comparators import assert_bits, assert_within
from fp8_output import (
    SCALE_OPTIONS,
    USAGES,
    Output,
    check_codes,
    check_current,
    check_delayed,
    check_nothing,
    check_repeats,
    fp32_of,
    padding,
)
from hypothesis import given, strategies as st
from layer_reference import NORMS, norm, norm_terms, statistics, wide
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

# Rows of one and of two columns; narrow ones like those of a head; odd, ragged and wide ones; and
# of whole vectors, for one warp, for two of which one has little, for several.
SHAPES = [(1, 1), (5, 1), (3, 2), (7, 3), (40, 64), (33, 17), (129, 127), (9, 1000), (2, 4099)]
SHAPES += [(150, 768), (11, 1096), (3, 8192)]
# (input, gamma and beta, output)
DTYPES = [
    (F32, F32, F32),
    (BF16, BF16, BF16),
    (F16, F16, F16),
    (BF16, F32, BF16),
    (F32, BF16, F16),
    (F16, F32, F32),
]
EPS = 1e-5


class Problem:
    """An input, its parameters, and one call.

    Parameters
    ----------
    rng, device :
        Of the data.
    kind : str
        Of NORMS.
    shape : tuple of int
        Of the input.
    dtypes : tuple
        Of input and of gamma and beta.
    zero_centered : bool
        The factor is 1 + gamma.
    layout : str
        Of LAYOUTS.
    mean, scale : float
        Of the input.
    """

    result = "wide"

    def __init__(self, rng, device, kind, shape, dtypes=(F32, F32), **options):
        self.kind, self.shape = kind, shape
        self.zero_centered = options.get("zero_centered", False)
        values = normal(rng, shape, F32, scale=options.get("scale", 1.0)) + options.get("mean", 0.0)
        self.x = values.to(dtypes[0])
        self.gamma = normal(rng, shape[1:], dtypes[1])
        self.beta = normal(rng, shape[1:], dtypes[1]) if kind == "layernorm" else None
        self.place(device, options.get("layout", "dense"))

    def place(self, device, layout="dense"):
        self.device, self.placed = device, laid_out(self.x, layout, device)

    def call(self, **arguments):
        parameters = {"gamma": self.gamma, "beta": self.beta}
        placed = {n: None if t is None else t.to(self.device) for n, t in parameters.items()}
        given = {"kind": NORMS[self.kind], "eps": EPS, "zero_centered": self.zero_centered}
        _core.norm(self.placed, **(placed | given | arguments))

    def weight(self):
        if self.gamma is None:
            return torch.ones(self.shape[1], dtype=torch.float64)
        return wide(self.gamma) + (1 if self.zero_centered else 0)

    def exact(self):
        """Values, their terms and the number of them."""
        none = torch.zeros(self.shape[1], dtype=torch.float64)
        beta = none if self.beta is None else wide(self.beta)
        x, weight = wide(self.x), self.weight()
        terms = norm_terms(self.kind, x, weight, beta, EPS)
        return norm(self.kind, x, weight, beta, EPS), terms, self.shape[1]

    def check(self, output):
        assert_within(output, *self.exact())

    def check_statistics(self, mean, rsigma):
        """fp32 statistics of the rows."""
        x = wide(self.x)
        exact_mean, exact_rsigma = statistics(self.kind, x, EPS)
        sizes = x.abs().mean(1)
        spread = exact_rsigma[:, 0] * (1 + (sizes * exact_rsigma[:, 0] if mean is not None else 0))
        assert_within(rsigma, exact_rsigma[:, 0], spread, self.shape[1])
        if mean is not None:
            assert_within(mean, exact_mean[:, 0], sizes, self.shape[1])


def check_norm(rng, device, kind, shape, dtypes=(F32, F32, F32), **options):
    """Compare one call and its statistics with float64."""
    problem = Problem(rng, device, kind, shape, dtypes[:2], **options)
    output = Poisoned(shape, dtypes[2], device, layout=options.get("layout", "dense"))
    mean = Poisoned(shape[:1], F32, device) if kind == "layernorm" else None
    rsigma = Poisoned(shape[:1], F32, device)
    problem.call(
        wide=output.tensor, rsigma=rsigma.tensor, mean=None if mean is None else mean.tensor
    )
    problem.check(output.tensor)
    problem.check_statistics(None if mean is None else mean.tensor, rsigma.tensor)
    assert output.untouched() and rsigma.untouched() and (mean is None or mean.untouched())


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", DTYPES[:2], ids=names_of)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", NORMS)
def test_shapes(device, kind, shape, dtypes, rng):
    check_norm(rng, device, kind, shape, dtypes)


@pytest.mark.parametrize("dtypes", DTYPES, ids=names_of)
@pytest.mark.parametrize("shape", [(65, 260), (20, 1096)])
@pytest.mark.parametrize("kind", NORMS)
def test_dtypes(device, kind, shape, dtypes, rng):
    check_norm(rng, device, kind, shape, dtypes)


@pytest.mark.parametrize("kind", NORMS)
def test_wide_rows(device, kind, rng):
    check_norm(rng, device, kind, (2, 50021))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("kind", NORMS)
def test_layouts(device, kind, source, layout, rng):
    check_norm(rng, device, kind, (37, 264), (source, source, source), layout=layout)


@pytest.mark.parametrize("kind", NORMS)
def test_zero_centered(device, kind, rng):
    """1 + gamma is made in fp32: a bf16 gamma of 2^-9 is not lost."""
    check_norm(rng, device, kind, (33, 130), (BF16, BF16, F32), zero_centered=True)
    problem = Problem(rng, device, kind, (4, 40), (F32, BF16), zero_centered=True)
    problem.gamma = torch.full((40,), 2.0**-9, dtype=BF16)
    problem.check(fp32_of(problem))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_without_parameters(device, kind, zero_centered, rng):
    """No gamma is a factor of 1, whether gamma counts from 0 or from 1; no beta adds nothing."""
    problem = Problem(rng, device, kind, (19, 70), zero_centered=zero_centered)
    problem.gamma = problem.beta = None
    problem.check(fp32_of(problem))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("mean", "scale"), [(1000.0, 1.0), (0.0, 1e-4), (0.0, 1e4), (-3e5, 50.0)])
def test_far_from_zero_and_of_any_size(device, kind, mean, scale, rng):
    """A mean that is large beside the spread costs the digits that the input lacks, no more."""
    check_norm(rng, device, kind, (21, 777), mean=mean, scale=scale)


@pytest.mark.parametrize("kind", NORMS)
def test_constant_rows(device, kind):
    """The variance is 0, not a small negative number: rsigma is that of eps alone."""
    x = torch.full((3, 1000), 12345.678, device=device)
    rsigma = torch.zeros(3, device=device)
    output = torch.empty(3, 1000, device=device)
    _core.norm(x, kind=NORMS[kind], wide=output, rsigma=rsigma)
    expected = statistics(kind, wide(x), EPS)[1][:, 0]
    assert output.isfinite().all()
    size = expected * (1 + wide(x).abs()[:, 0] * expected if kind == "layernorm" else 1)
    assert_within(rsigma, expected, size, 1000)


@given(data=st.data())
def test_any_shape_and_layout(device, data):
    shape = data.draw(st.tuples(st.integers(0, 70), st.integers(1, 300)))
    kind = data.draw(st.sampled_from(sorted(NORMS)))
    dtypes = data.draw(st.tuples(*[st.sampled_from(HIGH)] * 3))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    check_norm(rng, device, kind, shape, dtypes, layout=layout)


def test_leading_dims_are_rows(device, rng):
    x = normal(rng, (3, 2, 5, 24), BF16, device)
    output = torch.empty(30, 24, dtype=BF16, device=device)
    _core.norm(x, kind=_core.NORM_RMSNORM, wide=output)
    flat = torch.empty_like(output)
    _core.norm(x.reshape(30, 24), kind=_core.NORM_RMSNORM, wide=flat)
    assert_bits(output, flat)


@pytest.mark.parametrize("kind", NORMS)
def test_no_rows(device, kind, rng):
    problem = Problem(rng, device, kind, (0, 40))
    output, rsigma = torch.empty(0, 40, device=device), torch.empty(0, device=device)
    check_nothing(problem, wide=output, rsigma=rsigma)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", NORMS)
def test_nan_and_inf_stay_in_their_row(device, kind, special, rng):
    problem = Problem(rng, device, kind, (9, 200))
    clean = fp32_of(problem)
    problem.placed[4, 77] = special
    output = fp32_of(problem)
    others = [row for row in range(9) if row != 4]
    assert_bits(output[others], clean[others])
    assert output[4, 77].isnan()
    # An infinite element makes rsigma 0 where no mean is subtracted.
    rest = torch.cat([output[4, :77], output[4, 78:]])
    if kind == "layernorm" or special != special:
        assert rest.isnan().all()
    else:
        assert (rest == 0).all()


# ---- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", [(6, 1), (50, 64), (5, 3000)])
def test_given_statistics(device, kind, shape, rng):
    """Those of a first call give its bits; others are believed; neither is written."""
    problem = Problem(rng, device, kind, shape, (BF16, BF16))
    mean = torch.zeros(shape[0], device=device) if kind == "layernorm" else None
    rsigma = torch.zeros(shape[0], device=device)
    first, again = (torch.empty(shape, device=device) for _ in range(2))
    problem.call(wide=first, mean=mean, rsigma=rsigma)
    problem.call(wide=again, mean=mean, rsigma=rsigma, statistics_given=True)
    assert_bits(again, first)
    mean = None if mean is None else (mean + 0.25).contiguous()
    rsigma = rsigma * 1.5
    kept = (rsigma.clone(), None if mean is None else mean.clone())
    problem.call(wide=again, mean=mean, rsigma=rsigma, statistics_given=True)
    shift = 0 if mean is None else wide(mean)[:, None]
    beta = 0 if problem.beta is None else wide(problem.beta)
    weight, factor = problem.weight(), wide(rsigma)[:, None]
    exact = (wide(problem.x) - shift) * factor * weight + beta
    terms = (wide(problem.x).abs() + abs(shift)) * factor * weight.abs() + abs(beta)
    assert_within(again, exact, terms)
    assert_bits(rsigma, kept[0])
    if mean is not None:
        assert_bits(mean, kept[1])


def test_statistics_alone(device, rng):
    problem = Problem(rng, device, "layernorm", (70, 96), (BF16, BF16))
    mean, rsigma = torch.zeros(70, device=device), torch.zeros(70, device=device)
    problem.call(mean=mean, rsigma=rsigma)
    problem.check_statistics(mean, rsigma)


# ---- FP8 -----------------------------------------------------------------------------------------

CAST_SHAPES = [(1, 1), (17, 1), (16, 64), (65, 130), (129, 40), (3, 5001), (18, 1096)]


@pytest.mark.parametrize(
    ("kind", "shape", "usage", "dtype"), in_turns(NORMS, CAST_SHAPES, USAGES, FP8), ids=case_id
)
def test_delayed_scaling(device, kind, shape, usage, dtype, rng):
    problem = Problem(rng, device, kind, shape, (BF16, BF16))
    check_delayed(problem, dtype, 150.0, usage=usage, pad=padding(shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_delayed_scaling_layouts(device, source, dtype, layout, rng):
    problem = Problem(rng, device, "layernorm", (70, 300), (source, F32), layout=layout)
    check_delayed(problem, dtype, 37.0, layout=layout, pad=(7, 90))


# The cast takes fp32 values from whichever operator: code of its own.
@pairs(
    kind=NORMS,
    shape=SHAPES_OF_TILES,
    power_2=[False, True],
    mode=MODES,
)
def test_scales_of_rows_and_tiles(device, kind, shape, power_2, mode, rng):
    problem = Problem(rng, device, kind, shape, (BF16, F32))
    check_scaled(problem, mode, E5M2, 0.0, power_2, usages=USAGES, pad=(3, 5))


# As above.
@pairs(kind=NORMS, cast=MICRO, shape=SHAPES_OF_GROUPS)
def test_small_groups(device, kind, cast, shape, rng):
    problem = Problem(rng, device, kind, shape, (BF16, F32))
    check_micro(problem, cast, rng, usages=USAGES)


@each_source_and_layout
def test_small_groups_layouts(device, cast, source, layout, rng):
    problem = Problem(rng, device, "layernorm", (67, 130), (source, F32), layout=layout)
    check_micro(problem, cast, rng, pad=(3, 5), layout=layout)


@pytest.mark.parametrize("cast", MICRO)
def test_small_groups_of_no_rows(device, cast, rng):
    check_no_rows(Problem(rng, device, "rmsnorm", (0, 40)), cast, rng)


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize(("epsilon", "power_2"), SCALE_OPTIONS)
@pytest.mark.parametrize("shape", [(40, 64), (129, 257)])
@pytest.mark.parametrize("kind", NORMS)
def test_current_scaling(device, kind, shape, epsilon, power_2, usage, rng):
    problem = Problem(rng, device, kind, shape, (BF16, F32))
    check_current(problem, E5M2, epsilon, power_2, usage=usage, pad=(3, 5))


@pytest.mark.parametrize("kind", NORMS)
def test_cast_of_given_statistics(device, kind, rng):
    """Current scaling measures in a first call and casts in a second one, with its statistics."""
    problem = Problem(rng, device, kind, (33, 128), (BF16, BF16))
    mean = torch.zeros(33, device=device) if kind == "layernorm" else None
    rsigma, parts = torch.zeros(33, device=device), torch.zeros(_core.AMAX_PARTIALS, device=device)
    problem.call(mean=mean, rsigma=rsigma, amax_partials=parts)
    results = []
    for given_statistics in (False, True):
        output = Output((33, 128), E4M3, device)
        given = {"mean": mean, "rsigma": rsigma, "statistics_given": given_statistics}
        problem.call(partials=parts, **given, **output.arguments())
        results.append([m.tensor for m in output.memories()])
    for first, second in zip(*results, strict=True):
        assert_bits(second, first)


@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("kind", NORMS)
def test_codes_against_float64(device, kind, dtype, rng):
    problem = Problem(rng, device, kind, (65, 300), (BF16, BF16))
    check_codes(problem, problem.exact(), dtype, 29.0)


def test_nan_and_inf_in_fp8(device, rng):
    """NaN is kept and ignored by amax, Inf saturates and is the amax."""
    problem = Problem(rng, device, "rmsnorm", (20, 64))
    problem.placed[3, 5] = float("nan")
    problem.gamma[9] = float("inf")
    values = fp32_of(problem)
    assert values[3].isnan().all() and values[:3, 9].isinf().all()
    check_delayed(problem, E4M3, 8.0)


@pytest.mark.parametrize("shape", [(700, 530), (700, 1096)])
@pytest.mark.parametrize("kind", NORMS)
def test_twice_the_same(device, kind, shape, rng):
    problem = Problem(rng, device, kind, shape, (BF16, BF16))
    check_repeats(problem, E4M3, rsigma=shape[:1])


# ---- refusals ------------------------------------------------------------------------------------

WRONG = {
    "kind": (ValueError, r"kind: 3 does not exist, expected 0 to 2", {"kind": 3}),
    "text kind": (TypeError, r"kind: expected an int, got <class 'str'>", {"kind": "layernorm"}),
    "integer input": (
        TypeError,
        r"input: dtype i32, expected f32, f16 or bf16",
        {"input": torch.zeros(4, 6, dtype=torch.int32)},
    ),
    "no columns": (
        ValueError,
        r"input: shape \[4, 0\], expected at least one column",
        {"input": torch.zeros(4, 0)},
    ),
    "short gamma": (
        ValueError,
        r"gamma: ndim 1 and length 5, expected a vector of 6",
        {"gamma": torch.ones(5)},
    ),
    "beta's dtype": (
        TypeError,
        r"beta: dtype bf16, expected f32",
        {"beta": torch.ones(6, dtype=BF16)},
    ),
    "beta of RMSNorm": (
        ValueError,
        r"beta: kind 1 has none, only layernorm \(0\) has",
        {"kind": 1, "mean": None},
    ),
    "mean of L2": (
        ValueError,
        r"mean: kind 2 has none, only layernorm \(0\) has",
        {"kind": 2, "beta": None},
    ),
    "bf16 mean": (TypeError, r"mean: dtype bf16, expected f32", {"mean": torch.ones(4).to(BF16)}),
    "short rsigma": (
        ValueError,
        r"rsigma: .*length 3, expected a vector of 4",
        {"rsigma": torch.ones(3)},
    ),
    "no given mean": (
        ValueError,
        r"mean: is missing: statistics_given",
        {"statistics_given": True, "mean": None},
    ),
    "no given rsigma": (
        ValueError,
        r"rsigma: is missing: statistics_given",
        {"statistics_given": True, "rsigma": None},
    ),
    "output's shape": (
        ValueError,
        r"wide: shape \[4, 5\], expected \[4, 6\]",
        {"wide": torch.zeros(4, 5)},
    ),
    "FP8 output": (
        TypeError,
        r"wide: dtype e4m3, expected f32, f16 or bf16",
        {"wide": torch.zeros(4, 6).to(E4M3)},
    ),
    "negative eps": (ValueError, r"eps: -1, expected a finite number from 0 on", {"eps": -1.0}),
    "NaN eps": (ValueError, r"eps: -?nan, expected a finite number", {"eps": float("nan")}),
    "bf16 data": (
        TypeError,
        r"row: dtype bf16, expected e4m3 or e5m2",
        {"row": torch.zeros(4, 6, dtype=BF16)},
    ),
    "column untransposed": (
        ValueError,
        r"column: shape \[4, 6\], expected \[6, >= 4\]",
        {"column": torch.zeros(4, 6).to(E4M3)},
    ),
    "no scale": (
        ValueError,
        r"mode: neither scale nor partials is given",
        {"scale": None},
    ),
    "amax of no cast": (
        ValueError,
        r"amax: scaling mode none records none",
        {"mode": _core.SCALING_NONE, "row": None, "amax": torch.zeros(1)},
    ),
    "no input": (TypeError, r"input: expected a torch.Tensor, got None", {"input": None}),
    "unknown name": (TypeError, r"unexpected keyword argument 'epsilon'", {"epsilon": 1.0}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned((4, 6), E4M3, device)
    good = {
        "input": torch.ones(4, 6), "kind": 0, "gamma": torch.ones(6), "beta": torch.ones(6),
        "mean": torch.ones(4), "rsigma": torch.ones(4), "scale": torch.ones(1),
        **operand(row=output.tensor),
    }  # fmt: skip
    check_refused("norm", device, WRONG[case], good, output)


def test_partials_are_not_written_while_they_are_read(device):
    parts = torch.ones(_core.AMAX_PARTIALS, device=device)
    data = torch.zeros(4, 6, device=device).to(E4M3)
    with pytest.raises(ValueError, match="norm: amax_partials shares memory with partials"):
        _core.norm(
            torch.ones(4, 6, device=device),
            kind=0,
            **operand(row=data),
            partials=parts,
            amax_partials=parts,
        )


# ---- CUDA against CPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (63, 1000), (1024, 768), (5000, 70), (3, 40000)])
@pytest.mark.parametrize("kind", NORMS)
def test_cuda_equals_cpu(kind, shape, source, rng):
    """Both within the margin of the same exact values; the FP8 codes too."""
    problem = Problem(rng, "cpu", kind, shape, (source, source))
    exact = problem.exact()
    for device in ("cpu", "cuda"):
        problem.place(device)
        values = torch.empty(shape, device=device)
        check_codes(problem, exact, E4M3, 60.0, wide=values)
        assert_within(values, *exact)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(17000, 264), (9000, 1096)])
@pytest.mark.parametrize("kind", NORMS)
def test_rows_in_turns(kind, shape, rng):
    """So many that each of the blocks that stay meets more than are on their way at once."""
    check_norm(rng, "cuda", kind, shape, (BF16, BF16, BF16))
