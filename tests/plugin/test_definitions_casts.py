# SPDX-License-Identifier: Apache-2.0
"""Casts by their definition in torch have the bits of the C code, in all memory of a call."""

import contextlib
import math

import numpy as np
import pytest
import torch
from buffers import FP8, HIGH, LAYOUTS, Poisoned, every_value, floats, laid_out, normal
from comparators import assert_bits, assert_within
from definitions import assert_defined, by_definition
from fp8_output import USAGES
from microscaled import (
    KINDS,
    MODES as MICRO,
    cast as cast_micro,
    forms,
    groups_of_kinds,
    one_usage,
    partials,
)
from reference import boundaries
from scaled_output import MODES as TILES, Scaled
from thinning import pairs
from tols import BF16, E4M3, E5M2, F16, F32
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine import _core
from transformer_engine.plugin import definitions
from transformer_engine.plugin.definitions import casts

SIZES = (1, 15, 33, 64, 127, 130, 257)
FINITE = ("random", "denormal", "zero")
TENSOR = _core.SCALING_TENSOR


def shape_of(rng):
    return tuple(int(n) for n in rng.choice(SIZES, 2))


def matrix(rng, shape, dtype, layout="dense", kinds=KINDS):
    """Groups of all kinds, NaN, Inf and subnormals among them, in one of the LAYOUTS."""
    return laid_out(groups_of_kinds(rng, shape, dtype, kinds), layout, "cpu")


def poisoned(shape, dtype, layout="dense"):
    return Poisoned(shape, dtype, "cpu", layout=layout).tensor


def check(op, *args, **fields):
    """A call by definition, beside the same of the C code."""
    return assert_defined(op, *args, **fields)


def check_sums(found, x):
    """Column sums of one call, beside those of the C code in another order."""
    exact = x.double()
    for sums in found["bias_grad"]:
        assert_within(sums, exact.sum(0), exact.abs().sum(0), len(x))


# ---- one scale -----------------------------------------------------------------------------------


def by_tensor(shape, dtype, usage, pad=0, layout="dense"):
    """Results of a cast with one scale as keywords, poisoned."""
    found = {"mode": TENSOR}
    scales = poisoned((2,), F32)  # both forms share them
    for form, size, wanted in zip(
        ("row", "column"), (shape, shape[::-1]), USAGES[usage], strict=True
    ):
        if wanted:
            found[form] = poisoned((size[0], size[1] + pad), dtype, layout)
            found[f"{form}_scales"] = scales
    return found


def scalings(rng):
    """Where a scale comes from: keywords, drawn anew."""
    amaxes = np.where(rng.random(_core.AMAX_PARTIALS) < 0.5, 0.0, rng.random(_core.AMAX_PARTIALS))
    found = torch.from_numpy(amaxes).float()
    one = lambda value: floats("cpu", value)  # noqa: E731
    given = {"scale": one(rng.uniform(0.5, 100))}
    measured = {"partials": found}
    with_nan = found.clone()
    with_nan[3] = math.nan
    return {
        "delayed": given,
        "huge": {"scale": one(1e30)},
        "current": measured,
        "power of 2": measured | {"power_2_scale": 1},
        "epsilon": measured | {"amax_epsilon": 2.0},
        "NaN": {"partials": with_nan},
        "Inf": {"partials": found + math.inf},
        "nothing": {"partials": found * 0.0},
        "tiny": {"partials": found * 1e-38, "power_2_scale": int(rng.integers(2))},
        "both": given | measured,
        "no scale yet": {"scale": one(0.0)} | measured,
    }


@pairs(
    source=HIGH,
    dtype=FP8,
    usage=("row", "column", "both"),
    how=tuple(scalings(np.random.default_rng())),
    layout=tuple(LAYOUTS),
)
def test_one_scale(source, dtype, usage, how, layout, rng):
    for _ in range(2):
        shape, pad = shape_of(rng), int(rng.integers(20))
        recorded = floats("cpu", rng.choice([0.0, 3.0, math.inf, math.nan]))
        result = by_tensor(shape, dtype, usage, pad, layout)
        x = matrix(rng, shape, source, layout)
        check("quantize", x, **result, **scalings(rng)[how], amax=recorded)


@pytest.mark.parametrize("dtype", FP8)
def test_every_rounding_to_fp8(dtype):
    for x in (boundaries(dtype)[None], every_value(BF16), every_value(F16)):
        check("quantize", x, **by_tensor(x.shape, dtype, "both"), scale=floats("cpu", 1.0))


