# SPDX-License-Identifier: Apache-2.0
"""What looks like a mistake in a program for `torch.nn`, and does what its author meant."""

import copy
import io

import pytest
import torch
from pytorch.helpers import counted
from pytorch.small_calls import fp8, linear, x

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

CURRENT = recipes.Float8CurrentScaling


def moved(device):
    """A model that is made on the CPU and moved, FP8 state and all."""
    module = te.Linear(32, 32, device="cpu")
    fp8("cpu", module, torch.randn(8, 32))
    return fp8(device, module.to(device), x(device))


def copied_in_a_region(device):
    module = linear(device)
    with te.autocast():
        module(x(device))
        return copy.deepcopy(module)(x(device))


def saved_whole(device):
    module = linear(device)
    fp8(device, module, x(device))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return fp8(device, torch.load(file, weights_only=False), x(device))


def backward_in_the_region(device):
    module = linear(device)
    with te.autocast():
        out = module(x(device))
        out.sum().backward()
    assert module.weight.grad is not None
    return out


WORKS = {
    "sizes of no multiple of 16": lambda d: fp8(d, te.Linear(7, 5, device=d), x(d, 3, 7)),
    "no rows": lambda d: fp8(d, linear(d), x(d, 0, 32)),
    "one row without a batch": lambda d: fp8(d, linear(d), x(d, 32)),
    "an input that is not contiguous": lambda d: fp8(d, linear(d), x(d, 32, 8).t()),
    "an expanded input": lambda d: fp8(d, linear(d), x(d, 1, 32).expand(8, 32)),
    "no bias": lambda d: fp8(d, linear(d, bias=False), x(d)),
    "half under torch.autocast": lambda d: torch.autocast(d, torch.bfloat16)(linear(d))(x(d)),
    "a disabled region": lambda d: te.autocast(enabled=False)(linear(d).forward)(x(d)),
    "a frozen layer": lambda d: fp8(d, linear(d).requires_grad_(False), x(d)),
    "inference mode": lambda d: torch.inference_mode()(linear(d))(x(d)),
    "a module that moved": moved,
    "a copy inside a region": copied_in_a_region,
    "a module that was saved whole": saved_whole,
    "a backward inside the region": backward_in_the_region,
    "torch.nn's norm arguments by name": lambda d: te.LayerNorm(
        (32,), eps=1e-6, elementwise_affine=True, bias=False, device=d, dtype=torch.float32
    )(x(d)),
    "RMSNorm(eps=None)": lambda d: te.RMSNorm(32, eps=None, device=d)(x(d)),
    "a decorated method": lambda d: te.autocast(recipe=CURRENT())(linear(d).forward)(x(d)),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_works(name, device):
    with counted() as gemms:
        out = WORKS[name](device)
    assert out.isfinite().all()
    assert gemms.fp8 + gemms.other > 0 or "orm" in name or name == "no rows"
