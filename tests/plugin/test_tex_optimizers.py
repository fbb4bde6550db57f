# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and reductions of `transformer_engine_torch`: no tensors, refusals."""

import pytest
import torch
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