@pytest.mark.parametrize("source", HIGH)
def test_column_sums_and_amax(source, rng):
    for shape in ((100, 70), (1, 3), (300, 1), (0, 5)):
        x = matrix(rng, shape, source, kinds=FINITE)
        fields = {"amax": floats("cpu", 0.5), "bias_grad": poisoned(shape[1:], source)}
        check_sums(check("quantize", x, **fields, but=("bias_grad",)), x)
        fields |= by_tensor(shape, E5M2, "both") | {"scale": floats("cpu", 3.0)}
        check_sums(check("quantize", x, **fields, but=("bias_grad",)), x)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_nothing_to_cast(shape):
    for how in scalings(np.random.default_rng()).values():
        result = by_tensor(shape, E4M3, "both", pad=3)
        check("quantize", torch.empty(shape), **result, **how, amax=floats("cpu", 2.0))


@pytest.mark.parametrize("flag", [0.0, 1.0, -0.0, math.nan])
def test_noop(flag, rng):
    noop, x = floats("cpu", flag), matrix(rng, (33, 70), BF16, kinds=FINITE)
    sums = {"bias_grad": torch.full((70,), 7.0)}
    recorded = {"amax": floats("cpu", 0.25), "scale": floats("cpu", 2.0)}
    result = by_tensor(x.shape, E4M3, "both", 5)
    found = check("quantize", x, **result, **recorded, **sums, noop=noop, but=("bias_grad",))
    for each in found["bias_grad"] if flag != 0.0 else ():
        assert_bits(each, sums["bias_grad"])
    check("quantize", x, **Scaled("block_1d", (33, 70), E4M3, "cpu").arguments(), noop=noop)
    for mode in MICRO.values():
        more = {"partials": partials(x)} if mode == MICRO["nvfp4"] else {}
        check("quantize", x, **forms(mode, x.shape, "cpu"), **more, noop=noop)


# ---- rows and tiles ------------------------------------------------------------------------------


@pairs(
    mode=TILES,
    source=HIGH,
    dtype=FP8,
    usage=("row", "column", "both"),
    epsilon=(0.0, 0.25),
    power_2=(False, True),
    layout=tuple(LAYOUTS),
)
def test_rows_and_tiles(mode, source, dtype, usage, epsilon, power_2, layout, rng):
    pad = tuple(int(n) for n in rng.choice([0, 3, 140], 2))
    for shape in (shape_of(rng), (130, 257)):
        result = Scaled(mode, shape, dtype, "cpu", usage, pad=pad, layout=layout)
        scaling = {"amax_epsilon": epsilon, "power_2_scale": int(power_2)}
        check("quantize", matrix(rng, shape, source, layout), **result.arguments(), **scaling)


