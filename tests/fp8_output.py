# SPDX-License-Identifier: Apache-2.0
"""FP8 results of an operator that casts: poisoned buffers, what they must hold, and fused casts."""

import torch
from buffers import Poisoned, floats
from comparators import assert_bits, assert_cast_within, assert_repeats
from operands import operand
from reference import amax, quantize
from tols import E4M3, F32

from transformer_engine import _core

USAGES = {"row": (1, 0), "column": (0, 1), "both": (1, 1)}


def round_up(size):
    return -(-size // 16) * 16


class Output:
    """Poisoned outputs of one call, and what they must hold after it."""

    def __init__(self, shape, dtype, device, usage="both", *, pad=(0, 0), layout="dense"):
        rows, columns = shape
        self.shape, self.dtype, self.device = shape, dtype, device
        place = {"layout": layout}
        want_row, want_column = USAGES[usage]
        self.row = Poisoned((rows, columns + pad[0]), dtype, device, **place) if want_row else None
        self.column = (
            Poisoned((columns, rows + pad[1]), dtype, device, **place) if want_column else None
        )
        self.scales = Poisoned((2,), F32, device)

    def arguments(self):
        return operand(
            row=self.row.tensor if self.row else None,
            column=self.column.tensor if self.column else None,
            scales=self.scales.tensor,
        )

    def memories(self):
        """The buffers that are there."""
        return [m for m in (self.row, self.column, self.scales) if m is not None]

    def check(self, values, scale):
        """Compare with the reference: data, zero padding, scales, nothing else written."""
        codes = quantize(values, scale, self.dtype)
        rows, columns = self.shape
        for memory, expected, used in ((self.row, codes, columns), (self.column, codes.T, rows)):
            if memory is not None:
                assert_bits(memory.tensor[:, :used], expected.contiguous())
                assert (memory.tensor[:, used:].view(torch.uint8) == 0).all(), "padding"
                assert memory.untouched()
        one = torch.tensor(1.0)
        with_scale = torch.tensor(scale, dtype=F32)
        assert_bits(self.scales.tensor, torch.stack([one / with_scale, with_scale]))
        assert self.scales.untouched()


# ---- casts fused to an operator ------------------------------------------------------------------
#
# A `problem` is an operator with its inputs: `call(**results)` runs it on `device`, `result` is the
# name of its high-precision result, of this `shape`, and `exact()` what `assert_within` compares it
# with. The cast is one of the fp32 value, which the operator shows where it writes that result in
# fp32.

# (epsilon, power_2_scale) of current scaling
SCALE_OPTIONS = [(0.0, False), (0.0, True), (1e3, False)]


def padding(shape):
    """What rounds the rows of both usages up to 16 bytes."""
    return tuple(round_up(size) - size for size in reversed(shape))


def fp32_of(problem):
    """The fp32 values behind a result, from a call that casts nothing."""
    values = Poisoned(problem.shape, F32, problem.device)
    problem.call(**{problem.result: values.tensor})
    assert values.untouched()
    return values.tensor


def check_delayed(problem, dtype, scale, **place):
    """A given scale: codes, padding, scales, amax and its partials; with the result and without."""
    device, values = problem.device, fp32_of(problem)
    largest = float(amax(values))
    for before, beside in ((0.0, F32), (2 * largest, None), (largest / 2, torch.bfloat16)):
        output = Output(problem.shape, dtype, device, **place)
        slot, parts = Poisoned((1,), F32, device), Poisoned((_core.AMAX_PARTIALS,), F32, device)
        slot.put(torch.tensor([before]))
        plain = Poisoned(problem.shape, beside, device) if beside is not None else None
        problem.call(
            **({} if plain is None else {problem.result: plain.tensor}),
            scale=floats(device, scale),
            amax=slot.tensor,
            amax_partials=parts.tensor,
            **output.arguments(),
        )
        output.check(values, scale)
        assert_bits(slot.tensor, torch.tensor([max(before, largest)]))
        assert (parts.tensor >= 0).all(), "an entry of amax_partials was not written"
        assert_bits(parts.tensor.max().reshape(1), torch.tensor([largest]))
        assert slot.untouched() and parts.untouched()
        if plain is not None:
            assert_bits(plain.tensor, values.to(beside), any_nan=True)
            assert plain.untouched()


def check_current(problem, dtype, epsilon=0.0, power_2=False, **place):
    """A scale from partials: what amax and quantize make of the fp32 values."""
    device, values = problem.device, fp32_of(problem)
    parts, theirs = (torch.zeros(_core.AMAX_PARTIALS, device=device) for _ in range(2))
    problem.call(amax_partials=parts)
    _core.amax(values, theirs)
    options = {"amax_epsilon": epsilon, "power_2_scale": power_2}
    expected = Output(problem.shape, dtype, device, **place)
    _core.quantize(values, partials=theirs, **options, **expected.arguments())
    output = Output(problem.shape, dtype, device, **place)
    problem.call(partials=parts, **options, **output.arguments())
    for got, wanted in zip(output.memories(), expected.memories(), strict=True):
        assert_bits(got.tensor, wanted.tensor)
        assert got.untouched()


def check_codes(problem, exact, dtype, scale, **results):
    """Not only consistent with the fp32 values: right. `exact` is that of the problem."""
    output = Output(problem.shape, dtype, problem.device)
    problem.call(scale=floats(problem.device, scale), **results, **output.arguments())
    values, terms, *depth = exact
    assert_cast_within(output.row.tensor, values, scale, terms, *depth)
    assert_cast_within(output.column.tensor, values.T, scale, terms.T, *depth)


def check_nothing(problem, **results):
    """No elements: FP8 still has scales and zero padding; amax stays, its partials are 0."""
    device = problem.device
    output, slot = Output(problem.shape, E4M3, device, pad=(16, 16)), floats(device, 3.0)
    parts = Poisoned((_core.AMAX_PARTIALS,), F32, device)
    problem.call(
        **results,
        scale=floats(device, 4.0),
        amax=slot,
        amax_partials=parts.tensor,
        **output.arguments(),
    )
    output.check(torch.empty(problem.shape), 4.0)
    assert_bits(slot, torch.tensor([3.0]))
    assert_bits(parts.tensor, torch.zeros(_core.AMAX_PARTIALS))


def check_repeats(problem, dtype, **others):
    """FP8, amax, the result and `others`, by name with their shapes: the same bits every time."""
    shapes, device = {problem.result: problem.shape, **others}, problem.device

    def run():
        output, slot = Output(problem.shape, dtype, device), floats(device, 0.0)
        results = {name: torch.empty(shape, device=device) for name, shape in shapes.items()}
        problem.call(scale=floats(device, 50.0), amax=slot, **results, **output.arguments())
        return [*(memory.tensor for memory in output.memories()), slot, *results.values()]

    assert_repeats(run)
