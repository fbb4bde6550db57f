# SPDX-License-Identifier: Apache-2.0
"""MXFP8 and NVFP4: codes, scales and layouts against their definition, and back again."""

import numpy as np
import pytest
import torch
from buffers import HIGH, laid_out, name_of, op_count
from comparators import assert_bits, assert_repeats
from microscaled import (
    GROUP,
    KINDS,
    MODES,
    SETTINGS,
    SIGNS,
    cast,
    expected,
    groups_of_kinds,
    hadamard,
    largest_of,
    mxfp8_values,
    nvfp4_values,
    one_usage,
    partials,
    uniform_numbers,
)
from reference import as_f32
from tols import BF16, E4M3, E5M2, EPS, F32, tol

from transformer_engine import _core

MXFP8, NVFP4 = MODES.values()
OPTIONS = {
    "mxfp8": (MXFP8, {}),
    "mxfp8-e5m2": (MXFP8, {"dtype": E5M2}),
    "mxfp8-square": (MXFP8, {"square": True}),
    "nvfp4": (NVFP4, {}),
    "nvfp4-square": (NVFP4, {"square": True}),
    "nvfp4-rht": (NVFP4, {"rht": True}),
    "nvfp4-rht-unsigned": (NVFP4, {"rht": 2}),
    "mxfp8-margin": (MXFP8, {"margin": 2}),
    "mxfp8-negative": (MXFP8, {"margin": -3, "square": True, "dtype": E5M2}),
    "nvfp4-4over6": (NVFP4, {"err_mode": "MAE", "to_256": True}),
    "nvfp4-4over6-mse": (NVFP4, {"err_mode": "MSE"}),
    "nvfp4-4over6-square": (NVFP4, {"err_mode": "MSE", "to_256": True, "square": True}),
    "nvfp4-rows": (NVFP4, {"row_scaled": True}),
    "nvfp4-rows-rht": (NVFP4, {"row_scaled": True, "rht": True}),
    "nvfp4-rows-4over6": (NVFP4, {"row_scaled": True, "err_mode": "MAE", "to_256": True}),
}
SATURATING = ("mxfp8-negative", "nvfp4-4over6-mse")
"""A negative margin; 448 / 4 of the tensor's amax."""
RAGGED_SHAPES = [(1, 1), (1, 33), (31, 16), (33, 47), (65, 127), (128, 128), (129, 257), (70, 514)]
options = pytest.mark.parametrize("name", OPTIONS)


def check(x, mode, usage="both", **how):
    """Cast and compare every byte, padding included."""
    actual = cast(x, mode, usage=usage, **how)
    wanted = expected(x, mode, **how)
    for name, value in actual.items():
        if name not in SETTINGS:
            assert_bits(value.cpu(), wanted[name])


# ---- casts ---------------------------------------------------------------------------------------


@options
@pytest.mark.parametrize("source", HIGH, ids=name_of)
def test_groups_of_every_kind(device, name, source, rng):
    """2,400 groups of a row and 2,560 of a column each: 89,280 cases in all."""
    mode, how = OPTIONS[name]
    check(groups_of_kinds(rng, (160, 480), source).to(device), mode, **how)


@options
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_kind(device, name, kind, rng):
    mode, how = OPTIONS[name]
    check(groups_of_kinds(rng, (48, 96), F32, (kind,)).to(device), mode, **how)


@options
@pytest.mark.parametrize("shape", RAGGED_SHAPES, ids=str)
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_ragged(device, name, shape, usage, rng):
    mode, how = OPTIONS[name]
    check(groups_of_kinds(rng, shape, BF16).to(device), mode, usage, **how)


@options
@pytest.mark.parametrize("layout", ["misaligned", "strided", "ragged"])
def test_layouts_of_the_input(device, name, layout, rng):
    mode, how = OPTIONS[name]
    x = groups_of_kinds(rng, (67, 130), BF16)
    check(laid_out(x, layout, device), mode, **how)