@pytest.mark.parametrize("shape", [(0, 130), (130, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("mode", TILES)
def test_no_rows_or_columns(mode, shape):
    result = Scaled(mode, shape, E4M3, "cpu", pad=(140, 2))
    check("quantize", torch.empty(shape), **result.arguments())


@pytest.mark.parametrize("mode", TILES)
def test_sums_beside_tiles(mode, rng):
    x = matrix(rng, (300, 70), BF16, kinds=FINITE)
    result, sums = Scaled(mode, x.shape, E4M3, "cpu").arguments(), poisoned((70,), BF16)
    check_sums(check("quantize", x, **result, bias_grad=sums, but=("bias_grad",)), x)


# ---- MXFP8 and NVFP4 -----------------------------------------------------------------------------

MICRO_OPTIONS = {
    "mxfp8": ("mxfp8", {}),
    "mxfp8 squares": ("mxfp8", {"square": True}),
    "mxfp8 margin": ("mxfp8", {"margin": 2}),
    "mxfp8 negative margin": ("mxfp8", {"margin": -3, "square": True}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4 squares": ("nvfp4", {"square": True}),
    "nvfp4 transformed": ("nvfp4", {"rht": 1}),
    "nvfp4 transformed unsigned": ("nvfp4", {"rht": 2}),
    "nvfp4 stochastic": ("nvfp4", {"random": True}),
    "nvfp4 stochastic squares": ("nvfp4", {"random": True, "square": True}),
    "nvfp4 transformed stochastic": ("nvfp4", {"random": True, "rht": 1}),
    "nvfp4 to 256": ("nvfp4", {"scales_to_256": 1}),
    "nvfp4 four over six": ("nvfp4", {"four_over_six": 1, "scales_to_256": 1}),
    "nvfp4 four over six by squares": ("nvfp4", {"four_over_six": 2}),
    "nvfp4 squares four over six": ("nvfp4", {"four_over_six": 1, "square": True}),
    "nvfp4 rows": ("nvfp4", {"row_scaled": True}),
    "nvfp4 rows four over six": ("nvfp4", {"row_scaled": True, "four_over_six": 2}),
    "nvfp4 rows transformed": ("nvfp4", {"row_scaled": True, "rht": 2, "random": True}),
}


def micro_call(rng, x, name, usage="both", dtype=E4M3):
    """Keywords of a cast of `x` by one of MICRO_OPTIONS, to poisoned results."""
    kind, options = MICRO_OPTIONS[name]
    options = dict(options)
    rht, row_scaled = options.pop("rht", 0), options.get("row_scaled", False)
    fields = one_usage(forms(MICRO[kind], x.shape, "cpu", dtype, row_scaled), usage)
    if options.pop("random", False):
        fields["rng"] = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 2))
    if kind == "nvfp4":
        fields["hadamard"] = rht
        fields["partials"] = None if row_scaled and usage == "row" else partials(x)
        fields["column_partials"] = partials(x, rht) if rht else None
    return fields | {key: int(value) for key, value in options.items()}


@pairs(
    name=tuple(MICRO_OPTIONS),
    source=HIGH,
    usage=("row", "column", "both"),
    layout=tuple(LAYOUTS),
    dtype=FP8,
)
def test_groups(name, source, usage, layout, dtype, rng):
    for shape in (shape_of(rng), (70, 260)):
        x = matrix(rng, shape, source, layout)
        check("quantize", x, **micro_call(rng, x, name, usage, dtype))


@pytest.mark.parametrize("name", MICRO_OPTIONS)
def test_groups_of_nothing_and_of_one_kind(name, rng):
    for shape in ((0, 32), (32, 0), (1, 1)):
        x = groups_of_kinds(rng, shape, F32)
        check("quantize", x, **micro_call(rng, x, name))
    for kind in KINDS:
        x = groups_of_kinds(rng, (40, 70), F32, (kind,))
        check("quantize", x, **micro_call(rng, x, name))
    x = torch.full((32, 64), torch.finfo(F32).max)
    x[::3] *= -0.75
    check("quantize", x, **micro_call(rng, x, name))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_padding_of_groups(name, rng):
    """Data may be padded further than groups are."""
    x = matrix(rng, (33, 47), BF16)
    fields = micro_call(rng, x, name)
    more = (33, 70) if name == "mxfp8" else (47, 40)
    for form, shape in (("row", (33, 61)), ("column", more)):
        fields[form] = poisoned(shape, fields[form].dtype, "ragged")
    check("quantize", x, **fields)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4 squares"])
def test_sums_beside_groups(name, rng):
    x, sums = matrix(rng, (150, 70), BF16, kinds=FINITE), poisoned((70,), F32)
    fields = micro_call(rng, x, name)
    check_sums(check("quantize", x, **fields, bias_grad=sums, but=("bias_grad",)), x)


# ---- values of an operator -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "tensor", *TILES, *MICRO])
@pytest.mark.parametrize("wide", [None, *HIGH])
def test_put(mode, wide, rng):
    """All that is asked of one call, beside a cast and a copy by the C code."""
    x = matrix(rng, (65, 130), F32)
    places, scaling = {}, {}
    if mode == "tensor":
        places = by_tensor(x.shape, E4M3, "both", 3)
        scaling = {"scale": floats("cpu", 3.0), "amax": floats("cpu", 0.0)}
    elif mode in TILES:
        places = Scaled(mode, x.shape, E5M2, "cpu").arguments()
    elif mode in MICRO:
        places = forms(MICRO[mode], x.shape, "cpu")
        scaling = {"partials": partials(x)} if mode == "nvfp4" else {}
    blank = {name: 0 for name in ("square", "hadamard", "margin", "four_over_six", "row_scaled")}
    blank |= {"amax_epsilon": 0.0, "power_2_scale": 0, "scales_to_256": 0, "mode": 0}
    names = [name for name, *_ in _core.op_fields("activation")]
    fields = dict.fromkeys(names) | blank | places | scaling
    fields |= {name: v.clone() for name, v in fields.items() if isinstance(v, torch.Tensor)}
    fields["wide"] = None if wide is None else poisoned(x.shape, wide, "ragged")
    fields["amax_partials"] = poisoned((_core.AMAX_PARTIALS,), F32) if mode == "none" else None
    casts.put(x, fields)
    if places:
        _core.quantize(x, **places, **scaling)
        for name, value in (places | scaling).items():
            if isinstance(value, torch.Tensor):
                assert_bits(fields[name], value)
    if wide is not None:
        copied = torch.empty(x.shape, dtype=wide)
        _core.cast(x, copied)
        assert_bits(fields["wide"], copied, any_nan=True)
    if mode == "none":
        assert_bits(fields["amax_partials"].amax(), partials(x).amax())
        assert not fields["amax_partials"].signbit().any()


# ---- and back ------------------------------------------------------------------------------------


def quantized(rng, kind, shape, dtype, usage):
    """Keywords of `_core.dequantize`, of data with codes of every kind."""
    x = groups_of_kinds(rng, shape, F32)
    if kind in MICRO:
        made = cast_micro(x, MICRO[kind], dtype=dtype, usage=usage)
    elif kind in TILES:
        made = Scaled(kind, shape, dtype, "cpu", usage, pad=(3, 5)).arguments()
        _core.quantize(x, **made)
    else:
        made = by_tensor(shape, dtype, usage, 5)
        _core.quantize(x, **made, scale=floats("cpu", float(2.0 ** rng.integers(-100, 100))))
    if kind != "nvfp4":  # whatever codes there are
        for form in ("row", "column"):
            if form in made:
                codes = torch.from_numpy(rng.integers(0, 256, made[form].shape, np.uint8))
                made[form].view(torch.uint8).copy_(codes)
    return made


@pairs(
    kind=("tensor", *TILES, *MICRO),
    dtype=FP8,
    usage=("row", "column", "both"),
    target=HIGH,
    layout=tuple(LAYOUTS),
)
def test_dequantize(kind, dtype, usage, target, layout, rng):
    for shape in (shape_of(rng), (130, 257), (0, 5)):
        output = poisoned(shape, target, layout)
        check("dequantize", output, **quantized(rng, kind, shape, dtype, usage))


@pytest.mark.parametrize("usage", ["row", "column"])
def test_dequantize_rows_and_to_256(usage, rng):
    for options in ({"row_scaled": True}, {"to_256": True}, {"err_mode": "MSE", "to_256": True}):
        x = groups_of_kinds(rng, (37, 70), F32)
        made = cast_micro(x, MICRO["nvfp4"], usage=usage, **options)
        check("dequantize", poisoned(x.shape, BF16), **made)


def test_dequantize_every_code_and_scale(rng):
    """E8M0 and E4M3 scales of all bytes, and fp32 ones that overflow, are Inf or NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    for dtype in FP8:
        for inverse in (1.0, 1e38, 1e-40, math.inf, math.nan, 0.0):
            fields = {"mode": TENSOR, "row": codes.view(dtype)}
            fields["row_scales"] = floats("cpu", inverse, 1.0)
            for target in HIGH:
                check("dequantize", poisoned(codes.shape, target), **fields)
        exponents = torch.arange(128 * 8).to(torch.uint8).reshape(128, 8)
        fields = {"mode": MICRO["mxfp8"], "row": codes.view(dtype), "row_scales": exponents}
        check("dequantize", poisoned(codes.shape, F16), **fields)
    scales = torch.arange(128 * 32).to(torch.uint8).reshape(128, 32)
    fields = {"mode": MICRO["nvfp4"], "row": codes, "row_scales": scales}
    check("dequantize", poisoned((128, 512), F32), **fields, row_amax=floats("cpu", 1e30))


# ---- plain operators -----------------------------------------------------------------------------


@pytest.mark.parametrize("hadamard", [0, 1, 2])
@pytest.mark.parametrize("source", HIGH)
def test_amax(source, hadamard, rng):
    for shape in (shape_of(rng), (161, 97), (0, 4), (4, 0), (1, 1)):
        x, found = matrix(rng, shape, source, "ragged"), poisoned((_core.AMAX_PARTIALS,), F32)
        both = check("amax", x, found, hadamard=hadamard, but=("argument 1",))["argument 1"]
        assert_bits(both[0].amax(), both[1].amax())
        assert (both[0] >= 0.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*FP8, torch.uint8])
def test_transpose(dtype, layout, rng):
    for shape, more in ((shape_of(rng), 0), ((33, 65), 7), ((0, 5), 3), ((5, 0), 0)):
        codes = torch.from_numpy(rng.integers(0, 256, shape, np.uint8)).view(dtype)
        output = poisoned((shape[1], shape[0] + more), dtype, layout)
        check("transpose", laid_out(codes, layout, "cpu"), output)


NUMBERS = (0.0, -0.0, 1.0, 1e-45, 1e-8, 3.3e-5, 447.9, 1e300, -1e300, 65519.9999, 65520.0)
NUMBERS += (math.inf, -math.inf, math.nan, 0.5, 1.5, 2.5, -2.5, 255.5, 2.0**31, -(2.0**63), 2.0**63)
NUMBERS += (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, 17.0 + 2.0**-30, 3.0 * 2.0**-11)


@pytest.mark.parametrize(
    "dtype", [F32, F16, BF16, *FP8, torch.uint8, torch.int32, torch.int64], ids=str
)
def test_fill(dtype, rng):
    drawn = rng.standard_normal(20) * 2.0 ** rng.integers(-30, 70, 20)
    for value in (*NUMBERS, *drawn.tolist()):
        check("fill", poisoned((3, 5), dtype, "ragged"), value)
    check("fill", poisoned((0, 5), dtype), 1.0)


@pairs(source=HIGH, target=HIGH, layout=tuple(LAYOUTS))
def test_cast(source, target, layout, rng):
    for shape, other in (
        ((33, 65), (33, 65)),
        ((5, 40), (9, 50)),
        ((9, 50), (5, 40)),
        ((0, 2),) * 2,
    ):
        x = matrix(rng, shape, source, layout)
        check("cast", x, poisoned(other, target, layout))
        check("cast", x.t(), poisoned(other[::-1], target, layout))


@pytest.mark.parametrize("source", HIGH)
@pytest.mark.parametrize("target", HIGH)
def test_cast_of_every_number(source, target):
    x = every_value(source) if source != F32 else boundaries(E4M3)[None]
    check("cast", x, poisoned(x.shape, target))


@pytest.mark.parametrize("dtype", [*FP8, torch.uint8, torch.int32, torch.int64, F32], ids=str)
def test_cast_keeps_bits(dtype, rng):
    codes = torch.from_numpy(rng.integers(0, 256, (4, 24), np.uint8)).view(dtype)
    check("cast", codes, poisoned((5, codes.shape[1] + 1), dtype, "ragged"))


@pytest.mark.parametrize("algo", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_scaling_update(length, algo, rng):
    special = [0.0, math.inf, math.nan, 1e-44, 3e38, -0.0, 1.0]
    history = torch.from_numpy(rng.choice(special, (length, 300), p=[0.3, *[0.1] * 5, 0.2])).float()
    history = laid_out(history * torch.rand(300), "ragged", "cpu")
    scale = torch.rand(300)
    for _ in range(2):
        check("scaling_update", scale, history, 448.0 * 2.0 ** -int(rng.integers(4)), algo=algo)
        _core.scaling_update(scale, history, 448.0, algo=algo)


# ---- the package ---------------------------------------------------------------------------------


def test_every_operator_has_a_definition():
    assert sorted(definitions.DEFINITIONS) == sorted(_core.op_names())
    assert definitions.functions().keys() == definitions.DEFINITIONS.keys()


class NothingIsReadBack(TorchDispatchMode):
    """A block that no number of a device is read in."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def float64_is_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(F32)


AROUND = {
    "autocast": lambda: torch.autocast("cpu", BF16),
    "float64": float64_is_default,
    "inference": torch.inference_mode,
    "another device": lambda: torch.device("meta"),
    "nothing read": NothingIsReadBack,
}


@pytest.mark.parametrize("around", AROUND)
def test_surroundings_change_nothing(around, rng):
    """What is set for torch's own operators, and that the host waits for no device."""
    within = AROUND[around]
    x = groups_of_kinds(rng, (33, 70), BF16)
    for how in scalings(rng).values():
        more = {"amax": floats("cpu", 0.0), "noop": floats("cpu", 0.0)}
        check("quantize", x, **by_tensor(x.shape, E4M3, "both", 3), **how, **more, within=within)
    for mode in TILES:
        check("quantize", x, **Scaled(mode, x.shape, E4M3, "cpu").arguments(), within=within)
    for name in MICRO_OPTIONS:
        check("quantize", x, **micro_call(rng, x, name), within=within)
    for kind in ("tensor", *TILES, *MICRO):
        for usage in ("row", "column"):
            made = quantized(rng, kind, (33, 70), E5M2, usage)
            check("dequantize", poisoned((33, 70), BF16), **made, within=within)
    check("amax", x, poisoned((1024,), F32), hadamard=1, but=("argument 1",), within=within)
    check("scaling_update", torch.rand(9), torch.rand(4, 9), 448.0, within=within)
    check("transpose", x.view(torch.uint8), poisoned((140, 40), torch.uint8), within=within)
    check("cast", x, poisoned((40, 80), F32), within=within)
    for operands in ({"a": x, "b": x}, {"a": x.float(), "b": x}):
        d, found = (torch.zeros(33, 33) for _ in range(2))
        with by_definition("gemm"):
            _core.gemm(d, **operands, b_transposed=1)
        with by_definition("gemm", within=within):
            _core.gemm(found, **operands, b_transposed=1)
        assert_bits(found, d)
