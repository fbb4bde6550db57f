# SPDX-License-Identifier: Apache-2.0
"""An input, a layer and a call of it in FP8, for tests of programs' mistakes."""

import torch

import transformer_engine.pytorch as te


def x(device, *shape, **options):
    return torch.randn(*(shape or (8, 32)), device=device, **options)


def linear(device, **options):
    return te.Linear(32, 32, device=device, **options)


def fp8(device, module, *inputs, recipe=None):
    with te.autocast(recipe=recipe):
        return module(*inputs)
