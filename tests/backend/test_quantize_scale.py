# SPDX-License-Identifier: Apache-2.0
"""quantize: the scale beside its data, given (delayed) or made from partial maxima (current)."""

import numpy as np
import pytest
import torch
from buffers import FP8, HIGH, Poisoned, floats, name_of, normal
from comparators import assert_bits
from hypothesis import given, strategies as st
from operands import operand
from reference import FLT_MAX, FP8_MAX, amax, current_scale, quantize
from thinning import case_id, in_turns
from tols import BF16, E4M3, E5M2, F32

from transformer_engine import _core

INF, NAN = float("inf"), float("nan")
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def scales_of(scale):
    """{1/s, s} in fp32."""
    scale = torch.tensor(scale, dtype=F32)
    return torch.stack([torch.tensor(1.0) / scale, scale])


def partials_of(device, *values):
    """Partial maxima, the given ones at both ends and in between."""
    partials = torch.zeros(_core.AMAX_PARTIALS)
    places = torch.linspace(0, _core.AMAX_PARTIALS - 1, len(values)).round().long()
    partials[places if len(values) > 1 else [_core.AMAX_PARTIALS - 1]] = torch.tensor(values)
    return partials.to(device)


def made_scales(device, partials, dtype, epsilon=0.0, power_2=False):
    """What quantize makes from partial maxima."""
    scales = Poisoned((2,), F32, device)
    data = torch.empty(1, 1, dtype=dtype, device=device)
    _core.quantize(
        torch.ones(1, 1, device=device),
        **operand(row=data, scales=scales.tensor),
        partials=partials,
        amax_epsilon=epsilon,
        power_2_scale=power_2,
    )
    assert scales.untouched()
    return scales.tensor


@pytest.mark.parametrize("usage", ["row", "column", "none"])
@pytest.mark.parametrize("scale", [1.0, 3.0, 1.0e-40, SMALLEST, FLT_MAX, 0.1])
def test_given_scale_is_written(device, scale, usage):
    scales = Poisoned((2,), F32, device)
    outputs = {} if usage == "none" else {usage: torch.zeros(2, 2, dtype=E4M3, device=device)}
    _core.quantize(
        torch.ones(2, 2, device=device),
        scale=floats(device, scale),
        **operand(scales=scales.tensor, **outputs),
    )
    assert_bits(scales.tensor, scales_of(scale))
    assert scales.untouched()


def test_scale_is_the_first_element(device):
    """A slot of a chunk is passed as a view from it on."""
    chunk, scales = floats(device, 2.0, 4.0, 8.0), floats(device, 0.0, 0.0, 5.0)
    one = torch.ones(1, 1, device=device)
    _core.quantize(one, scale=chunk[1:], **operand(scales=scales[:2]))
    assert_bits(scales, torch.tensor([0.25, 4.0, 5.0]))


def test_each_form_has_scales_of_its_own(device):
    """One memory for both, as everywhere else, or two."""
    forms = {n: torch.zeros(2, 2, dtype=E4M3, device=device) for n in ("row", "column")}
    row, column = (Poisoned((2,), F32, device) for _ in range(2))
    _core.quantize(
        torch.ones(2, 2, device=device),
        scale=floats(device, 3.0),
        **(operand(**forms, scales=row.tensor) | {"column_scales": column.tensor}),
    )
    for scales in (row, column):
        assert_bits(scales.tensor, scales_of(3.0))
        assert scales.untouched()


AMAXES = {
    "one": (1.0,),
    "many": (0.5, 3.75, 2.0, 3.5, 0.0),
    "zero": (0.0,),
    "inf": (1.0, INF, 2.0),
    "nan_among": (1.5, NAN, 0.25),
    "nan_alone": (NAN,),
    "subnormal": (SMALLEST,),
    "scale_overflows": (1.0e-37,),
    "largest": (float(FLT_MAX),),
    "third": (1.0 / 3.0,),
}


@pytest.mark.parametrize(
    ("case", "epsilon", "dtype", "power_2"),
    in_turns(AMAXES, [0.0, 0.3, 100.0], FP8, [False, True]),
    ids=case_id,
)
def test_scale_from_partials(device, case, dtype, epsilon, power_2):
    values = AMAXES[case]
    largest = max((v for v in values if v == v), default=0.0)
    expected = current_scale(largest, FP8_MAX[dtype], epsilon, power_2)
    scales = made_scales(device, partials_of(device, *values), dtype, epsilon, power_2)
    assert_bits(scales, scales_of(expected))


