# SPDX-License-Identifier: Apache-2.0
"""FP8 results with a scale per row or tile: poisoned buffers, what they must hold, fused casts."""

import itertools

import torch
from buffers import Poisoned
from comparators import assert_bits
from fp8_output import USAGES, fp32_of
from reference import as_f32, scaled_quantize, scales_shape
from tols import F32

from transformer_engine import _core

MODES = ("row", "block_1d", "block_2d")
# Of rows and tiles that are fused with an operator: one tile, ragged ones, several.
SHAPES_OF_TILES = [(40, 64), (129, 257), (256, 128), (131, 512)]
# (amax_epsilon, power_2_scale)
OPTIONS = [(0.0, False), (0.0, True), (0.5, False)]


class Scaled:
    """Poisoned forms of one cast and their scales, and what they must hold after it."""

    def __init__(self, mode, shape, dtype, device, usage="both", *, pad=(0, 0), layout="dense"):
        self.mode, self.shape, self.dtype = mode, shape, dtype
        self.forms = {}
        for name, (major, minor), wanted, more in zip(
            ("row", "column"), (shape, shape[::-1]), USAGES[usage], pad, strict=True
        ):
            if wanted:
                data = Poisoned((major, minor + more), dtype, device, layout=layout)
                sizes = scales_shape(mode, major, minor + more)
                self.forms[name] = data, Poisoned(sizes, F32, device)

    def arguments(self):
        found = {"mode": getattr(_core, f"SCALING_{self.mode.upper()}")}
        for name, (data, scales) in self.forms.items():
            found |= {name: data.tensor, f"{name}_scales": scales.tensor}
        return found

    def check(self, values, epsilon=0.0, power_2=False, top=None):
        """Data, scales and zero padding of both; nothing else is written."""
        self.check_forms(
            cast_forms(values, self.mode, self.dtype, top, epsilon, power_2, self.forms)
        )

    def check_forms(self, wanted):
        """The same, of what `cast_forms` has returned."""
        for name, (data, scales) in self.forms.items():
            codes, expected = wanted[name]
            used = codes.shape[1]
            assert_bits(data.tensor[:, :used], codes)
            assert (data.tensor[:, used:].view(torch.uint8) == 0).all(), "padding"
            whole = torch.zeros(scales.tensor.shape)  # of padding there are more tiles
            whole[: expected.shape[0], : expected.shape[1]] = expected
            assert_bits(scales.tensor, whole)
            assert data.untouched() and scales.untouched()


def cast_forms(values, mode, dtype, top, epsilon, power_2, names=("row", "column")):
    """(codes, scales) by form; `top` of None is the dtype of the values."""
    top, matrix = values.dtype if top is None else top, as_f32(values)
    options = {"epsilon": epsilon, "power_2": power_2}
    return {
        name: scaled_quantize(matrix if name == "row" else matrix.T, mode, dtype, top, **options)
        for name in names
    }


def check_scaled(problem, mode, dtype, epsilon=0.0, power_2=False, usages=("both",), **place):
    """A cast that is fused to an operator (see `fp8_output`), beside its result and alone.

    Codes, scales and padding are those of the fp32 values.
    """
    values = fp32_of(problem)
    options = {"amax_epsilon": epsilon, "power_2_scale": power_2}
    wanted = cast_forms(values, mode, dtype, F32, epsilon, power_2)
    for usage, beside in itertools.product(usages, (None, F32, torch.bfloat16)):
        output = Scaled(mode, problem.shape, dtype, problem.device, usage, **place)
        plain = Poisoned(problem.shape, beside, problem.device) if beside is not None else None
        result = {} if plain is None else {problem.result: plain.tensor}
        problem.call(**result, **options, **output.arguments())
        output.check_forms(wanted)
        if plain is not None:
            assert_bits(plain.tensor, values.to(beside), any_nan=True)
            assert plain.untouched()
