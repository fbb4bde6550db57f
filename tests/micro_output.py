# SPDX-License-Identifier: Apache-2.0
"""Casts to MXFP8 and NVFP4 that are fused to an operator (see `fp8_output`): by definition."""

import itertools

import pytest
import torch
from buffers import HIGH, LAYOUTS, Poisoned, name_of
from comparators import assert_bits, assert_within
from fp8_output import fp32_of
from microscaled import ERR_MODES, MODES, expected, forms, one_usage, partials, uniform_numbers
from tols import BF16, E4M3, E5M2, F32

from transformer_engine import _core

# What te_quantize alone does is not there: an amax for each row.
MICRO = {
    "mxfp8": ("mxfp8", {}),
    "mxfp8-e5m2-margin": ("mxfp8", {"dtype": E5M2, "margin": 2}),
    "mxfp8-square": ("mxfp8", {"square": True}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4-square": ("nvfp4", {"square": True}),
    "nvfp4-rht": ("nvfp4", {"rht": True}),
    "nvfp4-rht-unsigned": ("nvfp4", {"rht": 2}),
    "nvfp4-4over6": ("nvfp4", {"err_mode": "MAE", "to_256": True}),
    "nvfp4-stochastic": ("nvfp4", {"stochastic": True}),
}
"""Name: (mode, options of `microscaled.expected`, or rounded by random numbers)."""
SHAPES_OF_GROUPS = [(1, 1), (40, 64), (131, 192), (129, 257), (256, 128)]


def each_cast_and_shape(test):
    """Run a test with the arguments `cast` and `shape` for all of them."""
    casts = pytest.mark.parametrize("cast", MICRO)
    return casts(pytest.mark.parametrize("shape", SHAPES_OF_GROUPS, ids=str)(test))


def each_source_and_layout(test):
    """Run a test with the arguments `cast`, `source` and `layout` for all inputs."""
    for mark in (
        pytest.mark.parametrize("cast", ["mxfp8", "nvfp4"]),
        pytest.mark.parametrize("source", HIGH, ids=name_of),
        pytest.mark.parametrize("layout", LAYOUTS),
    ):
        test = mark(test)
    return test


class Micro:
    """Poisoned forms of one cast, and what they must hold after it."""

    def __init__(self, mode, shape, dtype, device, usage="both", *, pad=(0, 0), layout="dense"):
        self.mode, self.forms = MODES[mode], {}
        for name, like in one_usage(forms(self.mode, shape, device, dtype), usage).items():
            if name == "mode":
                continue
            data = name in ("row", "column")
            more = pad[name == "column"] if data else 0
            sizes = (*like.shape[:-1], like.shape[-1] + more)
            where = {"layout": layout} if data else {}
            self.forms[name] = Poisoned(sizes, like.dtype, device, **where), like.shape

    def arguments(self):
        return {"mode": self.mode} | {name: made.tensor for name, (made, _) in self.forms.items()}

    def check(self, wanted):
        """Bytes, scales and zero padding; nothing else is written."""
        for name, (made, used) in self.forms.items():
            actual = made.tensor
            assert_bits(actual[..., : used[-1]].contiguous(), wanted[name])
            assert (actual[..., used[-1] :].contiguous().view(torch.uint8) == 0).all(), "padding"
            assert made.untouched()


def _call_of(problem, mode, values, rng, how):
    """Keywords of the cast with these options, and what it must make of the fp32 values."""
    how = dict(how)
    keywords = {"square": int(how.get("square", False))}
    if mode == "mxfp8":
        keywords["margin"] = how.get("margin", 0)
        return keywords, expected(values, MODES[mode], **how)
    parts = torch.zeros(_core.AMAX_PARTIALS, device=problem.device)
    problem.call(amax_partials=parts)
    assert_bits(parts.max(), partials(values).max())
    keywords |= {
        "partials": parts,
        "four_over_six": ERR_MODES[how.get("err_mode")],
        "scales_to_256": int(how.get("to_256", False)),
        "hadamard": int(how.get("rht", False)),
        "column_partials": partials(values, how["rht"]) if how.get("rht") else None,
    }
    if how.pop("stochastic", False):
        seed, offset = (int(v) for v in rng.integers(0, 2**62, 2))
        keywords["rng"] = torch.tensor([seed, offset], device=problem.device)
        how["random"] = uniform_numbers(seed, offset, problem.shape)
    return keywords, expected(values, MODES[mode], **how)


def check_micro(problem, name, rng, *, sums=False, usages=("both",), **place):
    """One of MICRO, beside the result of the operator and alone: the cast of its fp32 values.

    Parameters
    ----------
    problem :
        See `fp8_output`.
    name : str
        Of MICRO.
    rng :
        Of random numbers.
    sums : bool
        With `bias_grad`, against the fp32 values.
    usages, **place :
        Which forms, one after the other, their padding (`pad`) and `layout`.
    """
    mode, how = MICRO[name]
    values = fp32_of(problem)
    keywords, wanted = _call_of(problem, mode, values, rng, how)
    for usage, beside in itertools.product(usages, (None, F32, BF16)):
        output = Micro(mode, problem.shape, how.get("dtype", E4M3), problem.device, usage, **place)
        plain = Poisoned(problem.shape, beside, problem.device) if beside is not None else None
        result = {} if plain is None else {problem.result: plain.tensor}
        if sums:
            bias = Poisoned(problem.shape[1:], F32, problem.device)
            result["bias_grad"] = bias.tensor
        problem.call(**result, **keywords, **output.arguments())
        output.check(wanted)
        if plain is not None:
            assert_bits(plain.tensor, values.to(beside), any_nan=True)
            assert plain.untouched()
        if sums:
            exact = values.double()
            assert_within(bias.tensor, exact.sum(0), exact.abs().sum(0), problem.shape[0])
            assert bias.untouched()


def check_no_rows(problem, name, rng):
    """No rows: padding of scales and the amax are written."""
    mode, how = MICRO[name]
    values = torch.empty(problem.shape, device=problem.device)
    keywords, wanted = _call_of(problem, mode, values, rng, how)
    output = Micro(mode, problem.shape, how.get("dtype", E4M3), problem.device)
    problem.call(**keywords, **output.arguments())
    output.check(wanted)