@given(data=st.data())
def test_any_amax(device, data):
    largest = data.draw(st.floats(0.0, float(FLT_MAX), width=32))
    epsilon = data.draw(st.sampled_from([0.0, 2.0**-10]) | st.floats(0.0, 1.0, width=32))
    dtype, power_2 = data.draw(st.sampled_from(FP8)), data.draw(st.booleans())
    partials = torch.zeros(_core.AMAX_PARTIALS)
    partials[data.draw(st.integers(0, _core.AMAX_PARTIALS - 1))] = largest
    expected = current_scale(largest, FP8_MAX[dtype], epsilon, power_2)
    scales = made_scales(device, partials.to(device), dtype, epsilon, power_2)
    assert_bits(scales, scales_of(expected))


def test_examples_of_the_definition(device):
    """Numbers worked out by hand, so that reference and library can not be wrong alike."""
    cases = [
        ((2.0,), E4M3, 0.0, False, 224.0),
        ((2.0,), E5M2, 0.0, False, 28672.0),
        ((3.0,), E4M3, 0.0, True, 128.0),
        ((448.0,), E4M3, 0.0, True, 1.0),
        ((0.25,), E4M3, 0.5, False, 896.0),
        ((0.0,), E4M3, 0.5, False, 896.0),
        ((0.0,), E4M3, 0.0, True, 1.0),
        ((INF,), E5M2, 0.0, True, 1.0),
        ((1.0e-38,), E4M3, 0.0, False, float(FLT_MAX)),
        ((1.0e-38,), E4M3, 0.0, True, 2.0**127),
    ]
    for values, dtype, epsilon, power_2, expected in cases:
        scales = made_scales(device, partials_of(device, *values), dtype, epsilon, power_2)
        assert_bits(scales, scales_of(expected))


@pytest.mark.parametrize("power_2", [False, True])
@pytest.mark.parametrize("dtype", FP8, ids=name_of)
@pytest.mark.parametrize("source", HIGH, ids=name_of)
@pytest.mark.parametrize("special", [None, 0.0, INF, NAN])
def test_current_scaling_of_data(device, special, source, dtype, power_2, rng):
    """Measure, then cast: both operators together, on data with what hurts."""
    values = normal(rng, (130, 77), source, scale=float(rng.uniform(0.01, 100)))
    if special == 0.0:
        values.zero_()
    elif special is not None:
        values[int(rng.integers(130)), int(rng.integers(77))] = special
    placed = values.to(device)
    partials = torch.empty(_core.AMAX_PARTIALS, device=device)
    data, scales = Poisoned((130, 77), dtype, device), Poisoned((2,), F32, device)
    _core.amax(placed, partials)
    _core.quantize(
        placed,
        **operand(row=data.tensor, scales=scales.tensor),
        partials=partials,
        power_2_scale=power_2,
    )
    scale = current_scale(amax(values), FP8_MAX[dtype], 0.0, power_2)
    assert_bits(scales.tensor, scales_of(scale))
    assert_bits(data.tensor, quantize(values, scale, dtype))
    if special is None and not power_2:
        top = data.tensor.cpu().float().abs().max().item()
        assert top == FP8_MAX[dtype]


def test_noop_keeps_the_scales(device):
    scales = Poisoned((2,), F32, device)
    _core.quantize(
        torch.ones(4, 4, device=device),
        **operand(column=torch.zeros(4, 4, dtype=E5M2, device=device), scales=scales.tensor),
        partials=partials_of(device, 2.0),
        noop=floats(device, 1.0),
    )
    assert scales.unwritten()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty_input_has_scales(device, shape):
    scales = Poisoned((2,), F32, device)
    partials = torch.empty(_core.AMAX_PARTIALS, device=device)
    values = torch.empty(shape, dtype=BF16, device=device)
    _core.amax(values, partials)
    _core.quantize(
        values,
        **operand(row=torch.empty(shape, dtype=E4M3, device=device), scales=scales.tensor),
        partials=partials,
    )
    assert_bits(scales.tensor, scales_of(1.0))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("own", [True, False])
def test_scale_of_a_slot_or_own(device, rng, dtype, own):
    """Both given: partial maxima count where the slot has recorded nothing, which is scale 0."""
    values = normal(rng, (33, 65), F32, device)
    partials = torch.empty(_core.AMAX_PARTIALS, device=device)
    _core.amax(values, partials)
    given = 0.0 if own else float(torch.rand(()) * 50 + 1)
    slot = torch.full((1,), given, device=device)
    recorded = torch.zeros(1, device=device)
    scales = Poisoned((2,), F32, device)
    data = torch.empty(33, 65, dtype=dtype, device=device)
    _core.quantize(
        values,
        **operand(row=data, scales=scales.tensor),
        scale=slot,
        amax=recorded,
        partials=partials,
    )
    expected = current_scale(amax(values.cpu()), FP8_MAX[dtype]) if own else given
    assert_bits(scales.tensor.cpu(), scales_of(expected))
    assert_bits(data.cpu(), quantize(values.cpu(), torch.tensor(expected), dtype))
    assert slot.item() == given and recorded.item() == values.abs().max().item()