@options
@pytest.mark.parametrize("shape", [(0, 32), (32, 0)], ids=str)
def test_empty(device, name, shape):
    mode, how = OPTIONS[name]
    check(torch.empty(shape, device=device), mode, **how)


@options
def test_largest_numbers(device, name):
    """What is close to the largest number of a dtype stands for finite numbers."""
    mode, how = OPTIONS[name]
    for source in HIGH:
        x = torch.full((32, 64), torch.finfo(source).max, dtype=source, device=device)
        x[::3] *= -0.75
        check(x, mode, **how)
        assert back(cast(x, mode, **how), x.shape, source).isfinite().all()


@options
def test_repeats(device, name, rng):
    mode, how = OPTIONS[name]
    x = groups_of_kinds(rng, (130, 200), BF16).to(device)
    assert_repeats(lambda: [v for n, v in cast(x, mode, **how).items() if n not in SETTINGS])


@options
def test_noop_leaves_everything(device, name, rng):
    mode, how = OPTIONS[name]
    x = torch.zeros(40, 40, device=device)
    before = cast(x + 1, mode, **how)
    kept = {n: v.clone() for n, v in before.items() if n not in SETTINGS}
    more = {}
    if mode == NVFP4:
        more = {"partials": partials(x), "column_partials": partials(x)}
        more["hadamard"] = int(how.get("rht", False))
        more["row_scaled"] = int(how.get("row_scaled", False))
    flag = torch.ones(1, device=device)
    _core.quantize(x, **before, **more, noop=flag)
    for n, value in kept.items():
        assert_bits(before[n], value)


@options
def test_column_sums(device, name, rng):
    mode, how = OPTIONS[name]
    x = torch.from_numpy(rng.integers(-8, 8, (150, 70))).to(F32).to(device)
    sums = torch.empty(70, device=device)
    cast(x, mode, **how, bias_grad=sums)
    assert_bits(sums.cpu(), x.cpu().sum(0))


# ---- the transform -------------------------------------------------------------------------------


def test_hadamard_amax(device, rng):
    x = groups_of_kinds(rng, (161, 97), BF16, ("random", "wide", "nan", "zero")).to(device)
    found = partials(x, True)
    assert not found.isnan().any()
    wanted = largest_of(hadamard(as_f32(x)))
    assert_bits(found.max().cpu().reshape(1), torch.from_numpy(np.float32([wanted])))


def test_hadamard_is_the_matrix(rng):
    """diag(signs) H16 / 4, orthogonal: a product of two operands so made is theirs."""
    x = torch.from_numpy(rng.standard_normal((48, 8))).to(BF16)
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = SIGNS[:, None].astype(np.float64) * matrix / 4
    assert (matrix @ matrix.T == np.eye(16)).all()  # sums of quarters
    exact = matrix.T @ as_f32(x).astype(np.float64).reshape(3, 16, 8)
    error = np.abs(hadamard(as_f32(x)).reshape(3, 16, 8) - exact)
    assert (error <= EPS[BF16] / 2 * np.abs(exact) + 16 * EPS[F32]).all()


# ---- stochastic rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("rht", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (33, 50)], ids=str)
def test_stochastic_bits(device, rht, shape, rng):
    """The same bits on every backend, from the pair alone."""
    x = groups_of_kinds(rng, shape, BF16, ("random", "zero", "outlier"))
    seed, offset = (int(v) for v in rng.integers(0, 2**62, 2))
    pair = torch.tensor([seed, offset], device=device)
    actual = cast(x.to(device), NVFP4, rht=rht, rng=pair)
    wanted = expected(x, NVFP4, rht=rht, random=uniform_numbers(seed, offset, shape))
    for name, value in actual.items():
        if name not in SETTINGS:
            assert_bits(value.cpu(), wanted[name])


