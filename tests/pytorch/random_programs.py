# SPDX-License-Identifier: Apache-2.0
"""What random programs of calls are made of: where a call stands, and how it is made."""

import contextlib
import random

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

DELAYED, CURRENT = DelayedScaling(amax_history_len=3), Float8CurrentScaling()
MODES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "saved hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}
REGIONS = {
    "none": contextlib.nullcontext,
    "delayed": lambda: te.autocast(recipe=DELAYED),
    "current": lambda: te.autocast(recipe=CURRENT),
    "disabled": lambda: te.autocast(enabled=False),
    "calibrating": lambda: te.autocast(enabled=False, calibrating=True, recipe=DELAYED),
}
CALLS = {
    "direct": lambda f, x: f(x),
    "own": lambda f, x: te.checkpoint(f, x),
    "own, hooked": lambda f, x: te.checkpoint(f, x, use_reentrant=False),
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
    "torch, hooked": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
}


def steps_of(seed, draw, fresh, length=24):
    """(random numbers, step) of a program: ``draw(rng)`` makes a step with probability `fresh`.

    Else the one before comes again, so that calls are found.
    """
    rng, step = random.Random(seed), None
    for _ in range(length):
        if step is None or rng.random() < fresh:
            step = draw(rng)
        yield rng, step
