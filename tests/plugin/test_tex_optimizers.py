# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and reductions of `transformer_engine_torch`: no tensors, refusals."""

import math

import pytest
import torch
from comparators import assert_within
from tex_cases import Operators

import transformer_engine_torch as plain_tex

native = Operators("default.native")
STEP = (0.03, 0.8, 0.95, 1e-6, 1)


@pytest.fixture
def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def test_adam_of_nothing(flag):
    assert plain_tex.multi_tensor_adam() is native.multi_tensor_adam()
    plain_tex.multi_tensor_adam()(2048, flag, [[]] * 4, *STEP, 1, 1, 0.0)
    with pytest.raises(ValueError, match="mode=2"):
        native.multi_tensor_adam(2048, flag, [[]] * 4, *STEP, 2, 1, 0.0)
    with pytest.raises(ValueError, match="tensor_lists of"):
        native.multi_tensor_adam(2048, flag, [[]] * 3, *STEP, 1, 1, 0.0)


def test_dtypes_of_halves(device, flag):
    one = torch.ones(3, device=device)
    lists = [[one], [one.bfloat16()], [one], [one], [one.int()]]
    with pytest.raises(TypeError, match="low bits of torch.int32"):
        native.multi_tensor_adam_param_remainder(2048, flag, lists, *STEP, 1, 1, 0.0)


def test_reductions_of_nothing(device, flag):
    factor = torch.ones(1, device=device)
    for total, each in (
        native.multi_tensor_l2norm(2048, flag, [[]], True),
        native.multi_tensor_unscale_l2norm(2048, flag, [[]], factor, True),
    ):
        assert total.tolist() == [0.0] and each.numel() == 0
    assert native.multi_tensor_l2norm(2048, flag, [[factor]])[1].numel() == 0
    native.multi_tensor_scale(2048, flag, [[], []], 2.0)
    assert not flag.any()
    native.multi_tensor_scale_tensor(2048, flag, [[], []], factor)
    native.multi_tensor_compute_scale_inv_e8m0(2048, None, [[], []])
    assert not flag.any()


def exponent_of(amax):
    """Of amax / 448, rounded up; amax is a float, which fp16 may have rounded to 0."""
    if amax == 0.0:
        return 0
    mantissa, exponent = math.frexp(amax / 448)
    return min(max(exponent - (mantissa == 0.5) + 127, 0), 254)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_amaxes_in_e8m0(device, dtype):
    amaxes = [
        torch.rand(n, device=device).mul(2.0 ** (n % 29 - 14)).to(dtype) for n in range(1, 40)
    ]
    amaxes += [torch.tensor(448.0 * 2.0**n, device=device, dtype=dtype) for n in range(-9, 8)]
    amaxes += [torch.tensor([[0.0, math.inf, math.nan]], device=device, dtype=dtype)]
    scales = [torch.full_like(amax, 77, dtype=torch.uint8) for amax in amaxes]
    native.multi_tensor_compute_scale_inv_e8m0(2048, None, [amaxes, scales])
    for amax, scale in zip(amaxes[:-1], scales, strict=False):
        assert scale.view(-1).tolist() == [exponent_of(each) for each in amax.view(-1).tolist()]
    assert scales[-1].tolist() == [[0, 254, 255]]


def test_scales_in_e8m0_that_can_not_be(device):
    call, amax = native.multi_tensor_compute_scale_inv_e8m0, torch.ones(3, device=device)
    with pytest.raises(ValueError, match=r"2 scales of torch.uint8 for 3 amaxes"):
        call(2048, None, [[amax], [amax[:2].byte()]])
    with pytest.raises(ValueError, match=r"3 scales of torch.float32 for 3 amaxes"):
        call(2048, None, [[amax], [amax]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_are_of_unscaled_values(device, flag, dtype):
    """The squares of the scaled ones are Inf, or 0."""
    for power in (80, -80):
        plain = [torch.randn(n, device=device).to(dtype) for n in (1, 700, 3001)]
        scaled = [each * 2.0**power for each in plain]
        factor = torch.full((1,), 2.0**-power, device=device)
        total, each = native.multi_tensor_unscale_l2norm(2048, flag, [scaled], factor, True)
        exact = torch.stack([t.double().norm() for t in plain])
        for found, right in ((each, exact), (total, exact.norm().view(1))):
            assert_within(found, right, right, depth=32)  # the longest sum in fp32
        assert not flag.any()
    scaled[1][5] = torch.nan
    native.multi_tensor_unscale_l2norm(2048, flag, [scaled], factor)
    assert flag.item() == 1