def test_stochastic_mean(device, rng):
    """The average over many pairs is the value: within 5 deviations of the mean."""
    times, count = 400, 512
    x = torch.from_numpy(rng.uniform(-1, 1, (1, count))).to(F32)
    x[0, 0::16] = 1.0  # one scale, that is exact
    total = torch.zeros(1, count, dtype=torch.float64)
    for _ in range(times):
        pair = torch.from_numpy(rng.integers(0, 2**62, 2)).to(device)
        data = cast(x.to(device), NVFP4, usage="row", rng=pair)
        total += back(data, x.shape, F32).cpu().double()
    step = 2.0 / 6  # between the largest two numbers
    assert ((total / times - x).abs() <= 5 * step / 2 / times**0.5 + 1e-6).all()
    nearest = back(cast(x.to(device), NVFP4, usage="row"), x.shape, F32).cpu()
    assert ((nearest - x).abs() > 5 * step / 2 / times**0.5).any()


# ---- back ----------------------------------------------------------------------------------------


def back(data, shape, dtype):
    """The values that data stands for."""
    device = next(v.device for n, v in data.items() if n not in SETTINGS)
    output = torch.full(shape, torch.nan, dtype=dtype, device=device)
    _core.dequantize(output, **data)
    return output


@options
@pytest.mark.parametrize("usage", ["row", "column"])
@pytest.mark.parametrize("target", HIGH, ids=name_of)
def test_dequantize(device, name, usage, target, rng):
    mode, how = OPTIONS[name]
    x = groups_of_kinds(rng, (77, 147), F32)
    data = cast(x.to(device), mode, usage=usage, **how)
    plain = {n: v.cpu() for n, v in data.items() if n not in SETTINGS}
    codes, scales = plain[usage], plain[f"{usage}_scales"]
    if mode == MXFP8:
        wanted = mxfp8_values(codes, scales, 1 if usage == "row" else 0, target)
    else:
        to_256 = how.get("to_256", False)
        wanted = nvfp4_values(codes, scales, plain[f"{usage}_amax"], target, to_256)
        wanted = (wanted if usage == "row" else wanted.T)[:77, :147]
    assert_bits(back(data, x.shape, target).cpu(), wanted.contiguous(), any_nan=True)


@pytest.mark.parametrize("name", [n for n in OPTIONS if "rht" not in n])
@pytest.mark.parametrize("usage", ["row", "column"])
def test_no_nan_or_inf_that_was_not_there(device, name, usage, rng):
    """Of NVFP4 the group of a NaN is NaN; elsewhere all is finite."""
    mode, how = OPTIONS[name]
    x = groups_of_kinds(rng, (96, 192), F32)
    values = back(cast(x.to(device), mode, usage=usage, **how), x.shape, F32).cpu()
    nan = x.isnan()
    if mode == NVFP4:
        tiles = nan.reshape(6, 16, 12, 16)
        nan = tiles.any(3 if usage == "row" else 1, keepdim=True)
        if how.get("square"):
            nan = nan.any(1 if usage == "row" else 3, keepdim=True)
        nan = nan.expand(6, 16, 12, 16).reshape(96, 192)
    assert torch.equal(values.isnan(), nan)
    assert not values.isinf().any()


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in SATURATING])
def test_close(device, name, rng):
    """Within half a step of the format, at the largest magnitude of a group."""
    mode, how = OPTIONS[name]
    x = torch.from_numpy(rng.standard_normal((128, 256))).to(F32)
    values = back(cast(x.to(device), mode, **how), x.shape, F32).cpu()
    groups = x.reshape(-1, GROUP[mode]).abs().amax(1, keepdim=True)
    family = "half_step" if mode == MXFP8 else "half_step_nvfp4"
    bound = tol(family, how.get("dtype", E4M3))
    reach = x.abs().amax() if how.get("square") else groups
    assert ((values - x).reshape(-1, GROUP[mode]).abs() <= bound * reach).all()


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("err_mode", ["MAE", "MSE"])
def test_four_over_six_loses_less(device, square, err_mode, rng):
    """No group loses more than with 6 alone; of 4 / 4 and 3 / 4 of something, some lose less.

    Where there are two ways the scale for 6 is rounded otherwise: a few are the next E4M3 number,
    whether that is used or has lost against the scale for 4.
    """
    x = rng.choice([-1, -0.75, 0.75, 1], (8, 16, 16, 16)) * rng.uniform(1, 2, (8, 1, 16, 1))
    x[:, :, ::2] = rng.standard_normal((8, 16, 8, 16))
    x = torch.from_numpy(x.reshape(128, 256)).to(F32)
    losses, scales = [], []
    for way in (None, err_mode):
        how = {"usage": "row", "to_256": True, "square": square, "err_mode": way}
        data = cast(x.to(device), NVFP4, **how)
        scales.append(data["row_scales"][:: 16 if square else 1].short().cpu())
        error = (back(data, x.shape, F32).cpu() - x).double().abs()
        error = error if err_mode == "MAE" else error.square()
        shape = (8, 16, 16, 16) if square else (128, 1, 16, 16)
        losses.append(error.reshape(shape).sum((1, 3)))
    plain, chosen = losses
    next_one = (scales[0] - scales[1]).abs() == 1
    loses_more = chosen > plain * (1 + tol("sum", F32, 256) + 4 * EPS[F32])
    assert (next_one | loses_more).sum() <= 4
    assert (chosen < plain).any()


