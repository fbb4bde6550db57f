# SPDX-License-Identifier: Apache-2.0
"""What tests of the operators of `transformer_engine_torch` share."""

import pytest
import torch
from comparators import assert_bits, assert_nmse
from tols import BF16, E4M3, F16, F32, PASSED_ON, tol

import transformer_engine.pytorch.tensor as tensors
from transformer_engine.plugin.core import get_manager, get_registry

IMPLEMENTATIONS = ("default.native", "reference.torch")
HIGH = (F32, F16, BF16)


class Operators:
    """Operators by name, of one implementation."""

    def __init__(self, impl_id):
        self.impl_id = impl_id

    def __getattr__(self, name):
        get_manager().ensure_initialized()
        found = get_registry().get_implementation(name, self.impl_id)
        assert found is not None, f"{name} has no {self.impl_id}"
        return found.fn


each_implementation = pytest.mark.parametrize(
    "tex", [pytest.param(Operators(name), id=name) for name in IMPLEMENTATIONS]
)


def assert_near(actual, exact, depth=1, what=""):
    """Within a few roundings to the dtype and those of fp32 sums, of float64 values."""
    assert actual.shape == exact.shape, f"{what}: {actual.shape}, expected {exact.shape}"
    bound = PASSED_ON * (tol("round", actual.dtype) + tol("sum", F32, depth)) + tol("gelu", F32)
    assert_nmse(actual, exact, bound, what)


def quantizers(device):
    """One quantizer of each format, by name."""
    scale = torch.full((1,), 3.0, device=device)
    amax = torch.zeros(1, device=device)
    return {
        "delayed": tensors.Float8Quantizer(scale, amax, E4M3),
        "current": tensors.Float8CurrentScalingQuantizer(E4M3),
        "tiles": tensors.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        "mxfp8": tensors.MXFP8Quantizer(E4M3),
        "nvfp4": tensors.NVFP4Quantizer(),
    }


FORMATS = ("delayed", "current", "tiles", "mxfp8", "nvfp4")


def assert_same_data(found, expected):
    """Quantized tensors with the same bits in all their parts."""
    assert type(found) is type(expected) and found.shape == expected.shape
    assert found.dtype == expected.dtype
    for one, other in zip(found.get_data_tensors(), expected.get_data_tensors(), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_bits(one, other)