def test_counted(device):
    _core.reset_counters()
    cast(torch.ones(32, 32, device=device), MXFP8)
    assert op_count(device, "quantize") == 1


# ---- refusals ------------------------------------------------------------------------------------


def nvfp4_call(x, **changes):
    data = cast(x, NVFP4)
    given = {**data, "partials": partials(x), **changes}
    _core.quantize(x, **{k: v for k, v in given.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partials": None}, "partials"),
        ({"hadamard": 1}, "column_partials"),
        ({"hadamard": 3}, "hadamard"),
        ({"hadamard": 1, "square": 1}, "hadamard"),
        ({"row_amax": None}, "row_amax"),
        ({"row_scales": None}, "row_scales"),
        ({"margin": 1}, "margin"),
        ({"four_over_six": 3}, "four_over_six"),
        ({"four_over_six": 1, "rng": torch.zeros(2, dtype=torch.int64)}, "four_over_six"),
        ({"row_scaled": 1}, "row_amax"),
        ({"row_scaled": 1, "square": 1}, "row_scaled"),
    ],
)
def test_what_nvfp4_needs(changes, words):
    with pytest.raises(ValueError, match=words):
        nvfp4_call(torch.ones(16, 16), **changes)


def test_what_mxfp8_does_not_have():
    x = torch.ones(32, 32)
    data = cast(x, MXFP8)
    pair = torch.zeros(2, dtype=torch.int64)
    for more, words in (
        ({"rng": pair}, "rng"),
        ({"hadamard": 1}, "hadamard"),
        ({"partials": partials(x)}, "partials"),
        ({"scale": torch.ones(1)}, "scale"),
        ({"four_over_six": 1}, "four_over_six"),
        ({"scales_to_256": 1}, "scales_to_256"),
        ({"row_scaled": 1}, "row_scaled"),
        ({"margin": 127}, "margin"),
    ):
        with pytest.raises(ValueError, match=words):
            _core.quantize(x, **data, **more)


def test_rows_are_measured_by_quantize_alone():
    x = torch.ones(32, 32)
    data = one_usage(cast(x, NVFP4, row_scaled=True), "row")
    with pytest.raises(ValueError, match="row_scaled: te_quantize alone"):
        _core.softcap(x, 1.0, **data, row_scaled=1)


def test_wrong_dtypes():
    x = torch.ones(32, 32)
    data = one_usage(cast(x, MXFP8), "row")
    with pytest.raises(TypeError, match="e4m3 or e5m2"):
        _core.quantize(x, **{**data, "row": data["row"].view(torch.uint8)})
    with pytest.raises(TypeError, match="row_scales.*u8"):
        _core.quantize(x, **{**data, "row_scales": torch.ones(128, 4)})
    with pytest.raises(ValueError, match="row_scales"):
        _core.quantize(x, **{**data, "row_scales": data["row_scales"][:64]})
